#include "rl/prefix_cache.h"

#include <algorithm>

#include "base/rng.h"

namespace pare {

int64_t cut_limit(const RpoKeys& keys, const CachedResponse& entry) {
  if (keys.cut == RpoCut::fixed) return keys.max_cut;
  return keys.cut == RpoCut::half_shortest ? entry.shortest / 2 : std::ssize(entry.ids);
}

int64_t draw_cut(const RpoKeys& keys, const CachedResponse& entry, uint64_t key, uint64_t uid) {
  expect(!entry.ids.empty(), "a cached response without a token");
  const int64_t m = Rng(key, uid).below(static_cast<uint32_t>(cut_limit(keys, entry) + 1));
  return std::clamp<int64_t>(m, 1, std::ssize(entry.ids));
}

int64_t suffix_limit(const RpoKeys& keys, int64_t max_response_length, int64_t prefix, int64_t cut) {
  return keys.suffix_cap == SuffixCap::removed ? cut : max_response_length - prefix;
}

int64_t longest_suffix(const RpoKeys& keys, int64_t max_response_length) {
  if (!keys.enable || keys.suffix_cap == SuffixCap::max_len || keys.cut == RpoCut::length) return max_response_length;
  const int64_t limit = keys.cut == RpoCut::fixed ? keys.max_cut : max_response_length / 2;
  return std::clamp<int64_t>(limit, 1, max_response_length);
}

Choice draw_entry(const RpoKeys& keys, std::span<const Trajectory> group, uint64_t key, uint64_t uid) {
  expect(!group.empty(), "a group without responses");
  Rng rng(key, uid);
  if (uniform_open(rng.next()) > keys.epsilon) return {rng.below(static_cast<uint32_t>(group.size())), false};
  const auto best = std::min_element(group.begin(), group.end(), [](const Trajectory& a, const Trajectory& b) {
    return a.reward != b.reward ? a.reward > b.reward : a.response_length() < b.response_length();
  });
  return {static_cast<size_t>(best - group.begin()), true};
}

CachedResponse cached(std::span<const Trajectory> group, size_t member, int64_t step) {
  const Trajectory& s = group[member];
  CachedResponse entry{s.prefix, s.finished, s.score, s.reward, step, s.response_length()};
  entry.ids.insert(entry.ids.end(), s.tokens.begin(), s.tokens.end());
  for (const Trajectory& t : group) entry.shortest = std::min(entry.shortest, t.response_length());
  return entry;
}

void report_prefixes(std::span<const PrefixVisit> visits, int64_t generated, int64_t init, Metrics& m) {
  Summary hit, age, cut, prefix;
  int64_t responses = 0, replayed = 0;
  for (const PrefixVisit& v : visits) {
    hit.add(v.hit);
    cut.add(static_cast<double>(v.cut));
    prefix.add(static_cast<double>(v.prefix));
    if (v.hit) age.add(static_cast<double>(v.age));
    responses += v.responses;
    replayed += v.prefix * v.responses;
  }
  const auto all = static_cast<double>(generated + replayed);  // of the responses
  m.set("tokens/replayed", static_cast<double>(replayed));
  m.set("rpo/hit_rate", hit.mean());
  m.set("rpo/age", age.mean());
  m.set("rpo/cut", cut.mean());
  m.set("rpo/prefix_tokens", prefix.mean());
  m.set("rpo/prefix_share", static_cast<double>(replayed) / all);
  m.set("rpo/suffix_tokens", static_cast<double>(generated) / static_cast<double>(responses));
  m.set("rpo/init_tokens", static_cast<double>(init));
  m.set("rpo/saved", 1 - static_cast<double>(generated + init) / all);
}

}  // namespace pare
