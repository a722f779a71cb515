// Replay-based Policy Optimization (RPO): the responses of a group continue the beginning of an earlier response to
// their prompt, so that only the rest is sampled.
//
//   entry a of the prompt's row -> m ~ U{0 .. L}, then within 1 .. |a| -> prefix = a without its last m tokens
//   o_i = prefix || suffix_i; scores, rewards and lengths are those of o_i, the loss is over suffix_i
//   after the update: u <= epsilon: the member of largest reward becomes the entry, else any of them; or, without
//   updates of the cache, the first entry stays
//
// The first visit of a row samples a whole response for its entry.  A closing EOS counts as a token of a, so that
// something is always sampled; with m = |a| the group is that of a dense rollout, bit by bit.
//
// With the prefix in the loss (PrefixLoss::included) its gradient is sum_i f_i A_i grad log pi(prefix), f_i the token
// factors: exactly 0 for a denominator that the group shares, since its advantages sum to 0, and an artefact of the
// lengths for 1 / |o_i|.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "rl/metrics.h"
#include "rl/types.h"

namespace pare {

enum class RpoCut { fixed, half_shortest, length };
enum class SuffixCap { max_len, removed };
enum class PrefixLoss { masked, included };
enum class MissingRows { fail, lazy };

struct RpoKeys {
  bool enable = false;
  RpoCut cut = RpoCut::fixed;
  int64_t max_cut = 300;
  SuffixCap suffix_cap = SuffixCap::max_len;
  double epsilon = 0.1;
  bool update = true;
  PrefixLoss prefix_loss = PrefixLoss::masked;
  std::string cache_file;
  MissingRows missing = MissingRows::fail;
  bool operator==(const RpoKeys&) const = default;
};

struct CachedResponse {
  std::vector<int32_t> ids;  // at least one; a closing EOS included
  bool finished = false;     // ends with it
  double score = 0;          // the verifier's; NaN: not known
  double reward = 0;         // shaped; NaN: not known
  int64_t step = 0;          // in which it was sampled; 0: before the run
  int64_t shortest = 0;      // tokens of the shortest response of its group
};
using PrefixCache = std::map<int64_t, CachedResponse>;  // by row of the training set

// A prompt's row, and the name of the rollout that makes the row's first entry (sequence_uid, draw 1).
struct PromptRow {
  int64_t row = 0;
  uint64_t uid = 0;
};

// L: max_cut; half of the shortest response of the prompt's last group, rounded down; or the length of the entry.
int64_t cut_limit(const RpoKeys& keys, const CachedResponse& entry);
// m.  key = rng_key(seed, RngStream::rpo_cut, step), uid that of the group's first sample.
int64_t draw_cut(const RpoKeys& keys, const CachedResponse& entry, uint64_t key, uint64_t uid);
// Tokens that a suffix may have: what `prefix` leaves of max_response_length, or as many as were cut.
int64_t suffix_limit(const RpoKeys& keys, int64_t max_response_length, int64_t prefix, int64_t cut);
// The most that it is for any entry.
int64_t longest_suffix(const RpoKeys& keys, int64_t max_response_length);

// The use of an entry by one group.
struct PrefixVisit {
  int64_t row = 0;
  uint64_t uid = 0;       // of the group's first sample
  bool hit = false;       // the entry was there before the step
  int64_t age = 0;        // steps since it was sampled
  int64_t cut = 0;        // m
  int64_t prefix = 0;     // tokens that are left
  int64_t responses = 0;  // of the group
  bool dropped = false;   // by dynamic sampling
  int64_t first = 0;      // the first of the group's responses, among those of groups that were, or were not, dropped
};

// Which member of a group becomes the entry: that of largest reward (the shorter, then the lower of several), or any.
// key = rng_key(seed, RngStream::rpo_update, step), uid as above.
struct Choice {
  size_t member = 0;
  bool best = false;  // the draw was for the best
};
Choice draw_entry(const RpoKeys& keys, std::span<const Trajectory> group, uint64_t key, uint64_t uid);
CachedResponse cached(std::span<const Trajectory> group, size_t member, int64_t step);

// tokens/replayed and rpo/... of a step: `generated` tokens of responses, and `init` of the entries of new rows.
void report_prefixes(std::span<const PrefixVisit> visits, int64_t generated, int64_t init, Metrics& metrics);

}  // namespace pare
