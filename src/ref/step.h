// One GRPO step of a one-layer model in a single file: where to begin reading.  The engine does the same with a cache,
// many layers, fast kernels and every method; the tests `Step.*` compare the two, bit for bit.  In numbers: README.md.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace pare::ref {

// A matrix in row-major order: m[i][j].
struct Matrix {
  Matrix(int64_t rows, int64_t columns) : rows(rows), columns(columns), data(rows * columns) {}
  double* operator[](int64_t i) { return data.data() + i * columns; }
  const double* operator[](int64_t i) const { return data.data() + i * columns; }
  int64_t rows, columns;
  std::vector<double> data;  // zeros
};

using Parts = std::vector<Matrix*>;

struct StepShape {
  int64_t vocab, width, heads, kv_heads, head_dim, ffn;  // V, C, H, K, D, F
  double rope_theta;
  float rms_eps;
};

// The parameters of a Llama of one layer.  Their gradient has the same shapes.
struct StepWeights {
  explicit StepWeights(const StepShape& shape) : s(shape) {}
  Parts all() { return {&embedding, &input_norm, &qkv, &o, &post_norm, &gate_up, &down, &final_norm, &head}; }
  StepShape s;
  Matrix embedding{s.vocab, s.width};
  Matrix input_norm{1, s.width};
  Matrix qkv{(s.heads + 2 * s.kv_heads) * s.head_dim, s.width};
  Matrix o{s.width, (s.heads * s.head_dim)};
  Matrix post_norm{1, s.width};
  Matrix gate_up{2 * s.ffn, s.width};
  Matrix down{s.width, s.ffn};
  Matrix final_norm{1, s.width};
  Matrix head{s.vocab, s.width};
};

// [DistillSparse] A low-rank adapter of `o`: y = x (W + B A)^T.
struct StepAdapter {
  StepAdapter(const StepShape& s, int64_t rank) : a(rank, s.heads * s.head_dim), b(s.width, rank) {}
  Parts all() { return {&a, &b}; }
  Matrix a, b;
};

using Tokens = std::vector<int32_t>;
struct StepOptions {
  Tokens prompt;
  std::vector<uint64_t> uids;   // one for each response: names its random draws
  uint64_t seed = 1, step = 1;  // name the draws of a run, and of a step
  int64_t max_tokens = 0;       // of a response
  int32_t eos = 0;
  std::function<double(const Tokens& response)> reward;
  int updates = 1;  // on the same responses (PPO's epochs)
  double adv_eps = 1e-6;
  float clip = 0.2f;
  float lr = 1e-3f, beta1 = 0.9f, beta2 = 0.999f, adam_eps = 1e-8f, weight_decay = 0.01f, max_norm = 1;

  // The papers' switches; 0 is off.
  double dash_threshold = 0;  // [DASH] the smallest |advantage| that is trained on
  int64_t nat_tokens = 0;     // [NAT] trains on a random beginning of a response, of at least so many tokens
  Tokens rpo_earlier = {};    // [RPO] an earlier response to the prompt, whose beginning the responses continue
  int64_t rpo_max_cut = 0;    // [RPO] the most tokens that are cut from its end, where one is given
  int64_t blocks = 0;         // [Sparse-RL] blocks of four tokens that a sampled token attends to; 0: everything
  double veto = 1e-4;         // [Sparse-RL] the least xi that a response is trained on with
  int64_t rank = 0;           // [DistillSparse] of the sampler's adapter, if it has one
  float distill_lambda = 0;   // [DistillSparse] the weight of its KL to the policy
};

// A response on its way through the stages of a step.
struct StepResponse {
  uint64_t uid = 0;
  Tokens tokens;                     // sampled
  std::vector<float> sampled;        // their log-probs under the policy that sampled them
  double reward = 0;                 // of the whole response
  double advantage = 0;              // the same for every token
  std::vector<double> weight;        // of each token's loss in the loss of the step; empty: not trained on
  std::vector<float> old;            // log-probs under the policy before the step
  std::vector<double> teacher = {};  // [DistillSparse] log-probs that a KL compares with
};

// An update of the parameters, from the loss to the gradient.
struct StepUpdate {
  StepUpdate(const StepShape& s, int64_t rank) : gradient(s), adapter(s, rank) {}
  std::vector<std::vector<double>> logprobs;  // of the tokens of each response, before the update
  double loss = 0, kl = 0;                    // the KL before its weight
  int64_t clipped = 0;                        // tokens
  StepWeights gradient;
  StepAdapter adapter;  // its gradient
  double norm = 0;      // of the gradient, before clipping
};

struct StepResult {
  Tokens prefix;  // [RPO] the beginning of all responses
  std::vector<StepResponse> responses;
  std::vector<StepUpdate> updates, sampler_updates;
};

// The first step of a run: Adam's moments begin at zero.  Changes `weights`, and the sampler's adapter, if it has one.
StepResult grpo_step(const StepOptions& options, StepWeights& weights, StepAdapter* adapter = nullptr);

// The loss of these responses under other weights: the function whose gradient the first update takes.
double step_loss(const StepOptions& options, const StepWeights& weights, const StepResult& step);

}  // namespace pare::ref
