// Sums over the tiles of a vocabulary, which the product of the LM head makes of its own logits.
#pragma once
#include <cstdint>

#include "base/tensor.h"
#include "ops/contract.h"

namespace pare {

// Sums over the vocabulary are made by tiles of so many ids, from id 0; the last may be shorter.
constexpr int kVocabTile = 128;
constexpr int64_t vocab_tiles(int64_t vocabulary) { return (vocabulary + kVocabTile - 1) / kVocabTile; }

// With z = logits / temperature, three numbers of each tile (list.h, vocabulary): the largest z, m; the sum of
// exp(z - m); the sum of (z - m) exp(z - m).  LinearFwd writes them, and Logprob, LogitsLoss and Sample read them in
// place of all logits of a row.  In bf16 only: in f32 they are ignored.  No bit depends on who sums up.
struct VocabSums {
  Tensor tiles;           // stat [R, vocab_tiles(V) + 1, 3], or absent; behind the tiles of a row: z of its target
  Tensor target;          // i32 [R], or absent: no z
  float temperature = 1;  // above 0
  bool only = false;      // the logits themselves are not wanted: they may be overwritten or not
  void check(Contract& c, int64_t rows, int64_t vocabulary) const {
    c.stat("tiles", tiles, {rows, vocab_tiles(vocabulary) + 1, 3});
    if (target) c.index("target", target, {rows});
    c.that(temperature > 0, "temperature is ", temperature, ", expected more than 0");
  }
};

// The one of which an op reads all: beside tiles it reads few logits, targets and those that can win a draw.
inline Tensor summed(const Tensor& tiles, const Tensor& logits) {
  return tiles && logits.dtype == DType::bf16 ? tiles : logits;
}

}  // namespace pare
