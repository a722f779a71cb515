// One transformer block, forward and backward, on buffers that the caller owns.
#pragma once
#include "model/model.h"

namespace pare {

// Intermediate results of a block that its backward pass reads.  N rows.
struct BlockBuffers {
  BlockBuffers(const Model& model, Arena& arena, int64_t rows);

  Tensor rstd1, h1;                // [N], [N, C]: input norm
  Tensor qkv;                      // [N, (H+2K) D]: out of the linear layer; without QK-norm, q and k after RoPE
  Tensor qk, rstd_qk;              // [N, (H+K) D], [N, H+K]: q and k after QK-norm and RoPE; absent without QK-norm
  Tensor o;                        // [N, H D]: attention output
  Tensor x_mid;                    // [N, C]: residual stream after attention
  Tensor rstd2, h2, gate_up, act;  // [N], [N, C], [N, 2F], [N, F]

  AdapterBuffers lora;   // [N, r] each: absent without adapters
  LinearParts parts;     // of the products; absent at first
  bool backward = true;  // false: no backward follows, and gate_up is scratch

  Tensor q, k, v;  // [N, H, D], [N, K, D], [N, K, D]: what attention reads, views of the above
};

// Columns [N, heads, D] of a [N, (H+2K) D] tensor (values or gradients).
Tensor q_columns(const ModelConfig& config, const Tensor& qkv);
Tensor k_columns(const ModelConfig& config, const Tensor& qkv);
Tensor v_columns(const ModelConfig& config, const Tensor& qkv);

// x [N, C] -> y [N, C] (may be x in place).  With y absent the last product is left out: everything that the backward
// reads is there.  With `next`, a norm of y, that is computed too, and b.h1 is x normed already.
void block_forward(const Model& model, int layer, const BlockBuffers& b, const Tensor& x, const Tensor& pos,
                   AttentionContext& attention, const Tensor& y, const RowNorm& next = {});

// Device::rmsnorm_bwd with `parts` from the arena.
void norm_backward(Device& device, const RmsnormBwd& args, Arena& arena);

// Calls the op of a rotation, if there is one.
void rotate(Device& device, const Rotation& rotation);

// The backward of attention: from d_o [N, H, D] to dq (out), dk and dv (acc), strided views.
class AttentionBackward {
 public:
  virtual ~AttentionBackward() = default;
  virtual void attend_backward(int layer, const BlockBuffers& b, const Tensor& d_o, const Tensor& dq, const Tensor& dk,
                               const Tensor& dv) = 0;
};

// On entry dx [N, C] is the gradient of the block's output, on return that of its input.  Adds to those parameter
// gradients of `g` that are present.  d_qkv [N, (H+2K) D]: its k and v columns hold what other passes have added to
// them (zero if none); overwritten. Overwrites b.gate_up; other scratch comes from `arena` and is given back.
void block_backward(const Model& model, int layer, const BlockBuffers& b, const Tensor& x, const Tensor& pos,
                    AttentionBackward& attention, const LayerViews& g, const Tensor& dx, const Tensor& d_qkv,
                    Arena& arena);

}  // namespace pare
