// The shape of a model, its parameters in order, and whoever gives their values.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace pare {

// rope_scaling of type llama3 (Llama 3.1 and later): low frequencies are divided by `factor`, middle ones blended.
struct RopeLlama3 {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4, original_max_position_embeddings = 8192;
  bool operator==(const RopeLlama3&) const = default;
};
// rope_scaling of type yarn (Peng et al. 2023, arXiv 2309.00071): pairs that turn less than beta_slow times within the
// original positions are slowed by `factor`, those above beta_fast kept, those between blended by their index; cos and
// sin are multiplied by attention_factor.
struct RopeYarn {
  double factor = 4, original_max_position_embeddings = 32768;
  double attention_factor = 1;  // absent in the file: of `factor`, `mscale` and `mscale_all_dim`
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;  // the blend begins and ends at whole pairs
  bool operator==(const RopeYarn&) const = default;
};

struct ModelConfig {
  std::string model_type;    // qwen2, qwen3, llama or mistral
  int64_t hidden = 0;        // C
  int64_t layers = 0;        // L
  int64_t heads = 0;         // H
  int64_t kv_heads = 0;      // K; H is a multiple of K
  int64_t head_dim = 0;      // D; not always hidden / heads
  int64_t ffn = 0;           // F
  int64_t vocab = 0;         // V: rows of the embedding, often more than the tokenizer has
  int64_t max_position = 0;  // with YaRN at least those to which it extends the original ones
  float rms_eps = 1e-6f;
  double rope_theta = 1e4;
  std::optional<RopeLlama3> rope_scaling;
  std::optional<RopeYarn> yarn;  // never beside the other
  bool qkv_bias = false;         // Qwen2
  bool qk_norm = false;          // Qwen3
  bool tied = false;             // lm_head is the embedding
  double initializer_range = 0.02;
  std::vector<int32_t> eos_ids;  // any of them ends a sequence
  int32_t bos_id = -1, pad_id = -1;

  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
  double attention_factor() const { return yarn ? yarn->attention_factor : 1; }
};

// Angles per position of the D/2 rotated pairs: theta^(-2i/D); with llama3 scaling, wavelengths above original /
// low_freq_factor are stretched by `factor`, those below original / high_freq_factor kept, those between blended; with
// YaRN as above.
std::vector<double> rope_inv_freq(const ModelConfig& config);

// One tensor of the checkpoint and its place in the flat parameter buffer (in elements).  q, k and v (and their
// biases), and gate and up, follow one another without a gap, so that each pair or triple is one matrix.
struct Parameter {
  std::string name;  // Hugging Face name
  std::vector<int64_t> shape;
  int64_t offset, size;
};
// All tensors in the order of the flat buffer: embedding; per layer: input norm, q, k, v, their biases, q norm, k norm,
// o, post-attention norm, gate, up, down; final norm; lm_head unless tied.
std::vector<Parameter> parameters(const ModelConfig& config);

// A source of one tensor: writes elements [begin, begin + count) to `out`.
using TensorReader = std::function<void(int64_t begin, int64_t count, float* out)>;
// A source of parameters: writes elements [begin, begin + count) of parameters(config)[parameter] to `out`.  Loading,
// copying and saving a model so need a second copy of a piece of it only.
using ParameterReader = std::function<void(size_t parameter, int64_t begin, int64_t count, float* out)>;
// Reads from a flat buffer, which must outlive the reader.
ParameterReader flat_parameters(const ModelConfig& config, const float* values);

}  // namespace pare
