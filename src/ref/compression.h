// Shared code of the ops of a compression.
#pragma once
#include <vector>

#include "ops/compression.h"
#include "ref/ref.h"

namespace pare::ref {

// The pages of one compression: where its slots lie.
struct CompressionPages {
  View<int32_t> table;
  int64_t compression;
  int64_t operator()(int64_t slot) const { return table(compression, slot / kPageSlots); }
};

// The compressions, checked: their numbers, `work`, and, where the page lists are given, that each names pages in [0,
// pages) for the slots that lie there (before: `slots` of them; after: first + keep).
std::vector<KvCompression> read_compressions(const char* op, const Tensor& compressions, const KvWork& work);
void expect_compression_pages(const char* op, const char* name, const Tensor& list, int64_t compression, int64_t slots,
                              int64_t pages);
// Checks the data of the arguments of KvCompact.
void expect_compact(const char* op, const KvCompact& a, const std::vector<KvCompression>& compressions);
}  // namespace pare::ref
