// pare train and pare sft.
#include <array>
#include <chrono>
#include <ctime>

#include "app/commands.h"
#include "app/console.h"
#include "app/interrupt.h"
#include "app/run_directory.h"
#include "rl/plan.h"

namespace pare {

namespace {

struct Options {
  std::vector<std::string> config;
  std::string out;
  bool force = false, resume = false, dry_run = false, keys = false;
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

std::string sft_line(const Metrics& m, int64_t step) {
  return format("step %5lld  loss %.4f  grad %.2f  lr %.2e  %s tok/s", static_cast<long long>(step),
                m.get("train/loss"), m.get("actor/grad_norm"), m.get("actor/lr"),
                human(m.get("tokens/trained") / m.get("timing_s/step")).c_str());
}

// Thrown where a run can stop and lose no finished step.
struct Interrupted {};

// A run from its beginning, or from its last checkpoint, to its end.
class Run {
 public:
  Run(const Config& config, TrainingKind kind, Start start)
      : config_(config),
        kind_(kind),
        session_(config),
        training_(make_training(kind, session_)),
        trainer_(dynamic_cast<Trainer*>(training_.get())),
        directory_(config.trainer.default_local_dir, start) {}

  void run() {
    catch_interrupts();
    begin();
    try {
      if (state_.training.step == 0 && config_.trainer.val_before_train && session_.val) validate_before();
      while (state_.training.step < config_.trainer.total_training_steps) step();
      directory_.save_model(session_);
    } catch (const Interrupted&) {
      stop();
    } catch (const Error& e) {
      if (e.code != Exit::failed) throw;
      throw Error(e.code, cat(e.what(), "; the last whole checkpoint is kept, ", how_to_continue()));
    }
    finish();
  }

 private:
  void begin() {
    for (const std::string& d : directory_.damaged()) console_.line("note     " + d);
    if (directory_.checkpoint().empty()) {
      directory_.begin(config_);
    } else {
      state_ = load_checkpoint(directory_.checkpoint(), session_, *training_);
      directory_.resume(config_, state_);
    }
    first_ = state_.training.step;
    if (trainer_)
      for (const std::string& w : config_warnings(config_)) console_.line("note     " + w);
    console_.line(model_line(session_));
    const std::string each = trainer_ ? format("prompts x %lld responses", static_cast<long long>(config_.rollout.n))
                                      : std::string("completions");
    console_.line(format(
        "run      %lld steps of %lld %s; writes to %s", static_cast<long long>(config_.trainer.total_training_steps),
        static_cast<long long>(config_.data.train_batch_size), each.c_str(), directory_.path().c_str()));
    if (first_ > 0)
      console_.line(format("         goes on after step %lld, from %s", static_cast<long long>(first_),
                           directory_.checkpoint().c_str()));
    else if (trainer_)
      console_.line("         (a policy loss near 0 is expected while every update is on-policy: watch the reward)");
    training_->progress = [this](const char* stage, int64_t done, int64_t all) {
      // The step that has just begun is given up: it is generated again, bit for bit.  From the update on it is
      // finished, and its validation too.
      if (interrupted() && std::string_view(stage) == "rollout") throw Interrupted();
      console_.progress(stage, done, all);
    };
  }

  void validate_before() {
    Metrics m;
    m.set("training/global_step", 0);
    m.add(training_->evaluate());
    directory_.log(m);
    console_.line(format("step %5d  val %.3f", 0, val_score(session_, m)));
  }

  void step() {
    Metrics m = training_->step();
    const int64_t step = training_->steps();
    const bool val = session_.val && val_due(config_, step);
    if (val) m.add(training_->evaluate());
    directory_.log(m);
    const TrainerKeys& t = config_.trainer;
    const bool samples = trainer_ && t.samples_freq > 0 && step % t.samples_freq == 0;
    if (samples) directory_.log_samples(session_, *trainer_);
    const bool best = val && !(val_score(session_, m) <= state_.best_score);
    if (best) state_.best_score = val_score(session_, m), state_.best_step = step;
    if (trainer_) {
      state_.checked += static_cast<int64_t>(m.get("exact/checked_tokens"));
      state_.mismatches += static_cast<int64_t>(m.get("exact/mismatch_tokens"));
    }
    state_.training = training_->state();
    show(m, val, samples);
    if (t.save_freq > 0 && (step % t.save_freq == 0 || step == t.total_training_steps || best)) save();
    if (interrupted() && step < t.total_training_steps) throw Interrupted();
  }

  void show(const Metrics& m, bool val, bool samples) {
    const int64_t step = state_.training.step, total = config_.trainer.total_training_steps;
    const std::string score = val ? format("  val %.3f", val_score(session_, m)) : "";
    if (trainer_) {
      const double each = seconds_since(start_) / static_cast<double>(step - first_);
      console_.line(step_line(m, step, duration(each * static_cast<double>(total - step))) + score);
      if (samples) show_samples(console_, *trainer_);
    } else {
      console_.progress("sft", step, total);
      if (val || step % std::max<int64_t>(1, total / 20) == 0 || step == total)
        console_.line(sft_line(m, step) + score);
    }
  }

  void save() { directory_.save(session_, *training_, state_); }

  std::string how_to_continue() const {
    return cat("continue with: pare ", kind_ == TrainingKind::grpo ? "train" : "sft", " ", directory_.path(),
               "/config.toml --resume");
  }

  // state_ is that of the last border, and so are the parameters.
  [[noreturn]] void stop() {
    const int64_t step = state_.training.step;
    if (step > 0 && !directory_.saved(step)) save();
    throw Error(Exit::interrupted, cat(step == 0 ? "interrupted before the end of the first step"
                                                 : cat("interrupted after step ", step, ", which is saved"),
                                       "; ", how_to_continue()));
  }

  void finish() {
    console_.line(memory_line(session_));
    const std::string exact =
        trainer_ ? format("; %lld of %lld checked tokens differ between sampler and learner",
                          static_cast<long long>(state_.mismatches), static_cast<long long>(state_.checked))
                 : "";
    console_.line(format("done     %s%s; model in %s/model", duration(seconds_since(start_)).c_str(), exact.c_str(),
                         directory_.path().c_str()));
  }

  const Config config_;
  const TrainingKind kind_;
  Session session_;
  const std::unique_ptr<Training> training_;
  Trainer* const trainer_;  // the same, for GRPO
  RunDirectory directory_;
  Console console_;
  RunState state_;     // at the border of the last finished step
  int64_t first_ = 0;  // steps done before this process
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// runs/NAME-TIME, in UTC.
std::string default_path(const std::string& name) {
  const std::time_t now = std::time(nullptr);
  std::array<char, 32> time;
  std::strftime(time.data(), time.size(), "%Y%m%dT%H%M%SZ", std::gmtime(&now));
  return cat("runs/", name.empty() ? "pare" : name, "-", time.data());
}

void run(const Options& o, TrainingKind kind) {
  Config config = load_config(o.config);
  const Start start = o.resume ? Start::resume : o.force ? Start::replace : Start::fresh;
  std::string& path = config.trainer.default_local_dir;
  if (!o.out.empty()) path = o.out;
  if (path.empty() && o.resume) fail("--resume: which run? give --out or trainer.default_local_dir");
  if (path.empty()) path = default_path(config.trainer.experiment_name);
  if (!o.dry_run) return Run(config, kind, start).run();
  check_run_directory(path, start);
  check_run(config, kind);
  std::printf("%s", to_toml(config).c_str());
}

void add(CLI::App& app, const char* name, const char* what, TrainingKind kind) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand(name, what);
  c->add_option("config", o->config, "presets or TOML files, then overrides group.key=value");
  c->add_option("--out", o->out, "run directory (trainer.default_local_dir); default runs/NAME-TIME");
  CLI::Option* force = c->add_flag("--force", o->force, "replace a run that is in the run directory");
  c->add_flag("--resume", o->resume,
              "continue the run in the run directory from its last whole checkpoint, or begin it")
      ->excludes(force);
  c->add_flag("--dry-run", o->dry_run, "check everything, print the resolved configuration and stop");
  c->add_flag("--keys", o->keys, "print every configuration key: type, default, meaning, source");
  c->callback([o, kind] {
    if (o->keys) return static_cast<void>(std::printf("%s", config_reference().c_str()));
    if (o->config.empty()) fail("give a preset (data/presets) or a TOML file; --keys lists what can be set");
    run(*o, kind);
  });
}

}  // namespace

void add_train(CLI::App& app) { add(app, "train", "GRPO and its variants", TrainingKind::grpo); }
void add_sft(CLI::App& app) { add(app, "sft", "next-token training on completions", TrainingKind::sft); }

}  // namespace pare
