// A model with a rollout of its own, requests of every kind, and what it means that completions are the same.
#pragma once
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "rollout/rollout.h"
#include "tests/tiny.h"

namespace pare::test {

struct Generator {
  Generator(const Table& table, const ModelConfig& c, const RolloutLimits& limits, DType dtype = DType::f32)
      : device(table),
        weights("weights", *table.memory, roomy(table)),
        kv("kv", *table.memory, roomy(table)),
        scratch("scratch", *table.memory, roomy(table)),
        model(c, device, weights, dtype, false),
        rollout(model, limits, kv, scratch) {
    model.set_parameters(tiny_parameters(c, 5));
    device.ledger = &ledger;
  }
  Device device;
  Ledger ledger;
  Arena weights, kv, scratch;
  Model model;
  Rollout rollout;
};

inline ModelConfig config() { return tiny_config("qwen3", false); }
const RolloutLimits kRoomy{.max_sequences = 40, .max_batched_tokens = 400, .max_context = 160};

const RolloutLimits kAlone{.max_sequences = 1, .max_batched_tokens = 400, .max_context = 160};

// Prompts around page borders, one token, a group of one, responses of one token.
inline std::vector<Request> mixed_requests() {
  Rng rng(rng_key(3, RngStream::test, 2));
  const std::vector<std::array<int, 3>> shape = {{5, 3, 9},   {16, 1, 40}, {33, 4, 1},  {1, 2, 60},
                                                 {17, 1, 17}, {40, 5, 12}, {15, 2, 18}, {32, 3, 33}};
  std::vector<Request> requests;
  for (const auto& [prompt, samples, max_new] : shape) {
    Request r{random_ids(rng, prompt, config().vocab), {}, max_new};
    for (int s = 0; s < samples; s++) r.uids.push_back(sequence_uid(1, requests.size(), 0, s));
    requests.push_back(r);
  }
  return requests;
}

inline Sampling mixed_sampling() {
  return {.temperature = 0.9f, .key = rng_key(1, RngStream::sample, 4), .eos = {3, 11}};
}

inline void expect_same(const Completion& a, const Completion& b, const std::string& what) {
  EXPECT_EQ(a.tokens, b.tokens) << what;
  ASSERT_EQ(a.logprobs.size(), b.logprobs.size()) << what;
  EXPECT_EQ(0, std::memcmp(a.logprobs.data(), b.logprobs.data(), a.logprobs.size() * sizeof(float))) << what;
  EXPECT_EQ(a.finish, b.finish) << what;
}
inline void expect_same(const std::vector<Completion>& a, const std::vector<Completion>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); i++) {
    EXPECT_EQ(a[i].request, b[i].request);
    EXPECT_EQ(a[i].sample, b[i].sample);
    expect_same(a[i], b[i], cat(what, ", request ", a[i].request, ", sample ", a[i].sample));
  }
}

// Every sample as a request of its own, alone in the machine, and its prompt in one piece.
inline std::vector<Completion> one_by_one(const RolloutLimits& limits, const std::vector<Request>& requests) {
  Generator g(table_cpu, config(), limits);
  std::vector<Completion> all;
  for (size_t r = 0; r < requests.size(); r++)
    for (size_t s = 0; s < requests[r].uids.size(); s++) {
      all.push_back(g.rollout.generate({{requests[r].prompt, {requests[r].uids[s]}, requests[r].max_new_tokens}},
                                       mixed_sampling())[0]);
      all.back().request = static_cast<int>(r);
      all.back().sample = static_cast<int>(s);
    }
  return all;
}

}  // namespace pare::test
