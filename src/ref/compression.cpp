// Compressions of a cache that evicts: scores of slots by window attention (SnapKV), redundancy (R-KV) and accumulated
// attention (H2O), the choice by them, and compaction.
#include "ref/compression.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

namespace pare::ref {

std::vector<KvCompression> read_compressions(const char* op, const Tensor& compressions, const KvWork& work) {
  const View<int32_t> v(compressions);
  std::vector<KvCompression> list;
  for (int64_t i = 0; i < compressions.shape[0]; i++) {
    const KvCompression e{v(i, 0), v(i, 1), v(i, 2), v(i, 3), v(i, 4)};
    expect(e.first >= 0 && e.recent >= 0 && e.keep >= e.recent && int64_t(e.first) + e.keep <= e.slots, "ref: ", op,
           ": compression ", i, " has ", e.slots, " slots, ", e.first, " of them protected, ", e.recent, " recent, ",
           e.keep, " to be kept");
    list.push_back(e);
  }
  const KvWork counted = kv_work(list.data(), static_cast<int64_t>(list.size()));
  expect(counted == work, "ref: ", op, ": work says ", work.slots, " slots, ", work.candidates, " candidates, ",
         work.kept, " kept, ", work.pairs, " pairs; the compressions hold ", counted.slots, ", ", counted.candidates,
         ", ", counted.kept, ", ", counted.pairs);
  return list;
}

void expect_compression_pages(const char* op, const char* name, const Tensor& list, int64_t compression, int64_t slots,
                              int64_t pages) {
  expect(list.rank == 2 && compression < list.shape[0] && slots <= list.shape[1] * kPageSlots, "ref: ", op, ": ", name,
         " is ", list.str(), ", compression ", compression, " has ", slots, " slots");
  const CompressionPages page{View<int32_t>(list), compression};
  for (int64_t s = 0; s < slots; s += kPageSlots)
    expect(page(s) >= 0 && page(s) < pages, "ref: ", op, ": ", name, ": slot ", s, " of compression ", compression,
           " lies in page ", page(s), " of ", pages);
}

namespace {

// Room for every compression.
void expect_score(const char* op, const Tensor& score, const std::vector<KvCompression>& compressions) {
  for (const KvCompression& e : compressions)
    expect(e.slots <= score.shape[2], "ref: ", op, ": a compression of ", e.slots, " slots, score is ", score.str());
}

void softmax(std::vector<double>& z) {
  if (z.empty()) return;
  const double max = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (double& x : z) sum += x = std::exp(x - max);
  for (double& x : z) x /= sum;
}

std::vector<double> pooled(const std::vector<double>& x, Pool pool, int64_t kernel) {
  std::vector<double> y(x.size());
  const int64_t n = static_cast<int64_t>(x.size());
  for (int64_t i = 0; i < n; i++) {
    const int64_t begin = std::max<int64_t>(0, i - kernel / 2), end = std::min(n, i + kernel / 2 + 1);
    y[i] = pool == Pool::max ? -std::numeric_limits<double>::infinity() : 0;
    for (int64_t j = begin; j < end; j++) y[i] = pool == Pool::max ? std::max(y[i], x[j]) : y[i] + x[j];
    if (pool == Pool::avg) y[i] /= static_cast<double>(kernel);
  }
  return y;
}

// The probabilities that query `q` (its heads of one group) gives slots [first, end).
template <class Logit>
std::vector<double> group_probability(GqaAgg aggregate, int64_t group, int64_t first, int64_t end, Logit logit) {
  std::vector<double> mean(end - first);
  if (aggregate == GqaAgg::mean_prob) {
    for (int64_t g = 0; g < group; g++) {
      std::vector<double> p(end - first);
      for (int64_t s = first; s < end; s++) p[s - first] = logit(g, s);
      softmax(p);
      for (size_t i = 0; i < p.size(); i++) mean[i] += p[i];
    }
    for (double& x : mean) x /= static_cast<double>(group);
    return mean;
  }
  for (int64_t s = first; s < end; s++) {
    double z = logit(0, s);
    for (int64_t g = 1; g < group; g++) z = aggregate == GqaAgg::max_logit ? std::max(z, logit(g, s)) : z + logit(g, s);
    mean[s - first] = aggregate == GqaAgg::max_logit ? z : z / static_cast<double>(group);
  }
  softmax(mean);
  return mean;
}

}  // namespace

void kv_window_scores(const KvWindowScores& a, Stream) {
  constexpr const char* op = "kv_window_scores";
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  const auto compressions = read_compressions(op, a.compressions, a.work);
  expect_score(op, a.score, compressions);
  if (a.window_first) expect_index(op, "window_first", a.window_first, a.window);
  const int64_t group = a.windows.shape[1] / kv_heads;
  dispatch(op, a.k_pages, [&]<class T>(T) {
    const View<T> score(a.score), windows(a.windows), k(a.k_pages);
    for (int64_t i = 0; i < static_cast<int64_t>(compressions.size()); i++) {
      const KvCompression& e = compressions[i];
      expect_compression_pages(op, "src_pages", a.src_pages, i, e.slots, pages);
      expect(a.window <= e.recent && e.window_row >= 0 && int64_t(e.window_row) + a.window <= a.windows.shape[0],
             "ref: ", op, ": compression ", i, " has ", e.recent, " recent slots and window rows [", e.window_row, ", ",
             e.window_row + a.window, ") of ", a.windows.shape[0]);
      const CompressionPages page{View<int32_t>(a.src_pages), i};
      const int64_t oldest = a.window_first ? View<int32_t>(a.window_first)(i) : 0, candidates = e.slots - e.recent;
      for (int64_t h = 0; h < kv_heads; h++) {
        std::vector<double> raw(candidates - e.first);
        for (int64_t t = 0; t < a.window; t++) {
          const int64_t row = e.window_row + (oldest + t) % a.window;
          const int64_t end = a.span == SoftmaxSpan::exclude_window ? candidates : e.slots - a.window + t + 1;
          const auto p = group_probability(a.aggregate, group, e.first, end, [&](int64_t g, int64_t s) {
            double dot = 0;
            for (int64_t d = 0; d < head_dim; d++)
              dot += double(windows(row, h * group + g, d)) * k(page(s), h, d, s % kPageSlots);
            return dot * a.scale;
          });
          for (size_t s = 0; s < raw.size(); s++) raw[s] += p[s];
        }
        for (double& x : raw) x /= a.window;
        const auto result = pooled(raw, a.pool, a.kernel);
        for (size_t s = 0; s < raw.size(); s++) score(i, h, e.first + s) = static_cast<T>(result[s]);
      }
    }
  });
}

// R of one compression and head: keys [n][head_dim].
static std::vector<double> redundancy(const std::vector<std::vector<double>>& keys, double threshold) {
  const int64_t n = static_cast<int64_t>(keys.size());
  std::vector<double> norm, mean(n);
  const auto dot = [&](int64_t i, int64_t j) {
    double sum = 0;
    for (size_t d = 0; d < keys[i].size(); d++) sum += keys[i][d] * keys[j][d];
    return sum;
  };
  for (int64_t i = 0; i < n; i++) norm.push_back(std::sqrt(dot(i, i)) + 1e-8);
  for (int64_t i = 0; i < n; i++) {
    std::vector<double> row(n);
    for (int64_t j = 0; j < n; j++) row[j] = i == j ? 0 : dot(i, j) / (norm[i] * norm[j]);
    int64_t last = 0;
    for (int64_t j = 0; j < n; j++)
      if (row[j] > threshold) last = j;
    row[last] = 0;
    for (int64_t j = 0; j < n; j++) mean[j] += row[j] / static_cast<double>(n);
  }
  softmax(mean);
  return mean;
}

void kv_redundancy(const KvRedundancy& a, Stream) {
  constexpr const char* op = "kv_redundancy";
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  const auto compressions = read_compressions(op, a.compressions, a.work);
  expect_score(op, a.score, compressions);
  dispatch(op, a.k_pages, [&]<class T>(T) {
    const View<T> score(a.score), k(a.k_pages);
    for (int64_t i = 0; i < static_cast<int64_t>(compressions.size()); i++) {
      const KvCompression& e = compressions[i];
      expect_compression_pages(op, "src_pages", a.src_pages, i, e.slots, pages);
      const CompressionPages page{View<int32_t>(a.src_pages), i};
      for (int64_t h = 0; h < kv_heads; h++) {
        std::vector<std::vector<double>> keys(e.slots - e.first, std::vector<double>(head_dim));
        for (int64_t s = e.first; s < e.slots; s++)
          for (int64_t d = 0; d < head_dim; d++) keys[s - e.first][d] = k(page(s), h, d, s % kPageSlots);
        const auto r = redundancy(keys, a.threshold);
        for (int64_t s = e.first; s < e.slots - e.recent; s++)
          score(i, h, s) = static_cast<T>(a.lambda * double(score(i, h, s)) - (1 - double(a.lambda)) * r[s - e.first]);
      }
    }
  });
}

void kv_mass_scores(const KvMassScores& a, Stream) {
  constexpr const char* op = "kv_mass_scores";
  const int64_t pages = a.mass_pages.shape[0], kv_heads = a.mass_pages.shape[1];
  const auto compressions = read_compressions(op, a.compressions, a.work);
  expect_score(op, a.score, compressions);
  dispatch(op, a.mass_pages, [&]<class T>(T) {
    const View<T> score(a.score), mass(a.mass_pages);
    for (int64_t i = 0; i < static_cast<int64_t>(compressions.size()); i++) {
      const KvCompression& e = compressions[i];
      expect_compression_pages(op, "src_pages", a.src_pages, i, e.slots, pages);
      const CompressionPages page{View<int32_t>(a.src_pages), i};
      for (int64_t h = 0; h < kv_heads; h++)
        for (int64_t s = e.first; s < e.slots - e.recent; s++) score(i, h, s) = mass(page(s), h, s % kPageSlots);
    }
  });
}

void kv_select(const KvSelect& a, Stream) {
  constexpr const char* op = "kv_select";
  const auto compressions = read_compressions(op, a.compressions, a.work);
  const int64_t kv_heads = a.keep.shape[1];
  if (a.score) expect_score(op, a.score, compressions);
  const View<int32_t> keep(a.keep);
  const auto choose = [&]<class T>(T, const Tensor& scores) {
    for (int64_t i = 0; i < static_cast<int64_t>(compressions.size()); i++) {
      const KvCompression& e = compressions[i];
      expect(e.keep <= a.keep.shape[2], "ref: ", op, ": compression ", i, " keeps ", e.keep, ", keep is ",
             a.keep.str());
      expect(scores || e.keep == e.recent, "ref: ", op, ": compression ", i, " chooses without scores");
      const int64_t end = e.slots - e.recent;
      for (int64_t h = 0; h < kv_heads; h++) {
        std::vector<std::pair<T, int32_t>> best;  // in order: score, slot
        for (int64_t s = e.first; scores && s < end; s++) {
          const View<T> score(scores);
          T x = score(i, a.shared_heads ? 0 : h, s);
          for (int64_t other = 1; a.shared_heads && other < kv_heads; other++) x += score(i, other, s);
          best.push_back({x, static_cast<int32_t>(s)});
        }
        std::sort(best.rbegin(), best.rend());
        best.resize(e.keep - e.recent);
        std::vector<int32_t> slots;
        for (const auto& [x, s] : best) slots.push_back(s);
        std::sort(slots.begin(), slots.end());
        for (int64_t s = end; s < e.slots; s++) slots.push_back(static_cast<int32_t>(s));
        for (int32_t j = 0; j < e.keep; j++) keep(i, h, j) = slots[j];
      }
    }
  };
  if (a.score)
    dispatch(op, a.score, [&]<class T>(T t) { choose(t, a.score); });
  else
    choose(float{}, Tensor{});
}

// KvCompact: what a compression writes nobody else reads or writes.
static void expect_own_pages(const char* op, const KvCompact& a, const std::vector<KvCompression>& compressions) {
  const View<int32_t> src(a.src_pages), dst(a.dst_pages);
  std::map<int32_t, int64_t> reads, writes;  // page -> how many compressions
  for (size_t i = 0; i < compressions.size(); i++) {
    const KvCompression& e = compressions[i];
    std::set<int32_t> own;
    for (int64_t p = 0; p * kPageSlots < e.slots; p++)
      if ((p + 1) * kPageSlots > e.first) own.insert(src(i, p));
    for (int32_t p : own) reads[p]++;
    for (int64_t p = 0; p * kPageSlots < e.first + e.keep; p++) {
      const bool below = (p + 1) * kPageSlots <= e.first, both = p * kPageSlots < e.first && !below;
      expect(!(below || both) || src(i, p) == dst(i, p), "ref: ", op, ": page ", p, " of compression ", i,
             " holds protected slots; it is ", src(i, p), " before and ", dst(i, p), " after");
      if (below) continue;
      expect(src(i, p) == dst(i, p) || !own.count(dst(i, p)), "ref: ", op, ": page ", dst(i, p), " of compression ", i,
             " is a source in another place");
      writes[dst(i, p)]++;
      if (src(i, p) == dst(i, p)) reads[dst(i, p)]--;
    }
  }
  for (const auto& [page, n] : writes)
    expect(n == 1 && reads[page] == 0, "ref: ", op, ": page ", page, " is written by ", n,
           " compressions and read by others: ", reads[page]);
}

void expect_compact(const char* op, const KvCompact& a, const std::vector<KvCompression>& compressions) {
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1];
  const View<int32_t> keep(a.keep);
  for (size_t i = 0; i < compressions.size(); i++) {
    const KvCompression& e = compressions[i];
    expect_compression_pages(op, "src_pages", a.src_pages, i, e.slots, pages);
    expect_compression_pages(op, "dst_pages", a.dst_pages, i, e.first + e.keep, pages);
    expect(e.keep <= a.keep.shape[2], "ref: ", op, ": compression ", i, " keeps ", e.keep, ", keep is ", a.keep.str());
    for (int64_t h = 0; h < kv_heads; h++)
      for (int32_t j = 0, last = e.first - 1; j < e.keep; last = keep(int64_t(i), h, j), j++)
        expect(keep(int64_t(i), h, j) > last && keep(int64_t(i), h, j) < e.slots, "ref: ", op, ": keep of compression ",
               i, ", head ", h, " holds slot ", keep(int64_t(i), h, j), " after ", last, "; its slots are ", e.first,
               " to ", e.slots - 1);
  }
  expect_own_pages(op, a, compressions);
}

void kv_compact(const KvCompact& a, Stream) {
  const auto compressions = read_compressions("kv_compact", a.compressions, a.work);
  expect_compact("kv_compact", a, compressions);
  const int64_t kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  const View<int32_t> keep(a.keep);
  dispatch("kv_compact", a.k_pages, [&]<class T>(T) {
    const View<T> k(a.k_pages), v(a.v_pages), mass(a.mass_pages);
    const View<int32_t> pos(a.pos_pages);
    for (size_t i = 0; i < compressions.size(); i++) {
      const KvCompression& e = compressions[i];
      const CompressionPages src{View<int32_t>(a.src_pages), int64_t(i)}, dst{View<int32_t>(a.dst_pages), int64_t(i)};
      for (int64_t h = 0; h < kv_heads; h++) {
        for (int32_t j = 0; j < e.keep; j++) {
          const int32_t from = keep(int64_t(i), h, j), to = e.first + j, x = from % kPageSlots, y = to % kPageSlots;
          for (int64_t d = 0; d < head_dim; d++) k(dst(to), h, d, y) = k(src(from), h, d, x);
          for (int64_t d = 0; d < head_dim; d++) v(dst(to), h, y, d) = v(src(from), h, x, d);
          pos(dst(to), h, y) = pos(src(from), h, x);
          if (mass) mass(dst(to), h, y) = mass(src(from), h, x);
        }
      }
    }
  });
}

}  // namespace pare::ref
