// Products with the keys of a compression, which lie in pages.
//
// Arrays over slots start at a page border, at the page that holds slot `first`; so a slot's lane is slot % 16.
#pragma once
#include "cpu/isa/tile.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {
namespace {

PARE_INLINE int64_t round16(int64_t n) { return (n + 15) / 16 * 16; }

// c[i][16 p + j] = a[i] . column j of panel p: `rows` rows of `width` floats against `panels` panels, one every
// `step` floats of base in the order of `pages` (absent: as they lie).
struct Product {
  float* c;
  int64_t c_stride;
  const float* a;  // rows contiguous: row i at a + i * a_stride; columns contiguous: element k of row i at a + 16 k + i
  int64_t a_stride;
  bool by_columns;
  const float* base;
  const int32_t* pages;
  int64_t step, width;
};
void multiply(const Product& m, int64_t rows, int64_t panels) {
  const int64_t share = even_rows(rows);
  for (int64_t p = 0, np; p < panels; p += np) {
    np = tile_panels(share, panels - p);
    for (int64_t r = 0; r < rows; r += share) {
      const int64_t rn = min64(share, rows - r);
      Tile t;
      t.depth = m.width;
      t.bs = 16;
      t.c = m.c + r * m.c_stride + p * 16;
      t.cs = m.c_stride;
      t.start = nullptr;
      t.a = m.by_columns ? m.a + r : m.a + r * m.a_stride;
      t.as = m.by_columns ? 16 : m.a_stride;
      for (int64_t i = 0; i < np; i++) t.b[i] = m.base + (m.pages ? m.pages[p + i] : p + i) * m.step;
      (m.by_columns ? tile_by_columns(rn, np) : tile_by_rows(rn, np))(t);
    }
  }
}

// Keys of slots [begin, end) divided by their norms, [panels][head_dim][16]; other lanes +0.
template <class Args>
void unit_keys(float* unit, const Args& a, const int32_t* pages, int64_t begin, int64_t end) {
  for (int64_t s = 0; s < end; s += 16, pages++) {
    const float* k = a.k_pages + *pages * a.page_stride;
    vf square = zero();
    for (int64_t d = 0; d < a.head_dim; d++) square = fma(load(k + d * 16), load(k + d * 16), square);
    const vf norm = add(sqrt(square), set1(1e-8f));
    const mask low = first_lanes(max64(begin - s, 0)), high = first_lanes(end - s);
    for (int64_t d = 0; d < a.head_dim; d++, unit += 16)
      store(unit, select(low, zero(), select(high, div(load(k + d * 16), norm), zero())));
  }
}

}  // namespace
}  // namespace pare::PARE_ISA
