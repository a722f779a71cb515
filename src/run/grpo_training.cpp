#include "run/grpo_training.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "run/prefix_cache_file.h"

namespace pare {

namespace {

// The initial model.  A frozen one shares its memory, without adapters or with a copy of those that it starts from.
std::unique_ptr<Model> make_reference(Session& s, std::unique_ptr<Adapters>& adapters) {
  if (!s.frozen()) {
    auto copy = std::make_unique<Model>(s.model_config, s.device, s.weights, s.model->dtype, false);
    if (!s.device.planning()) copy->set_parameters(s.model->rounded());
    return copy;
  }
  if (!s.config.model.lora.adapter_path.empty()) {
    adapters = std::make_unique<Adapters>(s.model_config, s.adapters->spec, s.device, s.weights, s.model->dtype, false);
    if (!s.device.planning()) adapters->set_parameters(s.adapters->rounded());
  }
  auto model = std::make_unique<Model>(*s.model);
  model->adapters = adapters.get();
  return model;
}

Tensor alloc_sampler_states(Session& s) {
  const Config& c = s.config;
  if (!keeps_sampler_states(c)) return {};
  const auto ranks = static_cast<int64_t>(s.device.comm.ranks());
  const int64_t prompts = (c.data.train_batch_size + ranks - 1) / ranks;
  const int64_t rows = prompts * c.rollout.n * c.data.max_response_length;
  if (rows > std::numeric_limits<int32_t>::max())
    fail("data.train_batch_size * rollout.n responses of data.max_response_length are ", rows,
         " tokens, too many to keep the sampler's hidden states of");
  return s.states.alloc("sampler hidden states", s.model->dtype, {rows, s.model_config.hidden});
}

// Returns the responses as a verifier sees them: behind their prefixes, without log-probs.
std::vector<Completion> whole_responses(std::span<const Request> requests, std::span<const Completion> completions) {
  std::vector<Completion> whole;
  for (const Completion& c : completions) {
    whole.push_back({c.request, c.sample, requests[c.request].prefix, {}, c.finish});
    whole.back().tokens.insert(whole.back().tokens.end(), c.tokens.begin(), c.tokens.end());
  }
  return whole;
}

}  // namespace

GrpoTraining::GrpoTraining(Session& s)
    : Training(s, true),
      reference_(needs_reference(s.config) ? make_reference(s, reference_adapters_) : nullptr),
      sampler_states_(alloc_sampler_states(s)),
      grpo_(keys(), engine(),
            {.prompts = [this] { return next_prompts(); },
             .scores = [this](auto requests, auto completions) { return scores(requests, completions); },
             .progress =
                 [this](const char* stage, int64_t done, int64_t all) {
                   if (progress) progress(stage, done, all);
                 },
             .cache = config_.algorithm.rpo.enable ? &cache_ : nullptr,
             .rows = [this] { return rows_; }}) {
  if (s.train && config_.data.task == "jsonl" && config_.data.reward.empty())
    fail("data.reward is empty: training on the rewards of data.task = \"jsonl\" needs one");
  const RpoKeys& rpo = config_.algorithm.rpo;
  if (s.train && rpo.enable && !rpo.cache_file.empty()) cache_ = read_cache_file(rpo.cache_file, s);
}

FileSums GrpoTraining::save_files(const std::string& folder) const {
  if (!config_.algorithm.rpo.enable) return {};
  return {{prefix_cache_name, write_prefix_cache(cat(folder, "/", prefix_cache_name), cache_)}};
}

void GrpoTraining::load_files(const std::string& folder) {
  if (config_.algorithm.rpo.enable) cache_ = read_prefix_cache(cat(folder, "/", prefix_cache_name), session_);
}

GrpoKeys GrpoTraining::keys() const {
  const Config& c = config_;
  return {.algorithm = c.algorithm,
          .reward_model = c.reward_model,
          .actor = c.actor,
          .learner = c.learner,
          .distill = c.distill,
          .kv = c.rollout.kv,
          .temperature = static_cast<float>(c.rollout.temperature),
          .truncation = truncation_of(c.rollout),
          .eos = session_.eos,
          .stop = session_.stop,
          .max_response_length = c.data.max_response_length,
          .total_training_steps = c.trainer.total_training_steps,
          .seed = static_cast<uint64_t>(c.trainer.seed),
          .skip_nonfinite = c.trainer.skip_nonfinite,
          .exact = exact_rollout(c),
          .full = c.exact.full,
          .checks = checks_exact(c)};
}

GrpoEngine GrpoTraining::engine() {
  return {.model = *session_.model,
          .reference = reference_.get(),
          .rollout = *rollout_,
          .learner = learner_,
          .student = student_.get(),
          .activations = session_.activations,
          .options = session_.learner_options(),
          .sampler_states = sampler_states_};
}

std::vector<Request> GrpoTraining::next_prompts() {
  std::vector<Request> requests;
  problems_.clear();
  rows_.clear();
  for (int64_t i = 0; i < config_.data.train_batch_size; i++) {
    const auto [epoch, row] = prompts_.next();
    problems_.push_back(session_.train->problem(row));
    rows_.push_back({row, sequence_uid(static_cast<uint64_t>(epoch), static_cast<uint64_t>(row), 1, 0)});
    requests.push_back(
        {session_.encode_prompt(problems_.back()), {}, static_cast<int>(config_.data.max_response_length)});
    for (int64_t k = 0; k < config_.rollout.n; k++)
      requests.back().uids.push_back(
          sequence_uid(static_cast<uint64_t>(epoch), static_cast<uint64_t>(row), 0, static_cast<uint64_t>(k)));
  }
  return requests;
}

std::vector<double> GrpoTraining::scores(std::span<const Request> requests, std::span<const Completion> completions) {
  const bool prefixed = config_.algorithm.rpo.enable;
  const std::vector<Completion> whole = prefixed ? whole_responses(requests, completions) : std::vector<Completion>();
  std::vector<Reward> rewards = session_.rewards(*session_.train, problems_, prefixed ? whole : completions);
  std::vector<double> scores;
  for (size_t i = 0; i < completions.size(); i++) {
    const Completion& c = completions[i];
    const uint64_t uid = requests[c.request].uids[c.sample];
    certificate_.add(uid, c.logprobs);
    record_.add_response(uid, c.tokens, c.logprobs);
    const Problem& problem = problems_[c.request];
    grades_[uid] = {std::move(rewards[i].extracted), problem.answer.value_or(""), problem_text(problem)};
    scores.push_back(rewards[i].score);
  }
  for (const Request& r : requests) record_.add_prompt(r);
  record_.scores.insert(record_.scores.end(), scores.begin(), scores.end());
  return scores;
}

Metrics GrpoTraining::step() {
  begin_step();
  grades_.clear();
  certificate_ = {};
  Metrics metrics;
  grpo_.step(step_, metrics, drawn_);
  certificate_.write(metrics);
  record_.set_advantages(grpo_.samples());
  if (const RewardCommand* command = session_.reward_command.get()) {
    metrics.set("reward/restarts",
                static_cast<double>(session_.device.comm.sum(command->restarts() - counted_restarts_)));
    counted_restarts_ = command->restarts();
  }
  std::vector<std::string> phases = {"rollout", "learner", "old_log_prob", "ref"};
  if (student_) phases.push_back("distill");
  for (const std::string& phase : phases) metrics.set("flops/" + phase, static_cast<double>(session_.flops(phase)));
  end_step(metrics);
  return metrics;
}

void GrpoTraining::worst_case_step() {
  step_++;
  const int64_t all = config_.data.train_batch_size, period = plan_period(), few = all % period + period;
  session_.ledger.clear();
  if (!session_.device.planning() || config_.distill.enable || config_.actor.token_subset != TokenSubset::none ||
      few + period >= all)
    return worst_case_step(all, 0);
  worst_case_step(few, few);
  const Ledger before = std::exchange(session_.ledger, {});
  worst_case_step(all, few + period);
  auto rollout = session_.ledger.phases.extract("rollout");  // whole already
  repeat(session_.ledger, before, (all - few - period) / period);
  session_.ledger.phases.insert(std::move(rollout));
}

// So many groups more, and the learner does so much more: whole micro-batches of every shard, and whole updates.
int64_t GrpoTraining::plan_period() const {
  const Config& c = config_;
  const int64_t response = c.data.max_response_length, suffix = longest_suffix(c.algorithm.rpo, response);
  int64_t period = std::max<int64_t>(c.actor.ppo_mini_batch_size, 1);
  for (const int64_t members : {c.rollout.n, kept_members(c)})
    for (const int64_t own : {response, suffix}) {  // the prefix of RPO is of the group, or of its members
      const int64_t rows = c.data.max_prompt_length + (response - own) + members * (own - 1);
      period = std::lcm(period, c.learner.shards * std::max<int64_t>(c.actor.ppo_max_token_len / rows, 1));
    }
  return period;
}

void GrpoTraining::worst_case_step(int64_t groups, int64_t planned) {
  GrpoKeys longest = keys();
  longest.eos.clear();
  longest.stop = {};
  longest.total_training_steps = std::max(longest.total_training_steps, step_);  // a plan may not know them
  longest.algorithm.adv_filter_threshold = 0;
  longest.algorithm.filter_groups.enable = false;
  const auto prompts = [this, groups] {
    const std::vector<int32_t> prompt(config_.data.max_prompt_length, session_.eos[0]);
    const int64_t response = config_.data.max_response_length;
    // RPO: the longest suffix.
    const int64_t sampled = longest_suffix(config_.algorithm.rpo, response);
    const std::vector<int32_t> prefix(response - sampled, session_.eos[0]);
    std::vector<Request> requests;
    for (int64_t i = 0; i < groups; i++) {
      requests.push_back({prompt, {}, static_cast<int>(sampled), prefix});
      for (int64_t k = 0; k < config_.rollout.n; k++)
        requests.back().uids.push_back(sequence_uid(0, static_cast<uint64_t>(i), 0, static_cast<uint64_t>(k)));
    }
    return requests;
  };
  const auto scores = [](auto, std::span<const Completion> completions) {
    std::vector<double> scores;
    for (const Completion& c : completions) scores.push_back(c.sample % 2);
    return scores;
  };
  Metrics metrics;
  Grpo(longest, engine(), {.prompts = prompts, .scores = scores, .progress = {}, .planned = planned})
      .step(step_, metrics);
}

void GrpoTraining::largest_batches() {
  Arena& arena = session_.activations;
  const RolloutLimits rollout = session_.rollout_limits();
  Rollout::plan(session_.sampler(), rollout, session_.rollout_scratch(),
                {.hidden = sampler_states_, .hashes = config_.exact.full, .kept_ids = kept_ids(config_)});
  const int64_t sampled = config_.rollout.n, kept = kept_members(config_);
  BatchLimits limits = batch_limits(kept);
  if (shares_prefixes(config_)) {  // one may take all of a response but a token
    limits.sequence = limits.prefix + limits.tokens;
    limits.prefix = limits.sequence - 1;
  }
  if (config_.learner.attention == LearnerAttention::replay && config_.rollout.kv.evicts()) {
    const KvResidency residency(rollout.kv, session_.model_config.layers);
    limits.interval = std::max<int64_t>(config_.rollout.kv.evict.buffer, 1);
    // No layer holds more than the first, whose budget is the largest (PyramidKV).
    limits.slots = std::max(limits.prefix, residency.peak(0, limits.prefix, limits.tokens));
  }
  LossSpec spec = loss_spec(config_.actor, config_.rollout.temperature);
  if (sampler_states_) spec.centring = centring(config_.algorithm.rollout_correction);
  BatchLimits trained = limits;  // of the tokens that go through the forward
  if (config_.actor.token_subset == TokenSubset::det && config_.learner.attention != LearnerAttention::replay)
    trained.tokens = det_plan(limits.tokens, config_.actor.det_fraction).length;
  learner_.plan(trained, spec,
                {is_exact(spec.kl) ? reference_.get() : nullptr, spec.centring.on ? sampler_states_ : Tensor{}});
  if (student_) {
    const LossSpec distill = student_loss_spec(config_.actor, config_.distill, config_.rollout.temperature);
    student_->plan(trained, distill, {is_exact(distill.kl) ? session_.model.get() : nullptr});
  }
  const SamplerStates states{sampler_states_};
  if (config_.algorithm.oversample.by == OversampleBy::acceptance) limits.members = sampled;
  Learner::plan_logprobs(*session_.model, arena, limits, session_.learner_options(),
                         sampler_states_ ? &states : nullptr);
}

std::vector<SampleText> GrpoTraining::texts() const {
  std::vector<SampleText> texts;
  for (const Trajectory& s : samples()) {
    const Grade& grade = grades_.at(s.uid);
    std::vector<int32_t> response = s.prefix;
    response.insert(response.end(), s.tokens.begin(), s.tokens.end());
    texts.push_back({.sample = s,
                     .problem = grade.problem.empty() ? session_.tokenizer->decode(s.prompt) : grade.problem,
                     .prompt = session_.tokenizer->decode(s.prompt),
                     .response = session_.tokenizer->decode(response),
                     .extracted = grade.extracted,
                     .answer = grade.answer});
  }
  return texts;
}

}  // namespace pare
