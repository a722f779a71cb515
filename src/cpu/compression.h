// Shared code of the ops of a compression.
#pragma once
#include "cpu/paged.h"
#include "ops/compression.h"

namespace pare::cpu {

// The compressions, checked.
const KvCompression* read_compressions(const char* op, const Tensor& compressions);
// Page lists [E, max_pages], checked against the compressions: in use are the pages of their slots before, or after.
const int32_t* pages_before(const char* op, const Tensor& src, const KvCompression* compressions, int64_t n,
                            int64_t pages);
const int32_t* pages_after(const char* op, const Tensor& dst, const KvCompression* compressions, int64_t n,
                           int64_t pages);

constexpr int64_t slots_after(const KvCompression& e) { return int64_t{e.first} + e.keep; }
// Nanoseconds of one of `pieces` pieces of work.
inline double per_piece(double nanoseconds, int64_t pieces) { return nanoseconds / static_cast<double>(pieces) + 50; }

}  // namespace pare::cpu
