// From the top: the step, its stages 1 to 7 in order, the model, its layers; each with its backward.
#include "ref/step.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "base/rng.h"

namespace pare::ref {
namespace {

// The model that predicts tokens, and what it attends to.
struct Policy {
  const StepWeights& w;
  int64_t blocks = 0;  // StepOptions::blocks
};

Tokens joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
StepResponse sample(const StepShape& s, const StepOptions& o, const Policy& p, const Tokens& parent, uint64_t uid);
void set_advantages(const StepOptions& o, std::vector<StepResponse>& group);
void set_weights(const StepOptions& o, std::vector<StepResponse>& group);
void correct(const StepShape& s, const StepOptions& o, const Policy& p, const Tokens& parent,
             std::vector<StepResponse>& group);
StepUpdate learn(const StepShape& s, const StepOptions& o, const Policy& p, const Tokens& parent,
                 const std::vector<StepResponse>& group, bool first);
double adamw(const StepOptions& o, int t, StepWeights& gradient, StepWeights& m, StepWeights& v, StepWeights& w);

}  // namespace

// ---- the step

StepResult grpo_step(const StepShape& s, const StepOptions& o, StepWeights& w) {
  const Policy policy{w}, sampler{w, o.blocks};
  StepResult r;
  // [RPO] The responses continue an earlier one, of which a random number of tokens is cut.  The rest joins the prompt:
  // it is computed once and not trained on.
  if (!o.rpo_earlier.empty()) {
    const int64_t cut = Rng(rng_key(o.seed, RngStream::rpo_cut, o.step), o.uids[0]).below(o.rpo_max_cut + 1);
    r.prefix.assign(o.rpo_earlier.begin(),
                    o.rpo_earlier.end() - std::clamp<int64_t>(cut, 1, std::ssize(o.rpo_earlier)));
  }
  const Tokens parent = joined(o.prompt, r.prefix);
  for (const uint64_t uid : o.uids) {
    r.responses.push_back(sample(s, o, sampler, parent, uid));                          // 1. Rollout
    r.responses.back().reward = o.reward(joined(r.prefix, r.responses.back().tokens));  // 2. Reward
  }
  set_advantages(o, r.responses);  // 3. Advantages
  set_weights(o, r.responses);     // 4. Weights of tokens
  if (o.blocks > 0) correct(s, o, policy, parent, r.responses);

  StepWeights m(s), v(s);
  for (int t = 1; t <= o.updates; t++) {
    StepUpdate& u =
        r.updates.emplace_back(learn(s, o, policy, parent, r.responses, t == 1));  // 5. Batch, 6. Loss and gradient
    u.norm = adamw(o, t, u.gradient, m, v, w);                                     // 7. Optimizer
  }
  return r;
}

double step_loss(const StepShape& s, const StepOptions& o, const StepWeights& w, const StepResult& step) {
  return learn(s, o, {w}, joined(o.prompt, step.prefix), step.responses, false).loss;
}

namespace {

// ---- a batch, a forward pass, and the functions of the model

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

// A forward pass, and what its backward needs of it.
struct Attention {
  Matrix o{0, 0}, lse{0, 0};  // [N, H D]; [N, H], the log (base 2) of the softmax's sum
};
struct Pass {
  Matrix x{0, 0}, h1{0, 0}, qkv{0, 0}, x_mid{0, 0}, h2{0, 0}, gate_up{0, 0}, act{0, 0}, x_out{0, 0}, hidden{0, 0};
  Attention attended;
};

// Of a batch, the logits that the tokens of the responses are drawn from.
struct Prediction {
  Batch batch;
  Pass pass;
  Matrix hidden, logits;  // [R, C], [R, V]
};

Batch pack(const Tokens& parent, const std::vector<Tokens>& responses);
Prediction predict(const StepShape& s, const Policy& p, const Tokens& parent, const std::vector<Tokens>& responses);
Pass forward(const StepShape& s, const Policy& p, const Batch& batch);
void backward(const StepShape& s, const Policy& p, const Batch& batch, const Pass& x, const Matrix& d_hidden,
              StepWeights& g);
double dot(const double* a, const double* b, int64_t n) { return std::inner_product(a, a + n, b, 0.0); }
Matrix linear(const Matrix& x, const Matrix& w);
Matrix linear_backward(const Matrix& dy, const Matrix& x, const Matrix& w, Matrix& dw);
void add(Matrix& x, const Matrix& y);
Matrix norm(const Matrix& x, const Matrix& w, float eps);
void norm_backward(const Matrix& dy, const Matrix& x, const Matrix& w, float eps, Matrix& dw, Matrix& dx);
Matrix swiglu(const Matrix& gate_up);
Matrix swiglu_backward(const Matrix& dy, const Matrix& gate_up);
void rope(const StepShape& s, const Batch& batch, Matrix& qkv, double sign);
Attention attention(const StepShape& s, int64_t blocks, const Batch& batch, const Matrix& qkv);
Matrix attention_backward(const StepShape& s, int64_t blocks, const Batch& batch, const Matrix& qkv, const Attention& a,
                          const Matrix& d_o);

// ---- its stages

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
StepResponse sample(const StepShape& s, const StepOptions& o, const Policy& p, const Tokens& parent, uint64_t uid) {
  const uint64_t key = rng_key(o.seed, RngStream::sample, o.step);
  StepResponse r;
  r.uid = uid;
  const int64_t limit = o.max_tokens - (std::ssize(parent) - std::ssize(o.prompt));
  for (int64_t t = 0; t < limit && (t == 0 || r.tokens.back() != o.eos); t++) {
    r.tokens.push_back(0);  // the token to draw
    const Matrix all = predict(s, p, parent, {r.tokens}).logits;
    const double* const logits = all[t];
    const auto score = [&](int32_t id) {
      const double u = uniform_open(rng_word(key, uid, t, id));
      return logits[id] - std::log(-std::log(u));
    };
    int32_t& best = r.tokens.back();
    for (int32_t id = 1; id < s.vocab; id++)
      if (score(id) > score(best)) best = id;
    r.sampled.push_back(log_softmax(logits, s.vocab)[best]);
  }
  r.old = r.sampled;  // the sampler is the policy
  return r;
}

// 2. Reward: a verifier scores the response.  It is an option of the step.

// 3. Advantages: how much better a response was than the others of its prompt, in standard deviations (DeepSeekMath eq.
// 3).  There is no value network: the group is the baseline.
void set_advantages(const StepOptions& o, std::vector<StepResponse>& group) {
  const double n = group.size();
  double mean = 0, squares = 0;
  for (const StepResponse& r : group) mean += r.reward;
  mean /= n;
  for (StepResponse& r : group) r.advantage = r.reward - mean, squares += r.advantage * r.advantage;
  for (StepResponse& r : group) r.advantage *= squares == 0 ? 0 : 1 / (std::sqrt(squares / (n - 1)) + o.adv_eps);
}

// 4. Weights: the mean over the tokens of a response, then over responses.  Each counts alike, however long it is.
void set_weights(const StepOptions& o, std::vector<StepResponse>& group) {
  const double n = group.size();
  for (StepResponse& r : group) {
    // [DASH] Responses that teach little are left out of the learner's passes.  The denominator counts them.
    if (std::abs(r.advantage) < o.dash_threshold) continue;
    const int64_t length = std::ssize(r.tokens);
    r.weight.assign(length, 1 / (n * length));
    // [NAT] Trains on a random beginning.  A token weighs the more the rarer it is in it, so the mean over the draws of
    // the cut is the gradient of all tokens.
    if (o.nat_tokens > 0) {
      const int64_t least = std::min(o.nat_tokens, length), cuts = length - least + 1;
      r.weight.resize(least + Rng(rng_key(o.seed, RngStream::token_plan, o.step), r.uid).below(cuts));
      for (int64_t t = least; t < std::ssize(r.weight); t++) r.weight[t] *= double(cuts) / (length - t);
    }
  }
}

// [Sparse-RL] The sampler is not the policy that is trained: it attends to a part of the tokens.  xi = p / p_sampler of
// a token weights its loss.  Responses with a token that the policy all but excludes are not trained on.
void correct(const StepShape& s, const StepOptions& o, const Policy& p, const Tokens& parent,
             std::vector<StepResponse>& group) {
  for (StepResponse& r : group) {
    const Matrix logits = predict(s, p, parent, {r.tokens}).logits;
    for (int64_t t = 0; t < logits.rows; t++) {
      r.old[t] = log_softmax(logits[t], s.vocab)[r.tokens[t]];
      const double log_xi = r.old[t] - r.sampled[t], xi = std::exp(log_xi);
      if (xi < o.veto) r.weight.clear();
      if (t < std::ssize(r.weight)) r.weight[t] *= xi;
    }
  }
}

// 5. The batch: the responses, then their prompt.  A response's last token is not fed: it predicts nothing.
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

Prediction predict(const StepShape& s, const Policy& p, const Tokens& parent, const std::vector<Tokens>& responses) {
  const Batch batch = pack(parent, responses);
  const Pass pass = forward(s, p, batch);
  Matrix hidden(std::ssize(batch.predicted_by), s.width);
  for (int64_t n = 0; n < hidden.rows; n++) std::copy_n(pass.hidden[batch.predicted_by[n]], s.width, hidden[n]);
  return {batch, pass, hidden, linear(hidden, p.w.head)};
}

// 6. The loss of a token is -A r, with r = p / p_old: the policy now over the one before the step.  In the first update
// they are the same: r is 1, its gradient that of log p.  Then r moves, and a token whose r has gone up by more than
// `clip` for A > 0, or down for A < 0, has no gradient.
StepUpdate learn(const StepShape& s, const StepOptions& o, const Policy& p, const Tokens& parent,
                 const std::vector<StepResponse>& group, bool first) {
  std::vector<Tokens> responses;
  for (const StepResponse& r : group)
    if (!r.weight.empty()) responses.emplace_back(r.tokens.begin(), r.tokens.begin() + std::ssize(r.weight));
  Prediction x = predict(s, p, parent, responses);
  StepUpdate u{.logprobs = {}, .gradient = StepWeights(s)};
  int64_t n = 0;
  for (const StepResponse& r : group) {
    std::vector<double>& logprobs = u.logprobs.emplace_back();
    for (size_t t = 0; t < r.weight.size(); t++, n++) {
      const std::vector<double> log_p = log_softmax(x.logits[n], s.vocab);
      logprobs.push_back(log_p[r.tokens[t]]);
      const double ratio = first ? 1 : std::exp(logprobs[t] - r.old[t]);
      const double plain = -r.advantage * ratio;
      const double clip = -r.advantage * std::clamp(ratio, 1.0 - o.clip, 1.0 + o.clip);
      u.loss += r.weight[t] * std::max(plain, clip), u.clipped += clip > plain;
      const double d_logprob = r.weight[t] * (clip > plain ? 0 : plain);  // d r / d log p = r
      // The logits become their gradient: d log p(token) / d logits = onehot(token) - p.
      for (int32_t v = 0; v < s.vocab; v++) x.logits[n][v] = d_logprob * ((v == r.tokens[t]) - std::exp(log_p[v]));
    }
  }
  const Matrix d_predicts = linear_backward(x.logits, x.hidden, p.w.head, u.gradient.head);
  Matrix d_hidden(x.pass.hidden.rows, s.width);
  for (n = 0; n < d_predicts.rows; n++)
    for (int64_t c = 0; c < s.width; c++) d_hidden[x.batch.predicted_by[n]][c] += d_predicts[n][c];
  backward(s, p, x.batch, x.pass, d_hidden, u.gradient);
  return u;
}

// 7. AdamW (Loshchilov & Hutter 2019), update t, on the gradient, clipped to a norm.  Returns the norm before clipping.
// Squares are added up sixteen rows at a time, so that the rows may lie on several devices (ops/optimizer.h).
double adamw(const StepOptions& o, int t, StepWeights& gradient, StepWeights& m, StepWeights& v, StepWeights& w) {
  double squares = 0;
  for (const Matrix* g : gradient.all())
    for (int64_t n = 0; n < g->rows; n += 16)
      squares += dot((*g)[n], (*g)[n], std::min<int64_t>(16, g->rows - n) * g->columns);
  const double norm = std::sqrt(squares), clip = std::min(1.0, o.max_norm / norm), beta1 = o.beta1, beta2 = o.beta2;
  const double start1 = 1 / (1 - std::pow(beta1, t)), start2 = 1 / (1 - std::pow(beta2, t));  // moments began at zero
  for (size_t i = 0; i < w.all().size(); i++)
    for (size_t e = 0; e < w.all()[i]->data.size(); e++) {
      const double x = gradient.all()[i]->data[e] * clip;
      double &mean = m.all()[i]->data[e], &square = v.all()[i]->data[e], &theta = w.all()[i]->data[e];
      mean = beta1 * mean + (1 - beta1) * x, square = beta2 * square + (1 - beta2) * x * x;
      theta -= o.lr * (mean * start1 / (std::sqrt(square * start2) + o.adam_eps) + o.weight_decay * theta);
    }
  return norm;
}

// ---- the model

Pass forward(const StepShape& s, const Policy& p, const Batch& batch) {
  Pass x;
  const StepWeights& w = p.w;
  x.x = Matrix(std::ssize(batch.ids), s.width);
  for (int64_t n = 0; n < x.x.rows; n++) std::copy_n(w.embedding[batch.ids[n]], s.width, x.x[n]);
  x.h1 = norm(x.x, w.input_norm, s.rms_eps);
  x.qkv = linear(x.h1, w.qkv);
  rope(s, batch, x.qkv, 1);
  x.attended = attention(s, p.blocks, batch, x.qkv);
  x.x_mid = linear(x.attended.o, w.o);
  add(x.x_mid, x.x);  // the residual stream: a layer adds to what is there
  x.h2 = norm(x.x_mid, w.post_norm, s.rms_eps);
  x.gate_up = linear(x.h2, w.gate_up);
  x.act = swiglu(x.gate_up);
  x.x_out = linear(x.act, w.down);
  add(x.x_out, x.x_mid);
  x.hidden = norm(x.x_out, w.final_norm, s.rms_eps);
  return x;
}

// The same in reverse: from the gradient of `hidden` to that of every parameter.  dx follows the residual stream down.
void backward(const StepShape& s, const Policy& p, const Batch& batch, const Pass& x, const Matrix& d_hidden,
              StepWeights& g) {
  const StepWeights& w = p.w;
  Matrix dx(x.x.rows, x.x.columns);
  norm_backward(d_hidden, x.x_out, w.final_norm, s.rms_eps, g.final_norm, dx);
  const Matrix d_gate_up = swiglu_backward(linear_backward(dx, x.act, w.down, g.down), x.gate_up);
  const Matrix d_h2 = linear_backward(d_gate_up, x.h2, w.gate_up, g.gate_up);
  norm_backward(d_h2, x.x_mid, w.post_norm, s.rms_eps, g.post_norm, dx);
  const Matrix d_o = linear_backward(dx, x.attended.o, w.o, g.o);
  Matrix d_qkv = attention_backward(s, p.blocks, batch, x.qkv, x.attended, d_o);
  rope(s, batch, d_qkv, -1);
  const Matrix d_h1 = linear_backward(d_qkv, x.h1, w.qkv, g.qkv);
  norm_backward(d_h1, x.x, w.input_norm, s.rms_eps, g.input_norm, dx);
  for (int64_t n = 0; n < dx.rows; n++)
    for (int64_t c = 0; c < dx.columns; c++) g.embedding[batch.ids[n]][c] += dx[n][c];
}

// ---- attention

// RoPE turns the pairs (c, c + D/2) of every query and key by an angle that grows with the position, so that the dot
// product of a query and a key depends on how far apart they are.  `sign` -1, the backward, turns them back.
void rope(const StepShape& s, const Batch& batch, Matrix& qkv, double sign) {
  const int64_t half = s.head_dim / 2;
  for (const Segment& g : batch.segments)
    for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++)
      for (int64_t h = 0; h < s.heads + s.kv_heads; h++)
        for (int64_t c = 0; c < half; c++) {
          const double turn = std::pow(s.rope_theta, -2.0 * c / s.head_dim), angle = i * turn;
          const double cosine = std::cos(angle), sine = sign * std::sin(angle);
          double* const x = qkv[g.at(i)] + h * s.head_dim + c;
          const double p = x[0], q = x[half];
          x[0] = p * cosine - q * sine;
          x[half] = q * cosine + p * sine;
        }
}

// The only place where tokens meet.  Every query meets the key of every token before it, and its own; a softmax of the
// products gives weights, and the output is the mean of the values under them.  H / K query heads share keys and
// values.
const double* key(const StepShape& s, const double* qkv, int64_t h) {
  return qkv + (s.heads + h / (s.heads / s.kv_heads)) * s.head_dim;
}
const double* value(const StepShape& s, const double* qkv, int64_t h) {
  return key(s, qkv, h) + s.kv_heads * s.head_dim;
}
float scale(const StepShape& s) { return 1 / std::sqrt(float(s.head_dim)); }

// [Sparse-RL] The positions that a query attends to: all up to its own.  With `count`, tokens of a response attend to
// their own block of four and to the blocks whose mean keys have the largest products with their queries (block top-k).
std::vector<int64_t> reads(const StepShape& s, int64_t count, const Segment& g, const Matrix& qkv, int64_t i,
                           int64_t h) {
  std::vector<int64_t> blocks(i / 4 + 1), positions;
  std::iota(blocks.begin(), blocks.end(), 0);
  if (count > 0 && g.parent_length > 0 && std::ssize(blocks) > count) {
    const int64_t heads = s.heads / s.kv_heads, first = h / heads * heads;  // those that share the keys of h
    const auto score = [&](int64_t block) {
      double sum = 0;
      for (int64_t j = 4 * block; j < 4 * block + 4; j++)
        for (int64_t q = first; q < first + heads; q++)
          sum += dot(qkv[g.at(i)] + q * s.head_dim, key(s, qkv[g.at(j)], h), s.head_dim);
      return sum;
    };
    std::stable_sort(blocks.begin(), blocks.end() - 1, [&](int64_t a, int64_t b) { return score(a) > score(b); });
    blocks.erase(blocks.begin() + count - 1, blocks.end() - 1);
    std::sort(blocks.begin(), blocks.end());
  }
  for (const int64_t block : blocks)
    for (int64_t j = 4 * block; j <= std::min(i, 4 * block + 3); j++) positions.push_back(j);
  return positions;
}

Attention attention(const StepShape& s, int64_t blocks, const Batch& batch, const Matrix& qkv) {
  const int64_t D = s.head_dim;
  Attention a{Matrix(qkv.rows, s.heads * D), Matrix(qkv.rows, s.heads)};
  for (const Segment& g : batch.segments)
    for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++)
      for (int64_t h = 0; h < s.heads; h++) {
        const std::vector<int64_t> read = reads(s, blocks, g, qkv, i, h);
        std::vector<double> weight;
        for (const int64_t j : read) weight.push_back(scale(s) * dot(qkv[g.at(i)] + h * D, key(s, qkv[g.at(j)], h), D));
        const double max = *std::max_element(weight.begin(), weight.end());
        double sum = 0;
        for (double& w : weight) sum += w = std::exp(w - max);
        a.lse[g.at(i)][h] = max / std::numbers::ln2 + std::log2(sum);
        for (size_t e = 0; e < read.size(); e++)
          for (int64_t d = 0; d < D; d++)
            a.o[g.at(i)][h * D + d] += weight[e] / sum * value(s, qkv[g.at(read[e])], h)[d];
      }
  return a;
}

// d weight = do.v, and through the softmax d score = weight (do.v - do.o).  The weights, a number for every pair of
// tokens, were not kept: they come back from the sum's logarithm, as in FlashAttention.  Keys and values of the prompt
// collect from all responses, which is why the prompt stands last in the batch.
Matrix attention_backward(const StepShape& s, int64_t blocks, const Batch& batch, const Matrix& qkv, const Attention& a,
                          const Matrix& d_o) {
  const int64_t D = s.head_dim;
  Matrix d(qkv.rows, qkv.columns);
  for (const Segment& g : batch.segments)
    for (int64_t h = 0; h < s.heads; h++)
      for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++) {
        const int64_t n = g.at(i);
        const double *q = qkv[n] + h * D, *dy = d_o[n] + h * D, do_o = dot(dy, a.o[n] + h * D, D);
        std::vector<double> dq(D);
        for (const int64_t j : reads(s, blocks, g, qkv, i, h)) {
          const double *k = key(s, qkv[g.at(j)], h), *v = value(s, qkv[g.at(j)], h);
          double *const dk = d[g.at(j)] + (k - qkv[g.at(j)]), *const dv = d[g.at(j)] + (v - qkv[g.at(j)]);
          const double weight = std::exp2(scale(s) / std::numbers::ln2 * dot(q, k, D) - a.lse[n][h]);
          const double ds = weight * (dot(dy, v, D) - do_o);
          for (int64_t c = 0; c < D; c++) {
            dq[c] += ds * k[c];
            dk[c] += scale(s) * ds * q[c];
            dv[c] += weight * dy[c];
          }
        }
        for (int64_t c = 0; c < D; c++) d[n][h * D + c] = scale(s) * dq[c];
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

StepWeights::StepWeights(const StepShape& s)
    : embedding(s.vocab, s.width),
      input_norm(1, s.width),
      qkv((s.heads + 2 * s.kv_heads) * s.head_dim, s.width),
      o(s.width, s.heads * s.head_dim),
      post_norm(1, s.width),
      gate_up(2 * s.ffn, s.width),
      down(s.width, s.ffn),
      final_norm(1, s.width),
      head(s.vocab, s.width) {}

std::vector<Matrix*> StepWeights::all() {
  return {&embedding, &input_norm, &qkv, &o, &post_norm, &gate_up, &down, &final_norm, &head};
}

}  // namespace pare::ref
