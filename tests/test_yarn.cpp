// YaRN against transformers (tools/make_yarn_golden.py), and keys that its attention factor has scaled.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json_file.h"
#include "model/hf/folder.h"
#include "tests/generator.h"
#include "tests/program.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

json golden() { return read_json_file("tests/golden/yarn.json"); }
json qwen25() { return golden()["tables"][0]["config"]; }

TEST(Yarn, FrequenciesAndFactorsAreThoseOfTransformers) {
  const json tables = golden()["tables"];
  ASSERT_EQ(tables.size(), 6u);
  for (const json& row : tables) {
    const ModelConfig c = parse_model_config(row["config"], "c.json");
    ASSERT_TRUE(c.yarn) << row["config"];
    EXPECT_NEAR(c.attention_factor(), row["attention_factor"].get<double>(), 1e-12) << row["config"];
    const std::vector<double> found = rope_inv_freq(c), expected = row["inv_freq"];
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); i++)
      EXPECT_NEAR(found[i] / expected[i], 1, 1e-6) << row["config"] << " pair " << i;
    const ModelConfig again = parse_model_config(to_json(c), "saved.json");
    EXPECT_EQ(again.yarn, c.yarn);
    EXPECT_EQ(again.max_position, c.max_position);
  }
}

class YarnModels : public Program {};

TEST_F(YarnModels, LogProbsAreThoseOfTransformers) {
  const json models = golden()["models"];
  ASSERT_EQ(models.size(), 2u);
  for (const auto& [name, model] : models.items()) {
    fs::create_directories(at(name));
    write(name + "/config.json", model["config"].dump());
    fs::copy_file("tests/golden/" + name + "/model.safetensors", at(name + "/model.safetensors"));
    const ModelConfig config = load_model_config(at(name));
    World w(table_cpu, config);
    w.model.set_parameters(load_weights(at(name), config));
    for (const json& row : model["sequences"]) {
      const TokenOuts out = Learner::logprobs(w.model, w.activations, {{{}, {{row["ids"]}}}}, 1, {});
      const std::vector<double> expected = row["logprobs"];
      ASSERT_EQ(out.logprob.size(), expected.size());
      for (size_t i = 0; i < expected.size(); i++) EXPECT_NEAR(out.logprob[i], expected[i], 2e-5) << name << ' ' << i;
    }
  }
}

TEST(Yarn, AModelHasThePositionsItIsExtendedTo) {
  json j = qwen25();
  EXPECT_EQ(parse_model_config(j, "c.json").max_position, 131072);
  j["max_position_embeddings"] = 200000;
  EXPECT_EQ(parse_model_config(j, "c.json").max_position, 200000);
  EXPECT_EQ(parse_model_config(golden()["tables"][1]["config"], "c.json").max_position, 131072);
}

TEST(Yarn, WrongSettingsAreNamed) {
  const auto refused = [](const char* key, const json& value, std::initializer_list<const char*> parts) {
    json j = qwen25();
    (j.contains(key) ? j : j["rope_scaling"])[key] = value;
    try {
      parse_model_config(j, "c.json");
      ADD_FAILURE() << key << " = " << value;
    } catch (const Error& e) {
      for (const char* part : parts) EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  refused("factor", nullptr, {"factor", "missing"});
  refused("factor", 0.5, {"factor", "at least 1"});
  refused("factor", "4", {"factor", "positive number"});
  refused("factor", 1e9, {"factor", "positions"});
  refused("attention_factor", 0, {"attention_factor", "positive"});
  refused("attention_factor", true, {"attention_factor"});
  refused("beta_fast", 0.5, {"beta_fast", "at least", "beta_slow"});
  refused("beta_slow", -1, {"beta_slow", "positive"});
  refused("truncate", 1, {"truncate", "true or false"});
  refused("mscale_all_dims", 1, {"mscale_all_dims", "not known"});
  refused("low_freq_factor", 1, {"low_freq_factor", "not known"});
  refused("rope_theta", 1, {"rope_theta", "above 1"});
}

ModelConfig with_factor(double factor) {
  ModelConfig c = config();
  c.yarn = RopeYarn{.factor = 4, .original_max_position_embeddings = 40, .attention_factor = factor, .beta_fast = 8};
  return c;
}

TEST(Yarn, KeysInACacheAreTurnedWithoutTheFactor) {
  World plain(table_cpu, with_factor(1)), scaled(table_cpu, with_factor(1.5));
  EXPECT_EQ(plain.model.rope.data, plain.model.rotation.data);
  const auto values = [](const Tensor& t) { return std::span(t.as<float>(), static_cast<size_t>(t.size())); };
  const auto rope = values(scaled.model.rope), rotation = values(scaled.model.rotation), one = values(plain.model.rope);
  for (size_t i = 0; i < one.size(); i++) {
    ASSERT_EQ(rotation[i], one[i]);
    ASSERT_NEAR(rope[i], 1.5f * one[i], 2e-7);
  }
}

// A factor of 2 is norms of queries and keys of twice the size, exactly: also where keys are turned again in the cache.
TEST(Yarn, TheFactorIsThatOfTheNorms) {
  const ModelConfig c = with_factor(1);
  std::vector<float> twice = tiny_parameters(c, 5);
  for (const Parameter& p : parameters(c))
    for (int64_t i = p.offset; i < p.offset + p.size; i++)
      if (p.name.ends_with("q_norm.weight") || p.name.ends_with("k_norm.weight")) twice[i] *= 2;
  KvSpec merged;
  merged.method = KvMethod::h2o;
  merged.merge.method = KvMergeMethod::d2o;
  merged.merge.keys = MergeKeys::unrotated;
  for (KvSpec spec : {KvSpec(), merged}) {
    spec.evict.budget = 11;
    spec.evict.buffer = 5;
    spec.window.size = 3;
    spec.evict.prompt = KvPrompt::compress;
    RolloutLimits limits = kRoomy;
    limits.kv = spec;
    Generator of_norms(table_cpu, c, limits), of_yarn(table_cpu, with_factor(2), limits);
    of_norms.model.set_parameters(twice);
    const auto a = of_norms.rollout.generate(mixed_requests(), mixed_sampling());
    const auto b = of_yarn.rollout.generate(mixed_requests(), mixed_sampling());
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); i++) {
      EXPECT_EQ(a[i].tokens, b[i].tokens);
      EXPECT_EQ(a[i].logprobs, b[i].logprobs);
    }
  }
}

TEST_F(YarnModels, ARunOf131072PositionsIsPlanned) {
  write("config.json", qwen25().dump());
  const auto planned = [&](const char* prompt) {
    return run(cat("plan grpo model.config=", at("config.json"),
                   " --device cuda --memory 80GB data.train_batch_size=1 ",
                   "rollout.n=2 data.max_response_length=130000 data.max_prompt_length=", prompt));
  };
  const Outcome most = planned("1072"), more = planned("1073");
  EXPECT_EQ(most.code, 0) << most.err;
  EXPECT_NE(more.err.find("131073 is more than the model's 131072 positions"), std::string::npos) << more.err;
}

}  // namespace
}  // namespace pare::test
