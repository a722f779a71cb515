#include "run/audit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/json.h"
#include "base/text.h"
#include "ops/list.h"
#include "run/certificate.h"
#include "run/checkpoint.h"
#include "run/run_directory.h"

namespace pare {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

template <class... Parts>
[[noreturn]] void differs(const Parts&... parts) {
  throw Error(Exit::failed, cat(parts...));
}

std::string in(const std::string& run, const std::string& name) { return (fs::path(run) / name).string(); }

std::vector<Recorded> record_of(const std::string& run) {
  const std::string path = in(run, "certificates.jsonl");
  if (!fs::exists(path) && !fs::exists(in(run, "config.toml")))
    fail(run, " holds no run: expected the directory of `pare train` or `pare sft`");
  return read_record(path);
}

// Returns the recorded value, or the default of a key that an older program did not have.
std::string recorded_value(const Recorded& start, const std::string& key) {
  const json& keys = start.values.at("config");
  return keys.contains(key) ? keys.at(key).get<std::string>() : config_key(key).show(Config());
}

// Calls visit(step, line) for the lines of a log of the run.
template <class F>
void for_lines(const std::string& path, const char* step_key, F visit) {
  std::ifstream in(path, std::ios::binary);
  std::string text;
  for (int number = 1; std::getline(in, text) && !in.eof(); number++) {
    const json line = try_parse_json(text);
    const auto step = line.is_object() ? line.find(step_key) : line.end();
    if (!line.is_object() || step == line.end() || !step->is_number_integer())
      differs(path, ":", number, " is no line that a run wrote");
    try {
      visit(step->get<int64_t>(), line);
    } catch (const json::exception& e) {
      differs(path, ":", number, " is no line that a run wrote: ", json_error(e));
    }
  }
}

std::vector<float> logprobs_of(const json& values) {
  std::vector<float> logprobs;
  for (const auto& x : values) logprobs.push_back(x.is_number() ? x.get<float>() : NAN);
  return logprobs;
}

std::string token_text(const Sampled& s, size_t t) {
  return t < s.ids.size() ? format("%d (log-prob %.9g)", s.ids[t], static_cast<double>(s.logprobs[t])) : "none";
}

// Reads the samples of the steps after `first` up to `last`.
std::map<int64_t, SampledStep> written(const std::string& run, int64_t first, int64_t last) {
  std::map<int64_t, SampledStep> all;
  for_lines(in(run, "rollouts.jsonl"), "step", [&](int64_t step, const json& line) {
    if (step > first && step <= last)
      all[step][line.at("uid")] = {line.at("ids").get<std::vector<int32_t>>(), logprobs_of(line.at("logprobs")),
                                   line.at("advantage").is_number() ? line.at("advantage").get<double>() : NAN};
  });
  return all;
}

SampledStep computed(const Training& training) {
  SampledStep all;
  for (const SampleText& text : training.texts()) {
    const Trajectory& s = text.sample;
    Sampled& r = all[hex16(s.uid)];
    r.ids = s.prefix;
    r.logprobs.resize(s.prefix.size(), NAN);
    r.advantage = s.advantage;
    r.ids.insert(r.ids.end(), s.tokens.begin(), s.tokens.end());
    r.logprobs.insert(r.logprobs.end(), s.logprob.begin(), s.logprob.end());
  }
  return all;
}

size_t first_difference(const Sampled& a, const Sampled& b) {
  size_t t = 0;
  while (t < std::min(a.ids.size(), b.ids.size()) && a.ids[t] == b.ids[t] &&
         std::bit_cast<uint32_t>(a.logprobs[t]) == std::bit_cast<uint32_t>(b.logprobs[t]))
    t++;
  return t;
}

// "response 5 (group 1, member 1, 0123456789abcdef)".
std::string response_name(const Config& config, size_t i, uint64_t uid, TrainingKind kind) {
  if (kind == TrainingKind::sft) return cat("row ", i, " of the batch");
  const auto n = static_cast<size_t>(config.rollout.n);
  return cat("response ", i, " (group ", i / n, ", member ", i % n, ", ", hex16(uid), ")");
}

std::string with_commas(int64_t n) {
  std::string s = cat(n);
  for (auto at = std::ssize(s) - 3; at > 0; at -= 3) s.insert(static_cast<size_t>(at), ",");
  return s;
}

void compare_scores(const std::string& where, const Config& config, const json& recorded, const StepRecord& now) {
  for (size_t i = 0; i < now.scores.size(); i++)
    if (json(now.scores[i]).dump() != (i < recorded.size() ? recorded[i].dump() : ""))
      differs(where, "scores: ", response_name(config, i, now.uids[i], TrainingKind::grpo), ": recorded ",
              i < recorded.size() ? recorded[i].dump() : "none", ", recomputed ", now.scores[i]);
}

}  // namespace

Audit::Audit(const std::string& run, const std::vector<std::string>& overrides)
    : run_(run), lines_(record_of(run)), start_(lines_.front()) {
  const std::string file = in(run, "config.toml");
  if (!fs::exists(file)) differs(file, " is missing; the run cannot be recomputed without it");
  own_ = load_config({file});
  if (const int arithmetic = start_.values.at("arithmetic"); arithmetic != kArithmetic)
    fail(run, " was computed with arithmetic ", arithmetic, ", this program has arithmetic ", kArithmetic,
         " (other sums or functions); audit it with a program of that arithmetic");
  std::vector<std::string> all = overrides;
  all.insert(all.begin(), file);
  config_ = load_config(all);
  if (!own_.trainer.exact)
    fail(run,
         " ran with trainer.exact = false, whose sums have the order of a library; only exact runs can be audited");
  const std::string type = start_.values.at("type"), now = dtype_name(act_type(config_));
  if (type != now)
    fail(run, " was computed in ", type, ", and trainer.device = ", config_key("trainer.device").show(config_),
         " computes in ", now, "; set model.dtype=", type, " or another device (emu emulates cuda: `make emu`)");
  const auto was = keys_of_bits(own_), is = keys_of_bits(config_);
  const auto [one, other] = std::mismatch(is.begin(), is.end(), was.begin(), was.end());
  if (one != is.end())
    fail(one->first, " = ", one->second,
         " changes the bits of the run; an audit takes keys that change none, such as trainer.threads, trainer.device "
         "and those that say where files lie");
  if (start_.values.contains("logits_chunk") && config_.actor.logits_chunk == 0)
    config_.actor.logits_chunk = start_.values.at("logits_chunk");
}

TrainingKind Audit::kind() const {
  return start_.values.at("command") == "sft" ? TrainingKind::sft : TrainingKind::grpo;
}

const Recorded& Audit::line(int64_t step) const {
  const Recorded* found = nullptr;
  for (const Recorded& r : lines_)
    if (r.step == step && (!found || !r.start)) found = &r;
  expect(found != nullptr, "no line of step ", step);
  return *found;
}

void Audit::compare_files(int64_t last, bool complete) const {
  if (last < first() || last > this->last())
    fail(run_, " has no record of step ", last, ": certificates.jsonl ",
         first() > this->last() ? "has none yet" : cat("has steps ", first(), " to ", this->last()));
  std::string edited;
  for (const auto& [key, value] : keys_of_bits(own_))
    if (const std::string was = recorded_value(start_, key); was != value)
      edited += cat(edited.empty() ? "" : "; ", key, " is ", value, ", the run had ", was);
  if (!edited.empty()) differs(in(run_, "config.toml"), " was edited: ", edited);
  compare_inputs(last);
  compare_metrics(last, complete);
  compare_rollouts(last);
}

// Compares the inputs with those that step `last` was computed from.
void Audit::compare_inputs(int64_t last) const {
  std::map<std::string, std::string> digests;
  for (const Recorded& r : lines_)
    if (r.step <= last && r.values.contains("inputs"))
      for (const auto& [name, digest] : r.values.at("inputs").items()) digests[name] = digest;
  std::vector<Input> before;
  for (const auto& [name, digest] : digests) before.push_back({name, "", "", name, digest});
  for (const auto& [input, was] : input_changes(before, read_inputs(config_)))
    differs(input.path, " (", input.key, ": ", input.feeds, ") ",
            input.digest.empty() ? cat("is gone (moved? ", input.key, "=PATH)")
            : was.empty()        ? "is new"
                                 : "has changed",
            " since step ", last, " was computed");
}

void Audit::compare_metrics(int64_t last, bool complete) const {
  const std::string path = in(run_, "metrics.jsonl");
  std::map<int64_t, json> logged;
  for_lines(path, "training/global_step", [&](int64_t step, const json& line) { logged[step] = line; });
  for (const Recorded& r : lines_) {
    if (r.start || r.step > last) continue;
    const auto found = logged.find(r.step);
    if (found == logged.end() && complete) differs(path, " has no line of step ", r.step);
    if (found == logged.end()) continue;  // a log that was lost is said when the run is resumed
    for (const auto& [name, value] : r.values.at("metrics").items()) {
      const std::string now = found->second.contains(name) ? found->second.at(name).dump() : "missing";
      if (now != value.dump())
        differs(path, ", step ", r.step, ": ", name, " is ", now, ", certificates.jsonl has ", value.dump());
    }
    if (const std::string chain = found->second.value("chain", ""); chain != r.chain)
      differs(path, ", step ", r.step, ": chain is ", chain.empty() ? "missing" : chain, ", certificates.jsonl has ",
              r.chain);
  }
}

// Checks that the responses in rollouts.jsonl have the recorded hashes and scores.
void Audit::compare_rollouts(int64_t last) const {
  const std::string path = in(run_, "rollouts.jsonl");
  for_lines(path, "step", [&](int64_t step, const json& l) {
    if (step > last || step <= start_.step) return;
    const std::string uid = l.at("uid");
    const auto ids = l.at("ids").get<std::vector<int32_t>>();
    const std::vector<float> logprobs = logprobs_of(l.at("logprobs"));
    const size_t given = l.value("replayed", size_t{0});
    if (given > ids.size() || ids.size() != logprobs.size())
      differs(path, ", step ", step, ", response ", uid, " is cut");
    const std::string hash = hex16(response_hash(std::stoull(uid, nullptr, 16), std::span(ids).subspan(given),
                                                 std::span(logprobs).subspan(given)));
    const json& values = line(step).values;
    const auto& responses = values.at("responses");
    const auto found = std::find(responses.begin(), responses.end(), hash);
    if (found == responses.end())
      differs(path, ", step ", step, ", response ", uid,
              ": its tokens or log-probs are not those of certificates.jsonl");
    const auto& score = values.at("scores").at(static_cast<size_t>(found - responses.begin()));
    if (score.dump() != l.at("score").dump())
      differs(path, ", step ", step, ", response ", uid, ": score is ", l.at("score").dump(),
              ", certificates.jsonl has ", score.dump());
  });
}

// Returns the fault of a checkpoint; empty if it is whole and belongs to its step.
std::string Audit::checkpoint_problem(int64_t step) const {
  const std::string path = in(run_, cat("checkpoints/step-", step)), damage = checkpoint_damage(path);
  if (!damage.empty()) return cat(path, " is not whole: ", damage);
  const Recorded& recorded = line(step);
  if (const std::string chain = checkpoint_chain(path); chain != recorded.chain && !recorded.start)
    return cat(path, " does not belong to certificates.jsonl: its chain is ", chain, ", that of step ", step, " is ",
               recorded.chain);
  return "";
}

void Audit::compare_checkpoints() const {
  for (const int64_t step : checkpoint_steps(run_)) {
    if (step < start_.step) continue;
    if (const std::string problem = checkpoint_problem(step); !problem.empty()) differs(problem);
  }
}

// Checks the weights that model.path or model.config gave.
void Audit::check_base(const Session& session) const {
  if (const std::string hash = hex16(session.base_weights), was = start_.values.at("base"); hash != was)
    differs(config_.model.path.empty() ? "model.config" : config_.model.path,
            ": the weights are not those that the run started from: their hash is ", hash, ", recorded ", was);
}

// Checks that the session, loaded from `path`, has the weights that the run had at that line.
void Audit::check_weights(const std::string& path, const Recorded& at, const Session& session) const {
  if (const std::string hash = hex16(weights_hash(session)), was = at.values.at("weights"); hash != was)
    differs(path, ": the weights are not those that the run had after step ", at.step, ": their hash is ", hash,
            ", recorded ", was);
}

// Brings the session to the border of two steps from which `step` can be reached; returns the first of them.
int64_t Audit::begin(int64_t step, Session& session, Training& training,
                     const std::function<void(const std::string&)>& say) const {
  const std::vector<int64_t> steps = checkpoint_steps(run_);
  for (auto s = steps.rbegin(); s != steps.rend(); ++s) {
    if (*s >= step || *s < start_.step) continue;
    const std::string path = in(run_, cat("checkpoints/step-", *s)), problem = checkpoint_problem(*s);
    if (!problem.empty()) {
      say(problem);
      continue;
    }
    if (session.frozen() || needs_reference(config_)) check_base(session);
    restore_checkpoint(path, session, training);
    check_weights(path, line(*s), session);
    return *s;
  }
  if (start_.step > 0)
    fail(run_, ": no whole checkpoint before step ", step, " is left, and certificates.jsonl begins after step ",
         start_.step);
  if (const std::string& from = config_.trainer.from_checkpoint; !from.empty()) {
    check_startable(from, config_, true);
    start_from(from, session, training, read_inputs(config_));
  }
  check_base(session);
  check_weights(
      config_.trainer.from_checkpoint.empty() ? config_.model.lora.adapter_path : config_.trainer.from_checkpoint,
      start_, session);
  return 0;
}

void Audit::recompute(int64_t step, Session& session, Training& training,
                      const std::function<void(const std::string&)>& say) const {
  std::string damage;
  const int64_t before = begin(step, session, training, [&](const std::string& problem) {
    if (damage.empty()) damage = problem;
  });
  for (int64_t s = before + 2; s <= step; s++)
    if (line(s).values.contains("inputs"))
      fail("step ", step, " can be recomputed from step ", before, " alone, and files that the run reads were changed ",
           "(--accept-changed) after step ", s - 1, "; no checkpoint between them is left");
  say(cat("from     ", before == 0 ? "the start" : cat("checkpoints/step-", before)));
  auto old = written(run_, before, step);
  while (training.steps() < step) {
    Metrics metrics = training.step();
    const Recorded& recorded = line(training.steps());
    const auto validated = [](const auto& item) { return item.key().starts_with("val"); };
    const auto logged = recorded.values.at("metrics").items();
    if (training.steps() == step && session.val && validates(config_) &&
        std::any_of(logged.begin(), logged.end(), validated))
      metrics.add(training.evaluate());
    compare_step(recorded, old[training.steps()], training, metrics);
    const bool sft = kind() == TrainingKind::sft;
    say(cat("step ", training.steps(), ": ", training.record().responses.size(),
            sft ? " completions, " : " responses, ",
            with_commas(static_cast<int64_t>(metrics.get(sft ? "tokens/loss" : "tokens/generated"))),
            " tokens, weights: the same bits"));
  }
  if (!damage.empty()) differs("the steps have the same bits, but ", damage);
}

// `old`: the samples of the step in rollouts.jsonl.
void Audit::compare_step(const Recorded& recorded, const SampledStep& old, const Training& training,
                         const Metrics& metrics) const {
  const StepRecord& now = training.record();
  const json& was = recorded.values;
  const std::string where = cat("step ", recorded.step, ", ");
  const auto same = [&](const char* stage, const char* name, uint64_t hash) {
    if (const std::string old = was.at(name).get<std::string>(); old != hex16(hash))
      differs(where, stage, ": recorded ", old, ", recomputed ", hex16(hash), " (hashes)");
  };
  same("prompts", "prompts", now.prompts);
  SampledStep is = computed(training);
  const auto& responses = was.at("responses");
  for (size_t i = 0; i < std::max(responses.size(), now.responses.size()); i++) {
    if (i >= responses.size() || i >= now.responses.size())
      differs(where, "responses: recorded ", responses.size(), ", recomputed ", now.responses.size());
    if (responses[i] == hex16(now.responses[i])) continue;
    const std::string uid = hex16(now.uids[i]);
    const auto found = old.find(uid);
    const Sampled x = found == old.end() ? Sampled() : found->second, y = is[uid];
    const size_t t = first_difference(x, y);
    differs(where,
            kind() == TrainingKind::sft ? "log-probs: " : "responses: ", response_name(config_, i, now.uids[i], kind()),
            ": ",
            x.ids.empty() || y.ids.empty() || t == std::max(x.ids.size(), y.ids.size())
                ? cat("recorded only as a hash, ", responses[i].get<std::string>(), ", recomputed ",
                      hex16(now.responses[i]))
                : cat("token ", t, ": recorded ", token_text(x, t), ", recomputed ", token_text(y, t)));
  }
  if (was.contains("scores")) compare_scores(where, config_, was.at("scores"), now);
  for (const auto& [uid, x] : old) {
    const std::string then = json(x.advantage).dump(), again = json(is[uid].advantage).dump();
    if (then != again)
      differs(where, "advantages: response ", uid, ": rollouts.jsonl has ", then, ", recomputed ", again);
  }
  same("advantages", "advantages", now.advantages);
  const json values = json::parse(metrics.json());
  const auto compare_metric = [&](const std::string& name) {
    const json& logged = was.at("metrics");
    if (logged.contains(name) && values.contains(name) && logged.at(name).dump() != values.at(name).dump())
      differs(where, name.ends_with("grad_norm") ? "update: " : "metrics: ", name, ": recorded ",
              logged.at(name).dump(), ", recomputed ", values.at(name).dump());
  };
  compare_metric("actor/grad_norm");
  compare_metric("distill/grad_norm");
  same("weights after the step", "weights", now.weights);
  for (const auto& [name, value] : was.at("metrics").items()) compare_metric(name);
}

}  // namespace pare
