// Warp-level matrix instructions, emulated with the hardware's fragment layouts (PTX ISA, "Matrix fragments").
#pragma once
#include "cuda_bf16.h"

namespace cuemu {

// d[i][j] += sum over k of a[i][k] b[j][k] for `rows` rows and eight columns, with the roundings of the tensor cores of
// settings().arch; a and b are bits of bf16.  (tensor_core.cpp)
void tensor_core(float (*d)[8], const uint16_t (*a)[16], const uint16_t (*b)[16], int rows);

// ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16: lane 8*i + j names row j of matrix i; lane l receives elements
// 2*(l%4) and 2*(l%4) + 1 of row l/4 of each matrix (of column l/4 with .trans).
struct LdmatrixArg {
  uint32_t* r;
  const void* row;
  bool trans;
};
CUEMU_UNCHECKED inline void ldmatrix_run(void** args, uint32_t) {
  uint16_t m[4][8][8];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 8; j++) std::memcpy(m[i][j], static_cast<LdmatrixArg*>(args[8 * i + j])->row, 16);
  for (unsigned l = 0; l < kWarp; l++) {
    auto* a = static_cast<LdmatrixArg*>(args[l]);
    const unsigned r = l / 4, c = 2 * (l % 4);
    for (int i = 0; i < 4; i++)
      a->r[i] = a->trans ? m[i][c][r] | uint32_t{m[i][c + 1][r]} << 16 : m[i][r][c] | uint32_t{m[i][r][c + 1]} << 16;
  }
}
inline void ldmatrix(uint32_t (&r)[4], const void* row, bool trans, Loc loc) {
  check_aligned(row, 16, "ldmatrix", loc);
  note_access(row, 16, false, false, loc);
  LdmatrixArg a{r, row, trans};
  warp_collective(~0u, ldmatrix_run, &a, "ldmatrix", loc);
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32, in place.  With g = lane/4, t = 2*(lane%4):
//   a[0]: A[g][t..]  a[1]: A[g+8][t..]  a[2]: A[g][t+8..]  a[3]: A[g+8][t+8..]
//   b[0]: B[t..][g]  b[1]: B[t+8..][g]
//   d[0], d[1]: D[g][t..]  d[2], d[3]: D[g+8][t..]
struct MmaArg {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};
CUEMU_UNCHECKED inline void mma_16816_run(void** args, uint32_t) {
  uint16_t A[16][16], B[8][16];  // B by columns
  float D[16][8];
  for (unsigned l = 0; l < kWarp; l++) {
    auto* x = static_cast<MmaArg*>(args[l]);
    const unsigned g = l / 4, t = 2 * (l % 4);
    for (unsigned i = 0; i < 4; i++) std::memcpy(&A[g + 8 * (i & 1)][t + 8 * (i >> 1)], &x->a[i], 4);
    for (unsigned i = 0; i < 2; i++) std::memcpy(&B[g][t + 8 * i], &x->b[i], 4);
    for (unsigned i = 0; i < 2; i++) std::memcpy(&D[g + 8 * i][t], x->d + 2 * i, 8);
  }
  tensor_core(D, A, B, 16);
  for (unsigned l = 0; l < kWarp; l++)
    for (unsigned i = 0; i < 2; i++)
      std::memcpy(static_cast<MmaArg*>(args[l])->d + 2 * i, &D[l / 4 + 8 * i][2 * (l % 4)], 8);
}
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Loc loc) {
  MmaArg x{d, a, {b0, b1}};
  warp_collective(~0u, mma_16816_run, &x, "mma.m16n8k16", loc);
}

}  // namespace cuemu
