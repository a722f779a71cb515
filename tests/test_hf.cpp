// model/hf: model folders saved by transformers and by us; indexes and shards; what is refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/half.h"
#include "base/json_file.h"
#include "base/text.h"
#include "model/hf/tensor_files.h"
#include "tests/weights.h"

namespace pare {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::load_weights, test::save_weights;

const char* const golden_models[] = {"qwen2", "qwen3", "llama31"};
std::string golden(const std::string& name) { return "tests/golden/" + name; }

class Hf : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) / cat("pare_hf", getpid());
    fs::remove_all(root_);
    fs::create_directories(root_);
    config_ = parse_model_config({{"model_type", "qwen2"},
                                  {"hidden_size", 6},
                                  {"intermediate_size", 5},
                                  {"num_hidden_layers", 1},
                                  {"num_attention_heads", 3},
                                  {"num_key_value_heads", 1},
                                  {"vocab_size", 7},
                                  {"tie_word_embeddings", true}},
                                 "test");
    const Parameter last = parameters(config_).back();
    for (int64_t i = 0; i < last.offset + last.size; i++) weights_.push_back(0.25f * static_cast<float>(i) - 11);
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string dir(const std::string& name = "model") const { return root_ / name; }
  std::vector<NamedTensor> named() const {
    std::vector<NamedTensor> list;
    for (const Parameter& p : parameters(config_))
      list.push_back({p.name, p.shape, values_at(weights_.data() + p.offset)});
    return list;
  }
  void write_single(const std::vector<NamedTensor>& tensors) const {
    fs::create_directories(dir());
    write_safetensors(dir() + "/model.safetensors", tensors, DType::f32);
  }
  std::string refusal() const {
    try {
      load_weights(dir(), config_);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
  void expect_refusal(const std::string& part) const {
    EXPECT_NE(refusal().find(part), std::string::npos) << part << " not in: " << refusal();
  }
  size_t entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(root_), fs::directory_iterator()));
  }

  fs::path root_;
  ModelConfig config_;
  std::vector<float> weights_;
};

// Each tensor of the file must lie at its place of the layout.
TEST_F(Hf, LoadsWhatTransformersSaved) {
  for (const std::string name : golden_models) {
    const ModelConfig config = load_model_config(golden(name));
    const std::vector<float> weights = load_weights(golden(name), config);
    SafetensorsFile file(golden(name) + "/model.safetensors");
    EXPECT_EQ(file.tensors().size(), parameters(config).size());
    for (const Parameter& p : parameters(config)) {
      std::vector<float> values(static_cast<size_t>(p.size));
      file.read_f32(*file.find(p.name), values.data());
      EXPECT_TRUE(std::equal(values.begin(), values.end(), weights.begin() + p.offset)) << name << " " << p.name;
    }
    std::vector<SafetensorsFile> gradients;
    gradients.emplace_back(golden(name) + "/golden_grads.safetensors");
    EXPECT_EQ(match_weights(gradients, config).size(), parameters(config).size());
  }
  const ModelConfig llama = load_model_config(golden("llama31"));
  ASSERT_TRUE(llama.rope_scaling);
  EXPECT_EQ(llama.rope_scaling->original_max_position_embeddings, 32);
  EXPECT_EQ(llama.rope_theta, 500);
  EXPECT_EQ(llama.eos_ids, (std::vector<int32_t>{95, 96}));
  EXPECT_EQ(load_model_config(golden("qwen3")).head_dim, 14);
}

TEST_F(Hf, LoadsBf16Shards) {
  const ModelConfig config = load_model_config(golden("qwen2"));
  std::vector<float> rounded = load_weights(golden("qwen2"), config);
  for (float& w : rounded) w = bf16_to_f32(f32_to_bf16(w));
  EXPECT_GT(open_weights(golden("qwen2_bf16_shards")).size(), 1u);
  EXPECT_EQ(hf_dtype(golden("qwen2_bf16_shards"), config), DType::bf16);
  EXPECT_EQ(load_weights(golden("qwen2_bf16_shards"), load_model_config(golden("qwen2_bf16_shards"))), rounded);
}

TEST_F(Hf, SavedModelReadsBack) {
  for (const std::string name : golden_models) {
    const ModelConfig config = load_model_config(golden(name));
    std::vector<float> weights = load_weights(golden(name), config);
    save_weights(dir(name), config, weights, DType::f32);
    EXPECT_EQ(to_json(load_model_config(dir(name))), to_json(config));
    EXPECT_EQ(load_weights(dir(name), config), weights);
    EXPECT_EQ(read_json_file(dir(name) + "/config.json")["torch_dtype"], "float32");
    EXPECT_EQ(hf_dtype(dir(name), config), DType::f32);
    save_weights(dir(name) + "/", config, weights, DType::f16, true);
    std::vector<float> rounded = weights;
    for (float& w : rounded) w = f16_to_f32(f32_to_f16(w));
    EXPECT_EQ(load_weights(dir(name), config), rounded);
    EXPECT_EQ(read_json_file(dir(name) + "/config.json")["torch_dtype"], "float16");
    EXPECT_EQ(hf_dtype(dir(name), config), DType::f16);
    save_weights(dir(name) + "/", config, weights, DType::bf16, true);
    for (float& w : weights) w = bf16_to_f32(f32_to_bf16(w));
    EXPECT_EQ(load_weights(dir(name), config), weights);
    EXPECT_EQ(read_json_file(dir(name) + "/config.json")["torch_dtype"], "bfloat16");
    EXPECT_EQ(hf_dtype(dir(name), config), DType::bf16);
  }
  EXPECT_EQ(entries(), 3u);
}

TEST_F(Hf, NeverOverwritesUnasked) {
  save_weights(dir(), config_, weights_, DType::f32);
  std::vector<float> other = weights_;
  other[0] = 99;
  EXPECT_THROW(save_weights(dir(), config_, other, DType::f32), Error);
  EXPECT_EQ(load_weights(dir(), config_), weights_);
  // what fails half way leaves the old folder and nothing else
  EXPECT_THROW(save_weights(dir(), config_, other, DType::f32, true, [](const std::string&) { fail("no"); }), Error);
  EXPECT_EQ(load_weights(dir(), config_), weights_);
  EXPECT_EQ(entries(), 1u);
  auto note = [](const std::string& folder) { std::ofstream(folder + "/note") << "x"; };
  save_weights(dir(), config_, other, DType::f32, true, note);
  EXPECT_EQ(load_weights(dir(), config_), other);
  EXPECT_TRUE(fs::exists(dir() + "/note"));
  EXPECT_EQ(entries(), 1u);
  // not ours to delete
  fs::create_directories(dir() + "/.git");
  EXPECT_THROW(save_weights(dir(), config_, weights_, DType::f32, true), Error);
  fs::create_directories(dir("home"));
  EXPECT_THROW(save_weights(dir("home"), config_, weights_, DType::f32, true), Error);
  EXPECT_TRUE(fs::exists(dir("home")));
}

TEST_F(Hf, RedundantHeadAndRotaryTablesAreIgnored) {
  auto tensors = named();
  const float table = 3;
  std::vector<float> head(weights_.begin(), weights_.begin() + 42);
  tensors.push_back({"lm_head.weight", {7, 6}, values_at(head.data())});
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {1}, values_at(&table)});
  write_single(tensors);
  EXPECT_EQ(load_weights(dir(), config_), weights_);
  tensors[tensors.size() - 2].shape = {6, 7};
  write_single(tensors);
  expect_refusal("lm_head.weight");
}

// transformers 4 takes the embedding, 5 both as they are.
TEST_F(Hf, ATiedHeadHasTheValuesOfTheEmbedding) {
  for (const size_t element : {0, 17, 41}) {
    std::vector<float> head(weights_.begin(), weights_.begin() + 42);
    head[element] += 0.125f;
    auto tensors = named();
    tensors.push_back({"lm_head.weight", {7, 6}, values_at(head.data())});
    write_single(tensors);
    expect_refusal(cat("lm_head.weight is ", head[element], " at element ", element));
    expect_refusal("tie_word_embeddings: true");
  }
}

TEST_F(Hf, WrongTensorsAreNamed) {
  expect_refusal("no such directory");
  fs::create_directories(dir());
  expect_refusal("model.safetensors");
  auto tensors = named();
  const float one = 1;
  tensors.push_back({"model.layers.1.input_layernorm.weight", {1}, values_at(&one)});
  write_single(tensors);
  expect_refusal("model.layers.1.input_layernorm.weight");
  tensors = named();
  tensors.erase(tensors.begin() + 3);
  write_single(tensors);
  expect_refusal("missing tensor model.layers.0.self_attn.k_proj.weight");
  tensors = named();
  tensors[2].shape = {4, 9};
  write_single(tensors);
  expect_refusal("model.layers.0.self_attn.q_proj.weight is [4, 9]");
  write_single(named());
  config_.tied = false;
  expect_refusal("lm_head.weight");
}

TEST_F(Hf, NonFiniteWeightsAreNamed) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Parameter p = parameters(config_)[8];
    weights_[static_cast<size_t>(p.offset + p.size - 1)] = bad;
    write_single(named());
    expect_refusal(p.name);
  }
}

TEST_F(Hf, LargeWeightsHaveSeveralFiles) {
  fs::create_directories(dir());
  for (const auto& [dtype, most, count] : {std::tuple{DType::f32, 100'000, 1},
                                           {DType::f32, 600, 2},
                                           {DType::f32, 300, 5},
                                           {DType::bf16, 150, 5},
                                           {DType::f32, 1, 14}}) {
    SCOPED_TRACE(cat("at most ", most));
    const std::vector<TensorFile> files = deal_tensors("model", named(), dtype, most);
    ASSERT_EQ(std::ssize(files), count);
    int64_t all = 0;
    int i = 0;
    for (const TensorFile& file : files) {
      EXPECT_EQ(file.name, count == 1 ? "model.safetensors" : format("model-%05d-of-%05d.safetensors", ++i, count));
      EXPECT_TRUE(is_tensor_file(file.name, "model") && !is_tensor_file(file.name, "optimizer")) << file.name;
      const auto written = static_cast<int64_t>(write_safetensors(dir() + "/" + file.name, file.tensors, dtype).bytes);
      EXPECT_TRUE(written <= most + 2000 || file.tensors.size() == 1);
      for (const NamedTensor& t : file.tensors)
        all += std::accumulate(t.shape.begin(), t.shape.end(), int64_t{1}, std::multiplies());
    }
    EXPECT_EQ(all, std::ssize(weights_));
    EXPECT_EQ(write_index(dir(), "model", files, dtype).size(), count == 1 ? 0u : 1u);
    if (count > 1) {
      EXPECT_EQ(read_json_file(dir() + "/model.safetensors.index.json")["metadata"]["total_size"],
                all * static_cast<int64_t>(dtype_size(dtype)));
    }
    EXPECT_EQ(load_weights(dir(), config_), weights_) << "a quarter of a small number has few bits";
    fs::remove(dir() + "/model.safetensors");
  }
  for (const char* name :
       {"model", "model-1-of-2.safetensors", "model-00001-of-00002", "model-00001-of-00002.safetensors.tmp",
        "optimizer.safetensors", "model.safetensors.index.json.old"})
    EXPECT_FALSE(is_tensor_file(name, "model")) << name;
}

TEST_F(Hf, BrokenIndexes) {
  const auto tensors = named();
  const std::vector<NamedTensor> first(tensors.begin(), tensors.begin() + 5),
      second(tensors.begin() + 5, tensors.end());
  fs::create_directories(dir());
  const std::string index = dir() + "/model.safetensors.index.json";
  auto write_shards = [&](const std::vector<NamedTensor>& a, const std::vector<NamedTensor>& b) {
    write_safetensors(dir() + "/one.safetensors", a, DType::f32);
    write_safetensors(dir() + "/two.safetensors", b, DType::f32);
  };
  json good = {{"metadata", {{"total_size", 1}}}};
  for (const auto& t : first) good["weight_map"][t.name] = "one.safetensors";
  for (const auto& t : second) good["weight_map"][t.name] = "two.safetensors";
  auto write_index = [&](const json& j) { std::ofstream(index) << j; };

  write_shards(first, second);
  write_index(good);
  EXPECT_EQ(load_weights(dir(), config_), weights_);

  write_safetensors(dir() + "/two.safetensors", second, DType::bf16);
  EXPECT_EQ(hf_dtype(dir(), config_), DType::f32);  // what holds both
  write_safetensors(dir() + "/one.safetensors", first, DType::bf16);
  EXPECT_EQ(hf_dtype(dir(), config_), DType::bf16);
  write_shards(first, second);

  json j = good;
  j["weight_map"][first[0].name] = "two.safetensors";
  write_index(j);
  expect_refusal(first[0].name);  // not in the named file
  for (const std::string name : {"../model/one.safetensors", "..", "", "absent.safetensors"}) {
    j = good;
    j["weight_map"][first[0].name] = name;
    write_index(j);
    expect_refusal(name);
  }
  j = good;
  j["weight_map"].erase(first[1].name);
  write_index(j);
  expect_refusal(first[1].name);  // in a file, not in the index
  for (const json& broken : {json(), json::array(), json{{"weight_map", 3}}, json{{"weight_map", {{"a", 3}}}}}) {
    write_index(broken);
    expect_refusal("index.json");
  }
  write_index(json{{"weight_map", json::object()}});
  expect_refusal("weight_map");
  std::ofstream(index) << R"({"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}})";
  expect_refusal("twice");

  write_index(good);
  auto doubled = second;
  doubled.push_back(first[2]);
  write_shards(first, doubled);
  expect_refusal(first[2].name);  // in two files
  write_shards(first, second);
  fs::resize_file(dir() + "/two.safetensors", fs::file_size(dir() + "/two.safetensors") - 1);
  expect_refusal("two.safetensors");
}

TEST_F(Hf, RealCheckpoints) {
  const fs::path shared = "../shared/data/tiny_models";
  if (!fs::exists(shared)) GTEST_SKIP() << shared << " is absent";
  for (const auto& [name, count] : std::vector<std::pair<std::string, size_t>>{
           {"stories260k", 260032}, {"verl_arith_llama", 795776}, {"mini_qwen2", 58176}}) {
    const ModelConfig config = load_model_config(shared / name);
    EXPECT_EQ(load_weights(shared / name, config).size(), count) << name;
  }
}

// The config.json files of models that are shown with random weights: the published numbers of parameters.
TEST(ModelShapes, AreThePublishedOnes) {
  const std::pair<const char*, int64_t> models[] = {
      {"qwen2.5-0.5b", 494'032'768}, {"qwen2.5-1.5b", 1'543'714'304}, {"llama-3.2-1b", 1'235'814'400}};
  for (const auto& [name, count] : models) {
    const std::string path = cat("data/presets/", name, ".json");
    const Parameter last = parameters(parse_model_config(read_json_file(path), path)).back();
    EXPECT_EQ(last.offset + last.size, count) << name;
  }
}

}  // namespace
}  // namespace pare
