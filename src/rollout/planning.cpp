// Plans of rollouts: the largest pass; and work that repeats is counted, not done.
#include <algorithm>
#include <tuple>
#include <utility>

#include "rollout/rollout.h"

namespace pare {

void repeat(Ledger& ledger, const Ledger& before, int64_t times) {
  for (auto& [phase, ops] : ledger.phases)
    for (auto& [op, line] : ops) {
      Ledger::Line then;
      if (const auto p = before.phases.find(phase); p != before.phases.end())
        if (const auto o = p->second.find(op); o != p->second.end()) then = o->second;
      line.calls += times * (line.calls - then.calls);
      for (int64_t Cost::*x : {&Cost::flops, &Cost::read, &Cost::written, &Cost::sent})
        line.cost.*x += times * (line.cost.*x - then.cost.*x);
      line.seconds += static_cast<double>(times) * (line.seconds - then.seconds);
    }
}

// Where the scheduler is as it was, what has been done since will be done again: as often as samples are left for.
void Rollout::skip_alike(Scheduler& scheduler, Seen& seen, int64_t all) {
  Ledger& ledger = *model_.device.ledger;
  const Scheduler::Alike now = scheduler.alike();
  if (std::exchange(seen.admitted, now.admitted) == now.admitted) return;
  const auto skip = [&](const std::vector<int64_t>& key, int64_t left) {
    if (key.empty()) return;
    const auto [before, is_new] = seen.states.try_emplace(key, now.admitted, ledger);
    if (is_new) return;
    const int64_t period = now.admitted - before->second.first, times = period > 0 ? left / period : 0;
    if (times == 0) return;
    repeat(ledger, before->second.second, times);
    scheduler.skip(times * period);
    seen.states.clear();
  };
  skip(now.samples, scheduler.samples_left());
  if (const Scheduler::Alike then = scheduler.alike(); then.admitted == now.admitted)
    skip(now.requests, all - now.admitted);
}

void Rollout::plan(const Model& model, const RolloutLimits& given, Arena& scratch, const Sampling& sampling) {
  expect(model.device.planning(), "the largest pass is for planning");
  RolloutLimits limits = checked(given, model.config);
  const int64_t sequences = Scheduler::cache_sequences(limits), layers = model.config.layers;
  const int64_t sequence_pages = layers * (limits.max_context / kPageSlots + 1);
  const int64_t pool = std::exchange(limits.kv_pages, sequences * sequence_pages);  // of a run
  const KvResidency residency(limits.kv, layers);
  const int64_t longest = limits.max_prompt;
  int64_t slots = longest;
  for (int64_t l = 0; l < layers; l++)
    slots = std::max(slots, residency.peak(l, longest, limits.max_context - longest));
  // The longest prompt at whose end most layers are compressed.  PyramidKV's first layers keep all of some longer ones.
  const auto due = [&](int64_t prompt) {
    int64_t n = 0;
    for (int64_t l = 0; l < layers; l++) n += residency.due(l, prompt, prompt, prompt);
    return n;
  };
  int64_t crowded = longest;
  for (int64_t prompt = longest; prompt > 0 && due(crowded) < layers; prompt--)
    if (due(prompt) > due(crowded)) crowded = prompt;
  // The sequences are where a compression is due: at the end of their prompts, or after the last token of a response.
  // Rows are spread over them evenly, or all but the last sequences have one, as work is listed for rows alone.
  std::vector<std::tuple<int64_t, int64_t, int64_t, bool>> points = {{longest, longest, slots, false},
                                                                     {limits.max_context, longest, slots, false},
                                                                     {limits.max_context, longest, slots, true}};
  if (crowded != longest) points.push_back({crowded, crowded, crowded, false});
  for (const auto& [tokens, prompt, held, alone] : points) {
    const int64_t rows = std::min<int64_t>(limits.max_batched_tokens, sequences * prompt);
    const auto first_row = [&, prompt = prompt, alone = alone](int64_t i) {
      return alone ? std::min(std::max(i, rows - (sequences - i) * prompt), rows) : rows * i / sequences;
    };
    Arena kv("kv of the largest pass", no_memory);
    Rollout rollout(model, limits, kv, scratch);
    Batch batch;
    batch.ids.resize(rows);
    batch.positions.resize(rows);
    for (int64_t i = 0; i < sequences; i++) {
      rollout.cache_.reserve(sequence_pages);
      const int sequence = rollout.cache_.open(sequence_pages);
      rollout.cache_.append(sequence, std::min(held, limits.max_context));
      const int64_t begin = first_row(i), end = first_row(i + 1);
      if (begin < end)
        batch.runs.push_back({sequence, static_cast<int32_t>(begin), static_cast<int32_t>(end - begin),
                              static_cast<int32_t>(tokens), static_cast<int32_t>(prompt), 0});
    }
    KvFields& fields = rollout.cache_.fields;
    for (Tensor* pages : {&rollout.cache_.k_pages, &rollout.cache_.v_pages, &fields.pos, &fields.mass, &fields.summary})
      pages->shape[0] = pool;  // as scratch may be for each page
    for (int i = 0; i < limits.max_sequences; i++) batch.draws.push_back({0, 0, 0, 0});
    batch.keep = 0;
    rollout.stats_.completions = 1;
    const ArenaScope round(scratch);
    const State state = rollout.make_state(sampling);
    if (limits.lookahead > 1) {
      rollout.passes_.push_back({.batch = batch, .first = 0, .counts = {}});
      batch.fed.resize(2 * std::min<size_t>(rows, limits.max_sequences));
    }
    rollout.run(batch, sampling, state);
  }
}

}  // namespace pare
