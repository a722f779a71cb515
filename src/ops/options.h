// Options of ops that a configuration names.
#pragma once
#include <cstdint>
#include <limits>

namespace pare {

// Summary of the keys of a block, and the score of a block for a key head:
//   minmax  channelwise min and max; max over the heads q of the group of sum_c max(q_c min_c, q_c max_c), which bounds
//           every q.k from above (Quest, Tang et al. 2024, section 3.2)
//   mean    of the keys; its dot product with the mean of the group's q (block top-k)
// Scores carry no softmax scale.
enum class BlockSummary : int32_t { minmax, mean };

// Reduction over the query heads of a group: the largest or the mean logit before the softmax, or the mean probability.
enum class GqaAgg : int32_t { max_logit, mean_logit, mean_prob };
// Slots of the softmax of a window's query: the candidates, or every slot from `first` to the query's own.
enum class SoftmaxSpan : int32_t { exclude_window, include_window };
enum class Pool : int32_t { max, avg };

// Rows that are merged (KvMerge): V only, or K too, rotated back to position 0 (RopeBwd) and then to the position of
// the kept slot (RopeFwd).
enum class MergeKeys : int32_t { none, unrotated };

// The loss of one token as a function of its log-prob lp (token_loss.h states the formulas and their sources).
enum class PolicyLoss : int32_t { nll, ppo, gspo, cispo };
// k1, k2, k3: of the sampled token alone; over the vocabulary, p being the policy and q the reference: exact is
// KL(p || q), with dz = p (log p - log q - KL), exact_forward is KL(q || p), with dz = p - q.
enum class KlLoss : int32_t { none, k1, k2, k3, exact, exact_forward };
inline bool is_exact(KlLoss kl) { return kl == KlLoss::exact || kl == KlLoss::exact_forward; }
// Truncated sampling keeps the top_k largest logits (ties: lower id first), of these the smallest set of largest ones
// whose probability among them reaches top_p, and of these the ids with at least min_p times the largest probability.
struct Truncation {
  int32_t top_k = 0;  // 0: off
  float top_p = 1;    // 1: off
  float min_p = 0;    // 0: off
  bool on() const { return top_k > 0 || top_p < 1 || min_p > 0; }
  bool valid() const { return top_k >= 0 && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1; }
};
// Score centring (arXiv 2609.20807) subtracts from the score of a sampled token a, w_a d log p_a / dz, its mean under
// the sampler's distribution q: sum_v c_v d log p_v / dz = c - p sum(c), where c_v = q_v F(p_v / q_v).  F is the token
// weight of the rollout correction: min(x, cap) `by_ratio`, else 1; 0 outside [low, high].
struct Centring {
  bool on = false, by_ratio = false;
  float low = 0, high = std::numeric_limits<float>::max(), cap = std::numeric_limits<float>::max();
};
struct LossSpec {
  PolicyLoss policy = PolicyLoss::nll;
  KlLoss kl = KlLoss::none;
  float clip_low = 0.2f, clip_high = 0.2f;  // ratio kept in [1 - clip_low, 1 + clip_high]
  float clip_c = 0;                         // dual clip for negative advantages; 0: off
  float kl_coef = 0, entropy_coef = 0;
  float temperature = 1;
  bool kl_ratio = false;  // k1, k2, k3 are multiplied by the ratio, and their gradient is that of the product
  Centring centring = {};
};

}  // namespace pare
