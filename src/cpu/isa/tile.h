// The register tile that every matrix product is made of.
#pragma once
#include "cpu/isa/vec.h"

namespace pare::PARE_ISA {

// Registers hold kTileVectors accumulators of 16 floats, one row of B and one broadcast element of A.
#if defined(__AVX512F__)
constexpr int kTileRows = 14, kTileVectors = 28;
#else
constexpr int kTileRows = 6, kTileVectors = 6;
#endif
constexpr int kTilePanels = 4;

// c[i][16 p + j] = start + sum over k < depth of a(i, k) b[p][k bs + j]: one chain of fused multiply-adds, k ascending.
// start: +0, or start[i ss + 16 p + j] (which may be c).  At the end + bias[16 p + j], then + residual[i rs + 16 p +
// j], where they are given.  The caller sets every field that is used: of defaults for all gcc makes a `rep stos`,
// which costs as much as several steps of the depth.
struct Tile {
  int64_t depth;
  const float* a;  // a(i, k): a[i as + k] if rows of A are contiguous, a[k as + i] if columns are
  int64_t as;
  const float* b[kTilePanels];
  int64_t bs;
  float* c;
  int64_t cs;
  const float* start;
  int64_t ss;
  const float* bias = nullptr;
  const float* residual = nullptr;
  int64_t rs;
};
using TileFn = void (*)(const Tile&);

// The tile of `rows` x `panels`, 1 <= rows <= kTileRows, panels as tile_panels chooses.
using TileTable = TileFn[15][kTilePanels + 1];  // [rows][panels]; null where they do not fit the registers
extern const TileTable tiles_by_rows;           // rows of A contiguous
extern const TileTable tiles_by_columns;        // columns of A contiguous
PARE_INLINE static TileFn tile_by_rows(int64_t rows, int64_t panels) { return tiles_by_rows[rows][panels]; }
PARE_INLINE static TileFn tile_by_columns(int64_t rows, int64_t panels) { return tiles_by_columns[rows][panels]; }

namespace {

// Panels to compute at once: few rows take more, so that enough chains run side by side to hide the latency of one.
PARE_INLINE int64_t tile_panels(int64_t rows, int64_t panels) {
  int64_t n = kTilePanels;
#if defined(__AVX512F__)
  while (n > 1 && (n > panels || rows * n > (n == 4 ? 24 : kTileVectors))) n /= 2;
#else
  while (n > 1 && (n > panels || rows * n > kTileVectors)) n /= 2;
#endif
  return n;
}

// The next smaller even share: n rows in tiles of at most kTileRows.
PARE_INLINE int64_t even_rows(int64_t n) {
  const int64_t tiles = (n + kTileRows - 1) / kTileRows;
  return (n + tiles - 1) / tiles;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
template <int kFirstRow, __m256 vf::*part>
PARE_INLINE void transpose8(vf* r) {
  __m256 t[8];
  PARE_UNROLL
  for (int i = 0; i < 8; i += 4) {
    const vf* q = r + kFirstRow + i;
    const __m256 a = _mm256_unpacklo_ps(q[0].*part, q[1].*part), b = _mm256_unpackhi_ps(q[0].*part, q[1].*part);
    const __m256 c = _mm256_unpacklo_ps(q[2].*part, q[3].*part), d = _mm256_unpackhi_ps(q[2].*part, q[3].*part);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  PARE_UNROLL
  for (int i = 0; i < 4; i++) {
    r[kFirstRow + i].*part = _mm256_permute2f128_ps(t[i], t[4 + i], 0x20);
    r[kFirstRow + 4 + i].*part = _mm256_permute2f128_ps(t[i], t[4 + i], 0x31);
  }
}
#endif

#if defined(PARE_NEON)
// Transposes each 4 x 4 floats that part j of r[0] to r[3] is.
PARE_INLINE void transpose_parts(vf* r) {
  PARE_UNROLL
  for (int j = 0; j < 4; j++) {
    const part a = vzip1q_f32(r[0].v[j], r[2].v[j]), b = vzip2q_f32(r[0].v[j], r[2].v[j]);
    const part c = vzip1q_f32(r[1].v[j], r[3].v[j]), d = vzip2q_f32(r[1].v[j], r[3].v[j]);
    r[0].v[j] = vzip1q_f32(a, c);
    r[1].v[j] = vzip2q_f32(a, c);
    r[2].v[j] = vzip1q_f32(b, d);
    r[3].v[j] = vzip2q_f32(b, d);
  }
}
#endif

// Transposes 16 x 16 floats: afterwards lane j of r[i] is lane i of what r[j] was.
PARE_INLINE void transpose(vf* r) {
#if defined(__AVX512F__)
  __m512 t[16];
  PARE_UNROLL
  for (int i = 0; i < 16; i += 4) {
    const __m512 a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    const __m512 c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  // t[4 g + i]: 128-bit part l holds column 4 l + i of rows 4 g .. 4 g + 3
  PARE_UNROLL
  for (int i = 0; i < 4; i++) {
    const __m512 a = _mm512_shuffle_f32x4(t[i], t[4 + i], 0x44), b = _mm512_shuffle_f32x4(t[i], t[4 + i], 0xee);
    const __m512 c = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0x44),
                 d = _mm512_shuffle_f32x4(t[8 + i], t[12 + i], 0xee);
    r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    r[4 + i] = _mm512_shuffle_f32x4(a, c, 0xdd);
    r[8 + i] = _mm512_shuffle_f32x4(b, d, 0x88);
    r[12 + i] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
#elif defined(__AVX2__)
  PARE_UNROLL
  for (int i = 0; i < 8; i++) {  // now .a and .b of r[i] and r[i + 8] are the corners of a 2 x 2 of blocks: swap two
    const __m256 t = r[i].b;
    r[i].b = r[i + 8].a;
    r[i + 8].a = t;
  }
  transpose8<0, &vf::a>(r);
  transpose8<0, &vf::b>(r);
  transpose8<8, &vf::a>(r);
  transpose8<8, &vf::b>(r);
#elif defined(PARE_NEON)
  PARE_UNROLL
  for (int i = 0; i < 16; i += 4) transpose_parts(r + i);
  PARE_UNROLL
  for (int i = 0; i < 16; i++) PARE_UNROLL
  for (int j = 0; j < i / 4; j++) {  // the blocks of 4 x 4 change places
    const part t = r[i].v[j];
    r[i].v[j] = r[4 * j + i % 4].v[i / 4];
    r[4 * j + i % 4].v[i / 4] = t;
  }
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      const float t = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = t;
    }
#endif
}

// Lane i: the 16 lanes of r[i] put together by f, in the order of sum() and highest().
template <class F>
PARE_INLINE vf reduce(const vf* r, F f) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
#define PARE_SHUFFLE(a, b, k) _mm512_shuffle_ps(a, b, k)
#else
#define PARE_SHUFFLE(x, y, k) vf{_mm256_shuffle_ps(x.a, y.a, k), _mm256_shuffle_ps(x.b, y.b, k)}
#endif
  vf four[4];  // 128 bits each of rows j, j + 4, j + 8, j + 12
  PARE_UNROLL
  for (int j = 0; j < 4; j++) {
#if defined(__AVX512F__)
    const auto halve = [&](vf x, vf y) __attribute__((always_inline)) {
      return f(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    };
    const vf x = halve(r[j], r[4 + j]), y = halve(r[8 + j], r[12 + j]);
    four[j] = f(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
#else
    const auto halve = [&](vf x, vf y) __attribute__((always_inline)) { return f(vf{x.a, y.a}, vf{x.b, y.b}); };
    const vf x = halve(r[j], r[8 + j]), y = halve(r[4 + j], r[12 + j]);
    four[j] = f(vf{_mm256_permute2f128_ps(x.a, y.a, 0x20), _mm256_permute2f128_ps(x.b, y.b, 0x20)},
                vf{_mm256_permute2f128_ps(x.a, y.a, 0x31), _mm256_permute2f128_ps(x.b, y.b, 0x31)});
#endif
  }
  vf two[2];
  PARE_UNROLL
  for (int j = 0; j < 4; j += 2)
    two[j / 2] = f(PARE_SHUFFLE(four[j], four[j + 1], 0x44), PARE_SHUFFLE(four[j], four[j + 1], 0xee));
  return f(PARE_SHUFFLE(two[0], two[1], 0x88), PARE_SHUFFLE(two[0], two[1], 0xdd));
#undef PARE_SHUFFLE
#elif defined(PARE_NEON)
  vf four[4];  // a part each of rows j, j + 4, j + 8, j + 12
  PARE_UNROLL
  for (int j = 0; j < 4; j++) {
    const auto halve = [&](const part* x, const part* y) __attribute__((always_inline)) {
      return f(vf{x[0], x[1], y[0], y[1]}, vf{x[2], x[3], y[2], y[3]});
    };
    const vf x = halve(r[j].v, r[4 + j].v), y = halve(r[8 + j].v, r[12 + j].v);
    four[j] = f(vf{x.v[0], x.v[2], y.v[0], y.v[2]}, vf{x.v[1], x.v[3], y.v[1], y.v[3]});
  }
  transpose_parts(four);
  return f(f(four[0], four[2]), f(four[1], four[3]));
#else
  vf result;
  for (int i = 0; i < 16; i++) {
    vf x = r[i], other = x;
    for (int n = 8; n; n /= 2) {
      for (int j = 0; j < n; j++) other.v[j] = x.v[j + n];
      x = f(x, other);
    }
    result.v[i] = x.v[0];
  }
  return result;
#endif
}

// Lane i: sum(f(i)), or +0 for i >= n; f is called for one after the other.
template <class F>
PARE_INLINE vf sums(int64_t n, F f) {
  vf x[16];
  PARE_UNROLL
  for (int i = 0; i < 16; i++) x[i] = i < n ? f(i) : zero();
  return reduce(x, [](vf a, vf b) { return add(a, b); });
}

// out[j][i] = in[i][j] for j < columns, i < lanes; 0 for i >= rows.  At most 16 of each.
PARE_INLINE void transpose_tile(float* out, int64_t out_stride, int64_t lanes, const float* in, int64_t in_stride,
                                int64_t rows, int64_t columns) {
  vf r[16];
  PARE_UNROLL
  for (int i = 0; i < 16; i++) r[i] = i < rows ? load(in + i * in_stride, columns) : zero();
  transpose(r);
  for (int64_t j = 0; j < columns; j++) store(out + j * out_stride, r[j], lanes);
}

}  // namespace
}  // namespace pare::PARE_ISA
