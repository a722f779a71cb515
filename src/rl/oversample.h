// Oversampling (DistillSparse, eq. 4): of the rollout.n responses to a prompt a part goes on, the rest is as if it had
// never been sampled: advantages, filters and denominators are over what is kept.
//
// The estimate is not corrected for the choice, which favours what went well; the paper's successor (arXiv 2606.08446,
// appendix A) finds that rewards of the rollout rise and training stays behind all the same.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "rl/types.h"

namespace pare {

enum class OversampleBy { reward, acceptance };

struct OversampleKeys {
  int64_t keep = 0;  // 0: all
  OversampleBy by = OversampleBy::reward;
  bool operator==(const OversampleKeys&) const = default;
};

// The `keep` members with the largest values, ascending; the first of equal ones.  All, if there are not more.
std::vector<size_t> best_members(std::span<const double> values, int64_t keep);

// The members of a group that stay, given their scores (before any shaping): all, unless the choice is by reward.
std::vector<size_t> members_by_score(const OversampleKeys& keys, std::span<const double> scores);

// Drops, by acceptance, all but the keys.keep members of each group with the largest mean of min(1, xi) over their
// tokens: the probability that a token drawn by the sampler is kept as one of the old policy's.  Needs old log-probs.
void keep_most_accepted(const OversampleKeys& keys, std::vector<Trajectory>& samples);

}  // namespace pare
