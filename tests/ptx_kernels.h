// One launch for each PTX wrapper of cuda/ptx.cuh and ptx90.cuh: what it makes of given bytes.  Pointers are to memory
// that kernels can use; the results are there when the device has been waited for.
#pragma once
#include <cstdint>

namespace pare::test::ptx {

// The first `bytes[i]` of 16 (8) bytes at in + 16 i (8 i), for n <= 32, at the same place of out; zeros behind.
void copy_16(unsigned char* out, const unsigned char* in, const int32_t* bytes, int n);
void copy_8(unsigned char* out, const unsigned char* in, const int32_t* bytes, int n);
// Copies in two groups that are waited for one after the other: out[i] = in[i] of 2 x 128 words.
void copy_groups(uint32_t* out, const uint32_t* in);
// Four registers for each of 32 lanes; lane l names row[l] of the 32 rows of 8 elements.
void load_matrices(uint32_t* out, const uint16_t* rows, const int32_t* row, bool transposed);
// d[i] += a[i] b[i], i < n: a [n][16][16] and b [n][8][16] (by columns) of bf16, d [n][16][8].
void multiply(float* d, const uint16_t* a, const uint16_t* b, int n);
// x[i] = exp2_f32(x[i]), or exp_at_most_1(x[i]) (cuda/math.cuh), i < n.
void exp2_in_place(float* x, int n);
void exp_at_most_1_in_place(float* x, int n);

// ---- compute capability 9.0 (ptx90_kernels.cu)
bool waits_for_mbarriers();  // has the code that the device runs kernels that do?
void lose_arrival();         // the second of two blocks waits for one arrival more than there is
// Shared memory [16][64] of bf16 behind a tensor copy with the swizzle of 128 bytes, at (x, y) of a matrix.
void copy_box(unsigned char* out, const uint16_t* in, int64_t columns, int64_t rows, int64_t stride, int x, int y);
// Shared memory [2][8][16] behind one with the swizzle of 32 bytes, which begins at (x, y, z) of [panels][rows][16].
void copy_panels(unsigned char* out, const uint16_t* in, int64_t rows, int64_t panels, int x, int y, int z);
// d += a b: d [64][columns], a [64][64]; b is [columns / 16][64][16] (mn_major: in panels of columns), or
// [4][columns][16] (in panels of k).  columns is 128 or 256.
void multiply_group(float* d, const uint16_t* a, const uint16_t* b, int columns, bool mn_major);
// The same by rows of 128 bytes: with b [64][64] transposed; with a from registers and b [64][columns], 64 or 128.
void multiply_scores(float* d, const uint16_t* a, const uint16_t* b);
void multiply_values(float* d, const uint16_t* a, const uint16_t* b, int columns);
// With a [64][64] transposed too and b [64][columns], 128 or 256.
void multiply_gradients(float* d, const uint16_t* a, const uint16_t* b, int columns);

}  // namespace pare::test::ptx
