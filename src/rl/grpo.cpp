#include "rl/grpo.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/rng.h"
#include "rl/advantages.h"
#include "rl/block_budget.h"
#include "rl/corrections.h"
#include "rl/filters.h"
#include "rl/mismatch.h"
#include "rl/obrs.h"
#include "rl/report.h"
#include "rl/schedule.h"
#include "rl/shards.h"

namespace pare {

namespace {

std::vector<float> floats(std::span<const double> x) { return {x.begin(), x.end()}; }

// Makes the prefix a part of the response, which is trained on.
void include_prefix(Trajectory& s) {
  s.given = std::ssize(s.prefix);
  s.tokens.insert(s.tokens.begin(), s.prefix.begin(), s.prefix.end());
  s.logprob.insert(s.logprob.begin(), s.prefix.size(), std::numeric_limits<float>::quiet_NaN());
  if (!s.hashes.empty()) s.hashes.insert(s.hashes.begin(), s.prefix.size(), 0);
  s.prefix.clear();
}

}  // namespace

Grpo::Grpo(GrpoKeys keys, const GrpoEngine& engine, GrpoRun run)
    : keys_(std::move(keys)), engine_(engine), run_(std::move(run)) {
  if (!adapts_blocks()) return;
  const int64_t tokens = engine_.rollout.cache().max_pages() * kPageSlots;
  engine_.rollout.set_block_budget(budget_by_context(keys_.kv, tokens));
}

std::function<void(const RolloutStats&)> Grpo::rollout_progress() const {
  return [this](const RolloutStats& s) {
    if (run_.progress) run_.progress("rollout", s.finished, s.completions);
  };
}

uint64_t Grpo::key(RngStream stream, int64_t step) const {
  return rng_key(keys_.seed, stream, static_cast<uint64_t>(step + drawn_));
}

void Grpo::step(int64_t step, Metrics& metrics, int64_t drawn) {
  drawn_ = drawn;
  const AlgorithmKeys& a = keys_.algorithm;
  const RolloutCorrectionKeys& c = a.rollout_correction;
  metrics.set("training/global_step", static_cast<double>(step));
  const Timer timer(metrics, "timing_s/step");

  // o_1 .. o_G of each prompt, and their scores.
  samples_ = generate(step, metrics);
  if (a.oversample.keep > 0 && a.oversample.by == OversampleBy::acceptance) {
    set_old_logprobs(metrics);
    keep_most_accepted(a.oversample, samples_);
  }

  // R = score + penalties.
  set_reference_logprobs(metrics);
  if (a.use_kl_in_reward) set_old_logprobs(metrics);
  shape_rewards(keys_.reward_model, a, keys_.max_response_length, samples_);

  // A = (R - mean) / std, and which of them teach enough.  Statistics over accepted responses need the ruling first.
  const bool judges = corrects(a), over_accepted = judges && c.group_statistics == GroupStatistics::accepted;
  if (over_accepted) {
    if (a.adv_filter_threshold > 0) drop_groups_without_signal(samples_);
    set_old_logprobs(metrics);
    judge(c, samples_);
  }
  set_advantages(a, samples_);
  drop_small_advantages(a.adv_filter_threshold, samples_);
  if (a.mask_truncated_completions) drop_truncated(samples_);
  report_samples(a, samples_, metrics);

  // pi_old and xi = pi_old / pi_sampler.  The ratio pi / pi_old of a first update is exactly 1, so that one update
  // alone needs neither.
  const std::vector<std::span<Trajectory>> batches = mini_batches();
  const bool one_update = batches.size() <= 1 && keys_.actor.ppo_epochs == 1;
  const bool on_policy = one_update && !judges && !engine_.sampler_states && c.off_policy_mask_threshold == 0;
  if (!on_policy) {
    set_old_logprobs(metrics);
    if (judges && !over_accepted) judge(c, samples_);
    for (const std::span<Trajectory> batch : batches) set_corrections(c, batch);
    if (a.obrs.enable) set_obrs(a.obrs, key(RngStream::obrs, step), samples_);
    if (judges) report_corrections(c, samples_, metrics);
    if (judges || !keys_.exact) report_mismatch(c, samples_, metrics);
  }

  // The tokens that are trained on, once per batch; then pi, by one update or more.
  std::vector<TokenPlan> plans;
  for (const Trajectory& s : samples_)
    plans.push_back(draw_token_plan(keys_.actor, std::ssize(s.tokens), key(RngStream::token_plan, step), s.uid));
  report_plans(samples_, plans, metrics);
  update(step, batches, plans, on_policy, metrics);
  if (adapts_blocks()) adapt_blocks(step, metrics);
  if (run_.cache) update_cache(step, metrics);
}

// The prompts get the beginnings of the entries of their rows, as they were before the step.  Of rows without one a
// whole response is sampled, which lasts for the step: at its end every visited row gets one of the group's.
void Grpo::set_prefixes(int64_t step, const Sampling& sampling, std::vector<Request>& requests) {
  const RpoKeys& rpo = keys_.algorithm.rpo;
  const std::vector<PromptRow> rows = run_.rows();
  expect(rows.size() == requests.size(), rows.size(), " rows of ", requests.size(), " prompts");
  std::vector<Request> missing;
  std::vector<CachedResponse*> made;
  for (size_t i = 0; i < rows.size(); i++) {
    if (run_.cache->contains(rows[i].row)) continue;
    const auto [entry, is_new] = first_.try_emplace(rows[i].row);
    if (!is_new) continue;
    missing.push_back({requests[i].prompt, {rows[i].uid}, static_cast<int>(keys_.max_response_length)});
    made.push_back(&entry->second);
  }
  if (!missing.empty()) {
    Sampling whole = sampling;
    whole.hidden = {};
    std::vector<Completion> completions = engine_.rollout.generate(missing, whole, rollout_progress());
    for (Completion& c : completions) {
      const int64_t tokens = std::ssize(c.tokens);
      *made[c.request] = {std::move(c.tokens), c.finished(), NAN, NAN, step, tokens};
    }
  }
  for (size_t i = 0; i < rows.size(); i++) {
    Request& q = requests[i];
    const auto found = run_.cache->find(rows[i].row);
    const bool hit = found != run_.cache->end();
    const CachedResponse& entry = hit ? found->second : first_.at(rows[i].row);
    const int64_t cut = draw_cut(rpo, entry, key(RngStream::rpo_cut, step), q.uids[0]);
    q.prefix.assign(entry.ids.begin(), entry.ids.end() - cut);
    q.max_new_tokens = static_cast<int>(suffix_limit(rpo, keys_.max_response_length, std::ssize(q.prefix), cut));
    visits_.push_back({.row = rows[i].row,
                       .uid = q.uids[0],
                       .hit = hit,
                       .age = step - entry.step,
                       .cut = cut,
                       .prefix = std::ssize(q.prefix),
                       .responses = std::ssize(q.uids)});
  }
}

// Every group that was sampled writes the entry of its row, in order; without updates the first entries stay.
void Grpo::update_cache(int64_t step, Metrics& metrics) {
  if (!keys_.algorithm.rpo.update) {
    run_.cache->merge(first_);
    return;
  }
  AlgorithmKeys keys = keys_.algorithm;
  keys.use_kl_in_reward = false;  // of dropped groups no log-probs were computed
  shape_rewards(keys_.reward_model, keys, keys_.max_response_length, dropped_);
  Summary best, score;
  for (const PrefixVisit& v : visits_) {
    const std::span<const Trajectory> group = std::span(v.dropped ? dropped_ : samples_).subspan(v.first, v.responses);
    const Choice choice = draw_entry(keys.rpo, group, key(RngStream::rpo_update, step), v.uid);
    (*run_.cache)[v.row] = cached(group, choice.member, step);
    best.add(choice.best);
  }
  for (const auto& [row, entry] : *run_.cache)
    if (!std::isnan(entry.score)) score.add(entry.score);
  metrics.set("rpo/argmax_rate", best.mean());
  metrics.set("rpo/cache_score", score.mean());
}

// With dynamic sampling (DAPO) batches are drawn until enough groups have scores that differ, or max_num_gen_batches is
// reached: then the step trains on fewer.
std::vector<Trajectory> Grpo::generate(int64_t step, Metrics& metrics) {
  const Timer timer(metrics, "timing_s/gen");
  const Phase phase(engine_.model.device, "rollout");
  const FilterGroupsKeys& filter = keys_.algorithm.filter_groups;
  Sampling sampling{.temperature = keys_.temperature,
                    .truncation = keys_.truncation,
                    .key = key(RngStream::sample, step),
                    .eos = keys_.eos,
                    .stop = keys_.stop,
                    .hashes = keys_.full,
                    .kept_ids = engine_.options.kept_ids,
                    .planned = run_.planned};
  std::vector<Trajectory> samples;
  RolloutStats stats;
  Summary score, length, prompt_length, clipped, zero_std, all_right;
  int64_t batches = 0;
  int32_t groups = 0;
  visits_.clear();
  dropped_.clear();
  first_.clear();
  for (bool more = true; more;) {
    std::vector<Request> requests = run_.prompts();
    if (run_.cache) set_prefixes(step, sampling, requests);
    PrefixVisit* visit = run_.cache ? &visits_[visits_.size() - requests.size()] : nullptr;
    const auto ranks = engine_.model.device.comm.ranks(), rank = engine_.model.device.comm.rank();
    if (engine_.sampler_states) {  // all prompts have as many responses
      const int64_t own = (std::ssize(requests) - rank + ranks - 1) / ranks * std::ssize(requests[0].uids);
      sampling.hidden = engine_.sampler_states.rows(0, own * keys_.max_response_length);
    }
    TraceRecorder traces;
    sampling.trace = traces.recorder(keys_.learner, keys_.kv);
    std::vector<Completion> completions = engine_.rollout.generate(requests, sampling, rollout_progress());
    const std::vector<double> scores = run_.scores(requests, completions);
    expect(scores.size() == completions.size(), scores.size(), " scores of ", completions.size(), " responses");
    batches++;
    stats.add(engine_.rollout.stats());

    size_t first = 0;
    for (const Request& q : requests) {
      const int64_t prompt = &q - requests.data();
      const std::span group = std::span(scores).subspan(first, q.uids.size());
      const std::vector<size_t> members = members_by_score(keys_.algorithm.oversample, group);
      std::vector<double> kept_scores;
      std::vector<int64_t> lengths;
      for (const size_t k : members) {
        kept_scores.push_back(group[k]);
        lengths.push_back(std::ssize(q.prefix) + std::ssize(completions[first + k].tokens));
      }
      const bool informative = group_is_informative(kept_scores);
      zero_std.add(!informative);
      all_right.add(!informative && kept_scores[0] > 0);
      prompt_length.add(static_cast<double>(q.prompt.size()));
      const bool planned = run_.planned == 0 || groups < run_.planned;
      const bool teaches = filter.metric == FilterMetric::score
                               ? informative
                               : group_is_informative(group_rewards(keys_.reward_model, keys_.max_response_length,
                                                                    kept_scores, lengths));
      const bool keep = planned && (!filter.enable || (teaches && groups < std::ssize(requests)));
      std::vector<Trajectory>& to = keep ? samples : dropped_;
      const auto before = std::ssize(to);
      if (visit) {
        visit->dropped = !keep;
        visit->first = before;
        visit++;
      }
      for (size_t k = 0; k < q.uids.size(); k++) {
        Completion& o = completions[first + k];
        score.add(group[k]);
        length.add(static_cast<double>(q.prefix.size() + o.tokens.size()));
        clipped.add(!o.finished());
        if (!(keep || run_.cache) || !std::binary_search(members.begin(), members.end(), k)) continue;
        Trajectory& s = to.emplace_back();
        s.group = keep ? groups : static_cast<int32_t>(before);
        s.shard = static_cast<int32_t>(prompt % keys_.learner.shards);
        s.member = static_cast<int32_t>(k);
        s.uid = q.uids[k];
        s.prompt = q.prompt;
        s.prefix = q.prefix;
        s.tokens = std::move(o.tokens);
        s.logprob = std::move(o.logprobs);
        s.hashes = std::move(o.hashes);
        if (engine_.options.kept_ids > 0) s.kept = std::make_shared<const KeptIds>(std::move(o.kept));
        if (keys_.algorithm.rpo.prefix_loss == PrefixLoss::included) include_prefix(s);
        s.finished = o.finished();
        s.trace = traces.take(q, k);
        s.score = group[k];
        if (engine_.sampler_states) {
          const int64_t own = prompt / ranks * std::ssize(q.uids) + static_cast<int64_t>(k);
          s.sampler_row = static_cast<int32_t>(own * keys_.max_response_length);
        }
      }
      groups += keep;
      first += q.uids.size();
    }
    more = filter.enable && groups < std::ssize(requests) && batches < filter.max_num_gen_batches;
  }
  set_summary(metrics, "critic/score", score);
  set_summary(metrics, "response_length", length);
  metrics.set("response_length/clip_ratio", clipped.mean());
  set_summary(metrics, "prompt_length", prompt_length);
  metrics.set("tokens/generated", static_cast<double>(stats.decoded_tokens));
  if (run_.cache) {
    int64_t init = 0;
    for (const auto& [row, entry] : first_) init += std::ssize(entry.ids);
    report_prefixes(visits_, stats.decoded_tokens, init, metrics);
  }
  metrics.set("tokens/discarded", static_cast<double>(stats.discarded_tokens));
  metrics.set("perf/graph_share", static_cast<double>(stats.graph_passes) / static_cast<double>(stats.forward_passes));
  report_kv(stats, KvCache::page_bytes(engine_.model.config, keys_.kv, engine_.model.dtype), metrics);
  if (keys_.learner.shards > 1) metrics.set("timing_s/gen_wait", stats.waited / engine_.model.device.comm.ranks());
  metrics.set("rollout/gen_batches", static_cast<double>(batches));
  metrics.set("rollout/groups", static_cast<double>(groups));
  metrics.set("filter/zero_std_fraction", zero_std.mean());
  metrics.set("filter/all_right_fraction", all_right.mean());
  return samples;
}

// With an exact KL the loss computes the reference's distributions itself.
void Grpo::set_reference_logprobs(Metrics& metrics) {
  const Timer timer(metrics, "timing_s/ref");
  if (!engine_.reference || samples_.empty() ||
      (is_exact(keys_.actor.kl_loss_type) && !keys_.algorithm.use_kl_in_reward))
    return;
  const Phase phase(engine_.model.device, "ref");
  const TokenOuts out = Learner::logprobs(*engine_.reference, engine_.activations, response_groups(samples_),
                                          keys_.temperature, engine_.options);
  for (size_t i = 0; i < samples_.size(); i++) samples_[i].ref_logprob = floats(out.of(out.logprob, i));
}

// The policy that the ratio, the rollout correction and the KL in the reward refer to: of the samples that are not
// dropped and have none yet.  Exact rollouts logged it, bit by bit; others need a pass over the whole responses,
// whatever part of them is trained on.
void Grpo::set_old_logprobs(Metrics& metrics) {
  const Timer timer(metrics, "timing_s/old_log_prob");
  const auto wanted = [](const Trajectory& s) { return !s.dropped() && !s.old_logprob; };
  if (keys_.exact) {
    for (Trajectory& s : samples_)
      if (wanted(s)) s.old_logprob = s.logprob;
    return;
  }
  std::vector<Trajectory*> part;
  for (Trajectory& s : samples_)
    if (wanted(s)) part.push_back(&s);
  if (part.empty()) return;
  const Phase phase(engine_.model.device, "old_log_prob");
  const ObrsKeys& obrs = keys_.algorithm.obrs;
  const SamplerStates states{engine_.sampler_states, static_cast<float>(obrs.lambda), static_cast<int32_t>(obrs.top_k)};
  const TokenOuts out =
      Learner::logprobs(engine_.model, engine_.activations, response_groups(samples_, wanted), keys_.temperature,
                        engine_.options, engine_.sampler_states ? &states : nullptr);
  for (size_t i = 0; i < part.size(); i++) {
    part[i]->old_logprob = floats(out.of(out.logprob, i));
    if (!engine_.sampler_states) continue;
    part[i]->overlap = floats(out.of(out.overlap, i));
    part[i]->mass = floats(out.of(out.mass, i));
  }
}

// Acceptance is measured where the sampler's states are kept, and moves the budgets of the steps that follow.
bool Grpo::adapts_blocks() const { return engine_.sampler_states && keys_.kv.adapts(); }

void Grpo::adapt_blocks(int64_t step, Metrics& metrics) {
  Rollout& rollout = engine_.rollout;
  report_budget(rollout.block_budget(), metrics);
  if (step % keys_.kv.blocks.acceptance_steps != 0) return;
  rollout.set_block_budget(adapted_budget(keys_.kv, rollout.block_budget(), acceptance_by_context(samples_)));
}

// Returns the samples of each update of an epoch: whole groups.
std::vector<std::span<Trajectory>> Grpo::mini_batches() {
  std::vector<std::span<Trajectory>> batches;
  const int64_t groups = keys_.actor.ppo_mini_batch_size;  // 0: all
  for (auto first = samples_.begin(); first != samples_.end();) {
    const auto last = std::find_if(first, samples_.end(), [&](const Trajectory& s) {
      return groups > 0 && s.group / groups != first->group / groups;
    });
    batches.emplace_back(first, last);
    first = last;
  }
  return batches;
}

TokenOuts Grpo::accumulate(Learner& learner, const Update& u, const LossSpec& spec, const Model* reference) {
  return learner.accumulate(
      u.groups, u.terms, spec,
      {is_exact(spec.kl) ? reference : nullptr, spec.centring.on ? engine_.sampler_states : Tensor{}},
      [&](size_t done, size_t all) {
        if (run_.progress) run_.progress("update", static_cast<int64_t>(done), static_cast<int64_t>(all));
      });
}

// Per epoch and mini-batch: the gradient of the policy, and its step.  With distillation that is phase A; phase B
// (distill.h) stands before the step or after it.
void Grpo::update(int64_t step, std::span<const std::span<Trajectory>> batches, std::span<const TokenPlan> plans,
                  bool on_policy, Metrics& metrics) {
  std::optional<Timer> timer(std::in_place, metrics, "timing_s/update_actor");
  const Phase phase(engine_.model.device, "learner");
  const RolloutCorrectionKeys& c = keys_.algorithm.rollout_correction;
  const DistillKeys& d = keys_.distill;
  const double lr = learning_rate(keys_.actor.optim, step, keys_.total_training_steps);
  LossSpec spec = loss_spec(keys_.actor, keys_.temperature);
  if (engine_.sampler_states) spec.centring = centring(c);  // else the sampler's distribution is the policy's
  UpdateTotals totals, students;
  ShardTotals shards;
  const auto logprobs = [&](const std::vector<Group>& groups) {
    return Learner::logprobs(engine_.model, engine_.activations, groups, keys_.temperature, engine_.options);
  };
  const auto learn_student = [&](const Update& u) {
    if (u.groups.empty()) return;
    timer.emplace(metrics, "timing_s/update_student");
    const Phase student_phase(engine_.model.device, "distill");
    const TokenOuts out =
        accumulate(*engine_.student, u, student_loss_spec(keys_.actor, d, keys_.temperature), &engine_.model);
    if (students.updates == 0 && keys_.checks) totals.check(u, out);
    students.add(u, out);
    AdamWOptions options = optimizer_options(keys_.actor, lr * d.lr_scale_factor, keys_.seed, keys_.skip_nonfinite);
    options.max_norm = d.grad_clip;
    students.add_norm(engine_.student->step(options));
    timer.emplace(metrics, "timing_s/update_actor");
  };
  totals.skipped = batches.empty();  // dynamic sampling found nothing
  for (int64_t epoch = 0; epoch < keys_.actor.ppo_epochs; epoch++)
    for (const std::span<Trajectory> batch : batches) {
      const std::span<const TokenPlan> plan = plans.subspan(batch.data() - samples_.data(), batch.size());
      Update u = make_update(keys_.actor, keys_.max_response_length, batch, plan);
      const bool learns = !u.groups.empty() && enough_accepted(c, count_rulings(batch)), first = totals.updates == 0;
      TokenOuts out;
      if (learns) {
        const bool masks = c.off_policy_mask_threshold > 0, sequence_ratios = spec.policy == PolicyLoss::gspo;
        if (masks || (sequence_ratios && !first)) {
          const TokenOuts now = first ? TokenOuts{.offsets = loss_row_offsets(u.groups), .logprob = u.terms.old_logprob}
                                      : logprobs(u.groups);
          if (masks) totals.masked += mask_off_policy(c.off_policy_mask_threshold, u, now);
          if (sequence_ratios && !first) set_sequence_ratios(u, now);
        }
        totals.responses += std::ssize(u.sample_of);
        if (first) u.terms.old_logprob.assign(u.terms.old_logprob.size(), std::numeric_limits<double>::quiet_NaN());
        out = accumulate(engine_.learner, u, spec, engine_.reference);
        totals.add(u, out);
        shards.add(engine_.learner, u.groups);
        if (first && keys_.checks && !engine_.student) totals.check(u, out);
        if (first && on_policy && !keys_.exact) report_mismatch(c, u, out, metrics);
      } else {  // nothing was left, or too little: the step is counted, nothing is learnt
        totals.skipped++;
        u = Update();
      }
      Update student;
      if (engine_.student) {
        const Phase teacher_phase(engine_.model.device, "distill");
        student = student_update(keys_.actor, d, keys_.max_response_length, batch, plan, u, out, first, logprobs);
      }
      if (d.order == DistillOrder::before) learn_student(student);
      if (learns)
        totals.add_norm(engine_.learner.step(optimizer_options(keys_.actor, lr, keys_.seed, keys_.skip_nonfinite)));
      if (d.order == DistillOrder::after) learn_student(student);
    }
  totals.report(metrics);
  (engine_.student ? students : totals).report_sharing(metrics);
  shards.report(metrics);
  if (c.off_policy_mask_threshold > 0 && totals.responses > 0)
    metrics.set("actor/off_policy_masked_fraction",
                static_cast<double>(totals.masked) / static_cast<double>(totals.responses));
  metrics.set("actor/lr", lr);
  const bool skips = keys_.skip_nonfinite > 0;
  if (skips) metrics.set("actor/nonfinite_updates", static_cast<double>(totals.nonfinite));
  if (!engine_.student) return;
  students.report_student(metrics);
  metrics.set("distill/lr", lr * d.lr_scale_factor);
  if (skips) metrics.set("distill/nonfinite_updates", static_cast<double>(students.nonfinite));
}

}  // namespace pare
