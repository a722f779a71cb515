// THE key table: what every configuration key means, once.  Types and defaults are those of the members (config.h).
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
template <>
constexpr auto words_of<Init> = std::to_array<Word<Init>>({{"config", Init::config}, {"fan_in", Init::fan_in}});
template <>
constexpr auto words_of<ActType> =
    std::to_array<Word<ActType>>({{"auto", ActType::automatic}, {"f32", ActType::f32}, {"bf16", ActType::bf16}});
template <>
constexpr auto words_of<SaveType> = std::to_array<Word<SaveType>>(
    {{"auto", SaveType::automatic}, {"f32", SaveType::f32}, {"bf16", SaveType::bf16}, {"f16", SaveType::f16}});
template <>
constexpr auto words_of<DeviceKind> =
    std::to_array<Word<DeviceKind>>({{"cpu", DeviceKind::cpu}, {"cuda", DeviceKind::cuda}, {"emu", DeviceKind::emu}});
template <>
constexpr auto words_of<AdvEstimator> = std::to_array<Word<AdvEstimator>>({{"grpo", AdvEstimator::grpo},
                                                                           {"rloo", AdvEstimator::rloo}});
template <>
constexpr auto words_of<AdvStd> = std::to_array<Word<AdvStd>>({{"sample", AdvStd::sample},
                                                               {"population", AdvStd::population}});
template <>
constexpr auto words_of<LossAgg> = std::to_array<Word<LossAgg>>({{"token-mean", LossAgg::token_mean},
                                                                 {"seq-mean-token-mean", LossAgg::seq_mean_token_mean},
                                                                 {"group-token-mean", LossAgg::group_token_mean},
                                                                 {"seq-mean-token-sum", LossAgg::seq_mean_token_sum},
                                                                 {"seq-mean-token-sum-norm",
                                                                  LossAgg::seq_mean_token_sum_norm}});
template <>
constexpr auto words_of<LossDenominator> = std::to_array<Word<LossDenominator>>({{"valid", LossDenominator::valid},
                                                                                 {"kept", LossDenominator::kept}});
template <>
constexpr auto words_of<TokenSubset> = std::to_array<Word<TokenSubset>>(
    {{"none", TokenSubset::none}, {"urs", TokenSubset::urs}, {"rpc", TokenSubset::rpc}, {"det", TokenSubset::det}});
template <>
constexpr auto words_of<LearnerAttention> =
    std::to_array<Word<LearnerAttention>>({{"dense", LearnerAttention::dense}, {"replay", LearnerAttention::replay}});
template <>
constexpr auto words_of<Moments> = std::to_array<Word<Moments>>({{"f32", Moments::f32}, {"bf16", Moments::bf16}});
template <>
constexpr auto words_of<LrSchedule> = std::to_array<Word<LrSchedule>>({{"constant", LrSchedule::constant},
                                                                       {"linear", LrSchedule::linear},
                                                                       {"cosine", LrSchedule::cosine}});
template <>
constexpr auto words_of<PolicyLoss> = std::to_array<Word<PolicyLoss>>({{"vanilla", PolicyLoss::ppo},
                                                                       {"gspo", PolicyLoss::gspo},
                                                                       {"cispo", PolicyLoss::cispo}});
template <>
constexpr auto words_of<KlLoss> =
    std::to_array<Word<KlLoss>>({{"k1", KlLoss::k1}, {"k2", KlLoss::k2}, {"k3", KlLoss::k3}, {"exact", KlLoss::exact}});

template <>
constexpr auto words_of<RolloutIs> = std::to_array<Word<RolloutIs>>({{"none", RolloutIs::none},
                                                                     {"paper", RolloutIs::paper},
                                                                     {"tis", RolloutIs::tis},
                                                                     {"icepop", RolloutIs::icepop},
                                                                     {"released", RolloutIs::released}});
template <>
constexpr auto words_of<RatioLevel> = std::to_array<Word<RatioLevel>>({{"token", RatioLevel::token},
                                                                       {"sequence", RatioLevel::sequence},
                                                                       {"geometric", RatioLevel::geometric}});
template <>
constexpr auto words_of<RolloutRs> = std::to_array<Word<RolloutRs>>({{"none", RolloutRs::none},
                                                                     {"sequence", RolloutRs::sequence},
                                                                     {"geometric", RolloutRs::geometric}});
template <>
constexpr auto words_of<GroupStatistics> =
    std::to_array<Word<GroupStatistics>>({{"all", GroupStatistics::all}, {"accepted", GroupStatistics::accepted}});
template <>
constexpr auto words_of<TooFew> = std::to_array<Word<TooFew>>({{"skip", TooFew::skip}, {"scale", TooFew::scale}});
template <>
constexpr auto words_of<StateWeight> = std::to_array<Word<StateWeight>>({{"none", StateWeight::none},
                                                                         {"z", StateWeight::z}});
template <>
constexpr auto words_of<ValKv> =
    std::to_array<Word<ValKv>>({{"dense", ValKv::dense}, {"rollout", ValKv::rollout}, {"both", ValKv::both}});

template <>
constexpr auto words_of<OnMismatch> = std::to_array<Word<OnMismatch>>({{"fail", OnMismatch::fail},
                                                                       {"continue", OnMismatch::carry_on}});

template <>
constexpr auto words_of<KvMethod> = std::to_array<Word<KvMethod>>({{"dense", KvMethod::dense},
                                                                   {"streaming_llm", KvMethod::streaming_llm},
                                                                   {"h2o", KvMethod::h2o},
                                                                   {"tova", KvMethod::tova},
                                                                   {"snapkv", KvMethod::snapkv},
                                                                   {"rkv", KvMethod::rkv},
                                                                   {"pyramidkv", KvMethod::pyramidkv},
                                                                   {"quest", KvMethod::quest},
                                                                   {"block_topk", KvMethod::block_topk}});
template <>
constexpr auto words_of<KvPrompt> = std::to_array<Word<KvPrompt>>({{"compress", KvPrompt::compress},
                                                                   {"protect", KvPrompt::protect},
                                                                   {"protect_first", KvPrompt::protect_first}});
template <>
constexpr auto words_of<KvScope> = std::to_array<Word<KvScope>>({{"per_head", KvScope::per_head},
                                                                 {"per_layer", KvScope::per_layer}});
template <>
constexpr auto words_of<KvTrigger> = std::to_array<Word<KvTrigger>>({{"buffer_full", KvTrigger::buffer_full},
                                                                     {"prefill_once", KvTrigger::prefill_once}});
template <>
constexpr auto words_of<KvRope> = std::to_array<Word<KvRope>>({{"absolute", KvRope::absolute},
                                                               {"cache_index", KvRope::cache_index}});
template <>
constexpr auto words_of<KvMergeMethod> = std::to_array<Word<KvMergeMethod>>({{"none", KvMergeMethod::none},
                                                                             {"cam", KvMergeMethod::cam},
                                                                             {"d2o", KvMergeMethod::d2o},
                                                                             {"lookm_pivot",
                                                                              KvMergeMethod::lookm_pivot},
                                                                             {"value", KvMergeMethod::value}});
template <>
constexpr auto words_of<MergeKeys> = std::to_array<Word<MergeKeys>>({{"none", MergeKeys::none},
                                                                     {"unrotated", MergeKeys::unrotated}});
template <>
constexpr auto words_of<GqaAgg> = std::to_array<Word<GqaAgg>>({{"max_logit", GqaAgg::max_logit},
                                                               {"mean_logit", GqaAgg::mean_logit},
                                                               {"mean_prob", GqaAgg::mean_prob}});
template <>
constexpr auto words_of<SoftmaxSpan> = std::to_array<Word<SoftmaxSpan>>(
    {{"exclude_window", SoftmaxSpan::exclude_window}, {"include_window", SoftmaxSpan::include_window}});
template <>
constexpr auto words_of<Pool> = std::to_array<Word<Pool>>({{"max", Pool::max}, {"avg", Pool::avg}});

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
  if constexpr (std::is_same_v<T, std::vector<std::string>>) return "array of strings";
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
  ConfigKey k{name, type_text<T>(allowed), unit, meaning, source, {}, {}};
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

std::vector<ConfigKey> model_and_data_keys() {
  return {
      KEY(model.path, any, "", "folder with config.json and safetensors to start from", "verl"),
      KEY(model.config, any, "",
          "config.json of a model that starts from random weights, instead of model.path, or the name of a shape in "
          "data/presets",
          "pare"),
      KEY(model.init, any, "",
          "random weights: normal with the config's initializer_range, or with 1 / sqrt(inputs) of each matrix",
          "pare"),
      KEY(model.dtype, any, "",
          "of weights and activations; bf16: the optimizer keeps the weights in f32 beside it; auto: f32 on the "
          "cpu, bf16 on cuda and emu",
          "pare; verl: fsdp_config.model_dtype"),
      KEY(model.enable_gradient_checkpointing, any, "",
          "keep only the inputs of the blocks and compute the rest again in the backward: less memory, the same bits",
          "verl"),

      KEY(data.task, one_of({"ssa", "jsonl"}), "",
          "ssa: the built-in task of short programs (generated); jsonl: prompts and answers from files, also where "
          "only "
          "the files are given",
          "pare"),
      KEY(data.variant, one_of({"default", "ans", "rep", "late"}), "", "ssa: how the teacher of `pare sft` errs",
          "pare"),
      KEY(data.train_files, any, "", "jsonl: training files", "verl"),
      KEY(data.val_files, any, "", "jsonl: validation files", "verl"),
      KEY(data.train_rows, within(1, 1e7), "prompts", "ssa: size of the fixed training set", "pare"),
      KEY(data.train_seed, at_least(0), "", "ssa: seed of the training set", "pare"),
      KEY(data.val_rows, within(1, 1e7), "prompts", "ssa: size of the validation set", "pare"),
      KEY(data.val_seed, at_least(0), "", "ssa: seed of the validation set", "pare"),
      KEY(data.min_statements, within(2, 23), "statements", "ssa: shortest program", "pare"),
      KEY(data.max_statements, within(2, 23), "statements", "ssa: longest program (26 letters, 3 of them given)",
          "pare"),
      KEY(data.val_min_statements, within(0, 23), "statements",
          "ssa: shortest program of validation; 0: as in training", "pare"),
      KEY(data.val_max_statements, within(0, 23), "statements", "ssa: longest program of validation; 0: as in training",
          "pare"),
      KEY(data.noise, within(-1, 1), "probability",
          "ssa: that the teacher writes a random digit as a statement's result; below 0: the variant's own", "pare"),
      KEY(data.noise_ramp, within(0, 1), "part of the run",
          "ssa: the teacher's noise grows linearly from 0 over this first part of `pare sft`", "pare"),
      KEY(data.tokenizer, any, "",
          "ssa, a tokenizer.json, a tokenizer.bin or a folder with one; empty: ssa for the task ssa, else the one of "
          "model.path",
          "verl"),
      KEY(data.chat_template, any, "",
          "jsonl: the format of text prompts. auto: that of the template in the tokenizer's folder, plain if there is "
          "none; plain: the prompt after BOS; qwen2.5, qwen3, llama-3, deepseek-r1: one turn of the user and the "
          "beginning of the assistant's; else a text with {problem}",
          "pare; verl: model.custom_chat_template"),
      KEY(data.apply_chat_template_kwargs.enable_thinking, any, "",
          "qwen3: the model may think; false: an empty thought stands before its response", "verl"),
      KEY(data.apply_chat_template_kwargs.date_string, any, "", "llama-3: today's date in the system message", "verl"),
      KEY(data.reward, any, "",
          "jsonl: the verifier: exact, contains, starts_with, gsm8k-strict, gsm8k-flexible, math-string, dapo, "
          "countdown or math-value; or command:PROGRAM ARGUMENTS, a program of yours that grades lines "
          "(data/reward_command.h); not needed by `pare sft`",
          "pare"),
      KEY(data.reward_timeout, above_to(0, 1e6), "seconds",
          "command: an answer that takes longer is waited for once more, from a new process; then the run fails",
          "pare"),
      KEY(data.prompt_key, any, "", "jsonl: key of the prompt; empty: prompt, problem or question", "verl"),
      KEY(data.answer_key, any, "", "jsonl: key of the answer; empty: answer, or else solution", "pare"),
      KEY(data.train_batch_size, at_least(1), "prompts", "prompts (`pare sft`: examples) per training step", "verl"),
      KEY(data.max_prompt_length, count(1), "tokens", "a longer prompt is an error", "verl"),
      KEY(data.max_response_length, count(1), "tokens", "a response that reaches it is cut", "verl"),
      KEY(data.shuffle, any, "", "a new order of the prompts in every epoch", "verl"),
  };
}

std::vector<ConfigKey> rollout_keys() {
  return {
      KEY(rollout.n, at_least(1), "samples", "responses per prompt: the group", "verl"),
      KEY(rollout.temperature, above(0), "", "logits are divided by it in the sampler and in the learner", "verl"),
      KEY(rollout.top_k, count(-1), "tokens", "sample among the k most probable only; 0 or -1: off", "verl"),
      KEY(rollout.top_p, above_to(0, 1), "probability", "sample from the smallest set that reaches it; 1: off", "verl"),
      KEY(rollout.allow_truncated_sampling, any, "",
          "train although top_k or top_p is on: off-policy, because the learner's distribution is not truncated",
          "pare"),
      KEY(rollout.max_num_seqs, count(1), "sequences", "sequences decoded together at most", "verl"),
      KEY(rollout.max_num_batched_tokens, count(1), "tokens", "rows of one forward of the rollout at most", "verl"),
      KEY(rollout.kv_cache_bytes, at_least(0), "bytes", "size of the page pool; 0: what max_num_seqs sequences need",
          "pare"),
      KEY(rollout.check_exact, any, "",
          "compare the sampler's log-probs with the learner's bit by bit; logs exact/mismatch_tokens. auto: where "
          "sampler and learner attend to the same and nothing is truncated",
          "pare"),
      KEY(rollout.on_mismatch, any, "",
          "an exact run in which a token differs warns at once and goes on to its end; then it ends with exit code 1 "
          "(fail) or 0 (continue)",
          "pare"),
      KEY(rollout.val_kwargs.n, at_least(1), "samples", "responses per validation prompt", "verl"),
      KEY(rollout.val_kwargs.temperature, at_least(0), "", "of validation; 0: greedy", "verl"),
      KEY(rollout.val_kwargs.top_k, count(-1), "tokens", "of validation; 0 or -1: off", "verl"),
      KEY(rollout.val_kwargs.top_p, above_to(0, 1), "probability", "of validation; 1: off", "verl"),
      KEY(rollout.val_kwargs.kv, any, "",
          "validation keeps all keys and values, or what rollout.kv says (sparse inference; the default of `pare "
          "eval`), "
          "or is made both ways",
          "pare"),
  };
}

std::vector<ConfigKey> kv_keys() {
  return {
      KEY(rollout.kv.method, any, "",
          "what the sampler keeps (streaming_llm, h2o, tova, snapkv, rkv, pyramidkv evict tokens) or reads (quest, "
          "block_topk choose blocks for every token) of the keys and values; dense: everything",
          "Sparse-RL, DistillSparse"),
      KEY(rollout.kv.budget, at_least(1), "tokens",
          "evicting: tokens that a compression event leaves in a layer, the newest ones included; with "
          "rollout.kv.prompt = protect, of the response",
          "Sparse-RL: 512"),
      KEY(rollout.kv.buffer, at_least(0), "tokens",
          "evicting: an event comes when this many tokens have gathered above the budget", "Sparse-RL, R-KV: 128"),
      KEY(rollout.kv.prompt, any, "",
          "evicting: the prompt may be evicted, is kept, or its first rollout.kv.protect_first tokens are", "pare"),
      KEY(rollout.kv.protect_first, at_least(0), "tokens", "evicting: with rollout.kv.prompt = protect_first", "pare"),
      KEY(rollout.kv.trigger, any, "",
          "evicting: an event whenever the buffer is full; or one at the end of the prompt and none after",
          "R-KV; SnapKV: prefill_once"),
      KEY(rollout.kv.scope, any, "", "evicting: every key head chooses, or all heads of a layer choose together",
          "R-KV; TOVA: per_layer"),
      KEY(rollout.kv.window, at_least(1), "tokens",
          "snapkv, rkv, pyramidkv: newest tokens, whose queries judge the others and which always stay", "R-KV: 8"),
      KEY(rollout.kv.sinks, at_least(0), "tokens", "streaming_llm: oldest tokens that stay", "StreamingLLM: 4"),
      KEY(rollout.kv.rope, any, "",
          "streaming_llm: positions as in the text, or counted within the cache, which the learner does not do",
          "StreamingLLM: cache_index"),
      KEY(rollout.kv.gqa_aggregation, any, "",
          "snapkv, rkv, pyramidkv, tova: how the query heads of a group become one", "R-KV; kvpress: mean_prob"),
      KEY(rollout.kv.softmax_span, any, "",
          "snapkv, rkv, pyramidkv, tova: the softmax runs over the tokens to choose from, or over the window too",
          "R-KV; SnapKV: include_window"),
      KEY(rollout.kv.pooling, any, "", "snapkv, rkv, pyramidkv: of scores over neighbours", "R-KV: max; SnapKV: avg"),
      KEY(rollout.kv.pooling_kernel, at_least(1), "tokens", "its width, odd; 1: none", "R-KV: 7; SnapKV: 5"),
      KEY(rollout.kv.rkv_lambda, within(0, 1), "", "rkv: weight of attention against redundancy; 1 is snapkv",
          "Sparse-RL: 0.1"),
      KEY(rollout.kv.rkv_threshold, within(-1, 1), "cosine", "rkv: above it two keys say the same", "R-KV"),
      KEY(rollout.kv.h2o_normalise, any, "",
          "h2o: divide the attention that a token received by the number of tokens that could see it", "kvpress"),
      KEY(rollout.kv.pyramid_beta, above(1), "",
          "pyramidkv: the last layer's budget is the mean budget divided by about this", "PyramidKV: 20"),
      KEY(rollout.kv.merge, any, "",
          "evicting: evicted tokens are merged into kept ones. cam: into those after it, by chance; d2o, lookm_pivot, "
          "value: into the one with the most similar key.  In every layer (D2O's code leaves the first two and "
          "the last as they are, which bounds no memory)",
          "CaM; D2O; LOOK-M; kvpress"),
      KEY(rollout.kv.merge_keys, any, "",
          "d2o, lookm_pivot: merge values only, or keys without their rotation too (D2O: keys as they lie)", "pare"),
      KEY(rollout.kv.cam_targets, at_least(1), "tokens", "cam: kept tokens that an evicted one is spread over", "CaM"),
      KEY(rollout.kv.d2o_ema, within(0, 1), "", "d2o: weight of the threshold so far against that of an event", "D2O"),
      KEY(rollout.kv.block, at_least(4), "tokens", "quest, block_topk: size of a block, 4 or 16", "Quest: 16"),
      KEY(rollout.kv.blocks, at_least(1), "blocks",
          "quest, block_topk: blocks that a token reads, the first and last ones included", "DistillSparse: 24, 32"),
      KEY(rollout.kv.first_blocks, at_least(0), "blocks", "quest, block_topk: oldest blocks that are always read",
          "DistillSparse's code"),
      KEY(rollout.kv.last_blocks, at_least(1), "blocks", "quest, block_topk: newest blocks that are always read",
          "DistillSparse's code"),
      KEY(rollout.kv.dense_layers, at_least(0), "layers", "quest, block_topk: the first layers read everything",
          "Quest, DistillSparse: 2"),
      KEY(rollout.kv.block_schedule, any, "",
          "quest, block_topk: FROM:BLOCKS, the number of blocks read from FROM blocks of context on; replaces "
          "rollout.kv.blocks",
          "Sparrow (arXiv 2606.08446)"),
  };
}

std::vector<ConfigKey> algorithm_keys() {
  return {
      KEY(reward_model.overlong_buffer.enable, any, "", "penalise responses that end close to the limit", "verl, DAPO"),
      KEY(reward_model.overlong_buffer.len, at_least(0), "tokens",
          "the penalty grows linearly over this many tokens before data.max_response_length; 0: a fifth of that",
          "verl, DAPO eq. 13"),
      KEY(reward_model.overlong_buffer.penalty_factor, at_least(0), "reward", "penalty at the limit", "verl"),

      KEY(algorithm.adv_estimator, any, "", "grpo: against the group's mean; rloo: against the mean of the others",
          "verl"),
      KEY(algorithm.norm_adv_by_std_in_grpo, any, "", "grpo: divide by the group's standard deviation",
          "verl, Dr. GRPO"),
      KEY(algorithm.adv_std, any, "", "grpo: standard deviation with n - 1 (sample) or n (population)", "verl: sample"),
      KEY(algorithm.adv_eps, at_least(0), "reward", "grpo: added to the standard deviation", "verl 1e-6, TRL 1e-4"),
      KEY(algorithm.adv_filter_threshold, at_least(0), "advantage",
          "samples with abs(A) below it are dropped before the learner's forward; 0: off", "DASH"),
      KEY(algorithm.use_kl_in_reward, any, "", "subtract the KL to the reference policy from the reward", "verl"),
      KEY(algorithm.kl_penalty, one_of({"k1", "k2", "k3"}), "", "its estimator", "verl, Schulman 2020"),
      KEY(algorithm.kl_ctrl.kl_coef, at_least(0), "", "its coefficient", "verl"),
      KEY(algorithm.filter_groups.enable, any, "",
          "dynamic sampling: replace groups whose scores are all equal by new prompts", "verl, DAPO"),
      KEY(algorithm.filter_groups.max_num_gen_batches, at_least(1), "batches",
          "generate this often at most; then the step uses what it has", "verl"),
  };
}

std::vector<ConfigKey> correction_keys() {
  return {
      KEY(algorithm.rollout_correction.veto, from_below(0, 1), "ratio",
          "a response with a token that the learner's policy finds less probable than the sampler did, by this ratio, "
          "is "
          "rejected: its raw ratio is below it; 0: off",
          "Sparse-RL: 1e-4; verl: rollout_token_veto_threshold"),
      KEY(algorithm.rollout_correction.rollout_is, any, "",
          "weight of a token by xi, the probability of the learner's old policy over the sampler's. paper: xi; tis: at "
          "most rollout_is_threshold; icepop: 0 outside rollout_is_bounds; released: as Sparse-RL's code",
          "Sparse-RL; verl"),
      KEY(algorithm.rollout_correction.rollout_is_level, any, "",
          "xi of the token; the product over the response; or its geometric mean", "verl: rollout_is"),
      KEY(algorithm.rollout_correction.rollout_is_threshold, above(0), "ratio", "tis: largest weight", "verl: 2"),
      KEY(algorithm.rollout_correction.rollout_is_bounds, at_least(0), "ratio",
          "icepop: the smallest and largest xi that "
          "count",
          "IcePop; verl: 0.5_5.0"),
      KEY(algorithm.rollout_correction.rollout_rs, any, "",
          "reject responses whose product, or geometric mean, of xi lies outside rollout_rs_threshold", "verl"),
      KEY(algorithm.rollout_correction.rollout_rs_threshold, at_least(0), "ratio",
          "smallest and largest, of the learner's probability over the sampler's (verl's k1: the inverse)", "verl"),
      KEY(algorithm.rollout_correction.group_statistics, any, "",
          "mean and standard deviation of a group are over all its responses, or over those not rejected",
          "Sparse-RL: all"),
      KEY(algorithm.rollout_correction.min_accepted, within(0, 1), "part of the judged responses",
          "an update with fewer accepted ones is skipped or scaled, since AdamW's steps do not shrink with the "
          "gradient; "
          "0: off",
          "pare"),
      KEY(algorithm.rollout_correction.too_few, any, "",
          "skip that update, or scale its learning rate by accepted / min_accepted", "pare"),
      KEY(algorithm.rollout_correction.acceptance, any, "",
          "log the exact acceptance rate, the sum over the vocabulary of min(learner's, sampler's probability): the "
          "rollout keeps the hidden state of every token",
          "DistillSparse"),
      KEY(algorithm.obrs.enable, any, "",
          "rejection sampling with a budget: a token stays in the loss with probability min(1, xi / lambda)",
          "OBRS, Jackpot"),
      KEY(algorithm.obrs.lambda, above(0), "ratio", "more: fewer tokens stay, closer to the learner's distribution",
          "Jackpot: 1"),
      KEY(algorithm.obrs.cap, at_least(0), "ratio", "largest weight of a token that stays; 0: off", "Jackpot: 3"),
      KEY(algorithm.obrs.state_weight, any, "",
          "tokens that stay are weighted by max(lambda, xi), which is unbiased at each state; z: and by the part of "
          "the "
          "draws that stay there",
          "Jackpot: z"),
      KEY(algorithm.obrs.top_k, count(0), "tokens",
          "z: summed over the tokens among the most probable k of learner and sampler; 0: over the vocabulary, exact",
          "Jackpot: 20"),
  };
}

std::vector<ConfigKey> actor_keys() {
  return {
      KEY(actor.policy_loss.loss_mode, any, "",
          "vanilla: PPO's clipped ratio per token; gspo: one ratio per sequence; cispo: clipped, detached ratio",
          "verl"),
      KEY(actor.clip_ratio_low, at_least(0), "", "the ratio is clipped to at least 1 - this", "verl"),
      KEY(actor.clip_ratio_high, at_least(0), "", "the ratio is clipped to at most 1 + this", "verl, DAPO clip-higher"),
      KEY(actor.clip_ratio_c, at_least(0), "", "dual clip: ratio bound for negative advantages, above 1; 0: off",
          "verl"),
      KEY(actor.loss_agg_mode, any, "", "how the losses of tokens become one number", "verl; group-token-mean: DAPO"),
      KEY(actor.loss_scale_factor, at_least(0), "tokens",
          "divisor of seq-mean-token-sum-norm; 0: data.max_response_length", "verl, Dr. GRPO"),
      KEY(actor.loss_denominator, any, "", "sequences and tokens that count: all (valid), or without dropped samples",
          "pare"),
      KEY(actor.use_kl_loss, any, "", "add the KL to the reference policy to the loss", "verl"),
      KEY(actor.kl_loss_coef, at_least(0), "", "its coefficient", "verl"),
      KEY(actor.kl_loss_type, any, "", "its estimator; exact: over the whole vocabulary", "verl, Schulman 2020"),
      KEY(actor.entropy_coeff, at_least(0), "", "entropy bonus", "verl"),
      KEY(actor.ppo_epochs, at_least(1), "", "passes over the rollouts of a step", "verl; DASH PPO-Multi"),
      KEY(actor.ppo_mini_batch_size, at_least(0), "prompts", "prompts per update of the weights; 0: all of the step",
          "verl; DASH PPO-Mini"),
      KEY(actor.ppo_max_token_len, at_least(1), "tokens", "rows of a micro-batch at most; a longer sequence goes alone",
          "verl: ppo_max_token_len_per_gpu"),
      KEY(actor.logits_chunk, at_least(1), "tokens", "rows of logits that exist at a time",
          "slime: log_probs_chunk_size"),
      KEY(actor.grad_clip, at_least(0), "", "norm to which the gradient is clipped; 0: off", "verl"),
      KEY(actor.token_subset, any, "",
          "response tokens that are trained on. urs: each with a probability; rpc: up to a random cut; det: a first "
          "part",
          "NAT"),
      KEY(actor.urs_probability, above_to(0, 1), "probability", "urs: that a token is kept", "NAT"),
      KEY(actor.rpc_min_tokens, at_least(1), "tokens", "rpc: the cut is uniform between this and the length", "NAT: C"),
      KEY(actor.det_fraction, above_to(0, 1), "part of the response", "det: kept", "NAT: beta"),
      KEY(actor.token_subset_ht, any, "", "urs, rpc: weight kept tokens by 1 / probability, which removes the bias",
          "NAT, Horvitz-Thompson 1952"),
      KEY(actor.optim.lr, at_least(0), "", "learning rate of AdamW", "verl"),
      KEY(actor.optim.betas, from_below(0, 1), "", "decay of the two moments", "verl"),
      KEY(actor.optim.eps, above(0), "", "added to the root of the second moment", "TRL: adam_epsilon"),
      KEY(actor.optim.weight_decay, at_least(0), "", "decoupled", "verl"),
      KEY(actor.optim.moments, any, "",
          "type of the two moments: bf16 takes half the memory, rounded at random so that their means are right",
          "pare"),
      KEY(actor.optim.lr_warmup_steps, at_least(0), "steps", "the rate grows linearly to lr at this step", "verl"),
      KEY(actor.optim.lr_scheduler_type, any, "", "after the warm-up", "verl"),
      KEY(actor.optim.min_lr_ratio, within(0, 1), "part of lr", "linear, cosine: rate of the last step", "verl"),
      KEY(actor.optim.decay_fraction, above_to(0, 1), "part of the run",
          "linear, cosine: the decay takes this last part; 1: everything after the warm-up", "pare"),
      KEY(learner.attention, any, "",
          "replay: every pass of the learner, forward and backward, attends to what the sampler attended to under "
          "rollout.kv.method, so that their log-probs agree bit by bit; dense: to everything",
          "pare"),
  };
}

std::vector<ConfigKey> trainer_keys() {
  return {
      KEY(trainer.device, any, "",
          "where the model computes, also given by --device; emu: the CUDA kernels, emulated on the CPU, for tests",
          "verl"),
      KEY(trainer.exact, any, "",
          "every sum has one order, so that the sampler's log-probs are the learner's bit by bit; false, or "
          "--exact=off, on cuda: linear layers by cuBLASLt, and those log-probs are the same but for roundings",
          "pare"),
      KEY(trainer.total_training_steps, at_least(1), "steps", "of `pare train`, `pare sft`", "verl"),
      KEY(trainer.seed, at_least(0), "", "of every random draw, but the ssa data sets have their own", "TRL"),
      KEY(trainer.threads, within(0, 1024), "threads", "0: one per core; changes no result", "pare"),
      KEY(trainer.test_freq, at_least(0), "steps", "validate every so often; 0: never", "verl"),
      KEY(trainer.val_before_train, any, "", "validate before the first step", "verl"),
      KEY(trainer.check_nan, any, "", "stop at the first op whose output is not finite", "pare"),
      KEY(trainer.experiment_name, any, "", "name of the run; empty: that of its configuration files", "verl"),
      KEY(trainer.default_local_dir, any, "",
          "the run directory, also given by --out; empty: runs/ experiment_name - time (UTC), as for a preset that is "
          "not "
          "given alone",
          "verl"),
      KEY(trainer.save_freq, at_least(0), "steps",
          "write a checkpoint every so often, at the last step and where a validation is the best so far; 0: only when "
          "interrupted",
          "verl"),
      KEY(trainer.max_actor_ckpt_to_keep, at_least(0), "checkpoints",
          "the last ones that are kept, beside the best in validation; 0: all", "verl"),
      KEY(trainer.save_dtype, any, "",
          "of the weights in model/, rounded to nearest; auto: that of the files of model.path, f32 where they have "
          "several or the weights were random.  Checkpoints always hold f32",
          "pare"),
      KEY(trainer.samples_freq, at_least(0), "steps", "write and show the responses of a step every so often; 0: never",
          "pare"),
      KEY(trainer.samples_per_step, at_least(0), "responses", "the first of such a step that are written; 0: all",
          "TRL: num_completions_to_print"),
  };
}
#undef KEY

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all;
    for (auto&& part : {model_and_data_keys(), rollout_keys(), kv_keys(), algorithm_keys(), correction_keys(),
                        actor_keys(), trainer_keys()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return keys;
}

}  // namespace pare
