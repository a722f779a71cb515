// pare train and pare sft.
#include <chrono>

#include "app/commands.h"
#include "app/console.h"
#include "app/run_directory.h"
#include "rl/evaluate.h"
#include "rl/sft.h"
#include "rl/trainer.h"

namespace pare {

namespace {

struct Options {
  std::vector<std::string> config;
  bool force = false, dry_run = false, keys = false;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double val_score(const Session& s, const Metrics& m) {
  return m.get(cat("val-core/", s.config.data.task, "/reward/mean@", s.config.rollout.val_kwargs.n));
}

std::string model_line(const Session& s) {
  const ModelConfig& c = s.model_config;
  return format("model    %s, %s parameters: %lld layers, width %lld, %lld/%lld heads of %lld, vocabulary %lld",
                c.model_type.c_str(), human(static_cast<double>(s.model->flat.size())).c_str(),
                static_cast<long long>(c.layers), static_cast<long long>(c.hidden), static_cast<long long>(c.heads),
                static_cast<long long>(c.kv_heads), static_cast<long long>(c.head_dim),
                static_cast<long long>(c.vocab));
}

std::string memory_line(const Session& s) {
  std::string line = "memory  ";
  for (const Arena* a : s.arenas())
    line += format(" %s %sB", a->name().c_str(), human(static_cast<double>(a->peak())).c_str());
  return line;
}

// True at steps where a validation is due.
bool val_due(const Config& c, int64_t step) {
  return c.trainer.test_freq > 0 && (step % c.trainer.test_freq == 0 || step == c.trainer.total_training_steps);
}

void show_samples(Console& console, const Trainer& trainer) {
  const auto texts = trainer.texts();
  if (texts.empty()) return;
  const auto by = [&](auto less) { return std::max_element(texts.begin(), texts.end(), less); };
  const auto best = by([](auto& a, auto& b) { return a.reward < b.reward; });
  const auto worst = by([](auto& a, auto& b) { return a.reward > b.reward; });
  const auto longest = by([](auto& a, auto& b) { return a.tokens < b.tokens; });
  const auto show = [&](const char* name, const SampleText& t) {
    console.line(format("    %-8s reward %.2f  advantage %+.2f  answer \"%s\" (expected \"%s\")  %lld tokens", name,
                        t.reward, t.advantage, t.extracted.c_str(), t.answer.c_str(),
                        static_cast<long long>(t.tokens)));
    console.line("             " + t.prompt + " " + t.response);
  };
  show("best", *best);
  if (worst != best) show("worst", *worst);
  if (longest != best && longest != worst) show("longest", *longest);
}

std::string step_line(const Metrics& m, int64_t step, const std::string& eta) {
  const std::string learner = m.get("actor/updates") == 0
                                  ? "no update: the rewards of every group are equal"
                                  : format("entropy %.3f  clip %.3f  grad %.3f  mismatch %lld/%lld  update %s tok/s",
                                           m.get("actor/entropy"), m.get("actor/pg_clipfrac"), m.get("actor/grad_norm"),
                                           static_cast<long long>(m.get("exact/mismatch_tokens")),
                                           static_cast<long long>(m.get("exact/checked_tokens")),
                                           human(m.get("tokens/trained") / m.get("timing_s/update_actor")).c_str());
  return format("step %5lld  reward %.3f  len %5.1f  gen %s tok/s  %s  %.2f s  eta %s", static_cast<long long>(step),
                m.get("critic/score/mean"), m.get("response_length/mean"),
                human(m.get("tokens/generated") / m.get("timing_s/gen")).c_str(), learner.c_str(),
                m.get("timing_s/step"), eta.c_str());
}

void train(const Options& o) {
  const Config config = load_config(o.config);
  if (o.dry_run) return static_cast<void>(std::printf("%s", to_toml(config).c_str()));
  Session session(config);
  Trainer trainer(session);
  RunDirectory run(config.trainer.default_local_dir, config, o.force);
  Console console;
  for (const std::string& w : config_warnings(config)) console.line("note     " + w);
  console.line(model_line(session));
  console.line(format("run      %lld steps of %lld prompts x %lld responses; writes to %s",
                      static_cast<long long>(config.trainer.total_training_steps),
                      static_cast<long long>(config.data.train_batch_size), static_cast<long long>(config.rollout.n),
                      run.path().c_str()));
  console.line("         (a policy loss near 0 is expected while every update is on-policy: watch the reward)");
  trainer.progress = [&](const char* stage, int64_t done, int64_t all) { console.progress(stage, done, all); };

  double last_val = NAN;
  const auto validate = [&](Metrics& m) {
    if (!session.val) return;
    m.add(trainer.evaluate());
    last_val = val_score(session, m);
  };
  if (config.trainer.val_before_train) {
    Metrics m;
    m.set("training/global_step", 0);
    validate(m);
    run.log(m);
    console.line(format("step %5d  val %.3f", 0, last_val));
  }
  const auto start = std::chrono::steady_clock::now();
  int64_t mismatches = 0, checked = 0;
  for (int64_t step = 1; step <= config.trainer.total_training_steps; step++) {
    Metrics m = trainer.step();
    const bool val = val_due(config, step);
    if (val) validate(m);
    run.log(m);
    mismatches += static_cast<int64_t>(m.get("exact/mismatch_tokens"));
    checked += static_cast<int64_t>(m.get("exact/checked_tokens"));
    const double elapsed = seconds_since(start);
    const double eta =
        elapsed / static_cast<double>(step) * static_cast<double>(config.trainer.total_training_steps - step);
    console.line(step_line(m, step, duration(eta)) + (val ? format("  val %.3f", last_val) : ""));
    if (config.trainer.samples_freq > 0 && step % config.trainer.samples_freq == 0) {
      run.log_samples(trainer);
      show_samples(console, trainer);
    }
  }
  run.save_model(session);
  console.line(memory_line(session));
  console.line(format("done     %s; %lld of %lld checked tokens differ between sampler and learner; model in %s/model",
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
  Console console;
  console.line(model_line(session));
  console.line(format("run      %lld steps of %lld completions; writes to %s",
                      static_cast<long long>(config.trainer.total_training_steps),
                      static_cast<long long>(config.data.train_batch_size), run.path().c_str()));
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
    console.line(format("step %5d  val %.3f", 0, val_score(session, m)));
  }
  for (int64_t step = 1; step <= config.trainer.total_training_steps; step++) {
    Metrics m = trainer.step();
    const bool val = val_due(config, step) && session.val;
    if (val) m.add(validate(step));
    run.log(m);
    console.progress("sft", step, config.trainer.total_training_steps);
    if (!val && step % every != 0 && step != config.trainer.total_training_steps) continue;
    console.line(format("step %5lld  loss %.4f  grad %.2f  lr %.2e  %s tok/s%s", static_cast<long long>(step),
                        m.get("train/loss"), m.get("actor/grad_norm"), m.get("actor/lr"),
                        human(m.get("tokens/trained") / m.get("timing_s/step")).c_str(),
                        val ? format("  val %.3f", val_score(session, m)).c_str() : ""));
  }
  run.save_model(session);
  console.line(memory_line(session));
  console.line(format("done     %s; model in %s/model", duration(seconds_since(start)).c_str(), run.path().c_str()));
}

void add(CLI::App& app, const char* name, const char* what, void (*run)(const Options&)) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand(name, what);
  c->add_option("config", o->config, "presets or TOML files, then overrides group.key=value");
  c->add_flag("--force", o->force, "replace a run that is in the output directory");
  c->add_flag("--dry-run", o->dry_run, "print the resolved configuration and stop");
  c->add_flag("--keys", o->keys, "print every configuration key: type, default, meaning, source");
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
