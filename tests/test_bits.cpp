// One short run, the same bits wherever it is built and run.
#include "cpu/cpu.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

struct Fnv1a {
  uint64_t hash = 0xcbf29ce484222325ull;
  template <class T>
  void add(const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  }
};

// Tokens and log-probs of every rollout, and the parameters at the end.
uint64_t hash_of_a_run(const std::string& type, const std::vector<std::string>& keys) {
  TrainingRun run(tiny_run(type, keys));
  Fnv1a hash;
  for (int i = 0; i < 3; i++) {
    run.step();
    for (const Trajectory& s : run.trainer->samples()) {
      hash.add(s.tokens);
      hash.add(s.logprob);
    }
  }
  hash.add(run.parameters());
  return hash.hash;
}

// Breaks if a compiler, an optimisation level or an instruction set changes one rounding: a contracted or reassociated
// sum, a kernel with its own order.  The libraries' sine, cosine, logarithm and power are part of the run (RoPE,
// initial weights, AdamW); their last bits have been the same on every x86-64 system that this ran on.  A change that
// is meant to change the arithmetic puts the new numbers here.
TEST(Bits, AreTheSameEverywhere) {
  const std::string best = cpu_isa();
  int tried = 0;
  for (const char* isa : {"avx512", "avx2", "neon", "generic"}) {
    try {
      set_cpu_isa(isa);
    } catch (const Error&) {  // this machine lacks it
      continue;
    }
    tried++;
    EXPECT_EQ(hash_of_a_run("qwen3", {}), 12846460818596764563u) << isa;
    EXPECT_EQ(hash_of_a_run("qwen2", {"actor.ppo_epochs=2", "actor.ppo_mini_batch_size=3", "actor.use_kl_loss=true",
                                      "actor.token_subset=rpc", "actor.rpc_min_tokens=5", "rollout.temperature=0.9"}),
              12131692638952926182u)
        << isa;
  }
  set_cpu_isa(best.c_str());
  EXPECT_GT(tried, 0);
}

}  // namespace
}  // namespace pare::test
