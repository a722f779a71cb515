#include "model/block.h"

#include <utility>

#include "ops/data.h"
#include "ops/norm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace pare {

BlockBuffers::BlockBuffers(const Model& model, Arena& arena, int64_t rows) {
  const ModelConfig& c = model.config;
  rstd1 = arena.alloc("rstd1", model.stat, {rows});
  h1 = arena.alloc("h1", model.dtype, {rows, c.hidden});
  qkv = arena.alloc("qkv", model.dtype, {rows, c.qkv_width()});
  if (c.qk_norm) {
    qk = arena.alloc("qk", model.dtype, {rows, c.q_width() + c.kv_width()});
    rstd_qk = arena.alloc("rstd_qk", model.stat, {rows, c.heads + c.kv_heads});
  }
  o = arena.alloc("o", model.dtype, {rows, c.q_width()});
  x_mid = arena.alloc("x_mid", model.dtype, {rows, c.hidden});
  rstd2 = arena.alloc("rstd2", model.stat, {rows});
  h2 = arena.alloc("h2", model.dtype, {rows, c.hidden});
  gate_up = arena.alloc("gate_up", model.dtype, {rows, 2 * c.ffn});
  act = arena.alloc("act", model.dtype, {rows, c.ffn});
  if (model.adapters) lora = model.adapters->buffers(arena, rows);
  q = q_columns(c, c.qk_norm ? qk : qkv);
  k = k_columns(c, c.qk_norm ? qk : qkv);
  v = v_columns(c, qkv);
}

Tensor q_columns(const ModelConfig& c, const Tensor& qkv) { return qkv.columns(0, c.q_width()).heads(c.heads); }
Tensor k_columns(const ModelConfig& c, const Tensor& qkv) {
  return qkv.columns(c.q_width(), c.kv_width()).heads(c.kv_heads);
}
Tensor v_columns(const ModelConfig& c, const Tensor& qkv) {
  return qkv.columns(c.q_width() + c.kv_width(), c.kv_width()).heads(c.kv_heads);
}

// Returns the heads of q and k, which lie side by side.
static Tensor qk_columns(const ModelConfig& c, const Tensor& qkv) {
  return qkv.columns(0, c.q_width() + c.kv_width()).heads(c.heads + c.kv_heads);
}

void block_forward(const Model& model, int layer, const BlockBuffers& b, const Tensor& x, const Tensor& pos,
                   AttentionContext& attention, const Tensor& y, const RowNorm& next) {
  Device& device = model.device;
  const ModelConfig& c = model.config;
  const Layer& w = model.layers[layer];
  const auto adapt = [&](std::initializer_list<Projection> side_by_side, const Tensor& in, const Tensor& out) {
    if (model.adapters) model.adapters->forward(layer, side_by_side, in, b.lora, b.parts, out);
  };

  // A projection, if its y is there, and the norm of y if that is wanted: of few rows that no adapter changes in one
  // op.
  const auto project = [&](LinearFwd a, Projection projection, const RowNorm& norm) {
    const bool joins = norm.y && b.parts.arrivals && !model.adapters && a.y.shape[0] <= kNormedRows;
    if (joins) a.norm = norm;
    if (a.y) device.linear_fwd(a);
    adapt({projection}, a.x, a.y);
    if (norm.y && !joins) device.rmsnorm_fwd({norm.y, norm.rstd, a.y, norm.w, norm.eps});
  };

  if (!next.y) device.rmsnorm_fwd({.y = b.h1, .rstd = b.rstd1, .x = x, .w = w.input_norm, .eps = c.rms_eps});
  LinearFwd qkv{.y = b.qkv, .x = b.h1, .w = w.qkv, .bias = w.qkv_bias, .residual = {}, .parts = b.parts};
  if (model.adapters) {  // something changes qkv
    device.linear_fwd(std::exchange(qkv, {}));
    adapt({Projection::q, Projection::k, Projection::v}, b.h1, b.qkv);
  }
  Rotation rotation;
  if (c.qk_norm)
    rotation.norm_rope = {.y = qk_columns(c, b.qk),
                          .rstd = b.rstd_qk,
                          .x = qk_columns(c, b.qkv),
                          .q_norm = w.q_norm,
                          .k_norm = w.k_norm,
                          .table = model.rope,
                          .pos = pos,
                          .q_heads = c.heads,
                          .eps = c.rms_eps};
  else
    rotation.rope = {.x = qk_columns(c, b.qkv), .table = model.rope, .pos = pos};
  attention.attend(layer, qkv, rotation, b.q, b.k, b.v, b.o.heads(c.heads));
  project({.y = b.x_mid, .x = b.o, .w = w.o, .bias = {}, .residual = x, .parts = b.parts}, Projection::o,
          {.y = b.h2, .rstd = b.rstd2, .w = w.post_norm, .eps = c.rms_eps});
  LinearFwd gate_up{.y = b.gate_up, .x = b.h2, .w = w.gate_up, .bias = {}, .residual = {}, .parts = b.parts};
  const bool separate = b.backward || model.adapters;  // something reads or changes gate_up
  if (!separate) gate_up.swiglu = b.act;
  device.linear_fwd(gate_up);
  if (separate) {
    adapt({Projection::gate, Projection::up}, b.h2, b.gate_up);
    device.swiglu_fwd({.y = b.act, .gate_up = b.gate_up});
  }
  project({.y = y, .x = b.act, .w = w.down, .bias = {}, .residual = b.x_mid, .parts = b.parts}, Projection::down, next);
}

void norm_backward(Device& device, const RmsnormBwd& args, Arena& arena) {
  const ArenaScope scope(arena);
  RmsnormBwd a = args;
  if (a.dw) a.parts = arena.alloc("parts", a.dw.dtype, {norm_strands(a.x.shape[0], a.x.dtype), a.x.shape[1]});
  device.rmsnorm_bwd(a);
}

void rotate(Device& device, const Rotation& rotation) {
  if (rotation.rope.x) device.rope_fwd(rotation.rope);
  if (rotation.norm_rope.y) device.qk_norm_rope_fwd(rotation.norm_rope);
}

void block_backward(const Model& model, int layer, const BlockBuffers& b, const Tensor& x, const Tensor& pos,
                    AttentionBackward& attention, const LayerViews& g, const Tensor& dx, const Tensor& d_qkv,
                    Arena& arena) {
  Device& device = model.device;
  const ModelConfig& c = model.config;
  const Layer& w = model.layers[layer];
  const int64_t rows = dx.shape[0];
  const auto weight_gradient = [&](const Tensor& dw, const Tensor& dbias, const Tensor& dy, const Tensor& in) {
    if (dw) device.linear_bwd_weight({.dw = dw, .dbias = dbias, .dy = dy, .x = in});
  };
  const auto adapt = [&](std::initializer_list<Projection> side_by_side, const Tensor& in, const Tensor& dy,
                         const Tensor& d_in) {
    if (model.adapters) model.adapters->backward(layer, side_by_side, g.adapters, in, b.lora, dy, d_in, arena);
  };
  const ArenaScope scope(arena);
  const Tensor d_h = arena.alloc("d_h", model.dtype, {rows, c.hidden});

  {  // dx is the gradient of x_mid + down(act)
    const ArenaScope mlp(arena);
    const Tensor d_act = arena.alloc("d_act", model.dtype, {rows, c.ffn});
    weight_gradient(g.down, {}, dx, b.act);
    device.linear_bwd_input({.dx = d_act, .dy = dx, .w = w.down, .accumulate = false});
    adapt({Projection::down}, b.act, dx, d_act);
    device.swiglu_bwd({.dgate_up = b.gate_up, .dy = d_act, .gate_up = b.gate_up});
    weight_gradient(g.gate_up, {}, b.gate_up, b.h2);
    device.linear_bwd_input({.dx = d_h, .dy = b.gate_up, .w = w.gate_up, .accumulate = false});
    adapt({Projection::gate, Projection::up}, b.h2, b.gate_up, d_h);
    norm_backward(
        device,
        {.dx = dx, .dw = g.post_norm, .dy = d_h, .x = b.x_mid, .w = w.post_norm, .rstd = b.rstd2, .accumulate = true},
        arena);
  }
  {  // dx is the gradient of x + o(attention)
    const ArenaScope attn(arena);
    const Tensor d_o = arena.alloc("d_o", model.dtype, {rows, c.q_width()});
    weight_gradient(g.o, {}, dx, b.o);
    device.linear_bwd_input({.dx = d_o, .dy = dx, .w = w.o, .accumulate = false});
    adapt({Projection::o}, b.o, dx, d_o);
    const Tensor dq = q_columns(c, d_qkv), dk = k_columns(c, d_qkv), dv = v_columns(c, d_qkv);
    attention.attend_backward(layer, b, d_o.heads(c.heads), dq, dk, dv);
    const Tensor d_qk = qk_columns(c, d_qkv);
    if (c.qk_norm) {
      const Tensor parts =
          g.q_norm ? arena.alloc("parts", g.q_norm.dtype, {norm_parts(d_qk.shape[0] * d_qk.shape[1]), 2, c.head_dim})
                   : Tensor{};
      device.qk_norm_rope_bwd({.dx = d_qk,
                               .dq_norm = g.q_norm,
                               .dk_norm = g.k_norm,
                               .parts = parts,
                               .dy = d_qk,
                               .x = qk_columns(c, b.qkv),
                               .q_norm = w.q_norm,
                               .k_norm = w.k_norm,
                               .rstd = b.rstd_qk,
                               .table = model.rope,
                               .pos = pos,
                               .q_heads = c.heads});
    } else {
      device.rope_bwd({.dx = d_qk, .table = model.rope, .pos = pos});
    }
    weight_gradient(g.qkv, g.qkv_bias, d_qkv, b.h1);
    device.linear_bwd_input({.dx = d_h, .dy = d_qkv, .w = w.qkv, .accumulate = false});
    adapt({Projection::q, Projection::k, Projection::v}, b.h1, d_qkv, d_h);
    norm_backward(
        device,
        {.dx = dx, .dw = g.input_norm, .dy = d_h, .x = x, .w = w.input_norm, .rstd = b.rstd1, .accumulate = true},
        arena);
  }
}

int64_t forward_sums(const Model& model, int64_t rows) {
  if (model.dtype != DType::bf16) return 0;
  const auto sums = [&](int64_t columns, int64_t depth) {
    return linear_sums(std::min(rows, kApartRows), columns, depth);
  };
  const Layer& l = model.layers[0];
  int64_t most = 0;
  for (const Weight* w : {&l.qkv, &l.o, &l.gate_up, &l.down}) {
    most = std::max(most, sums(w->outputs(), w->inputs()));
    if (model.adapters) most = std::max(most, sums(model.adapters->spec.rank, w->inputs()));
  }
  return most;
}

void forward_rows(const Model& model, Arena& scratch, const Tensor& ids, const Tensor& pos, AttentionContext& attention,
                  const LinearParts& parts, const Tensor& hidden) {
  Device& device = model.device;
  const int64_t rows = ids.shape[0];
  const ArenaScope scope(scratch);
  const Tensor x = scratch.alloc("x", model.dtype, {rows, model.config.hidden});
  BlockBuffers b(model, scratch, rows);
  b.parts = parts;
  b.backward = false;
  const auto last = static_cast<int>(model.config.layers) - 1;
  const auto norm = [&](const Tensor& y, const Tensor& w) {
    return RowNorm{.y = y, .rstd = b.rstd1, .w = w, .eps = model.config.rms_eps};
  };
  device.embedding_fwd({.y = x, .table = model.embedding, .ids = ids, .norm = norm(b.h1, model.layers[0].input_norm)});
  for (int l = 0; l <= last; l++) {
    const Range range(device, "layer", l);
    block_forward(model, l, b, x, pos, attention, x,
                  l < last ? norm(b.h1, model.layers[l + 1].input_norm) : norm(hidden, model.final_norm));
  }
}

Logits head_forward(const Model& model, Arena& arena, const Tensor& hidden, std::optional<VocabSums> sums) {
  const int64_t rows = hidden.shape[0], V = model.config.vocab;
  const Tensor y = arena.alloc("logits", model.dtype, {rows, V});
  if (!sums || model.dtype != DType::bf16)
    sums = VocabSums{};
  else
    sums->tiles = arena.alloc("sums of logits", model.stat, {rows, vocab_tiles(V) + 1, 3});
  model.device.linear_fwd({.y = y, .x = hidden, .w = model.head, .bias = {}, .residual = {}, .vocab_sums = *sums});
  return {y, sums->tiles};
}

}  // namespace pare
