// Merging of evicted slots into kept ones.
#include "ops/merge.h"

#include <algorithm>
#include <cmath>

#include "ref/compression.h"

namespace pare::ref {

namespace {

// One compression and head, in double: keys and values by slot, and where each evicted slot goes.
struct Head {
  std::vector<std::vector<double>> k, v;  // [slots][D]
  std::vector<int32_t> pos, kept, evicted;
  std::vector<size_t> nearest;  // of each evicted slot: index into kept
  std::vector<double> cosine;   // of each evicted slot
};

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); d++) sum += a[d] * b[d];
  return sum;
}
double length(const std::vector<double>& a) { return std::sqrt(dot(a, a)); }

template <class T>
Head read_head(const KvCompact& a, const KvCompression& e, int64_t compression, int64_t h) {
  const View<T> k(a.k_pages), v(a.v_pages);
  const View<int32_t> keep(a.keep), pos(a.pos_pages);
  const CompressionPages page{View<int32_t>(a.src_pages), compression};
  Head head;
  for (int64_t s = 0; s < e.slots; s++) {
    const int64_t p = page(s), at = s % kPageSlots;
    std::vector<double> key, value;
    for (int64_t d = 0; d < a.k_pages.shape[2]; d++) {
      key.push_back(k(p, h, d, at));
      value.push_back(v(p, h, at, d));
    }
    head.k.push_back(key);
    head.v.push_back(value);
    head.pos.push_back(pos(p, h, at));
  }
  for (int32_t j = 0; j < e.keep; j++) head.kept.push_back(keep(compression, h, j));
  for (int32_t s = e.first; s < e.slots; s++)
    if (!std::binary_search(head.kept.begin(), head.kept.end(), s)) head.evicted.push_back(s);
  for (int32_t s : head.evicted) {
    size_t best = 0;
    double cosine = -2;
    for (size_t c = 0; c < head.kept.size(); c++) {
      const double x =
          dot(head.k[s], head.k[head.kept[c]]) / (length(head.k[s]) + 1e-8) / (length(head.k[head.kept[c]]) + 1e-8);
      if (x >= cosine) {
        cosine = x;
        best = c;
      }
    }
    head.nearest.push_back(best);
    head.cosine.push_back(cosine);
  }
  return head;
}

// x turned by the angle of position pos, forward (sign 1) or back.
template <class T>
std::vector<double> turned(const KvMerge& a, std::vector<double> x, int32_t pos, int sign) {
  const View<T> rope(a.rope);
  const size_t half = x.size() / 2;
  for (size_t d = 0; d < half; d++) {
    const double c = rope(pos, d), s = sign * double(rope(pos, half + d)), u = x[d], v = x[d + half];
    x[d] = u * c - v * s;
    x[d + half] = v * c + u * s;
  }
  return x;
}

// The kept slot c after `from`, the evicted slots that go to it, ascending, were added: its value and key.
template <class T>
void add_evicted(const KvMerge& a, Head& head, size_t c, const std::vector<size_t>& from) {
  const int32_t to = head.kept[c];
  const auto merge = [&](std::vector<double> x, auto other) {
    const std::vector<double> before = x;
    double weights = 1;
    for (size_t e : from) {
      const std::vector<double> y = other(head.evicted[e]);
      double w = head.cosine[e];
      if (a.kind == KvMergeKind::value) w *= length(y) / (length(y) + length(before) + 1e-8);
      for (size_t d = 0; d < x.size(); d++) x[d] += w * y[d];
      weights += a.kind == KvMergeKind::value ? w : 1;
    }
    for (double& y : x) y /= weights;
    return x;
  };
  const std::vector<double> value = merge(head.v[to], [&](int32_t s) { return head.v[s]; });
  if (a.keys == MergeKeys::unrotated)
    head.k[to] = turned<T>(a,
                           merge(turned<T>(a, head.k[to], head.pos[to], -1),
                                 [&](int32_t s) { return turned<T>(a, head.k[s], head.pos[s], -1); }),
                           head.pos[to], 1);
  head.v[to] = value;
}

// The threshold of the compression after it, from the heads' cosines.
template <class T>
double next_threshold(const KvMerge& a, const std::vector<Head>& heads, int64_t compression) {
  T& threshold = View<T>(a.threshold)(View<int32_t>(a.threshold_row)(compression));
  double sum = 0, n = 0;
  for (const Head& head : heads)
    for (double x : head.cosine) {
      sum += x;
      n++;
    }
  if (n == 0) return threshold;
  const double next = threshold == 0 ? sum / n : a.ema_old * double(threshold) + a.ema_new * (sum / n);
  threshold = static_cast<T>(next);
  return next;
}

}  // namespace

void kv_merge(const KvMerge& a, Stream stream) {
  const KvCompact& c = a.compact;
  const auto compressions = read_compressions("kv_merge", c.compressions, c.work);
  expect_compact("kv_merge", c, compressions);
  if (a.kind == KvMergeKind::d2o) expect_index("kv_merge", "threshold_row", a.threshold_row, a.threshold.shape[0]);
  dispatch("kv_merge", c.k_pages, [&]<class T>(T) {
    std::vector<std::vector<Head>> heads(compressions.size());
    for (size_t i = 0; i < compressions.size(); i++) {
      for (int64_t h = 0; h < c.k_pages.shape[1]; h++) heads[i].push_back(read_head<T>(c, compressions[i], i, h));
      const double threshold = a.kind == KvMergeKind::d2o ? next_threshold<T>(a, heads[i], i) : 0;
      for (int64_t h = 0; h < c.k_pages.shape[1]; h++) {
        Head& head = heads[i][h];
        std::vector<std::vector<size_t>> from(head.kept.size());
        for (size_t e = 0; e < head.evicted.size(); e++) {
          const double s = head.cosine[e];
          if (a.kind == KvMergeKind::d2o ? s >= threshold : s > 0) from[head.nearest[e]].push_back(e);
        }
        for (size_t j = 0; j < from.size(); j++)
          if (!from[j].empty()) add_evicted<T>(a, head, j, from[j]);
      }
    }
    kv_compact(c, stream);
    const View<T> k(c.k_pages), v(c.v_pages);
    for (size_t i = 0; i < compressions.size(); i++)
      for (int64_t h = 0; h < c.k_pages.shape[1]; h++)
        for (size_t j = 0; j < heads[i][h].kept.size(); j++) {
          const Head& head = heads[i][h];
          const int64_t to = compressions[i].first + j, from = head.kept[j], at = to % kPageSlots;
          const int64_t page = CompressionPages{View<int32_t>(c.dst_pages), int64_t(i)}(to);
          for (size_t d = 0; d < head.k[from].size(); d++) {
            k(page, h, d, at) = static_cast<T>(head.k[from][d]);
            v(page, h, at, d) = static_cast<T>(head.v[from][d]);
          }
        }
  });
}

}  // namespace pare::ref
