// Ops on logits: log-probs, overlaps and losses (ops/logits.h: Logprob, OverlapProbs, LogitsLoss), and the sums of
// tiles that the product of the LM head has not made.
//
// logits [R, V] act, overwritten by their gradient in logits_loss; per row log-prob, entropy and losses, f32, out.  A
// block has a row (logits.cuh shows its tiles).
//
// Order: list.h's of sums over the vocabulary, so the log-prob of a token has the same bits in all of them, and in f32
// those of the `cpu` table.
//
// Bytes: with VocabSums 12 a tile, and for a loss all logits, read once; else logits once more.  Limited by the
// exponentials, with few rows by the chains of sums, V / 128 additions long.
#include "logits.cuh"
#include "ops/token_loss.h"

namespace pare::PARE_CUDA {

namespace {

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    sum_tiles_of_rows(float* __restrict__ tiles, const T* __restrict__ logits, const int32_t* __restrict__ target,
                      int vocabulary, float temperature) {
  const Scaled<T> z{logits + int64_t{blockIdx.x} * vocabulary, temperature};
  const int count = ceil_div(vocabulary, kVocabTile);
  float* const row = tiles + int64_t{blockIdx.x} * 3 * (count + 1);
  sum_tiles(z, vocabulary, [&](int tile, float m, float sum, float weighted) {
    row[3 * tile] = m;
    row[3 * tile + 1] = sum;
    row[3 * tile + 2] = weighted;
  });
  if (target && threadIdx.x == 0) row[3 * count] = z.at(target[blockIdx.x]);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    logprobs(float* __restrict__ logprob, float* __restrict__ entropy, const T* __restrict__ logits,
             const int32_t* __restrict__ target, const RowSums sums, int vocabulary, float temperature) {
  const Scaled<T> z{logits + int64_t{blockIdx.x} * vocabulary, temperature};
  const float* const row = sums.row(blockIdx.x, vocabulary);
  const Distribution d = distribution<true>(z, vocabulary, row);
  if (threadIdx.x) return;
  logprob[blockIdx.x] = d.logprob(row ? row[3 * ceil_div(vocabulary, kVocabTile)] : z.at(target[blockIdx.x]));
  entropy[blockIdx.x] = d.entropy();
}

// ---- losses

struct ExpF32 {
  __device__ float operator()(float x) const { return exp_f32(x); }
};

// Returns, in every thread, a row sum, of which sum = add(id, sum) is a step.
template <class Add>
__device__ __forceinline__ float sum_over_ids(int vocabulary, Add add) {
  __shared__ float total;
  const Tiles tiles(vocabulary);
  const int lane = threadIdx.x % kLanes;
  for_tiles(vocabulary, [&](int tile) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kIds; i++) {
      const int id = tile * kVocabTile + lane + kLanes * i;
      if (id >= vocabulary) break;
      sum = add(id, sum);
    }
    sum = tree(sum);
    if (lane == 0 && tile < tiles.count) tiles.sum[tile] = sum;
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int t = 0; t < tiles.count; t++) sum += tiles.sum[t];
    total = sum;
  }
  __syncthreads();
  return total;
}

// Returns KL(p || q), in every thread: the sum of p (log p - log q).
template <class T>
__device__ float kl_to(const Scaled<T>& z, const Scaled<T>& zq, const Distribution& d, const Distribution& q,
                       int vocabulary) {
  return sum_over_ids(vocabulary, [&](int id, float sum) {
    const float x = z.at(id) - d.max, ratio = x - d.log_sum - (zq.at(id) - q.max - q.log_sum);
    return x == -INFINITY ? sum : fmaf(exp_at_most_1(x) / d.sum, ratio, sum);
  });
}

// Returns sum(c) of Centring, in every thread.
template <class T>
__device__ float centring_sum(const Centring& spec, const Scaled<T>& z, const Scaled<T>& zq, const Distribution& d,
                              const Distribution& q, int vocabulary) {
  return sum_over_ids(vocabulary, [&](int id, float sum) {
    return sum + centring_mass(spec, exp_at_most_1(z.at(id) - d.max) / d.sum, exp_at_most_1(zq.at(id) - q.max) / q.sum);
  });
}

template <class T>
struct LossArgs {
  float *logprob, *entropy, *loss, *kl;  // [R]
  int32_t* clipped;
  T* logits;
  const int32_t* target;
  const float *weight, *kl_weight, *advantage, *old_logprob, *log_ratio, *ref_logprob;  // [R] or null
  const T* other_logits;                                                                // [R, V] or null: of q
  RowSums sums;
  LossSpec spec;
  int vocabulary;
};

// d loss / d z at id i, times the temperature: with c the derivative by the target's log-prob, of
// c log p[target] + entropy_weight * -entropy + kl_weight * KL(p || q) or, forward, KL(q || p); plus that of centring.
struct Slope {
  float c, entropy_weight, kl_weight, kl;
  bool exact, forward;  // KL(p || q); KL(q || p)
  int target;
  float centre, centre_sum;  // the weight of centring, and sum(c)
};
template <bool kCentred, class T>
__device__ __forceinline__ float gradient(int i, float z, const Slope& s, const Scaled<T>& zq, const Distribution& d,
                                          const Distribution& q, const LossSpec& spec) {
  const float temperature = spec.temperature;
  const float x = z - d.max, e = exp_at_most_1(x);
  if (x == -INFINITY) return 0;
  const float p = e / d.sum, log_p = x - d.log_sum, log_q = s.exact ? zq.at(i) - q.max - q.log_sum : 0.f;
  float centred = 0;
  if (kCentred)
    centred = fmaf(-s.centre_sum, p, centring_mass(spec.centring, p, exp_at_most_1(zq.at(i) - q.max) / q.sum));
  if (i == s.target) {
    float g = s.c + p * (-s.c + s.entropy_weight * (log_p + d.entropy()));
    if (s.exact) g += p * s.kl_weight * (log_p - log_q - s.kl);
    if (s.forward) g += s.kl_weight * (p - exp_at_most_1(zq.at(i) - q.max) / q.sum);
    if (kCentred) g = fmaf(s.centre, centred, g);
    return g / temperature;
  }
  float g = fmaf(s.entropy_weight, log_p + d.entropy(), -s.c);
  if (s.exact) g = fmaf(s.kl_weight, log_p - log_q - s.kl, g);
  g = p * g;
  if (s.forward) g = fmaf(s.kl_weight, p - exp_at_most_1(zq.at(i) - q.max) / q.sum, g);
  if (kCentred) g = fmaf(s.centre, centred, g);
  return g / temperature;
}

template <class T, bool kCentred>
__global__ void __launch_bounds__(kThreads, 4) loss(const LossArgs<T> a) {
  const int64_t r = blockIdx.x;
  const LossSpec& spec = a.spec;
  const Scaled<T> z{a.logits + r * a.vocabulary, spec.temperature};
  const Distribution d = distribution<true>(z, a.vocabulary, a.sums.row(r, a.vocabulary));
  const float lp = d.logprob(z.at(a.target[r]));
  TokenLoss<float> token =
      token_loss<float>(spec, lp, a.old_logprob ? a.old_logprob[r] : 0.f, a.log_ratio ? a.log_ratio[r] : 0.f,
                        a.advantage ? a.advantage[r] : 0.f, a.ref_logprob ? a.ref_logprob[r] : 0.f, ExpF32{});
  const bool forward = spec.kl == KlLoss::exact_forward, exact = spec.kl == KlLoss::exact || forward;
  const Scaled<T> zq{exact || kCentred ? a.other_logits + r * a.vocabulary : z.logits, spec.temperature};
  Distribution q{};
  float centre_sum = 0;
  if (kCentred) {
    q = distribution<false>(zq, a.vocabulary, nullptr);
    centre_sum = centring_sum(spec.centring, z, zq, d, q, a.vocabulary);
  }
  if (exact) {
    q = distribution<false>(zq, a.vocabulary, nullptr);
    token.kl = forward ? kl_to(zq, z, q, d, a.vocabulary) : kl_to(z, zq, d, q, a.vocabulary);
  }
  if (threadIdx.x == 0) {
    a.logprob[r] = lp;
    a.entropy[r] = d.entropy();
    a.loss[r] = token.policy;
    a.kl[r] = token.kl;
    a.clipped[r] = token.clipped;
  }
  const float kl_weight = a.kl_weight[r] * spec.kl_coef;
  const Slope s{.c = a.weight[r] * token.d_policy + kl_weight * token.d_kl,
                .entropy_weight = a.kl_weight[r] * spec.entropy_coef,
                .kl_weight = kl_weight,
                .kl = token.kl,
                .exact = exact && !forward,
                .forward = forward,
                .target = a.target[r],
                .centre = kCentred ? a.kl_weight[r] * a.advantage[r] : 0.f,
                .centre_sum = centre_sum};
  __syncthreads();  // everyone has read the target's logit
  T* const row = a.logits + r * a.vocabulary;
  // Overwrites the row by slope(id, z) of each id.
  const auto overwrite = [&](auto slope) {
    Words<T> next = z.load(kEach * threadIdx.x, a.vocabulary);  // the next tile is loaded while one is computed
    for (int first = kEach * threadIdx.x; first < a.vocabulary; first += kStep) {
      const Some<T> x = some_of<T>(next);
      next = z.load(first + kStep, a.vocabulary);
      Some<T> g;
#pragma unroll
      for (int i = 0; i < kEach; i++)
        if (first + i < a.vocabulary) g.v[i] = from_float<T>(slope(first + i, z.scaled(to_float(x.v[i]))));
      if (at_once(row, a.vocabulary)) {
        *reinterpret_cast<Some<T>*>(row + first) = g;
      } else {
#pragma unroll
        for (int i = 0; i < kEach; i++)
          if (first + i < a.vocabulary) row[first + i] = g.v[i];
      }
    }
  };
  if (kCentred || exact || spec.entropy_coef != 0) {
    overwrite([&](int i, float zi) { return gradient<kCentred>(i, zi, s, zq, d, q, spec); });
  } else {  // of the target's log-prob alone
    const float factor = -s.c / d.sum / spec.temperature;
    overwrite([&](int i, float zi) {
      const float x = zi - d.max, e = exp_at_most_1(x);
      if (i == s.target) return x == -INFINITY ? 0.f : s.c * (1.f - e / d.sum) / spec.temperature;
      return x == -INFINITY ? 0.f : e * factor;
    });
  }
}

// ---- the overlap of two distributions

struct Overlap {
  float *overlap, *mass;  // [R]
  float temperature, lambda;
  int vocabulary, top_k;  // top_k 0: the mass is over every id
};

template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    overlap(const T* __restrict__ p_logits, const T* __restrict__ q_logits, const Overlap a) {
  constexpr int kTiles = kStep / kVocabTile;
  __shared__ float apart[kStep], lost[kStep], parts[2][kTiles];
  __shared__ uint32_t common[kStep / 32];
  const int64_t r = blockIdx.x;
  const Scaled<T> zp{p_logits + r * a.vocabulary, a.temperature}, zq{q_logits + r * a.vocabulary, a.temperature};
  const Distribution p = distribution<false>(zp, a.vocabulary, nullptr),
                     q = distribution<false>(zq, a.vocabulary, nullptr);
  uint64_t least_p = 0, least_q = 0;
  if (a.top_k) {
    least_p = least_of_largest(zp.logits, a.vocabulary, a.top_k);
    least_q = least_of_largest(zq.logits, a.vocabulary, a.top_k);
  }
  // The sums of `apart` and of `lost` in the first two threads, each of their tiles by half a warp.  With top_k a chain
  // over the ids that both have among their largest, in thread 0.
  static_assert(2 * kTiles == kThreads / kLanes);
  const int half = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, tile = half % kTiles, which = half / kTiles;
  float total = 0, chain = 0;
  for (int first = 0; first < a.vocabulary; first += kStep) {
    const int n = min(kStep, a.vocabulary - first);
    for (int i = threadIdx.x; i < kStep; i += kThreads) {  // by whole warps
      const int id = first + i;
      bool both = false;
      if (i < n) {
        const float pi = exp_at_most_1(zp.at(id) - p.max) / p.sum, qi = exp_at_most_1(zq.at(id) - q.max) / q.sum;
        const float pl = pi / a.lambda;
        both = a.top_k && rank(to_float(zp.logits[id]), id) >= least_p && rank(to_float(zq.logits[id]), id) >= least_q;
        apart[i] = qi > pi ? qi - pi : 0.f;
        lost[i] = a.top_k ? (pl < qi ? pl : qi) : (qi > pl ? qi - pl : 0.f);
      }
      const unsigned set = __ballot_sync(kAllLanes, both);
      if (threadIdx.x % 32 == 0) common[i / 32] = set;
    }
    __syncthreads();
    float sum = 0;
    for (int i = tile * kVocabTile + lane; i < min(n, (tile + 1) * kVocabTile); i += kLanes)
      sum += which ? lost[i] : apart[i];
    sum = tree(sum);
    if (lane == 0) parts[which][tile] = sum;
    if (threadIdx.x == 0 && a.top_k)
      for (int w = 0; w < kStep / 32; w++)
        for (uint32_t left = common[w]; left; left &= left - 1)
          chain += lost[w * 32 + __ffs(static_cast<int>(left)) - 1];
    __syncthreads();
    if (threadIdx.x < 2)
      for (int t = 0; t < kTiles; t++) total += parts[threadIdx.x][t];  // +0 after the last
  }
  if (threadIdx.x == 0) a.overlap[r] = 1.f - total;
  if (threadIdx.x == (a.top_k ? 0 : 1)) a.mass[r] = a.top_k ? chain : 1.f - total;
}

}  // namespace

void logprob(const Logprob& a, Stream stream) {
  const char* op = "logprob";
  const int64_t rows = rows_of(op, a.logits);
  if (rows == 0) return;
  with_act(op, a.logits, [&](auto type) {
    using T = decltype(type);
    launch(op, logprobs<T>, {.grid = blocks(op, rows, 1), .block = kThreads, .smem = Tiles::bytes(a.logits.shape[1])},
           stream, a.logprob.as<float>(), a.entropy.as<float>(), a.logits.as<T>(), a.target.as<int32_t>(),
           sums_of<T>(a.tiles), a.logits.shape[1], a.temperature);
  });
}

void overlap_probs(const OverlapProbs& a, Stream stream) {
  const char* op = "overlap_probs";
  const int64_t rows = rows_of(op, a.p_logits), vocabulary = a.p_logits.shape[1];
  if (rows == 0) return;
  const Overlap x{.overlap = a.overlap.as<float>(),
                  .mass = a.mass.as<float>(),
                  .temperature = a.temperature,
                  .lambda = a.lambda,
                  .vocabulary = static_cast<int>(vocabulary),
                  .top_k = a.top_k < vocabulary ? a.top_k : 0};
  with_act(op, a.p_logits, [&](auto type) {
    using T = decltype(type);
    launch(op, overlap<T>, {.grid = blocks(op, rows, 1), .block = kThreads, .smem = Tiles::bytes(vocabulary)}, stream,
           a.p_logits.as<T>(), a.q_logits.as<T>(), x);
  });
}

void logits_loss(const LogitsLoss& a, Stream stream) {
  const char* op = "logits_loss";
  const int64_t rows = rows_of(op, a.logits);
  const LossSpec& spec = a.spec;
  const bool policy = spec.policy != PolicyLoss::nll, gspo = spec.policy == PolicyLoss::gspo;
  const bool exact = is_exact(spec.kl), sampled = spec.kl != KlLoss::none && !exact;
  const auto column = [](bool used, const Tensor& t) { return used ? t.as<float>() : nullptr; };
  if (rows == 0) return;
  with_act(op, a.logits, [&](auto type) {
    using T = decltype(type);
    const LossArgs<T> args{.logprob = a.logprob.as<float>(),
                           .entropy = a.entropy.as<float>(),
                           .loss = a.loss.as<float>(),
                           .kl = a.kl.as<float>(),
                           .clipped = a.clipped.as<int32_t>(),
                           .logits = a.logits.as<T>(),
                           .target = a.target.as<int32_t>(),
                           .weight = a.weight.as<float>(),
                           .kl_weight = a.kl_weight.as<float>(),
                           .advantage = column(policy, a.advantage),
                           .old_logprob = column(policy && !gspo, a.old_logprob),
                           .log_ratio = column(gspo, a.log_ratio),
                           .ref_logprob = column(sampled, a.ref_logprob),
                           .other_logits = exact              ? a.ref_logits.as<T>()
                                           : spec.centring.on ? a.sampler_logits.as<T>()
                                                              : nullptr,
                           .sums = sums_of<T>(a.tiles),
                           .spec = spec,
                           .vocabulary = static_cast<int>(a.logits.shape[1])};
    launch(op, spec.centring.on ? loss<T, true> : loss<T, false>,
           {.grid = blocks(op, rows, 1), .block = kThreads, .smem = Tiles::bytes(a.logits.shape[1])}, stream, args);
  });
}

void sum_vocabulary(const LinearFwd& a, Stream stream) {
  const char* op = "linear_fwd";
  const VocabSums& sums = a.vocab_sums;
  if (!sums.tiles || a.y.dtype != DType::bf16) return;
  const int64_t rows = rows_of(op, a.y);
  if (rows == 0) return;
  launch(op, sum_tiles_of_rows<bf16>, {.grid = blocks(op, rows, 1), .block = kThreads}, stream, sums.tiles.as<float>(),
         a.y.as<bf16>(), sums.target ? sums.target.as<int32_t>() : nullptr, a.y.shape[1], sums.temperature);
}

}  // namespace pare::PARE_CUDA
