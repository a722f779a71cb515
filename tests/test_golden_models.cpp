// The model against values that others computed: transformers in double on tiny random models (tests/golden), and a
// double-precision reference on a trained model (../shared/data/tiny_models).
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json_file.h"
#include "rollout/rollout.h"
#include "tests/program.h"
#include "tests/tiny.h"
#include "tests/weights.h"
#include "tokenizer/tokenizer.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kGolden = "tests/golden/", kTrained = "../shared/data/tiny_models/";
constexpr double kLogprobTolerance = 2e-5, kGradientTolerance = 1e-4;  // of fp32 against double

struct Computed {
  std::vector<std::vector<double>> logprobs, entropies;  // of each token after the first
  double loss = 0;                                       // mean over all predicted tokens of -log p
  std::vector<double> gradients;                         // of it
};

Computed compute(const std::string& folder, const std::vector<std::vector<int32_t>>& sequences,
                 const Table& table = table_cpu, DType dtype = DType::f32) {
  const ModelConfig config = load_model_config(folder);
  World w(table, config, dtype);
  w.model.set_parameters(load_weights(folder, config));
  Learner learner(w.model, w.gradients, w.optimizer, w.activations, {});
  std::vector<Group> groups;
  for (const auto& ids : sequences) groups.push_back({{}, {{ids}}});
  TokenTerms terms(loss_row_offsets(groups).back());
  const double weight = 1 / static_cast<double>(terms.weight.size());
  std::fill(terms.weight.begin(), terms.weight.end(), weight);
  const TokenOuts out = learner.accumulate(groups, terms, {.policy = PolicyLoss::nll});
  Computed c;
  for (size_t i = 0; i < sequences.size(); i++) {
    const auto logprob = out.of(out.logprob, i), entropy = out.of(out.entropy, i);
    c.logprobs.emplace_back(logprob.begin(), logprob.end());
    c.entropies.emplace_back(entropy.begin(), entropy.end());
    for (const double x : logprob) c.loss -= x * weight;
  }
  c.gradients = learner.gradients();
  return c;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); i++) ASSERT_NEAR(got[i], want[i], tolerance) << what << ", token " << i + 1;
}

// Relative L2 distance, tensor by tensor.
void expect_near_gradients(const std::string& folder, const std::vector<double>& got, const std::vector<double>& want,
                           double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (const Parameter& p : parameters(load_model_config(folder))) {
    double difference = 0, norm = 0;
    for (int64_t i = p.offset; i < p.offset + p.size; i++) {
      difference += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
    EXPECT_GT(norm, 0) << p.name;
    EXPECT_LE(std::sqrt(difference), tolerance * std::sqrt(norm)) << folder << ' ' << p.name;
  }
}

// The tensors of a file in the order of parameters().
std::vector<double> read_gradients(const std::string& folder, const std::string& path) {
  std::vector<double> all;
  SafetensorsFile file(path);
  const std::vector<Parameter> layout = parameters(load_model_config(folder));
  EXPECT_EQ(file.tensors().size(), layout.size()) << path;
  for (const Parameter& p : layout) {
    const SafetensorsTensor* t = file.find(p.name);
    if (!t || t->shape != p.shape) {
      ADD_FAILURE() << path << ": " << p.name;
      return {};
    }
    std::vector<float> values(static_cast<size_t>(p.size));
    file.read_f32(*t, values.data());
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

struct Golden {
  explicit Golden(const std::string& path) : document(read_json_file(path)) {
    for (const json& s : document["sequences"]) {
      ids.push_back(s.contains("ids") ? s["ids"] : s["tokens"]);
      logprobs.push_back(s["logprobs"]);
    }
  }
  json document;
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<double>> logprobs;
};

// ---- transformers ------------------------------------------------------------------------------------------------

class Transformers : public testing::TestWithParam<std::string> {
 protected:
  const std::string folder_ = kGolden + GetParam();
  const Golden golden_{folder_ + "/golden.json"};
};

TEST_P(Transformers, TheFastTable) {
  const Computed c = compute(folder_, golden_.ids);
  for (size_t i = 0; i < golden_.ids.size(); i++)
    expect_near(c.logprobs[i], golden_.logprobs[i], kLogprobTolerance, folder_);
  EXPECT_NEAR(c.loss, golden_.document["loss"].get<double>(), kLogprobTolerance);
  expect_near_gradients(folder_, c.gradients, read_gradients(folder_, folder_ + "/golden_grads.safetensors"),
                        kGradientTolerance);
}

// In double nothing is left but the definition, and the attention scale and the eps of norms, which ops take as floats.
TEST_P(Transformers, TheReferenceInDouble) {
  const Computed c = compute(folder_, golden_.ids, table_ref, DType::f64);
  for (size_t i = 0; i < golden_.ids.size(); i++) expect_near(c.logprobs[i], golden_.logprobs[i], 1e-6, folder_);
  EXPECT_NEAR(c.loss, golden_.document["loss"].get<double>(), 1e-6);
  expect_near_gradients(folder_, c.gradients, read_gradients(folder_, folder_ + "/golden_grads.safetensors"), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Golden, Transformers, testing::Values("qwen2", "qwen3", "llama31"),
                         [](const auto& info) { return info.param; });

// Their rounding to BF16 has no golden values of its own: `ref` in double is the oracle.
TEST(GoldenShards, TheFastTableAgreesWithTheReference) {
  const std::string folder = kGolden + "qwen2_bf16_shards";
  const Golden golden(kGolden + "qwen2/golden.json");
  const Computed c = compute(folder, golden.ids), r = compute(folder, golden.ids, table_ref, DType::f64);
  double largest = 0;
  for (size_t i = 0; i < golden.ids.size(); i++) {
    expect_near(c.logprobs[i], r.logprobs[i], kLogprobTolerance, folder);
    for (size_t t = 0; t < c.logprobs[i].size(); t++)
      largest = std::max(largest, std::abs(c.logprobs[i][t] - golden.logprobs[i][t]));
  }
  expect_near_gradients(folder, c.gradients, r.gradients, kGradientTolerance);
  EXPECT_GT(largest, 1e-3);  // not the model that was not rounded
  EXPECT_LT(largest, 0.5);
}

TEST(GoldenShards, ASavedModelLoadsToTheSameBits) {
  const fs::path saved = fs::path(testing::TempDir()) / "pare_golden_saved";
  fs::remove_all(saved);
  for (const auto& [name, dtype] : std::vector<std::pair<std::string, DType>>{
           {"qwen2", DType::f32}, {"qwen3", DType::f32}, {"llama31", DType::f32}, {"qwen2_bf16_shards", DType::bf16}}) {
    const std::string folder = kGolden + name;
    const ModelConfig config = load_model_config(folder);
    World w(table_cpu, config);
    w.model.set_parameters(load_weights(folder, config));
    save_weights(saved, config, w.model.get_parameters(), dtype, true);
    EXPECT_EQ(to_json(load_model_config(saved)), to_json(config)) << name;
    EXPECT_EQ(load_weights(saved, config), load_weights(folder, config)) << name;
  }
  fs::remove_all(saved);
}

// The same through the program's door, where a file of gradients and printed numbers lie between.
using GoldenProgram = Program;
TEST_F(GoldenProgram, LogprobsAndGradients) {
  for (const std::string name : {"qwen2", "qwen3", "llama31"}) {
    const std::string folder = kGolden + name;
    const Golden golden(folder + "/golden.json");
    std::string lines;
    for (const auto& ids : golden.ids) lines += json{{"ids", ids}}.dump() + "\n";
    const std::string ids = write("ids.jsonl", lines), gradients = at(name + ".safetensors");
    const Outcome o = run("logprobs --model " + folder + " --ids " + ids + " --grads " + gradients);
    ASSERT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.err, "");
    // What is printed are all digits: the program and the library give the same numbers.
    const Computed c = compute(folder, golden.ids);
    std::istringstream out(o.out);
    std::string line;
    for (size_t i = 0; i < golden.ids.size(); i++) {
      ASSERT_TRUE(std::getline(out, line)) << o.out;
      const std::vector<double> logprobs = json::parse(line)["logprobs"];
      EXPECT_EQ(logprobs, c.logprobs[i]);
      double loss = 0;
      for (double x : golden.logprobs[i]) loss -= x / static_cast<double>(golden.logprobs[i].size());
      EXPECT_NEAR(json::parse(line)["loss"].get<double>(), loss, kLogprobTolerance);
    }
    EXPECT_FALSE(std::getline(out, line)) << line;
    EXPECT_EQ(read_gradients(folder, gradients), c.gradients);
    expect_near_gradients(folder, c.gradients, read_gradients(folder, folder + "/golden_grads.safetensors"),
                          kGradientTolerance);
    // Without --grads only the forward runs, in other micro-batches: the same numbers.
    EXPECT_EQ(run("logprobs --max-rows 40 --model " + folder + " --ids " + ids).out, o.out);
  }
}

// ---- models of others --------------------------------------------------------------------------------------------

class Trained : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    if (!fs::exists(folder_)) GTEST_SKIP() << folder_ << " is not on this machine";
    golden_.emplace(folder_ + "/" + std::get<1>(GetParam()));
  }
  const std::string folder_ = kTrained + std::get<0>(GetParam());
  std::optional<Golden> golden_;
};

TEST_P(Trained, GreedyTextIsExact) {
  const ModelConfig config = load_model_config(folder_);
  World w(table_cpu, config);
  w.model.set_parameters(load_weights(folder_, config));
  const std::vector<int32_t>& want = golden_->ids[0];
  ASSERT_EQ(golden_->document["sequences"][0]["kind"], "greedy");
  const auto length = static_cast<int>(want.size());
  Arena kv("kv");
  Rollout rollout(w.model, {.max_sequences = 3, .max_batched_tokens = 16, .max_context = length}, kv, w.activations);
  // From BOS alone, and from the middle of the text.
  for (const int prompt : {1, 37}) {
    const Request request{{want.begin(), want.begin() + prompt}, {1, 2}, length - prompt};
    const auto completions = rollout.generate({request}, {.temperature = 0, .eos = config.eos_ids});
    ASSERT_EQ(completions.size(), 2u);
    for (const Completion& c : completions)
      EXPECT_EQ(c.tokens, std::vector<int32_t>(want.begin() + prompt, want.end())) << "after " << prompt << " tokens";
  }
  const json& text = golden_->document["sequences"][0];
  if (text.contains("text")) {
    EXPECT_EQ(make_tokenizer(folder_)->decode(want), text["text"].get<std::string>());
  }
}

TEST_P(Trained, LogprobsAndEntropies) {
  const Computed c = compute(folder_, golden_->ids);
  for (size_t i = 0; i < golden_->ids.size(); i++) {
    expect_near(c.logprobs[i], golden_->logprobs[i], kLogprobTolerance, folder_);
    expect_near(c.entropies[i], golden_->document["sequences"][i]["entropy"], 2 * kLogprobTolerance, folder_);
  }
}

TEST_P(Trained, DirectionalDerivatives) {
  const json& grad = golden_->document["grad"];
  const std::vector<int32_t>& ids = golden_->ids[grad["sequence_index"].get<size_t>()];
  const Computed fast = compute(folder_, {ids}), exact = compute(folder_, {ids}, table_ref, DType::f64);
  EXPECT_NEAR(fast.loss, grad["loss"].get<double>(), kLogprobTolerance);
  EXPECT_NEAR(exact.loss, grad["loss"].get<double>(), 1e-6);
  const std::vector<Parameter> layout = parameters(load_model_config(folder_));
  ASSERT_EQ(grad["directional_derivatives"].size(), layout.size());
  for (const json& d : grad["directional_derivatives"]) {
    const auto p = std::find_if(layout.begin(), layout.end(), [&](const auto& q) { return q.name == d["tensor"]; });
    ASSERT_NE(p, layout.end()) << d["tensor"];
    const auto along = [&](const std::vector<double>& g) {
      double sum = 0;
      for (int64_t i = 0; i < p->size; i++)
        sum += g[p->offset + i] * (static_cast<double>(static_cast<uint32_t>(i * 2654435761)) / 2147483648.0 - 1);
      return sum;
    };
    double norm = 0;
    for (int64_t i = p->offset; i < p->offset + p->size; i++) norm += exact.gradients[i] * exact.gradients[i];
    norm = std::sqrt(norm);
    // The directions have entries of root mean square 1/sqrt(3), so an error of the gradient that is not aligned with
    // them reaches the derivative with about its norm.
    const double want = d["dL_dv"], error = d["richardson_err"];
    EXPECT_NEAR(along(exact.gradients), want, error + 1e-7 * norm) << p->name;
    EXPECT_NEAR(along(fast.gradients), want, error + 1e-5 * norm) << p->name << " of norm " << norm;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, Trained,
                         testing::Values(std::tuple("stories260k", "golden_visible.json"),
                                         std::tuple("mini_qwen2", "golden.json")),
                         [](const auto& info) { return std::get<0>(info.param); });

// What transformers saved in BF16, untied, with eos in generation_config.json: it loads and runs.
TEST(VerlArithmetic, RandomWeightsPredictNothing) {
  const std::string folder = kTrained + "verl_arith_llama";
  if (!fs::exists(folder)) GTEST_SKIP() << folder << " is not on this machine";
  const ModelConfig config = load_model_config(folder);
  EXPECT_FALSE(config.tied);
  EXPECT_EQ(config.eos_ids, std::vector<int32_t>{1});
  Rng rng(rng_key(1, RngStream::test, 2));
  const Computed c = compute(folder, {random_ids(rng, 67, config.vocab)});
  EXPECT_NEAR(c.loss, std::log(static_cast<double>(config.vocab)), 0.1);
}

}  // namespace
}  // namespace pare::test
