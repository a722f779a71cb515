// pare train and pare sft.
#include <chrono>

#include "app/commands.h"
#include "app/run_directory.h"
#include "app/show.h"
#include "rl/evaluate.h"
#include "rl/sft.h"

namespace pare {

namespace {

struct Options {
  std::vector<std::string> config;
  bool force = false, dry_run = false, keys = false, quiet = false;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// True at steps where a validation is due.
bool val_due(const Config& c, int64_t step) {
  return c.trainer.test_freq > 0 && (step % c.trainer.test_freq == 0 || step == c.trainer.total_training_steps);
}

void train(const Options& o) {
  const Config config = load_config(o.config);
  if (o.dry_run) return static_cast<void>(std::printf("%s", to_toml(config).c_str()));
  Session session(config);
  Trainer trainer(session);
  RunDirectory run(config.trainer.default_local_dir, config, o.force);
  Console console(o.quiet);
  show_machine(console);
  show_model(console, session);
  show_plan(console, session);
  show_train(console, session, run.path());
  for (const std::string& w : config_warnings(config)) console.warning(w);
  StepLines lines(console, config, train_columns(), trainer.steps());
  trainer.progress = [&](const char* stage, int64_t done, int64_t all) { lines.progress(stage, done, all); };

  const auto validate = [&](Metrics& m) {
    if (session.val) m.add(trainer.evaluate());
  };
  if (config.trainer.val_before_train) {
    Metrics m;
    m.set("training/global_step", 0);
    validate(m);
    run.log(m);
    lines.step(m);
  }
  const auto start = std::chrono::steady_clock::now();
  int64_t mismatches = 0, checked = 0;
  for (int64_t step = 1; step <= config.trainer.total_training_steps; step++) {
    Metrics m = trainer.step();
    if (val_due(config, step)) validate(m);
    run.log(m);
    mismatches += static_cast<int64_t>(m.get("exact/mismatch_tokens"));
    checked += static_cast<int64_t>(m.get("exact/checked_tokens"));
    lines.step(m);
    if (config.trainer.samples_freq > 0 && step % config.trainer.samples_freq == 0) {
      run.log_samples(trainer);
      lines.samples(trainer);
    }
  }
  run.save_model(session);
  show_memory(console, session);
  console.result(
      format("done     %s; %lld of %lld checked tokens differ between sampler and learner; model in %s/model",
             duration(seconds_since(start)).c_str(), static_cast<long long>(mismatches),
             static_cast<long long>(checked), run.path().c_str()));
}

void sft(const Options& o) {
  const Config config = load_config(o.config);
  if (o.dry_run) return static_cast<void>(std::printf("%s", to_toml(config).c_str()));
  Session session(config);
  Sft trainer(session);
  Rollout rollout(*session.model, session.rollout_limits(), session.kv, session.activations);
  RunDirectory run(config.trainer.default_local_dir, config, o.force);
  Console console(o.quiet);
  show_machine(console);
  show_model(console, session);
  show_sft(console, session, run.path());
  StepLines lines(console, config, sft_columns(), trainer.steps());
  const auto start = std::chrono::steady_clock::now();
  const int64_t every = std::max<int64_t>(1, config.trainer.total_training_steps / 20);
  const auto validate = [&](int64_t step) {
    return evaluate(session, rollout, step,
                    [&](const RolloutStats& s) { console.progress("evaluation", s.finished, s.completions); });
  };
  if (config.trainer.val_before_train && session.val) {
    Metrics m;
    m.set("training/global_step", 0);
    m.add(validate(0));
    run.log(m);
    lines.step(m);
  }
  for (int64_t step = 1; step <= config.trainer.total_training_steps; step++) {
    Metrics m = trainer.step();
    const bool val = val_due(config, step) && session.val;
    if (val) m.add(validate(step));
    run.log(m);
    console.progress("sft", step, config.trainer.total_training_steps);
    if (val || step % every == 0 || step == config.trainer.total_training_steps) lines.step(m);
  }
  run.save_model(session);
  show_memory(console, session);
  console.result(format("done     %s; model in %s/model", duration(seconds_since(start)).c_str(), run.path().c_str()));
}

void add(CLI::App& app, const char* name, const char* what, void (*run)(const Options&)) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand(name, what);
  c->add_option("config", o->config, "presets or TOML files, then overrides group.key=value");
  c->add_flag("--force", o->force, "replace a run that is in the output directory");
  c->add_flag("--dry-run", o->dry_run, "print the resolved configuration and stop");
  c->add_flag("--quiet", o->quiet, "only warnings, errors and the last line");
  c->add_flag("--keys", o->keys, "print every configuration key as a Markdown table, with its source");
  c->footer([] { return "Configuration keys, with their defaults:\n\n" + config_help(); });
  c->callback([o, run] {
    if (o->keys) return static_cast<void>(std::printf("%s", config_reference().c_str()));
    if (o->config.empty()) fail("give a preset (data/presets) or a TOML file; --keys lists what can be set");
    run(*o);
  });
}

}  // namespace

void add_train(CLI::App& app) { add(app, "train", "GRPO and its variants", train); }
void add_sft(CLI::App& app) { add(app, "sft", "next-token training on completions", sft); }

}  // namespace pare
