// Traces that let the learner attend to the slots that the sampler attended to (learner.attention = replay).
#pragma once
#include <map>

#include "model/learner.h"
#include "rollout/rollout.h"

namespace pare {

enum class LearnerAttention { dense, replay };

struct LearnerKeys {
  LearnerAttention attention = LearnerAttention::dense;
  int64_t shards = 1;
  bool operator==(const LearnerKeys&) const = default;
};

// The compressions of the cache during one generate(), by sequence.
class TraceRecorder {
 public:
  // For Sampling::trace; empty where there is nothing to record.  The recorder outlives its use.
  std::function<void(const PagedRun&, KvTrace)> recorder(const LearnerKeys& learner, const KvSpec& kv);
  // Returns the traces of one sample and its prompt; null if none were recorded.
  std::shared_ptr<const KvTraces> take(const Request& request, size_t sample);

 private:
  bool records_ = false;
  std::map<uint64_t, KvTraces> prompts_, samples_;  // by uid; those of a prompt by that of its first sample
};

// Returns the blocks that a token reads under a block-sparse method.
BlockReads block_reads(const KvSpec& kv);
// Returns the selection that the learner repeats under such a method; nullopt if it reads everything.
std::optional<BlockReads> replayed_blocks(const LearnerKeys& learner, const KvSpec& kv);

}  // namespace pare
