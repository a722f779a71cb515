// trainer.skip_nonfinite: an update whose gradient is not finite is dropped, without a trace in parameters and moments;
// and what a run leaves that such a value ends.
#include "base/json_file.h"
#include "comm/threads.h"
#include "run/checkpoint.h"
#include "run/ranks.h"
#include "tests/program.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

// Rewards that are finite, and advantages that no f32 holds, in the steps that are `bad`.
struct Rewards {
  bool bad = false;
  double operator()(const Problem& p, const Response& r) const { return (bad ? 1e300 : 1) * digits(p, r); }
};

std::vector<std::string> keys(int64_t skip, const std::vector<std::string>& more = {}) {
  std::vector<std::string> all = {"algorithm.norm_adv_by_std_in_grpo=false", cat("trainer.skip_nonfinite=", skip)};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::vector<float> moments(const Learner& learner) {
  std::vector<float> all;
  const int64_t begin = learner.trained().own_begin(), count = learner.trained().own();
  for (const Moment m : {Moment::m, Moment::v}) {
    all.resize(all.size() + static_cast<size_t>(count));
    learner.get_moment(m, begin, count, all.data() + all.size() - count);
  }
  return all;
}

TEST(NonFinite, ADroppedUpdateChangesNoBit) {
  for (const std::vector<std::string>& more : {std::vector<std::string>{},
                                               {"learner.shards=3"},
                                               {"actor.optim.moments=bf16"},
                                               {"actor.ppo_epochs=2"},
                                               {"actor.grad_clip=0"}}) {
    SCOPED_TRACE(testing::PrintToString(more));
    auto rewards = std::make_shared<Rewards>();
    TrainingRun run(tiny_run("qwen3", keys(2, more)), [rewards](auto& p, auto& r) { return (*rewards)(p, r); });
    const double updates = more == std::vector<std::string>{"actor.ppo_epochs=2"} ? 2 : 1;
    EXPECT_EQ(run.step().get("actor/nonfinite_updates"), 0);
    const auto trained = [&] { return run.trainer->learner().trained().get_parameters(); };
    const std::vector<float> before = trained(), moments_before = moments(run.trainer->learner());
    rewards->bad = true;
    const Metrics m = run.step();
    EXPECT_EQ(m.get("actor/nonfinite_updates"), updates);
    EXPECT_EQ(m.get("actor/updates"), 0);
    EXPECT_TRUE(std::isnan(m.get("actor/grad_norm")));
    EXPECT_TRUE(same_bits(trained(), before));
    EXPECT_TRUE(same_bits(moments(run.trainer->learner()), moments_before));
    EXPECT_EQ(run.trainer->learner().steps(), updates);
    EXPECT_EQ(run.trainer->state().skipped, updates);
    rewards->bad = false;
    EXPECT_EQ(run.step().get("actor/updates"), updates);
    EXPECT_FALSE(same_bits(trained(), before));
    EXPECT_EQ(run.trainer->state().skipped, 0) << "in a row";
  }
}

TEST(NonFinite, TooManyInARowEndTheRun) {
  for (const int64_t skip : {0, 1, 2}) {
    auto rewards = std::make_shared<Rewards>();
    TrainingRun run(tiny_run("qwen3", keys(skip)), [rewards](auto& p, auto& r) { return (*rewards)(p, r); });
    for (int round = 0; round < 2; round++) {  // a good step between them: none is in a row with the others
      rewards->bad = false;
      run.step();
      rewards->bad = true;
      for (int i = 0; i < skip; i++) run.step();
    }
    const std::vector<float> before = run.parameters(), moments_before = moments(run.trainer->learner());
    try {
      run.step();
      FAIL() << skip;
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::non_finite);
      EXPECT_NE(std::string(e.what()).find("the gradient norm is"), std::string::npos) << e.what();
    }
    EXPECT_TRUE(same_bits(run.parameters(), before));
    EXPECT_TRUE(same_bits(moments(run.trainer->learner()), moments_before));
  }
}

// All ranks drop the same updates, and give up together.
TEST(NonFinite, RanksAgree) {
  std::vector<float> alone;
  for (const int ranks : {1, 2, 4}) {
    const Config config = tiny_run("qwen3", keys(1, {"learner.shards=4"}));
    std::vector<std::vector<float>> after(static_cast<size_t>(ranks));
    run_ranks(1, ranks, [&](Comm& comm) {
      auto rewards = std::make_shared<Rewards>();
      Session session(config, table_cpu, true, {}, true, comm);
      session.train = std::make_unique<Rewarded>(std::move(session.train),
                                                 [rewards](auto& p, auto& r) { return (*rewards)(p, r); });
      GrpoTraining training(session);
      for (const bool bad : {false, true, false, true}) {
        rewards->bad = bad;
        const Metrics m = training.step();
        expect_equal(comm, facts_of(m));
        EXPECT_EQ(m.get("actor/nonfinite_updates"), bad);
      }
      EXPECT_THROW(training.step(), Error);
      after[static_cast<size_t>(comm.rank())] = session.model->get_parameters();
    });
    if (ranks == 1) alone = after[0];
    for (const auto& parameters : after) EXPECT_TRUE(same_bits(parameters, alone)) << ranks;
  }
}

// Weights that cannot be saved are named, whichever rank writes their file.
TEST(NonFinite, EveryRankNamesWhatItCannotSave) {
  const Config config = tiny_run("qwen3", keys(1, {"learner.shards=3", "trainer.max_file_bytes=1"}));
  const std::string folder = cat(testing::TempDir(), "unsaved_", getpid());
  std::vector<Parameter> all;
  run_ranks(1, 1, [&](Comm& comm) { all = Session(config, table_cpu, true, {}, true, comm).model->layout; });
  for (size_t bad = 0; bad < all.size(); bad += 5) {
    std::string what;
    try {
      run_ranks(1, 3, [&](Comm& comm) {
        Session session(config, table_cpu, true, {}, true, comm);
        std::vector<float> weights = session.model->get_parameters();
        weights[static_cast<size_t>(all[bad].offset + all[bad].size - 1)] = std::numeric_limits<float>::infinity();
        session.model->set_parameters(weights);
        save_model(folder, session);
      });
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::non_finite);
      what = e.what();
    }
    EXPECT_NE(what.find(all[bad].name + " holds inf"), std::string::npos) << what;
    EXPECT_FALSE(std::filesystem::exists(folder) || std::filesystem::exists(folder + ".tmp"));
  }
}

// ---- the program

class NonFiniteRuns : public Program {
 protected:
  // Pays so much for a digit, in the step that follows `steps` lines of the log, that no gradient is finite.
  Outcome train(const std::string& dir, int steps, const std::vector<std::string>& more) {
    write("grade.sh", cat("while read -r l; do\n  case \"$l\" in *'\"response\": \"'[0-9a-m]*) s=1;; *) s=0;; esac\n",
                          "  if [ $s = 1 ] && [ \"$(wc -l < ", at(dir), "/metrics.jsonl)\" = ", steps,
                          " ]; then s=3e38; fi\n  echo \"{\\\"score\\\": $s}\"\ndone\n"));
    write("rows.jsonl", "{\"prompt\": \"a1b2;?\", \"answer\": \"1\"}\n{\"prompt\": \"c3;d4?\", \"answer\": \"2\"}\n");
    std::vector<std::string> all = {program_path().string(),
                                    "train",
                                    "--out",
                                    at(dir),
                                    "model.config=" + tiny_model_file("qwen3"),
                                    "model.init=fan_in",
                                    "data.tokenizer=ssa",
                                    "data.train_files=" + at("rows.jsonl"),
                                    "data.reward=command:sh " + at("grade.sh"),
                                    "data.train_batch_size=2",
                                    "data.max_prompt_length=20",
                                    "data.max_response_length=12",
                                    "rollout.n=6",
                                    "actor.optim.lr=0.01",
                                    "trainer.threads=1",
                                    "trainer.total_training_steps=5",
                                    "algorithm.norm_adv_by_std_in_grpo=false"};
    all.insert(all.end(), more.begin(), more.end());
    return run(all);
  }
};

// Without the key a run ends there, with the step before it saved, and with it goes on from there: to the bits of a run
// that had it from the beginning.
TEST_F(NonFiniteRuns, TheFinishedStepIsSavedAndAResumePassesTheNext) {
  Outcome o = train("run", 2, {"trainer.save_freq=0"});
  EXPECT_EQ(o.code, static_cast<int>(Exit::non_finite)) << o.err;
  for (const char* part : {"the gradient norm is inf", "step 2 is saved", "--resume", "trainer.skip_nonfinite"})
    EXPECT_NE(o.err.find(part), std::string::npos) << part << "\n" << o.err;
  EXPECT_EQ(checkpoint_damage(at("run/checkpoints/step-2")), "");
  o = train("run", 2, {"--resume", "trainer.save_freq=0"});
  EXPECT_EQ(o.code, static_cast<int>(Exit::non_finite)) << "it comes again: " << o.err;
  o = train("run", 2, {"--resume", "trainer.skip_nonfinite=1"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(one_line(o.err).find("step 3 dropped 1 actor update"), std::string::npos) << o.err;
  o = train("whole", 2, {"trainer.skip_nonfinite=1"});
  EXPECT_EQ(o.code, 0) << o.err;
  for (const char* file : {"model/model.safetensors", "checkpoints/step-5/optimizer.safetensors", "rollouts.jsonl"})
    EXPECT_TRUE(read_text(at(cat("run/", file))) == read_text(at(cat("whole/", file)))) << file;
  std::istringstream lines(read_text(at("run/metrics.jsonl")));
  int step = 0;
  for (std::string line; std::getline(lines, line); step++)
    if (step >= 2) {
      EXPECT_EQ(nlohmann::json::parse(line).at("actor/nonfinite_updates"), step == 2 ? 1 : 0) << line;
    }
  EXPECT_EQ(step, 5);
}

// A second update of the step has met the value: the first has changed the parameters, and there is nothing to save.
TEST_F(NonFiniteRuns, AHalfStepIsNotSaved) {
  const Outcome o = train("run", 2, {"trainer.save_freq=1", "actor.ppo_mini_batch_size=1", "actor.optim.lr=1e30"});
  EXPECT_EQ(o.code, static_cast<int>(Exit::non_finite)) << o.err;
  for (const auto& e : fs::directory_iterator(at("run/checkpoints")))
    EXPECT_EQ(checkpoint_damage(e.path().string()), "") << e.path();
}

// A checkpoint of such weights could not be loaded: none is written.
TEST_F(NonFiniteRuns, WeightsThatAreNotFiniteAreNotSaved) {
  for (const char* freq : {"trainer.save_freq=0", "trainer.save_freq=1"}) {
    fs::remove_all(at("run"));
    const Outcome o = train("run", 99, {freq, "actor.optim.lr=1e39"});
    EXPECT_EQ(o.code, static_cast<int>(Exit::non_finite)) << o.err;
    EXPECT_NE(o.err.find("the weights are not finite and are not saved"), std::string::npos) << o.err;
    EXPECT_TRUE(fs::is_empty(at("run/checkpoints")));
  }
}

// How many were dropped in a row is a part of the checkpoint.
TEST_F(NonFiniteRuns, NextTokenTrainingGivesUpAlikeWhenResumed) {
  write("rows.jsonl",
        "{\"prompt\": \"a1b2;?\", \"completion\": \"c3\"}\n{\"prompt\": \"c3;?\", \"completion\": \"d\"}\n");
  const auto sft = [&](const std::string& dir, const std::string& more) {
    return run(cat("sft --out ", at(dir), " model.config=", tiny_model_file("qwen3"),
                   " model.init=fan_in data.tokenizer=ssa data.train_files=", at("rows.jsonl"),
                   " data.train_batch_size=2 data.max_prompt_length=20 data.max_response_length=12 trainer.threads=1 "
                   "actor.optim.lr=1e30 trainer.skip_nonfinite=3 ",
                   more));
  };
  const Outcome whole = sft("whole", "trainer.total_training_steps=9");
  EXPECT_EQ(whole.code, static_cast<int>(Exit::non_finite)) << whole.err << whole.out;
  EXPECT_NE(whole.err.find("after 3 that were dropped"), std::string::npos) << whole.err;
  EXPECT_EQ(sft("parts", "trainer.total_training_steps=3").code, 0);
  EXPECT_EQ(read_json_file(at("parts/checkpoints/step-3/state.json"))["run"]["skipped"], 2);
  EXPECT_EQ(sft("parts", "trainer.total_training_steps=9 --resume").code, static_cast<int>(Exit::non_finite));
  EXPECT_TRUE(read_text(at("whole/checkpoints/step-4/model.safetensors")) ==
              read_text(at("parts/checkpoints/step-4/model.safetensors")));
  EXPECT_FALSE(read_text(at("whole/checkpoints/step-4/model.safetensors")).empty());
}

}  // namespace
}  // namespace pare::test
