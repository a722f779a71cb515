// Ranks that are threads of this process: they are ranks as others are (tests/mpi), and plans are made of them.
#include <atomic>
#include <mutex>
#include <thread>

#include "comm/processes.h"
#include "comm/threads.h"
#include "comm/watch.h"
#include "run/checkpoint.h"
#include "run/ranks.h"
#include "tests/program.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// One of six ranks.
void expect_rank(Comm& comm) {
  const int own = comm.rank();
  ASSERT_EQ(comm.ranks(), 6);
  for (int round = 0; round < 50; round++) {  // none is overtaken
    const std::vector<std::string> all = comm.gather(std::string(static_cast<size_t>(own * round), 'a' + own));
    for (int r = 0; r < 6; r++)
      ASSERT_EQ(all[static_cast<size_t>(r)], std::string(static_cast<size_t>(r * round), 'a' + r));
  }
  EXPECT_EQ(comm.broadcast(cat("of ", own), 4), "of 4");
  EXPECT_EQ(comm.sum(own), 15);
}

TEST(Threads, AreRanks) {
  std::atomic<int> ranks = 0;
  run_ranks(2, 3, [&](Comm& comm) {
    ranks += 1 << comm.rank();
    EXPECT_EQ(comm.node_ranks(), 3);
    EXPECT_EQ(comm.node_rank(), comm.rank() % 3);
    EXPECT_EQ(comm.host(), comm.rank() < 3 ? "node 0" : "node 1");
    expect_rank(comm);
  });
  EXPECT_EQ(ranks, 63);
  run_ranks(1, 1, [](Comm& comm) { EXPECT_EQ(&comm, &self()); });
}

// Ranks by sockets, as `pare train --ranks` connects its processes (tests/test_processes.cpp).
void run_sockets(int ranks, const std::function<void(Comm&)>& f) {
  const std::vector<std::vector<int>> sockets = connect_sockets(ranks);
  std::vector<std::jthread> threads;
  for (int r = 0; r < ranks; r++)
    threads.emplace_back([&, r] { f(*make_socket_comm(r, sockets[static_cast<size_t>(r)], -1)); });
}

TEST(Sockets, AreRanks) {
  run_sockets(6, [](Comm& comm) {
    EXPECT_EQ(comm.node_ranks(), 6);
    EXPECT_EQ(comm.node_rank(), comm.rank());
    EXPECT_EQ(comm.host(), self().host());
    expect_rank(comm);
  });
}

// Each to each at once, far more than a socket holds, and all sizes another.
TEST(Sockets, LongPiecesInAllDirections) {
  run_sockets(3, [](Comm& comm) {
    const auto size = [](int from, int to) {
      return size_t{3'000'017} + static_cast<size_t>(1'000'003 * (3 * from + to));
    };
    const auto value = [](int from, int to, size_t i) { return static_cast<char>(i * 31 + i / 251 + 7 * from + to); };
    std::vector<std::vector<char>> sent(3), received(3);
    std::vector<Comm::Piece> out, in;
    for (int q = 0; q < 3; q++) {
      std::vector<char>& x = sent[static_cast<size_t>(q)];
      x.resize(size(comm.rank(), q));
      for (size_t i = 0; i < x.size(); i++) x[i] = value(comm.rank(), q, i);
      out.push_back({x.data(), x.size()});
      std::vector<char>& y = received[static_cast<size_t>(q)];
      y.resize(size(q, comm.rank()));
      in.push_back({y.data(), y.size()});
    }
    comm.exchange(out, in);
    for (int q = 0; q < 3; q++)
      for (size_t i = 0; i < in[static_cast<size_t>(q)].bytes; i++)
        ASSERT_EQ(received[static_cast<size_t>(q)][i], value(q, comm.rank(), i)) << q << ' ' << i;
    EXPECT_EQ(comm.calls, 1);
  });
}

// Both sides learn of it, before anything is sent, and it goes on.
void expect_counts_compared(Comm& comm) {
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
}
TEST(Threads, OtherCountsAreErrors) { run_ranks(1, 3, expect_counts_compared); }
TEST(Sockets, OtherCountsAreErrors) { run_sockets(3, expect_counts_compared); }

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
    const Config config = tiny_run("qwen3", {"learner.shards=4", "trainer.threads=2"});
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

// Drawing a parameter takes time, which ranks share: each draws its own and has all in the end.
TEST(Threads, DrawTheirPartsOfTheWeights) {
  const ModelConfig c = tiny_config("qwen3", false);
  std::vector<float> alone;
  for (const int ranks : {1, 3, 5}) {
    std::atomic<int64_t> drawn = 0;
    run_ranks(1, ranks, [&](Comm& comm) {
      Device device(table_cpu, {}, comm);
      Arena weights("weights");
      Model model(c, device, weights, DType::f32, true);
      int64_t own = 0;
      const ParameterReader draw = init_parameters(c, 7, Init::fan_in);
      model.set_parameters(
          [&](size_t parameter, int64_t begin, int64_t count, float* out) {
            own += count;
            draw(parameter, begin, count, out);
          },
          true);
      EXPECT_EQ(own, model.own());
      drawn += own;
      const std::vector<float> all = model.get_parameters();
      if (ranks == 1) alone = all;
      EXPECT_TRUE(same_bits(all, alone)) << comm.rank() << " of " << ranks;
    });
    EXPECT_EQ(drawn, std::ssize(alone)) << ranks;
  }
}

// Shows a test the pieces of another Comm.
class Watched final : public Comm {
 public:
  using Look = std::function<void(std::span<const Piece> out, std::span<const Piece> in)>;
  Watched(Comm& inner, Look look) : inner_(inner), look_(std::move(look)) {}
  int rank() const override { return inner_.rank(); }
  int ranks() const override { return inner_.ranks(); }
  int node_rank() const override { return inner_.node_rank(); }
  int node_ranks() const override { return inner_.node_ranks(); }
  std::string host() const override { return inner_.host(); }
  void exchange(std::span<const Piece> out, std::span<const Piece> in) override {
    look_(out, in);
    inner_.exchange(out, in);
  }
  [[noreturn]] void abort(int code) override { _exit(code); }

 private:
  Comm& inner_;
  const Look look_;
};

// Three ranks, whose parts of a gradient take two pieces each.
TEST(Shards, LongGradientsTravelInAlignedPieces) {
  ModelConfig c = tiny_config("qwen3", true);
  c.layers = 1;
  c.hidden = 512;
  c.ffn = 12'000;
  std::vector<float> weights_of_all;
  for (const Parameter& p : parameters(c))
    for (int64_t i = 0; i < p.size; i++) weights_of_all.push_back(static_cast<float>(i % 1009) / 20'000 - 0.025f);
  std::vector<Group> groups;
  for (int32_t g = 0; g < 3; g++) {
    groups.push_back({{1, g + 3}, {{{g + 4, 2 * g + 5}}}});
    groups.back().shard = g;
  }
  TokenTerms terms(static_cast<size_t>(loss_row_offsets(groups).back()));
  for (double& w : terms.weight) w = 0.1;
  std::vector<double> alone;
  for (const int ranks : {1, 3})
    run_ranks(1, ranks, [&](Comm& of_thread) {
      int long_pieces = 0, unaligned = 0;  // whose memory begins at no multiple of 16 bytes
      Watched comm(of_thread, [&](std::span<const Comm::Piece> out, auto) {
        for (const Comm::Piece& p : out)
          if (p.bytes > 1 << 20) {
            long_pieces++;
            unaligned += reinterpret_cast<uintptr_t>(p.data) % 16 != 0;
          }
      });
      Device device(table_cpu, {}, comm);
      Arena weights("weights"), gradients("gradients"), optimizer("optimizer"), activations("activations");
      Model model(c, device, weights, DType::f32, true);
      model.set_parameters(weights_of_all);
      Learner learner(model, gradients, optimizer, activations, {.shards = 3, .balance = false});
      learner.accumulate(groups, terms, {.policy = PolicyLoss::nll});
      EXPECT_EQ(unaligned, 0) << "of " << long_pieces;
      EXPECT_GE(long_pieces, ranks == 1 ? 0 : 4);
      const std::vector<double> own = learner.gradients();
      if (ranks == 1) alone = own;
      const auto first = alone.begin() + learner.trained().own_begin();
      EXPECT_TRUE(std::equal(own.begin(), own.end(), first));
      EXPECT_GT(std::count_if(own.begin(), own.end(), [](double g) { return g != 0; }), std::ssize(own) / 2);
    });
}

// Two or three machines of whole blocks of shards add these before they meet; other machines do not.
TEST(Shards, SumsOfBlocksCrossTheNetwork) {
  const ModelConfig c = tiny_config("qwen3", true);
  std::vector<float> weights_of_all;
  for (const Parameter& p : parameters(c))
    for (int64_t i = 0; i < p.size; i++) weights_of_all.push_back(static_cast<float>(i % 1009) / 5'000 - 0.1f);
  constexpr int32_t shards = 96;
  std::vector<Group> groups;
  for (int32_t g = 0; g < shards; g++) {
    groups.push_back({{1, g % 7 + 2}, {{{g % 11 + 1, g % 5 + 3}}}});
    groups.back().shard = g;
  }
  TokenTerms terms(static_cast<size_t>(loss_row_offsets(groups).back()));
  for (size_t i = 0; i < terms.weight.size(); i++) terms.weight[i] = 0.01 * static_cast<double>(i % 13 + 1);
  std::vector<double> alone;
  for (const auto& [machines, near] : {std::pair{1, 1}, {2, 8}, {3, 8}, {2, 16}, {4, 4}, {1, 16}}) {
    SCOPED_TRACE(cat(machines, " machines of ", near));
    const int ranks = machines * near, crossing = near % 8 == 0 ? near / 8 : near;
    std::atomic<int64_t> abroad = 0;
    run_ranks(machines, near, [&](Comm& comm) {
      Ledger ledger;
      Device device(table_cpu, {}, comm);
      device.ledger = &ledger;
      Arena weights("weights"), gradients("gradients"), optimizer("optimizer"), activations("activations");
      Model model(c, device, weights, DType::f32, true);
      model.set_parameters(weights_of_all);
      Learner learner(model, gradients, optimizer, activations,
                      {.shards = shards, .balance = false, .piece = int64_t{1024} * ranks});
      learner.accumulate(groups, terms, {.policy = PolicyLoss::nll});
      const std::vector<double> own = learner.gradients();
      if (ranks == 1) alone = own;
      EXPECT_TRUE(std::equal(own.begin(), own.end(), alone.begin() + learner.trained().own_begin()));
      if (ranks == 1) {
        EXPECT_GT(std::count_if(own.begin(), own.end(), [](double g) { return g != 0; }), std::ssize(own) / 2);
      }
      abroad += ledger.phases["main"]["all_to_all"].cost.abroad;
    });
    EXPECT_EQ(abroad, int64_t{shards / ranks} * crossing * (machines - 1) * 4 * std::ssize(alone));
  }
}

// Each rank of the first machine writes its share of the files; no bit depends on who does.
TEST(Ranks, WriteTheFilesOfACheckpointTogether) {
  const std::string folder = cat(testing::TempDir(), "together_", getpid());
  const Config config = tiny_run("qwen3", {"learner.shards=4", "trainer.max_file_bytes=20000"});
  std::map<std::string, std::string> alone;
  for (const auto& [machines, near] : {std::pair{1, 1}, {1, 2}, {2, 2}, {1, 4}}) {
    SCOPED_TRACE(cat(machines, " machines of ", near));
    std::vector<size_t> received(static_cast<size_t>(machines * near));
    std::atomic<size_t> size = 0;
    run_ranks(machines, near, [&](Comm& of_thread) {
      bool saves = false;
      Watched comm(of_thread, [&](auto, std::span<const Comm::Piece> in) {
        for (size_t q = 0; q < in.size() && saves; q++)
          if (in[q].bytes > 100) received[static_cast<size_t>(of_thread.rank())] += in[q].bytes;
      });
      Session session(config, table_cpu, true, {}, true, comm);
      GrpoTraining training(session);
      training.step();
      saves = true;
      save_checkpoint(folder, session, training, {});
      saves = false;
      size = static_cast<size_t>(session.model->size());
    });
    EXPECT_EQ(checkpoint_damage(folder), "");
    std::map<std::string, std::string> files;
    for (const auto& e : std::filesystem::directory_iterator(folder))
      if (const std::string name = e.path().filename(); name != "state.json") files[name] = read_text(e.path());
    if (machines * near == 1) alone = files;
    EXPECT_GE(files.size(), 10u);
    EXPECT_TRUE(files.contains("model.safetensors.index.json") && files.contains("optimizer.safetensors.index.json"));
    EXPECT_TRUE(files == alone);
    for (size_t r = 0; r < received.size() && received.size() > 1; r++) {
      if (r < static_cast<size_t>(near))
        EXPECT_NEAR(static_cast<double>(received[r]), 8.0 * static_cast<double>(size) / near, 12'000) << "moments";
      else
        EXPECT_LT(received[r], 3000u) << r;
    }
  }
  std::filesystem::remove_all(folder);
}

// ---- ranks that are silent or stand still

Pulse pulse(uint64_t calls, const char* doing, bool waits, bool busy = false) {
  Pulse p{calls, 3, 0.02, {}, waits, busy, false};
  std::snprintf(p.doing, sizeof p.doing, "%s", doing);
  return p;
}

// Whoever watches, the rank that does not wait is named; one whose host works is waited for.
TEST(Watch, NamesTheRankThatStandsStill) {
  for (const int own : {-1, 0, 1}) {
    Watch watch(3, own, [](int r) { return cat("rank ", r); });
    const auto judge = [&](int milliseconds, uint64_t calls, bool busy) {
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      watch.hear(0, pulse(calls, "update", true));
      watch.hear(1, pulse(calls, "rollout", true));
      watch.hear(2, pulse(calls, "rollout", false, busy));
      return watch.judge();
    };
    EXPECT_EQ(judge(0, 1, false), "");
    EXPECT_EQ(judge(60, 2, false), "") << "all have moved";
    testing::internal::CaptureStderr();
    EXPECT_EQ(judge(60, 2, true), "") << "a slow disk";
    const std::string told = testing::internal::GetCapturedStderr();
    EXPECT_EQ(told.find("pare: the ranks have waited 0 s for rank 2: it is at rollout") == 0, own <= 0) << told;
    const std::string why = judge(own > 0 ? 2060 : 60, 2, false);  // rank 0 speaks first
    EXPECT_EQ(why.find("rank 2 has made no progress for "), 0) << why;
    const std::string rest = cat(": it was in step 3, at rollout; rank ", std::max(own, 0), " is in step 3, at ",
                                 own == 1 ? "rollout" : "update");
    EXPECT_TRUE(why.ends_with(rest)) << why;
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
        {"actor.token_subset=rpc", "actor.rpc_min_tokens=9", "learner.shards=12"},
        {"trainer.balance_batch=false", "data.train_batch_size=3", "actor.optim.moments=bf16"},
        {"distill.enable=true", "model.lora.rank=3", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
         "rollout.kv.blocks.count=3", "rollout.kv.blocks.first=0", "rollout.kv.blocks.dense_layers=0"}})
    for (const char* type : {"qwen2", "llama"})  // tied and not
      for (const int ranks : {1, 2, 4}) {
        SCOPED_TRACE(cat(type, ", ranks: ", ranks, ' ', testing::PrintToString(keys)));
        std::vector<std::string> all = {"learner.shards=4"};
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
          const int64_t rounds = config.learner.shards / ranks, size = session.model->size(),
                        own = session.model->own();
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
                       "learner.shards=8", cat("actor.optim.moments=", narrow ? "bf16" : "f32")});
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
              if (e.name != "staging" && e.name != "rope") {
                bytes += static_cast<int64_t>(e.bytes);
                entries++;
              }
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
        sum += own;
        most = std::max(most, own);
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
    return plan_ranks(load_config({"model.config=qwen2.5-7b", "trainer.device=cuda", "rollout.n=8", "learner.shards=8",
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
