#include "run/trainer.h"

#include <algorithm>
#include <cmath>

#include "rl/advantages.h"
#include "rl/corrections.h"
#include "rl/filters.h"
#include "rl/loss.h"
#include "rl/mismatch.h"
#include "rl/obrs.h"
#include "rl/replay.h"
#include "rl/rewards.h"
#include "rl/schedule.h"
#include "run/certificate.h"

namespace pare {

namespace {

void set_summary(Metrics& metrics, const std::string& name, const Summary& s) {
  metrics.set(name + "/mean", s.mean());
  metrics.set(name + "/max", s.max());
  metrics.set(name + "/min", s.min());
}

std::unique_ptr<Model> copy_model(Session& s) {
  auto copy = std::make_unique<Model>(s.model_config, s.device, s.weights, s.model->dtype, false);
  if (!s.device.planning()) copy->set_parameters(s.model->reader());
  return copy;
}

// A response with a ratio below this counts as catastrophic, whether it is rejected or not.
double catastrophic(const Config& config) {
  const double veto = config.algorithm.rollout_correction.veto;
  return veto > 0 ? veto : 1e-4;
}

// Of the tokens of a first update without old log-probs, which are then those of its own pass.
void report_mismatch(const Update& update, const TokenOuts& out, double catastrophic, Metrics& metrics) {
  Mismatch mismatch;
  const std::vector<float> learner(out.logprob.begin(), out.logprob.end());
  for (size_t m = 0; m + 1 < out.offsets.size(); m++) {
    const auto first = static_cast<size_t>(out.offsets[m]), count = static_cast<size_t>(out.offsets[m + 1]) - first;
    mismatch.add(std::span(learner).subspan(first, count), std::span(update.sampler_logprob).subspan(first, count));
  }
  mismatch.report(metrics, catastrophic);
}

// What the updates of a step add up to.
struct UpdateTotals {
  Summary entropy, ppo_kl, kl, clipped, clipped_dual, grad_norm;
  double pg_loss = 0;
  int64_t updates = 0, skipped = 0, rows = 0, loss_rows = 0, checked = 0, mismatches = 0;

  void add(const Update& update, const TokenOuts& out) {
    const TokenTerms& terms = update.terms;
    for (size_t r = 0; r < out.logprob.size(); r++) {
      pg_loss += terms.weight[r] * out.loss[r];
      entropy.add(out.entropy[r]);
      ppo_kl.add(std::isnan(terms.old_logprob[r]) ? 0 : terms.old_logprob[r] - out.logprob[r]);
      kl.add(out.kl[r]);
      clipped.add(out.clipped[r] == 1);
      clipped_dual.add(out.clipped[r] == 2);
    }
    loss_rows += std::ssize(out.logprob);
    for (const Group& g : update.groups) rows += packed_rows(g);
  }

  // The promise: what the sampler logged is, bit by bit, what the learner computes (trainer.exact = false: near that).
  void check(const Update& update, const TokenOuts& out) {
    for (size_t r = 0; r < out.logprob.size(); r++)
      mismatches += static_cast<float>(out.logprob[r]) != update.sampler_logprob[r];
    checked += std::ssize(out.logprob);
  }

  void report(Metrics& m) const {
    m.set("actor/pg_loss", updates ? pg_loss / static_cast<double>(updates) : 0);
    m.set("actor/pg_clipfrac", clipped.mean());
    m.set("actor/pg_clipfrac_lower", clipped_dual.mean());
    m.set("actor/ppo_kl", ppo_kl.mean());
    m.set("actor/kl_loss", kl.mean());
    m.set("actor/entropy", entropy.mean());
    m.set("actor/grad_norm", grad_norm.mean());
    m.set("actor/updates", static_cast<double>(updates));
    m.set("actor/skipped_updates", static_cast<double>(skipped));
    m.set("tokens/trained", static_cast<double>(rows));
    m.set("tokens/loss", static_cast<double>(loss_rows));
    m.set("exact/checked_tokens", static_cast<double>(checked));
    if (checked > 0) m.set("exact/mismatch_tokens", static_cast<double>(mismatches));  // else 0 would be a claim
  }
};

}  // namespace

Trainer::Trainer(Session& s) : Training(s, true), reference_(needs_reference(s.config) ? copy_model(s) : nullptr) {
  if (s.train && config_.data.task == "jsonl" && config_.data.reward.empty())
    fail("data.reward is empty: training on the rewards of data.task = \"jsonl\" needs one");
  if (keeps_sampler_states(config_)) {
    const int64_t rows = config_.data.train_batch_size * config_.rollout.n * config_.data.max_response_length;
    if (rows > std::numeric_limits<int32_t>::max())
      fail("data.train_batch_size * rollout.n responses of data.max_response_length are ", rows,
           " tokens, too many to keep the sampler's hidden states of");
    sampler_states_ = s.kv.alloc("sampler hidden states", s.model->dtype, {rows, s.model_config.hidden});
  }
}

Metrics Trainer::step() {
  Metrics metrics;
  step_++;
  metrics.set("training/global_step", static_cast<double>(step_));
  session_.ledger.clear();
  {
    const Timer timer(metrics, "timing_s/step");
    generate(metrics);
    shape(metrics);
    set_advantages(config_.algorithm, samples_);
    if (corrects() && config_.algorithm.rollout_correction.group_statistics == GroupStatistics::accepted) {
      const Timer old(metrics, "timing_s/old_log_prob");
      if (config_.algorithm.adv_filter_threshold > 0) drop_groups_without_signal(samples_);
      judge_samples(samples_);
      set_advantages(config_.algorithm, samples_);
    }
    update(samples_, metrics);
  }
  Summary advantages;
  for (const Trajectory& s : samples_) advantages.add(s.advantage);
  set_summary(metrics, "critic/advantages", advantages);
  for (const char* phase : {"rollout", "learner", "old_log_prob", "ref"})
    metrics.set(std::string("flops/") + phase, static_cast<double>(session_.ledger.total(phase).flops));
  session_.set_memory(metrics);
  return metrics;
}

// Fills problems_, samples_ (with their scores) and rewards_.  With dynamic sampling (DAPO) batches are drawn until
// enough groups have scores that differ, or max_num_gen_batches is reached: then the step trains on fewer.
void Trainer::generate(Metrics& metrics) {
  const Timer timer(metrics, "timing_s/gen");
  const Phase phase(session_.device, "rollout");
  const RolloutKeys& r = config_.rollout;
  const auto& filter = config_.algorithm.filter_groups;
  const int64_t wanted = config_.data.train_batch_size;
  Sampling sampling{
      .temperature = static_cast<float>(r.temperature),
      .top_k = static_cast<int32_t>(r.top_k),
      .top_p = static_cast<float>(r.top_p),
      .key = rng_key(static_cast<uint64_t>(config_.trainer.seed), RngStream::sample, static_cast<uint64_t>(step_)),
      .eos = session_.eos,
      .hidden = sampler_states_};
  RolloutStats stats;
  problems_.clear(), samples_.clear(), rewards_.clear();
  Summary score, length, prompt_length, clipped;
  Certificate certificate;
  int64_t batches = 0, zero_std = 0, all_right = 0, groups_seen = 0;
  while (static_cast<int64_t>(problems_.size()) < wanted &&
         batches < (filter.enable ? filter.max_num_gen_batches : 1)) {
    std::vector<Request> requests;
    std::vector<Problem> problems;
    for (int64_t i = 0; i < wanted; i++) {
      const auto [epoch, row] = prompts_.next();
      problems.push_back(session_.train->problem(row));
      Request q{session_.encode_prompt(problems.back()), {}, static_cast<int>(config_.data.max_response_length)};
      for (int64_t k = 0; k < r.n; k++)
        q.uids.push_back(
            sequence_uid(static_cast<uint64_t>(epoch), static_cast<uint64_t>(row), 0, static_cast<uint64_t>(k)));
      requests.push_back(std::move(q));
    }
    TraceRecorder traces;
    sampling.trace = traces.recorder(config_.learner, config_.rollout.kv);
    const auto completions = rollout_->generate(requests, sampling, [&](const RolloutStats& s) {
      if (progress) progress("rollout", s.finished, s.completions);
    });
    std::vector<Reward> graded = session_.rewards(*session_.train, problems, completions);
    expect(graded.size() == static_cast<size_t>(wanted * r.n), graded.size(), " rewards of ", wanted * r.n,
           " responses");
    batches++;
    stats.add(rollout_->stats());

    for (int64_t g = 0; g < wanted; g++) {
      std::vector<Trajectory> group;
      std::vector<Reward> rewards;
      std::vector<double> scores;
      for (int64_t k = 0; k < r.n; k++) {
        const Completion& c = completions[g * r.n + k];
        certificate.add(requests[g].uids[k], c.logprobs);
        Trajectory s;
        s.group = static_cast<int32_t>(problems_.size());
        s.member = static_cast<int32_t>(k);
        s.uid = requests[g].uids[k];
        s.prompt = requests[g].prompt;
        s.tokens = c.tokens;
        s.logprob = c.logprobs;
        s.finished = c.finish == Finish::eos;
        s.sampler_row = sampler_row(g * r.n + k);
        s.trace = traces.take(requests[g], k);
        rewards.push_back(std::move(graded[g * r.n + k]));
        s.score = rewards.back().score;
        scores.push_back(s.score);
        score.add(s.score), length.add(static_cast<double>(c.tokens.size())), clipped.add(!s.finished);
        group.push_back(std::move(s));
      }
      prompt_length.add(static_cast<double>(requests[g].prompt.size()));
      groups_seen++;
      const bool informative = group_is_informative(scores);
      zero_std += !informative, all_right += !informative && scores[0] > 0;
      if (filter.enable && (!informative || static_cast<int64_t>(problems_.size()) == wanted)) continue;
      problems_.push_back(std::move(problems[g]));
      std::move(group.begin(), group.end(), std::back_inserter(samples_));
      std::move(rewards.begin(), rewards.end(), std::back_inserter(rewards_));
    }
  }
  metrics.set_text("certificate", certificate.text());
  set_summary(metrics, "critic/score", score);
  set_summary(metrics, "response_length", length);
  metrics.set("response_length/clip_ratio", clipped.mean());
  set_summary(metrics, "prompt_length", prompt_length);
  metrics.set("tokens/generated", static_cast<double>(stats.decoded_tokens));
  metrics.set("tokens/discarded", static_cast<double>(stats.discarded_tokens));
  metrics.set("perf/graph_share", static_cast<double>(stats.graph_passes) / static_cast<double>(stats.forward_passes));
  report_kv(stats, KvCache::page_bytes(session_.model_config, r.kv, session_.model->dtype), metrics);
  metrics.set("rollout/gen_batches", static_cast<double>(batches));
  metrics.set("rollout/groups", static_cast<double>(problems_.size()));
  metrics.set("filter/zero_std_fraction", static_cast<double>(zero_std) / static_cast<double>(groups_seen));
  metrics.set("filter/all_right_fraction", static_cast<double>(all_right) / static_cast<double>(groups_seen));
}

// From scores to rewards.
void Trainer::shape(Metrics& metrics) {
  const Timer timer(metrics, "timing_s/ref");
  reference_logprobs(samples_);
  if (config_.algorithm.use_kl_in_reward) old_logprobs(samples_);
  shape_rewards(config_.reward_model, config_.algorithm, config_.data.max_response_length, samples_);
  Summary reward, kl;
  for (const Trajectory& s : samples_)
    reward.add(s.reward), kl.add(s.kl_penalty / static_cast<double>(s.tokens.size()));
  set_summary(metrics, "critic/rewards", reward);
  if (config_.algorithm.use_kl_in_reward) metrics.set("actor/reward_kl_penalty", kl.mean());  // per token, as verl
}

void Trainer::worst_case_step() {
  session_.ledger.clear();
  step_++;
  const std::vector<int32_t> prompt(config_.data.max_prompt_length, session_.eos[0]);
  std::vector<Request> requests;
  for (int64_t i = 0; i < config_.data.train_batch_size; i++) {
    requests.push_back({prompt, {}, static_cast<int>(config_.data.max_response_length)});
    for (int64_t k = 0; k < config_.rollout.n; k++)
      requests.back().uids.push_back(sequence_uid(0, static_cast<uint64_t>(i), 0, static_cast<uint64_t>(k)));
  }
  std::vector<Trajectory> samples;
  {
    const Phase phase(session_.device, "rollout");
    TraceRecorder traces;
    const Sampling endless{.key = rng_key(0, RngStream::sample, 0),
                           .eos = {},
                           .hidden = sampler_states_,
                           .trace = traces.recorder(config_.learner, config_.rollout.kv)};
    for (Completion& c : rollout_->generate(requests, endless)) {
      Trajectory s;
      s.sampler_row = sampler_row(static_cast<int64_t>(samples.size()));
      s.group = c.request, s.member = c.sample;
      s.uid = requests[c.request].uids[c.sample];
      s.prompt = prompt, s.tokens = std::move(c.tokens), s.logprob = std::move(c.logprobs);
      s.trace = traces.take(requests[c.request], c.sample);
      s.advantage = 1;
      samples.push_back(std::move(s));
    }
  }
  reference_logprobs(samples);
  Metrics metrics;
  update(samples, metrics);
}

void Trainer::largest_batches() {
  Arena& arena = session_.activations;
  const RolloutLimits rollout = session_.rollout_limits();
  Rollout::plan(*session_.model, rollout, arena, sampler_states_);
  BatchLimits limits = batch_limits(config_.rollout.n);
  if (config_.learner.attention == LearnerAttention::replay && config_.rollout.kv.evicts()) {
    const KvResidency residency(rollout.kv, session_.model_config.layers);
    limits.interval = std::max<int64_t>(config_.rollout.kv.evict.buffer, 1);
    limits.slots = limits.prefix;
    for (int64_t l = 0; l < residency.layers(); l++)
      limits.slots = std::max(limits.slots, residency.peak(l, limits.prefix, limits.tokens));
  }
  const LossSpec spec = loss_spec(config_.actor, config_.rollout.temperature);
  learner_.plan(limits, spec, spec.kl == KlLoss::exact ? reference_.get() : nullptr);
  const SamplerStates states{sampler_states_};
  Learner::plan_logprobs(*session_.model, arena, limits, session_.learner_options(),
                         sampler_states_ ? &states : nullptr);
}

void Trainer::reference_logprobs(std::vector<Trajectory>& samples) {
  if (!reference_ || samples.empty() ||
      (config_.actor.kl_loss_type == KlLoss::exact && !config_.algorithm.use_kl_in_reward))
    return;
  const Phase phase(session_.device, "ref");
  const TokenOuts out = Learner::logprobs(*reference_, session_.activations, response_groups(samples),
                                          config_.rollout.temperature, session_.learner_options());
  for (size_t i = 0; i < samples.size(); i++) {
    const auto logprob = out.of(out.logprob, i);
    samples[i].ref_logprob.assign(logprob.begin(), logprob.end());
  }
}

// Where the states of a response begin that the rollout numbers `completion`.
std::optional<int32_t> Trainer::sampler_row(int64_t completion) const {
  if (!sampler_states_) return {};
  return static_cast<int32_t>(completion * config_.data.max_response_length);
}

// The policy that the ratio, the rollout correction and the KL in the reward refer to: of the samples that are not
// dropped and have none yet.  Exact rollouts logged it, bit by bit; others need a pass over the whole responses,
// whatever part of them is trained on.
void Trainer::old_logprobs(std::vector<Trajectory>& samples) {
  const auto wanted = [](const Trajectory& s) { return !s.dropped && s.old_logprob.empty(); };
  std::vector<Trajectory*> part;
  for (Trajectory& s : samples) {
    if (!wanted(s)) continue;
    if (exact_rollout(config_))
      s.old_logprob = s.logprob;
    else
      part.push_back(&s);
  }
  if (part.empty()) return;
  const Phase phase(session_.device, "old_log_prob");
  const ObrsKeys& obrs = config_.algorithm.obrs;
  const SamplerStates states{sampler_states_, static_cast<float>(obrs.lambda), static_cast<int32_t>(obrs.top_k)};
  const TokenOuts out =
      Learner::logprobs(*session_.model, session_.activations, response_groups(samples, wanted),
                        config_.rollout.temperature, session_.learner_options(), sampler_states_ ? &states : nullptr);
  for (size_t i = 0; i < part.size(); i++) {
    const auto logprob = out.of(out.logprob, i);
    part[i]->old_logprob.assign(logprob.begin(), logprob.end());
    if (!sampler_states_) continue;
    const auto overlap = out.of(out.overlap, i), mass = out.of(out.mass, i);
    part[i]->overlap.assign(overlap.begin(), overlap.end());
    part[i]->mass.assign(mass.begin(), mass.end());
  }
}

void Trainer::judge_samples(std::vector<Trajectory>& samples) {
  old_logprobs(samples);
  judge(config_.algorithm.rollout_correction, samples);
}

// Verdicts and weights of what the filter left, by updates of `mini` groups; and what is known of the mismatch.
void Trainer::correct(std::vector<Trajectory>& samples, int64_t mini, Metrics& metrics) {
  const AlgorithmKeys& a = config_.algorithm;
  if (corrects()) {
    judge_samples(samples);
    drop_rejected(samples);
    for (auto first = samples.begin(); first != samples.end();) {
      const int64_t update = first->group / mini;
      const auto last = std::find_if(first, samples.end(), [&](const auto& s) { return s.group / mini != update; });
      set_corrections(a.rollout_correction, std::span(first, last));
      first = last;
    }
    if (a.obrs.enable)
      set_obrs(a.obrs,
               rng_key(static_cast<uint64_t>(config_.trainer.seed), RngStream::obrs, static_cast<uint64_t>(step_)),
               samples);
    report_corrections(a.rollout_correction, samples, metrics);
  } else {
    old_logprobs(samples);
    if (exact_rollout(config_)) return;
  }
  Mismatch mismatch;
  for (const Trajectory& s : samples)
    if (!s.old_logprob.empty())
      mismatch.add(s.old_logprob, s.logprob, s.overlap, static_cast<int64_t>(s.prompt.size()));
  mismatch.report(metrics, catastrophic(config_));
}

void Trainer::update(std::vector<Trajectory>& samples, Metrics& metrics) {
  const int64_t dropped = drop_small_advantages(config_.algorithm.adv_filter_threshold, samples);
  metrics.set("filter/small_adv_fraction",
              samples.empty() ? 0 : static_cast<double>(dropped) / static_cast<double>(samples.size()));

  // Token plans are drawn once per rollout batch.
  const uint64_t key =
      rng_key(static_cast<uint64_t>(config_.trainer.seed), RngStream::token_plan, static_cast<uint64_t>(step_));
  std::vector<TokenPlan> plans;
  Summary kept, weight, square;  // weight: of every response token, 0 where it is left out; unbiased: its mean is 1
  for (const Trajectory& s : samples) {
    plans.push_back(draw_token_plan(config_.actor, static_cast<int64_t>(s.tokens.size()), key, s.uid));
    const TokenPlan& plan = plans.back();
    int64_t n = 0;
    for (int64_t t = 0; t < static_cast<int64_t>(s.tokens.size()); t++) {
      const double w = t < plan.length ? plan.weight[t] : 0;
      n += w != 0, weight.add(w), square.add(w * w);
    }
    kept.add(static_cast<double>(n) / static_cast<double>(s.tokens.size()));
  }
  metrics.set("ht/kept_fraction", kept.mean());
  metrics.set("ht/weight_mean", weight.mean());
  metrics.set("ht/weight_max", weight.max());
  metrics.set("ht/ess", weight.mean() * weight.mean() / square.mean());  // part of the tokens

  // Mini-batches of whole groups.
  const auto groups = samples.empty() ? 0 : static_cast<int64_t>(samples.back().group) + 1;
  const int64_t mini =
      config_.actor.ppo_mini_batch_size > 0 ? config_.actor.ppo_mini_batch_size : std::max<int64_t>(groups, 1);
  if (corrects() || sampler_states_ || config_.actor.ppo_epochs > 1 || mini < groups) {
    const Timer old(metrics, "timing_s/old_log_prob");
    correct(samples, mini, metrics);
  }
  const Timer timer(metrics, "timing_s/update_actor");
  const double lr = learning_rate(config_.actor.optim, step_, config_.trainer.total_training_steps);
  const LossSpec spec = loss_spec(config_.actor, config_.rollout.temperature);
  const Model* reference = spec.kl == KlLoss::exact ? reference_.get() : nullptr;

  const Phase phase(session_.device, "learner");
  UpdateTotals totals;
  for (int64_t epoch = 0; epoch < config_.actor.ppo_epochs; epoch++)
    for (int64_t first = 0; first < groups; first += mini) {
      const auto in_batch = [&](const Trajectory& s) { return s.group >= first && s.group < first + mini; };
      const auto begin = std::find_if(samples.begin(), samples.end(), in_batch);
      const auto end = std::find_if_not(begin, samples.end(), in_batch);
      const std::span<const Trajectory> part(begin, end);
      const std::span<const TokenPlan> part_plans(plans.begin() + (begin - samples.begin()), part.size());
      Update u = make_update(config_.actor, config_.data.max_response_length, part, part_plans);
      const double scale = update_scale(config_.algorithm.rollout_correction, count_verdicts(part));
      if (u.groups.empty() || scale == 0) {  // nothing was left, or too little: the step is counted, nothing is learnt
        totals.skipped++;
        continue;
      }
      const bool first_update = totals.updates == 0;
      if (first_update) {
        // The ratio is exactly 1 by definition, so that one update per batch needs no old log-probs at all.
        u.terms.old_logprob.assign(u.terms.old_logprob.size(), std::numeric_limits<double>::quiet_NaN());
      } else if (spec.policy == PolicyLoss::gspo) {
        set_sequence_ratios(u, Learner::logprobs(*session_.model, session_.activations, u.groups, spec.temperature,
                                                 session_.learner_options()));
      }
      const TokenOuts out = learner_.accumulate(u.groups, u.terms, spec, reference, [&](size_t done, size_t all) {
        if (progress) progress("update", static_cast<int64_t>(done), static_cast<int64_t>(all));
      });
      totals.add(u, out);
      if (first_update && checks_exact(config_)) totals.check(u, out);
      if (first_update && !exact_rollout(config_) && std::isnan(metrics.get("rollout_corr/kl")))
        report_mismatch(u, out, catastrophic(config_), metrics);
      totals.grad_norm.add(learner_.step(session_.optimizer_options(lr * scale)));
      totals.updates++;
    }
  if (groups == 0) totals.skipped++;  // dynamic sampling found nothing
  totals.report(metrics);
  metrics.set("actor/lr", lr);
}

std::vector<SampleText> Trainer::texts() const {
  std::vector<SampleText> texts;
  for (size_t i = 0; i < samples_.size(); i++) {
    const Trajectory& s = samples_[i];
    texts.push_back({.prompt = session_.tokenizer->decode(s.prompt),
                     .response = session_.tokenizer->decode(s.tokens),
                     .extracted = rewards_[i].extracted,
                     .answer = problems_[s.group].answer.value_or(""),
                     .score = s.score,
                     .reward = s.reward,
                     .advantage = s.advantage,
                     .tokens = static_cast<int64_t>(s.tokens.size()),
                     .finished = s.finished});
  }
  return texts;
}

}  // namespace pare
