// THE key table: the meaning of every configuration key, once.  Types and defaults are those of the members (config.h).
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "run/config.h"

namespace pare {
namespace {

// What a value may be: a range of numbers, or one of some words.
struct Allowed {
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
  bool low_open = false, high_open = false;  // the bound itself is not allowed
  std::vector<std::string> words = {};
};
const Allowed any{};
Allowed at_least(double low) { return {.low = low}; }
Allowed within(double low, double high) { return {.low = low, .high = high}; }
Allowed count(double low) { return within(low, 1e9); }  // of things that memory holds: sums and products stay exact
Allowed above(double low) { return {.low = low, .low_open = true}; }
Allowed above_to(double low, double high) { return {.low = low, .high = high, .low_open = true}; }
Allowed from_below(double low, double high) { return {.low = low, .high = high, .high_open = true}; }
Allowed one_of(std::vector<std::string> words) { return {.words = std::move(words)}; }

std::string number_text(double x) {
  std::array<char, 32> s;
  const std::string t(s.data(), std::to_chars(s.data(), s.data() + s.size(), x).ptr);
  return t.find_first_of(".e") == std::string::npos ? t + ".0" : t;
}
std::string number_text(int64_t x) { return std::to_string(x); }

std::string range_text(const Allowed& a) {
  std::string s;
  if (std::isfinite(a.low)) s += cat(a.low_open ? " > " : " >= ", a.low);
  if (std::isfinite(a.high)) s += cat(s.empty() ? "" : " and", a.high_open ? " < " : " <= ", a.high);
  return s;
}

template <class Words, class Text>
std::string join(const Words& words, const char* between, Text text) {
  std::string s;
  for (const auto& w : words) s += (s.empty() ? "" : between) + text(w);
  return s;
}
std::string found_text(const TomlItem& item) {
  const std::string s = join(item.values, ", ", [](const TomlValue& v) {
    return v.kind == TomlValue::Kind::string ? toml_quote(v.text) : v.text;
  });
  return item.array ? "[" + s + "]" : s.empty() ? "nothing" : s;
}

// ---- words of enums ------------------------------------------------------------------------------------------------

template <class E>
struct Word {
  const char* text;
  E value;
};
template <class E>
constexpr std::array<Word<E>, 0> words_of;
#define WORDS(Enum, ...)                             \
  template <>                                        \
  constexpr auto words_of<Enum> = [] {               \
    using enum Enum;                                 \
    return std::to_array<Word<Enum>>({__VA_ARGS__}); \
  }();
// clang-format off
WORDS(Init, {"config", config}, {"fan_in", fan_in})
WORDS(ActType, {"auto", automatic}, {"f32", f32}, {"bf16", bf16})
WORDS(SaveType, {"auto", automatic}, {"f32", f32}, {"bf16", bf16}, {"f16", f16})
WORDS(DeviceKind, {"cpu", cpu}, {"cuda", cuda}, {"emu", emu})
WORDS(AdvEstimator, {"grpo", grpo}, {"rloo", rloo})
WORDS(AdvStd, {"sample", sample}, {"population", population})
WORDS(LossAgg, {"token-mean", token_mean}, {"seq-mean-token-mean", seq_mean_token_mean},
      {"group-token-mean", group_token_mean}, {"seq-mean-token-sum", seq_mean_token_sum},
      {"seq-mean-token-sum-norm", seq_mean_token_sum_norm})
WORDS(LossDenominator, {"valid", valid}, {"kept", kept})
WORDS(TokenSubset, {"none", none}, {"urs", urs}, {"rpc", rpc}, {"det", det})
WORDS(LearnerAttention, {"dense", dense}, {"replay", replay})
WORDS(Reduce, {"ordered", ordered}, {"reduce_scatter", reduce_scatter})
WORDS(Moments, {"f32", f32}, {"bf16", bf16})
WORDS(LrSchedule, {"constant", constant}, {"linear", linear}, {"cosine", cosine})
WORDS(PolicyLoss, {"vanilla", ppo}, {"gspo", gspo}, {"cispo", cispo})
WORDS(KlLoss, {"k1", k1}, {"k2", k2}, {"k3", k3}, {"exact", exact})
WORDS(DistillOrder, {"before", before}, {"after", after})
WORDS(DistillKl, {"k2", k2}, {"k3", k3}, {"exact_reverse", exact_reverse}, {"exact_forward", exact_forward})
WORDS(RolloutIs, {"none", none}, {"paper", paper}, {"tis", tis}, {"icepop", icepop}, {"released", released})
WORDS(RatioLevel, {"token", token}, {"sequence", sequence}, {"geometric", geometric})
WORDS(RolloutRs, {"none", none}, {"sequence", sequence}, {"geometric", geometric})
WORDS(GroupStatistics, {"all", all}, {"accepted", accepted})
WORDS(TooFew, {"skip", skip}, {"scale", scale})
WORDS(LengthReference, {"all", all}, {"correct", correct})
WORDS(LengthForm, {"correct_only", correct_only}, {"printed", printed})
WORDS(RpoCut, {"fixed", fixed}, {"half_shortest", half_shortest}, {"length", length})
WORDS(SuffixCap, {"max_len", max_len}, {"removed", removed})
WORDS(PrefixLoss, {"masked", masked}, {"included", included})
WORDS(MissingRows, {"fail", fail}, {"lazy", lazy})
WORDS(StateWeight, {"none", none}, {"z", z})
WORDS(OversampleBy, {"reward", reward}, {"acceptance", acceptance})
WORDS(ValKv, {"dense", dense}, {"rollout", rollout}, {"both", both})
WORDS(OnMismatch, {"fail", fail}, {"continue", carry_on})
WORDS(KvMethod, {"dense", dense}, {"streaming_llm", streaming_llm}, {"h2o", h2o}, {"tova", tova}, {"snapkv", snapkv},
      {"rkv", rkv}, {"pyramidkv", pyramidkv}, {"quest", quest}, {"block_topk", block_topk})
WORDS(KvPrompt, {"compress", compress}, {"protect", protect}, {"protect_first", protect_first})
WORDS(KvScope, {"per_head", per_head}, {"per_layer", per_layer})
WORDS(KvTrigger, {"buffer_full", buffer_full}, {"prefill_once", prefill_once})
WORDS(KvRope, {"absolute", absolute}, {"cache_index", cache_index})
WORDS(KvMergeMethod, {"none", none}, {"cam", cam}, {"d2o", d2o}, {"lookm_pivot", lookm_pivot}, {"value", value})
WORDS(MergeKeys, {"none", none}, {"unrotated", unrotated})
WORDS(GqaAgg, {"max_logit", max_logit}, {"mean_logit", mean_logit}, {"mean_prob", mean_prob})
WORDS(SoftmaxSpan, {"exclude_window", exclude_window}, {"include_window", include_window})
WORDS(Pool, {"max", max}, {"avg", avg})
// clang-format on
#undef WORDS

// ---- one type: its name, how it is read and how it is written ------------------------------------------------------

bool contains(const std::vector<std::string>& words, const std::string& word) {  // no words: every word
  return words.empty() || std::find(words.begin(), words.end(), word) != words.end();
}

template <class T>
std::string type_text(const Allowed& a) {
  if constexpr (std::is_same_v<T, bool>) return "boolean";
  if constexpr (std::is_same_v<T, std::optional<bool>>) return "boolean or auto";
  if constexpr (std::is_same_v<T, int64_t>) return "integer" + range_text(a);
  if constexpr (std::is_same_v<T, double>) return "number" + range_text(a);
  if constexpr (std::is_same_v<T, std::string>)
    return a.words.empty() ? "string" : "one of " + join(a.words, ", ", [](const std::string& w) { return w; });
  if constexpr (std::is_same_v<T, std::vector<double>>) return "two numbers, each" + range_text(a);
  if constexpr (std::is_same_v<T, std::vector<std::string>>)
    return "array of " + (a.words.empty() ? "strings" : join(a.words, ", ", [](const std::string& w) { return w; }));
  if constexpr (std::is_enum_v<T>) {
    std::string s;
    for (const auto& w : words_of<T>)
      if (contains(a.words, w.text)) s += (s.empty() ? "one of " : ", ") + std::string(w.text);
    return s;
  }
}

// False: `v` is no such value.
bool read(const TomlValue& v, const Allowed&, bool& x) {
  if (v.kind == TomlValue::Kind::string) return false;
  const bool yes = v.text == "true" || v.text == "True";  // Python's spelling is common on command lines
  if (!yes && v.text != "false" && v.text != "False") return false;
  x = yes;
  return true;
}
bool read(const TomlValue& v, const Allowed& a, std::optional<bool>& x) {  // none: auto
  if (v.text == "auto" && v.kind != TomlValue::Kind::word) {
    x.reset();
    return true;
  }
  return read(v, a, x.emplace());
}
template <class N>
requires std::is_same_v<N, int64_t> || std::is_same_v<N, double>
bool read(const TomlValue& v, const Allowed& a, N& x) {
  N n;
  const char* end = v.text.data() + v.text.size();
  const auto [p, code] = std::from_chars(v.text.data(), end, n);
  if (v.kind == TomlValue::Kind::string || code != std::errc() || p != end) return false;
  const double d = static_cast<double>(n);
  if (!std::isfinite(d) || d < a.low || d > a.high || (a.low_open && d == a.low) || (a.high_open && d == a.high))
    return false;
  x = n;
  return true;
}
bool read(const TomlValue& v, const Allowed& a, std::string& x) {
  if (v.kind == TomlValue::Kind::word) return false;
  if (!contains(a.words, v.text)) return false;
  x = v.text;
  return true;
}
template <class E>
requires std::is_enum_v<E>
bool read(const TomlValue& v, const Allowed& a, E& x) {
  for (const auto& w : words_of<E>)
    if (v.kind != TomlValue::Kind::word && v.text == w.text && contains(a.words, v.text)) {
      x = w.value;
      return true;
    }
  return false;
}

std::string show(bool x) { return x ? "true" : "false"; }
std::string show(const std::optional<bool>& x) { return x ? show(*x) : toml_quote("auto"); }
std::string show(int64_t x) { return number_text(x); }
std::string show(double x) { return number_text(x); }
std::string show(const std::string& x) { return toml_quote(x); }
template <class E>
requires std::is_enum_v<E> std::string show(E x) {
  for (const auto& w : words_of<E>)
    if (w.value == x) return toml_quote(w.text);
  expect(false, "a configuration value without a word");
  return "";
}

template <class T>
constexpr bool is_list = false;
template <class T>
constexpr bool is_list<std::vector<T>> = true;

// `member` gives a reference to the key's member in a Config (const or not).
template <class Member>
ConfigKey key(const char* name, Member member, Allowed allowed, const char* unit, const char* meaning,
              const char* source) {
  using T = std::remove_reference_t<decltype(member(std::declval<Config&>()))>;
  ConfigKey k{name, type_text<T>(allowed), unit, meaning, source, {}, {}, {}};
  if constexpr (is_list<T>) {
    k.show = [member](const Config& c) {
      return "[" + join(member(c), ", ", [](const auto& x) { return show(x); }) + "]";
    };
    k.assign = [member, allowed, type = k.type](Config& c, const TomlItem& item) {
      T list(item.values.size());
      bool good = item.array || std::is_same_v<T, std::vector<std::string>>;
      for (size_t i = 0; i < list.size(); i++) good = good && read(item.values[i], allowed, list[i]);
      if (std::is_same_v<T, std::vector<double>> && list.size() != 2) good = false;
      if (!good) fail("expected ", type, ", found ", found_text(item));
      member(c) = std::move(list);
    };
  } else {
    k.show = [member](const Config& c) { return show(member(c)); };
    k.assign = [member, allowed, type = k.type](Config& c, const TomlItem& item) {
      if (item.array || !read(item.values[0], allowed, member(c)))
        fail("expected ", type, ", found ", found_text(item));
    };
  }
  return k;
}

// The key's name is the member's path.
#define KEY(path, allowed, unit, meaning, source) \
  key(                                            \
      #path, [](auto& c) -> auto& { return c.path; }, allowed, unit, meaning, source)

// Keys that matter under the same condition.
struct KeyGroup {
  std::vector<KeyCondition> when;
  std::vector<ConfigKey> keys;
};
using Groups = std::vector<KeyGroup>;

KeyCondition is(const char* key, std::vector<std::string> values) { return {key, std::move(values)}; }
KeyCondition is_not(const char* key, const char* value) { return {key, {value}, true}; }

Groups model_keys() {
  return {
      {{},
       {KEY(model.path, any, "", "Hugging Face folder (config.json, safetensors) whose weights the run starts from",
            "verl"),
        KEY(model.config, any, "",
            "config.json, or the name of a shape in data/presets, of a model with random weights; instead of "
            "model.path",
            "pare"),
        KEY(model.dtype, any, "",
            "type of weights and activations. bf16: the optimizer keeps an f32 copy of the weights; auto: f32 on the "
            "cpu, bf16 on cuda and emu",
            "pare; verl: fsdp_config.model_dtype"),
        KEY(model.enable_gradient_checkpointing, any, "",
            "keeps only the inputs of the transformer blocks and recomputes the rest in the backward pass: less "
            "memory, the same bits",
            "verl")}},
      {{is_not("model.config", "")},
       {KEY(model.init, any, "",
            "distribution of the random weights: normal, with the config's initializer_range or with 1 / sqrt(fan-in) "
            "as standard deviation",
            "pare")}},
      {{},
       {KEY(model.lora.rank, within(0, 65536), "",
            "rank of the adapters that are trained while the model is frozen (distill.enable: beside it); 0: off, the "
            "model is trained",
            "verl"),
        KEY(model.lora.adapter_path, any, "",
            "PEFT folder of adapters to start from, with their own rank, alpha and target_modules", "verl")}},
      {{is_not("model.lora.rank", "0")},
       {KEY(model.lora.alpha, above_to(0, 1e6), "", "the product of an adapter is scaled by alpha / rank", "verl"),
        KEY(model.lora.target_modules,
            one_of({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}), "",
            "linear layers that get an adapter", "verl")}},
  };
}

Groups data_keys() {
  const KeyCondition ssa = is("data.task", {"ssa"}), jsonl = is("data.task", {"jsonl"});
  return {
      {{},
       {KEY(data.task, one_of({"ssa", "jsonl"}), "",
            "source of the problems. ssa: generated short programs, a built-in task; jsonl: prompts and answers in "
            "files (implied by data.train_files or data.val_files)",
            "pare"),
        KEY(data.tokenizer, any, "",
            "ssa, a tokenizer.json, a tokenizer.bin or a folder with one; empty: ssa for the task ssa, else that of "
            "model.path",
            "verl"),
        KEY(data.train_batch_size, at_least(1), "prompts", "prompts (`pare sft`: examples) per training step", "verl"),
        KEY(data.max_prompt_length, count(1), "tokens", "longest prompt; a longer one is an error", "verl"),
        KEY(data.max_response_length, count(1), "tokens", "longest response; generation stops there", "verl"),
        KEY(data.shuffle, any, "", "reshuffles the prompts in every epoch", "verl")}},
      {{ssa},
       {KEY(data.variant, one_of({"default", "ans", "rep", "late"}), "",
            "kind of errors that the teacher of `pare sft` makes", "pare"),
        KEY(data.train_rows, within(1, 1e7), "prompts", "size of the training set", "pare"),
        KEY(data.train_seed, at_least(0), "", "seed of the training set", "pare"),
        KEY(data.val_rows, within(1, 1e7), "prompts", "size of the validation set", "pare"),
        KEY(data.val_seed, at_least(0), "", "seed of the validation set", "pare"),
        KEY(data.min_statements, within(2, 23), "statements", "shortest program", "pare"),
        KEY(data.max_statements, within(2, 23), "statements", "longest program", "pare"),
        KEY(data.val_min_statements, within(0, 23), "statements", "shortest program of validation; 0: as in training",
            "pare"),
        KEY(data.val_max_statements, within(0, 23), "statements", "longest program of validation; 0: as in training",
            "pare"),
        KEY(data.noise, within(-1, 1), "probability",
            "chance that the teacher replaces the result of a statement by a random digit; below 0: the variant's own",
            "pare"),
        KEY(data.noise_ramp, within(0, 1), "part of the run",
            "initial part of `pare sft` over which the teacher's noise grows linearly from 0", "pare")}},
      {{jsonl},
       {KEY(data.train_files, any, "", "training files", "verl"),
        KEY(data.val_files, any, "", "validation files", "verl"),
        KEY(data.prompt_key, any, "", "field of the prompt; empty: prompt, problem or question", "verl"),
        KEY(data.answer_key, any, "", "field of the answer; empty: answer, or else solution", "pare"),
        KEY(data.reward, any, "",
            "verifier of the responses: exact, contains, starts_with, gsm8k-strict, gsm8k-flexible, math-string, dapo, "
            "countdown or math-value; or command:PROGRAM ARGUMENTS, an external grader (data/reward_command.h). "
            "`pare sft` needs none",
            "pare"),
        KEY(data.chat_template, any, "",
            "chat format of text prompts. auto: the one in the tokenizer's folder, plain if there is none; plain: BOS "
            "and the prompt; qwen2.5, qwen3, llama-3, deepseek-r1: one user turn and the start of the assistant's; "
            "anything else: a text with {problem}",
            "pare; verl: model.custom_chat_template")}},
      {{jsonl, is("data.reward", {"command:*"})},
       {KEY(data.reward_timeout, above_to(0, 1e6), "seconds",
            "time limit of the grader for one answer; on the first timeout its process is restarted, on the second the "
            "run fails",
            "pare")}},
      {{jsonl, is("data.chat_template", {"auto", "qwen3"})},
       {KEY(data.apply_chat_template_kwargs.enable_thinking, any, "",
            "lets qwen3 think; false: the response starts after an empty thought", "verl")}},
      {{jsonl, is("data.chat_template", {"auto", "llama-3"})},
       {KEY(data.apply_chat_template_kwargs.date_string, any, "", "date in the system message of llama-3", "verl")}},
  };
}

Groups rollout_keys() {
  return {
      {{},
       {KEY(rollout.n, at_least(1), "samples", "responses per prompt, the size of a group", "verl"),
        KEY(rollout.temperature, above(0), "", "divisor of the logits, in the sampler and in the learner", "verl"),
        KEY(rollout.top_k, count(-1), "tokens", "number of most probable tokens to sample from; 0 or -1: off", "verl"),
        KEY(rollout.top_p, above_to(0, 1), "probability",
            "cumulative probability of the most probable tokens to sample from; 1: off", "verl"),
        KEY(rollout.allow_truncated_sampling, any, "",
            "permits training with top_k or top_p, which is off-policy: the learner's distribution is not truncated",
            "pare"),
        KEY(rollout.max_num_seqs, count(1), "sequences", "most sequences that are decoded together", "verl"),
        KEY(rollout.max_num_batched_tokens, count(1), "tokens", "most rows in one forward pass of the rollout", "verl"),
        KEY(rollout.kv_cache_bytes, at_least(0), "bytes", "size of the page pool; 0: enough for max_num_seqs sequences",
            "pare"),
        KEY(rollout.check_exact, any, "",
            "compares the sampler's log-probs with the learner's bit by bit and logs exact/mismatch_tokens. auto: only "
            "where both have the same distribution (the same attention, no truncation)",
            "pare")}},
      {{is("trainer.exact", {"true"})},
       {KEY(rollout.on_mismatch, any, "",
            "exit code of an exact run with mismatched tokens, which warns at once and runs to its end: 1 (fail) or 0 "
            "(continue)",
            "pare")}},
      {{},
       {KEY(rollout.val_kwargs.n, at_least(1), "samples", "responses per validation prompt", "verl"),
        KEY(rollout.val_kwargs.temperature, at_least(0), "", "temperature in validation; 0: greedy", "verl"),
        KEY(rollout.val_kwargs.kv, any, "",
            "cache in validation: dense; as rollout.kv configures it (rollout; the default of `pare eval`); or one "
            "pass with each (both)",
            "pare")}},
      {{is_not("rollout.val_kwargs.temperature", "0.0")},
       {KEY(rollout.val_kwargs.top_k, count(-1), "tokens", "top_k in validation; 0 or -1: off", "verl"),
        KEY(rollout.val_kwargs.top_p, above_to(0, 1), "probability", "top_p in validation; 1: off", "verl")}},
  };
}

Groups kv_keys() {
  const auto method = [](std::vector<std::string> words) { return is("rollout.kv.method", std::move(words)); };
  const KeyCondition evicting = method({"streaming_llm", "h2o", "tova", "snapkv", "rkv", "pyramidkv"});
  const KeyCondition scoring = method({"h2o", "tova", "snapkv", "rkv", "pyramidkv"});
  const KeyCondition windowed = method({"snapkv", "rkv", "pyramidkv"});
  const KeyCondition block_sparse = method({"quest", "block_topk"});
  return {
      {{},
       {KEY(rollout.kv.method, any, "",
            "policy of the sampler's cache. dense: attends to all tokens; streaming_llm, h2o, tova, snapkv, rkv and "
            "pyramidkv evict tokens; quest and block_topk keep all and select the blocks that each token attends to",
            "Sparse-RL, DistillSparse")}},
      {{evicting},
       {KEY(rollout.kv.evict.budget, at_least(1), "tokens",
            "tokens that a compression leaves in a layer, the newest ones included, beside those of the prompt that "
            "are "
            "protected",
            "Sparse-RL: 512"),
        KEY(rollout.kv.evict.prompt, any, "",
            "whether the prompt may be evicted: yes; no (protect); or all but its first protect_first tokens", "pare"),
        KEY(rollout.kv.evict.trigger, any, "",
            "time of a compression: whenever the buffer is full, or once, at the end of the prompt",
            "R-KV; SnapKV: prefill_once"),
        KEY(rollout.kv.merge.method, any, "",
            "destination of evicted tokens. none: dropped; cam: spread at random over the tokens after them; d2o, "
            "lookm_pivot, value: merged into the kept token with the most similar key, in every layer",
            "CaM; D2O; LOOK-M; kvpress")}},
      {{evicting, is("rollout.kv.evict.trigger", {"buffer_full"})},
       {KEY(rollout.kv.evict.buffer, at_least(0), "tokens",
            "tokens above the budget that trigger a compression; 0: every token does", "Sparse-RL, R-KV: 128")}},
      {{evicting, is("rollout.kv.evict.prompt", {"protect_first"})},
       {KEY(rollout.kv.evict.protect_first, at_least(0), "tokens",
            "tokens at the start of the prompt that are never evicted", "pare")}},
      {{scoring},
       {KEY(rollout.kv.evict.scope, any, "", "heads that share a selection: none, or all of a layer",
            "R-KV; TOVA: per_layer")}},
      {{windowed},
       {KEY(rollout.kv.window.size, at_least(1), "tokens",
            "newest tokens, which are always kept and whose queries score the others", "R-KV: 8"),
        KEY(rollout.kv.window.pooling_kernel, at_least(1), "tokens",
            "odd number of neighbours over which scores are pooled; 1: no pooling", "R-KV: 7; SnapKV: 5")}},
      {{windowed, is_not("rollout.kv.window.pooling_kernel", "1")},
       {KEY(rollout.kv.window.pooling, any, "", "kind of the pooling", "R-KV: max; SnapKV: avg")}},
      {{method({"snapkv", "rkv", "pyramidkv", "tova"})},
       {KEY(rollout.kv.window.gqa_aggregation, any, "", "reduction over the query heads that share a key head",
            "R-KV; kvpress: mean_prob"),
        KEY(rollout.kv.window.softmax_span, any, "",
            "tokens in the denominator of the softmax: the candidates alone, or the window too",
            "R-KV; SnapKV: include_window")}},
      {{method({"streaming_llm"})},
       {KEY(rollout.kv.streaming_llm.sinks, at_least(0), "tokens",
            "oldest tokens, which are always kept (attention sinks)", "StreamingLLM: 4"),
        KEY(rollout.kv.streaming_llm.rope, any, "",
            "positions of the rotary embedding: those of the text, or those within the cache, which the learner cannot "
            "replay",
            "StreamingLLM: cache_index")}},
      {{method({"h2o"})},
       {KEY(rollout.kv.h2o.normalise, any, "",
            "divides the attention that a token has received by the number of queries that could see it", "kvpress")}},
      {{method({"rkv"})},
       {KEY(rollout.kv.rkv.lambda, within(0, 1), "", "weight of attention against redundancy; 1: snapkv",
            "Sparse-RL: 0.1")}},
      {{method({"rkv"}), is_not("rollout.kv.rkv.lambda", "1.0")},
       {KEY(rollout.kv.rkv.threshold, within(-1, 1), "cosine",
            "cosine similarity above which two keys count as redundant", "R-KV")}},
      {{method({"pyramidkv"})},
       {KEY(rollout.kv.pyramidkv.beta, above(1), "",
            "ratio of the mean budget to that of the last layer, about; budgets fall linearly from layer to layer",
            "PyramidKV: 20")}},
      {{evicting, is("rollout.kv.merge.method", {"d2o", "lookm_pivot"})},
       {KEY(rollout.kv.merge.keys, any, "",
            "treatment of the keys of merged tokens: those of the kept token stay, or the unrotated keys are merged "
            "like "
            "the values (D2O: the rotated ones)",
            "pare")}},
      {{method({"h2o"}), is("rollout.kv.merge.method", {"cam"})},
       {KEY(rollout.kv.merge.cam_targets, at_least(1), "tokens", "kept tokens over which an evicted one is spread",
            "CaM")}},
      {{evicting, is("rollout.kv.merge.method", {"d2o"})},
       {KEY(rollout.kv.merge.d2o_ema, within(0, 1), "",
            "weight of the old similarity threshold in its moving average over compressions", "D2O")}},
      {{block_sparse},
       {KEY(rollout.kv.blocks.size, at_least(4), "tokens", "size of a block, 4 or 16", "Quest: 16"),
        KEY(rollout.kv.blocks.first, at_least(0), "blocks", "oldest blocks, which are always selected",
            "DistillSparse's code"),
        KEY(rollout.kv.blocks.last, at_least(1), "blocks", "newest blocks, which are always selected",
            "DistillSparse's code"),
        KEY(rollout.kv.blocks.dense_layers, at_least(0), "layers", "first layers, which attend to everything",
            "Quest, DistillSparse: 2"),
        KEY(rollout.kv.blocks.schedule, any, "",
            "FROM:BLOCKS pairs, the number of blocks selected from a context of FROM blocks on; replaces "
            "rollout.kv.blocks.count",
            "Sparrow (arXiv 2606.08446)")}},
      {{block_sparse, is("learner.attention", {"dense"})},
       {KEY(rollout.kv.blocks.acceptance_target, within(0, 1), "part",
            "5 % quantile of the acceptance rate that the number of blocks is adapted to, for each range of context "
            "lengths by itself; 0: off",
            "Sparrow (arXiv 2606.08446): 0.86")}},
      {{block_sparse, is("learner.attention", {"dense"}), is_not("rollout.kv.blocks.acceptance_target", "0.0")},
       {KEY(rollout.kv.blocks.acceptance_steps, at_least(1), "steps", "interval of these adaptations", "pare")}},
      {{block_sparse, is("rollout.kv.blocks.schedule", {"[]"})},
       {KEY(rollout.kv.blocks.count, at_least(1), "blocks",
            "blocks that a token attends to, the first and last ones included", "DistillSparse: 24, 32")}},
  };
}

Groups algorithm_keys() {
  const KeyCondition grpo = is("algorithm.adv_estimator", {"grpo"});
  return {
      {{},
       {KEY(reward_model.overlong_buffer.enable, any, "", "penalises responses that end close to the limit",
            "verl, DAPO")}},
      {{is("reward_model.overlong_buffer.enable", {"true"})},
       {KEY(reward_model.overlong_buffer.len, at_least(0), "tokens",
            "tokens before data.max_response_length over which the penalty grows linearly; 0: a fifth of that length",
            "verl, DAPO eq. 13"),
        KEY(reward_model.overlong_buffer.penalty_factor, at_least(0), "reward", "penalty at the limit", "verl")}},
      {{},
       {KEY(reward_model.length_reward.enable, any, "",
            "rewards right answers for being shorter than the mean of their group: the score times sigmoid(alpha * "
            "(mean - length)), clipped to .5 and 1, of whole responses",
            "RPO eq. 11")}},
      {{is("reward_model.length_reward.enable", {"true"})},
       {KEY(reward_model.length_reward.alpha, at_least(0), "1 / token", "steepness of the sigmoid",
            "RPO: 0.01; its code: 0.1, in words"),
        KEY(reward_model.length_reward.reference, any, "", "responses of the group whose mean length counts",
            "RPO: all; its code: correct"),
        KEY(reward_model.length_reward.form, any, "",
            "correct_only: a score of 0 or less stays; printed: it is clipped too, which makes .5 of it",
            "RPO's code: correct_only; RPO eq. 11: printed")}},

      {{},
       {KEY(algorithm.adv_estimator, any, "",
            "baseline of the advantage. grpo: mean of the group; rloo: mean of the other responses", "verl"),
        KEY(algorithm.adv_filter_threshold, at_least(0), "advantage",
            "absolute advantage below which samples are dropped before the learner's forward pass; 0: off", "DASH"),
        KEY(algorithm.use_kl_in_reward, any, "", "subtracts the KL to the reference policy from the reward", "verl"),
        KEY(algorithm.filter_groups.enable, any, "",
            "dynamic sampling: replaces groups whose scores are all equal by new prompts", "verl, DAPO"),
        KEY(algorithm.oversample.keep, at_least(0), "samples",
            "oversampling: responses of a group that go on, of the rollout.n that are sampled; 0: all",
            "DistillSparse eq. 4: 8 of 12 or 16")}},
      {{is_not("algorithm.oversample.keep", "0")},
       {KEY(algorithm.oversample.by, any, "",
            "responses that are kept: those with the largest scores, before any shaping, or with the largest mean of "
            "min(1, xi)",
            "DistillSparse")}},
      {{grpo},
       {KEY(algorithm.norm_adv_by_std_in_grpo, any, "", "divides the advantage by the group's standard deviation",
            "verl, Dr. GRPO")}},
      {{grpo, is("algorithm.norm_adv_by_std_in_grpo", {"true"})},
       {KEY(algorithm.adv_std, any, "", "standard deviation with n minus 1 (sample) or n (population)", "verl: sample"),
        KEY(algorithm.adv_std_floor, at_least(0), "reward",
            "smallest standard deviation that is divided by: differences far below it stay small; 0: off", "pare"),
        KEY(algorithm.adv_eps, at_least(0), "reward", "term added to the standard deviation", "verl 1e-6, TRL 1e-4")}},
      {{is("algorithm.use_kl_in_reward", {"true"})},
       {KEY(algorithm.kl_penalty, one_of({"k1", "k2", "k3"}), "", "estimator of the KL in the reward",
            "verl, Schulman 2020"),
        KEY(algorithm.kl_ctrl.kl_coef, at_least(0), "", "coefficient of the KL in the reward", "verl")}},
      {{is("algorithm.filter_groups.enable", {"true"})},
       {KEY(algorithm.filter_groups.max_num_gen_batches, at_least(1), "batches",
            "most generation batches of a step, which then uses the groups that it has", "verl")}},
  };
}

Groups correction_keys() {
  const KeyCondition obrs = is("algorithm.obrs.enable", {"true"});
  return {
      {{},
       {KEY(algorithm.rollout_correction.veto, from_below(0, 1), "ratio",
            "rejects a response if xi of any token, the learner's probability over the sampler's, is below this; 0: "
            "off",
            "Sparse-RL: 1e-4; verl: rollout_token_veto_threshold"),
        KEY(algorithm.rollout_correction.rollout_is, any, "",
            "importance weight of a token, a function of xi, the probability under the learner's old policy over the "
            "sampler's. paper: xi; tis: at most rollout_is_threshold; icepop: 0 outside rollout_is_bounds; released: "
            "as in Sparse-RL's code",
            "Sparse-RL; verl"),
        KEY(algorithm.rollout_correction.rollout_rs, any, "",
            "rejection sampling: rejects responses whose product, or geometric mean, of xi lies outside "
            "rollout_rs_threshold",
            "verl"),
        KEY(algorithm.rollout_correction.group_statistics, any, "",
            "responses that count in the mean and standard deviation of a group: all, or those not rejected",
            "Sparse-RL: all"),
        KEY(algorithm.rollout_correction.min_accepted, within(0, 1), "part of the judged responses",
            "accepted part below which an update is skipped or scaled, since AdamW's steps do not shrink with the "
            "gradient; 0: off",
            "pare")}},
      {{is_not("algorithm.rollout_correction.rollout_is", "none")},
       {KEY(algorithm.rollout_correction.rollout_is_level, any, "",
            "level of xi: of the token, the product over the response, or its geometric mean", "verl: rollout_is"),
        KEY(algorithm.rollout_correction.rollout_is_threshold, above(0), "ratio",
            "largest weight of tis; the logged spread of xi clamps it to [1 / this, this] for every rollout_is",
            "verl: 2")}},
      {{is("algorithm.rollout_correction.rollout_is", {"icepop"})},
       {KEY(algorithm.rollout_correction.rollout_is_bounds, at_least(0), "ratio",
            "smallest and largest xi of tokens that count", "IcePop; verl: 0.5_5.0")}},
      {{is_not("algorithm.rollout_correction.rollout_rs", "none")},
       {KEY(algorithm.rollout_correction.rollout_rs_threshold, at_least(0), "ratio",
            "smallest and largest xi of an accepted response (verl's k1: the inverse)", "verl")}},
      {{is_not("algorithm.rollout_correction.min_accepted", "0.0")},
       {KEY(algorithm.rollout_correction.too_few, any, "",
            "skips such an update, or scales its learning rate by accepted / min_accepted", "pare")}},
      {{is_not("rollout.kv.method", "dense"), is("learner.attention", {"dense"})},
       {KEY(algorithm.rollout_correction.acceptance, any, "",
            "logs the exact acceptance rate, the sum over the vocabulary of the smaller of the learner's and the "
            "sampler's probability; the rollout keeps the hidden state of every token",
            "DistillSparse")}},
      {{},
       {KEY(algorithm.obrs.enable, any, "",
            "budgeted rejection sampling: a token stays in the loss with probability min(1, xi / lambda)",
            "OBRS, Jackpot")}},
      {{obrs},
       {KEY(algorithm.obrs.lambda, above(0), "ratio",
            "rejection strength: a larger value keeps fewer tokens, closer to the learner's distribution",
            "Jackpot: 1"),
        KEY(algorithm.obrs.cap, at_least(0), "ratio", "largest weight of a kept token; 0: off", "Jackpot: 3"),
        KEY(algorithm.obrs.state_weight, any, "",
            "weight of a kept token: max(lambda, xi), unbiased at each state; z: times the acceptance probability of "
            "its state",
            "Jackpot: z")}},
      {{obrs, is("algorithm.obrs.state_weight", {"z"})},
       {KEY(algorithm.obrs.top_k, count(0), "tokens",
            "most probable tokens of learner and sampler over which the acceptance probability is summed; 0: the whole "
            "vocabulary, exact",
            "Jackpot: 20")}},
  };
}

Groups rpo_keys() {
  const KeyCondition on = is("algorithm.rpo.enable", {"true"});
  return {
      {{},
       {KEY(
           algorithm.rpo.enable, any, "",
           "responses continue the beginning of an earlier response to their prompt, which is kept by row of the data: "
           "only the rest is sampled",
           "RPO")}},
      {{on},
       {KEY(algorithm.rpo.cut, any, "",
            "most tokens that are cut off the end of the kept response; how many is drawn uniformly from 0 to this for "
            "each prompt, and at least 1 is. fixed: max_cut; half_shortest: half of the shortest response of the "
            "prompt's last group; length: the whole response",
            "RPO: fixed or half_shortest")}},
      {{on, is("algorithm.rpo.cut", {"fixed"})},
       {KEY(algorithm.rpo.max_cut, count(1), "tokens", "most tokens that are cut", "RPO: 300, 500, 800")}},
      {{on},
       {KEY(algorithm.rpo.suffix_cap, any, "",
            "most tokens that are sampled. max_len: what the beginning leaves of data.max_response_length; removed: as "
            "many as were cut",
            "RPO: max_len; its code: removed"),
        KEY(algorithm.rpo.epsilon, within(0, 1), "probability",
            "chance that a group's response of largest reward is kept; else any of the group is", "RPO: 0.1"),
        KEY(algorithm.rpo.prefix_loss, any, "",
            "masked: the beginning is not trained on, and lengths in denominators are those of what was sampled; "
            "included: it is, with a ratio of 1",
            "pare: masked; RPO: included"),
        KEY(algorithm.rpo.cache_file, any, "",
            "responses to begin with: JSON lines with row, ids or text, and finished, such as `pare generate` writes; "
            "empty: one is sampled at a row's first visit",
            "RPO")}},
      {{on, is_not("algorithm.rpo.cache_file", "")},
       {KEY(algorithm.rpo.missing, any, "",
            "rows of the data that the file lacks, and rows of the file that the data lacks. fail: an error; lazy: a "
            "response is sampled at the first visit, the others are passed over",
            "pare")}},
  };
}

Groups actor_keys() {
  return {
      {{},
       {KEY(actor.policy_loss.loss_mode, any, "",
            "vanilla: PPO's clipped ratio per token; gspo: one ratio per sequence; cispo: clipped, detached ratio",
            "verl"),
        KEY(actor.clip_ratio_low, at_least(0), "", "clip range below 1: the ratio is at least 1 minus this", "verl"),
        KEY(actor.clip_ratio_high, at_least(0), "", "clip range above 1: the ratio is at most 1 plus this",
            "verl, DAPO clip-higher")}},
      {{is("actor.policy_loss.loss_mode", {"vanilla", "gspo"})},
       {KEY(actor.clip_ratio_c, at_least(0), "",
            "dual clip: bound, above 1, of the ratio at negative advantages; 0: off", "verl")}},
      {{},
       {KEY(actor.loss_agg_mode, any, "", "aggregation of token losses into one number",
            "verl; group-token-mean: DAPO"),
        KEY(actor.loss_denominator, any, "",
            "sequences and tokens in the denominator: all (valid), or without dropped samples (kept)", "pare")}},
      {{is("actor.loss_agg_mode", {"seq-mean-token-sum-norm"})},
       {KEY(actor.loss_scale_factor, at_least(0), "tokens", "divisor of the sum; 0: data.max_response_length",
            "verl, Dr. GRPO")}},
      {{}, {KEY(actor.use_kl_loss, any, "", "adds the KL to the reference policy to the loss", "verl")}},
      {{is("actor.use_kl_loss", {"true"})},
       {KEY(actor.kl_loss_coef, at_least(0), "", "coefficient of the KL in the loss", "verl"),
        KEY(actor.kl_loss_type, any, "", "estimator of the KL in the loss; exact: sum over the vocabulary",
            "verl, Schulman 2020")}},
      {{},
       {KEY(actor.entropy_coeff, at_least(0), "", "coefficient of the entropy bonus", "verl"),
        KEY(actor.ppo_epochs, at_least(1), "", "passes over the rollouts of a step", "verl; DASH PPO-Multi"),
        KEY(actor.ppo_mini_batch_size, at_least(0), "prompts", "prompts per optimizer update; 0: all of the step",
            "verl; DASH PPO-Mini"),
        KEY(actor.ppo_max_token_len, at_least(1), "tokens",
            "most rows of a micro-batch; a longer sequence has one of its own", "verl: ppo_max_token_len_per_gpu"),
        KEY(actor.logits_chunk, at_least(1), "tokens", "rows of logits that are computed at a time",
            "slime: log_probs_chunk_size"),
        KEY(actor.grad_clip, at_least(0), "", "largest norm of the gradient; 0: off", "verl"),
        KEY(actor.token_subset, any, "",
            "response tokens that are trained on. none: all; urs: each with a fixed probability; rpc: those before a "
            "random cut; det: a fixed first part",
            "NAT")}},
      {{is("actor.token_subset", {"urs"})},
       {KEY(actor.urs_probability, above_to(0, 1), "probability", "probability that a token is kept", "NAT")}},
      {{is("actor.token_subset", {"rpc"})},
       {KEY(actor.rpc_min_tokens, at_least(1), "tokens",
            "earliest cut; the cut is uniform between this and the length of the response", "NAT: C")}},
      {{is("actor.token_subset", {"det"})},
       {KEY(actor.det_fraction, above_to(0, 1), "part of the response", "part of the response that is kept",
            "NAT: beta")}},
      {{is("actor.token_subset", {"urs", "rpc"})},
       {KEY(actor.token_subset_ht, any, "", "weights kept tokens by 1 / probability, which removes the bias",
            "NAT, Horvitz-Thompson 1952")}},

      {{},
       {KEY(actor.optim.lr, at_least(0), "", "learning rate of AdamW", "verl"),
        KEY(actor.optim.betas, from_below(0, 1), "", "decay of the two moments", "verl"),
        KEY(actor.optim.eps, above(0), "", "term added to the root of the second moment", "TRL: adam_epsilon"),
        KEY(actor.optim.weight_decay, at_least(0), "", "decoupled weight decay", "verl"),
        KEY(actor.optim.moments, any, "",
            "type of the two moments; bf16: half the memory, with unbiased stochastic rounding", "pare"),
        KEY(actor.optim.lr_warmup_steps, at_least(0), "steps", "length of the linear warm-up", "verl"),
        KEY(actor.optim.lr_scheduler_type, any, "", "learning-rate schedule after the warm-up", "verl")}},
      {{is("actor.optim.lr_scheduler_type", {"linear", "cosine"})},
       {KEY(actor.optim.min_lr_ratio, within(0, 1), "part of lr", "learning rate of the last step", "verl"),
        KEY(actor.optim.decay_fraction, above_to(0, 1), "part of the run",
            "final part over which the rate decays; 1: everything after the warm-up", "pare")}},

      {{is_not("rollout.kv.method", "dense")},
       {KEY(learner.attention, any, "",
            "attention of the learner, forward and backward. dense: to all tokens; replay: to those that the sampler "
            "attended to, so that their log-probs agree bit by bit",
            "pare")}},
      {{},
       {KEY(learner.slots, within(1, 4096), "",
            "parts of an update whose gradients are added in order, so that no number of ranks changes a bit; a "
            "multiple "
            "of that number",
            "pare")}},
      {{is_not("learner.slots", "1")},
       {KEY(learner.reduce, any, "",
            "who adds the gradients of ranks. ordered: slot by slot; reduce_scatter: the library, in an order of its "
            "own",
            "pare")}},
  };
}

Groups distill_keys() {
  const KeyCondition on = is("distill.enable", {"true"});
  return {
      {{is("rollout.kv.method", {"quest", "block_topk"})},
       {KEY(distill.enable, any, "",
            "the sampler is the trained model with adapters (model.lora), which learn the policy loss and a KL to the "
            "dense policy through block-sparse attention; dense validation is without them",
            "DistillSparse")}},
      {{on},
       {KEY(distill.order, any, "",
            "before: the gradient of the adapters is taken at the weights that the teacher had; after: when these have "
            "made their step, as released",
            "pare"),
        KEY(distill.kl_type, any, "",
            "KL to the dense policy. k2, k3: of the sampled token, with in expectation the gradient of KL(sparse || "
            "dense), KL(dense || sparse); exact_reverse, exact_forward: these two over the vocabulary",
            "Sparrow: sparse_kl_loss_type"),
        KEY(distill.lambda, at_least(0), "", "weight of that KL", "DistillSparse"),
        KEY(distill.lr_scale_factor, above(0), "", "learning rate of the adapters, of actor.optim.lr and its schedule",
            "Sparrow: lr_scale_factor"),
        KEY(distill.grad_clip, at_least(0), "", "bound of the norm of their gradient; 0: off", "pare")}},
  };
}

Groups trainer_keys() {
  return {
      {{},
       {KEY(trainer.device, any, "", "device of all computation; emu: the CUDA kernels, emulated on the CPU, for tests",
            "verl"),
        KEY(trainer.exact, any, "",
            "fixed order of every sum: the sampler's log-probs equal the learner's bit by bit. false (--exact=off), "
            "cuda only: cuBLASLt in linear layers, equal but for roundings",
            "pare"),
        KEY(trainer.n_gpus_per_node, within(0, 1024), "", "ranks of a node; 0: what was started", "verl"),
        KEY(trainer.nnodes, within(0, 65536), "", "nodes; 0: what was started", "verl"),
        KEY(trainer.nccl_timeout, at_least(1), "s", "a job whose ranks make no progress for so long ends", "verl"),
        KEY(trainer.total_training_steps, at_least(1), "steps", "length of the run", "verl"),
        KEY(trainer.seed, at_least(0), "", "seed of every random draw but those of the ssa data sets", "TRL"),
        KEY(trainer.threads, within(0, 1024), "threads",
            "CPU threads of a rank; 0: one per core, shared with the other ranks of the machine; changes no result",
            "pare"),
        KEY(trainer.test_freq, at_least(0), "steps", "interval of validation; 0: never", "verl"),
        KEY(trainer.val_before_train, any, "", "validates before the first step", "verl"),
        KEY(trainer.check_nan, any, "", "stops at the first op whose output is not finite", "pare"),
        KEY(trainer.experiment_name, any, "", "name of the run; empty: that of its configuration files", "verl"),
        KEY(trainer.default_local_dir, any, "",
            "run directory; empty, or a preset's own under changes to it: runs/NAME-TIME, in UTC", "verl"),
        KEY(trainer.save_freq, at_least(0), "steps",
            "interval of checkpoints, which are also written at the last step and at the best validation; 0: only on "
            "interrupts",
            "verl"),
        KEY(trainer.max_actor_ckpt_to_keep, at_least(0), "checkpoints",
            "newest checkpoints that are kept, beside the best in validation; 0: all", "verl"),
        KEY(trainer.save_dtype, any, "",
            "type of the weights in model/, rounded to nearest; auto: that of model.path, f32 if its files have "
            "several or the weights were random. Checkpoints always hold f32",
            "pare"),
        KEY(trainer.samples_freq, at_least(0), "steps", "interval at which responses are written and shown; 0: never",
            "pare")}},
      {{is_not("learner.slots", "1")},
       {KEY(trainer.balance_batch, any, "",
            "deals the groups of an update to slots of equal FLOPs; or a group is of the slot that it was sampled in",
            "verl")}},
      {{is_not("trainer.samples_freq", "0")},
       {KEY(trainer.samples_per_step, at_least(0), "responses", "responses of such a step that are written; 0: all",
            "TRL: num_completions_to_print")}},
  };
}
#undef KEY

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all;
    for (const Groups& part : {model_keys(), data_keys(), rollout_keys(), kv_keys(), algorithm_keys(),
                               correction_keys(), rpo_keys(), actor_keys(), distill_keys(), trainer_keys()})
      for (const KeyGroup& group : part)
        for (ConfigKey key : group.keys) {
          key.when = group.when;
          all.push_back(std::move(key));
        }
    return all;
  }();
  return keys;
}

const std::vector<KeySection>& config_sections() {
  static const std::vector<KeySection> sections = {
      {"model", "the weights or the shape to start from"},
      {"data", "problems, tokenizer, verifier, lengths"},
      {"rollout", "sampling, and the limits of a pass"},
      {"rollout.val_kwargs", "sampling in validation and in `pare eval`"},
      {"rollout.kv", "sparse rollouts: the tokens that the sampler keeps or attends to"},
      {"reward_model", "shaping of rewards"},
      {"algorithm", "advantages and filters"},
      {"algorithm.rollout_correction", "importance weights and rejection for sparse rollouts"},
      {"algorithm.obrs", "budgeted rejection of tokens"},
      {"algorithm.rpo", "responses that continue the beginning of earlier ones"},
      {"actor", "policy loss, mini-batches, token subsets"},
      {"actor.optim", "AdamW and its learning rate"},
      {"learner", "attention of the learner, and the slots of an update"},
      {"distill", "adapters of a block-sparse sampler, which learn to sample as the dense policy does"},
      {"trainer", "device, steps, validation, files of a run"},
  };
  return sections;
}

}  // namespace pare
