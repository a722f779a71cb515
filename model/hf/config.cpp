#include "model/hf/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "base/error.h"
#include "base/foreign_file.h"
#include "base/hub_cache.h"
#include "base/json_file.h"

namespace pare {

using nlohmann::json;

namespace {

// Limits that keep every product of sizes within int64 and every position within int32.
constexpr int64_t max_width = int64_t{1} << 20, max_vocab = int64_t{1} << 24, max_layers = 4096,
                  max_positions = std::numeric_limits<int32_t>::max();

// Keys written by transformers (4.37 to 5) and tools around it that do not affect the arithmetic of training:
// provenance, storage types, labels of classifiers, and defaults of generate(), which do not apply here.
const std::set<std::string> harmless_keys = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cls_token_id",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_window_layers",
    "min_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
};

// Keys that change the arithmetic, with the one value that leaves it alone.
const json neutral_values = {
    {"add_cross_attention", false}, {"attention_dropout", 0},       {"hidden_act", "silu"},
    {"is_decoder", false},          {"is_encoder_decoder", false},  {"mlp_bias", false},
    {"partial_rotary_factor", 1},   {"pretraining_tp", 1},          {"pruned_heads", json::object()},
    {"rope_interleaved", false},    {"tie_encoder_decoder", false}, {"use_mrope", false},
    {"use_sliding_window", false},
};

// A model type, its class, and the defaults of transformers 5.24 for absent keys; of those for the weights' shapes,
// which every file has, absence is an error.
struct ModelClass {
  const char *type, *architecture;
  bool qkv_bias, qk_norm;
  int64_t kv_heads, head_dim;  // 0: as many as heads; hidden / heads
  int64_t max_position;
  int32_t eos, bos;  // -1: none
};
constexpr ModelClass classes[] = {
    {"qwen2", "Qwen2ForCausalLM", true, false, 32, 0, 32768, -1, -1},
    {"qwen3", "Qwen3ForCausalLM", false, true, 32, 128, 32768, -1, -1},
    {"llama", "LlamaForCausalLM", false, false, 0, 0, 2048, 2, 1},
    {"mistral", "MistralForCausalLM", false, false, 8, 0, 131072, 2, 1},
};

// Types that look like one of those, and what differs.
constexpr std::pair<const char*, const char*> other_types[] = {
    {"ernie4_5", "its rotary pairs are neighbours"},
    {"gemma", "it scales the embeddings and adds 1 to the weights of its norms"},
    {"granite", "it has multipliers of embeddings, attention, residuals and logits"},
    {"helium", "its rotary pairs are neighbours"},
    {"ministral", "some of its layers have a sliding window"},
    {"ministral3", "it scales queries by their positions"},
    {"mixtral", "it has experts"},
    {"phi3", "its q, k and v, and gate and up, are one matrix each"},
    {"qwen2_moe", "it has experts"},
    {"qwen3_moe", "it has experts"},
    {"seed_oss", "it trains with dropout in its residuals"},
    {"smollm3", "some of its layers have no rotary positions"},
};

// Returns the class of a type that check_type accepts.
const ModelClass& class_of(const std::string& type) {
  const ModelClass* m = classes;
  while (m->type != type) expect(++m < std::end(classes), "no model is of the type ", type);
  return *m;
}

bool is_integer(const json& value, int64_t low, int64_t high) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(max_positions)) return false;
  return value.is_number_integer() && value.get<int64_t>() >= low && value.get<int64_t>() <= high;
}

// Reads keys of one object and remembers which; null counts as absent.
class Reader {
 public:
  Reader(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fail(where_, ": expected a JSON object, found ", shown(object));
  }

  const std::string& where() const { return where_; }

  // A key that is null is not absent.
  bool absent(const std::string& key) const { return !object_.contains(key); }

  // Returns the value, or nullptr if the key is absent or null.
  const json* get(const std::string& key) {
    known_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }

  int64_t integer(const std::string& key, int64_t low, int64_t high, std::optional<int64_t> fallback = {}) {
    const json* value = get(key);
    if (!value) {
      if (!fallback) missing(key);
      return *fallback;
    }
    if (!is_integer(*value, low, high)) wrong(key, *value, cat("an integer from ", low, " to ", high));
    return value->get<int64_t>();
  }

  double positive(const std::string& key, std::optional<double> fallback = {}) {
    const json* value = get(key);
    if (!value) {
      if (!fallback) missing(key);
      return *fallback;
    }
    if (!value->is_number() || !(value->get<double>() > 0) || !std::isfinite(value->get<double>()))
      wrong(key, *value, "a positive number");
    return value->get<double>();
  }

  bool boolean(const std::string& key, bool fallback) {
    const json* value = get(key);
    if (!value) return fallback;
    if (!value->is_boolean()) wrong(key, *value, "true or false");
    return value->get<bool>();
  }

  std::string text(const std::string& key) {
    const json* value = get(key);
    if (!value) missing(key);
    if (!value->is_string()) wrong(key, *value, "a string");
    return value->get<std::string>();
  }

  void must_be(const std::string& key, const json& neutral) {
    const json* value = get(key);
    if (value && *value != neutral) unsupported(key, *value, cat("only ", shown(neutral)));
  }

  void refuse_unread(const std::set<std::string>& harmless) {
    for (const auto& [key, value] : object_.items())
      if (!value.is_null() && !known_.contains(key) && !harmless.contains(key))
        fail(where_, ": key ", json(key).dump(), " = ", shown(value),
             " is not known here and may change the arithmetic; remove it if it does not");
  }

  [[noreturn]] void missing(const std::string& key) { fail(where_, ": key \"", key, "\" is missing"); }
  [[noreturn]] void wrong(const std::string& key, const json& value, const std::string& expected) {
    fail(where_, ": key \"", key, "\" = ", shown(value), ", expected ", expected);
  }
  [[noreturn]] void unsupported(const std::string& key, const json& value, const std::string& supported) {
    fail(where_, ": key \"", key, "\" = ", shown(value), " is not supported (", supported, ")");
  }

 private:
  static std::string shown(const json& value) {
    std::string s = value.dump();
    if (s.size() > 80) s = s.substr(0, 77) + "...";
    return s;
  }

  const json& object_;
  std::string where_;
  std::set<std::string> known_;
};

struct Rope {
  std::optional<double> theta;
  std::optional<RopeLlama3> llama3;
  std::optional<RopeYarn> yarn;
  bool scales_like(const Rope& o) const { return llama3 == o.llama3 && yarn == o.yarn; }
};

RopeLlama3 read_llama3(Reader& in) {
  RopeLlama3 r;
  r.factor = in.positive("factor");
  r.low_freq_factor = in.positive("low_freq_factor");
  r.high_freq_factor = in.positive("high_freq_factor");
  r.original_max_position_embeddings = in.positive("original_max_position_embeddings");
  if (r.low_freq_factor >= r.high_freq_factor)
    in.wrong("low_freq_factor", r.low_freq_factor, cat("less than \"high_freq_factor\", ", r.high_freq_factor));
  return r;
}

// As transformers 5.24 (_compute_yarn_parameters).
RopeYarn read_yarn(Reader& in, const ModelConfig& c) {
  RopeYarn r;
  r.factor = in.positive("factor");
  if (r.factor < 1) in.wrong("factor", r.factor, "at least 1");
  r.original_max_position_embeddings =
      in.positive("original_max_position_embeddings", static_cast<double>(c.max_position));
  r.beta_fast = in.positive("beta_fast", 32);
  r.beta_slow = in.positive("beta_slow", 1);
  if (r.beta_fast < r.beta_slow) in.wrong("beta_fast", r.beta_fast, cat("at least \"beta_slow\", ", r.beta_slow));
  r.truncate = in.boolean("truncate", true);
  const auto scale = [&](double m) { return 0.1 * m * std::log(r.factor) + 1; };
  const bool both = in.get("mscale") && in.get("mscale_all_dim");
  const double inferred = both ? scale(in.positive("mscale")) / scale(in.positive("mscale_all_dim")) : scale(1);
  r.attention_factor = in.positive("attention_factor", inferred);
  return r;
}

// `object` is rope_scaling (transformers 4) or rope_parameters (5): a kind under "rope_type" or, older, "type".
Rope parse_rope(const json& object, const std::string& where, const ModelConfig& c) {
  Reader in(object, where);
  const json* kind = in.get("rope_type");
  const json* older = in.get("type");
  if (kind && older && *kind != *older) in.wrong("type", *older, cat("the value of \"rope_type\", ", kind->dump()));
  if (!kind) kind = older;
  Rope rope;
  if (in.get("rope_theta")) rope.theta = in.positive("rope_theta");
  in.must_be("partial_rotary_factor", 1);
  if (kind && *kind == "llama3")
    rope.llama3 = read_llama3(in);
  else if (kind && *kind == "yarn")
    rope.yarn = read_yarn(in, c);
  else if (kind && *kind != "default")
    in.unsupported(in.get("rope_type") ? "rope_type" : "type", *kind, "only \"default\", \"llama3\" and \"yarn\"");
  else if (!kind && !rope.theta)
    in.missing("rope_type");
  in.refuse_unread({});
  return rope;
}

// Sets the number of positions to which YaRN extends a model; files state this number or the original one.
void extend_positions(Reader& in, ModelConfig& c) {
  if (c.rope_theta <= 1) in.wrong("rope_theta", c.rope_theta, "above 1 with YaRN");
  const double positions = std::round(c.yarn->factor * c.yarn->original_max_position_embeddings);
  if (positions > static_cast<double>(max_positions))
    fail(in.where(), ": \"factor\" = ", c.yarn->factor,
         " and \"original_max_position_embeddings\" = ", c.yarn->original_max_position_embeddings, " make more than ",
         max_positions, " positions");
  c.max_position = std::max(c.max_position, static_cast<int64_t>(positions));
}

void read_rope(Reader& in, ModelConfig& c) {
  const json* theta = in.get("rope_theta");
  Rope rope;
  if (theta) rope.theta = in.positive("rope_theta");
  const json* scaling = in.get("rope_scaling");
  const json* parameters = in.get("rope_parameters");
  std::optional<Rope> seen;
  for (const auto& [key, value] : {std::pair("rope_scaling", scaling), std::pair("rope_parameters", parameters)}) {
    if (!value) continue;
    const Rope r = parse_rope(*value, cat(in.where(), ", in \"", key, "\""), c);
    if (r.theta && rope.theta && *r.theta != *rope.theta)
      fail(in.where(), ": \"rope_theta\" is given twice, as ", *rope.theta, " and as ", *r.theta);
    if (seen && !seen->scales_like(r))
      fail(in.where(), ": \"rope_scaling\" and \"rope_parameters\" contradict each other");
    if (r.theta) rope.theta = r.theta;
    rope.llama3 = r.llama3;
    rope.yarn = r.yarn;
    seen = r;
  }
  c.rope_theta = rope.theta.value_or(1e4);
  c.rope_scaling = rope.llama3;
  c.yarn = rope.yarn;
  if (c.yarn) extend_positions(in, c);
}

// An integer, a list of integers, or null; `absent` if there is no such key.
std::vector<int32_t> read_eos(Reader& in, const std::vector<int32_t>& absent = {}) {
  const json* value = in.get("eos_token_id");
  if (!value) return in.absent("eos_token_id") ? absent : std::vector<int32_t>();
  const json list = value->is_array() ? *value : json::array({*value});
  std::vector<int32_t> ids;
  for (const json& id : list) {
    if (!is_integer(id, 0, max_vocab - 1)) in.wrong("eos_token_id", *value, "a token id or a list of token ids");
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

void read_attention_shape(Reader& in, ModelConfig& c) {
  const ModelClass& m = class_of(c.model_type);
  c.heads = in.integer("num_attention_heads", 1, max_width);
  const bool of_class = m.kv_heads > 0 && in.absent("num_key_value_heads");
  c.kv_heads = of_class ? m.kv_heads : in.integer("num_key_value_heads", 1, c.heads, c.heads);
  if (c.heads % c.kv_heads)
    fail(in.where(), ": \"num_attention_heads\" = ", c.heads,
         " is not a multiple of \"num_key_value_heads\" = ", c.kv_heads,
         of_class ? cat(", which is absent: ", c.kv_heads, " is the default of ", c.model_type, " in transformers")
                  : "");
  if (m.head_dim == 0 && !in.get("head_dim") && c.hidden % c.heads)
    fail(in.where(), ": \"head_dim\" is absent and \"hidden_size\" = ", c.hidden,
         " is not a multiple of \"num_attention_heads\" = ", c.heads);
  c.head_dim = in.integer("head_dim", 1, max_width, m.head_dim ? m.head_dim : c.hidden / c.heads);
  if (c.head_dim % 2) fail(in.where(), ": the head dimension is ", c.head_dim, "; rotary positions need an even one");
  if (c.q_width() > max_width)
    fail(in.where(), ": ", c.heads, " heads of ", c.head_dim, " are wider than the ", max_width, " supported");
}

void check_type(Reader& in, const std::string& type) {
  std::string supported, why;
  for (const ModelClass& m : classes) {
    if (m.type == type) return;
    supported += cat(&m == classes ? "only " : ", ", m.type);
  }
  for (const auto& [name, differs] : other_types)
    if (type == name) why = cat("; ", differs);
  in.unsupported("model_type", type, supported + why);
}

// Checks the keys that must have one value for the arithmetic implemented here.
void refuse_other_arithmetic(Reader& in, const ModelConfig& c) {
  const ModelClass& m = class_of(c.model_type);
  for (const auto& [key, value] : neutral_values.items()) in.must_be(key, value);
  in.must_be("attention_bias", m.qkv_bias);
  const json* window = in.get("sliding_window");  // Qwen files give a size and leave use_sliding_window false
  if (window && !m.qkv_bias && !m.qk_norm) in.unsupported("sliding_window", *window, "only null");
  if (c.model_type == "mistral" && in.absent("sliding_window"))
    fail(in.where(), ": \"sliding_window\" is absent, which is 4096 in transformers; only null is supported");
  if (const json* types = in.get("layer_types")) {
    if (!types->is_array() || static_cast<int64_t>(types->size()) != c.layers)
      in.wrong("layer_types", *types, cat("a list of ", c.layers, " names"));
    for (const json& type : *types)
      if (type != "full_attention") in.unsupported("layer_types", type, "only \"full_attention\" in every layer");
  }
  if (const json* names = in.get("architectures"); names && *names != json::array({m.architecture}))
    in.unsupported("architectures", *names, cat("only [\"", m.architecture, "\"]"));
}

// Returns the shortest decimal number that rounds to this float: 1e-6f is written as 1e-06.
double shortest(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  double result = 0;
  std::from_chars(text, end, result);
  return result;
}

}  // namespace

ModelConfig parse_model_config(const json& object, const std::string& where) {
  Reader in(object, where);
  ModelConfig c;
  c.model_type = in.text("model_type");
  check_type(in, c.model_type);
  const ModelClass& m = class_of(c.model_type);
  c.qkv_bias = m.qkv_bias;
  c.qk_norm = m.qk_norm;
  c.hidden = in.integer("hidden_size", 1, max_width);
  c.layers = in.integer("num_hidden_layers", 1, max_layers);
  c.ffn = in.integer("intermediate_size", 1, max_width);
  c.vocab = in.integer("vocab_size", 1, max_vocab);
  read_attention_shape(in, c);
  c.max_position = in.integer("max_position_embeddings", 1, max_positions, m.max_position);
  c.rms_eps = static_cast<float>(in.positive("rms_norm_eps", 1e-6));
  c.tied = in.boolean("tie_word_embeddings", false);
  c.initializer_range = in.positive("initializer_range", 0.02);
  c.eos_ids = read_eos(in, m.eos >= 0 ? std::vector<int32_t>{m.eos} : std::vector<int32_t>());
  c.bos_id =
      in.absent("bos_token_id") ? m.bos : static_cast<int32_t>(in.integer("bos_token_id", -1, max_vocab - 1, -1));
  c.pad_id = static_cast<int32_t>(in.integer("pad_token_id", -1, max_vocab - 1, -1));
  read_rope(in, c);
  refuse_other_arithmetic(in, c);
  in.refuse_unread(harmless_keys);
  return c;
}

// Throws an Error that says what to do if `path` is no Hugging Face folder.
static void check_model_folder(const std::string& path) {
  namespace fs = std::filesystem;
  if (fs::is_regular_file(path)) {
    const std::string foreign = foreign_model_file(path);
    fail(path, ": ",
         foreign.empty() ? "is a file; expected the folder that holds config.json and safetensors" : foreign);
  }
  if (!fs::is_directory(path)) {
    if (const std::string how = how_to_download(path); !how.empty()) fail(path, ": ", how);
    fail(path, ": no such directory; expected a Hugging Face model");
  }
  if (fs::exists(path + "/config.json") || fs::exists(path + "/adapter_config.json")) return;
  if (fs::exists(path + "/config.toml") && fs::exists(path + "/model/config.json"))
    fail(path, ": is a run; its model is ", path, "/model");
  for (const auto& entry : fs::directory_iterator(path))
    if (entry.is_regular_file())
      if (const std::string foreign = foreign_model_file(entry.path().string()); !foreign.empty())
        fail(entry.path().string(), ": ", foreign);
  fail(path, ": has no config.json; expected a Hugging Face model");
}

ModelConfig load_model_config(const std::string& directory) {
  check_model_folder(directory);
  const std::string path = directory + "/config.json";
  if (const std::string adapter = directory + "/adapter_config.json";
      std::filesystem::exists(adapter) && !std::filesystem::exists(path)) {
    const json object = read_json_file(adapter);
    const json* base = Reader(object, adapter).get("base_model_name_or_path");
    fail(directory, ": is an adapter of the model ", base && base->is_string() ? base->get<std::string>() : "?",
         "; give that, and this folder as --adapter (model.lora.adapter_path)");
  }
  ModelConfig config = parse_model_config(read_json_file(path), path);
  const std::string generation = directory + "/generation_config.json";
  if (std::filesystem::exists(generation)) {
    const json object = read_json_file(generation);
    Reader in(object, generation);
    if (const std::vector<int32_t> ids = read_eos(in); !ids.empty()) config.eos_ids = ids;
  }
  return config;
}

json to_json(const ModelConfig& c) {
  const ModelClass& m = class_of(c.model_type);
  json j = {
      {"architectures", {m.architecture}},
      {"attention_dropout", 0.0},
      {"head_dim", c.head_dim},
      {"hidden_act", "silu"},
      {"hidden_size", c.hidden},
      {"initializer_range", c.initializer_range},
      {"intermediate_size", c.ffn},
      {"max_position_embeddings", c.max_position},
      {"model_type", c.model_type},
      {"num_attention_heads", c.heads},
      {"num_hidden_layers", c.layers},
      {"num_key_value_heads", c.kv_heads},
      {"rms_norm_eps", shortest(c.rms_eps)},
      {"rope_scaling", nullptr},
      {"rope_theta", c.rope_theta},
      {"tie_word_embeddings", c.tied},
      {"use_cache", true},
      {"vocab_size", c.vocab},
  };
  if (c.model_type == "llama" || c.qk_norm) j["attention_bias"] = false;
  if (c.model_type == "llama") j["mlp_bias"] = false;
  if (c.qkv_bias || c.qk_norm) j["use_sliding_window"] = false;
  if (c.model_type == "mistral") j["sliding_window"] = nullptr;
  if (c.rope_scaling) {
    const RopeLlama3& r = *c.rope_scaling;
    j["rope_scaling"] = {{"rope_type", "llama3"},
                         {"factor", r.factor},
                         {"low_freq_factor", r.low_freq_factor},
                         {"high_freq_factor", r.high_freq_factor},
                         {"original_max_position_embeddings", r.original_max_position_embeddings}};
  }
  if (c.yarn) {
    const RopeYarn& r = *c.yarn;
    j["rope_scaling"] = {{"rope_type", "yarn"},
                         {"factor", r.factor},
                         {"attention_factor", r.attention_factor},
                         {"beta_fast", r.beta_fast},
                         {"beta_slow", r.beta_slow},
                         {"original_max_position_embeddings", r.original_max_position_embeddings}};
    if (!r.truncate) j["rope_scaling"]["truncate"] = false;
  }
  if (!j["rope_scaling"].is_null()) {
    // transformers checks that this one is an integer
    json& original = j["rope_scaling"]["original_max_position_embeddings"];
    if (const double positions = original; std::floor(positions) == positions)
      original = static_cast<int64_t>(positions);
  }
  j["bos_token_id"] = c.bos_id < 0 ? json() : json(c.bos_id);
  j["pad_token_id"] = c.pad_id < 0 ? json() : json(c.pad_id);
  j["eos_token_id"] = c.eos_ids.empty() ? json() : c.eos_ids.size() == 1 ? json(c.eos_ids[0]) : json(c.eos_ids);
  return j;
}

}  // namespace pare
