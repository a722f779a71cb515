// DistillSparse: what samples is not the policy theta that reads everything, but one of its own: theta with low-rank
// adapters phi, which reads blocks.  An update has two phases on the same samples:
//
//   A  theta, dense: the policy loss as ever, with its rollout correction.  Its log-probs are the teacher's, T.
//   B  phi, sparse, theta frozen: for the sparse policy all samples are on-policy, those that A rejects too.  Clipped
//      policy loss, its ratios to what the sampler logged, + lambda * KL of student (sparse) and teacher (dense), over
//      the same tokens, aggregated as the policy loss.
//
// KL, with s and t the log-probs of a token (token_loss.h, KlLoss): k2 has in expectation the gradient of KL(student ||
// teacher), k3 (released) that of KL(teacher || student); exact_reverse and exact_forward are these two over the whole
// vocabulary, by a dense pass over the same rows.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "rl/loss.h"

namespace pare {

// Order of the steps.  before: B's gradient is taken before A's step, so that teacher and student share theta.  after:
// A's step comes first, as released; T is of the theta before it.
enum class DistillOrder { before, after };
enum class DistillKl { k2, k3, exact_reverse, exact_forward };

struct DistillKeys {
  bool enable = false;
  DistillOrder order = DistillOrder::before;
  DistillKl kl_type = DistillKl::k3;
  double lambda = 1e-3, lr_scale_factor = 5, grad_clip = 1;
  bool operator==(const DistillKeys&) const = default;
};

LossSpec student_loss_spec(const ActorKeys& actor, const DistillKeys& distill, double temperature);

// Phase B of the update that phase A made `dense` of: every sample that the filter left.  Its ref_logprob is T: from
// `teacher`, which A gave for the rows of `dense`; of other samples it is their old log-prob in the `first` update of a
// step, else from `logprobs`, which is given groups of them.  With an exact KL nobody asks for T.
Update student_update(const ActorKeys& actor, const DistillKeys& distill, int64_t max_response_length,
                      std::span<const Trajectory> samples, std::span<const TokenPlan> plans, const Update& dense,
                      const TokenOuts& teacher, bool first,
                      const std::function<TokenOuts(const std::vector<Group>&)>& logprobs);

}  // namespace pare
