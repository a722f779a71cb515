// model/config: shapes, spellings of transformers 4 and 5, what is refused, the flat layout, rotary frequencies.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_file.h"
#include "model/hf/config.h"

namespace pare {
namespace {

using nlohmann::json;

json qwen2() {
  return {{"model_type", "qwen2"},       {"architectures", {"Qwen2ForCausalLM"}},
          {"hidden_size", 12},           {"intermediate_size", 7},
          {"num_hidden_layers", 2},      {"num_attention_heads", 6},
          {"num_key_value_heads", 2},    {"vocab_size", 11},
          {"rms_norm_eps", 1e-6},        {"rope_theta", 1000000},
          {"tie_word_embeddings", true}, {"eos_token_id", 5}};
}
json llama() {
  json j = qwen2();
  j["model_type"] = "llama";
  j["architectures"] = {"LlamaForCausalLM"};
  return j;
}
json llama3_scaling() {
  return {{"rope_type", "llama3"},
          {"factor", 8.0},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

// The message of the error, which has the exit code of a user's mistake.
std::string refusal(const json& j) {
  try {
    parse_model_config(j, "c.json");
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::usage);
    return e.what();
  }
  ADD_FAILURE() << "accepted: " << j.dump();
  return "";
}

void expect_names(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_NE(message.find("c.json"), std::string::npos) << message;
}

TEST(Config, Qwen2) {
  const ModelConfig c = parse_model_config(qwen2(), "c.json");
  EXPECT_EQ(c.model_type, "qwen2");
  EXPECT_TRUE(c.qkv_bias);
  EXPECT_FALSE(c.qk_norm);
  EXPECT_TRUE(c.tied);
  EXPECT_EQ(c.head_dim, 2);
  EXPECT_EQ(c.kv_heads, 2);
  EXPECT_EQ(c.rope_theta, 1e6);
  EXPECT_FALSE(c.rope_scaling);
  EXPECT_EQ(c.rms_eps, 1e-6f);
  EXPECT_EQ(c.eos_ids, std::vector<int32_t>{5});
  EXPECT_EQ(c.bos_id, -1);
  EXPECT_EQ(c.max_position, 32768);
}

TEST(Config, Qwen3HeadDim) {
  json j = qwen2();
  j["model_type"] = "qwen3";
  j["architectures"] = {"Qwen3ForCausalLM"};
  j["head_dim"] = 10;
  const ModelConfig c = parse_model_config(j, "c.json");
  EXPECT_EQ(c.head_dim, 10);
  EXPECT_TRUE(c.qk_norm);
  EXPECT_FALSE(c.qkv_bias);
  EXPECT_EQ(c.q_width(), 60);
  EXPECT_EQ(c.qkv_width(), 100);
}

// The arithmetic of Llama, if there is no sliding window; transformers takes 4096 for an absent one.
TEST(Config, Mistral) {
  json j = llama();
  j["model_type"] = "mistral";
  j["architectures"] = {"MistralForCausalLM"};
  expect_names(refusal(j), "\"sliding_window\" is absent");
  j["sliding_window"] = 4096;
  expect_names(refusal(j), "\"sliding_window\" = 4096");
  j["sliding_window"] = nullptr;
  const ModelConfig c = parse_model_config(j, "c.json");
  EXPECT_FALSE(c.qkv_bias);
  EXPECT_FALSE(c.qk_norm);
  EXPECT_EQ(c.max_position, 131072);
  const json saved = to_json(c);
  EXPECT_EQ(saved["architectures"], json({"MistralForCausalLM"}));
  EXPECT_TRUE(saved.contains("sliding_window") && saved["sliding_window"].is_null());
  EXPECT_FALSE(saved.contains("mlp_bias"));
  EXPECT_EQ(to_json(parse_model_config(saved, "c.json")), saved);
  j["architectures"] = {"LlamaForCausalLM"};
  expect_names(refusal(j), "MistralForCausalLM");
}

TEST(Config, OtherClassesSayWhatDiffers) {
  for (const auto& [type, why] : {std::pair("smollm3", "no rotary positions"),
                                  {"phi3", "one matrix"},
                                  {"granite", "multipliers"},
                                  {"qwen3_moe", "experts"},
                                  {"gpt2", "mistral"}}) {
    json j = llama();
    j["model_type"] = type;
    const std::string what = refusal(j);
    expect_names(what, why);
    expect_names(what, "only qwen2, qwen3, llama, mistral");
  }
}

// The defaults of Qwen2Config, Qwen3Config, LlamaConfig and MistralConfig, as transformers 5.24 prints them.
TEST(Config, AbsentKeysAreTheDefaultsOfTheClass) {
  struct Row {
    const char* type;
    int64_t head_dim, kv_heads, max_position;
    std::vector<int32_t> eos;
    int32_t bos;
  };
  for (const Row& row : {Row{"qwen2", 4, 32, 32768, {}, -1}, Row{"qwen3", 128, 32, 32768, {}, -1},
                         Row{"llama", 4, 64, 2048, {2}, 1}, Row{"mistral", 4, 8, 131072, {2}, 1}}) {
    json least = {{"model_type", row.type},   {"hidden_size", 64 * 4},     {"intermediate_size", 7},
                  {"num_hidden_layers", 2},   {"num_attention_heads", 64}, {"vocab_size", 11},
                  {"sliding_window", nullptr}};
    const ModelConfig c = parse_model_config(least, "c.json");
    EXPECT_EQ(c.head_dim, row.head_dim) << row.type;
    EXPECT_EQ(c.kv_heads, row.kv_heads) << row.type;
    EXPECT_EQ(c.max_position, row.max_position) << row.type;
    EXPECT_EQ(c.eos_ids, row.eos) << row.type;
    EXPECT_EQ(c.bos_id, row.bos) << row.type;
    EXPECT_EQ(c.pad_id, -1);
    EXPECT_EQ(c.rms_eps, 1e-6f);
    EXPECT_EQ(c.rope_theta, 1e4);
    EXPECT_FALSE(c.rope_scaling);
    EXPECT_FALSE(c.tied);
    EXPECT_EQ(c.initializer_range, 0.02);
    // null where the class has it: of key/value heads as many as heads, of EOS and BOS none.
    for (const char* key : {"num_key_value_heads", "eos_token_id", "bos_token_id", "rope_scaling", "rope_parameters"})
      least[key] = nullptr;
    const ModelConfig null = parse_model_config(least, "c.json");
    EXPECT_EQ(null.kv_heads, 64) << row.type;
    EXPECT_TRUE(null.eos_ids.empty()) << row.type;
    EXPECT_EQ(null.bos_id, -1) << row.type;
    // The written text is complete.
    const ModelConfig again = parse_model_config(to_json(c), "c.json");
    EXPECT_EQ(again.head_dim, c.head_dim);
    EXPECT_EQ(again.kv_heads, c.kv_heads);
    EXPECT_EQ(again.max_position, c.max_position);
    EXPECT_EQ(again.eos_ids, c.eos_ids);
    EXPECT_EQ(again.bos_id, c.bos_id);
  }
  json few = qwen2();
  few.erase("num_key_value_heads");
  expect_names(refusal(few), "32 is the default of qwen2 in transformers");
}

// No value of any key ends in an internal error or in the words of the JSON library.
TEST(Config, WrongTypesOfEveryKeyAreNamed) {
  json all = llama();
  all.update(to_json(parse_model_config(llama(), "c.json")));
  all["rope_scaling"] = llama3_scaling();
  for (const char* key : {"sliding_window", "layer_types", "rope_parameters", "pruned_heads", "partial_rotary_factor"})
    all[key] = nullptr;
  const json values[] = {nullptr,
                         true,
                         -1,
                         0.5,
                         1e300,
                         "x",
                         "",
                         json::array(),
                         json::object(),
                         1e18,
                         json::array({nullptr}),
                         json::array({"x"}),
                         json({{"a", 1}}),
                         uint64_t{1} << 63};
  const auto tried = [](const json& j) {
    try {
      parse_model_config(j, "c.json");
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::usage) << j;
      EXPECT_EQ(std::string(e.what()).find("json.exception"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("c.json"), std::string::npos) << e.what();
    }
  };
  for (const auto& [key, was] : all.items())
    for (const json& value : values) {
      json j = all;
      j[key] = value;
      EXPECT_NO_THROW(tried(j)) << key << " = " << value;
    }
  const json scaling = llama3_scaling();
  for (const auto& [key, was] : scaling.items())
    for (const json& value : values) {
      json j = all;
      j["rope_scaling"][key] = value;
      EXPECT_NO_THROW(tried(j)) << "rope_scaling." << key << " = " << value;
    }
  for (const json& value : values) EXPECT_NO_THROW(tried(value)) << value;
}

TEST(Config, AbsentAndNullKeys) {
  json j = llama();
  for (const char* key : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"}) j.erase(key);
  for (const char* key :
       {"rope_scaling", "bos_token_id", "eos_token_id", "head_dim", "sliding_window", "quantization_config"})
    j[key] = nullptr;
  const ModelConfig c = parse_model_config(j, "c.json");
  EXPECT_EQ(c.kv_heads, 6);
  EXPECT_EQ(c.rms_eps, 1e-6f);
  EXPECT_EQ(c.rope_theta, 1e4);
  EXPECT_FALSE(c.tied);
  EXPECT_TRUE(c.eos_ids.empty());
  EXPECT_EQ(c.max_position, 2048);
  for (const char* key :
       {"model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}) {
    json without = qwen2();
    without.erase(key);
    expect_names(refusal(without), key);
  }
}

TEST(Config, RopeSpellings) {
  json four = llama();
  four["rope_theta"] = 5e5;
  four["rope_scaling"] = llama3_scaling();
  json older = four;
  older["rope_scaling"].erase("rope_type");
  older["rope_scaling"]["type"] = "llama3";
  json five = llama();
  five.erase("rope_theta");
  five["rope_parameters"] = llama3_scaling();
  five["rope_parameters"]["rope_theta"] = 5e5;
  for (const json& j : {four, older, five}) {
    const ModelConfig c = parse_model_config(j, "c.json");
    EXPECT_EQ(c.rope_theta, 5e5);
    ASSERT_TRUE(c.rope_scaling);
    EXPECT_EQ(c.rope_scaling->factor, 8);
    EXPECT_EQ(c.rope_scaling->original_max_position_embeddings, 8192);
  }
  json plain = llama();
  plain.erase("rope_theta");
  plain["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 123.0}};
  EXPECT_EQ(parse_model_config(plain, "c.json").rope_theta, 123.0);
  EXPECT_FALSE(parse_model_config(plain, "c.json").rope_scaling);
}

TEST(Config, RopeRefusals) {
  for (const char* type : {"dynamic", "linear", "mrope", "longrope"})
    for (const char* key : {"type", "rope_type"}) {
      json j = qwen2();
      j["rope_scaling"] = {{key, type}, {"factor", 4.0}};
      expect_names(refusal(j), type);
    }
  json twice = llama();
  twice["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5.0}};
  expect_names(refusal(twice), "rope_theta");
  json both = llama();
  both["rope_scaling"] = llama3_scaling();
  both["rope_parameters"] = {{"rope_type", "default"}};
  expect_names(refusal(both), "contradict");
  for (const char* key : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    json missing = llama();
    missing["rope_scaling"] = llama3_scaling();
    missing["rope_scaling"].erase(key);
    expect_names(refusal(missing), key);
    json zero = llama();
    zero["rope_scaling"] = llama3_scaling();
    zero["rope_scaling"][key] = 0;
    expect_names(refusal(zero), key);
  }
  json extra = llama();
  extra["rope_scaling"] = llama3_scaling();
  extra["rope_scaling"]["mrope_section"] = {1, 2};
  expect_names(refusal(extra), "mrope_section");
}

TEST(Config, UnsupportedArithmeticNamesTheKey) {
  const std::vector<std::pair<std::string, json>> common = {
      {"hidden_act", "gelu"},
      {"use_sliding_window", true},
      {"partial_rotary_factor", 0.5},
      {"quantization_config", {{"bits", 4}}},
      {"num_experts", 8},
      {"attention_dropout", 0.1},
      {"use_mrope", true},
      {"final_logit_softcapping", 30.0},
      {"pretraining_tp", 2},
      {"layer_types", {"full_attention", "sliding_attention"}},
      {"layer_types", {"full_attention"}},
      {"architectures", {"Qwen2ForSequenceClassification"}},
      {"model_type", "gemma"},
      {"head_dim", 3},
      {"hidden_size", 12.0},
      {"hidden_size", -12},
      {"hidden_size", 1e30},
      {"num_hidden_layers", true},
      {"num_key_value_heads", 4},
      {"num_key_value_heads", 0},
      {"vocab_size", 18446744073709551615u},
      {"rms_norm_eps", 0},
      {"rms_norm_eps", "1e-6"},
      {"tie_word_embeddings", 1},
      {"eos_token_id", "5"},
      {"eos_token_id", {1, -2}},
      {"eos_token_id", 2.0},
      {"eos_token_id", {1, 1 << 24}},
      {"bos_token_id", 1 << 24},
      {"pad_token_id", 1 << 24},
  };
  for (const auto& [key, value] : common) {
    json j = qwen2();
    j[key] = value;
    if (key == "head_dim")
      expect_names(refusal(j), "head dim");
    else
      expect_names(refusal(j), key);
  }
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{
           {"attention_bias", true}, {"mlp_bias", true}, {"sliding_window", 4096}, {"pretraining_tp", 2}}) {
    json j = llama();
    j[key] = value;
    expect_names(refusal(j), key);
  }
  json no_bias = qwen2();
  no_bias["attention_bias"] = false;
  expect_names(refusal(no_bias), "attention_bias");
  expect_names(refusal(json::array()), "object");
}

TEST(Config, HarmlessKeysAreIgnored) {
  json j = qwen2();
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, json>>{{"transformers_version", "5.1.0"},
                                                 {"torch_dtype", "bfloat16"},
                                                 {"dtype", "bfloat16"},
                                                 {"use_cache", true},
                                                 {"sliding_window", 4096},
                                                 {"use_sliding_window", false},
                                                 {"max_window_layers", 1},
                                                 {"temperature", 0.7},
                                                 {"layer_types", {"full_attention", "full_attention"}},
                                                 {"hidden_act", "silu"},
                                                 {"attention_dropout", 0.0},
                                                 {"_name_or_path", "x"},
                                                 {"use_mrope", false},
                                                 {"partial_rotary_factor", 1.0}})
    j[key] = value;
  EXPECT_EQ(to_json(parse_model_config(j, "c.json")), to_json(parse_model_config(qwen2(), "c.json")));
}

TEST(Config, WrittenConfigReadsBackTheSame) {
  json j = llama();
  j["rope_scaling"] = llama3_scaling();
  j["eos_token_id"] = {3, 1, 2};
  j["pad_token_id"] = 7;
  j["bos_token_id"] = 0;
  j["rms_norm_eps"] = 1e-5;
  j["initializer_range"] = 0.3;
  j["max_position_embeddings"] = 77;
  const ModelConfig a = parse_model_config(j, "c.json");
  const json written = to_json(a);
  EXPECT_EQ(written["rms_norm_eps"].dump(), "1e-05");
  EXPECT_EQ(written["eos_token_id"], j["eos_token_id"]);
  EXPECT_EQ(written["rope_scaling"], j["rope_scaling"]);
  const ModelConfig b = parse_model_config(written, "c.json");
  EXPECT_EQ(to_json(b), written);
  EXPECT_EQ(b.rms_eps, a.rms_eps);
  EXPECT_EQ(b.eos_ids, (std::vector<int32_t>{3, 1, 2}));
  EXPECT_EQ(b.pad_id, 7);
  EXPECT_EQ(b.bos_id, 0);
  EXPECT_EQ(b.initializer_range, 0.3);
  EXPECT_EQ(b.max_position, 77);
}

TEST(Config, GenerationConfigReplacesEos) {
  const auto directory = std::filesystem::path(testing::TempDir()) / cat("pare_generation_config", getpid());
  std::filesystem::create_directories(directory);
  auto write = [&](const char* name, const std::string& text) { std::ofstream(directory / name) << text; };
  write("config.json", qwen2().dump());
  write("generation_config.json", R"({"eos_token_id": [5, 9], "temperature": 0.7, "repetition_penalty": 1.1})");
  EXPECT_EQ(load_model_config(directory).eos_ids, (std::vector<int32_t>{5, 9}));
  write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_EQ(load_model_config(directory).eos_ids, (std::vector<int32_t>{5}));
  for (const char* wrong : {R"({"eos_token_id": "x"})", R"({"eos_token_id": [null]})", R"({"eos_token_id": {}})",
                            R"({"eos_token_id": 1.5})", "[]", "7", "{"}) {
    write("generation_config.json", wrong);
    try {
      load_model_config(directory);
      ADD_FAILURE() << wrong;
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::usage);
      EXPECT_NE(std::string(e.what()).find("generation_config.json"), std::string::npos) << e.what();
    }
  }
  std::filesystem::remove(directory / "config.json");
  for (const char* adapter :
       {"{}", R"({"base_model_name_or_path": null})", "[1]", R"({"base_model_name_or_path": 3})"}) {
    write("adapter_config.json", adapter);
    EXPECT_THROW(load_model_config(directory), Error) << adapter;
  }
  write("config.json", R"({"model_type": "qwen2", "model_type": "qwen3"})");
  EXPECT_THROW(load_model_config(directory), Error);
  write("config.json", R"({"model_type": "qwen2")");
  EXPECT_THROW(load_model_config(directory), Error);
  std::filesystem::remove_all(directory);
  EXPECT_THROW(load_model_config(directory), Error);
}

TEST(Config, LayoutOfParameters) {
  json j = qwen2();
  j["tie_word_embeddings"] = false;
  const auto list = parameters(parse_model_config(j, "c.json"));
  const std::vector<std::pair<std::string, std::vector<int64_t>>> first = {
      {"model.embed_tokens.weight", {11, 12}},
      {"model.layers.0.input_layernorm.weight", {12}},
      {"model.layers.0.self_attn.q_proj.weight", {12, 12}},
      {"model.layers.0.self_attn.k_proj.weight", {4, 12}},
      {"model.layers.0.self_attn.v_proj.weight", {4, 12}},
      {"model.layers.0.self_attn.q_proj.bias", {12}},
      {"model.layers.0.self_attn.k_proj.bias", {4}},
      {"model.layers.0.self_attn.v_proj.bias", {4}},
      {"model.layers.0.self_attn.o_proj.weight", {12, 12}},
      {"model.layers.0.post_attention_layernorm.weight", {12}},
      {"model.layers.0.mlp.gate_proj.weight", {7, 12}},
      {"model.layers.0.mlp.up_proj.weight", {7, 12}},
      {"model.layers.0.mlp.down_proj.weight", {12, 7}},
      {"model.layers.1.input_layernorm.weight", {12}},
  };
  ASSERT_EQ(list.size(), 1 + 2 * 12 + 2u);
  int64_t offset = 0;
  for (size_t i = 0; i < list.size(); i++) {
    if (i < first.size()) {
      EXPECT_EQ(list[i].name, first[i].first);
      EXPECT_EQ(list[i].shape, first[i].second);
    }
    EXPECT_EQ(list[i].offset, offset);
    int64_t size = 1;
    for (int64_t n : list[i].shape) size *= n;
    EXPECT_EQ(list[i].size, size);
    offset += size;
  }
  EXPECT_EQ(list[list.size() - 2].name, "model.norm.weight");
  EXPECT_EQ(list.back().name, "lm_head.weight");
  j["model_type"] = "qwen3";
  j["architectures"] = {"Qwen3ForCausalLM"};
  j["head_dim"] = 6;
  j["tie_word_embeddings"] = true;
  const auto three = parameters(parse_model_config(j, "c.json"));
  EXPECT_EQ(three[5].name, "model.layers.0.self_attn.q_norm.weight");
  EXPECT_EQ(three[6].name, "model.layers.0.self_attn.k_norm.weight");
  EXPECT_EQ(three[6].shape, std::vector<int64_t>{6});
  EXPECT_EQ(three[7].shape, (std::vector<int64_t>{12, 36}));
  EXPECT_EQ(three.back().name, "model.norm.weight");
}

// ---- against the shared data

json shared(const std::string& file) {
  const std::string path = "../shared/data/" + file;
  return std::filesystem::exists(path) ? read_json_file(path) : json();
}

ModelConfig config_of_shape(const json& s) {
  json j = {{"model_type", s["arch"]}};
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "tie_word_embeddings", "rope_theta", "rms_norm_eps", "max_position_embeddings"})
    j[key] = s[key];
  if (!s["rope_scaling"].is_null()) {
    j["rope_scaling"] = llama3_scaling();
    j["rope_scaling"]["factor"] = s["rope_scaling"]["factor"];
  }
  return parse_model_config(j, s["name"]);
}

TEST(Config, ShapesOfRealModels) {
  const json shapes = shared("model_shapes.json");
  if (shapes.is_null()) GTEST_SKIP() << "../shared/data is absent";
  for (const json& s : shapes) {
    const auto list = parameters(config_of_shape(s));
    EXPECT_EQ(list.size(), s["tensors"].get<size_t>()) << s["name"];
    EXPECT_EQ(list.back().offset + list.back().size, s["params"].get<int64_t>()) << s["name"];
  }
}

TEST(Config, RealConfigFiles) {
  const json shapes = shared("model_shapes.json");
  if (shapes.is_null()) GTEST_SKIP() << "../shared/data is absent";
  const std::vector<std::pair<std::string, std::string>> shape_of = {
      {"DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-1.5B"},
      {"Meta-Llama-3.1-8B", "Llama-3.1-8B"},
      {"Qwen2-1.5B-Instruct-finetune", "Qwen2.5-1.5B"},
      {"Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B"},
      {"Qwen2.5-7B-Instruct", "Qwen2.5-7B"},
      {"Qwen3-0.6B", "Qwen3-0.6B"},
      {"Qwen3-1.7B", "Qwen3-1.7B"},
      {"Qwen3-8B", "Qwen3-8B"},
      {"Llama-3.2-1B-Instruct", "Llama-3.2-1B"},
  };
  size_t compared = 0;
  for (const auto& entry : std::filesystem::directory_iterator("../shared/data/configs")) {
    const std::string file = entry.path().filename();
    if (!file.ends_with(".config.json")) continue;
    const ModelConfig c = parse_model_config(read_json_file(entry.path()), file);
    for (const auto& [prefix, name] : shape_of)
      for (const json& s : shapes)
        if (s["name"] == name && (file == prefix + ".config.json" || file == prefix + "-resaved-4.55.config.json")) {
          json expected = to_json(config_of_shape(s)), found = to_json(c);
          // fine-tunes of the same shape differ in these
          for (const char* key : {"eos_token_id", "bos_token_id", "pad_token_id", "max_position_embeddings"}) {
            expected.erase(key);
            found.erase(key);
          }
          EXPECT_EQ(found, expected) << file;
          compared++;
        }
  }
  EXPECT_GE(compared, 7u);
}

TEST(Config, RotaryFrequencies) {
  const json table = shared("rope_inv_freq.json"), shapes = shared("model_shapes.json");
  if (table.is_null()) GTEST_SKIP() << "../shared/data is absent";
  size_t compared = 0;
  for (const json& s : shapes) {
    std::string key = s["name"];
    if (key == "Qwen2.5-7B" || key == "Qwen2.5-3B" || key == "Qwen3-0.6B") key = "Qwen2.5-7B/1.5B/3B, Qwen3";
    if (key == "DeepSeek-R1-Distill-Qwen-1.5B") key += "/7B, Qwen2.5-Math";
    if (!table.contains(key)) continue;
    const auto expected = table[key].get<std::vector<double>>(), found = rope_inv_freq(config_of_shape(s));
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); i++)
      EXPECT_NEAR(found[i] / expected[i], 1, 1e-13) << s["name"] << " pair " << i;
    compared++;
  }
  EXPECT_GE(compared, table.size());
}

// The three regimes by hand: original 32, factors 1 and 4, so wavelengths up to 8 stay and above 32 are stretched.
TEST(Config, Llama3ScalingBlends) {
  json j = llama();
  j["head_dim"] = 6;
  j["rope_theta"] = 500.0;
  j["rope_scaling"] = llama3_scaling();
  j["rope_scaling"]["original_max_position_embeddings"] = 32;
  const auto f = rope_inv_freq(parse_model_config(j, "c.json"));
  ASSERT_EQ(f.size(), 3u);
  EXPECT_EQ(f[0], 1.0);                                   // wavelength 6.3
  EXPECT_NEAR(f[1], std::pow(500, -1 / 3.0) / 8, 1e-15);  // wavelength 49.9
  EXPECT_NEAR(f[2], std::pow(500, -2 / 3.0) / 8, 1e-15);
  j["head_dim"] = 12;
  const double g = std::pow(500, -1 / 6.0), keep = (32 * g / (2 * M_PI) - 1) / 3;  // wavelength 17.7
  EXPECT_NEAR(rope_inv_freq(parse_model_config(j, "c.json"))[1], keep * g + (1 - keep) * g / 8, 1e-15);
}

}  // namespace
}  // namespace pare
