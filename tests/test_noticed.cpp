// Values that no other test recomputes: each stands for changes of the program that went unnoticed (README.md here).
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/rng.h"
#include "data/verify/verify.h"
#include "kv/page_pool.h"
#include "model/hf/peft.h"
#include "model/lora.h"
#include "model/parts.h"
#include "rl/corrections.h"
#include "rl/obrs.h"
#include "rollout/rollout.h"
#include "run/config.h"
#include "run/prefix_cache_file.h"
#include "run/run_log.h"
#include "run/sft_training.h"
#include "tests/rl_golden.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
double score(const char* mode, const std::string& response, const std::string& gold) {
  return find_verifier(mode).grade(response, true, gold).score;
}

// ---- draws

std::vector<std::vector<float>> factors_a(const ModelConfig& c, const LoraSpec& spec, uint64_t seed) {
  const ParameterReader read = init_adapters(c, spec, seed);
  const std::vector<Parameter> layout = adapter_parameters(c, spec);
  std::vector<std::vector<float>> all;
  for (size_t i = 0; i < layout.size(); i += 2) {
    all.emplace_back(static_cast<size_t>(layout[i].size));
    read(i, 0, layout[i].size, all.back().data());
  }
  return all;
}

// Alike in two modules, or in two runs, A would start from fewer directions than the rank says.
TEST(LoraStart, EveryModuleAndSeedHasDrawsOfItsOwn) {
  const ModelConfig c = tiny_config("qwen2", true);
  const LoraSpec spec{.rank = 5, .alpha = 20};
  std::set<float> firsts;  // times the square root of their inputs, by which they are scaled
  size_t count = 0;
  for (const uint64_t seed : {1, 2})
    for (const std::vector<float>& a : factors_a(c, spec, seed)) {
      count++;
      firsts.insert(a[0] / std::abs(a[1]));
      EXPECT_NE(a[0], a[1]);
    }
  EXPECT_GT(count, 20u);
  EXPECT_EQ(firsts.size(), count);
}

TEST(LoraStart, APieceOfAMatrixIsThatOfTheWhole) {
  const ModelConfig c = tiny_config("qwen2", true);
  const LoraSpec spec{.rank = 5, .alpha = 20};
  const ParameterReader read = init_adapters(c, spec, 3);
  const std::vector<float> whole = factors_a(c, spec, 3)[1];
  std::vector<float> piece(whole.size() - 37);
  read(2, 37, std::ssize(piece), piece.data());
  EXPECT_TRUE(std::equal(piece.begin(), piece.end(), whole.begin() + 37));
}

// The coins of OBRS are those of its own stream, of the seed and of the step: shared with another stage, which tokens
// are left out would depend on which are trained.
TEST(ObrsRun, CoinsAreThoseOfSeedAndStep) {
  for (const int seed : {1, 5}) {
    const Config config =
        tiny_run("qwen3", {"rollout.kv.method=streaming_llm", "rollout.kv.evict.budget=16",
                           "rollout.kv.evict.buffer=16", "rollout.kv.streaming_llm.sinks=2",
                           "rollout.check_exact=false", "algorithm.obrs.enable=true", cat("trainer.seed=", seed)});
    TrainingRun run(config);
    int64_t left_out = 0;
    for (int64_t step = 1; step <= 2; step++) {
      run.step();
      std::vector<Trajectory> again = run.trainer->samples();
      for (Trajectory& s : again) s.correction.reset();
      set_obrs(config.algorithm.obrs,
               rng_key(static_cast<uint64_t>(seed), RngStream::obrs, static_cast<uint64_t>(step)), again);
      for (size_t i = 0; i < again.size(); i++) {
        EXPECT_EQ(again[i].correction, run.trainer->samples()[i].correction);
        if (again[i].correction) left_out += std::count(again[i].correction->begin(), again[i].correction->end(), 0.0);
      }
    }
    EXPECT_GT(left_out, 0);
  }
}

// The teacher's mistakes are drawn anew in every step: else the same ones would be learnt.
TEST(SftRun, EveryStepHasMistakesOfItsOwn) {
  Session session(tiny_run("qwen3", {"data.noise=0.5", "data.noise_ramp=0", "data.train_rows=1",
                                     "data.train_batch_size=1", "actor.optim.lr=1e-30"}));
  SftTraining training(session);
  std::set<double> losses;
  for (int step = 0; step < 4; step++) losses.insert(training.step().get("train/loss"));
  EXPECT_EQ(losses.size(), 4u) << "of one row, at weights that stay";
}

// ---- sums

// A step that draws several batches reports the numbers of all of them.
TEST(RolloutNumbers, AddUpOverBatches) {
  RolloutStats one;
  one.prefill_tokens = 1;
  one.decoded_tokens = 2;
  one.discarded_tokens = 3;
  one.forward_passes = 4;
  one.graph_passes = 5;
  one.peak_pages = 6;
  one.peak_sequences = 7;
  one.finished = 8;
  one.completions = 9;
  one.resident = 10;
  one.dense = 11;
  one.read = 12;
  one.peak_resident = 13;
  one.peak_dense = 14;
  one.decode_rows = 15;
  one.compressions = 16;
  one.evicted = 17;
  one.waited = 18;
  RolloutStats sum = one;
  for (int64_t times = 2; times < 4; times++) {
    sum.add(one);
    const auto n = static_cast<double>(times);
    EXPECT_EQ(
        (std::vector{sum.prefill_tokens, sum.decoded_tokens, sum.discarded_tokens, sum.forward_passes, sum.graph_passes,
                     sum.finished, sum.completions, sum.decode_rows, sum.compressions, sum.evicted}),
        (std::vector{times, 2 * times, 3 * times, 4 * times, 5 * times, 8 * times, 9 * times, 15 * times, 16 * times,
                     17 * times}));
    EXPECT_EQ((std::vector{sum.resident, sum.dense, sum.read, sum.waited}),
              (std::vector{10 * n, 11 * n, 12 * n, 18 * n}));
    EXPECT_EQ((std::vector{sum.peak_resident, sum.peak_dense}), (std::vector{13.0, 14.0})) << "the largest, no sum";
    EXPECT_EQ(sum.peak_pages, 6);
    EXPECT_EQ(sum.peak_sequences, 7);
  }
}

// One process sends nothing: its page of metrics has no row that is always 0.
TEST(RanksNumbers, AreNotReportedByOneProcess) {
  TrainingRun run(tiny_run("qwen3"));
  const Metrics m = run.step();
  EXPECT_TRUE(std::isnan(m.get("comm/bytes")) && std::isnan(m.get("comm/seconds")));
}

// The metrics of a step are those of all its updates, not of the last one.
TEST(StepNumbers, TokensAreThoseOfAllUpdates) {
  TrainingRun run(tiny_run("qwen3", {"actor.ppo_mini_batch_size=2"}));
  const Metrics m = run.step();
  size_t tokens = 0;
  for (const Trajectory& s : run.trainer->samples()) tokens += s.tokens.size();
  EXPECT_EQ(m.get("actor/updates"), 3);
  EXPECT_EQ(m.get("tokens/loss"), static_cast<double>(tokens));
  EXPECT_GT(m.get("tokens/trained"), static_cast<double>(tokens));
}

// Largest first would give 7, in turn 6: the better of the two is taken.
TEST(Balance, InTurnWhereThatIsBetter) {
  EXPECT_EQ(deal({2, 3, 2, 3, 2}, 2), (std::vector{0, 1, 0, 1, 0}));
  EXPECT_EQ(deal({1, 1, 1, 9}, 2), (std::vector{1, 1, 1, 0}));
}

#ifdef PARE_EMU
// A model whose heads no kernel takes is refused before anything is computed.
TEST(WideHeads, AreRefusedByName) {
  ModelConfig c = tiny_config("qwen3", true);
  c.head_dim = 264;
  EXPECT_THROW(World(table_emu, c), Error);
  c.head_dim = 16;
  EXPECT_NO_THROW(World(table_emu, c));
}
#endif

// ---- KV

TEST(PagePoolNumbers, ThePeakStaysWhenPagesAreFreed) {
  PagePool pool(5);
  for (int i = 0; i < 3; i++) pool.allocate();
  pool.release(0);
  pool.release(1);
  pool.allocate();
  EXPECT_EQ(pool.used(), 2);
  EXPECT_EQ(pool.peak(), 3);
  pool.reset_peak();
  EXPECT_EQ(pool.peak(), 2);
}

// ---- corrections

// A response whose tokens are all left out has weights 0, not 0 / 0.
TEST(ReleasedWeights, OfAResponseWithoutAKeptTokenAreZero) {
  RolloutCorrectionKeys keys;
  keys.rollout_is = RolloutIs::released;
  std::vector<Trajectory> samples = {trajectory(0, 3), trajectory(0, 2)};
  for (Trajectory& s : samples) {
    s.ruling = Ruling::accepted;
    s.old_logprob = s.logprob;
  }
  for (float& x : *samples[0].old_logprob) x -= 9;  // ratios of 1e-4
  set_corrections(keys, samples);
  EXPECT_EQ(samples[0].correction, (std::vector<double>(3, 0)));
  EXPECT_EQ(samples[0].kl_correction, (std::vector<double>(3, 0)));
  EXPECT_GT((*samples[1].correction)[0], 0);
}

// ---- files

// A whole alpha is written as an integer, as peft does; another one must not lose its fraction.
TEST(AdapterFile, AlphaComesBack) {
  const ModelConfig c = tiny_config("qwen2", true);
  for (const double alpha : {2.5, 7.0}) {
    World w(table_cpu, c);
    const LoraSpec spec{.rank = 3, .alpha = alpha};
    const Adapters adapters(c, spec, w.device, w.weights, DType::f32, false);
    const std::string folder = cat(testing::TempDir(), "pare_alpha_", getpid());
    fs::create_directories(folder);
    write_adapter_files(folder, adapters, init_adapters(c, spec, 1), alpha, "base", DType::f32);
    EXPECT_EQ(load_adapter_config(folder).alpha, alpha);
    EXPECT_EQ(nlohmann::json::parse(std::ifstream(folder + "/adapter_config.json"))["lora_alpha"].is_number_integer(),
              alpha == 7);
    fs::remove_all(folder);
  }
}

// However a reader cuts a matrix, every element has its part of B A.
TEST(AdapterFile, MergedInAnyPieces) {
  const ModelConfig c = tiny_config("qwen2", true);
  World w(table_cpu, c);
  const LoraSpec spec{.rank = 3, .alpha = 6};
  const Adapters adapters(c, spec, w.device, w.weights, DType::f32, false);
  const std::string folder = cat(testing::TempDir(), "pare_pieces_", getpid());
  fs::create_directories(folder);
  const ParameterReader ones = [](size_t, int64_t, int64_t count, float* out) { std::fill_n(out, count, 1.f); };
  const ParameterReader nothing = [](size_t, int64_t, int64_t count, float* out) { std::fill_n(out, count, 0.f); };
  write_adapter_files(folder, adapters, ones, 3, "base", DType::f32);  // B A = 3 everywhere
  const ParameterReader merged = merged_weights(nothing, folder, c);
  const std::vector<Parameter> layout = parameters(c);
  const size_t down = static_cast<size_t>(
      std::find_if(layout.begin(), layout.end(), [](const auto& p) { return p.name.ends_with("down_proj.weight"); }) -
      layout.begin());
  const int64_t columns = layout[down].shape[1];
  for (const int64_t begin : {int64_t{0}, columns - 1, columns})
    for (const int64_t count : {int64_t{1}, int64_t{2}, columns + 1}) {
      std::vector<float> out(static_cast<size_t>(count), -1.f);
      merged(down, begin, count, out.data());
      EXPECT_EQ(out, std::vector<float>(static_cast<size_t>(count), 3.f)) << begin << " + " << count;
    }
  fs::remove_all(folder);
}

// Its EOS is the last token there is room for.
TEST(CacheFile, AResponseAsLongAsThereMayBeIsFinished) {
  const Session session(tiny_run("qwen3", {"algorithm.rpo.enable=true", "algorithm.rpo.missing=lazy"}), table_null);
  const std::string path = cat(testing::TempDir(), "pare_cache_", getpid(), ".jsonl");
  std::string ids;
  for (int i = 0; i < 49; i++) ids += "7,";
  std::ofstream(path) << R"({"row": 0, "finished": true, "ids": [)" << ids << "2]}\n";
  const PrefixCache cache = read_cache_file(path, session);
  EXPECT_EQ(cache.at(0).ids.size(), 50u);
  EXPECT_TRUE(cache.at(0).finished);
  fs::remove(path);
}

TEST(RunLogFile, CertificatesOfStepsThatHaveOne) {
  const std::string folder = cat(testing::TempDir(), "pare_log_", getpid(), "/");
  fs::create_directories(folder);
  std::ofstream(folder + "metrics.jsonl") << R"({"training/global_step": 1, "certificate": "0a"})"
                                          << "\n"
                                          << R"({"training/global_step": 2, "certificate": 7})"
                                          << "\n"
                                          << R"({"training/global_step": 3})"
                                          << "\n";
  const RunLog log = read_run_log(folder);
  EXPECT_EQ(log.certificates, (std::map<int64_t, std::string>{{1, "0a"}}));
  EXPECT_EQ(log.steps.size(), 3u);
  fs::remove_all(folder);
}

// ---- configurations

// Log-probs of a truncated distribution are not the policy's: they must not become pi_old.
TEST(ExactRollout, NotWithAnotherLearner) {
  Config config;
  EXPECT_TRUE(exact_rollout(config));
  config.rollout.top_p = 0.9;
  EXPECT_TRUE(exact_rollout(config)) << "both are truncated";
  for (const auto& change : std::vector<std::function<void(Config&)>>{
           [](Config& c) { c.trainer.exact = false; }, [](Config& c) { c.rollout.kv.method = KvMethod::snapkv; }}) {
    Config other = config;
    change(other);
    EXPECT_FALSE(exact_rollout(other));
  }
}

TEST(ResumedKeys, MoreStepsPartWhereTheyShapeTheSteps) {
  const auto parts = [](const std::function<void(Config&)>& change) {
    Config run;
    change(run);
    Config resumed = run;
    resumed.trainer.total_training_steps += 5;
    return !keys_that_part(run, resumed).empty();
  };
  EXPECT_FALSE(parts([](Config& c) {
    c.actor.optim.lr_scheduler_type = LrSchedule::constant;
    c.data.noise_ramp = 0;
  }));
  EXPECT_TRUE(parts([](Config& c) {
    c.actor.optim.lr_scheduler_type = LrSchedule::cosine;
    c.data.noise_ramp = 0;
  }));
  EXPECT_TRUE(parts([](Config& c) {
    c.actor.optim.lr_scheduler_type = LrSchedule::constant;
    c.data.noise_ramp = 1;
  }));
}

// In bf16 gradients of weights are summed call by call, in parts of 4096 rows.
TEST(ResumedKeys, RowsOfACallPartInBf16) {
  const auto parts = [](DeviceKind device, const std::function<void(Config&)>& change) {
    Config run;
    run.trainer.device = device;
    Config resumed = run;
    change(resumed);
    return !keys_that_part(run, resumed).empty();
  };
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda, DeviceKind::emu}) {
    const bool bf16 = device != DeviceKind::cpu;
    EXPECT_EQ(parts(device, [](Config& c) { c.actor.ppo_max_token_len++; }), bf16);
    EXPECT_EQ(parts(device, [](Config& c) { c.actor.logits_chunk = 1000; }), bf16);
    EXPECT_FALSE(parts(device, [](Config& c) { c.actor.logits_chunk = 8192; }));
    EXPECT_FALSE(parts(device, [](Config& c) { c.rollout.max_num_seqs++; }));
  }
}

TEST(ExperimentName, IsThatOfThePresetUnlessGiven) {
  EXPECT_EQ(load_config({"quickstart"}).trainer.experiment_name, "quickstart");
  EXPECT_EQ(load_config({"quickstart", "trainer.experiment_name=mine"}).trainer.experiment_name, "mine");
}

// The reference of a group has every key below it, those too that matter under a condition alone.
TEST(Reference, OfAGroupHasAllItsKeys) {
  for (const ConfigKey& k : config_keys())
    for (size_t dot = k.name.find('.'); dot != std::string::npos; dot = k.name.find('.', dot + 1))
      EXPECT_NE(config_reference(k.name.substr(0, dot)).find(cat("`", k.name, " = ")), std::string::npos) << k.name;
}

// ---- verifiers

double countdown(const std::string& equation, const std::string& numbers) {
  return score("countdown", "Assistant: <answer>" + equation + "</answer>",
               R"({"target": 24, "numbers": [)" + numbers + "]}");
}

TEST(CountdownCorners, NumbersBeyondADouble) {
  EXPECT_EQ(countdown("9**999/2+1", "9, 999, 2, 1"), 0.1);
  EXPECT_EQ(countdown("9**999+0.5", "9, 999, 0, 5"), 0.1);
}

TEST(CountdownCorners, FloorDivisionByOne) {
  EXPECT_EQ(countdown("24//1", "24, 1"), 1);
  EXPECT_EQ(countdown("24//0", "24, 0"), 0.1);
}

TEST(CountdownCorners, NearMissesAndOtherNumbersAreWrong) {
  EXPECT_EQ(countdown("24+1/1000", "24, 1, 1000"), 0.1);
  EXPECT_EQ(countdown("20+4", "12, 2"), 0.1) << "as many numbers, but others";
}

// One side that cannot be normalised: the texts are compared as they are.
TEST(MathStringCorners, WhatCannotBeNormalisedIsComparedAsText) {
  const std::string odd = "3\\text{ a}\\text{ b}";
  EXPECT_EQ(score("math-string", "\\boxed{" + odd + "}", odd), 1);
  EXPECT_EQ(score("math-string", "\\boxed{" + odd + "}", "3"), 0);
  EXPECT_EQ(score("math-string", "\\boxed{3}", odd), 0);
  EXPECT_EQ(score("math-string", "\\boxed{1/2/3}", "\\frac{1}{2/3}"), 0) << "a fraction of two slashes is none";
}

}  // namespace
}  // namespace pare::test
