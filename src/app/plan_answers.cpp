#include "app/plan_answers.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <sstream>

#include "app/show.h"
#include "base/error.h"
#include "base/nearest.h"
#include "base/text.h"

namespace pare {

using Json = nlohmann::ordered_json;

double step_seconds(const Plan& plan) {
  double sum = 0;
  for (const auto& [phase, seconds] : plan.seconds) sum += seconds;
  return sum;
}

double generated_tokens(const Config& c, const StepLengths& lengths) {
  return static_cast<double>(c.data.train_batch_size * c.rollout.n * lengths.response);
}

namespace {

constexpr size_t kWidth = 80;

std::string bytes(double n) { return human(n) + "B"; }

Cost total(const Ledger& ledger) {
  Cost all;
  for (const auto& phase : ledger.phases) all += ledger.total(phase.first);
  return all;
}

// Sequences whose keys and values find room beside everything else that is needed with them, on all ranks.
int64_t sequences_at_a_time(const Config& c, const Plan& plan, size_t memory) {
  const size_t one = plan.most.kv / static_cast<size_t>(c.rollout.max_num_seqs);
  ArenaLimits without = plan.most;
  without.kv = 0;
  if (without.total() > memory) return 0;
  if (without.shared) without.gradients = without.activations = 0;
  const size_t rest = without.total();
  return memory > rest && one > 0 ? static_cast<int64_t>((memory - rest) / one) * plan.ranks : 0;
}

Json memory_json(const Plan& plan) {
  Json arenas;
  for (const Plan::Memory& m : plan.memory) arenas[m.arena] = {{"longest", m.peak}, {"most", m.most}};
  Json all{{"arenas", arenas}, {"longest", plan.peak() + plan.responses}, {"most", plan.needed()}};
  if (plan.responses) all["responses"] = plan.responses;
  if (plan.most.shared) all["shared"] = {{"kv", "scratch"}, {"gradients", "activations"}};
  return all;
}

Json phases_json(const Ledger& ledger, bool timed) {
  Json phases;
  for (const auto& [phase, ops] : ledger.phases) {
    Json lines;
    for (const auto& [op, line] : ops) {
      const Cost& c = line.cost;
      lines[op] = {{"calls", line.calls},  {"flops", c.flops}, {"read", c.read},
                   {"written", c.written}, {"sent", c.sent},   {"abroad", c.abroad}};
      if (timed) lines[op]["seconds"] = line.seconds;
    }
    const Cost all = ledger.total(phase);
    phases[phase] = {{"flops", all.flops}, {"read", all.read},     {"written", all.written},
                     {"sent", all.sent},   {"abroad", all.abroad}, {"ops", lines}};
  }
  return phases;
}

// What --largest takes.
const std::vector<std::string> kSizes = {
    "data.max_prompt_length", "data.max_response_length",       "data.train_batch_size",  "rollout.n",
    "rollout.max_num_seqs",   "rollout.max_num_batched_tokens", "actor.ppo_max_token_len"};

using Parts = std::vector<std::pair<std::string, size_t>>;
Parts parts_of(const ArenaLimits& l, size_t responses) {
  return {{"weights", l.weights}, {"gradients", l.gradients},     {"optimizer", l.optimizer},
          {"kv", l.kv},           {"activations", l.activations}, {"states", l.states},
          {"scratch", l.scratch}, {"responses", responses}};
}

}  // namespace

Json plan_json(const Config& c, const Plan& plan, const StepLengths& lengths, size_t memory, const Machine* machine) {
  Json j{{"ranks", plan.ranks},
         {"memory", memory_json(plan)},
         {"lengths", {{"prompt", lengths.prompt}, {"response", lengths.response}, {"dropped", lengths.dropped}}},
         {"phases", phases_json(plan.ledger, machine)}};
  if (machine)
    for (const auto& [phase, seconds] : plan.seconds) j["phases"][phase]["seconds"] = seconds;
  if (plan.ranks > 1) j["all_ranks"] = phases_json(plan.all_ranks, false);
  if (memory) {
    j["fits"] = plan.needed() <= memory;
    j["available"] = memory;
  }
  if (machine) {
    const double step = step_seconds(plan);
    Json figures;
    for (const auto& [key, figure] : machine->figures)
      figures[key] = {{"value", figure.value}, {"source", figure.source}};
    j["machine"] = {{"name", machine->name}, {"figures", figures}};
    j["seconds"] = step;
    j["tokens_per_second"] = generated_tokens(c, lengths) / step;
    j["hours"] = step * static_cast<double>(c.trainer.total_training_steps) / 3600;
  }
  return j;
}

void show_largest(const std::vector<std::string>& arguments, const std::string& key, size_t memory,
                  const std::string& where) {
  if (memory == 0) fail("--largest needs --memory or --machine: ", where);
  if (std::find(kSizes.begin(), kSizes.end(), key) == kSizes.end()) {
    std::string sizes;
    for (const std::string& s : kSizes) sizes += " " + s;
    fail("--largest ", key, ": expected a size; the nearest is ", nearest(key, kSizes), "; sizes:", sizes);
  }
  struct Try {
    bool fits = false;
    ArenaLimits most;
    Parts parts;
    size_t bytes = 0;
    std::string error;  // of a value that no run can have
  };
  const auto attempt = [&](int64_t value) {
    std::vector<std::string> all = arguments;
    all.push_back(cat(key, "=", value));
    Try t;
    try {
      const Config c = fit_memory(load_config(all));
      t.parts = parts_of(t.most = plan_most(c), planned_responses(c));
      for (const auto& part : t.parts) t.bytes += part.second;
      t.bytes -= t.most.saved();
      t.fits = t.bytes <= memory;
    } catch (const Error& e) {
      t.error = e.what();
    }
    return t;
  };
  const std::string now = config_key(key).show(load_config(arguments));
  int64_t good = 0, bad = std::max<int64_t>(std::atoll(now.c_str()), 1);
  Try best, next = attempt(bad);
  while (next.fits) {
    if (good > 0 && next.parts == best.parts) {  // twice as large, and no byte more
      std::printf("largest  any %s: from %lld on it takes %zu of %zu bytes %s\n", key.c_str(),
                  static_cast<long long>(good), best.bytes, memory, printable(where).c_str());
      return;
    }
    best = std::move(next);
    good = bad;
    bad *= 2;
    next = attempt(bad);
  }
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    Try t = attempt(middle);
    (t.fits ? good : bad) = middle;
    (t.fits ? best : next) = std::move(t);
  }
  if (good == 0)
    fail("no value of ", key, " fits the ", bytes(static_cast<double>(memory)), " ", where,
         next.error.empty() ? "" : ": " + next.error);
  std::printf("largest  %s = %lld takes %zu of %zu bytes %s\n", key.c_str(), static_cast<long long>(good), best.bytes,
              memory, printable(where).c_str());
  if (!next.error.empty()) {
    std::printf("         %lld: %s\n", static_cast<long long>(bad), next.error.c_str());
    return;
  }
  std::string grows;
  size_t growth = 0;
  const ArenaLimits& most = next.most;
  const Parts &before = best.parts, &after = next.parts;
  for (size_t i = 0; i < after.size(); i++) {
    const std::string& name = after[i].first;
    const bool sampling = name == "kv" || name == "scratch", training = name == "gradients" || name == "activations";
    if (most.shared && (most.sampling() > most.training() ? training : sampling)) continue;  // has room to grow
    const size_t more = after[i].second - std::min(before[i].second, after[i].second);
    if (grows.empty() || more > growth) {
      grows = name;
      growth = more;
    }
  }
  std::printf("         %lld takes %zu more than there are; what grows most is %s\n", static_cast<long long>(bad),
              next.bytes - memory, grows.c_str());
}

std::vector<std::string> settings_that_fit(const Config& c, size_t memory) {
  std::vector<std::vector<std::string>> choices = frugal_settings(c);
  const RankCount count = rank_count(c.trainer);
  if (count.all() < 8 && c.trainer.device != DeviceKind::cpu) {
    std::vector<std::string>& more = choices.emplace_back();
    for (const int64_t times : {2, 4, 8}) {
      const int64_t of_all = count.all() * times;
      more.push_back(cat("trainer.n_gpus_per_node=", count.node_ranks * times));
      if (c.learner.shards % of_all != 0) more.back() += cat(" learner.shards=", std::lcm(c.learner.shards, of_all));
    }
  }
  return what_fits(
      c,
      {"actor.ppo_max_token_len", "rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.kv_cache_bytes"},
      choices, [&](const Config& with) { return plan_fits(with, memory); });
}

void show_comparison(const std::vector<std::string>& arguments, const std::string& presets, const StepLengths& lengths,
                     size_t memory, const Machine* machine, bool json) {
  struct Row {
    std::string name;
    double bytes, rollout, learner, moved, seconds, sequences;
    Json plan;
  };
  std::vector<std::string> names{""};
  std::istringstream list(presets);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  std::vector<Row> rows;
  int ranks = 1;
  for (const std::string& name : names) {
    std::vector<std::string> all = arguments;
    auto at = all.end();  // under the overrides: what is typed holds for every row
    while (at != all.begin() && at[-1].find('=') != std::string::npos) --at;
    if (!name.empty()) all.insert(at, name);
    Config c = load_config(all);
    if (memory) c = fit_memory(c, [&](const Config& with) { return plan_fits(with, memory); });
    const Plan plan = plan_ranks(c, false, &lengths, machine);
    ranks = plan.ranks;
    const Cost cost = total(plan.all_ranks);
    const auto rollout = static_cast<double>(plan.all_ranks.total("rollout").flops);
    rows.push_back({.name = name.empty() ? "as it is" : name,
                    .bytes = static_cast<double>(plan.needed()),
                    .rollout = rollout,
                    .learner = static_cast<double>(cost.flops) - rollout,
                    .moved = static_cast<double>(cost.read + cost.written),
                    .seconds = step_seconds(plan),
                    .sequences = static_cast<double>(sequences_at_a_time(c, plan, memory)),
                    .plan = plan_json(c, plan, lengths, memory, machine)});
  }
  if (json) {
    Json all;
    for (Row& r : rows) all[r.name] = std::move(r.plan);
    std::printf("%s\n", all.dump(2).c_str());
    return;
  }
  const std::string head =
      cat("a step at ", lengths.prompt, " + ", lengths.response, " tokens, ", format("%.0f %%", 100 * lengths.dropped),
          " of the responses dropped before the learner: bytes at most",
          ranks == 1 ? "" : cat(" on the fullest of ", ranks, " ranks; of all ranks"),
          ", FLOP of the rollout and of all else, bytes moved; then the multiple of the first row");
  std::printf("%s\n", wrapped(head, kWidth, "").c_str());
  size_t names_width = 0;
  for (const Row& r : rows) names_width = std::max(names_width, r.name.size());
  std::string titles = pad_right("", names_width);
  for (const char* title : {"bytes", "rollout", "other", "moved"}) titles += pad_left(title, 12);
  if (machine) titles += pad_left("seconds", 12);
  if (memory) titles += pad_left("at once", 8);
  std::printf("%s\n", titles.c_str());
  const auto cell = [&](double Row::*x, const Row& r) {
    const double value = r.*x, first = rows[0].*x;
    return pad_left(cat(x == &Row::seconds ? format("%.3g", value) : human(value),
                        &r == &rows[0] ? "" : format(" %.2fx", value / first)),
                    12);
  };
  for (const Row& r : rows) {
    std::string line = pad_right(r.name, names_width);
    for (double Row::*x : {&Row::bytes, &Row::rollout, &Row::learner, &Row::moved}) line += cell(x, r);
    if (machine) line += cell(&Row::seconds, r);
    if (memory) line += pad_left(format("%.0f", r.sequences), 8);
    std::printf("%s\n", line.c_str());
  }
  std::printf("\n%s",
              wrapped("at once: sequences whose keys and values fit beside the rest. No plan knows what a method "
                      "saves by its data (groups without signal, vetoes); --lengths RUN takes the dropped share "
                      "of a run.",
                      kWidth, "")
                  .c_str());
}

}  // namespace pare
