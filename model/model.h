// A transformer of the Qwen/Llama family: its weights on a device, and its forward without a backward.
#pragma once
#include <vector>

#include "base/arena.h"
#include "model/config.h"
#include "ops/device.h"

namespace pare {

// The parameters of one layer as views of a flat buffer in the order of parameters(config): the weights themselves, or
// their gradients.
struct LayerViews {
  Tensor input_norm, post_norm;  // [C]
  Tensor qkv;                    // [(H + 2K) D, C]
  Tensor qkv_bias;               // [(H + 2K) D] or absent
  Tensor q_norm, k_norm;         // [D] or absent
  Tensor o;                      // [C, H D]
  Tensor gate_up;                // [2F, C]
  Tensor down;                   // [C, F]
};
struct ParameterViews {
  ParameterViews(const ModelConfig& config, const std::vector<Parameter>& layout, const Tensor& flat);
  Tensor embedding;   // [V, C]
  Tensor final_norm;  // [C]
  Tensor head;        // [V, C]; the embedding if tied
  std::vector<LayerViews> layers;
};

// The matrices of a layer in the layouts that the table computes with.
struct Layer {
  Weight qkv, o, gate_up, down;
};

class Model {
 public:
  // Allocates parameters (act type `dtype`) and packed weights from `weights`; with `trainable`, also what backward and
  // optimizer need.  Parameters are undefined until set_parameters.
  Model(const ModelConfig& config, Device& device, Arena& weights, DType dtype, bool trainable);

  // Copies `host` (parameters(config) in order) to the device, rounded to `dtype`, and refreshes the packed weights.
  void set_parameters(const std::vector<float>& host);
  std::vector<float> get_parameters() const;  // the master, where there is one
  void refresh();                             // prepare_weight for every weight; after each change of `flat`

  float attention_scale() const;  // 1 / sqrt(D)

  const ModelConfig config;
  Device& device;
  const DType dtype, stat;  // roles act and stat (ops.h)
  const std::vector<Parameter> layout;
  const Tensor flat;    // act [parameters]
  const Tensor master;  // stat [parameters], or absent: what the optimizer changes, and `flat` is the rounding of
  const ParameterViews views;
  Weight head;
  std::vector<Layer> layers;
  Tensor rope;  // stat [max_position, D]: cos, then sin
};

// Random parameters: norms 1, biases 0, matrices normal; a function of (seed, tensor, element) alone.
//   config   standard deviation initializer_range (transformers' initialisation)
//   fan_in   1/sqrt(inputs), and 1/sqrt(2 L) of that for o and down: trains small models from scratch
enum class Init { config, fan_in };
std::vector<float> init_parameters(const ModelConfig& config, uint64_t seed, Init init);

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
