// Checkpoints of llama2.c (the format without magic, "version 0"), such as the tinyllamas models.
#pragma once
#include <string>
#include <vector>

#include "model/config.h"

namespace pare {

struct Llama2cCheckpoint {
  ModelConfig config;
  std::vector<float> weights;  // parameters(config) in order
};

// The file: 7 i32 (dim, ffn, layers, heads, kv heads, vocabulary, sequence length; a negative vocabulary: lm_head is
// not the embedding), then f32 tensors, each for all layers: embedding, input norm, q, k, v, o, post-attention norm,
// gate, down, up, final norm, two RoPE tables (left out: they follow from theta = 1e4), lm_head if not tied.
// Rows of q and k are reordered: RoPE rotates neighbours (2i, 2i+1) here, (i, i + D/2) in Hugging Face.  A text ends
// with EOS or with BOS, which stood between the stories that these models were trained on.
Llama2cCheckpoint load_llama2c(const std::string& path);

}  // namespace pare
