// Checkpoints of llama2.c.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/rng.h"
#include "model/hf/llama2c.h"

namespace pare {
namespace {

using Header = std::array<int32_t, 7>;
// dim 12, ffn 5, 2 layers, 3 heads of 4, 1 kv head, vocabulary 7, 11 positions; 7 < 0: lm_head of its own
constexpr Header kTied{12, 5, 2, 3, 1, 7, 11}, kUntied{12, 5, 2, 3, 1, -7, 11};
constexpr int64_t kFloats = 7 * 12 + 2 * (12 + 12 * 12 + 2 * 4 * 12 + 12 * 12 + 12 + 3 * 5 * 12) + 12 + 11 * 4;

class Llama2c : public testing::Test {
 protected:
  ~Llama2c() override { std::filesystem::remove(path_); }

  // A file whose float i is i + 1.
  std::string write(const Header& header, int64_t floats, size_t cut = 0) {
    std::string bytes(reinterpret_cast<const char*>(header.data()), sizeof header);
    for (int64_t i = 0; i < floats; i++) {
      const float value = static_cast<float>(i + 1);
      bytes.append(reinterpret_cast<const char*>(&value), 4);
    }
    bytes.resize(bytes.size() - cut);
    std::ofstream(path_, std::ios::binary) << bytes;
    return path_;
  }
  void expect_error(const Header& header, int64_t floats, const char* says, size_t cut = 0) {
    try {
      load_llama2c(write(header, floats, cut));
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      const std::string what = e.what();
      EXPECT_NE(what.find(path_), std::string::npos) << what;
      EXPECT_NE(what.find(says), std::string::npos) << "\"" << says << "\" in: " << what;
    }
  }

  const std::string path_ =
      testing::TempDir() + "pare_" + testing::UnitTest::GetInstance()->current_test_info()->name() + ".bin";
};

std::map<std::string, std::vector<float>> tensors_of(const Llama2cCheckpoint& checkpoint) {
  std::map<std::string, std::vector<float>> tensors;
  for (const Parameter& p : parameters(checkpoint.config)) {
    const auto begin = checkpoint.weights.begin() + p.offset;
    tensors[p.name] = std::vector<float>(begin, begin + p.size);
  }
  return tensors;
}

TEST_F(Llama2c, ReadsTheConfig) {
  const ModelConfig c = load_llama2c(write(kTied, kFloats)).config;
  EXPECT_EQ(c.model_type, "llama");
  EXPECT_EQ(c.hidden, 12);
  EXPECT_EQ(c.ffn, 5);
  EXPECT_EQ(c.layers, 2);
  EXPECT_EQ(c.heads, 3);
  EXPECT_EQ(c.kv_heads, 1);
  EXPECT_EQ(c.head_dim, 4);
  EXPECT_EQ(c.vocab, 7);
  EXPECT_EQ(c.max_position, 11);
  EXPECT_EQ(c.rms_eps, 1e-5f);
  EXPECT_EQ(c.rope_theta, 1e4);
  EXPECT_TRUE(c.tied);
  EXPECT_EQ(c.bos_id, 1);
  EXPECT_EQ(c.eos_ids, (std::vector<int32_t>{1, 2}));
  EXPECT_FALSE(load_llama2c(write(kUntied, kFloats + 7 * 12)).config.tied);
}

TEST_F(Llama2c, PutsTensorsInTheirPlaces) {
  auto t = tensors_of(load_llama2c(write(kUntied, kFloats + 7 * 12)));
  // First element of each tensor: its place in the file, counted by hand.
  const std::map<std::string, float> first{{"model.embed_tokens.weight", 1},
                                           {"model.layers.0.input_layernorm.weight", 85},
                                           {"model.layers.1.input_layernorm.weight", 97},
                                           {"model.layers.0.self_attn.q_proj.weight", 109},
                                           {"model.layers.1.self_attn.q_proj.weight", 253},
                                           {"model.layers.0.self_attn.k_proj.weight", 397},
                                           {"model.layers.1.self_attn.k_proj.weight", 445},
                                           {"model.layers.0.self_attn.v_proj.weight", 493},
                                           {"model.layers.1.self_attn.v_proj.weight", 541},
                                           {"model.layers.0.self_attn.o_proj.weight", 589},
                                           {"model.layers.1.self_attn.o_proj.weight", 733},
                                           {"model.layers.0.post_attention_layernorm.weight", 877},
                                           {"model.layers.1.post_attention_layernorm.weight", 889},
                                           {"model.layers.0.mlp.gate_proj.weight", 901},
                                           {"model.layers.1.mlp.gate_proj.weight", 961},
                                           {"model.layers.0.mlp.down_proj.weight", 1021},
                                           {"model.layers.1.mlp.down_proj.weight", 1081},
                                           {"model.layers.0.mlp.up_proj.weight", 1141},
                                           {"model.layers.1.mlp.up_proj.weight", 1201},
                                           {"model.norm.weight", 1261},
                                           {"lm_head.weight", 1273 + 44}};
  ASSERT_EQ(t.size(), first.size());
  for (const auto& [name, value] : first) {
    EXPECT_EQ(t.at(name)[0], value) << name;
    if (name.find("q_proj") == std::string::npos && name.find("k_proj") == std::string::npos) {
      for (size_t i = 0; i < t.at(name).size(); i++) EXPECT_EQ(t.at(name)[i], value + static_cast<float>(i)) << name;
    }
  }
}

// Scores q.k at positions m and n are the same: neighbours turned in the file's order, halves in ours.
TEST_F(Llama2c, RotaryRowsTurnTheSameWay) {
  write(kTied, kFloats);
  auto t = tensors_of(load_llama2c(path_));
  const auto from_file = [](float first, int64_t rows) {
    std::vector<float> w(static_cast<size_t>(rows * 12));
    for (size_t i = 0; i < w.size(); i++) w[i] = first + static_cast<float>(i);
    return w;
  };
  std::array<double, 12> x;
  Rng rng(rng_key(1, RngStream::test, 0));
  for (double& v : x) v = rng.normal() * 1e-3;
  const auto turned = [&](const std::vector<float>& w, int head, int position, bool halves) {
    std::array<double, 4> y{}, r{};
    for (int d = 0; d < 4; d++) {
      for (int c = 0; c < 12; c++) y[d] += static_cast<double>(w[static_cast<size_t>((head * 4 + d) * 12 + c)]) * x[c];
    }
    for (int i = 0; i < 2; i++) {
      const double angle = position * std::pow(1e4, -2.0 * i / 4);
      const int a = halves ? i : 2 * i, b = halves ? i + 2 : 2 * i + 1;
      r[a] = y[a] * std::cos(angle) - y[b] * std::sin(angle);
      r[b] = y[b] * std::cos(angle) + y[a] * std::sin(angle);
    }
    return r;
  };
  for (int head = 0; head < 3; head++) {
    double file = 0, ours = 0;
    const auto q0 = turned(from_file(253, 12), head, 9, false), k0 = turned(from_file(445, 4), 0, 2, false);
    const auto q1 = turned(t.at("model.layers.1.self_attn.q_proj.weight"), head, 9, true);
    const auto k1 = turned(t.at("model.layers.1.self_attn.k_proj.weight"), 0, 2, true);
    for (int d = 0; d < 4; d++) {
      file += q0[d] * k0[d];
      ours += q1[d] * k1[d];
    }
    EXPECT_NEAR(file, ours, 1e-9 * std::abs(file));
    EXPECT_GT(std::abs(file), 1e-3);
  }
}

TEST_F(Llama2c, BrokenFilesAreErrors) {
  for (size_t cut : {1u, 3u, 4u, 400u}) expect_error(kTied, kFloats, "expected 1316 floats", cut);
  expect_error(kTied, kFloats + 1, "expected 1316 floats");
  expect_error(kUntied, kFloats, "expected 1400 floats");
  expect_error(kTied, 0, "not a llama2.c checkpoint", 1);
  expect_error(kTied, 0, "not a llama2.c checkpoint", sizeof(Header));
  for (size_t i : {0u, 1u, 2u, 3u, 4u, 6u}) {
    for (int32_t value : {0, -1, (1 << 20) + 1, INT32_MAX, INT32_MIN}) {
      Header header = kTied;
      header[i] = value;
      expect_error(header, 3, "in its header");
    }
  }
  for (int32_t vocab : {0, INT32_MIN}) {
    Header header = kTied;
    header[5] = vocab;
    expect_error(header, 3, "vocabulary");
  }
  expect_error({12, 5, 2, 5, 1, 7, 11}, kFloats, "heads");
  expect_error({12, 5, 2, 4, 1, 7, 11}, kFloats, "heads");  // a head of odd width
  expect_error({12, 5, 2, 3, 2, 7, 11}, kFloats, "heads");
  constexpr int32_t kLarge = 1 << 20;
  expect_error({kLarge, kLarge, kLarge, 2, 1, INT32_MAX, kLarge}, 3, "floats");
  expect_error({0x616b3432, 1, 2, 3, 1, 7, 11}, 3, "version 1");
  EXPECT_THROW(load_llama2c(path_ + ".none"), Error);
  EXPECT_THROW(load_llama2c(testing::TempDir()), Error);
}

// The same model as others converted it.
TEST(Stories260k, EqualsItsHuggingFaceFolder) {
  const std::string directory = "../shared/data/tiny_models/stories260k/";
  if (!std::filesystem::exists(directory)) GTEST_SKIP() << directory << " is not on this machine";
  const Llama2cCheckpoint checkpoint = load_llama2c(directory + "checkpoint_legacy.bin");
  auto ours = tensors_of(checkpoint);
  std::ifstream in(directory + "model.safetensors", std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  uint64_t length = 0;
  ASSERT_GT(bytes.size(), 8u);
  std::memcpy(&length, bytes.data(), 8);
  auto header = nlohmann::json::parse(bytes.substr(8, length));
  header.erase("__metadata__");
  EXPECT_EQ(header.size(), ours.size());
  for (const auto& [name, entry] : header.items()) {
    ASSERT_EQ(entry["dtype"], "F32");
    const uint64_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    ASSERT_EQ(end - begin, ours.at(name).size() * 4) << name;
    EXPECT_EQ(std::memcmp(bytes.data() + 8 + length + begin, ours.at(name).data(), end - begin), 0) << name;
  }
  const auto config = nlohmann::json::parse(std::ifstream(directory + "config.json"));
  const ModelConfig& c = checkpoint.config;
  EXPECT_EQ(c.hidden, config["hidden_size"]);
  EXPECT_EQ(c.ffn, config["intermediate_size"]);
  EXPECT_EQ(c.layers, config["num_hidden_layers"]);
  EXPECT_EQ(c.heads, config["num_attention_heads"]);
  EXPECT_EQ(c.kv_heads, config["num_key_value_heads"]);
  EXPECT_EQ(c.head_dim, config["head_dim"]);
  EXPECT_EQ(c.vocab, config["vocab_size"]);
  EXPECT_EQ(c.max_position, config["max_position_embeddings"]);
  EXPECT_EQ(c.tied, config["tie_word_embeddings"].get<bool>());
  EXPECT_FLOAT_EQ(c.rms_eps, config["rms_norm_eps"].get<float>());
  EXPECT_EQ(c.rope_theta, config["rope_theta"]);
}

}  // namespace
}  // namespace pare
