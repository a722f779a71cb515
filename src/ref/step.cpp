// From the top: the step, its stages 1 to 7 in order, the model, its layers; each with its backward.
#include "ref/step.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "base/rng.h"

namespace pare::ref {
namespace {

// The model that predicts tokens, and how it attends.
struct Policy {
  const StepWeights& w;
  int64_t blocks = 0;                    // StepOptions::blocks
  const StepAdapter* adapter = nullptr;  // of w.o, or none
  const StepShape& s = w.s;
};

StepResponse sample(const StepOptions& o, const Policy& p, const Tokens& parent, uint64_t uid);
void set_advantages(const StepOptions& o, std::vector<StepResponse>& group);
void set_weights(const StepOptions& o, std::vector<StepResponse>& group);
void correct(const StepOptions& o, const Policy& p, const Tokens& parent, std::vector<StepResponse>& group);
StepUpdate learn(const StepOptions& o, const Policy& p, const Tokens& parent, const std::vector<StepResponse>& group,
                 bool first);
double adamw(const StepOptions& o, int t, const Parts& gradient, const Parts& m, const Parts& v, const Parts& w);

Tokens joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

// ---- the step

StepResult grpo_step(const StepOptions& o, StepWeights& w, StepAdapter* adapter) {
  const Policy policy{w}, sampler{w, o.blocks, adapter};
  StepResult r;
  // [RPO] The responses continue an earlier one, of which a random number of tokens is cut.  The rest joins the prompt:
  // it is computed once and not trained on.
  if (const int64_t length = std::ssize(o.rpo_earlier); length > 0) {
    const int64_t cut = Rng(rng_key(o.seed, RngStream::rpo_cut, o.step), o.uids[0]).below(o.rpo_max_cut + 1);
    r.prefix.assign(o.rpo_earlier.begin(), o.rpo_earlier.end() - std::clamp<int64_t>(cut, 1, length));
  }
  const Tokens parent = joined(o.prompt, r.prefix);
  for (const uint64_t uid : o.uids) {
    r.responses.push_back(sample(o, sampler, parent, uid));                             // 1. Rollout
    r.responses.back().reward = o.reward(joined(r.prefix, r.responses.back().tokens));  // 2. Reward
  }
  set_advantages(o, r.responses);                             // 3. Advantages
  set_weights(o, r.responses);                                // 4. Weights of tokens
  std::vector<StepResponse> own = r.responses;                // as the sampler sees them
  if (o.blocks > 0) correct(o, policy, parent, r.responses);  // [Sparse-RL]

  StepWeights m(w.s), v(w.s);
  StepAdapter adapter_m(w.s, o.rank), adapter_v(w.s, o.rank);
  for (int t = 1; t <= o.updates; t++) {
    StepUpdate u = learn(o, policy, parent, r.responses, t == 1);  // 5. Forward and loss, 6. Backward
    // [DistillSparse] The sampler learns too: its adapter, by the policy loss of all responses, which for it are
    // on-policy, and a KL to the policy, its teacher.
    if (adapter) {
      for (size_t i = 0; i < own.size(); i++) {
        own[i].teacher.assign(r.responses[i].old.begin(), r.responses[i].old.end());
        if (!u.logprobs[i].empty()) own[i].teacher = u.logprobs[i];
      }
      StepUpdate b = learn(o, sampler, parent, own, false);
      b.norm = adamw(o, t, b.adapter.all(), adapter_m.all(), adapter_v.all(), adapter->all());
      r.sampler_updates.push_back(b);
    }
    u.norm = adamw(o, t, u.gradient.all(), m.all(), v.all(), w.all());  // 7. Optimizer
    r.updates.push_back(u);
  }
  return r;
}

double step_loss(const StepOptions& o, const StepWeights& w, const StepResult& step) {
  return learn(o, {w}, joined(o.prompt, step.prefix), step.responses, false).loss;
}

namespace {

// ---- a batch, a pass of the model over it, and the layers

// Tokens as rows, without padding.  A segment is a run of rows that follow one another in a text, after the rows of its
// parent: the responses have their prompt as parent, which is thus computed once for all of them.
struct Segment {
  int64_t row, length, parent_row, parent_length;
  // The row of the token at a position of the text.
  int64_t at(int64_t i) const { return i < parent_length ? parent_row + i : row + i - parent_length; }
};
struct Batch {
  Tokens ids;
  std::vector<Segment> segments;
  std::vector<int64_t> predicted_by;  // of each token of the responses: the row of the token before it
};
struct Activations {
  Batch batch;
  Matrix x{0, 0}, h1{0, 0}, qkv{0, 0}, o{0, 0}, lse{0, 0}, low{0, 0}, x_mid{0, 0}, h2{0, 0}, gate_up{0, 0}, act{0, 0},
      x_out{0, 0}, hidden{0, 0}, logits{0, 0};
};

Batch pack(const Tokens& parent, const std::vector<Tokens>& responses);
Activations forward(const Policy& p, const Batch& batch);
void backward(const Policy& p, const Activations& x, const Matrix& d_logits, StepUpdate& g);
void rope(const Policy& p, const Batch& batch, Matrix& qkv, double sign);
void attention(const Policy& p, Activations& x);
Matrix attention_backward(const Policy& p, const Activations& x, const Matrix& d_o);
double dot(const double* a, const double* b, int64_t n) { return std::inner_product(a, a + n, b, 0.0); }
Matrix linear(const Matrix& x, const Matrix& w);
Matrix linear_backward(const Matrix& dy, const Matrix& x, const Matrix& w, Matrix& dw);
void add(Matrix& x, const Matrix& y);
Matrix norm(const Matrix& x, const Matrix& w, float eps);
void norm_backward(const Matrix& dy, const Matrix& x, const Matrix& w, float eps, Matrix& dw, Matrix& dx);
Matrix swiglu(const Matrix& gate_up);
Matrix swiglu_backward(const Matrix& dy, const Matrix& gate_up);

// ---- the stages

// log p of every token, with p = softmax(logits).
std::vector<double> log_softmax(const double* logits, int64_t vocab) {
  const double max = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; v++) sum += std::exp(logits[v] - max);
  std::vector<double> log_p(logits, logits + vocab);
  for (double& x : log_p) x = x - max - std::log(sum);
  return log_p;
}

// 1. Rollout.  Gumbel-max: the largest of logit + Gumbel noise is a draw from the softmax.  The noise is a function of
// (key, uid, position, token) alone, so a response does not depend on what else is being generated.  Every token
// computes the whole text again here; the engine keeps keys and values (src/kv).
StepResponse sample(const StepOptions& o, const Policy& p, const Tokens& parent, uint64_t uid) {
  const uint64_t key = rng_key(o.seed, RngStream::sample, o.step);
  const int64_t limit = o.max_tokens - (std::ssize(parent) - std::ssize(o.prompt));
  StepResponse r;
  r.uid = uid;
  for (int64_t t = 0; t < limit && (t == 0 || r.tokens.back() != o.eos); t++) {
    r.tokens.push_back(0);  // the token to draw
    const Matrix logits = forward(p, pack(parent, {r.tokens})).logits;
    const auto gumbel = [&](int32_t id) {
      return -std::log(-std::log(double(uniform_open(rng_word(key, uid, t, id)))));
    };
    const auto score = [&](int32_t id) { return logits[t][id] + gumbel(id); };
    int32_t& best = r.tokens.back();
    for (int32_t id = 1; id < p.s.vocab; id++)
      if (score(id) > score(best)) best = id;
    r.sampled.push_back(log_softmax(logits[t], p.s.vocab)[best]);
  }
  r.old = r.sampled;  // unless the sampler is another policy: correct()
  return r;
}

// 2. Reward: a verifier scores the response (StepOptions::reward).
// 3. Advantages: how much better a response was than the others of its prompt, in standard deviations (DeepSeekMath eq.
// 3).  There is no value network: the group is the baseline.
void set_advantages(const StepOptions& o, std::vector<StepResponse>& group) {
  const double n = group.size();
  double mean = 0, squares = 0;
  for (const StepResponse& r : group) mean += r.reward;
  mean /= n;
  for (StepResponse& r : group) {
    r.advantage = r.reward - mean;
    squares += r.advantage * r.advantage;
  }
  for (StepResponse& r : group) r.advantage *= squares == 0 ? 0 : 1 / (std::sqrt(squares / (n - 1)) + o.adv_eps);
}

// 4. Weights: the mean over the tokens of a response, then over responses.  Each counts alike, however long it is.
void set_weights(const StepOptions& o, std::vector<StepResponse>& group) {
  const double n = group.size();
  for (StepResponse& r : group) {
    // [DASH] Responses with a small advantage are left out of the learner's passes.  The denominator counts them.
    if (std::abs(r.advantage) < o.dash_threshold) continue;
    const int64_t length = std::ssize(r.tokens);
    r.weight.assign(length, 1 / (n * length));
    // [NAT] Trains on a random beginning.  A token is weighted by the inverse of its probability to be in it, so the
    // expected gradient is that of all tokens.
    if (o.nat_tokens > 0) {
      const int64_t least = std::min(o.nat_tokens, length), cuts = length - least + 1;
      r.weight.resize(least + Rng(rng_key(o.seed, RngStream::token_plan, o.step), r.uid).below(cuts));
      for (int64_t t = least; t < std::ssize(r.weight); t++) r.weight[t] *= double(cuts) / (length - t);
    }
  }
}

// [Sparse-RL] The sampler is not the policy that is trained: it attends to a part of the tokens.  xi = p / p_sampler of
// a token weights its loss.  Responses with a token that the policy all but excludes are not trained on.
void correct(const StepOptions& o, const Policy& p, const Tokens& parent, std::vector<StepResponse>& group) {
  for (StepResponse& r : group) {
    const Matrix logits = forward(p, pack(parent, {r.tokens})).logits;
    for (int64_t t = 0; t < logits.rows; t++) {
      r.old[t] = log_softmax(logits[t], p.s.vocab)[r.tokens[t]];
      const double log_xi = r.old[t] - r.sampled[t], xi = std::exp(log_xi);
      if (xi < o.veto) r.weight.clear();
      if (t < std::ssize(r.weight)) r.weight[t] *= xi;
    }
  }
}

// 5. Forward and loss.  The batch: the responses without their last tokens, which predict nothing, then the prompt.
Batch pack(const Tokens& parent, const std::vector<Tokens>& responses) {
  const int64_t length = std::ssize(parent);
  int64_t parent_row = 0;
  for (const Tokens& r : responses) parent_row += std::ssize(r) - 1;
  Batch batch;
  for (const Tokens& r : responses) {
    const Segment g{std::ssize(batch.ids), std::ssize(r) - 1, parent_row, length};
    batch.segments.push_back(g);
    batch.ids.insert(batch.ids.end(), r.begin(), r.end() - 1);
    for (int64_t t = 0; t < std::ssize(r); t++) batch.predicted_by.push_back(g.at(length + t - 1));
  }
  batch.segments.push_back({parent_row, length, 0, 0});
  batch.ids.insert(batch.ids.end(), parent.begin(), parent.end());
  return batch;
}

// The loss of a token is -A r, with r = p / p_old: the policy now over the one before the step.  In the first update
// they are the same: r is 1, its gradient that of log p.  Then r moves, and a token whose r has gone up by more than
// `clip` for A > 0, or down for A < 0, has no gradient.
StepUpdate learn(const StepOptions& o, const Policy& p, const Tokens& parent, const std::vector<StepResponse>& group,
                 bool first) {
  std::vector<Tokens> responses;
  for (const StepResponse& r : group)
    if (!r.weight.empty()) responses.emplace_back(r.tokens.begin(), r.tokens.begin() + std::ssize(r.weight));
  const Activations x = forward(p, pack(parent, responses));
  Matrix d_logits(x.logits.rows, p.s.vocab);
  StepUpdate u(p.s, o.rank);
  int64_t n = 0;
  for (const StepResponse& r : group) {
    std::vector<double>& logprobs = u.logprobs.emplace_back();
    for (size_t t = 0; t < r.weight.size(); t++, n++) {
      const std::vector<double> log_p = log_softmax(x.logits[n], p.s.vocab);
      logprobs.push_back(log_p[r.tokens[t]]);
      const double ratio = first ? 1 : std::exp(logprobs[t] - r.old[t]), plain = -r.advantage * ratio;
      const double clip = -r.advantage * std::clamp(ratio, 1.0 - o.clip, 1.0 + o.clip);
      u.loss += r.weight[t] * std::max(plain, clip);
      u.clipped += clip > plain;
      double d_logprob = r.weight[t] * (clip > plain ? 0 : plain);  // d r / d log p = r
      if (!r.teacher.empty()) {                                     // [DistillSparse] its KL, by Schulman's k3
        const double log_ratio = r.teacher[t] - logprobs[t];
        u.kl += r.weight[t] * (std::exp(log_ratio) - log_ratio - 1);
        d_logprob += r.weight[t] * o.distill_lambda * (1 - std::exp(log_ratio));
      }
      // d log p(token) / d logits = onehot(token) - p
      for (int32_t v = 0; v < p.s.vocab; v++) d_logits[n][v] = d_logprob * ((v == r.tokens[t]) - std::exp(log_p[v]));
    }
  }
  backward(p, x, d_logits, u);  // 6. Backward: in the model below
  return u;
}

// 7. AdamW (Loshchilov & Hutter 2019), update t, on the gradient, clipped to a norm.  Returns the norm before clipping.
// Squares are added up sixteen rows at a time, so that the rows may lie on several devices (ops/optimizer.h).
double adamw(const StepOptions& o, int t, const Parts& gradient, const Parts& m, const Parts& v, const Parts& w) {
  double squares = 0;
  for (const Matrix* g : gradient)
    for (int64_t n = 0; n < g->rows; n += 16)
      squares += dot((*g)[n], (*g)[n], std::min<int64_t>(16, g->rows - n) * g->columns);
  const double norm = std::sqrt(squares), clip = std::min(1.0, o.max_norm / norm), beta1 = o.beta1, beta2 = o.beta2;
  const double start1 = 1 / (1 - std::pow(beta1, t)), start2 = 1 / (1 - std::pow(beta2, t));  // moments began at zero
  for (size_t i = 0; i < w.size(); i++)
    for (size_t e = 0; e < w[i]->data.size(); e++) {
      const double x = gradient[i]->data[e] * clip;
      double &mean = m[i]->data[e], &square = v[i]->data[e], &theta = w[i]->data[e];
      mean = beta1 * mean + (1 - beta1) * x;
      square = beta2 * square + (1 - beta2) * x * x;
      theta -= o.lr * (mean * start1 / (std::sqrt(square * start2) + o.adam_eps) + o.weight_decay * theta);
    }
  return norm;
}

// ---- the model

Activations forward(const Policy& p, const Batch& batch) {
  const StepWeights& w = p.w;
  Activations x;
  x.batch = batch;
  x.x = Matrix(std::ssize(batch.ids), p.s.width);
  for (int64_t n = 0; n < x.x.rows; n++) std::copy_n(w.embedding[batch.ids[n]], p.s.width, x.x[n]);
  x.h1 = norm(x.x, w.input_norm, p.s.rms_eps);
  x.qkv = linear(x.h1, w.qkv);
  rope(p, batch, x.qkv, 1);
  attention(p, x);
  x.x_mid = linear(x.o, w.o);
  add(x.x_mid, x.x);  // the residual stream: a layer adds to what is there
  if (p.adapter) {    // [DistillSparse]
    x.low = linear(x.o, p.adapter->a);
    add(x.x_mid, linear(x.low, p.adapter->b));
  }
  x.h2 = norm(x.x_mid, w.post_norm, p.s.rms_eps);
  x.gate_up = linear(x.h2, w.gate_up);
  x.act = swiglu(x.gate_up);
  x.x_out = linear(x.act, w.down);
  add(x.x_out, x.x_mid);
  const Matrix all = norm(x.x_out, w.final_norm, p.s.rms_eps);
  x.hidden = Matrix(std::ssize(batch.predicted_by), p.s.width);
  for (int64_t n = 0; n < x.hidden.rows; n++) std::copy_n(all[batch.predicted_by[n]], p.s.width, x.hidden[n]);
  x.logits = linear(x.hidden, w.head);
  return x;
}

// The same in reverse: from the gradient of the logits to that of every parameter.  dx follows the residual stream.
void backward(const Policy& p, const Activations& x, const Matrix& d_logits, StepUpdate& u) {
  const StepWeights& w = p.w;
  StepWeights& g = u.gradient;
  const Matrix d_hidden = linear_backward(d_logits, x.hidden, w.head, g.head);
  Matrix d_all(x.x.rows, x.x.columns), dx = d_all;
  for (int64_t n = 0; n < d_hidden.rows; n++)
    for (int64_t c = 0; c < dx.columns; c++) d_all[x.batch.predicted_by[n]][c] += d_hidden[n][c];
  norm_backward(d_all, x.x_out, w.final_norm, p.s.rms_eps, g.final_norm, dx);
  const Matrix d_gate_up = swiglu_backward(linear_backward(dx, x.act, w.down, g.down), x.gate_up);
  const Matrix d_h2 = linear_backward(d_gate_up, x.h2, w.gate_up, g.gate_up);
  norm_backward(d_h2, x.x_mid, w.post_norm, p.s.rms_eps, g.post_norm, dx);
  Matrix d_o = linear_backward(dx, x.o, w.o, g.o);
  if (p.adapter) {  // [DistillSparse]
    const Matrix d_low = linear_backward(dx, x.low, p.adapter->b, u.adapter.b);
    add(d_o, linear_backward(d_low, x.o, p.adapter->a, u.adapter.a));
  }
  Matrix d_qkv = attention_backward(p, x, d_o);
  rope(p, x.batch, d_qkv, -1);
  const Matrix d_h1 = linear_backward(d_qkv, x.h1, w.qkv, g.qkv);
  norm_backward(d_h1, x.x, w.input_norm, p.s.rms_eps, g.input_norm, dx);
  for (int64_t n = 0; n < dx.rows; n++)
    for (int64_t c = 0; c < dx.columns; c++) g.embedding[x.batch.ids[n]][c] += dx[n][c];
}

// ---- attention

// RoPE turns the pairs (c, c + D/2) of every query and key by an angle that grows with the position, so that the dot
// product of a query and a key depends on how far apart they are.  `sign` -1, the backward, turns them back.
void rope(const Policy& p, const Batch& batch, Matrix& qkv, double sign) {
  const int64_t D = p.s.head_dim, half = D / 2;
  for (const Segment& g : batch.segments)
    for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++)
      for (int64_t h = 0; h < p.s.heads + p.s.kv_heads; h++)
        for (int64_t c = 0; c < half; c++) {
          const double turn = std::pow(p.s.rope_theta, -2.0 * c / D), angle = i * turn;
          const double cosine = std::cos(angle), sine = sign * std::sin(angle);
          double* const x = qkv[g.at(i)] + h * D + c;
          const double a = x[0], b = x[half];
          x[0] = a * cosine - b * sine;
          x[half] = b * cosine + a * sine;
        }
}

// The key of query head h, which H / K of them share.  Its value stands K D numbers after it.
const double* key(const StepShape& s, const double* qkv, int64_t h) {
  return qkv + (s.heads + h / (s.heads / s.kv_heads)) * s.head_dim;
}
float scale(const StepShape& s) { return 1 / std::sqrt(float(s.head_dim)); }

// [Sparse-RL] The positions that a query attends to: all up to its own.  With `blocks`, tokens of a response attend to
// their own block of four and to the others whose mean keys have the largest products with their queries (block top-k).
std::vector<int64_t> reads(const Policy& p, const Segment& g, const Matrix& qkv, int64_t i, int64_t h) {
  std::vector<int64_t> blocks(i / 4 + 1), positions;
  std::iota(blocks.begin(), blocks.end(), 0);
  if (p.blocks > 0 && g.parent_length > 0 && std::ssize(blocks) > p.blocks) {
    const int64_t share = p.s.heads / p.s.kv_heads, first = h / share * share, D = p.s.head_dim;
    const auto score = [&](int64_t block) {
      double sum = 0;
      for (int64_t j = 4 * block; j < 4 * block + 4; j++)
        for (int64_t q = first; q < first + share; q++) sum += dot(qkv[g.at(i)] + q * D, key(p.s, qkv[g.at(j)], h), D);
      return sum;
    };
    std::stable_sort(blocks.begin(), blocks.end() - 1, [&](int64_t a, int64_t b) { return score(a) > score(b); });
    blocks.erase(blocks.begin() + p.blocks - 1, blocks.end() - 1);
    std::sort(blocks.begin(), blocks.end());
  }
  for (const int64_t block : blocks)
    for (int64_t j = 4 * block; j <= std::min(i, 4 * block + 3); j++) positions.push_back(j);
  return positions;
}

// The only place where tokens meet.  Every query meets the key of every token up to its own; a softmax of the products
// gives weights, and the output is the mean of the values under them.  `lse` is the log (base 2) of its sum.
void attention(const Policy& p, Activations& x) {
  const int64_t D = p.s.head_dim;
  x.o = Matrix(x.qkv.rows, p.s.heads * D);
  x.lse = Matrix(x.qkv.rows, p.s.heads);
  for (const Segment& g : x.batch.segments)
    for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++)
      for (int64_t h = 0; h < p.s.heads; h++) {
        const int64_t n = g.at(i);
        const std::vector<int64_t> read = reads(p, g, x.qkv, i, h);
        std::vector<double> weight(read.size());
        for (size_t e = 0; e < read.size(); e++)
          weight[e] = scale(p.s) * dot(x.qkv[n] + h * D, key(p.s, x.qkv[g.at(read[e])], h), D);
        const double max = *std::max_element(weight.begin(), weight.end());
        double sum = 0;
        for (double& w : weight) sum += w = std::exp(w - max);
        x.lse[n][h] = max / std::numbers::ln2 + std::log2(sum);
        for (size_t e = 0; e < read.size(); e++) {
          const double* const v = key(p.s, x.qkv[g.at(read[e])], h) + p.s.kv_heads * D;
          for (int64_t d = 0; d < D; d++) x.o[n][h * D + d] += weight[e] / sum * v[d];
        }
      }
}

// d weight = do.v, and through the softmax d score = weight (do.v - do.o).  The weights, a number for every pair of
// tokens, were not kept: they come back from the sum's logarithm, as in FlashAttention.  Keys and values of the prompt
// collect from all responses, which is why the prompt stands last in the batch.
Matrix attention_backward(const Policy& p, const Activations& x, const Matrix& d_o) {
  const int64_t D = p.s.head_dim;
  const Matrix& qkv = x.qkv;
  Matrix d(qkv.rows, qkv.columns);
  for (const Segment& g : x.batch.segments)
    for (int64_t h = 0; h < p.s.heads; h++)
      for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++) {
        const int64_t n = g.at(i);
        const double *q = qkv[n] + h * D, *dy = d_o[n] + h * D, do_o = dot(dy, x.o[n] + h * D, D);
        std::vector<double> dq(D);
        for (const int64_t j : reads(p, g, qkv, i, h)) {
          const double *k = key(p.s, qkv[g.at(j)], h), *v = k + p.s.kv_heads * D;
          double *const dk = d[g.at(j)] + (k - qkv[g.at(j)]), *const dv = d[g.at(j)] + (v - qkv[g.at(j)]);
          const double weight = std::exp2(scale(p.s) / std::numbers::ln2 * dot(q, k, D) - x.lse[n][h]);
          const double ds = weight * (dot(dy, v, D) - do_o);
          for (int64_t c = 0; c < D; c++) {
            dq[c] += ds * k[c];
            dk[c] += scale(p.s) * ds * q[c];
            dv[c] += weight * dy[c];
          }
        }
        for (int64_t c = 0; c < D; c++) d[n][h * D + c] = scale(p.s) * dq[c];
      }
  return d;
}

// ---- the other layers

// A linear layer, y = x W^T: each output is the dot product of a row of x with a row of W.
Matrix linear(const Matrix& x, const Matrix& w) {
  Matrix y(x.rows, w.rows);
  for (int64_t n = 0; n < x.rows; n++)
    for (int64_t o = 0; o < w.rows; o++) y[n][o] = dot(x[n], w[o], x.columns);
  return y;
}

// dW += dy^T x; returns dx = dy W.  The gradient of a weight is a sum over all tokens of all responses.
Matrix linear_backward(const Matrix& dy, const Matrix& x, const Matrix& w, Matrix& dw) {
  Matrix dx(x.rows, x.columns);
  for (int64_t n = 0; n < x.rows; n++)
    for (int64_t o = 0; o < w.rows; o++)
      for (int64_t i = 0; i < x.columns; i++) {
        dw[o][i] += dy[n][o] * x[n][i];
        dx[n][i] += dy[n][o] * w[o][i];
      }
  return dx;
}

void add(Matrix& x, const Matrix& y) {
  for (size_t e = 0; e < x.data.size(); e++) x.data[e] += y.data[e];
}

// RMSNorm scales every row to a root mean square of 1, then every column by its weight.
double rstd(const Matrix& x, int64_t n, float eps) {
  return 1 / std::sqrt(dot(x[n], x[n], x.columns) / x.columns + eps);
}
Matrix norm(const Matrix& x, const Matrix& w, float eps) {
  Matrix y(x.rows, x.columns);
  for (int64_t n = 0; n < x.rows; n++)
    for (int64_t c = 0; c < x.columns; c++) y[n][c] = x[n][c] * rstd(x, n, eps) * w[0][c];
  return y;
}

// With x^ = x rstd: dx = rstd (w dy - x^ mean(w dy x^)).  The second term: a longer x has a smaller rstd.  Adds to dx.
void norm_backward(const Matrix& dy, const Matrix& x, const Matrix& w, float eps, Matrix& dw, Matrix& dx) {
  for (int64_t n = 0; n < x.rows; n++) {
    const double r = rstd(x, n, eps);
    double mean = 0;
    for (int64_t c = 0; c < x.columns; c++) {
      dw[0][c] += dy[n][c] * x[n][c] * r;
      mean += dy[n][c] * w[0][c] * x[n][c] * r / x.columns;
    }
    for (int64_t c = 0; c < x.columns; c++) dx[n][c] += r * (dy[n][c] * w[0][c] - x[n][c] * r * mean);
  }
}

// SwiGLU: one half of the features opens and closes the other.
Matrix swiglu(const Matrix& gate_up) {
  const int64_t F = gate_up.columns / 2;
  Matrix y(gate_up.rows, F);
  for (int64_t n = 0; n < y.rows; n++)
    for (int64_t f = 0; f < F; f++) {
      const double gate = gate_up[n][f], up = gate_up[n][F + f];
      y[n][f] = gate / (1 + std::exp(-gate)) * up;
    }
  return y;
}
Matrix swiglu_backward(const Matrix& dy, const Matrix& gate_up) {
  const int64_t F = dy.columns;
  Matrix d(gate_up.rows, 2 * F);
  for (int64_t n = 0; n < dy.rows; n++)
    for (int64_t f = 0; f < F; f++) {
      const double gate = gate_up[n][f], up = gate_up[n][F + f], sigmoid = 1 / (1 + std::exp(-gate));
      d[n][f] = dy[n][f] * up * sigmoid * (1 + gate * (1 - sigmoid));
      d[n][F + f] = dy[n][f] * gate * sigmoid;
    }
  return d;
}

}  // namespace

}  // namespace pare::ref
