// Log-probs, losses and sampling, one row of logits at a time.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <vector>

#include "cpu/glue.h"

namespace pare::cpu {

namespace {

constexpr double kLogitNanoseconds = 1.5;

// Scratch of the kernels, of each thread.
float* scratch_of(int64_t vocabulary) {
  thread_local std::vector<float> scratch;
  const auto tiles = static_cast<size_t>((vocabulary + kVocabTile - 1) / kVocabTile);
  if (scratch.size() < 3 * tiles) scratch.resize(3 * tiles);
  return scratch.data();
}

void truncate_row(float* row, int64_t vocabulary, const Truncate& a) {
  thread_local std::vector<int32_t> ids;
  thread_local std::vector<float> share;  // exp(z - max z), by id
  const float max = *std::max_element(row, row + vocabulary) / a.temperature;
  share.resize(static_cast<size_t>(vocabulary));
  for (int64_t v = 0; v < vocabulary; v++) share[v] = row[v] / a.temperature - max;
  cpu_kernels().exp_at_most_1(share.data(), share.data(), vocabulary);
  ids.resize(static_cast<size_t>(vocabulary));
  std::iota(ids.begin(), ids.end(), 0);
  const auto before = [row](int32_t i, int32_t j) { return row[i] > row[j] || (row[i] == row[j] && i < j); };
  auto end = ids.begin() + vocabulary;  // of those kept
  if (a.keep.top_k > 0 && a.keep.top_k < vocabulary) {
    end = ids.begin() + a.keep.top_k;
    std::nth_element(ids.begin(), end, ids.end(), before);
  }
  if (a.keep.top_p < 1) {
    const auto units = [&](auto first, auto last) {
      uint64_t sum = 0;
      for (; first != last; ++first) sum += static_cast<uint64_t>(share[*first] * 0x1p40f);
      return sum;
    };
    const double goal = double{a.keep.top_p} * static_cast<double>(units(ids.begin(), end));
    // The id that reaches the goal lies in [first, last): which half of them?
    auto first = ids.begin(), last = end;
    for (uint64_t sum = 0; last - first > 1;) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, before);
      const uint64_t with_half = sum + units(first, middle);
      if (static_cast<double>(with_half) >= goal)
        last = middle;
      else {
        first = middle;
        sum = with_half;
      }
    }
    end = last;
  }
  for (auto id = end; id != ids.end(); ++id) row[*id] = -INFINITY;
  for (auto id = ids.begin(); id != end; ++id)
    if (share[*id] < a.keep.min_p) row[*id] = -INFINITY;
}

}  // namespace

void logprob(const Logprob& a, Stream) {
  constexpr const char* op = "logprob";
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  const float* const logits = a.logits.as<float>();
  float* const lp = a.logprob.as<float>();
  float* const entropy = a.entropy.as<float>();
  const int32_t* const target = index(op, "target", a.target, vocabulary);
  const Kernels& k = cpu_kernels();
  parallel(rows, kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    k.logprob(lp, entropy, logits, target, vocabulary, a.temperature, r, scratch_of(vocabulary));
  });
}

// Ids among the top_k largest of both rows, ascending.
static const std::vector<int32_t>& common_ids(const float* p, const float* q, int64_t vocabulary, int64_t top_k) {
  thread_local std::vector<int32_t> of_p, of_q, common;
  for (const auto& [row, ids] : {std::pair{p, &of_p}, {q, &of_q}}) {
    ids->resize(static_cast<size_t>(vocabulary));
    std::iota(ids->begin(), ids->end(), 0);
    std::nth_element(ids->begin(), ids->begin() + top_k, ids->end(),
                     [row = row](int32_t i, int32_t j) { return row[i] > row[j] || (row[i] == row[j] && i < j); });
    std::sort(ids->begin(), ids->begin() + top_k);
  }
  common.clear();
  std::set_intersection(of_p.begin(), of_p.begin() + top_k, of_q.begin(), of_q.begin() + top_k,
                        std::back_inserter(common));
  return common;
}

void overlap_probs(const OverlapProbs& a, Stream) {
  const int64_t rows = a.p_logits.shape[0], vocabulary = a.p_logits.shape[1];
  const float* const p = a.p_logits.as<float>();
  const float* const q = a.q_logits.as<float>();
  float* const overlap = a.overlap.as<float>();
  float* const mass = a.mass.as<float>();
  const bool all = a.top_k == 0 || a.top_k >= vocabulary;
  const Kernels& k = cpu_kernels();
  parallel(rows, (all ? 4 : 12) * kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++) {
      const float *pi = p + i * vocabulary, *qi = q + i * vocabulary;
      const int32_t* ids = nullptr;
      int64_t n = -1;
      if (!all) {
        const std::vector<int32_t>& common = common_ids(pi, qi, vocabulary, a.top_k);
        ids = common.data();
        n = static_cast<int64_t>(common.size());
      }
      k.overlap(overlap + i, mass + i, pi, qi, vocabulary, a.temperature, a.lambda, ids, n, scratch_of(vocabulary));
    }
  });
}

void logits_loss(const LogitsLoss& a, Stream) {
  constexpr const char* op = "logits_loss";
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  const bool policy = a.spec.policy != PolicyLoss::nll, gspo = a.spec.policy == PolicyLoss::gspo;
  const bool exact = is_exact(a.spec.kl), sampled = a.spec.kl != KlLoss::none && !exact;
  const auto column = [](bool read, const Tensor& t) { return read ? t.as<float>() : nullptr; };
  const LogitsLossArgs args{.logprob = a.logprob.as<float>(),
                            .entropy = a.entropy.as<float>(),
                            .loss = a.loss.as<float>(),
                            .kl = a.kl.as<float>(),
                            .clipped = a.clipped.as<int32_t>(),
                            .logits = a.logits.as<float>(),
                            .target = index(op, "target", a.target, vocabulary),
                            .weight = a.weight.as<float>(),
                            .kl_weight = a.kl_weight.as<float>(),
                            .advantage = column(policy, a.advantage),
                            .old_logprob = column(policy && !gspo, a.old_logprob),
                            .log_ratio = column(gspo, a.log_ratio),
                            .ref_logprob = column(sampled, a.ref_logprob),
                            .ref_logits = exact ? a.ref_logits.as<float>() : nullptr,
                            .sampler_logits = column(a.spec.centring.on, a.sampler_logits),
                            .spec = a.spec,
                            .vocabulary = vocabulary};
  const Kernels& k = cpu_kernels();
  parallel(rows, 2 * kLogitNanoseconds * static_cast<double>(vocabulary),
           [&](Interval r) { k.logits_loss(args, r, scratch_of(vocabulary)); });
}

void truncate(const Truncate& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  float* const logits = a.logits.as<float>();
  parallel(rows, 8 * kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++) truncate_row(logits + i * vocabulary, vocabulary, a);
  });
}

void list_kept(const ListKept& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1], limit = a.ids.shape[1] - 1;
  const float* const logits = a.logits.as<float>();
  int32_t* const ids = a.ids.as<int32_t>();
  parallel(rows, kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++) {
      const float* const row = logits + i * vocabulary;
      int32_t* const list = ids + i * (1 + limit);
      int32_t n = 0;
      for (int32_t v = 0; v < vocabulary; v++)
        if (row[v] > -INFINITY && n++ < limit) list[n] = v;
      list[0] = n;
      std::fill(list + 1 + std::min<int64_t>(n, limit), list + 1 + limit, -1);
    }
  });
}

void keep_listed(const KeepListed& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1], limit = a.ids.shape[1] - 1;
  float* const logits = a.logits.as<float>();
  const int32_t* const ids = a.ids.as<int32_t>();
  parallel(rows, kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++) {
      float* const row = logits + i * vocabulary;
      const int32_t* const list = ids + i * (1 + limit);
      int64_t next = 0;
      for (int32_t k = 0; k < list[0]; next = list[++k] + 1) std::fill(row + next, row + list[1 + k], -INFINITY);
      std::fill(row + next, row + vocabulary, -INFINITY);
    }
  });
}

void sample(const Sample& a, Stream) {
  const int64_t rows = a.logits.shape[0], vocabulary = a.logits.shape[1];
  const float* const logits = a.logits.as<float>();
  int32_t* const token = a.token.as<int32_t>();
  float* const lp = a.logprob.as<float>();
  const int32_t* const counter = a.counter.as<int32_t>();
  const Kernels& k = cpu_kernels();
  parallel(rows, 4 * kLogitNanoseconds * static_cast<double>(vocabulary), [&](Interval r) {
    for (int64_t i = r.begin; i < r.end; i++)
      token[i] = k.sample(logits + i * vocabulary, vocabulary, a.temperature, a.key, counter + 3 * i, lp + i,
                          scratch_of(vocabulary));
  });
}

}  // namespace pare::cpu
