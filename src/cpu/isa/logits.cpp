// Kernels on logits.  One function computes the maximum and the sum of exponentials of a row for
// log-probs, losses and sampling, so the log-prob of a token is bitwise the same in all three.  It reads the row once:
// the exponentials of a tile are relative to the tile's own maximum, and factors bring the sums of tiles together.
#include "ops/logits.h"

#include "cpu/isa/math.h"
#include "cpu/kernels.h"
#include "ops/token_loss.h"

namespace pare::PARE_ISA {

void exp(float* y, const float* x, int64_t n) {
  for_vectors(
      n, PARE_LANES_AT(i) { store(y + i, exp(load(x + i, lanes)), lanes); });
}

void exp_at_most_1(float* y, const float* x, int64_t n) {
  for_vectors(
      n, PARE_LANES_AT(i) { store(y + i, exp_at_most_1(load(x + i, lanes)), lanes); });
}

void log(float* y, const float* x, int64_t n) {
  for_vectors(
      n, PARE_LANES_AT(i) { store(y + i, log(load(x + i, lanes)), lanes); });
}

namespace {

// z = logits / temperature
struct Scaled {
  const float* logits;
  float temperature;
  PARE_INLINE vf at(int64_t i, int64_t lanes) const {
    const vf x = load(logits + i, lanes);
    return temperature == 1 ? x : div(x, set1(temperature));  // division by 1 is exact
  }
  PARE_INLINE float at(int64_t i) const { return logits[i] / temperature; }
};

struct Distribution {
  float max, sum, log_sum;
  float weighted;  // sum of (z - max) exp(z - max)
  PARE_INLINE float logprob(float z) const { return z - max - log_sum; }
  PARE_INLINE float entropy() const { return log_sum - weighted / sum; }
};

// f(first, n) for each tile of n ids.
template <class F>
PARE_INLINE void for_tiles(int64_t vocabulary, F f) {
  for (int64_t first = 0; first < vocabulary; first += kVocabTile) f(first, min64(kVocabTile, vocabulary - first));
}

// scratch: as kernels.h says; without kEntropy the maxima of the tiles come first and are kept.
template <bool kEntropy>
PARE_INLINE Distribution distribution(const Scaled& z, int64_t vocabulary, float* scratch) {
  const int64_t tiles = (vocabulary + kVocabTile - 1) / kVocabTile;
  float *const tops = scratch, *const sums = tops + tiles, *const weighted = sums + tiles;
  constexpr float kLow = -__builtin_inff();
  // z of the tile that is summed up, and of the next, whose maximum is found meanwhile.
  alignas(64) float x[2][kVocabTile];
  const auto read = [&](int64_t tile) __attribute__((always_inline)) {
    const int64_t first = tile * kVocabTile;
    vf top = set1(kLow);
    for_vectors(
        min64(kVocabTile, vocabulary - first), PARE_LANES_AT(i) {
          const vf zi = select(first_lanes(lanes), z.at(first + i, lanes), set1(kLow));
          store(x[tile % 2] + i, zi);
          top = max(top, zi);
        });
    tops[tile] = highest(top);
  };
  Distribution d{};
  d.max = kLow;
  read(0);
  for (int64_t tile = 0; tile < tiles; tile++) {
    if (tile + 1 < tiles) read(tile + 1);
    const float m = tops[tile];
    const vf base = set1(m == kLow ? 0 : m);  // exp(-infinity - 0) is +0: such a tile adds nothing
    vf e_sum = zero(), xe_sum = zero();
    for (int64_t i = 0; i < min64(kVocabTile, vocabulary - tile * kVocabTile); i += 16) {
      const vf below = sub(load(x[tile % 2] + i), base), e = exp_at_most_1(below);  // +0 behind the last
      e_sum = add(e_sum, e);
      if (kEntropy) xe_sum = fma(select(less(zero(), e), below, zero()), e, xe_sum);
    }
    sums[tile] = sum(e_sum);
    if (kEntropy) weighted[tile] = sum(xe_sum);
    d.max = m > d.max ? m : d.max;
  }
  float* const factors = kEntropy ? tops : weighted;
  for_vectors(
      tiles, PARE_LANES_AT(t) {
        const vf below = sub(load(tops + t, lanes), set1(d.max));
        if (kEntropy) {
          const vf s = load(sums + t, lanes), w = load(weighted + t, lanes);
          store(weighted + t, select(less(zero(), s), fma(below, s, w), w), lanes);
        }
        store(factors + t, exp_at_most_1(below), lanes);
      });
  for (int64_t t = 0; t < tiles; t++) {
    d.sum = __builtin_fmaf(sums[t], factors[t], d.sum);
    if (kEntropy) d.weighted = __builtin_fmaf(weighted[t], factors[t], d.weighted);
  }
  d.log_sum = log1(d.sum);
  return d;
}

// -log(-log(u)) for ids first .. first + 63; first is a multiple of 64.  False, and none: all u are below 1 - limit.
PARE_INLINE bool gumbel64(float* out, int64_t first, uint64_t key, const int32_t* counter, float limit) {
  constexpr uint32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vi c[4] = {iadd(iset1(static_cast<uint32_t>(first / 4)), iload(kLanes)), iset1(static_cast<uint32_t>(counter[2])),
             iset1(static_cast<uint32_t>(counter[0])), iset1(static_cast<uint32_t>(counter[1]))};
  philox(c, key);
  vf u[4];
  PARE_UNROLL
  for (int w = 0; w < 4; w++) u[w] = mul(add(to_float(shr<9>(c[w])), set1(0.5f)), set1(0x1p-23f));  // uniform_open
  if (1 - highest(max(max(u[0], u[1]), max(u[2], u[3]))) > limit) return false;
  float words[4][16];
  PARE_UNROLL
  for (int w = 0; w < 4; w++) store(words[w], sub(zero(), log(sub(zero(), log(u[w])))));
  for (int i = 0; i < 64; i++) out[i] = words[i % 4][i / 4];
  return true;
}

// The largest value, lower id on ties, over ids in the order of calls.
struct Best {
  vf value = set1(-__builtin_inff());
  vi id = iset1(0);
  PARE_INLINE void take(vf x, vi ids) {
    const mask better = less(value, x);
    value = select(better, x, value);
    id = select(better, ids, id);
  }
};
// The id of the larger.
PARE_INLINE int32_t winner(const Best& a, const Best& b) {
  float values[32];
  int32_t ids[32];
  store(values, a.value);
  store(values + 16, b.value);
  istore(ids, a.id);
  istore(ids + 16, b.id);
  int best = 0;
  for (int i = 1; i < 32; i++)
    if (values[i] > values[best] || (values[i] == values[best] && ids[i] < ids[best])) best = i;
  return ids[best];
}

struct Exp {
  float operator()(float x) const { return exp1(x); }
};

// Gradient of coefficient * logprob, in place of the logits.
void plain_gradient(float* row, int64_t vocabulary, int32_t target, const Distribution& d, float coefficient,
                    float temperature) {
  const Scaled z{row, temperature};
  const float at_target = coefficient * (1 - exp_at_most_1(z.at(target) - d.max) / d.sum) / temperature;
  const vf m = set1(d.max), factor = set1(-coefficient / d.sum / temperature);
  for_vectors(
      vocabulary, PARE_LANES_AT(i) { store(row + i, mul(exp_at_most_1(sub(z.at(i, lanes), m)), factor), lanes); });
  row[target] = at_target;
}

PARE_INLINE vf probability(const Scaled& z, const Distribution& d, int64_t i, int64_t lanes) {
  return div(exp_at_most_1(sub(z.at(i, lanes), set1(d.max))), set1(d.sum));
}

// centring_mass() of vectors.
PARE_INLINE vf centring_mass(const Centring& c, vf p, vf q) {
  const vf mass = c.by_ratio ? min(p, mul(set1(c.cap), q)) : q;
  return select(less(p, mul(set1(c.low), q)), zero(), select(less(mul(set1(c.high), q), p), zero(), mass));
}

// Centring adds weight (c - p sum) to the gradient.
struct Centre {
  const Centring& spec;
  Scaled z;
  Distribution q;
  float weight, sum;
};

// The same plus entropy_weight * -entropy + kl_weight * KL(p || q) or, `forward`, KL(q || p); `ref` is null without
// KL, `centre` without centring.  Per id: p ((log p + entropy) entropy_weight + (log p - log q - kl)
// kl_weight - coefficient), or forward p ((log p + entropy) entropy_weight - coefficient) + (p - q) kl_weight.
void full_gradient(float* row, const float* ref, int64_t vocabulary, int32_t target, const Distribution& d,
                   const Distribution& q, bool forward, float kl, float coefficient, float entropy_weight,
                   float kl_weight, float temperature, const Centre* centre) {
  const Scaled z{row, temperature}, zq{ref, temperature};
  const vf m = set1(d.max), sum = set1(d.sum), log_sum = set1(d.log_sum), h = set1(d.entropy()), t = set1(temperature);
  const float pt = exp_at_most_1(z.at(target) - d.max) / d.sum;
  float at_target = coefficient + pt * (-coefficient + entropy_weight * (d.logprob(z.at(target)) + d.entropy()));
  if (forward)
    at_target += kl_weight * (pt - exp_at_most_1(zq.at(target) - q.max) / q.sum);
  else if (ref)
    at_target += pt * kl_weight * (d.logprob(z.at(target)) - q.logprob(zq.at(target)) - kl);
  if (centre) {
    const float c =
        pare::centring_mass(centre->spec, pt, exp_at_most_1(centre->z.at(target) - centre->q.max) / centre->q.sum);
    at_target = __builtin_fmaf(centre->weight, __builtin_fmaf(-centre->sum, pt, c), at_target);
  }
  for_vectors(
      vocabulary, PARE_LANES_AT(i) {
        const vf x = sub(z.at(i, lanes), m), p = div(exp_at_most_1(x), sum), log_p = sub(x, log_sum);
        vf g = fma(set1(entropy_weight), add(log_p, h), set1(-coefficient));
        if (ref && !forward) {
          const vf log_q = sub(sub(zq.at(i, lanes), set1(q.max)), set1(q.log_sum));
          g = fma(set1(kl_weight), sub(sub(log_p, log_q), set1(kl)), g);
        }
        vf slope = mul(p, g);
        if (forward) {
          slope = fma(set1(kl_weight), sub(p, probability(zq, q, i, lanes)), slope);
        }
        if (centre) {
          const vf c = centring_mass(centre->spec, p, probability(centre->z, centre->q, i, lanes));
          slope = fma(set1(centre->weight), fma(set1(-centre->sum), p, c), slope);
        }
        store(row + i, select(less(x, set1(-__FLT_MAX__)), zero(), div(slope, t)), lanes);
      });
  row[target] = at_target / temperature;
}

float kl_to(const Scaled& z, const Scaled& zq, const Distribution& d, const Distribution& q, int64_t vocabulary) {
  float total = 0;
  for_tiles(vocabulary, [&](int64_t first, int64_t n) {
    vf acc = zero();
    for_vectors(
        n, PARE_LANES_AT(i) {
          const vf x = sub(z.at(first + i, lanes), set1(d.max)), p = div(exp_at_most_1(x), set1(d.sum));
          const vf log_p = sub(x, set1(d.log_sum));
          const vf log_q = sub(sub(zq.at(first + i, lanes), set1(q.max)), set1(q.log_sum));
          const vf here = select(first_lanes(lanes), fma(p, sub(log_p, log_q), acc), acc);
          acc = select(less(x, set1(-__FLT_MAX__)), acc, here);
        });
    total += sum(acc);
  });
  return total;
}

float centring_sum(const Centring& spec, const Scaled& z, const Scaled& zq, const Distribution& d,
                   const Distribution& q, int64_t vocabulary) {
  float total = 0;
  for_tiles(vocabulary, [&](int64_t first, int64_t n) {
    vf acc = zero();
    for_vectors(
        n, PARE_LANES_AT(i) {
          const vf c = centring_mass(spec, probability(z, d, first + i, lanes), probability(zq, q, first + i, lanes));
          acc = select(first_lanes(lanes), add(acc, c), acc);
        });
    total += sum(acc);
  });
  return total;
}

void loss_row(const LogitsLossArgs& a, int64_t r, float* scratch) {
  const LossSpec& spec = a.spec;
  const bool policy = spec.policy != PolicyLoss::nll, gspo = spec.policy == PolicyLoss::gspo;
  const bool exact = is_exact(spec.kl), sampled = spec.kl != KlLoss::none && !exact;
  const bool forward = spec.kl == KlLoss::exact_forward;
  const bool plain = spec.entropy_coef == 0 && !exact && !spec.centring.on;
  float* const row = a.logits + r * a.vocabulary;
  const Scaled z{row, spec.temperature};
  const float at_target = z.at(a.target[r]);
  const Distribution d = distribution<true>(z, a.vocabulary, scratch);
  const float logprob = d.logprob(at_target);
  const TokenLoss<float> token =
      token_loss<float>(spec, logprob, policy && !gspo ? a.old_logprob[r] : 0, gspo ? a.log_ratio[r] : 0,
                        policy ? a.advantage[r] : 0, sampled ? a.ref_logprob[r] : 0, Exp{});
  a.logprob[r] = logprob;
  a.entropy[r] = d.entropy();
  a.loss[r] = token.policy;
  a.kl[r] = token.kl;
  a.clipped[r] = token.clipped;
  const float kl_weight = a.kl_weight[r] * spec.kl_coef, entropy_weight = a.kl_weight[r] * spec.entropy_coef;
  const float coefficient = a.weight[r] * token.d_policy + kl_weight * token.d_kl;
  if (plain) return plain_gradient(row, a.vocabulary, a.target[r], d, coefficient, spec.temperature);
  const float* const ref = exact ? a.ref_logits + r * a.vocabulary : nullptr;
  Distribution q{};
  if (exact) {
    const Scaled zq{ref, spec.temperature};
    q = distribution<false>(zq, a.vocabulary, scratch);
    a.kl[r] = forward ? kl_to(zq, z, q, d, a.vocabulary) : kl_to(z, zq, d, q, a.vocabulary);
  }
  Centre centre{spec.centring, {nullptr, spec.temperature}, {}, 0, 0};
  if (spec.centring.on) {
    centre.z.logits = a.sampler_logits + r * a.vocabulary;
    centre.q = distribution<false>(centre.z, a.vocabulary, scratch);
    centre.weight = a.kl_weight[r] * a.advantage[r];
    centre.sum = centring_sum(spec.centring, z, centre.z, d, centre.q, a.vocabulary);
  }
  full_gradient(row, ref, a.vocabulary, a.target[r], d, q, forward, a.kl[r], coefficient, entropy_weight, kl_weight,
                spec.temperature, spec.centring.on ? &centre : nullptr);
}

}  // namespace

void logprob(float* logprob, float* entropy, const float* logits, const int32_t* target, int64_t vocabulary,
             float temperature, Interval rows, float* scratch) {
  for (int64_t r = rows.begin; r < rows.end; r++) {
    const Scaled z{logits + r * vocabulary, temperature};
    const Distribution d = distribution<true>(z, vocabulary, scratch);
    logprob[r] = d.logprob(z.at(target[r]));
    entropy[r] = d.entropy();
  }
}

void overlap(float* overlap, float* mass, const float* p, const float* q, int64_t vocabulary, float temperature,
             float lambda, const int32_t* common, int64_t n_common, float* scratch) {
  const Scaled zp{p, temperature}, zq{q, temperature};
  const Distribution dp = distribution<false>(zp, vocabulary, scratch);
  const Distribution dq = distribution<false>(zq, vocabulary, scratch);
  float apart = 0, lost = 0;
  for_tiles(vocabulary, [&](int64_t first, int64_t n) {
    vf apart_here = zero(), lost_here = zero();
    for_vectors(
        n, PARE_LANES_AT(i) {
          const vf pi = probability(zp, dp, first + i, lanes), qi = probability(zq, dq, first + i, lanes);
          const vf pl = div(pi, set1(lambda));
          apart_here = add(apart_here, select(first_lanes(lanes), max(sub(qi, pi), zero()), zero()));
          lost_here = add(lost_here, select(first_lanes(lanes), max(sub(qi, pl), zero()), zero()));
        });
    apart += sum(apart_here);
    lost += sum(lost_here);
  });
  *overlap = 1 - apart;
  *mass = 1 - lost;
  if (n_common < 0) return;
  float chain = 0;
  for (int64_t i = 0; i < n_common; i++) {
    const float pl = exp_at_most_1(zp.at(common[i]) - dp.max) / dp.sum / lambda,
                qi = exp_at_most_1(zq.at(common[i]) - dq.max) / dq.sum;
    chain += pl < qi ? pl : qi;
  }
  *mass = chain;
}

void logits_loss(const LogitsLossArgs& a, Interval rows, float* scratch) {
  for (int64_t r = rows.begin; r < rows.end; r++) loss_row(a, r, scratch);
}

int32_t sample(const float* logits, int64_t vocabulary, float temperature, uint64_t key, const int32_t* counter,
               float* logprob, float* scratch) {
  const vf low = set1(-__builtin_inff());
  constexpr uint32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vi lane = iload(kLanes);
  if (temperature == 0) {
    const Scaled z{logits, 1};
    Best best;
    for_vectors(
        vocabulary, PARE_LANES_AT(i) {
          const vf x = select(first_lanes(lanes), z.at(i, lanes), low);
          best.take(x, iadd(iset1(static_cast<uint32_t>(i)), lane));
        });
    *logprob = 0;
    return winner(best, best);
  }
  const Scaled z{logits, temperature};
  const Distribution d = distribution<false>(z, vocabulary, scratch);
  const float* const tops = scratch;
  float reached = -__builtin_inff();  // by some id
  // Ids of a tile that can reach that, or more: -log u >= 1 - u, so the number of u is at most g where 1 - u >=
  // exp(-g). The margins are for rounding.
  const auto take = [&](Best & best, int64_t tile) __attribute__((always_inline)) {
    const float g = reached - tops[tile] - (1e-6f * __builtin_fabsf(reached) + 0.01f);
    const float limit = g > 0 ? exp1(-g) : 1;
    const int64_t end = min64((tile + 1) * kVocabTile, vocabulary);
    alignas(64) float gumbel[64];
    for (int64_t first = tile * kVocabTile; first < end; first += 64) {
      if (!gumbel64(gumbel, first, key, counter, limit)) continue;
      for (int64_t i = first; i < min64(first + 64, end); i += 16) {
        const vf score = add(z.at(i, min64(16, end - i)), load(gumbel + i - first));
        best.take(select(first_lanes(end - i), score, low), iadd(iset1(static_cast<uint32_t>(i)), lane));
      }
      const float here = highest(best.value);
      reached = here > reached ? here : reached;
    }
  };
  // The tile of the largest logit comes first: few others can win against its ids.
  int64_t peak = 0;
  while (tops[peak] < d.max) peak++;
  Best of_peak, best;
  take(of_peak, peak);
  for (int64_t tile = 0; tile * kVocabTile < vocabulary; tile++)
    if (tile != peak && !(tops[tile] + kMostGumbel < reached)) take(best, tile);
  const int32_t id = winner(of_peak, best);
  *logprob = d.logprob(z.at(id));
  return id;
}

}  // namespace pare::PARE_ISA
