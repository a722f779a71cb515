#include "app/show.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <thread>

#include "base/thread_pool.h"
#include "cpu/cpu.h"

namespace pare {

namespace {

std::string bytes(double n) { return human(n) + "B"; }
std::string plural(int64_t n, const char* what) { return cat(n, " ", what, n == 1 ? "" : "s"); }
std::string number(const char* pattern, double x) { return std::isnan(x) ? "-" : format(pattern, x); }

}  // namespace

double val_score(const Config& c, const Metrics& m) {
  if (validates_by_loss(c)) return -m.get("val/loss");
  return m.get(cat("val-core/", c.data.task, "/reward/mean@", c.rollout.val_kwargs.n));
}

void show_machine(Console& console, const Table& table) {
  std::string name = "unknown CPU", line, package;
  std::set<std::string> cores;  // of all packages
  std::ifstream info("/proc/cpuinfo");
  while (std::getline(info, line)) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string value = line.substr(colon + 2);
    if (line.starts_with("model name")) name = value;
    if (line.starts_with("physical id")) package = value;
    if (line.starts_with("core id")) cores.insert(package + "/" + value);
  }
  const auto hardware = static_cast<int64_t>(std::thread::hardware_concurrency());
  console.paragraph("machine",
                    cat(name, ": ", plural(cores.empty() ? hardware : static_cast<int64_t>(cores.size()), "core"), ", ",
                        plural(hardware, "hardware thread"), " of which ", threads(), threads() == 1 ? " is" : " are",
                        " used; ", cpu_isa(), "; ", bytes(static_cast<double>(machine_memory())), " of memory"));
  const int64_t n = world().link ? world().link->memory() : 0;
  const std::string taken = n > 0 ? cat(", which has taken ", bytes(static_cast<double>(n))) : "";
  if (table.describe)
    console.paragraph("device",
                      cat(table.describe(), "; ", bytes(static_cast<double>(table.memory->total())), " of memory",
                          world().link ? cat("; between ranks by ", world().link->name(), taken) : std::string()));
}

std::string model_text(const ModelConfig& c, const std::optional<LoraSpec>& lora) {
  std::string with;
  if (lora) {
    const Parameter last = adapter_parameters(c, *lora).back();
    with = cat("; with adapters of rank ", lora->rank, ": ", human(static_cast<double>(last.offset + last.size)),
               " parameters");
  }
  const Parameter last = parameters(c).back();
  return cat(c.model_type, ", ", human(static_cast<double>(last.offset + last.size)),
             " parameters: ", plural(c.layers, "layer"), ", width ", c.hidden, ", ", c.heads, "/", c.kv_heads,
             " heads of ", c.head_dim, ", vocabulary ", c.vocab, with);
}

void show_model(Console& console, const Session& s) {
  console.paragraph("model", model_text(s.model_config, s.adapters ? std::optional(s.adapters->spec) : std::nullopt));
}

void show_plan(Console& console, const Session& s, const Plan& plan) {
  const RolloutLimits limits = s.rollout_limits();
  const KvResidency residency(limits.kv, s.model_config.layers);
  const int64_t prompt = s.config.data.max_prompt_length, fed = s.config.data.max_response_length - 1;
  const int64_t pages = std::max(residency.prompt_pages(prompt), residency.sample_pages(prompt, fed));
  const int64_t fit =
      limits.kv_pages > 0 ? std::min<int64_t>(limits.kv_pages / pages, limits.max_sequences) : limits.max_sequences;
  // The host gives what is touched, a device what may be needed.
  const bool host = &s.device.memory() == &host_memory;
  std::string arenas;
  for (const Plan::Memory& m : plan.memory) {
    const size_t taken = host ? m.peak : m.most;
    if (taken == 0) continue;
    arenas += cat(arenas.empty() ? "" : ", ", m.arena, " ", bytes(static_cast<double>(taken)));
    if (m.arena == "kv") arenas += cat(" (", plural(fit, "sequence"), " of ", limits.max_context, " tokens)");
  }
  const auto total = static_cast<double>(host ? plan.peak() : plan.most.total()),
             machine = static_cast<double>(s.device.memory().total());
  console.paragraph(
      "memory",
      cat(host ? "a step of the longest responses takes " : "the run takes ", bytes(total), " of ", bytes(machine),
          ": ", arenas, plan.most.shared ? "; kv and scratch in the memory of gradients and activations" : ""));
  if (total > machine) console.warning("that is more memory than the machine has");
}

void show_memory(Console& console, const Session& s) {
  std::string arenas;
  for (const Arena* a : s.arenas())
    if (a->peak() > 0)
      arenas += cat(arenas.empty() ? "at most " : ", ", a->name(), " ", bytes(static_cast<double>(a->peak())));
  console.paragraph("memory", arenas);
}

void warn_of_restarts(Console& console, const Session& s) {
  if (!s.reward_command) return;
  for (const std::string& warning : s.device.comm.gather(s.reward_command->take_warning()))
    if (!warning.empty()) console.warning(warning);
}

std::string rollout_note(const ProgressLine& work, int64_t finished, int64_t responses, int64_t tokens) {
  const double seconds = work.seconds(), left = static_cast<double>(responses - finished);
  return cat(finished, " of ", responses, " responses, ", human(static_cast<double>(tokens) / std::max(seconds, 1e-9)),
             " tok/s, ETA ", finished > 0 ? clock(seconds * left / static_cast<double>(finished)) : "-");
}

std::string sampling_text(const ValKeys& v) {
  if (v.temperature == 0) return "greedy";
  return format("temperature %g", v.temperature) + (v.top_k > 0 ? cat(", top-k ", v.top_k) : "") +
         (v.top_p < 1 ? format(", top-p %g", v.top_p) : "") + (v.min_p > 0 ? format(", min-p %g", v.min_p) : "");
}

// ---- what the run will do

namespace {

// The value of a key as a word.
std::string word(const Config& c, const char* key) {
  const std::string text = config_key(key).show(c);
  return text.starts_with('"') ? text.substr(1, text.size() - 2) : text;
}

std::string steps_text(const Config& c) {
  const std::string steps = plural(c.trainer.total_training_steps, "step");
  return c.trainer.total_epochs > 0 ? cat(steps, " (", plural(c.trainer.total_epochs, "epoch"), ")") : steps;
}

void show_rest(Console& console, const Session& s, const std::string& path) {
  const Config& c = s.config;
  std::string line;
  if (s.val && validates(c)) {
    line += validates_by_loss(c)
                ? cat("held-out loss of ", plural(s.val->size(), "completion"))
                : cat("validation on ", plural(s.val->size(), "problem"),
                      c.rollout.val_kwargs.n > 1 ? cat(" x ", c.rollout.val_kwargs.n, " responses") : "", ", ",
                      sampling_text(c.rollout.val_kwargs), ",");
    if (c.trainer.val_before_train) line += " before the first step";
    if (c.trainer.val_before_train && c.trainer.test_freq > 0) line += " and";
    if (c.trainer.test_freq > 0) line += cat(" after every ", c.trainer.test_freq, " steps");
    line += "; ";
  }
  console.paragraph("", cat(line, "writes to ", path));
  if (c.data.task != "ssa") console.paragraph("prompts", "in the chat format " + described(s.chat));
}

}  // namespace

void show_train(Console& console, const Session& s, const std::string& path) {
  const Config& c = s.config;
  console.paragraph("run", cat(steps_text(c), " of ", plural(c.data.train_batch_size, "prompt"), " x ",
                               plural(c.rollout.n, "response"), " of at most ", c.data.max_response_length,
                               " tokens at temperature ", c.rollout.temperature, "; ", s.train->size(),
                               " prompts, rewards by ", c.data.task == "jsonl" ? c.data.reward : c.data.task));
  const int64_t mini = c.actor.ppo_mini_batch_size > 0 ? c.actor.ppo_mini_batch_size : c.data.train_batch_size;
  const int64_t updates = c.actor.ppo_epochs * (c.data.train_batch_size / mini);
  std::string learn = cat(word(c, "algorithm.adv_estimator"), " advantages, ", word(c, "actor.policy_loss.loss_mode"),
                          " loss, ", word(c, "actor.loss_agg_mode"));
  if (c.actor.token_subset != TokenSubset::none) learn += cat(", tokens by ", word(c, "actor.token_subset"));
  if (c.actor.use_kl_loss) learn += cat(", KL ", c.actor.kl_loss_coef);
  const RolloutCorrectionKeys& r = c.algorithm.rollout_correction;
  if (c.rollout.kv.method != KvMethod::dense) learn += cat("; rollouts by ", word(c, "rollout.kv.method"));
  if (r.veto > 0) learn += cat(", veto ", r.veto);
  if (r.rollout_is != RolloutIs::none) learn += cat(", xi ", word(c, "algorithm.rollout_correction.rollout_is"));
  if (c.algorithm.rpo.enable)
    learn += cat("; responses continue earlier ones (rpo, cut ", word(c, "algorithm.rpo.cut"), ")");
  if (c.algorithm.obrs.enable) learn += cat(", obrs lambda ", c.algorithm.obrs.lambda);
  console.paragraph("", cat(learn, "; ", plural(updates, "update"), " a step, learning rate ", c.actor.optim.lr));
  show_rest(console, s, path);
}

void show_sft(Console& console, const Session& s, const std::string& path) {
  const Config& c = s.config;
  console.paragraph("run", cat(steps_text(c), " of ", plural(c.data.train_batch_size, "completion"), " out of ",
                               s.train->size(), ", learning rate ", c.actor.optim.lr));
  show_rest(console, s, path);
}

// ---- the table of steps

namespace {

StepColumn column(const char* title, size_t width, const char* metric, const char* pattern) {
  return {{title, width}, [=](const Metrics& m) { return number(pattern, m.get(metric)); }};
}
StepColumn rate(const char* title, const char* tokens, const char* seconds) {
  return {{title, 5}, [=](const Metrics& m) {
            const double per_second = m.get(tokens) / m.get(seconds);
            return std::isfinite(per_second) ? human(per_second) : "-";
          }};
}

}  // namespace

std::vector<StepColumn> train_columns(const Config& config) {
  std::vector<StepColumn> columns = {
      column("reward", 6, "critic/score/mean", "%.3f"),
      column("len", 6, "response_length/mean", "%.1f"),
      column("entropy", 7, "actor/entropy", "%.3f"),
      column("clip", 5, "actor/pg_clipfrac", "%.3f"),
      column("grad", 5, "actor/grad_norm", "%.3f"),
      {{"mismatch", 8},
       [](const Metrics& m) {
         const double checked = m.get("exact/checked_tokens"), rejected = m.get("rollout_corr/rejection_rate");
         return checked > 0               ? format("%.0f/%.0f", m.get("exact/mismatch_tokens"), checked)
                : std::isfinite(rejected) ? format("rej %.2f", rejected)
                                          : "-";
       }},
      rate("gen/s", "tokens/generated", "timing_s/gen"),
      rate("upd/s", "tokens/trained", "timing_s/update_actor"),
      column("s", 5, "timing_s/step", "%.2f")};
  if (config.algorithm.rpo.enable) {  // in place of the last rate: the table stays within 80 columns
    columns.erase(columns.end() - 2);
    columns.insert(columns.begin() + 2, column("saved", 5, "rpo/saved", "%.2f"));
  }
  return columns;
}

std::vector<StepColumn> sft_columns() {
  return {column("loss", 6, "train/loss", "%.4f"), column("entropy", 7, "actor/entropy", "%.3f"),
          column("grad", 6, "actor/grad_norm", "%.3f"), column("lr", 8, "actor/lr", "%.2e"),
          rate("upd/s", "tokens/trained", "timing_s/step")};
}

static TextTable step_table(const std::vector<StepColumn>& columns) {
  std::vector<TextTable::Column> all = {{"step", 5}, {"eval", 5}};
  for (const StepColumn& c : columns) all.push_back(c.column);
  all.push_back({"eta", 6});
  return TextTable(all);
}

StepLines::StepLines(Console& console, const Config& config, std::vector<StepColumn> columns, int64_t done)
    : console_(console),
      config_(config),
      columns_(std::move(columns)),
      table_(step_table(columns_)),
      hints_(config),
      before_(done),
      step_(done),
      validation_(std::numeric_limits<double>::quiet_NaN()) {}

void StepLines::step(const Metrics& m) {
  step_ = static_cast<int64_t>(m.get("training/global_step"));
  if (step_ == before_) start_ = Clock::now();  // the validation before the first step
  const double val = val_score(config_, m);
  if (!std::isnan(val)) validation_ = validates_by_loss(config_) ? -val : val;
  std::vector<std::string> cells = {cat(step_), number("%.3f", validation_)};
  for (const StepColumn& c : columns_) cells.push_back(c.cell(m));
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  const auto done = static_cast<double>(step_ - before_);
  cells.push_back(done > 0 ? clock(elapsed / done * static_cast<double>(config_.trainer.total_training_steps - step_))
                           : "-");
  if (rows_++ % 20 == 0) console_.line(table_.header());
  console_.line(table_.row(cells));
  for (const std::string& hint : hints_.after(m)) console_.paragraph("note", hint);
}

void StepLines::progress(const char* stage, int64_t done, int64_t all) {
  console_.progress(cat("step ", step_ + 1, "/", config_.trainer.total_training_steps, "  ", stage), done, all);
}

void StepLines::samples(const std::vector<SampleText>& texts) {
  if (texts.empty()) return;
  const auto by = [&](auto less) { return std::max_element(texts.begin(), texts.end(), less); };
  const auto best = by([](auto& a, auto& b) { return a.sample.reward < b.sample.reward; });
  const auto worst = by([](auto& a, auto& b) { return a.sample.reward > b.sample.reward; });
  const auto longest = by([](auto& a, auto& b) { return a.sample.response_length() < b.sample.response_length(); });
  const TextTable table(
      {{"", 7}, {"reward", 6}, {"advantage", 9}, {"tokens", 6}, {"", 4}, {"extracted", 20}, {"expected", 20}});
  console_.line("");
  console_.line(table.header());
  const size_t room = std::min<size_t>(console_.width(), 160) - 11;
  const auto show = [&](const char* name, const SampleText& t) {
    const Trajectory& s = t.sample;
    console_.line(table.row({name, format("%.2f", s.reward), format("%+.2f", s.advantage), cat(s.response_length()),
                             s.finished ? "" : "cut", shortened(printable(t.extracted), 20),
                             shortened(printable(t.answer), 20)}));
    console_.line("           " + shortened(printable(t.problem), room));
    console_.line("           " + shortened(printable(t.response), room));
  };
  show("best", *best);
  if (worst != best) show("worst", *worst);
  if (longest != best && longest != worst) show("longest", *longest);
  console_.line("");
  rows_ = 0;
}

}  // namespace pare
