#include "rl/replay.h"

namespace pare {

std::function<void(const PagedRun&, KvTrace)> TraceRecorder::recorder(const LearnerKeys& learner, const KvSpec& kv) {
  records_ = learner.attention == LearnerAttention::replay && kv.evicts();
  if (!records_) return {};
  return [this](const PagedRun& run, KvTrace trace) {
    (run.decodes() ? samples_ : prompts_)[run.uid].push_back(std::move(trace));
  };
}

std::shared_ptr<const KvTraces> TraceRecorder::take(const Request& request, size_t sample) {
  if (!records_) return nullptr;
  KvTraces traces;
  if (const auto p = prompts_.find(request.uids[0]); p != prompts_.end()) traces = p->second;
  if (const auto s = samples_.extract(request.uids[sample]); !s.empty())
    std::move(s.mapped().begin(), s.mapped().end(), std::back_inserter(traces));
  return std::make_shared<const KvTraces>(std::move(traces));
}

BlockReads block_reads(const KvSpec& kv) {
  return {.kind = summary_kind(kv),
          .block = static_cast<int32_t>(kv.blocks.size),
          .first_blocks = static_cast<int32_t>(kv.blocks.first),
          .last_blocks = static_cast<int32_t>(kv.blocks.last),
          .dense_layers = kv.blocks.dense_layers,
          .budget = BlockBudget(kv)};
}

std::optional<BlockReads> replayed_blocks(const LearnerKeys& learner, const KvSpec& kv) {
  if (learner.attention != LearnerAttention::replay || !kv.sparse_reads()) return std::nullopt;
  return block_reads(kv);
}

}  // namespace pare
