#include "kv/policy.h"

#include "kv/policies/policies.h"

namespace pare {

std::unique_ptr<KvPolicy> make_kv_policy(const KvSpec& spec, const ModelConfig& config, KvCache& cache, Arena& kv) {
  const PolicyArgs args{spec, config, cache, kv};
  switch (spec.method) {
    case KvMethod::dense:
      return nullptr;
    case KvMethod::streaming_llm:
      return make_streaming_llm(args);
    case KvMethod::h2o:
      return make_h2o(args);
    case KvMethod::tova:
      return make_tova(args);
    case KvMethod::snapkv:
    case KvMethod::pyramidkv:
      return make_snapkv(args);
    case KvMethod::rkv:
      return make_rkv(args);
    case KvMethod::quest:
    case KvMethod::block_topk:
      return make_block_sparse(args);
  }
  return nullptr;
}

}  // namespace pare
