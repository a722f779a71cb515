// Hints: said where they apply, once.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "run/hints.h"

namespace pare::test {
namespace {

struct Step {
  double number = 1, updates = 2, grad_norm = 0.1, equal = 0.2, right = 0.1, cut = 0, lr = 1e-3, groups = NAN,
         idle = NAN, imbalance = NAN;
};

Metrics metrics(const Step& s) {
  Metrics m;
  m.set("training/global_step", s.number);
  m.set("actor/updates", s.updates);
  m.set("actor/grad_norm", s.updates ? s.grad_norm : std::numeric_limits<double>::quiet_NaN());
  m.set("filter/zero_std_fraction", s.equal);
  m.set("filter/all_right_fraction", s.right);
  m.set("response_length/clip_ratio", s.cut);
  m.set("actor/lr", s.lr);
  m.set("shards/groups", s.groups);
  m.set("shards/idle", s.idle);
  m.set("shards/imbalance", s.imbalance);
  return m;
}

// One hint that has `part` in it, and none when the same happens again.
void expect_once(const Config& config, const Step& step, const std::string& part) {
  Hints hints(config);
  const auto first = hints.after(metrics(step));
  ASSERT_EQ(first.size(), 1u) << part;
  EXPECT_NE(first[0].find(part), std::string::npos) << first[0];
  EXPECT_TRUE(hints.after(metrics(step)).empty()) << part;
}

TEST(Hints, OnlyWhatApplies) {
  Config plain, kl, warm, loose;
  kl.actor.use_kl_loss = true;
  warm.actor.optim.lr_warmup_steps = 10;
  loose.actor.grad_clip = 0;
  EXPECT_TRUE(Hints(plain).after(metrics({})).empty());
  EXPECT_TRUE(Hints(plain).after(Metrics()).empty());  // a validation
  expect_once(plain, {.updates = 1}, "ratio is exactly 1");
  expect_once(kl, {}, "KL to the reference policy starts at 0");
  EXPECT_TRUE(Hints(kl).after(metrics({.number = 2})).empty());  // after a resume
  kl.trainer.from_checkpoint = "checkpoints/step-2";             // whose policy has left it
  EXPECT_TRUE(Hints(kl).after(metrics({})).empty());
  expect_once(warm, {.lr = 1e-7}, "reaches 1e-06 in step 10");
  expect_once(plain, {.grad_norm = 3}, "actor.grad_clip = 1");
  EXPECT_TRUE(Hints(loose).after(metrics({.grad_norm = 3})).empty());
  expect_once(plain, {.number = 5, .updates = 0}, "without an update");
  expect_once(plain, {.number = 5, .equal = 0.95, .right = 0}, "95 % of the groups had equal rewards (0 % all right)");
  expect_once(plain, {.number = 5, .equal = 1, .right = 1}, "too easy");
  Config rpo;
  rpo.algorithm.rpo.enable = true;
  expect_once(rpo, {}, "that of the policy alone is the validation's");
  expect_once(rpo, {.number = 5, .equal = 0.95}, "cut more (algorithm.rpo.cut");
  Config eight;
  eight.learner.shards = 8;
  expect_once(eight, {.groups = 2.5, .idle = 0, .imbalance = 1.37},
              "had 1.37 times the mean FLOPs, and all ranks wait for it: 2.5 groups per shard (learner.shards = 8)");
  EXPECT_TRUE(Hints(eight).after(metrics({.groups = 2.5, .idle = 0, .imbalance = 1.2})).empty());
  EXPECT_TRUE(Hints(eight).after(metrics({.groups = 4, .idle = 0, .imbalance = 1.37})).empty());
  expect_once(eight, {.groups = 0.625, .idle = 0.375, .imbalance = 2},
              "0.62 groups per shard (learner.shards = 8): 38 %");
  eight.trainer.balance_batch = false;
  expect_once(eight, {.groups = 3, .idle = 0, .imbalance = 1.37}, "trainer.balance_batch=true, which deals groups");
  expect_once(plain, {.cut = 0.75}, "75 % of the responses were cut at data.max_response_length = 512");
}

TEST(Hints, SeveralAtOnce) {
  Config config;
  config.algorithm.use_kl_in_reward = true;
  EXPECT_EQ(Hints(config).after(metrics({.updates = 1, .grad_norm = 9, .cut = 1})).size(), 4u);
}

}  // namespace
}  // namespace pare::test
