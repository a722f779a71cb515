// What the learner needs to attend to what the sampler attended to (learner.attention = replay).
#pragma once
#include <map>

#include "model/learner.h"
#include "rollout/rollout.h"

namespace pare {

enum class LearnerAttention { dense, replay };

struct LearnerKeys {
  LearnerAttention attention = LearnerAttention::dense;
  int64_t slots = 1;
  Reduce reduce = Reduce::ordered;
  bool operator==(const LearnerKeys&) const = default;
};

// The events of the cache during one generate(), by sequence.
class TraceRecorder {
 public:
  // For Sampling::trace; empty where there is nothing to record.  The recorder outlives its use.
  std::function<void(const PagedRun&, KvTrace)> recorder(const LearnerKeys& learner, const KvSpec& kv);
  // Those of one sample, and of its prompt; null if nothing was recorded.
  std::shared_ptr<const KvTraces> take(const Request& request, size_t sample);

 private:
  bool records_ = false;
  std::map<uint64_t, KvTraces> prompts_, samples_;  // by uid; those of a prompt by that of its first sample
};

// What a token reads by a block-sparse method.
BlockReads block_reads(const KvSpec& kv);
// Of such methods: what the learner chooses again.  None where it reads everything.
std::optional<BlockReads> replayed_blocks(const LearnerKeys& learner, const KvSpec& kv);

}  // namespace pare
