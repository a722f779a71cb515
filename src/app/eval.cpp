// pare eval: scores of a model on a set of problems: mean@n, pass@k, maj@n, lengths.
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "app/device.h"
#include "app/interrupt.h"
#include "app/shorthands.h"
#include "app/show.h"
#include "base/progress.h"
#include "comm/processes.h"
#include "run/evaluate.h"

namespace pare {

namespace {

struct Options {
  Shorthands keys{{{"--model"},
                   {"--adapter", "LoRA adapter, a folder of PEFT"},
                   {"--tokenizer"},
                   {"--verifier"},
                   {"--n"},
                   {"--temperature"},
                   {"--top-p"},
                   {"--top-k"},
                   {"--min-p"},
                   {"--max-prompt-length"},
                   {"--max-response-length"},
                   {"--seed"},
                   {"--threads"},
                   {"--device"},
                   {"--exact"}}};
  std::vector<std::string> config;
  std::string data, out, keep;
  std::vector<int64_t> k;
  int ranks = 1;
  bool greedy = false, force = false, quiet = false;
};

Config configuration(const Options& o, const Command& command, std::vector<std::string>& notes) {
  std::vector<std::string> arguments = {"rollout.val_kwargs.temperature=1", "rollout.val_kwargs.kv=rollout"};
  arguments.insert(arguments.end(), o.config.begin(), o.config.end());
  if (!o.data.empty()) {
    arguments.push_back("data.task=jsonl");
    arguments.push_back(cat("data.val_files=[", toml_quote(o.data), "]"));
  }
  arguments.push_back("data.train_files=[]");
  arguments.push_back("rollout.check_exact=false");  // there is no learner
  for (const std::string& override : o.keys.overrides(command)) arguments.push_back(override);
  if (o.greedy) arguments.push_back("rollout.val_kwargs.temperature=0");
  const Config c = load_config(arguments, &notes);
  if (c.data.task == "jsonl" && c.data.val_files.empty())
    fail("no problems to evaluate: pass --data FILE.jsonl with --verifier NAME, or a preset with a validation set");
  if (c.data.task == "jsonl" && c.data.reward.empty())
    fail("--data needs --verifier, the ", config_key("data.reward").meaning);
  if (c.data.task != "jsonl" && command.given("--verifier"))
    fail("--verifier needs --data; the task ", c.data.task, " has its own");
  if (c.rollout.val_kwargs.kv == ValKv::both)
    fail("rollout.val_kwargs.kv = \"both\" is for the validation of a run; pare eval takes dense or rollout");
  if (c.rollout.val_kwargs.temperature == 0 && c.rollout.val_kwargs.n > 1)
    fail("greedy decoding gives the same response ", c.rollout.val_kwargs.n,
         " times: drop --n, or sample with --temperature 1");
  return c;
}

// The k of best@k, checked against n before anything is computed.
std::vector<int64_t> checked_ks(const Options& o, int64_t n) {
  if (o.k.empty()) return default_ks(n);
  for (const int64_t k : o.k)
    if (k < 1 || k > n)
      fail("--k ", k, k < 1 ? " is not a number of responses" : cat(" is more than the ", n, " responses of a problem"),
           "; expected 1 to --n");
  return o.k;
}

// A file of lines that is there as a whole or not at all.
class LineFile {
 public:
  LineFile(const std::string& path, const char* flag, bool force) : path_(path), part_(path + ".part") {
    if (path.empty()) return;
    check_output_file(path, flag, force);
    file_.open(part_, std::ios::binary);
    if (!file_) throw Error(Exit::failed, cat(part_, ": cannot be written"));
  }
  ~LineFile() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove(part_, ignored);
  }
  void write(const std::vector<nlohmann::ordered_json>& lines) {
    if (path_.empty()) return;
    // A response cut inside a character is not UTF-8.
    for (const auto& line : lines) file_ << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
    file_.close();
    if (!file_) throw Error(Exit::failed, cat(part_, ": cannot be written to the end"));
    std::filesystem::rename(part_, path_);
  }

 private:
  const std::string path_, part_;
  std::ofstream file_;
};

void put_prompt(nlohmann::ordered_json& line, const Problem& problem) {
  if (!problem.messages.empty())
    line["prompt"] = to_json(problem.messages);
  else if (problem.prompt_ids.empty())
    line["prompt"] = problem.prompt;
  else
    line["prompt_ids"] = problem.prompt_ids;
}

std::vector<nlohmann::ordered_json> item_lines(const Evaluation& evaluation) {
  std::vector<nlohmann::ordered_json> lines;
  for (const EvaluatedProblem& p : evaluation.problems()) {
    nlohmann::ordered_json& item = lines.emplace_back();
    if (!p.problem.where.empty()) item["where"] = p.problem.where;
    put_prompt(item, p.problem);
    item["prompt_tokens"] = p.prompt_tokens;
    if (p.problem.answer) item["answer"] = *p.problem.answer;
    Summary score;
    for (const EvaluatedResponse& r : p.responses) score.add(r.reward.score);
    item["mean"] = score.mean();
    item["majority"] = {{"response", p.majority},
                        {"extracted", p.responses[p.majority].reward.extracted},
                        {"score", p.responses[p.majority].reward.score}};
    item["responses"] = nlohmann::ordered_json::array();
    for (const EvaluatedResponse& r : p.responses) {
      nlohmann::ordered_json components = nlohmann::ordered_json::object();
      for (const auto& [name, value] : r.reward.components) components[name] = value;
      item["responses"].push_back({{"text", r.text},
                                   {"extracted", r.reward.extracted},
                                   {"parsed", r.reward.parsed},
                                   {"score", r.reward.score},
                                   {"components", components},
                                   {"finished", r.finished()},
                                   {"finish", finish_name(r.finish)},
                                   {"tokens", r.tokens}});
    }
  }
  return lines;
}

// Rows for `pare sft`.  A response that was cut is none to learn: a completion is followed by EOS.
std::vector<nlohmann::ordered_json> right_lines(const Evaluation& evaluation) {
  std::vector<nlohmann::ordered_json> lines;
  for (const EvaluatedProblem& p : evaluation.problems())
    for (const EvaluatedResponse& r : p.responses) {
      if (!r.finished() || r.reward.score <= 0) continue;
      nlohmann::ordered_json& line = lines.emplace_back();
      put_prompt(line, p.problem);
      if (p.problem.answer) line["answer"] = *p.problem.answer;
      line["completion"] = r.text;
    }
  return lines;
}

std::string estimate_line(const std::string& name, const Estimate& e) {
  return format("%-8s %.4f", name.c_str(), e.mean) + (std::isnan(e.error) ? "" : format(" ± %.4f", e.half_width()));
}

void report(Console& console, const Config& c, const Evaluation& e, const std::vector<int64_t>& ks) {
  const int64_t n = c.rollout.val_kwargs.n;
  console.result(estimate_line(cat("mean@", n), e.mean()));
  bool binary = true;  // then the best of k is 1 exactly where one of k passes
  for (const EvaluatedProblem& p : e.problems())
    for (const EvaluatedResponse& r : p.responses) binary = binary && (r.reward.score == 0 || r.reward.score == 1);
  for (const int64_t k : ks) console.result(estimate_line(cat(binary ? "pass@" : "best@", k), e.best(k)));
  if (n > 1) console.result(estimate_line(cat("maj@", n), e.majority()));
  const std::vector<double> lengths = e.lengths();
  const auto count = static_cast<double>(lengths.size());
  const auto quantile = [&](double q) { return lengths[static_cast<size_t>(q * (count - 1) + 0.5)]; };
  double sum = 0;
  for (const double l : lengths) sum += l;
  const auto part = [&](int64_t x) {
    return format("%lld of %zu (%.1f %%)", static_cast<long long>(x), lengths.size(),
                  100 * static_cast<double>(x) / count);
  };
  console.result(format("%-8s mean %.1f tokens, min %.0f, median %.0f, 95 %% %.0f, max %.0f", "length", sum / count,
                        lengths.front(), quantile(0.5), quantile(0.95), lengths.back()));
  console.result(format("%-8s %s at the limit of %lld tokens", "cut off", part(e.truncated()).c_str(),
                        static_cast<long long>(c.data.max_response_length)));
  console.result(format("%-8s %s without an answer", "unparsed", part(e.unparsed()).c_str()));
  std::string how = cat("± is the 95 % interval, 1.96 standard errors of the mean over ", e.problems().size(),
                        " problems, each with all its responses as one cluster.");
  if (n > 1)
    how += " pass@k is unbiased: 1 - C(n-c,k)/C(n,k) with c of n right. maj: of equally frequent answers the first.";
  console.paragraph("", how);
}

void run(const Options& o, const Command& command) {
  std::vector<std::string> notes;
  const Config config = configuration(o, command, notes);
  const ValKeys& v = config.rollout.val_kwargs;
  const std::vector<int64_t> ks = checked_ks(o, v.n);
  const bool first = world().first();
  ProgressLine::quiet = o.quiet || !first;
  if (first) print_notes(notes);
  const Table& table = open_table(config.trainer);
  Session session(config, table, false, evaluation_limits(config, table));
  check_equal_ranks(session, table);
  if (first) print_notes(session.notes);
  LineFile items(first ? o.out : "", "--out", o.force), right(first ? o.keep : "", "--keep", o.force);
  Console console(o.quiet, !first);
  show_machine(console, table);
  show_model(console, session);
  const bool files = config.data.task == "jsonl";
  console.paragraph("data", cat(files ? config.data.val_files[0] : config.data.task, ": ", session.val->size(),
                                " problems, verifier ", files ? config.data.reward : config.data.task));
  console.paragraph(
      "sampling", cat(v.n, v.n > 1 ? " responses" : " response", " a problem of at most ",
                      config.data.max_response_length, " tokens, ", sampling_text(v), "; seed ", config.trainer.seed));
  Rollout rollout(*session.model, session.rollout_limits(), session.kv, session.rollout_scratch());
  if (world().ranks() == 1) catch_interrupts();
  const auto start = std::chrono::steady_clock::now();
  const bool dense = config.rollout.val_kwargs.kv == ValKv::dense;
  const Evaluation evaluation = [&] {
    ProgressLine work("evaluation", session.val->size() * v.n, false);
    return Evaluation(session, *session.val, rollout, 0, dense, [&](const EvaluationProgress& p) {
      work.done(p.finished, rollout_note(work, p.finished, p.responses, p.tokens) +
                                (std::isnan(p.score) ? "" : format(", mean %.3f", p.score)));
      return world().ranks() > 1 || !interrupted();
    });
  }();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  warn_of_restarts(console, session);
  const size_t problems = static_cast<size_t>(session.val->size()), finished = evaluation.problems().size();
  const std::string stopped = cat("interrupted: ", finished, " of ", problems, " problems have all their responses",
                                  finished > 0 ? "; the results are of these only" : ", so that there are no results");
  if (finished == 0) throw Error(Exit::interrupted, stopped);
  const std::vector<nlohmann::ordered_json> kept = right_lines(evaluation);
  items.write(item_lines(evaluation));
  right.write(kept);
  console.line("");
  report(console, config, evaluation, ks);
  show_memory(console, session);
  const auto tokens = static_cast<double>(rollout.stats().decoded_tokens);
  console.line(format("done     %s, %s tokens, %s tok/s%s", duration(seconds).c_str(), human(tokens).c_str(),
                      human(tokens / seconds).c_str(),
                      cat(o.out.empty() ? "" : cat("; problems in ", o.out),
                          o.keep.empty() ? "" : cat("; ", kept.size(), " right responses in ", o.keep))
                          .c_str()));
  if (finished < problems) throw Error(Exit::interrupted, stopped);
}

}  // namespace

void add_eval(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("eval", "mean@n, pass@k, maj@n and lengths of a model on a set of problems");
  c.option("config", o->config, "presets or TOML files, then overrides group.key=value, as of `pare train`");
  c.option("--data", o->data, "problems: JSON lines with prompt and answer (`pare help data`)");
  o->keys.add(c);
  c.flag("--greedy", o->greedy, "greedy decoding instead of sampling at temperature 1");
  c.option("--k", o->k, "k of pass@k, as in 1,4,8; default: powers of 2 up to n").list();
  c.option("--out", o->out, "output file: JSON lines of problems and their responses");
  c.option("--keep", o->keep,
           "output file: the finished responses with a score above 0 as training data of `pare sft`");
  add_ranks(c, o->ranks);
  c.flag("--force", o->force, "replaces an output file that exists");
  c.flag("--quiet", o->quiet, "prints the results only");
  c.footer(
      "Without a preset, responses are sampled at temperature 1.  Ctrl-C keeps the problems whose responses are all "
      "finished.\n"
      "The validation set of a run, with its settings; first `pare sft quickstart-sft` and `pare train quickstart`:\n"
      "  pare eval quickstart --model runs/quickstart/model --n 8 --k 1,4,8");
  c.action([o, c] {
    start_ranks(o->ranks);
    run(*o, c);
  });
}

}  // namespace pare
