#include "run/hints.h"

#include "base/text.h"

namespace pare {

std::vector<std::string> Hints::after(const Metrics& m) {
  std::vector<std::string> hints;
  const auto hint = [&](int which, bool applies, const std::string& text) {
    if (applies && said_.insert(which).second) hints.push_back(text);
  };
  const double updates = m.get("actor/updates");
  const bool learnt = updates > 0, first = m.get("training/global_step") == 1;
  const double equal = m.get("filter/zero_std_fraction"), right = m.get("filter/all_right_fraction");
  const ActorKeys& actor = config_.actor;

  hint(0, updates == 1,
       "one update per step is on-policy: the ratio is exactly 1, so a policy loss near 0, clip 0 and ppo_kl 0 are "
       "right and the gradient is not 0. The reward says whether it learns.");
  hint(1,
       learnt && first && config_.trainer.from_checkpoint.empty() &&
           (actor.use_kl_loss || config_.algorithm.use_kl_in_reward),
       "the KL to the reference policy starts at 0, because the policy still is the reference.");
  hint(2, learnt && actor.grad_clip > 0 && m.get("actor/grad_norm") > actor.grad_clip,
       format("grad is the norm before clipping: above actor.grad_clip = %g the gradient is scaled down to that.",
              actor.grad_clip));
  hint(3, learnt && first && actor.optim.lr_warmup_steps > 1,
       format("the learning rate is %.2g in this step and reaches %.2g in step %lld (actor.optim.lr_warmup_steps).",
              m.get("actor/lr"), actor.optim.lr, static_cast<long long>(actor.optim.lr_warmup_steps)));
  hint(4, updates == 0,
       "a step without an update (-): no group had rewards that differ, or everything was filtered out. The weights "
       "stay as they are.");
  // Above nine in ten groups the reward curve stays flat, whatever the learning rate is.
  hint(5, equal >= 0.9,
       format("%.0f %% of the groups had equal rewards (%.0f %% all right): advantages are differences within a group, "
              "so these teach nothing, and the reward stays flat while they are the rule. %s",
              100 * equal, 100 * right,
              config_.algorithm.rpo.enable ? "With algorithm.rpo the beginning that is given may decide the answer: "
                                             "cut more (algorithm.rpo.cut, max_cut)."
              : right > equal / 2          ? "The problems are too easy."
                                  : "Are the problems too hard, or is the answer not found? Look at the samples; "
                                    "rollout.n more responses find a right one more often."));
  hint(6, m.get("response_length/clip_ratio") >= 0.5,
       format("%.0f %% of the responses were cut at data.max_response_length = %lld before they were finished.",
              100 * m.get("response_length/clip_ratio"), static_cast<long long>(config_.data.max_response_length)));
  hint(7, first && config_.algorithm.rpo.enable,
       "with algorithm.rpo responses begin with what an earlier one wrote: the reward is theirs, that of the policy "
       "alone is the validation's. saved is the part of their tokens that was not sampled; negative: first entries "
       "cost more.");
  const double idle = m.get("shards/idle"), groups = m.get("shards/groups"), largest = m.get("shards/imbalance");
  const auto shards = static_cast<long long>(config_.learner.shards);
  hint(8, idle > 0,
       format("an update had %.2g groups per shard (learner.shards = %lld): %.0f %% of the shards were empty and left "
              "their ranks idle. Train on more groups per update or set fewer shards.",
              groups, shards, 100 * idle));
  hint(
      9, groups < 4 && largest > 1.2 && !(idle > 0),
      format("the largest shard of an update had %.2f times the mean FLOPs, and all ranks wait for it: %.2g groups per "
             "shard (learner.shards = %lld) are too few to balance. Use at least four%s.",
             largest, groups, shards,
             config_.trainer.balance_batch ? "" : ", or trainer.balance_batch=true, which deals groups by FLOPs"));
  return hints;
}

}  // namespace pare
