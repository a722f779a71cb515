// rollout.free_cache_engine: keys and values in the memory of gradients and activations, which is of one side at a
// time.
#include "run/plan.h"
#include "tests/generator.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

TEST(SharedMemory, SidesHoldAsManyBytesAsTheLargerOne) {
  static size_t taken;
  taken = 0;
  constexpr static Memory kCounted = {.take =
                                          [](size_t n) {
                                            taken += n;
                                            return host_memory.take(n);
                                          },
                                      .give =
                                          [](void* p, size_t n) {
                                            taken -= n;
                                            host_memory.give(p, n);
                                          },
                                      .free = [] { return host_memory.free(); },
                                      .total = [] { return host_memory.total(); }};
  {
    SharedMemory shared(kCounted, 320);
    Arena a("a", kCounted, 100, &shared.sides[0]), b("b", kCounted, 192, &shared.sides[0]),
        c("c", kCounted, 256, &shared.sides[1]);
    EXPECT_EQ(taken, 320u);
    const auto* first = static_cast<char*>(a.alloc("first", DType::u8, {64}).data);
    EXPECT_EQ(b.alloc("behind it", DType::u8, {1}).data, first + 128) << "whole lines";
    EXPECT_EQ(c.alloc("over both", DType::u8, {200}).data, first);
    EXPECT_THROW(a.alloc("more than its limit", DType::u8, {64}), Error);
    EXPECT_THROW(Arena("d", kCounted, 1, &shared.sides[0]), std::logic_error) << "the side is full";
    const Arena d("d", kCounted, 64, &shared.sides[1]);
  }
  EXPECT_EQ(taken, 0u);
}

TEST(SharedMemory, SidesTakeTurns) {
  SharedMemory shared(host_memory, 64);
  const Arena a("a", host_memory, 64, &shared.sides[0]), b("b", host_memory, 64, &shared.sides[1]), own("own");
  {
    const MemoryTurn first(a), second(a), nothing(own);
    EXPECT_THROW(MemoryTurn{b}, std::logic_error);
  }
  const MemoryTurn turn(b);
  EXPECT_THROW(MemoryTurn{a}, std::logic_error);
  const MemoryTurn nothing(own);
}

TEST(SharedMemory, ARolloutIsOnOneSide) {
  Generator one(table_cpu, config(), kRoomy);
  SharedMemory shared(host_memory, 16 << 20);
  Arena kv("kv", host_memory, 16 << 20, &shared.sides[0]), scratch("scratch", host_memory, 16 << 20, &shared.sides[1]);
  Rollout two(one.model, kRoomy, kv, scratch);
  EXPECT_THROW(two.generate(mixed_requests(), mixed_sampling()), std::logic_error);
}

// What each phase leaves would be lost in the other: neither begins before the other has ended.
TEST(SharedMemory, UseOfWhatDoesNotLiveIsAnError) {
  for (const bool shares : {true, false}) {
    TrainingRun run(tiny_run("qwen3", {cat("rollout.free_cache_engine=", shares ? "true" : "false")}));
    Session& s = run.session;
    Rollout& rollout = run.trainer->engine().rollout;
    Learner& learner = run.trainer->learner();
    const std::vector<Group> groups = {{{5, 6, 7}, {{{8, 9}}}}};
    const std::vector<Request> requests = {{{5, 6, 7}, {1}, 3}};
    const auto learn = [&] { learner.accumulate(groups, random_terms(groups), {}); };
    const auto refused = [&](const std::function<void()>& use) {
      if (shares)
        EXPECT_THROW(use(), std::logic_error);
      else
        use();
    };
    learn();
    Learner::logprobs(*s.model, s.activations, groups, 1, {});
    learn();
    refused([&] { rollout.generate(requests, {.eos = {}}); });
    learner.step({});
    bool drawn = false;
    rollout.generate(requests, {.eos = {}}, {}, [&](const Completion& c) {
      if (c.tokens.size() != 2) return;
      drawn = true;
      refused([&] { Learner::logprobs(*s.model, s.activations, groups, 1, {}); });
      if (shares) refused(learn);
    });
    EXPECT_TRUE(drawn);
    learn();
    learner.drop_gradients();
    rollout.generate(requests, {.eos = {}});
  }
}

// Fills what both sides share with NaN of any type, as far as it is ever read before it is written.
void spoil(Session& s) {
  const size_t bytes = std::max(s.kv.used(), s.gradients.used());
  const std::vector<unsigned char> nan(bytes, 0xff);
  char* const begin = static_cast<char*>(s.kv.alloc("end", DType::u8, {1}).data) - s.kv.entries().back().offset;
  s.kv.rewind(s.kv.entries().back().offset);
  s.device.upload({make_tensor(begin, DType::u8, {static_cast<int64_t>(bytes)}), nan.data()});
}

// Whatever lies there when a side begins: keys and values of every policy, page tables, gradients of all shards.
TEST(SharedMemory, ChangesNoBit) {
  for (const std::vector<std::string>& keys : std::vector<std::vector<std::string>>{
           {},
           {"learner.shards=9", "actor.ppo_epochs=2", "actor.ppo_mini_batch_size=2"},
           {"rollout.kv.method=h2o", "rollout.kv.evict.budget=20", "rollout.kv.evict.buffer=5",
            "rollout.check_exact=false", "algorithm.rollout_correction.rollout_is=tis"},
           {"rollout.kv.method=rkv", "rollout.kv.evict.budget=20", "rollout.kv.evict.buffer=5",
            "rollout.kv.window.size=4", "learner.attention=replay"},
           {"rollout.kv.method=snapkv", "rollout.kv.evict.budget=20", "rollout.kv.evict.buffer=5",
            "rollout.kv.window.size=4", "rollout.kv.merge.method=d2o", "rollout.check_exact=false",
            "algorithm.rollout_correction.rollout_is=tis"},
           {"rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=6",
            "rollout.check_exact=false", "algorithm.rollout_correction.rollout_is=tis",
            "algorithm.rollout_correction.acceptance=true"},
           {"rollout.kv.method=block_topk", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=6",
            "algorithm.oversample.keep=3", "algorithm.oversample.by=acceptance",
            "rollout.kv.blocks.acceptance_target=0.86"},
           {"algorithm.rpo.enable=true", "actor.use_kl_loss=true", "actor.kl_loss_type=exact"}}) {
    SCOPED_TRACE(testing::PrintToString(keys));
    struct Run {
      std::vector<float> parameters;
      std::string certificates;
      double score = 0;
    };
    const auto run = [&](bool shares, bool spoils) {
      std::vector<std::string> all = keys;
      all.insert(all.end(), {cat("rollout.free_cache_engine=", shares ? "true" : "false"), "actor.optim.lr=0.05",
                             "data.train_batch_size=4", "rollout.n=4", "data.val_rows=3"});
      Session session(tiny_run("qwen3", all));
      session.train = std::make_unique<Rewarded>(std::move(session.train), digits);
      session.val = std::make_unique<Rewarded>(std::move(session.val), digits);
      GrpoTraining trainer(session);
      Run r;
      for (int step = 0; step < 3; step++) {
        if (spoils) spoil(session);
        r.certificates += trainer.step().text("certificate");
        if (spoils) spoil(session);
        r.score += trainer.evaluate().get("val-core/ssa/reward/mean@1");
      }
      r.parameters = session.model->get_parameters();
      return r;
    };
    const Run apart = run(false, false);
    for (const bool spoils : {false, true}) {
      const Run together = run(true, spoils);
      EXPECT_EQ(apart.certificates, together.certificates) << spoils;
      EXPECT_EQ(apart.score, together.score) << spoils;
      EXPECT_TRUE(same_bits(apart.parameters, together.parameters)) << spoils;
    }
  }
}

}  // namespace
}  // namespace pare::test
