// Small models and batches that tests share.
#pragma once
#include <cmath>
#include <memory>

#include "base/rng.h"
#include "model/learner.h"
#include "ops/data.h"
#include "tests/weights.h"

namespace pare::test {

// Odd on purpose: nothing divides anything that a kernel would like.
inline ModelConfig tiny_config(const std::string& type, bool tied) {
  ModelConfig c;
  c.model_type = type;
  c.hidden = 36;
  c.layers = 2;
  c.heads = 6;
  c.kv_heads = 2;
  c.head_dim = type == "qwen3" ? 10 : 6;
  c.ffn = 50;
  c.vocab = 37;
  c.max_position = 160;
  c.qkv_bias = type == "qwen2";
  c.qk_norm = type == "qwen3";
  c.tied = tied;
  if (type == "llama") c.rope_scaling = RopeLlama3{8, 1, 4, 32};
  return c;
}

// Norms around 1 and biases that are not 0, so that every gradient matters.
inline std::vector<float> tiny_parameters(const ModelConfig& c, uint64_t seed) {
  std::vector<float> p = all_parameters(c, init_parameters(c, seed, Init::fan_in));
  Rng rng(rng_key(seed, RngStream::test, 0));
  for (const Parameter& t : parameters(c))
    if (t.shape.size() == 1)
      for (int64_t i = 0; i < t.size; i++) p[t.offset + i] += 0.3f * static_cast<float>(rng.normal());
  return p;
}

// Bytes of an arena that holds whatever a test asks for: of the host only what is touched is taken.
inline size_t roomy(const Table& table) { return size_t{1} << (table.staging ? 21 : 32); }

// A model with all its memory.
struct World {
  World(const Table& table, const ModelConfig& config, DType dtype = DType::f32)
      : device(table),
        weights("weights", *table.memory, roomy(table)),
        gradients("gradients", *table.memory, roomy(table)),
        optimizer("optimizer", *table.memory, roomy(table)),
        activations("activations", *table.memory, roomy(table)),
        model(config, device, weights, dtype, true) {}

  Device device;
  Arena weights, gradients, optimizer, activations;
  Model model;
};

// Parameters that are no floats, to those in f64 on a table of the host.
inline void upload_parameters(Parameters& parameters, std::vector<double>& values) {
  for (const ParameterBlock& b : parameters.blocks) {
    double* const from = values.data() + b.offset;
    if (b.vector)
      parameters.device.upload({b.vector, from});
    else
      parameters.device.pack_weight(
          {b.weight, make_tensor(from, DType::f64, {b.weight.outputs(), b.weight.inputs()}), 0});
  }
}

inline std::vector<int32_t> random_ids(Rng& rng, int64_t n, int64_t vocab) {
  std::vector<int32_t> ids(n);
  for (auto& id : ids) id = static_cast<int32_t>(rng.below(static_cast<uint32_t>(vocab)));
  return ids;
}

// Groups of mixed lengths: shared prefixes, a single member, an empty prefix, one-token members.
inline std::vector<Group> random_groups(const ModelConfig& c, uint64_t seed) {
  Rng rng(rng_key(seed, RngStream::test, 1));
  std::vector<Group> groups;
  const std::vector<std::pair<int, std::vector<int>>> shape = {
      {17, {5, 1, 30, 16}}, {1, {9, 2}}, {23, {41}}, {0, {12}}, {66, {3, 70, 1, 17, 4}}, {5, {1, 1}}};
  for (const auto& [prefix, members] : shape) {
    Group g{random_ids(rng, prefix, c.vocab), {}};
    for (int n : members) g.members.push_back({random_ids(rng, n, c.vocab)});
    groups.push_back(std::move(g));
  }
  return groups;
}

// Loss terms of them, with one advantage for each member.
inline TokenTerms random_terms(const std::vector<Group>& groups) {
  Rng rng(rng_key(1, RngStream::test, 6));
  const std::vector<int64_t> offsets = loss_row_offsets(groups);
  TokenTerms terms(offsets.back());
  for (size_t m = 0; m + 1 < offsets.size(); m++) {
    const double advantage = rng.normal();
    for (int64_t r = offsets[m]; r < offsets[m + 1]; r++) {
      terms.weight[r] = 0.01 * (1 + rng.uniform());
      terms.kl_weight[r] = 0.01;
      terms.advantage[r] = advantage;
    }
  }
  return terms;
}

inline double relative_l2(const std::vector<double>& a, const std::vector<double>& b) {
  double diff = 0, norm = 0;
  for (size_t i = 0; i < a.size(); i++) {
    diff += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(diff / norm);
}

// d f() / d x by central differences; f reads x.
template <class F>
double slope(double& x, F f, double h = 1e-5) {
  const double keep = x;
  x = keep + h;
  const double up = f();
  x = keep - h;
  const double down = f();
  x = keep;
  return (up - down) / (2 * h);
}

}  // namespace pare::test
