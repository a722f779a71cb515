// The runs of the papers (data/presets/paper-*.toml, released-*.toml): planned at their true shapes, run at tiny ones;
// and methods laid over one another.
#include <regex>
#include <set>
#include <sstream>

#include "data/presets.h"
#include "tests/program.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

struct PaperRun {
  std::string preset, shape, metric;  // the shape of its model; a metric that is above 0 where its method works
  int64_t parameters;
};
const std::vector<PaperRun> kPaperRuns = {
    {"paper-sparse-rl", "qwen2.5-7b", "kv/tokens_saved/mean", 7'615'616'512},
    {"released-sparse-rl", "qwen2.5-7b", "kv/tokens_saved/mean", 7'615'616'512},
    {"paper-dash", "qwen2.5-1.5b", "actor/kl_loss", 1'543'714'304},
    {"released-dash", "qwen2.5-1.5b", "actor/kl_loss", 1'543'714'304},
    {"paper-nat", "qwen2.5-7b", "ht/weight_max", 7'615'616'512},
    {"paper-rpo", "deepseek-r1-distill-qwen-1.5b", "rpo/prefix_tokens", 1'777'088'000},
    {"paper-distill-sparse", "qwen3-4b", "distill/grad_norm", 4'022'468'096},
    {"released-distill-sparse", "qwen3-4b", "distill/grad_norm", 4'022'468'096},
    {"released-rpo", "deepseek-r1-distill-qwen-1.5b", "rpo/prefix_tokens", 1'777'088'000},
};

TEST(PaperRuns, AreAllHere) {
  std::set<std::string> listed, present;
  for (const PaperRun& run : kPaperRuns) listed.insert(run.preset);
  for (const std::string& name : preset_names("toml"))
    if (name.starts_with("paper-") || name.starts_with("released-")) present.insert(name);
  EXPECT_EQ(listed, present);
}

// The preset and those that it lies over.
void add_with_bases(std::set<std::string>& names, const std::string& name) {
  if (!names.insert(name).second) return;
  const std::string text = read_text("data/presets/" + name + ".toml");
  std::smatch bases;
  if (!std::regex_search(text, bases, std::regex("(^|\n)base = (.*)"))) return;
  const std::string list = bases[2];
  const std::regex quoted("\"([^\"]+)\"");
  for (auto it = std::sregex_iterator(list.begin(), list.end(), quoted); it != std::sregex_iterator(); ++it)
    add_with_bases(names, (*it)[1]);
}

// Each value says where it stands in the paper, that it does not, or what of the release it is; so do the methods that
// these runs lie over.
TEST(PaperRuns, EveryValueHasItsSource) {
  const std::regex value("^[a-z_.]+ = "), paper("# .*(section|appendix|table|figure|equation|algorithm) [0-9A-Z]"),
      other("# [Nn]ot in the paper"), release("# the release");
  std::set<std::string> presets;
  for (const PaperRun& run : kPaperRuns) add_with_bases(presets, run.preset);
  EXPECT_TRUE(presets.count("rpo")) << "the base of a base";
  int values = 0;
  for (const std::string& preset : presets) {
    std::stringstream lines(read_text("data/presets/" + preset + ".toml"));
    std::string before;
    for (std::string line; std::getline(lines, line); before = line) {
      if (!std::regex_search(line, value) || line.starts_with("base = ")) continue;
      const std::string where = line.find("\"\"\"") < line.size() ? before : line;  // of a text, the line before
      values++;
      EXPECT_TRUE(std::regex_search(where, other) ||
                  (!preset.starts_with("released-") && std::regex_search(where, paper)) ||
                  (!preset.starts_with("paper-") && std::regex_search(where, release)))
          << preset << ": " << line;
    }
  }
  EXPECT_GT(values, 180);
}

// Without weights, tokenizer or data.  (A release has the sizes of its paper, which take seconds to plan.)
TEST(PaperRuns, ArePlannedAtTheirTrueShapes) {
  for (const PaperRun& run : kPaperRuns) {
    if (run.preset.starts_with("released-")) continue;
    // A plan's time is that of its sequences, one by one: an eighth of the batch, all at a time.
    Config config =
        load_config({run.preset, "model.config=" + run.shape, "trainer.device=cuda", "rollout.max_num_seqs=1024"});
    config.data.train_batch_size /= 8;
    config.actor.ppo_mini_batch_size /= 8;
    const Plan plan = plan_step(config, TrainingKind::grpo, false);
    const Parameter last = parameters(plan.model).back();
    EXPECT_EQ(last.offset + last.size, run.parameters) << run.preset;
    EXPECT_GT(plan.ledger.total("rollout").flops, 0) << run.preset;
    EXPECT_GT(plan.ledger.total("learner").flops, plan.ledger.total("rollout").flops / 2) << run.preset;
  }
}

// What is left of a run when model, data, lengths, batch and device are taken from another one.
Config without_sizes(Config c) {
  const Config d;
  c.model = d.model;
  c.data = d.data;
  c.rollout.max_num_seqs = 0;
  c.rollout.max_num_batched_tokens = 0;
  c.rollout.kv.evict.budget = 0;
  c.rollout.kv.evict.buffer = 0;
  c.rollout.kv.window.size = 0;
  c.rollout.kv.blocks.size = 0;
  c.rollout.kv.blocks.count = 0;
  c.rollout.kv.blocks.dense_layers = 0;
  c.algorithm.rpo.max_cut = 0;
  c.actor.ppo_mini_batch_size = 0;
  c.actor.ppo_max_token_len = 0;
  c.actor.rpc_min_tokens = 0;
  c.trainer.device = d.trainer.device;
  c.trainer.total_training_steps = 0;
  c.trainer.test_freq = 0;
  c.trainer.save_freq = 0;
  c.trainer.experiment_name.clear();
  return c;
}

TEST(PaperRuns, TheOverlayChangesSizesAlone) {
  for (const PaperRun& run : kPaperRuns) {
    const Config paper = load_config({run.preset}), tiny = load_config({run.preset, "tiny-overlay"});
    EXPECT_EQ(without_sizes(tiny), without_sizes(paper)) << run.preset;
    EXPECT_EQ(tiny.model.config, "tiny-ssa") << run.preset;
    EXPECT_EQ(tiny.data.task, "ssa") << run.preset;
  }
}

// With as many updates a step as the run has.
TEST(PaperRuns, RunTinyForTwoSteps) {
  for (const PaperRun& run : kPaperRuns) {
    std::vector<std::string> names = {run.preset, "tiny-overlay", "trainer.threads=1"};
    const Config paper = load_config({run.preset});
    if (paper.actor.ppo_mini_batch_size > 0) names.push_back("actor.ppo_mini_batch_size=1");
    TrainingRun training(load_config(names));
    for (int step = 1; step <= 2; step++) {
      const Metrics m = training.step();
      EXPECT_GT(m.get("actor/grad_norm"), 0) << run.preset << ", step " << step;
      EXPECT_EQ(m.get("actor/updates") > 1, paper.actor.ppo_mini_batch_size > 0) << run.preset;
      if (step == 2) {
        EXPECT_GT(m.get(run.metric), 0) << run.preset;
      }
      EXPECT_FALSE(m.get("exact/mismatch_tokens") > 0) << run.preset;
    }
  }
}

// ---- methods together ----------------------------------------------------------------------------------------------

struct Together {
  std::string methods;  // laid over a run with sparse reads, or dense ones
  bool sparse;
  std::vector<std::string> metrics;  // above 0 in the second step: each method works
  const char* why;
};

// The order of the stages is the answer to most of them: rewards, advantages, filter, old log-probs, correction, token
// plan, updates.
TEST(Methods, WorkTogether) {
  const std::vector<Together> all = {
      {"nat-rpc sparse-rl", true, {"ht/weight_max", "rollout_corr/xi_mean"}, "judged whole, trained on a part"},
      {"rpo-whole sparse-rl", true, {"rpo/prefix_tokens", "rollout_corr/xi_mean"}, "xi and veto are of suffixes"},
      {"rpo-whole dapo", false, {"rpo/prefix_tokens", "rollout/gen_batches"}, "groups that are dropped update entries"},
      {"rpo-whole nat-rpc", false, {"rpo/prefix_tokens", "ht/weight_max"}, "a suffix is cut, |o| is the suffix"},
      {"dash nat-urs", false, {"ht/weight_max"}, "dropped before the forward, then thinned out"},
      {"dash sparse-rl", true, {"rollout_corr/xi_mean"}, "what the filter drops is not judged"},
      {"distill-sparse sparse-rl",
       true,
       {"distill/grad_norm", "rollout_corr/xi_mean"},
       "rejected ones teach the sampler"},
      {"distill-sparse jackpot nat-rpc", true, {"distill/grad_norm", "ht/weight_max"}, "one plan of tokens for both"},
      {"distill-sparse rpo-whole sparse-rl", true, {"distill/grad_norm", "rpo/prefix_tokens"}, "suffixes for both"},
      {"dapo sparse-rl nat-rpc", true, {"rollout/gen_batches", "ht/weight_max"}, "three at once"}};
  for (const Together& t : all) {
    SCOPED_TRACE(t.methods + ": " + t.why);
    std::vector<std::string> names = {t.sparse ? "quickstart-quest" : "quickstart"};
    std::istringstream list(t.methods);
    for (std::string m; list >> m;) names.push_back(m);
    names.insert(names.end(), {"tiny-overlay", "data.train_rows=4", "trainer.threads=1"});
    TrainingRun run(load_config(names));
    run.step();
    const Metrics m = run.step();
    EXPECT_GT(m.get("actor/updates"), 0);
    for (const std::string& metric : t.metrics) EXPECT_GT(m.get(metric), 0) << metric;
    EXPECT_FALSE(m.get("exact/mismatch_tokens") > 0);
  }
}

// Budgets that follow the acceptance move between steps; the adapters' learner reads what the sampler read.
TEST(Methods, AdaptersReadTheBlocksOfTheirSampler) {
  TrainingRun run(load_config({"quickstart-quest", "distill-sparse", "sparse-rl", "tiny-overlay", "trainer.threads=1",
                               "rollout.kv.blocks.count=3", "rollout.kv.blocks.acceptance_target=0.99",
                               "rollout.kv.blocks.acceptance_steps=1", "trainer.total_training_steps=3"}));
  std::set<double> budgets;
  for (int step = 0; step < 3; step++) {
    const Metrics m = run.step();
    budgets.insert(m.get("kv/blocks/context_64_127"));
    EXPECT_GT(m.get("exact/checked_tokens"), 0);
    EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
  }
  EXPECT_GT(budgets.size(), 1u) << "no budget moved";
}

// A preset of one value is that key over its base, and no other.
TEST(Methods, PresetsOfOneKeyAreThatKey) {
  struct OneKey {
    std::string preset, base, key;
  };
  const std::vector<OneKey> all = {
      {"dash-no-kl", "dash", "actor.use_kl_loss=false"},
      {"mask-truncated", "", "algorithm.mask_truncated_completions=true"},
      {"rpo-whole", "rpo", "algorithm.rpo.cut=length"},
      {"sequence-mask", "naive-sparse", "algorithm.rollout_correction.rollout_rs=geometric"},
      {"token-mask", "naive-sparse", "algorithm.rollout_correction.rollout_rs=token"},
      {"unbiased-kl", "sparse-rl-paper", "actor.use_bias_correction_kl=true"}};
  const std::regex value("(^|\n)[a-z_.]+ = ");
  std::set<std::string> listed, present;
  for (const OneKey& one : all) listed.insert(one.preset);
  for (const std::string& name : preset_names("toml")) {
    const std::string text = read_text("data/presets/" + name + ".toml");
    const auto values = std::distance(std::sregex_iterator(text.begin(), text.end(), value), std::sregex_iterator());
    const bool based = text.find("\nbase = ") != std::string::npos;
    if (values - (based ? 1 : 0) == 1) present.insert(name);
  }
  EXPECT_EQ(listed, present);
  const auto config = [](const std::vector<std::string>& names) {
    std::vector<std::string> arguments = {"quickstart-quest"};
    for (const std::string& name : names)
      if (!name.empty()) arguments.push_back(name);
    Config c = load_config(arguments);
    c.trainer.experiment_name.clear();
    return c;
  };
  for (const OneKey& one : all) {
    EXPECT_EQ(config({one.preset}), config({one.base, one.key})) << one.preset;
    EXPECT_NE(config({one.preset}), config({one.base})) << one.preset;
  }
}

std::string refusal(std::vector<std::string> names) {
  try {
    load_config(names);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(Methods, ThatContradictOneAnotherAreRefused) {
  EXPECT_NE(refusal({"quickstart-rkv", "sparse-rl", "rpo"}).find("algorithm.rpo.enable"), std::string::npos);
  EXPECT_NE(refusal({"quickstart-quest", "rpo-paper", "sparse-rl"}).find("algorithm.rpo.prefix_loss"),
            std::string::npos);
}

}  // namespace
}  // namespace pare::test
