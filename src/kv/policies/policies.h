// The policies, one file each.
#pragma once
#include "kv/policy.h"

namespace pare {

struct PolicyArgs {
  const KvSpec& spec;
  const ModelConfig& config;
  KvCache& cache;
  Arena& kv;
};

std::unique_ptr<KvPolicy> make_streaming_llm(const PolicyArgs&);
std::unique_ptr<KvPolicy> make_h2o(const PolicyArgs&);
std::unique_ptr<KvPolicy> make_tova(const PolicyArgs&);
std::unique_ptr<KvPolicy> make_snapkv(const PolicyArgs&);  // also PyramidKV, which differs in its budgets only
std::unique_ptr<KvPolicy> make_rkv(const PolicyArgs&);
std::unique_ptr<KvPolicy> make_block_sparse(const PolicyArgs&);  // Quest and block top-k

}  // namespace pare
