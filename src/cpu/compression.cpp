// Compressions of a cache that evicts: scores of slots, their choice, compaction.
#include "cpu/compression.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace pare::cpu {

const KvCompression* read_compressions(const char* op, const Tensor& compressions) {
  static_assert(sizeof(KvCompression) == 5 * sizeof(int32_t));
  const auto* const list = reinterpret_cast<const KvCompression*>(compressions.as<int32_t>());
  for (int64_t i = 0; i < compressions.shape[0]; i++) {
    const KvCompression& e = list[i];
    if (e.first < 0 || e.recent < 0 || e.keep < e.recent || int64_t{e.first} + e.keep > e.slots) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": compression ", i, " (slots ", e.slots, ", first ", e.first,
                                 ", recent ", e.recent, ", keep ", e.keep, ") contradicts itself"));
  }
  return list;
}

namespace {

template <class Slots>
const int32_t* compression_pages(const char* op, const char* name, const Tensor& t, const KvCompression* compressions,
                                 int64_t n, int64_t pages, Slots slots) {
  const int32_t* const list = t.as<int32_t>();
  for (int64_t i = 0; i < n; i++) {
    bool ok = slots(compressions[i]) <= t.shape[1] * kPageSlots;
    for (int64_t p = 0; ok && p * kPageSlots < slots(compressions[i]); p++) {
      const int32_t page = list[i * t.stride[0] + p];
      ok = page >= 0 && page < pages;
    }
    if (!ok) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": ", name, " ", t.str(), " does not hold the pages of compression ", i,
                                 ", ", slots(compressions[i]), " slots, among ", pages, " pages"));
  }
  return list;
}

// score [E, K, max_slots], with room for every compression.
float* compression_scores(const char* op, const Tensor& t, const KvCompression* compressions) {
  const int64_t n = t.shape[0];
  for (int64_t i = 0; i < n; i++)
    if (compressions[i].slots > t.shape[2]) [[unlikely]]
      throw std::logic_error(
          cat("cpu: ", op, ": score is ", t.str(), ", compression ", i, " has ", compressions[i].slots, " slots"));
  return t.as<float>();
}

}  // namespace

const int32_t* pages_before(const char* op, const Tensor& src, const KvCompression* compressions, int64_t n,
                            int64_t pages) {
  return compression_pages(op, "src_pages", src, compressions, n, pages,
                           [](const KvCompression& e) { return int64_t{e.slots}; });
}
const int32_t* pages_after(const char* op, const Tensor& dst, const KvCompression* compressions, int64_t n,
                           int64_t pages) {
  return compression_pages(op, "dst_pages", dst, compressions, n, pages, slots_after);
}

// ---- scores

void kv_window_scores(const KvWindowScores& a, Stream) {
  constexpr const char* op = "kv_window_scores";
  const int64_t n = a.compressions.shape[0], pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1];
  const int64_t head_dim = a.k_pages.shape[2], heads = a.windows.shape[1], rows = a.windows.shape[0];
  const float *const k_pages = a.k_pages.as<float>(), *const windows = a.windows.as<float>();
  const int32_t* const oldest = a.window_first ? index(op, "window_first", a.window_first, a.window) : nullptr;
  const KvCompression* const compressions = read_compressions(op, a.compressions);
  const int32_t* const src = pages_before(op, a.src_pages, compressions, n, pages);
  float* const score = compression_scores(op, a.score, compressions);
  for (int64_t i = 0; i < n; i++)
    if (a.window > compressions[i].recent || compressions[i].window_row < 0 ||
        compressions[i].window_row + a.window > rows) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": compression ", i, ": a window of ", a.window, " rows at ",
                                 compressions[i].window_row, " of ", rows, ", ", compressions[i].recent,
                                 " recent slots"));
  const int64_t pieces = n * kv_heads, group = heads / kv_heads;
  if (pieces == 0) return;
  const Kernels& k = cpu_kernels();
  const double time =
      static_cast<double>(a.work.candidates * heads * a.window) * (0.05 * static_cast<double>(head_dim) + 1);
  parallel(pieces, per_piece(time, pieces), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t compression = i / kv_heads, h = i % kv_heads;
      const KvCompression& e = compressions[compression];
      const KvWindowArgs args{.score = score + i * a.score.shape[2],
                              .windows = windows + e.window_row * a.windows.stride[0] + h * group * head_dim,
                              .k_pages = k_pages + h * head_dim * kPageSlots,
                              .pages = src + compression * a.src_pages.stride[0],
                              .window_stride = a.windows.stride[0],
                              .page_stride = kv_heads * head_dim * kPageSlots,
                              .group = group,
                              .head_dim = head_dim,
                              .window = a.window,
                              .window_first = oldest ? oldest[compression] : 0,
                              .aggregate = a.aggregate,
                              .span = a.span,
                              .pool = a.pool,
                              .kernel = a.kernel,
                              .scale = a.scale};
      const int64_t slots = round16(e.slots);
      k.kv_window_scores(args, e, scratch(a.window * group * (head_dim + slots) + slots + 2 * a.kernel + 64));
    }
  });
}

void kv_redundancy(const KvRedundancy& a, Stream) {
  constexpr const char* op = "kv_redundancy";
  const int64_t n = a.compressions.shape[0], pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1];
  const int64_t head_dim = a.k_pages.shape[2], row = a.src_pages.shape[1] * kPageSlots;
  const float* const k_pages = a.k_pages.as<float>();
  const KvCompression* const compressions = read_compressions(op, a.compressions);
  const int32_t* const src = pages_before(op, a.src_pages, compressions, n, pages);
  float* const score = compression_scores(op, a.score, compressions);
  float* const workspace = a.workspace.as<float>();
  const int64_t pieces = n * kv_heads;
  if (pieces == 0) return;
  const Kernels& k = cpu_kernels();
  const double time = static_cast<double>(a.work.pairs * kv_heads) * (0.03 * static_cast<double>(head_dim) + 1);
  parallel(pieces, per_piece(time, pieces), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t compression = i / kv_heads, h = i % kv_heads;
      const KvRedundancyArgs args{.score = score + i * a.score.shape[2],
                                  .workspace = workspace + i * 4 * row,
                                  .k_pages = k_pages + h * head_dim * kPageSlots,
                                  .pages = src + compression * a.src_pages.stride[0],
                                  .page_stride = kv_heads * head_dim * kPageSlots,
                                  .head_dim = head_dim,
                                  .row = row,
                                  .lambda = a.lambda,
                                  .threshold = a.threshold};
      k.kv_redundancy(args, compressions[compression],
                      scratch(head_dim * round16(compressions[compression].slots) + 1280));
    }
  });
}

void kv_mass_scores(const KvMassScores& a, Stream) {
  constexpr const char* op = "kv_mass_scores";
  const int64_t n = a.compressions.shape[0], pages = a.mass_pages.shape[0], kv_heads = a.mass_pages.shape[1];
  const float* const mass = a.mass_pages.as<float>();
  const KvCompression* const compressions = read_compressions(op, a.compressions);
  const int32_t* const src = pages_before(op, a.src_pages, compressions, n, pages);
  float* const score = compression_scores(op, a.score, compressions);
  if (n == 0) return;
  parallel(n, per_piece(static_cast<double>(a.work.candidates * kv_heads), n), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++)
      for (int64_t h = 0; h < kv_heads; h++)
        for (int64_t s = compressions[i].first; s < compressions[i].slots - compressions[i].recent; s++) {
          const int64_t at =
              (src[i * a.src_pages.stride[0] + s / kPageSlots] * kv_heads + h) * kPageSlots + s % kPageSlots;
          score[(i * kv_heads + h) * a.score.shape[2] + s] = mass[at];
        }
  });
}

// ---- choice

namespace {

// Ascending as the numbers, then as the slots.
uint64_t rank_key(float score, int64_t slot) {
  const uint32_t b = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes +0
  return uint64_t{b >> 31 ? ~b : b | 0x80000000u} << 32 | static_cast<uint64_t>(slot);
}

// keep[0, e.keep): the best of score(slot), then the recent ones.
template <class Score>
void choose(int32_t* keep, const KvCompression& e, std::vector<uint64_t>& keys, Score score) {
  const int32_t end = e.slots - e.recent, chosen = e.keep - e.recent;
  if (chosen > 0) {
    keys.clear();
    for (int32_t s = e.first; s < end; s++) keys.push_back(rank_key(score(s), s));
    std::nth_element(keys.begin(), keys.end() - chosen, keys.end());
    const uint64_t least = keys[keys.size() - static_cast<size_t>(chosen)];
    for (int32_t s = e.first; s < end; s++)
      if (rank_key(score(s), s) >= least) *keep++ = s;
  }
  for (int32_t s = end; s < e.slots; s++) *keep++ = s;
}

}  // namespace

void kv_select(const KvSelect& a, Stream) {
  constexpr const char* op = "kv_select";
  const int64_t n = a.compressions.shape[0], kv_heads = a.keep.shape[1], max_keep = a.keep.shape[2];
  int32_t* const keep = a.keep.as<int32_t>();
  const KvCompression* const compressions = read_compressions(op, a.compressions);
  const float* const scores = a.score ? compression_scores(op, a.score, compressions) : nullptr;
  for (int64_t i = 0; i < n; i++) {
    const KvCompression& e = compressions[i];
    if (e.keep > max_keep || (!scores && e.keep != e.recent)) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": compression ", i, " keeps ", e.keep, " slots, ", e.recent,
                                 " of them recent, keep is ", a.keep.str(), scores ? "" : ", without scores"));
  }
  if (n == 0) return;
  parallel(n, per_piece(8.0 * static_cast<double>(a.work.candidates * kv_heads), n), [&](Interval range) {
    std::vector<uint64_t> keys;
    for (int64_t i = range.begin; i < range.end; i++) {
      const KvCompression& e = compressions[i];
      const float* const score = scores ? scores + i * kv_heads * a.score.shape[2] : nullptr;
      int32_t* const to = keep + i * kv_heads * max_keep;
      if (!a.shared_heads) {
        for (int64_t h = 0; h < kv_heads; h++)
          choose(to + h * max_keep, e, keys, [&](int32_t s) { return score[h * a.score.shape[2] + s]; });
        continue;
      }
      choose(to, e, keys, [&](int32_t s) {
        float sum = score[s];
        for (int64_t h = 1; h < kv_heads; h++) sum += score[h * a.score.shape[2] + s];
        return sum;
      });
      for (int64_t h = 1; h < kv_heads; h++) std::copy_n(to, e.keep, to + h * max_keep);
    }
  });
}

// ---- compaction

namespace {

struct CompactArgs {
  float *k_pages, *v_pages, *mass;
  int32_t* pos;
  int64_t kv_heads, head_dim;
};

// Slots of one head: `to` = first, first + 1, ... from keep[0], keep[1], ...  Front to back, so in place is safe: a
// slot moves to itself or to a smaller one.
void compact(const CompactArgs& a, const KvCompression& e, const int32_t* keep, const int32_t* src, const int32_t* dst,
             int64_t h) {
  const int64_t head_dim = a.head_dim, half_page = head_dim * kPageSlots;
  int32_t i = 0;
  while (i < e.keep && keep[i] == e.first + i && src[keep[i] / kPageSlots] == dst[keep[i] / kPageSlots]) i++;
  while (i < e.keep) {  // one dst page after the other
    const int64_t begin = (e.first + i) % kPageSlots, n = std::min<int64_t>(kPageSlots - begin, e.keep - i);
    const int64_t to = dst[(e.first + i) / kPageSlots] * a.kv_heads + h;
    int64_t from[kPageSlots];  // source page and head
    const float* keys[kPageSlots];
    for (int64_t j = 0; j < n; j++) {
      from[j] = src[keep[i + j] / kPageSlots] * a.kv_heads + h;
      keys[j] = a.k_pages + from[j] * half_page + keep[i + j] % kPageSlots;
    }
    float* const k = a.k_pages + to * half_page + begin;
    for (int64_t d = 0; d < half_page; d += kPageSlots)
      for (int64_t j = 0; j < n; j++) k[d + j] = keys[j][d];
    for (int64_t j = 0; j < n; j++) {
      const int64_t x = from[j] * kPageSlots + keep[i + j] % kPageSlots, y = to * kPageSlots + begin + j;
      std::memmove(a.v_pages + y * head_dim, a.v_pages + x * head_dim, static_cast<size_t>(head_dim) * sizeof(float));
      a.pos[y] = a.pos[x];
      if (a.mass) a.mass[y] = a.mass[x];
    }
    i += static_cast<int32_t>(n);
  }
}

}  // namespace

void kv_compact(const KvCompact& a, Stream) {
  constexpr const char* op = "kv_compact";
  const int64_t n = a.compressions.shape[0], pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1];
  const int64_t head_dim = a.k_pages.shape[2], max_keep = a.keep.shape[2];
  const CompactArgs args{.k_pages = a.k_pages.as<float>(),
                         .v_pages = a.v_pages.as<float>(),
                         .mass = a.mass_pages ? a.mass_pages.as<float>() : nullptr,
                         .pos = a.pos_pages.as<int32_t>(),
                         .kv_heads = kv_heads,
                         .head_dim = head_dim};
  const int32_t* const keep = a.keep.as<int32_t>();
  const KvCompression* const compressions = read_compressions(op, a.compressions);
  const int32_t* const src = pages_before(op, a.src_pages, compressions, n, pages);
  const int32_t* const dst = pages_after(op, a.dst_pages, compressions, n, pages);
  for (int64_t i = 0; i < n; i++) {
    const KvCompression& e = compressions[i];
    if (e.keep > max_keep) [[unlikely]]
      throw std::logic_error(cat("cpu: ", op, ": compression ", i, " (slots ", e.slots, ", first ", e.first, ", keep ",
                                 e.keep, ") does not fit keep ", a.keep.str()));
  }
  const int64_t pieces = n * kv_heads;
  if (pieces == 0) return;
  const double time = static_cast<double>(a.work.kept * kv_heads * head_dim) * 1.2;
  parallel(pieces, per_piece(time, pieces), [&](Interval range) {
    for (int64_t i = range.begin; i < range.end; i++) {
      const int64_t compression = i / kv_heads, h = i % kv_heads;
      compact(args, compressions[compression], keep + i * max_keep, src + compression * a.src_pages.stride[0],
              dst + compression * a.dst_pages.stride[0], h);
    }
  });
}

}  // namespace pare::cpu
