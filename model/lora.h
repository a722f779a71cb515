// Low-rank adapters (Hu et al. 2021, "LoRA"): y = W x + (alpha / r) B A x, with W frozen and A and B trained.
//
// The device holds and trains A and B' = (alpha / r) B, at alpha / r times the learning rate: AdamW then
// moves B as if it were trained itself, but for eps.  The norm of the gradient, which clips it, is that of A and B'.
#pragma once
#include <array>

#include "model/parameters.h"

namespace pare {

// The linear layers of a block, in the order of parameters(config).
enum class Projection { q, k, v, o, gate, up, down };
constexpr int kProjections = 7;
using ProjectionSet = std::array<bool, kProjections>;
// "q_proj", as Hugging Face calls its module, and "self_attn.q_proj", where it lies in a layer.
std::string projection_name(int projection);
std::string projection_path(int projection);

struct LoraSpec {
  int64_t rank = 0;
  double alpha = 32;
  ProjectionSet targets = {true, true, true, true, true, true, true};  // which layers have adapters
  double scale() const { return alpha / static_cast<double>(rank); }
  bool operator==(const LoraSpec&) const = default;
};

// A [r, I] and B' [O, r] of every target, by PEFT's names of A and B without "base_model.model.".
std::vector<Parameter> adapter_parameters(const ModelConfig& config, const LoraSpec& spec);
// A uniform over +-1 / sqrt(I), as PEFT's, B' 0: a function of (seed, tensor, element) alone.
ParameterReader init_adapters(const ModelConfig& config, const LoraSpec& spec, uint64_t seed);

// By projection; absent where it is no target.
struct Adapter {
  Weight a, b;  // [r, I], [O, r]
};
struct AdapterView {
  Tensor a, b;  // stat [r, I], [O, r]: gradients
};
using AdapterViews = std::array<AdapterView, kProjections>;
using AdapterBuffers = std::array<Tensor, kProjections>;  // act [N, r]: A x

class Adapters : public Parameters {
 public:
  Adapters(const ModelConfig& config, const LoraSpec& spec, Device& device, Arena& weights, DType dtype,
           bool trainable);

  AdapterBuffers buffers(Arena& arena, int64_t rows) const;
  // Gradients of a layer in a flat buffer in the order of the layout.
  AdapterViews views(size_t layer, const Tensor& flat) const;

  // u = A x; y += B' u, of projections of one x whose outputs lie side by side in y.  x [N, I] and y [N, sum of O] act,
  // rows may be strided.  With y absent only u is computed, which is what the backward reads.
  void forward(int layer, std::initializer_list<Projection> side_by_side, const Tensor& x, const AdapterBuffers& u,
               const LinearParts& parts, const Tensor& y) const;
  // From dy, the gradient of y: adds to the gradients `g` and to dx [N, I] act.
  void backward(int layer, std::initializer_list<Projection> side_by_side, const AdapterViews& g, const Tensor& x,
                const AdapterBuffers& u, const Tensor& dy, const Tensor& dx, Arena& scratch) const;

  const LoraSpec spec;
  std::vector<std::array<Adapter, kProjections>> layers;

 private:
  const std::array<int64_t, kProjections> outputs_;
};

}  // namespace pare
