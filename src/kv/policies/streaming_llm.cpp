// StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention sinks and a sliding window.
#include "kv/policies/policies.h"

namespace pare {

namespace {

class StreamingLlm : public KvPolicy {
 public:
  explicit StreamingLlm(const KvSpec& spec) : sinks_(spec.streaming_llm.sinks) {}
  int64_t forced_first() const override { return sinks_; }
  int64_t forced_last(int64_t budget) const override { return budget - sinks_; }

 private:
  const int64_t sinks_;
};

}  // namespace

std::unique_ptr<KvPolicy> make_streaming_llm(const PolicyArgs& a) { return std::make_unique<StreamingLlm>(a.spec); }

}  // namespace pare
