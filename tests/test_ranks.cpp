// Ranks that are threads of this process: they are ranks as others are (tests/mpi), and plans are made of them.
#include <atomic>
#include <mutex>

#include "base/half.h"
#include "comm/threads.h"
#include "run/ranks.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

TEST(Threads, AreRanks) {
  std::atomic<int> ranks = 0;
  run_ranks(2, 3, [&](Comm& comm) {
    const int own = comm.rank();
    ranks += 1 << own;
    EXPECT_EQ(comm.ranks(), 6);
    EXPECT_EQ(comm.node_ranks(), 3);
    EXPECT_EQ(comm.node_rank(), own % 3);
    EXPECT_EQ(comm.host(), own < 3 ? "node 0" : "node 1");
    for (int round = 0; round < 50; round++) {  // none is overtaken
      const std::vector<std::string> all = comm.gather(std::string(static_cast<size_t>(own * round), 'a' + own));
      for (int r = 0; r < 6; r++)
        ASSERT_EQ(all[static_cast<size_t>(r)], std::string(static_cast<size_t>(r * round), 'a' + r));
    }
    EXPECT_EQ(comm.broadcast(cat("of ", own), 4), "of 4");
    EXPECT_EQ(comm.sum(own), 15);
    std::vector<float> x(3, static_cast<float>(own)), y(3, -1);
    comm.reduce({x.data(), 12}, own == 1 ? y.data() : nullptr, DType::f32, 1);
    EXPECT_EQ(y[2], own == 1 ? 15 : -1);
    // In place, of bf16: every sum is rounded, and 256 + 1 to 256.
    std::vector<uint16_t> h(3, f32_to_bf16(own == 0 ? 256 : own < 3 ? 1 : 0));
    comm.reduce({h.data(), 6}, own == 2 ? h.data() : nullptr, DType::bf16, 2);
    EXPECT_EQ(bf16_to_f32(h[1]), own == 0 || own == 2 ? 256 : own == 1);
  });
  EXPECT_EQ(ranks, 63);
  run_ranks(1, 1, [](Comm& comm) { EXPECT_EQ(&comm, &self()); });
}

// Both sides learn of it, before anything is sent, and it goes on.
TEST(Threads, OtherCountsAreErrors) {
  run_ranks(1, 3, [](Comm& comm) {
    char x[4] = {1, 1, 1, 1}, y[4] = {};
    std::vector<Comm::Piece> out(3), in(3);
    if (comm.rank() == 0) out[1] = {x, 3};
    if (comm.rank() == 1) in[0] = {y, 4};
    try {
      comm.exchange(out, in);
      EXPECT_EQ(comm.rank(), 2) << "3 bytes for 4";
    } catch (const std::logic_error& e) {
      EXPECT_LE(comm.rank(), 1);
      EXPECT_STREQ(e.what(), "rank 0 sends 3 bytes to rank 1, which expects 4");
    }
    EXPECT_EQ(y[0], 0);
    in.pop_back();
    EXPECT_THROW(comm.exchange(out, in), std::logic_error);
    EXPECT_EQ(comm.sum(1), 3);
  });
}

// The others wait for ever otherwise.
TEST(Threads, AllEndWithTheErrorOfTheFirst) {
  std::atomic<int> ended = 0;
  const auto count = [&](Comm& comm, int bad, int worse) {
    const struct Count {
      std::atomic<int>& n;
      ~Count() { n++; }
    } at_end{ended};
    comm.sum(1);
    if (comm.rank() == bad || comm.rank() == worse) throw Error(Exit::memory, cat("rank ", comm.rank()));
    comm.sum(1);
    ADD_FAILURE() << "a sum without the rank that failed";
  };
  for (const int bad : {0, 2}) {
    ended = 0;
    try {
      run_ranks(1, 4, [&](Comm& comm) { count(comm, bad, bad + 1); });
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::memory);
      EXPECT_EQ(e.what(), cat("rank ", bad)) << "that of the lowest rank";
    }
    EXPECT_EQ(ended, 4);
  }
  EXPECT_THROW(run_ranks(1, 3,
                         [](Comm& comm) {
                           if (comm.rank() != 1) comm.sum(1);
                         }),
               std::logic_error)
      << "a rank that leaves early";
}

// Each computes with threads of its own.
TEST(Threads, ChangeNoBit) {
  std::vector<float> alone;
  for (const int ranks : {1, 2, 4}) {
    const Config config = tiny_run("qwen3", {"learner.slots=4", "trainer.threads=2"});
    std::vector<std::vector<float>> after(static_cast<size_t>(ranks));
    run_ranks(1, ranks, [&](Comm& comm) {
      Session session(config, table_cpu, true, {}, true, comm);
      session.train = std::make_unique<Rewarded>(std::move(session.train), digits);
      GrpoTraining training(session);
      for (int i = 0; i < 2; i++) expect_equal(comm, facts_of(training.step()));
      after[static_cast<size_t>(comm.rank())] = session.model->get_parameters();
    });
    if (ranks == 1) alone = after[0];
    for (const auto& parameters : after) EXPECT_TRUE(same_bits(parameters, alone)) << ranks;
  }
}

// Ranks that differ in their times alone agree.
TEST(Ranks, TimesAreNoFacts) {
  Metrics m;
  for (const char* name : {"timing_s/step", "perf/throughput", "comm/seconds", "actor/lr"}) m.set(name, 0.5);
  EXPECT_EQ(facts_of(m), (Facts{{"actor/lr", "0.5"}, {"certificate", ""}}));
}

// A rank grades what it sampled, so another program there would show in no other rank's metrics.
TEST(Ranks, TheProgramThatGradesIsAmongTheFacts) {
  const std::string script = cat(testing::TempDir(), "grade_", getpid(), ".sh"), hash = cat("hash of ", script);
  const Config config = tiny_run("qwen3", {cat("data.reward=\"command:sh ", script, " --strict\"")});
  const auto facts = [&](const char* text) {
    std::ofstream(script) << text;
    return facts_of_files(config);
  };
  const Facts before = facts("echo 1\n"), after = facts("echo 2\n");
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); i++)
    EXPECT_EQ(before[i] != after[i], before[i].first == hash) << before[i].first;
  EXPECT_EQ(std::count_if(after.begin(), after.end(), [&](const auto& f) { return f.first == hash; }), 1);
  const auto shell = std::find_if(after.begin(), after.end(), [](const auto& f) { return f.first.ends_with("/sh"); });
  ASSERT_NE(shell, after.end());
  EXPECT_NE(shell->second, "none");
}

// ---- plans

// Breaks if anything that ranks do depends on values, or on what the others computed.
TEST(Plan, RanksAreTheRealOnesToTheByte) {
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{},
        {"actor.use_kl_loss=true", "actor.ppo_epochs=2", "actor.ppo_mini_batch_size=3"},
        {"actor.token_subset=rpc", "actor.rpc_min_tokens=9", "learner.slots=12"},
        {"trainer.balance_batch=false", "data.train_batch_size=3", "actor.optim.moments=bf16"},
        {"distill.enable=true", "model.lora.rank=3", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
         "rollout.kv.blocks.count=3", "rollout.kv.blocks.first=0", "rollout.kv.blocks.dense_layers=0"}})
    for (const char* type : {"qwen2", "llama"})  // tied and not
      for (const int ranks : {1, 2, 4}) {
        SCOPED_TRACE(cat(type, ", ranks: ", ranks, ' ', testing::PrintToString(keys)));
        std::vector<std::string> all = {"learner.slots=4"};
        all.insert(all.end(), keys.begin(), keys.end());
        const Config config = tiny_run(type, all);
        Ledger sum;
        std::mutex mutex;
        run_ranks(1, ranks, [&](Comm& comm) {
          const Plan plan = plan_step(config, TrainingKind::grpo, true, {}, nullptr, comm);
          Session session(config, table_cpu, true, {}, true, comm);
          GrpoTraining training(session);
          training.worst_case_step();
          const auto arenas = session.arenas();
          for (size_t i = 0; i < arenas.size(); i++)
            EXPECT_EQ(plan.memory[i].peak, arenas[i]->peak()) << arenas[i]->name() << " of rank " << comm.rank();
          EXPECT_EQ(plan.ledger.phases, session.ledger.phases) << comm.rank();
          // Of an update: every round this rank's gradient but for its own part, in f32; then its part of the weights.
          const auto& ops = plan.ledger.phases.at("learner");
          const int64_t rounds = config.learner.slots / ranks, size = session.model->size(), own = session.model->own();
          if (config.actor.ppo_epochs == 1 && ranks > 1) {
            EXPECT_EQ(ops.at("all_to_all").cost.sent, rounds * 4 * (size - own));
            EXPECT_EQ(ops.at("all_gather").cost.sent % (ranks - 1), 0);
            EXPECT_GE(ops.at("all_gather").cost.sent, 4 * own * (ranks - 1)) << "whole panels";
          }
          EXPECT_EQ(ops.contains("all_gather"), ranks > 1);
          const std::lock_guard lock(mutex);
          sum.add(plan.ledger);
        });
        if (ranks == 1) continue;
        Config planned = config;
        planned.trainer.n_gpus_per_node = ranks;
        const Plan together = plan_ranks(planned, true);
        EXPECT_EQ(together.all_ranks.phases, sum.phases);
        EXPECT_EQ(plan_most(planned).total(), together.most.total());
      }
}

// ZeRO stage 1, in bytes a parameter: 2 of the weights, 4 of the gradient; of its part 4 of the sum and 12 of master
// and moments, or 8.  To the byte but for the end of each tensor, which lies at a multiple of 64, and the gradient's
// norm.
TEST(Plan, ARankHoldsSoManyBytesAParameter) {
  for (const int ranks : {1, 2, 4, 8})
    for (const bool narrow : {false, true}) {
      const Config config =
          load_config({"model.config=qwen2.5-7b", "trainer.device=cuda", "data.train_batch_size=8", "rollout.n=2",
                       "data.max_prompt_length=8", "data.max_response_length=2", "rollout.max_num_seqs=8",
                       "learner.slots=8", cat("actor.optim.moments=", narrow ? "bf16" : "f32")});
      int64_t sum = 0, most = 0;
      std::mutex mutex;
      run_ranks(1, ranks, [&](Comm& comm) {
        const Plan plan = plan_step(config, TrainingKind::grpo, false, {}, nullptr, comm);
        const Session session(config, table_null, true, {}, false, comm);
        const int64_t all = session.model->size(), own = session.model->own();
        const auto held = [&](const std::string& arena) {
          int64_t bytes = 0, entries = 0;
          for (const Plan::Memory& m : plan.memory)
            for (const Arena::Entry& e : m.arena == arena ? m.entries : std::vector<Arena::Entry>())
              if (e.name != "staging" && e.name != "rope") bytes += static_cast<int64_t>(e.bytes), entries++;
          return std::pair{bytes, entries};
        };
        const auto is = [&](const std::string& arena, int64_t bytes) {
          const auto [there, entries] = held(arena);
          EXPECT_GE(there, bytes) << arena;
          EXPECT_LT(there, bytes + 64 * entries) << arena;
        };
        is("weights", 2 * all + 4 * own);
        is("gradients", 4 * all + 4 * own);
        is("optimizer", (narrow ? 4 : 8) * own + 4);
        const std::lock_guard lock(mutex);
        sum += own, most = std::max(most, own);
        EXPECT_EQ(all, 7'615'616'512);
      });
      EXPECT_EQ(sum, 7'615'616'512) << "every parameter has one owner";
      EXPECT_LE(most, 7'615'616'512 / ranks + 16 * 18'944) << "a panel of the widest layer";
    }
}

// Every rank reads all weights for each token: few responses decode as fast on one device as on eight.
TEST(Plan, IsHonestAboutScaling) {
  const Machine machine = read_machine("h200");
  const auto plan = [&](int64_t responses, int64_t ranks) {
    return plan_ranks(load_config({"model.config=qwen2.5-7b", "trainer.device=cuda", "rollout.n=8", "learner.slots=8",
                                   "data.max_prompt_length=128", "data.max_response_length=48",
                                   "model.enable_gradient_checkpointing=true", "actor.ppo_max_token_len=16384",
                                   "actor.logits_chunk=1024", cat("data.train_batch_size=", responses / 8),
                                   "rollout.max_num_seqs=1024", cat("trainer.n_gpus_per_node=", ranks)}),
                      false, nullptr, &machine);
  };
  const Plan few = plan(128, 1), few_on_eight = plan(128, 8), many = plan(1024, 1), many_on_eight = plan(1024, 8);
  EXPECT_LT(few.seconds.at("rollout"), 2 * few_on_eight.seconds.at("rollout"));
  EXPECT_GT(many.seconds.at("rollout"), 4 * many_on_eight.seconds.at("rollout"));
  EXPECT_GT(few.seconds.at("learner"), 3.5 * few_on_eight.seconds.at("learner")) << "the update is shared";
  const int64_t weights = 2 * 7'615'616'512 - 2 * 152'064 * 3584;  // but for the embedding, of which rows are read
  EXPECT_GE(few_on_eight.ledger.total("rollout").read, 48 * weights);
  EXPECT_GE(few_on_eight.all_ranks.total("rollout").read, 8 * 48 * weights);
  EXPECT_LT(few.ledger.total("rollout").read, 2 * 48 * weights);
}

}  // namespace
}  // namespace pare::test
