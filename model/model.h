// A transformer of the Qwen/Llama family: weights on a device, and a forward pass for inference.
#pragma once
#include <optional>
#include <vector>

#include "model/lora.h"

namespace pare {

// The gradients of one layer as views of a flat buffer, those of the model (in the order of parameters(config)) or
// those of its adapters; the others are absent.
struct LayerViews {
  Tensor input_norm, post_norm;  // [C]
  Tensor qkv;                    // [(H + 2K) D, C]
  Tensor qkv_bias;               // [(H + 2K) D] or absent
  Tensor q_norm, k_norm;         // [D] or absent
  Tensor o;                      // [C, H D]
  Tensor gate_up;                // [2F, C]
  Tensor down;                   // [C, F]
  AdapterViews adapters;
};
struct ParameterViews {
  ParameterViews(const ModelConfig& config, const std::vector<Parameter>& layout, const Tensor& flat);
  ParameterViews(const Adapters& adapters, const Tensor& flat);
  Tensor embedding;   // [V, C]
  Tensor final_norm;  // [C]
  Tensor head;        // [V, C]; the embedding if tied
  std::vector<LayerViews> layers;
};

// The parameters of one layer; shapes as above.
struct Layer {
  Tensor input_norm, post_norm, qkv_bias, q_norm, k_norm;
  Weight qkv, o, gate_up, down;
};

class Model : public Parameters {
 public:
  // Allocates parameters (act type `dtype`) from `weights`; with `trainable`, also what the optimizer needs beside
  // them, which is a master for bf16, of this rank's part.  They are undefined until set_parameters.
  Model(const ModelConfig& config, Device& device, Arena& weights, DType dtype, bool trainable);

  float attention_scale() const;  // 1 / sqrt(D)

  const ModelConfig config;
  Weight embedding, head;  // [V, C]; the same if tied
  Tensor final_norm;       // [C]
  std::vector<Layer> layers;
  Tensor rope;  // stat [max_position, D]: cos, then sin, times the attention factor
  // The same without the factor, which turns keys that are in a cache; `rope` itself if the factor is 1.
  Tensor rotation;
  // Added to the linear layers by every pass; null: none.  A copy of a model shares its memory, but not this.
  const Adapters* adapters = nullptr;
};

// Random parameters: norms 1, biases 0, matrices normal; a function of (seed, tensor, element) alone.
//   config   standard deviation initializer_range (transformers' initialisation)
//   fan_in   1/sqrt(inputs), and 1/sqrt(2 L) of that for o and down: trains small models from scratch
enum class Init { config, fan_in };
ParameterReader init_parameters(const ModelConfig& config, uint64_t seed, Init init);

struct Rotation;  // ops/rope.h

// Whoever holds the keys and values: packed rows in the learner, pages in the rollout.
class AttentionContext {
 public:
  virtual ~AttentionContext() = default;
  // q [N, H, D], k and v [N, K, D] of the rows of this pass (strided views), which `qkv` computes unless its y is
  // absent; does `rotation` to q and k, then writes o [N, H, D].
  virtual void attend(int layer, const LinearFwd& qkv, const Rotation& rotation, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& o) = 0;
};

// The elements of LinearParts::sums that forward_rows needs for up to so many rows; 0: it needs no LinearParts.
int64_t forward_sums(const Model& model, int64_t rows);
// The final hidden states (after the last norm) of N rows; keeps nothing for a backward.  ids, pos: i32 [N] on the
// device; hidden: act [N, C] out.  Scratch is given back at the end.
void forward_rows(const Model& model, Arena& scratch, const Tensor& ids, const Tensor& pos, AttentionContext& attention,
                  const LinearParts& parts, const Tensor& hidden);

// The LM head of R hidden rows.
struct Logits {
  Tensor logits, tiles;  // act [R, V]; their VocabSums, or absent
};
// Both from `arena`.  sums: temperature, targets and whether the logits themselves are wanted; without a value, or in
// f32, there are no tiles.
Logits head_forward(const Model& model, Arena& arena, const Tensor& hidden, std::optional<VocabSums> sums);

}  // namespace pare
