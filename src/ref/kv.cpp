// The storage of a cache that evicts: rows of window queries, accumulated attention, compaction.
#include "ref/kv.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "ref/paged.h"

namespace pare::ref {

void copy_rows(const CopyRows& a, Stream) {
  constexpr const char* op = "copy_rows";
  const int64_t rows = a.y.shape[0], width = a.y.shape[1], n = a.index.shape[0];
  expect_shape(op, "y", a.y, {rows, width});
  const bool heads = a.x.rank == 3;
  expect(
      a.x.rank >= 2 && a.x.rank <= 3 && a.x.size() == a.x.shape[0] * width && (!heads || a.x.stride[1] == a.x.shape[2]),
      "ref: ", op, ": x is ", a.x.str(), ", y ", a.y.str());
  expect_dense(op, "index", a.index, {n, 2});
  const View<int32_t> index(a.index);
  std::set<int32_t> written;
  for (int64_t i = 0; i < n; i++) {
    expect(index(i, 0) >= 0 && index(i, 0) < a.x.shape[0] && index(i, 1) >= 0 && index(i, 1) < rows, "ref: ", op,
           ": pair ", i, " is (", index(i, 0), ", ", index(i, 1), "), x is ", a.x.str(), ", y ", a.y.str());
    expect(written.insert(index(i, 1)).second, "ref: ", op, ": row ", index(i, 1), " is written twice");
  }
  if (a.x.data == a.y.data)
    for (int64_t i = 0; i < n; i++)
      expect(!written.count(index(i, 0)), "ref: ", op, ": row ", index(i, 0), " is read and written");
  const auto copy = [&]<class T>(T) {
    for (int64_t i = 0; i < n; i++) {
      const T* from = a.x.as<T>() + index(i, 0) * a.x.stride[0];
      std::copy(from, from + width, a.y.as<T>() + index(i, 1) * a.y.stride[0]);
    }
  };
  a.y.dtype == DType::i32 ? copy(int32_t{}) : dispatch(op, a.y, copy);
}

// ops.h: what an event writes nobody else reads or writes.
static void expect_own_pages(const char* op, const KvCompact& a, const std::vector<KvEvent>& events) {
  const View<int32_t> src(a.src_pages), dst(a.dst_pages);
  std::map<int32_t, int64_t> reads, writes;  // page -> how many events
  for (size_t i = 0; i < events.size(); i++) {
    const KvEvent& e = events[i];
    std::set<int32_t> own;
    for (int64_t p = 0; p * kPageSlots < e.slots; p++)
      if ((p + 1) * kPageSlots > e.first || (p == 0 && a.sinks)) own.insert(src(i, p));
    for (int32_t p : own) reads[p]++;
    for (int64_t p = 0; p * kPageSlots < e.first + e.keep; p++) {
      const bool below = (p + 1) * kPageSlots <= e.first, both = p * kPageSlots < e.first && !below;
      expect(!(below || both) || src(i, p) == dst(i, p), "ref: ", op, ": page ", p, " of event ", i,
             " holds protected slots; it is ", src(i, p), " before and ", dst(i, p), " after");
      if (below && !(p == 0 && a.sinks)) continue;
      expect(src(i, p) == dst(i, p) || !own.count(dst(i, p)), "ref: ", op, ": page ", dst(i, p), " of event ", i,
             " is a source in another place");
      writes[dst(i, p)]++;
      if (src(i, p) == dst(i, p)) reads[dst(i, p)]--;
    }
  }
  for (const auto& [page, n] : writes)
    expect(n == 1 && reads[page] == 0, "ref: ", op, ": page ", page, " is written by ", n,
           " events and read by others: ", reads[page]);
}

// Keys of slots [0, sinks) of one page and head, turned forward by `angle` positions.
template <class T>
static void turn(const KvCompact& a, int64_t page, int64_t h, int64_t angle) {
  const View<T> k(a.k_pages), rope(a.rope);
  const int64_t half = a.k_pages.shape[2] / 2;
  for (int64_t d = 0; d < half; d++)
    for (int64_t s = 0; s < a.sinks; s++) {
      const double c = rope(angle, d), sin = rope(angle, half + d), u = k(page, h, d, s), v = k(page, h, d + half, s);
      k(page, h, d, s) = static_cast<T>(u * c - v * sin);
      k(page, h, d + half, s) = static_cast<T>(v * c + u * sin);
    }
}

void expect_compact(const char* op, const KvCompact& a, const std::vector<KvEvent>& events) {
  expect_k_pages(op, a.k_pages);
  const int64_t pages = a.k_pages.shape[0], kv_heads = a.k_pages.shape[1], dim = a.k_pages.shape[2];
  expect_dense(op, "v_pages", a.v_pages, {pages, kv_heads, kPageSlots, dim});
  expect_slot_array(op, "pos_pages", a.pos_pages, a.k_pages);
  if (a.mass_pages) expect_slot_array(op, "mass_pages", a.mass_pages, a.k_pages);
  expect(a.keep.rank == 3, "ref: ", op, ": keep is ", a.keep.str(), ", expected [R, K, max_keep]");
  expect_dense(op, "keep", a.keep, {a.keep.shape[0], kv_heads, a.keep.shape[2]});
  const View<int32_t> keep(a.keep);
  for (size_t i = 0; i < events.size(); i++) {
    const KvEvent& e = events[i];
    expect_event_pages(op, "src_pages", a.src_pages, i, e.slots, pages);
    expect_event_pages(op, "dst_pages", a.dst_pages, i, e.first + e.keep, pages);
    expect(e.keep_row >= 0 && e.keep_row < a.keep.shape[0] && e.keep <= a.keep.shape[2], "ref: ", op, ": event ", i,
           " finds its ", e.keep, " slots in row ", e.keep_row, " of ", a.keep.str());
    expect(a.sinks >= 0 && a.sinks <= kPageSlots && (a.sinks == 0 || (a.sinks <= e.first && a.rope)), "ref: ", op, ": ",
           a.sinks, " sinks, event ", i, " protects ", e.first);
    for (int64_t h = 0; h < kv_heads; h++)
      for (int32_t j = 0, last = e.first - 1; j < e.keep; last = keep(e.keep_row, h, j), j++)
        expect(keep(e.keep_row, h, j) > last && keep(e.keep_row, h, j) < e.slots, "ref: ", op, ": keep of event ", i,
               ", head ", h, " holds slot ", keep(e.keep_row, h, j), " after ", last, "; its slots are ", e.first,
               " to ", e.slots - 1);
  }
  expect_own_pages(op, a, events);
}

void kv_compact(const KvCompact& a, Stream) {
  const auto events = read_events("kv_compact", a.events, a.work);
  expect_compact("kv_compact", a, events);
  const int64_t kv_heads = a.k_pages.shape[1], dim = a.k_pages.shape[2];
  const View<int32_t> keep(a.keep);
  dispatch("kv_compact", a.k_pages, [&]<class T>(T) {
    const View<T> k(a.k_pages), v(a.v_pages), mass(a.mass_pages);
    const View<int32_t> pos(a.pos_pages);
    for (size_t i = 0; i < events.size(); i++) {
      const KvEvent& e = events[i];
      const EventPages src{View<int32_t>(a.src_pages), int64_t(i)}, dst{View<int32_t>(a.dst_pages), int64_t(i)};
      for (int64_t h = 0; h < kv_heads; h++) {
        for (int32_t j = 0; j < e.keep; j++) {
          const int32_t from = keep(e.keep_row, h, j), to = e.first + j, x = from % kPageSlots, y = to % kPageSlots;
          for (int64_t d = 0; d < dim; d++) k(dst(to), h, d, y) = k(src(from), h, d, x);
          for (int64_t d = 0; d < dim; d++) v(dst(to), h, y, d) = v(src(from), h, x, d);
          pos(dst(to), h, y) = pos(src(from), h, x);
          if (mass) mass(dst(to), h, y) = mass(src(from), h, x);
        }
        if (a.sinks) turn<T>(a, dst(0), h, e.slots - e.first - e.keep);
      }
    }
  });
}

}  // namespace pare::ref
