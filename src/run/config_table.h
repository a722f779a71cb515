// Macros of the key table: one row per key (KEY, or FREE, PATH, APART: see KeyDecides), naming a member of Config, with
// its contradictions (REFUSE_IF) and flags; the words of its enums (WORDS).  Only for config_keys_*.cpp.
#pragma once
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "run/config.h"

namespace pare::config_table {

// Allowed values: a range of numbers, or one of some words.
struct Allowed {
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
  bool low_open = false, high_open = false;  // the bound itself is not allowed
  std::vector<std::string> words = {};
};
inline const Allowed any{};
inline Allowed at_least(double low) { return {.low = low}; }
inline Allowed within(double low, double high) { return {.low = low, .high = high}; }
// Counts of things in memory: sums and products stay exact.
inline Allowed count(double low) { return within(low, 1e9); }
inline Allowed above(double low) { return {.low = low, .low_open = true}; }
inline Allowed above_to(double low, double high) { return {.low = low, .high = high, .low_open = true}; }
inline Allowed from_below(double low, double high) { return {.low = low, .high = high, .high_open = true}; }
inline Allowed one_of(std::vector<std::string> words) { return {.words = std::move(words)}; }

inline std::string range_text(const Allowed& a) {
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
inline std::string found_text(const TomlItem& item) {
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
inline constexpr std::array<Word<E>, 0> words_of;
#define WORDS(Enum, ...)                             \
  template <>                                        \
  inline constexpr auto words_of<Enum> = [] {        \
    using enum Enum;                                 \
    return std::to_array<Word<Enum>>({__VA_ARGS__}); \
  }();
// clang-format off
WORDS(KlLoss, {"k1", k1}, {"k2", k2}, {"k3", k3}, {"exact", exact})
WORDS(Init, {"config", config}, {"fan_in", fan_in})
WORDS(ActType, {"auto", automatic}, {"f32", f32}, {"bf16", bf16})
WORDS(RunCommand, {"any", any}, {"train", train}, {"sft", sft})
WORDS(SaveType, {"auto", automatic}, {"f32", f32}, {"bf16", bf16}, {"f16", f16})
WORDS(DeviceKind, {"cpu", cpu}, {"cuda", cuda}, {"emu", emu})
WORDS(ValKv, {"dense", dense}, {"rollout", rollout}, {"both", both})
WORDS(OnMismatch, {"fail", fail}, {"continue", carry_on})
WORDS(KvMethod, {"dense", dense}, {"streaming_llm", streaming_llm}, {"h2o", h2o}, {"tova", tova}, {"snapkv", snapkv},
      {"rkv", rkv}, {"pyramidkv", pyramidkv}, {"quest", quest}, {"block_topk", block_topk})
WORDS(KvPrompt, {"compress", compress}, {"protect", protect})
WORDS(KvScope, {"per_head", per_head}, {"per_layer", per_layer})
WORDS(KvTrigger, {"buffer_full", buffer_full}, {"prefill_once", prefill_once})
WORDS(KvMergeMethod, {"none", none}, {"d2o", d2o}, {"value", value})
WORDS(MergeKeys, {"none", none}, {"unrotated", unrotated})
WORDS(GqaAgg, {"max_logit", max_logit}, {"mean_logit", mean_logit}, {"mean_prob", mean_prob})
WORDS(SoftmaxSpan, {"exclude_window", exclude_window}, {"include_window", include_window})
WORDS(Pool, {"max", max}, {"avg", avg})
WORDS(AdvEstimator, {"grpo", grpo}, {"rloo", rloo})
WORDS(AdvStd, {"sample", sample}, {"population", population})
WORDS(RolloutIs, {"none", none}, {"paper", paper}, {"tis", tis}, {"icepop", icepop}, {"released", released})
WORDS(RatioLevel, {"token", token}, {"geometric", geometric})
WORDS(RolloutRs, {"none", none}, {"token", token}, {"sequence", sequence}, {"geometric", geometric})
WORDS(GroupStatistics, {"all", all}, {"accepted", accepted})
WORDS(LengthReference, {"all", all}, {"correct", correct})
WORDS(RpoCut, {"fixed", fixed}, {"half_shortest", half_shortest}, {"length", length})
WORDS(SuffixCap, {"max_len", max_len}, {"removed", removed})
WORDS(PrefixLoss, {"masked", masked}, {"included", included})
WORDS(MissingRows, {"fail", fail}, {"lazy", lazy})
WORDS(StateWeight, {"none", none}, {"z", z})
WORDS(FilterMetric, {"score", score}, {"reward", reward})
WORDS(OversampleBy, {"reward", reward}, {"acceptance", acceptance})
WORDS(LossAgg, {"token-mean", token_mean}, {"seq-mean-token-mean", seq_mean_token_mean},
      {"group-token-mean", group_token_mean}, {"seq-mean-token-sum", seq_mean_token_sum},
      {"seq-mean-token-sum-norm", seq_mean_token_sum_norm})
WORDS(LossDenominator, {"valid", valid}, {"kept", kept})
WORDS(TokenSubset, {"none", none}, {"urs", urs}, {"rpc", rpc}, {"det", det})
WORDS(LearnerAttention, {"dense", dense}, {"replay", replay})
WORDS(DeviceComm, {"auto", any}, {"nccl", nccl}, {"host", host})
WORDS(Moments, {"f32", f32}, {"bf16", bf16})
WORDS(LrSchedule, {"constant", constant}, {"linear", linear}, {"cosine", cosine})
WORDS(PolicyLoss, {"vanilla", ppo}, {"gspo", gspo}, {"cispo", cispo})
WORDS(DistillOrder, {"before", before}, {"after", after})
WORDS(DistillKl, {"k2", k2}, {"k3", k3}, {"exact_reverse", exact_reverse}, {"exact_forward", exact_forward})
// clang-format on

// ---- one type: its name, how it is read and how it is written ------------------------------------------------------

inline bool contains(const std::vector<std::string>& words, const std::string& word) {  // no words: every word
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
  if constexpr (std::is_same_v<T, std::vector<int64_t>>) return "array of integers" + range_text(a);
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
inline bool read(const TomlValue& v, const Allowed&, bool& x) {
  if (v.kind == TomlValue::Kind::string) return false;
  const bool yes = v.text == "true" || v.text == "True";  // Python's spelling is common on command lines
  if (!yes && v.text != "false" && v.text != "False") return false;
  x = yes;
  return true;
}
inline bool read(const TomlValue& v, const Allowed& a, std::optional<bool>& x) {  // none: auto
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
inline bool read(const TomlValue& v, const Allowed& a, std::string& x) {
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

inline std::string show(bool x) { return x ? "true" : "false"; }
inline std::string show(const std::optional<bool>& x) { return x ? show(*x) : toml_quote("auto"); }
inline std::string show(int64_t x) { return std::to_string(x); }
inline std::string show(double x) {
  std::array<char, 32> s;
  const std::string t(s.data(), std::to_chars(s.data(), s.data() + s.size(), x).ptr);
  return t.find_first_of(".e") == std::string::npos ? t + ".0" : t;
}
inline std::string show(const std::string& x) { return toml_quote(x); }
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

// The end of a row, in any number: a flag of commands that stands for the key, the condition under which its value
// parts runs (ConfigKey::parts), or a check.
struct Flag {
  const char* name;
};
struct PartsIf {
  bool (*holds)(const Config& run, const Config& resumed);
};
// The loss includes tokens of earlier steps.
inline bool trains_on_prefixes(const Config& c) { return c.algorithm.rpo.enable && !shares_prefixes(c); }
// A check that refuses the key's value `v` in the configuration `c`.  The message begins with the key's name.
#define REFUSE_IF(condition, ...)                                        \
  []([[maybe_unused]] const Config& c, [[maybe_unused]] const auto& v) { \
    return (condition) ? cat(__VA_ARGS__) : std::string();               \
  }

template <class Member, class More>
void add(ConfigKey& k, Member member, More more) {
  if constexpr (std::is_same_v<More, Flag>)
    k.flags.push_back(more.name);
  else if constexpr (std::is_same_v<More, PartsIf>)
    k.parts = more.holds;
  else if constexpr (std::is_invocable_v<More, const Config&>)
    k.checks.push_back(more);
  else
    k.checks.push_back([member, more, name = k.name](const Config& c) {
      if (const std::string why = more(c, member(c)); !why.empty()) fail(name, why);
    });
}

// `member` gives a reference to the key's member in a Config (const or not).
template <class Member, class... More>
ConfigKey key(KeyDecides decides, const char* name, Member member, Allowed allowed, const char* unit,
              const char* meaning, const char* source, More... more) {
  using T = std::remove_reference_t<decltype(member(std::declval<Config&>()))>;
  ConfigKey k{name, type_text<T>(allowed), unit, meaning, source, decides, {}, {}, {}, {}, {}, {}};
  (add(k, member, more), ...);
  if constexpr (is_list<T>) {
    k.show = [member](const Config& c) {
      return "[" + join(member(c), ", ", [](const auto& x) { return show(x); }) + "]";
    };
    k.assign = [member, allowed, type = k.type](Config& c, const TomlItem& item) {
      const bool none = !item.array && item.values[0].kind == TomlValue::Kind::text && item.values[0].text.empty();
      T list(none ? 0 : item.values.size());
      bool good = item.array || !std::is_same_v<T, std::vector<double>>;
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
#define DECIDES(decides, path, ...) \
  key(                              \
      KeyDecides::decides, #path, [](auto& c) -> auto& { return c.path; }, __VA_ARGS__)
#define KEY(path, ...) DECIDES(bits, path, __VA_ARGS__)
#define FREE(path, ...) DECIDES(nothing, path, __VA_ARGS__)
#define PATH(path, ...) DECIDES(file, path, __VA_ARGS__)
#define APART(path, ...) DECIDES(apart, path, __VA_ARGS__)

// Keys that matter under the same condition.
struct KeyGroup {
  std::vector<KeyCondition> when;
  std::vector<ConfigKey> keys;
};
using Groups = std::vector<KeyGroup>;

inline KeyCondition is(const char* key, std::vector<std::string> values) { return {key, std::move(values)}; }
inline KeyCondition is_not(const char* key, const char* value) { return {key, {value}, true}; }

// The rows of the table, by section.
Groups model_keys(), data_keys(), rollout_keys(), kv_keys(), algorithm_keys(), correction_keys(), rpo_keys();
Groups actor_keys(), distill_keys(), exact_keys(), trainer_keys();

}  // namespace pare::config_table
