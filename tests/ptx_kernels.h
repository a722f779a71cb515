// One launch for each PTX wrapper of cuda/ptx.cuh: what it makes of given bytes.  Pointers are to memory that kernels
// can use; the results are there when the device has been waited for.
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

}  // namespace pare::test::ptx
