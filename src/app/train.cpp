// pare train and pare sft.
#include <array>
#include <chrono>
#include <ctime>
#include <filesystem>

#include "app/commands.h"
#include "app/device.h"
#include "app/interrupt.h"
#include "app/shorthands.h"
#include "app/show.h"
#include "base/foreign_file.h"
#include "base/progress.h"
#include "comm/processes.h"
#include "run/ranks.h"
#include "run/record.h"
#include "run/run_directory.h"

namespace pare {

namespace {

struct Options {
  Shorthands shorthands{{{"--device"}, {"--exact"}}};
  std::vector<std::string> config;
  std::vector<std::string> accepted;  // --accept-changed
  std::string out, from, keys;
  int ranks = 1;
  bool force = false, resume = false, dry_run = false, quiet = false;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// True at steps where a validation is due.
bool val_due(const Config& c, int64_t step) {
  return c.trainer.test_freq > 0 && (step % c.trainer.test_freq == 0 || step == c.trainer.total_training_steps);
}

// Thrown where a run can stop and lose no finished step.
struct Interrupted {};

// A run from its beginning, or from its last checkpoint, to its end.
class Run {
 public:
  Run(const Config& config, TrainingKind kind, const Table& table, Start start, const Options& options)
      : config_(config),
        grpo_(kind == TrainingKind::grpo),
        table_(table),
        inputs_{read_inputs(config), options.accepted},
        checkpoint_(find_checkpoint(start)),
        plan_(plan_run(config, kind, table)),
        session_(plan_.config, table, true, plan_.most),
        training_(make_training(kind, session_)),
        resumed_(start == Start::resume),
        console_(options.quiet, !comm_.first()) {
    if (comm_.first() && !directory_) directory_.emplace(path(), start);
  }

  void run() {
    if (comm_.ranks() > 1 && launcher_of_ranks() == 0)
      catch_interrupts(comm_.first() ? "pare: ended by a signal; the last checkpoint stands, continue with --resume\n"
                                     : "");
    else
      catch_interrupts(nullptr, launcher_of_ranks());
    begin();
    try {
      stop_if_asked();  // while it loaded
      if (state_.training.step == 0 && config_.trainer.val_before_train && session_.val) validate_before();
      while (state_.training.step < config_.trainer.total_training_steps) step();
      if (config_.trainer.save_model) directory_ ? directory_->save_model(session_) : save_model("", session_);
    } catch (const Interrupted&) {
      stop();
    } catch (const Error& e) {
      if (e.code != Exit::failed || (directory_ && !directory_->in_place())) throw;
      throw Error(e.code, cat(e.what(), "; the last whole checkpoint is kept, ", how_to_continue()));
    }
    finish();
  }

 private:
  // The checkpoint to continue from, if there is one; what does not fit it is said before anything is loaded.
  std::string find_checkpoint(Start start) {
    if (comm_.first() && start == Start::resume) directory_.emplace(path(), start);
    const std::string checkpoint = comm_.broadcast(directory_ ? directory_->checkpoint() : "");
    if (!checkpoint.empty())
      check_resumable(checkpoint, config_, inputs_);
    else if (const std::string& from = config_.trainer.from_checkpoint; !from.empty())
      check_startable(from, config_, comm_.first());
    return checkpoint;
  }

  // Parameters, moments and state_ before the first step.
  void load(std::vector<std::string>& notes) {
    const std::string& from = config_.trainer.from_checkpoint;
    if (!checkpoint_.empty()) {
      state_ = load_checkpoint(checkpoint_, session_, *training_, inputs_, &notes);
      for (const AcceptedChange& c : state_.accepted)
        if (c.step == state_.training.step) accepted_ += cat(accepted_.empty() ? "" : ", ", c.path, " (", c.name, ")");
      if (!accepted_.empty()) notes.push_back(cat("accepted that these have changed: ", accepted_));
    } else if (!from.empty()) {
      state_.training = start_from(from, session_, *training_, inputs_.files);
    }
    state_.inputs = inputs_.files;
  }

  void begin() {
    check_equal_ranks(session_, table_);
    check_shared_folder(comm_, path());
    if (directory_)
      for (const std::string& d : directory_->damaged()) console_.warning(d);
    std::vector<std::string> notes;
    load(notes);
    if (directory_ && checkpoint_.empty()) directory_->begin(config_);
    if (directory_ && !checkpoint_.empty())
      for (std::string& note : directory_->resume(config_, state_)) notes.push_back(std::move(note));
    start_record(notes);
    first_ = state_.training.step;
    if (comm_.first()) print_notes(plan_.notes);
    show_machine(console_, table_);
    show_model(console_, session_);
    show_plan(console_, session_, plan_);
    if (grpo_) {
      show_train(console_, session_, path());
      for (const std::string& w : config_warnings(config_)) console_.warning(w);
    } else {
      show_sft(console_, session_, path());
    }
    for (const std::string& n : notes) console_.warning(n);
    if (const std::string bound = config_.trainer.threads == 0 ? binding_note(comm_) : ""; !bound.empty())
      console_.warning(bound);
    warn_of_mismatches();
    if (resumed_)
      console_.line(first_ > 0 ? cat("         goes on after step ", first_, ", from ", checkpoint_)
                               : "         has no checkpoint yet: begins again");
    if (const TrainingState& t = state_.training; first_ == 0 && !config_.trainer.from_checkpoint.empty())
      console_.line(cat("         starts from ", config_.trainer.from_checkpoint, ": weights, moments, ", t.updates,
                        " updates; ",
                        t.prompts == PromptStream::Cursor() ? "data from their beginning" : "data go on"));
    lines_.emplace(console_, config_, grpo_ ? train_columns(config_) : sft_columns(), first_);
    training_->progress = [this](const char* stage, int64_t done, int64_t all) {
      // The step that has just begun is given up: it is generated again, bit for bit.  From the update on it is
      // finished, and its validation too.
      // Ranks can agree on it between steps alone.
      if (comm_.ranks() == 1 && interrupted() && std::string_view(stage) == "rollout") throw Interrupted();
      lines_->progress(stage, done, all);
    };
  }

  // certificates.jsonl begins with the run; one that was lost, cut or never written, where the run goes on.
  void start_record(std::vector<std::string>& notes) {
    const TrainingState& t = state_.training;
    const std::string problem = directory_ ? directory_->record_problem(state_.chain) : "";
    if (comm_.most(!problem.empty()) == 0) return;
    if (!state_.chain.empty())
      notes.push_back(cat(problem, "; it begins again after step ", t.step, ", and no earlier step can be audited"));
    const RecordLine line = start_line(session_, t.step, t.drawn, inputs_.files, state_.chain);
    state_.chain = line.chain;
    if (directory_) directory_->record(line);
  }

  // Inputs that were accepted as they are now, since the last line of certificates.jsonl.
  std::vector<Input> changed_inputs() const {
    std::vector<Input> changed;
    for (const AcceptedChange& c : state_.accepted)
      if (c.step == state_.training.step) changed.push_back({c.name, "", "", c.path, c.now});
    return changed;
  }

  void validate_before() {
    Metrics m;
    m.set("training/global_step", 0);
    m.add(training_->evaluate());
    log(m, nullptr);
    lines_->step(m);
    warn_of_restarts(console_, session_);
  }

  Metrics train() {
    try {
      return training_->step();
    } catch (const Error& e) {
      if (e.code == Exit::non_finite) stop_at_nonfinite(e);
      throw;
    }
  }

  void step() {
    Metrics m = train();
    const int64_t step = training_->steps();
    const bool val = session_.val && val_due(config_, step);
    if (val) m.add(training_->evaluate());
    if (!accepted_.empty()) m.set_text("accepted_changes", std::exchange(accepted_, ""));
    log(m, &training_->record());
    const TrainerKeys& t = config_.trainer;
    const bool samples = grpo_ && t.samples_freq > 0 && step % t.samples_freq == 0;
    if (samples && directory_) directory_->log_samples(session_, *training_);
    const bool best = val && !(val_score(config_, m) <= state_.best_score);
    if (best) {
      state_.best_score = val_score(config_, m);
      state_.best_step = step;
    }
    state_.training = training_->state();
    if (m.get("exact/checked_tokens") > 0) {
      state_.checked += static_cast<int64_t>(m.get("exact/checked_tokens"));
      state_.mismatches += static_cast<int64_t>(m.get("exact/mismatch_tokens"));
    }
    show(m, val, samples);
    warn_of_mismatches();
    warn_of_restarts(console_, session_);
    warn_of_dropped_updates(m);
    if (t.save_freq > 0 && (step % t.save_freq == 0 || step == t.total_training_steps || best)) save();
    stop_if_asked();
  }

  void stop_if_asked() {
    if (state_.training.step < config_.trainer.total_training_steps && comm_.most(interrupted())) throw Interrupted();
  }

  const std::string& path() const { return config_.trainer.default_local_dir; }

  void log(Metrics& m, const StepRecord* record) {
    expect_equal(comm_, facts_of(m));
    const RecordLine line = step_line(m, record, changed_inputs(), state_.chain);
    state_.chain = line.chain;
    m.set_text("chain", line.chain);
    if (!directory_) return;
    directory_->log(m);
    directory_->record(line);
  }

  void show(const Metrics& m, bool val, bool samples) {
    const int64_t step = state_.training.step, total = config_.trainer.total_training_steps;
    if (!grpo_) console_.progress("sft", step, total);
    const bool row = grpo_ || val || step % std::max<int64_t>(1, total / 20) == 0 || step == total;
    if (row) lines_->step(m);
    if (samples) lines_->samples(training_->texts());
  }

  // Of the whole run, so that one that is resumed is not better than one that was left alone.
  std::string mismatches() const {
    if (state_.checked == 0) return "log-probs of sampler and learner were not compared";
    return format("%lld of %lld checked tokens differ between sampler and learner",
                  static_cast<long long>(state_.mismatches), static_cast<long long>(state_.checked));
  }

  bool broken() const { return exact_learner(config_) && state_.mismatches > 0; }
  bool fails() const { return broken() && config_.rollout.on_mismatch == OnMismatch::fail; }

  void warn_of_mismatches() {
    if (warned_ || !broken()) return;
    warned_ = true;
    console_.warning(cat(
        "AFTER STEP ", state_.training.step, ", ", mismatches(),
        ". In an exact run none may differ: the program or the machine computes wrongly, and no result from here on "
        "can be trusted. The run continues",
        fails() ? " and will end with exit code 1 (rollout.on_mismatch=continue: with 0)." : "."));
  }

  void warn_of_dropped_updates(const Metrics& m) {
    for (const char* who : {"actor", "distill"})
      if (const double dropped = m.get(cat(who, "/nonfinite_updates")); dropped > 0)
        console_.warning(
            format("step %lld dropped %g %s update%s: the gradient norm was not finite "
                   "(trainer.skip_nonfinite = %lld)",
                   static_cast<long long>(state_.training.step), dropped, who, dropped > 1 ? "s" : "",
                   static_cast<long long>(config_.trainer.skip_nonfinite)));
  }

  void save() {
    directory_ ? directory_->save(session_, *training_, state_) : save_checkpoint("", session_, *training_, state_);
  }

  std::string how_to_continue() const {
    return cat("continue with: pare ", grpo_ ? "train" : "sft", " ", path(), "/config.toml --resume");
  }

  // state_ is that of the last border, and so are the parameters.
  [[noreturn]] void stop() {
    const int64_t step = state_.training.step;
    if (step > 0 && comm_.most(directory_ && !directory_->saved(step))) save();
    throw Error(Exit::interrupted, cat(step == 0 ? "interrupted before the end of the first step"
                                                 : cat("interrupted after step ", step, ", which is saved"),
                                       "; ", how_to_continue()));
  }

  // The step cannot be finished.  The one before is saved, unless updates of this one have changed it, or, by
  // trainer.check_nan, one rank alone has stopped.
  [[noreturn]] void stop_at_nonfinite(const Error& e) {
    const int64_t step = state_.training.step;
    const bool alone = comm_.ranks() > 1 && config_.trainer.check_nan;
    if (step == 0 || alone || !training_->at(state_.training)) throw e;
    if (comm_.most(directory_ && !directory_->saved(step))) save();
    throw Error(e.code, cat(e.what(), "; step ", step, " is saved, ", how_to_continue(),
                            config_.trainer.skip_nonfinite == 0
                                ? "; trainer.skip_nonfinite=1 there drops an update that is not finite"
                                : "; a greater trainer.skip_nonfinite there drops more of them"));
  }

  void finish() {
    show_memory(console_, session_);
    if (grpo_) console_.line("exact    " + mismatches());
    console_.result(cat("done     ", duration(seconds_since(start_)), "; ",
                        config_.trainer.save_model ? "model" : "run", " in ", path(),
                        config_.trainer.save_model ? "/model" : ""));
    if (fails())
      throw Error(Exit::failed, cat(mismatches(),
                                    "; in an exact run none may. The run is complete, but "
                                    "do not trust it (rollout.on_mismatch=continue exits with code 0)"));
  }

  Comm& comm_ = world();
  const Config config_;
  const bool grpo_;  // or next-token training
  const Table& table_;
  const ResumeInputs inputs_;
  std::optional<RunDirectory> directory_;  // rank 0 alone has it
  const std::string checkpoint_;           // to continue from; empty: none
  const Plan plan_;
  Session session_;
  const std::unique_ptr<Training> training_;
  const bool resumed_;
  Console console_;
  std::optional<StepLines> lines_;
  RunState state_;        // at the border of the last finished step
  std::string accepted_;  // changes of inputs, until a step has logged them
  int64_t first_ = 0;     // steps done before this process
  bool warned_ = false;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// runs/NAME-TIME, in UTC; with a number behind it where that is taken.
std::string default_path(const std::string& name) {
  const std::time_t now = std::time(nullptr);
  std::array<char, 32> time;
  std::strftime(time.data(), time.size(), "%Y%m%dT%H%M%SZ", std::gmtime(&now));
  const std::string path = cat("runs/", name.empty() ? "pare" : name, "-", time.data());
  for (int i = 1;; i++)
    if (const std::string free = i == 1 ? path : cat(path, "-", i); !std::filesystem::exists(free)) return free;
}

// Fails if the configuration, or the run that is to be continued, belongs to the other command.
void check_command(const Options& o, RunCommand given, RunCommand own, const std::string& run) {
  if (const RunCommand there = o.resume ? command_of_run(run) : RunCommand::any; there != RunCommand::any)
    given = there;
  if (given == RunCommand::any || given == own) return;
  std::string line = cat("pare ", command_name(given));
  for (const std::string& argument : o.config) line += " " + shell_word(argument);
  for (const auto& [option, value] : {std::pair{" --out ", &o.out}, {" --from ", &o.from}})
    if (!value->empty()) line += option + shell_word(*value);
  // Presets of this command do not continue a run of the other.
  const auto is_of_run = [](const std::string& argument) { return !folder_of_config(argument).empty(); };
  if (o.resume && std::none_of(o.config.begin(), o.config.end(), is_of_run))
    line = cat("pare ", command_name(given), " ", shell_word(run + "/config.toml"));
  if (o.resume) line += " --resume";
  fail(o.resume ? cat(run, " holds a run") : "the configuration is that of a run", " of `pare ", command_name(given),
       "`, not of `pare ", command_name(own), "`; type: ", line,
       o.resume ? std::string() : cat(", or add trainer.command=", command_name(own), " to use its keys all the same"));
}

// The arguments; if --resume has --out and no model, they are overrides of the configuration of the run there.
std::vector<std::string> with_own_config(const Options& o) {
  std::vector<std::string> arguments = o.config;
  std::error_code ignored;
  const auto adds_to_a_run = [&](const std::string& argument) {
    return argument.find('=') != std::string::npos && !std::filesystem::is_regular_file(argument, ignored) &&
           !argument.starts_with("model.path=") && !argument.starts_with("model.config=");
  };
  if (!o.resume || o.out.empty() || !std::all_of(arguments.begin(), arguments.end(), adds_to_a_run)) return arguments;
  check_run_directory(o.out, Start::resume);
  arguments.insert(arguments.begin(), (std::filesystem::path(o.out) / "config.toml").string());
  return arguments;
}

void run(const Options& o, const Command& command, TrainingKind kind) {
  std::vector<std::string> arguments, notes;
  for (const std::string& argument : with_own_config(o)) {
    arguments.push_back(argument);
    const std::string folder = folder_of_config(argument);
    if (folder.empty()) continue;
    // A new run from a checkpoint of this one has a directory of its own.
    arguments.push_back(cat("trainer.default_local_dir=", toml_quote(o.from.empty() ? folder : "")));
    if (const RunCommand of = command_of_run(folder); of != RunCommand::any)  // which an older run did not write down
      arguments.push_back(cat("trainer.command=", command_name(of)));
  }
  if (!o.from.empty()) arguments.push_back(cat("trainer.from_checkpoint=", toml_quote(o.from)));
  for (const std::string& override : o.shorthands.overrides(command)) arguments.push_back(override);
  if (!o.out.empty()) check_utf8(o.out, "--out");
  Config config = load_config(arguments, &notes);
  const RunCommand own = kind == TrainingKind::sft ? RunCommand::sft : RunCommand::train;
  const Table& table = open_table(config.trainer);
  const Start start = o.resume ? Start::resume : o.force ? Start::replace : Start::fresh;
  std::string& path = config.trainer.default_local_dir;
  if (!o.out.empty()) path = o.out;
  if (path.empty() && o.resume)
    fail("--resume: which run? give its RUN/config.toml, or --out RUN (trainer.default_local_dir)");
  check_command(o, config.trainer.command, own, path);
  config.trainer.command = own;
  Comm& comm = world();
  if (path.empty()) path = comm.broadcast(default_path(config.trainer.experiment_name));
  if (comm.first()) check_run_directory(path, start);
  if (comm.first()) print_notes(notes);
  ProgressLine::quiet = o.quiet || !comm.first();
  resolve_steps(config, kind);
  if (!o.dry_run) return Run(config, kind, table, start, o).run();
  if (const std::string& from = config.trainer.from_checkpoint; !from.empty()) check_startable(from, config, true);
  const Plan plan = check_run(config, kind, table);
  if (!comm.first()) return;
  print_notes(plan.notes);
  if (config.data.task != "ssa") print_notes({cat("prompts are in the chat format ", described(chat_format(config)))});
  print(to_toml(config));
}

// What follows the options in the page of --help.
std::string help_footer(const std::string& command) {
  std::string s = command == "sft" ? R"(Examples:
  pare sft quickstart-sft
  pare sft quickstart-sft data.noise=0 actor.optim.lr=2e-3 --out runs/clean
)"
                                   : R"(Examples, of which the first makes the model that the others start from:
  pare sft quickstart-sft
  pare train quickstart
  pare train quickstart dapo rollout.n=16 --out runs/dapo
  pare train runs/quickstart/config.toml --resume trainer.total_training_steps=400
  pare train runs/quickstart/config.toml actor.optim.lr=1e-4 --from runs/quickstart/checkpoints/step-200
  pare train quickstart --dry-run
)";
  s += "\n`pare help data` describes the rows of data files.\n";
  s += "\nConfiguration keys; `pare " + command + " --keys GROUP` explains those of a group:\n";
  for (const KeySection& section : config_sections()) s += cat("  ", pad_right(section.name, 30), section.what, "\n");
  return s;
}

void add(const Command& program, const char* name, const char* what, TrainingKind kind) {
  auto o = std::make_shared<Options>();
  const Command c = program.command(name, what);
  c.option("config", o->config, "presets or TOML files, then overrides group.key=value");
  c.option("--out", o->out, "run directory (trainer.default_local_dir); default runs/NAME-TIME");
  o->shorthands.add(c);
  add_ranks(c, o->ranks);
  const Option force =
      c.flag("--force", o->force, "replaces the run in the run directory, but no file that is not part of a run");
  const Option resume = c.flag("--resume", o->resume,
                               "continues the run in the run directory from its last complete checkpoint, or from its "
                               "start if there is none");
  resume.excludes(force);
  c.option("--accept-changed", o->accepted,
           "with --resume: continues although this file, which the run reads, has changed; may be repeated")
      .repeatable()
      .type_name("FILE")
      .needs(resume);
  c.option("--from", o->from,
           "starts a new run with the weights and moments of RUN/checkpoints/step-N (trainer.from_checkpoint)")
      .type_name("CHECKPOINT")
      .excludes(resume);
  c.flag("--dry-run", o->dry_run, "checks everything, prints the resolved configuration and stops");
  c.flag("--quiet", o->quiet, "prints warnings, errors and the last line only");
  c.option("--keys", o->keys, "prints the configuration keys, all or those of a group, and stops")
      .type_name("[GROUP]")
      .value_optional();
  c.footer(help_footer(name));
  c.action([o, c, kind] {
    if (c.given("--keys")) return print(config_reference(o->keys));
    if (o->config.empty() && o->resume && o->out.empty())
      fail("--resume: which run? give its RUN/config.toml, or --out RUN");
    if (o->config.empty() && !o->resume)
      fail("a preset (data/presets) or a TOML file is missing; --keys lists the keys");
    start_ranks(o->ranks);
    run(*o, c, kind);
  });
}

}  // namespace

void add_train(const Command& program) { add(program, "train", "GRPO and its variants", TrainingKind::grpo); }
void add_sft(const Command& program) { add(program, "sft", "next-token training on completions", TrainingKind::sft); }

}  // namespace pare
