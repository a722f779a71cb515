#include "rl/evaluate.h"

namespace pare {

Metrics evaluate(const Session& session, Rollout& rollout, int64_t step,
                 const std::function<void(const RolloutStats&)>& progress) {
  const Config& config = session.config;
  const Task& task = *session.val;
  const ValKeys& v = config.rollout.val_kwargs;
  const Phase phase(session.model->device, "val");
  std::vector<Request> requests;
  std::vector<Problem> problems;
  for (int64_t row = 0; row < task.size(); row++) {
    problems.push_back(task.problem(row));
    requests.push_back({session.encode_prompt(problems.back()), {}, static_cast<int>(config.data.max_response_length)});
    for (int64_t k = 0; k < v.n; k++)
      requests.back().uids.push_back(sequence_uid(0, static_cast<uint64_t>(row), 0, static_cast<uint64_t>(k)));
  }
  const Sampling sampling{
      .temperature = static_cast<float>(v.temperature),
      .top_k = static_cast<int32_t>(v.top_k),
      .top_p = static_cast<float>(v.top_p),
      .key = rng_key(static_cast<uint64_t>(config.trainer.seed), RngStream::eval, static_cast<uint64_t>(step)),
      .eos = session.eos};
  Summary score, length;
  Metrics metrics;
  {
    const Timer timer(metrics, "timing_s/testing");
    for (const Completion& c : rollout.generate(requests, sampling, progress)) {
      score.add(session.reward(task, problems[c.request], c).score);
      length.add(static_cast<double>(c.tokens.size()));
    }
  }
  metrics.set(cat("val-core/", config.data.task, "/reward/mean@", v.n), score.mean());
  metrics.set(cat("val-aux/", config.data.task, "/response_length/mean"), length.mean());
  return metrics;
}

}  // namespace pare
