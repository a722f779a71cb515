// Matrix products.  Every output is one chain of fused multiply-adds in ascending order, whatever the tile, the number
// of rows or the range of a thread.  Blocks of the depth store and reload the f32 accumulator, which rounds nothing.
#include "cpu/isa/tile.h"
#include "cpu/kernels.h"

namespace pare::PARE_ISA {
namespace {

template <int kRows, int kPanels, bool kByRows>
void tile(const Tile& t) {
  vf acc[kRows][kPanels];
  const int64_t cs = t.cs;
  if (t.start) {
    PARE_UNROLL
    for (int i = 0; i < kRows; i++) PARE_UNROLL
    for (int p = 0; p < kPanels; p++) acc[i][p] = load(t.start + i * t.ss + p * 16);
  } else {
    PARE_UNROLL
    for (int i = 0; i < kRows; i++) PARE_UNROLL
    for (int p = 0; p < kPanels; p++) acc[i][p] = zero();
  }
  const float* b[kPanels];
  PARE_UNROLL
  for (int p = 0; p < kPanels; p++) b[p] = t.b[p];
  const int64_t bs = t.bs, as = t.as;
  const float* a = t.a;
  for (int64_t k = 0; k < t.depth; k++) {
    vf row[kPanels];
    PARE_UNROLL
    for (int p = 0; p < kPanels; p++) {
      row[p] = load(b[p]);
      b[p] += bs;
    }
    PARE_UNROLL
    for (int i = 0; i < kRows; i++) {
      const vf x = set1(kByRows ? a[i * as] : a[i]);
      PARE_UNROLL
      for (int p = 0; p < kPanels; p++) acc[i][p] = fma(x, row[p], acc[i][p]);
    }
    a += kByRows ? 1 : as;
  }
  if (t.bias) {
    PARE_UNROLL
    for (int p = 0; p < kPanels; p++) {
      const vf bias = load(t.bias + p * 16);
      PARE_UNROLL
      for (int i = 0; i < kRows; i++) acc[i][p] = add(acc[i][p], bias);
    }
  }
  if (t.residual) {
    PARE_UNROLL
    for (int i = 0; i < kRows; i++) PARE_UNROLL
    for (int p = 0; p < kPanels; p++) acc[i][p] = add(acc[i][p], load(t.residual + i * t.rs + p * 16));
  }
  PARE_UNROLL
  for (int i = 0; i < kRows; i++) PARE_UNROLL
  for (int p = 0; p < kPanels; p++) store(t.c + i * cs + p * 16, acc[i][p]);
}

template <int kRows, int kPanels, bool kByRows>
constexpr TileFn tile_or_none() {
  if constexpr (kRows <= kTileRows && kRows * kPanels <= kTileVectors)
    return tile<kRows, kPanels, kByRows>;
  else
    return nullptr;
}

// x [rows, depth] -> columns [depth][rows]; writes up to 16 floats past the end.
void pack_columns(float* out, const float* x, int64_t stride, int64_t rows, int64_t depth) {
  for (int64_t k = 0; k < depth; k += 16) {
    const int64_t n = min64(16, depth - k);
    vf r[16];
    PARE_UNROLL
    for (int i = 0; i < 16; i++) r[i] = i < rows ? load(x + i * stride + k, n) : zero();
    transpose(r);
    for (int64_t i = 0; i < n; i++) store(out + (k + i) * rows, r[i]);  // the next row overwrites the excess
  }
}

}  // namespace

#define PARE_PANELS(rows, by_rows)                                                        \
  {                                                                                       \
    nullptr, tile_or_none<rows, 1, by_rows>(), tile_or_none<rows, 2, by_rows>(), nullptr, \
        tile_or_none<rows, 4, by_rows>()                                                  \
  }
#define PARE_ROWS(by_rows)                                                                                     \
  {                                                                                                            \
    {}, PARE_PANELS(1, by_rows), PARE_PANELS(2, by_rows), PARE_PANELS(3, by_rows), PARE_PANELS(4, by_rows),    \
        PARE_PANELS(5, by_rows), PARE_PANELS(6, by_rows), PARE_PANELS(7, by_rows), PARE_PANELS(8, by_rows),    \
        PARE_PANELS(9, by_rows), PARE_PANELS(10, by_rows), PARE_PANELS(11, by_rows), PARE_PANELS(12, by_rows), \
        PARE_PANELS(13, by_rows), PARE_PANELS(14, by_rows)                                                     \
  }
const TileTable tiles_by_rows = PARE_ROWS(true), tiles_by_columns = PARE_ROWS(false);

static_assert(kPanel == 16);  // the elements of a vector

void pack(float* packed, const float* w, int64_t outputs, int64_t inputs, Interval rows) {
  for (int64_t o = rows.begin, n; o < rows.end; o += n, w += n * inputs) {
    n = min64(kPanel - o % kPanel, rows.end - o);
    float* const panel = packed + o / kPanel * inputs * kPanel;
    const int64_t first = o % kPanel, end = o + n == outputs ? kPanel : first + n;  // lanes that are written
    for (int64_t i = 0; i < inputs; i += 16)
      if (end - first == kPanel)
        transpose_tile(panel + i * kPanel, kPanel, kPanel, w + i, inputs, n, min64(16, inputs - i));
      else
        for (int64_t j = i; j < min64(i + 16, inputs); j++)
          for (int64_t l = first; l < end; l++) panel[j * kPanel + l] = l < first + n ? w[(l - first) * inputs + j] : 0;
  }
}

void unpack(float* w, const float* packed, int64_t inputs, Interval rows) {
  for (int64_t o = rows.begin, n; o < rows.end; o += n, w += n * inputs) {
    n = min64(kPanel - o % kPanel, rows.end - o);
    const float* const panel = packed + o / kPanel * inputs * kPanel;
    for (int64_t i = 0; i < inputs; i += 16)
      if (n == kPanel)
        transpose_tile(w + i, inputs, min64(16, inputs - i), panel + i * kPanel, kPanel, min64(16, inputs - i), kPanel);
      else
        for (int64_t j = i; j < min64(i + 16, inputs); j++)
          for (int64_t r = 0; r < n; r++) w[r * inputs + j] = panel[j * kPanel + o % kPanel + r];
  }
}

// The last panel of a matrix whose width is no multiple of 16: computed beside it, `width` columns copied.
static void narrow(TileFn f, const Tile& whole, int64_t rows, int64_t width) {
  Tile t = whole;
  float c[kTileRows * 16];
  if (t.start)
    for (int64_t i = 0; i < rows; i++) store(c + i * 16, load(t.start + i * t.ss, width));
  t.c = c;
  t.cs = 16;
  t.bias = nullptr;
  t.residual = nullptr;
  if (t.start) {
    t.start = c;
    t.ss = 16;
  }
  f(t);
  for (int64_t i = 0; i < rows; i++) {
    vf x = load(c + i * 16);
    if (whole.bias) x = add(x, load(whole.bias, width));
    if (whole.residual) x = add(x, load(whole.residual + i * whole.rs, width));
    store(whole.c + i * whole.cs, x, width);
  }
}

// The last piece of the depth, of rows r to r + rows and the panels from p on: to y.
static void finish(TileFn f, Tile& t, const GemmArgs& g, int64_t r, int64_t rows, int64_t p) {
  t.c = g.y + r * g.y_stride + p * 16;
  t.cs = g.y_stride;
  t.bias = g.bias ? g.bias + p * 16 : nullptr;
  t.residual = g.residual ? g.residual + r * g.residual_stride + p * 16 : nullptr;
  t.rs = g.residual_stride;
  if (p < g.outputs / 16)
    f(t);
  else
    narrow(f, t, rows, g.outputs - p * 16);
}

void gemm(const GemmArgs& g, Interval rows, Interval panels, float* scratch, int64_t scratch_rows) {
  constexpr int64_t kNear = 384;   // rows closer than this do not compete for the same sets of the L1 cache
  constexpr int64_t kDepth = 256;  // cut of the depth, so that panels stay in L1 while the rows pass
  const int64_t n = rows.end - rows.begin, share = even_rows(n), depth = g.depth;
  const bool in_place = g.x_stride <= kNear || n < 4;
  const int64_t block = in_place ? n : min64(n, max64(1, scratch_rows / share) * share);  // rows packed at once
  const int64_t cuts = !in_place && block > share ? (depth + kDepth - 1) / kDepth : 1, cut = (depth + cuts - 1) / cuts;
  // Accumulators between two cuts (y may be the residual, so they do not lie there): more than one share of rows has at
  // least kTileRows / 2 in each, so at most 2 panels.
  alignas(64) float partial[kMaxScratchRows * 2 * 16];
  for (int64_t r0 = rows.begin; r0 < rows.end; r0 += block) {
    const int64_t end = min64(r0 + block, rows.end);
    if (!in_place)
      for (int64_t r = r0; r < end; r += share)
        pack_columns(scratch + (r - r0) * depth, g.x + r * g.x_stride, g.x_stride, min64(share, end - r), depth);
    for (int64_t p = panels.begin, np; p < panels.end; p += np) {
      const int64_t whole = min64(panels.end, g.outputs / 16) - p;
      np = tile_panels(share, max64(whole, 1));
      for (int64_t k = 0; k < depth; k += cut) {
        const int64_t kn = min64(cut, depth - k);
        for (int64_t r = r0; r < end; r += share) {
          const int64_t rn = min64(share, end - r);
          Tile t;
          t.depth = kn;
          t.bs = 16;
          t.c = partial + (r - r0) * np * 16;
          t.cs = np * 16;
          t.a = in_place ? g.x + r * g.x_stride + k : scratch + (r - r0) * depth + k * rn;
          t.as = in_place ? g.x_stride : rn;
          for (int64_t i = 0; i < np; i++) t.b[i] = g.packed + ((p + i) * depth + k) * 16;
          t.start = k ? t.c : nullptr;
          t.ss = t.cs;
          const TileFn f = in_place ? tile_by_rows(rn, np) : tile_by_columns(rn, np);
          if (k + kn < depth)
            f(t);
          else
            finish(f, t, g, r, rn, p);
        }
      }
    }
  }
}

// The rows of w [depth, outputs] as panels of 16 of its columns, from the panels of 16 of its rows.
static void transposed_panels(float* out, const GemmArgs& g, int64_t panel, int64_t k, int64_t kn) {
  const int64_t width = min64(16, g.outputs - panel * 16);
  for (int64_t i = 0; i < kn; i += 16)
    transpose_tile(out + i * 16, 16, 16, g.packed + ((k + i) / 16 * g.outputs + panel * 16) * 16, 16, width,
                   min64(16, kn - i));
}

void gemm_transposed(const GemmArgs& g, Interval rows, Interval panels, float* scratch) {
  constexpr int64_t kNear = 384;
  const int64_t depth = g.depth, cuts = (depth + kTransposedDepth - 1) / kTransposedDepth;
  const int64_t cut = ((depth + cuts - 1) / cuts + 15) / 16 * 16, count = panels.end - panels.begin;
  const int64_t n = rows.end - rows.begin, blocks = (n + kTransposedRows - 1) / kTransposedRows;
  const int64_t block = (n + blocks - 1) / blocks, share = even_rows(block);
  const bool in_place = g.x_stride <= kNear || n < 4;
  float* const columns = scratch;  // of x
  float* const b = columns + kTransposedDepth * block + 16;
  float* const partial = b + kTransposedDepth * kTilePanels * 16;  // accumulators, [block][count * 16]
  for (int64_t r0 = rows.begin; r0 < rows.end; r0 += block)
    for (int64_t k = 0; k < depth; k += cut) {
      const int64_t end = min64(r0 + block, rows.end), kn = min64(cut, depth - k);
      for (int64_t r = r0; !in_place && r < end; r += share)
        pack_columns(columns + (r - r0) * kn, g.x + r * g.x_stride + k, g.x_stride, min64(share, end - r), kn);
      for (int64_t p = panels.begin, np; p < panels.end; p += np) {
        const int64_t whole = min64(panels.end, g.outputs / 16) - p;
        np = tile_panels(share, max64(whole, 1));
        for (int64_t i = 0; i < np; i++) transposed_panels(b + i * kn * 16, g, p + i, k, kn);
        for (int64_t r = r0; r < end; r += share) {
          const int64_t rn = min64(share, end - r);
          Tile t;
          t.depth = kn;
          t.bs = 16;
          t.c = partial + ((r - r0) * count + p - panels.begin) * 16;
          t.cs = count * 16;
          t.a = in_place ? g.x + r * g.x_stride + k : columns + (r - r0) * kn;
          t.as = in_place ? g.x_stride : rn;
          for (int64_t i = 0; i < np; i++) t.b[i] = b + i * kn * 16;
          t.start = k ? t.c : nullptr;
          t.ss = t.cs;
          const TileFn f = in_place ? tile_by_rows(rn, np) : tile_by_columns(rn, np);
          if (k + kn < depth)
            f(t);
          else
            finish(f, t, g, r, rn, p);
        }
      }
    }
}

// dw[o][i] += sum over n ascending of dy[n][o] x[n][i]: A is a column block of dy, B rows of x.
void gemm_t(const GemmTArgs& g, Interval outputs, Interval panels, float* scratch) {
  constexpr int64_t kNear = 384;
  const int64_t share = even_rows(outputs.end - outputs.begin), count = panels.end - panels.begin;
  const bool x_near = g.x_stride <= kNear, dy_near = g.dy_stride <= kNear;
  float* const columns = scratch + kGemmTDepth * 16 * count;  // a packed block of dy
  for (int64_t n = 0; n < g.rows; n += kGemmTDepth) {
    const int64_t depth = min64(kGemmTDepth, g.rows - n);
    // x as panels [depth][16]: all of them, or only a last narrow one that must not be read past its end
    for (int64_t p = panels.begin; p < panels.end; p++)
      if (!x_near || p * 16 + 16 > g.inputs)
        for (int64_t k = 0; k < depth; k++)
          store(scratch + ((p - panels.begin) * kGemmTDepth + k) * 16,
                load(g.x + (n + k) * g.x_stride + p * 16, g.inputs - p * 16));
    for (int64_t o = outputs.begin; o < outputs.end; o += share) {
      const int64_t rn = min64(share, outputs.end - o);
      const float* a = g.dy + n * g.dy_stride + o;
      if (!dy_near) {
        for (int64_t k = 0; k < depth; k++) store(columns + k * 16, load(a + k * g.dy_stride, rn));
        a = columns;
      }
      for (int64_t p = panels.begin, np; p < panels.end; p += np) {
        const int64_t whole = min64(panels.end, g.inputs / 16) - p;
        np = tile_panels(share, max64(whole, 1));
        float* const c = g.dw + o * g.inputs + p * 16;
        const bool packed = !x_near || whole <= 0;
        Tile t;
        t.depth = depth;
        t.a = a;
        t.as = dy_near ? g.dy_stride : 16;
        t.bs = packed ? 16 : g.x_stride;
        for (int64_t i = 0; i < np; i++)
          t.b[i] = packed ? scratch + (p + i - panels.begin) * kGemmTDepth * 16 : g.x + n * g.x_stride + (p + i) * 16;
        t.c = c;
        t.cs = g.inputs;
        t.start = c;
        t.ss = g.inputs;
        const TileFn f = tile_by_columns(rn, np);
        if (whole > 0)
          f(t);
        else
          narrow(f, t, rn, g.inputs - p * 16);
      }
    }
  }
}

void sum_rows(float* y, const float* x, int64_t x_stride, int64_t rows, Interval columns) {
  for_vectors(
      columns.end - columns.begin, PARE_LANES_AT(i) {
        const int64_t c = columns.begin + i;
        vf acc = load(y + c, lanes);
        for (int64_t r = 0; r < rows; r++) acc = add(acc, load(x + r * x_stride + c, lanes));
        store(y + c, acc, lanes);
      });
}

}  // namespace pare::PARE_ISA
