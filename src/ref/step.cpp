#include "ref/step.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "base/rng.h"

namespace pare::ref {
namespace {

double dot(const double* a, const double* b, int64_t n) { return std::inner_product(a, a + n, b, 0.0); }

// ---- layers
// -----------------------------------------------------------------------------------------------------------

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
  return 1 / std::sqrt(dot(x[n], x[n], x.columns) / static_cast<double>(x.columns) + eps);
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
      mean += dy[n][c] * w[0][c] * x[n][c] * r / static_cast<double>(x.columns);
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

// ---- attention
// --------------------------------------------------------------------------------------------------------

// Tokens as rows, without padding.  A segment is a run of rows that follow one another in a text, behind the rows of
// its parent: the responses have their prompt as parent, which so is computed once for all of them.
struct Segment {
  int64_t row, length, parent_row, parent_length;
  // The row of the token at a position of the text.
  int64_t at(int64_t i) const { return i < parent_length ? parent_row + i : row + i - parent_length; }
};
struct Batch {
  Tokens ids;
  std::vector<Segment> segments;
  void add(const Tokens& tokens, int64_t count, int64_t parent_row, int64_t parent_length) {
    segments.push_back({std::ssize(ids), count, parent_row, parent_length});
    ids.insert(ids.end(), tokens.begin(), tokens.begin() + count);
  }
};

// RoPE turns the pairs (c, c + D/2) of every query and key by an angle that grows with the position, so that the dot
// product of a query and a key depends on how far apart they are.  `sign` -1, the backward, turns them back.
void rope(const StepShape& s, const Batch& batch, Matrix& qkv, double sign) {
  const int64_t half = s.head_dim / 2;
  for (const Segment& g : batch.segments)
    for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++)
      for (int64_t h = 0; h < s.heads + s.kv_heads; h++)
        for (int64_t c = 0; c < half; c++) {
          const double turn = std::pow(s.rope_theta, -2.0 * static_cast<double>(c) / static_cast<double>(s.head_dim));
          const double angle = static_cast<double>(i) * turn, cosine = std::cos(angle), sine = sign * std::sin(angle);
          double* const x = qkv[g.at(i)] + h * s.head_dim + c;
          const double p = x[0], q = x[half];
          x[0] = p * cosine - q * sine;
          x[half] = q * cosine + p * sine;
        }
}

// The only place where tokens meet.  Every query meets the key of every token before it, and its own; a softmax of the
// products gives weights, and the output is the mean of the values under them.  H / K query heads share keys and
// values.
struct Attention {
  Matrix o, lse;  // [N, H D]; [N, H], the log (base 2) of the softmax's sum
};
const double* key(const StepShape& s, const double* qkv, int64_t h) {
  return qkv + (s.heads + h / (s.heads / s.kv_heads)) * s.head_dim;
}
const double* value(const StepShape& s, const double* qkv, int64_t h) {
  return key(s, qkv, h) + s.kv_heads * s.head_dim;
}
float scale(const StepShape& s) { return 1 / std::sqrt(static_cast<float>(s.head_dim)); }

Attention attention(const StepShape& s, const Batch& batch, const Matrix& qkv) {
  const int64_t D = s.head_dim;
  Attention a{{qkv.rows, s.heads * D}, {qkv.rows, s.heads}};
  for (const Segment& g : batch.segments)
    for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++)
      for (int64_t h = 0; h < s.heads; h++) {
        std::vector<double> weight(i + 1);
        for (int64_t j = 0; j <= i; j++) weight[j] = scale(s) * dot(qkv[g.at(i)] + h * D, key(s, qkv[g.at(j)], h), D);
        const double max = *std::max_element(weight.begin(), weight.end());
        double sum = 0;
        for (double& w : weight) sum += w = std::exp(w - max);
        a.lse[g.at(i)][h] = max / std::numbers::ln2 + std::log2(sum);
        for (int64_t j = 0; j <= i; j++)
          for (int64_t d = 0; d < D; d++) a.o[g.at(i)][h * D + d] += weight[j] / sum * value(s, qkv[g.at(j)], h)[d];
      }
  return a;
}

// d weight = do.v, and through the softmax d score = weight (do.v - do.o).  The weights, a number for every pair of
// tokens, were not kept: they come back from the sum's logarithm, as in FlashAttention.  Keys and values of the prompt
// collect from all responses, which is why the prompt stands last in the batch.
Matrix attention_backward(const StepShape& s, const Batch& batch, const Matrix& qkv, const Attention& a,
                          const Matrix& d_o) {
  const int64_t D = s.head_dim;
  Matrix d(qkv.rows, qkv.columns);
  for (const Segment& g : batch.segments)
    for (int64_t h = 0; h < s.heads; h++)
      for (int64_t i = g.parent_length; i < g.parent_length + g.length; i++) {
        const int64_t n = g.at(i);
        const double *q = qkv[n] + h * D, *dy = d_o[n] + h * D, do_o = dot(dy, a.o[n] + h * D, D);
        std::vector<double> dq(D);
        for (int64_t j = 0; j <= i; j++) {
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

// ---- the model
// --------------------------------------------------------------------------------------------------------

// A forward pass, and what its backward needs of it.
struct Pass {
  Pass(const StepShape& s, const StepWeights& w, const Batch& batch) : x(std::ssize(batch.ids), s.width) {
    for (int64_t n = 0; n < x.rows; n++) std::copy_n(w.embedding[batch.ids[n]], s.width, x[n]);
    h1 = norm(x, w.input_norm, s.rms_eps);
    qkv = linear(h1, w.qkv);
    rope(s, batch, qkv, 1);
    attended = attention(s, batch, qkv);
    x_mid = linear(attended.o, w.o);
    add(x_mid, x);  // the residual stream: a layer adds to what is there
    h2 = norm(x_mid, w.post_norm, s.rms_eps);
    gate_up = linear(h2, w.gate_up);
    act = swiglu(gate_up);
    x_out = linear(act, w.down);
    add(x_out, x_mid);
    hidden = norm(x_out, w.final_norm, s.rms_eps);
  }
  Matrix x, h1{0, 0}, qkv{0, 0}, x_mid{0, 0}, h2{0, 0}, gate_up{0, 0}, act{0, 0}, x_out{0, 0}, hidden{0, 0};
  Attention attended{{0, 0}, {0, 0}};
};

// The same in reverse: from the gradient of `hidden` to that of every parameter.  dx follows the residual stream down.
void backward(const StepShape& s, const StepWeights& w, const Batch& batch, const Pass& p, const Matrix& d_hidden,
              StepWeights& g) {
  Matrix dx(p.x.rows, p.x.columns);
  norm_backward(d_hidden, p.x_out, w.final_norm, s.rms_eps, g.final_norm, dx);
  const Matrix d_gate_up = swiglu_backward(linear_backward(dx, p.act, w.down, g.down), p.gate_up);
  const Matrix d_h2 = linear_backward(d_gate_up, p.h2, w.gate_up, g.gate_up);
  norm_backward(d_h2, p.x_mid, w.post_norm, s.rms_eps, g.post_norm, dx);
  const Matrix d_o = linear_backward(dx, p.attended.o, w.o, g.o);
  Matrix d_qkv = attention_backward(s, batch, p.qkv, p.attended, d_o);
  rope(s, batch, d_qkv, -1);
  const Matrix d_h1 = linear_backward(d_qkv, p.h1, w.qkv, g.qkv);
  norm_backward(d_h1, p.x, w.input_norm, s.rms_eps, g.input_norm, dx);
  for (int64_t n = 0; n < dx.rows; n++)
    for (int64_t c = 0; c < dx.columns; c++) g.embedding[batch.ids[n]][c] += dx[n][c];
}

// ---- the stages of a step
// ---------------------------------------------------------------------------------------------

// 1. Rollout.  Gumbel-max: the largest of logit + Gumbel noise is a draw from the softmax.  The noise is a function of
// (key, uid, position, token) alone, so that a response does not depend on what else is being generated.  Here every
// token computes the whole text again; the engine keeps keys and values (src/kv).
Tokens sample(const StepShape& s, const StepOptions& o, const StepWeights& w, uint64_t uid) {
  Tokens text = o.prompt, response;
  while (std::ssize(response) < o.max_tokens && (response.empty() || response.back() != o.eos)) {
    Batch batch;
    batch.add(text, std::ssize(text), 0, 0);
    const Matrix logits = linear(Pass(s, w, batch).hidden, w.head);
    const auto score = [&, t = static_cast<uint32_t>(response.size())](int32_t id) {
      const double u = uniform_open(rng_word(o.sample_key, uid, t, static_cast<uint32_t>(id)));
      return logits[logits.rows - 1][id] - std::log(-std::log(u));
    };
    int32_t best = 0;
    for (int32_t id = 1; id < s.vocab; id++)
      if (score(id) > score(best)) best = id;
    text.push_back(best), response.push_back(best);
  }
  return response;
}

// 2. Advantages: how much better a response was than the others of its prompt, in standard deviations (DeepSeekMath eq.
// 3).  There is no value network: the group is the baseline.
std::vector<double> advantages(const std::vector<double>& rewards, double eps) {
  const auto n = static_cast<double>(rewards.size());
  std::vector<double> a = rewards;
  for (double& x : a) x -= std::accumulate(rewards.begin(), rewards.end(), 0.0) / n;
  const double variance = dot(a.data(), a.data(), std::ssize(a)) / (n - 1);
  for (double& x : a) x *= variance == 0 ? 0 : 1 / (std::sqrt(variance) + eps);
  return a;
}

// 4. The loss of a token is -A r, with r = p / p_old: the policy now over the one that sampled.  They are the same at
// the first update, so r is 1, its gradient that of log p, and there is nothing to clip.  With p = softmax(logits), d
// log p(token) / d logits = onehot(token) - p.  Turns logits into their gradient; returns log p(token).
double loss_backward(double* logits, int64_t vocab, int32_t token, double weight, double advantage) {
  const double max = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; v++) sum += std::exp(logits[v] - max);
  const double logprob = logits[token] - max - std::log(sum);
  for (int64_t v = 0; v < vocab; v++)
    logits[v] = weight * -advantage * ((v == token) - std::exp(logits[v] - max - std::log(sum)));
  return logprob;
}

// 6. AdamW (Loshchilov & Hutter 2019) on the gradient, clipped to a norm.
void adamw(const StepOptions& o, double norm, const Matrix& gradient, Matrix& weights) {
  const double clip = std::min(1.0, o.max_norm / norm), beta1 = o.beta1, beta2 = o.beta2;
  for (size_t e = 0; e < weights.data.size(); e++) {
    const double x = gradient.data[e] * clip, m = (1 - beta1) * x, v = (1 - beta2) * x * x;
    const double m_hat = m * (1 / (1 - beta1)), v_hat = v * (1 / (1 - beta2));  // undoes the start at zero
    double& theta = weights.data[e];
    theta -= o.lr * (m_hat / (std::sqrt(v_hat) + o.adam_eps) + o.weight_decay * theta);
  }
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

StepResult grpo_step(const StepShape& s, const StepOptions& o, StepWeights& w) {
  StepResult r{{}, {}, {}, StepWeights(s), 0};
  std::vector<double> rewards;
  for (const uint64_t uid : o.uids) {
    r.responses.push_back(sample(s, o, w, uid));
    rewards.push_back(o.reward(r.responses.back()));
  }
  r.advantages = advantages(rewards, o.adv_eps);

  // 3. The batch: the responses, then their prompt.  A response's last token is not fed: it predicts nothing.
  const int64_t prompt = std::ssize(o.prompt);
  int64_t prompt_row = 0, tokens = 0;
  for (const Tokens& t : r.responses) prompt_row += std::ssize(t) - 1, tokens += std::ssize(t);
  Batch batch;
  for (const Tokens& t : r.responses) batch.add(t, std::ssize(t) - 1, prompt_row, prompt);
  batch.add(o.prompt, prompt, 0, 0);

  const Pass pass(s, w, batch);
  Matrix predicts(tokens, s.width);  // the hidden state that each token is predicted from: that of the token before it
  std::vector<int64_t> predicted_by;
  for (size_t i = 0; i < r.responses.size(); i++)
    for (int64_t t = 0; t < std::ssize(r.responses[i]); t++)
      predicted_by.push_back(batch.segments[i].at(prompt + t - 1));
  for (int64_t n = 0; n < tokens; n++) std::copy_n(pass.hidden[predicted_by[n]], s.width, predicts[n]);

  Matrix logits = linear(predicts, w.head);
  for (size_t i = 0; i < r.responses.size(); i++) {
    // The mean over the tokens of a response, then over responses: each counts alike, however long it is.
    const double weight = 1 / (static_cast<double>(r.responses.size()) * static_cast<double>(r.responses[i].size()));
    for (const int32_t token : r.responses[i])
      r.logprobs.push_back(loss_backward(logits[std::ssize(r.logprobs)], s.vocab, token, weight, r.advantages[i]));
  }

  // 5. Backward.
  const Matrix d_predicts = linear_backward(logits, predicts, w.head, r.gradient.head);
  Matrix d_hidden(pass.hidden.rows, s.width);
  for (int64_t n = 0; n < tokens; n++)
    for (int64_t c = 0; c < s.width; c++) d_hidden[predicted_by[n]][c] += d_predicts[n][c];
  backward(s, w, batch, pass, d_hidden, r.gradient);

  // Sixteen rows are summed first, and then their sums: so the rows may lie on several devices (ops/optimizer.h).
  double squares = 0;
  for (const Matrix* g : r.gradient.all())
    for (int64_t first = 0; first < g->rows; first += 16)
      squares += dot((*g)[first], (*g)[first], std::min<int64_t>(16, g->rows - first) * g->columns);
  r.norm = std::sqrt(squares);
  const auto weights = w.all(), gradients = r.gradient.all();
  for (size_t i = 0; i < weights.size(); i++) adamw(o, r.norm, *gradients[i], *weights[i]);
  return r;
}

}  // namespace pare::ref
