// A transformer of the Qwen/Llama family: its weights on a device, and its forward without a backward.
#pragma once
#include <vector>

#include "base/arena.h"
#include "model/config.h"
#include "ops/device.h"

namespace pare {

// Views into the flat parameter buffer, and packed weights.
struct Layer {
  Tensor input_norm, post_norm;  // [C]
  Weight qkv;                    // [(H + 2K) D, C]
  Tensor qkv_bias;               // [(H + 2K) D] or absent
  Tensor q_norm, k_norm;         // [D] or absent
  Weight o;                      // [C, H D]
  Weight gate_up;                // [2F, C]
  Weight down;                   // [C, F]
};

class Model {
 public:
  // Allocates parameters (act type `dtype`) and packed weights from `weights`; with `trainable`, also what the backward
  // needs.  Parameters are undefined until set_parameters or init_parameters.
  Model(const ModelConfig& config, Device& device, Arena& weights, DType dtype, bool trainable);

  // Copies `host` (parameters(config) in order, f32) to the device and refreshes the packed weights.
  void set_parameters(const std::vector<float>& host);
  std::vector<float> get_parameters() const;
  void refresh();  // prepare_weight for every weight; after each change of `flat`

  const ModelConfig config;
  Device& device;
  const DType dtype, stat;  // roles act and stat (ops.h)
  const std::vector<Parameter> layout;
  Tensor flat;        // act [parameters]
  Tensor embedding;   // act [V, C], view of flat
  Tensor final_norm;  // act [C]
  Weight head;        // [V, C]: lm_head, or the embedding if tied
  std::vector<Layer> layers;
  Tensor rope;  // stat [max_position, D]

  float attention_scale() const;  // 1 / sqrt(D)
};

// Random parameters: norms 1, biases 0, matrices N(0, initializer_range); seeded by (seed, RngStream::init, tensor).
std::vector<float> init_parameters(const ModelConfig& config, uint64_t seed);

// Whoever holds the keys and values: packed rows in the learner, pages in the rollout.
class AttentionContext {
 public:
  virtual ~AttentionContext() = default;
  // q [N, H, D], k and v [N, K, D] of the rows of this pass, after QK-norm and RoPE (strided views); writes o [N, H,
  // D].
  virtual void attend(int layer, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o) = 0;
};

// The final hidden states (after the last norm) of N rows; keeps nothing for a backward.  ids, pos: i32 [N] on the
// device; hidden: act [N, C] out.  Scratch is given back at the end.
void forward_rows(const Model& model, Arena& scratch, const Tensor& ids, const Tensor& pos, AttentionContext& attention,
                  const Tensor& hidden);

}  // namespace pare
