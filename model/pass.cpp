#include "model/pass.h"

namespace pare {

Pass::Pass(const Model& model, Arena& arena, const PackedBatch& batch, Keep keep, Pass* prefix)
    : model_(model), arena_(arena), keep_(keep), prefix_(prefix), rows_(batch.rows()), pairs_(batch.pairs) {
  expect(batch.carried == (prefix != nullptr), "a carried prefix and its batch come together");
  Device& device = model.device;
  const ModelConfig& c = model.config;
  ids_ = arena.alloc("ids", DType::i32, {rows_});
  pos_ = arena.alloc("pos", DType::i32, {rows_});
  segments_ = arena.alloc("segments", DType::i32, {static_cast<int64_t>(batch.segments.size()), 4});
  row_index_ = arena.alloc("row_index", DType::i32, {1});
  device.upload({ids_, batch.ids.data()});
  device.upload({pos_, batch.pos.data()});
  device.upload({segments_, batch.segments.data()});

  hidden = arena.alloc("hidden", model.dtype, {rows_ + (prefix ? 1 : 0), c.hidden});
  rstd_ = arena.alloc("rstd", model.stat, {rows_});
  const bool every_block = keep == Keep::all || keep == Keep::prefix;
  for (int64_t l = 0; l < (keep == Keep::nothing ? 1 : c.layers + 1); l++)
    inputs_.push_back(arena.alloc("x", model.dtype, {rows_, c.hidden}));
  for (int64_t l = 0; l < (every_block ? c.layers : 1); l++) {
    blocks_.emplace_back(model, arena, rows_);
    lse_of_.push_back(arena.alloc("lse", model.stat, {rows_, c.heads}));
  }
  if (keep == Keep::nothing) return;
  d_hidden = arena.alloc("d_hidden", model.dtype, {hidden.shape[0], c.hidden});
  if (keep == Keep::prefix)
    for (int64_t l = 0; l < c.layers; l++) {
      d_qkv_.push_back(arena.alloc("d_qkv", model.dtype, {rows_, c.qkv_width()}));
      device.zero({d_qkv_.back()});
    }
}

void Pass::forward() {
  Device& device = model_.device;
  const auto layers = static_cast<int>(model_.config.layers);
  device.embedding_fwd({.y = input_of(0), .table = model_.views.embedding, .ids = ids_});
  for (int l = 0; l < layers; l++) block_forward(model_, l, buffers_of(l), input_of(l), pos_, *this, input_of(l + 1));
  device.rmsnorm_fwd({.y = hidden.rows(0, rows_),
                      .rstd = rstd_,
                      .x = input_of(layers),
                      .w = model_.views.final_norm,
                      .eps = model_.config.rms_eps});
  if (prefix_) copy_row(hidden, rows_, prefix_->hidden, prefix_->rows_ - 1);
  if (!d_hidden) return;
  device.zero({d_hidden});
  if (prefix_) copy_row(d_hidden, rows_, prefix_->d_hidden, prefix_->rows_ - 1);
}

void Pass::backward(const ParameterViews& gradients) {
  expect(keep_ != Keep::nothing, "backward of a pass that kept nothing");
  Device& device = model_.device;
  const ModelConfig& c = model_.config;
  const auto layers = static_cast<int>(c.layers);
  if (prefix_) copy_row(prefix_->d_hidden, prefix_->rows_ - 1, d_hidden, rows_);
  const ArenaScope scope(arena_);
  const Tensor dx = arena_.alloc("dx", model_.dtype, {rows_, c.hidden});
  Tensor d_qkv;
  if (d_qkv_.empty()) d_qkv = arena_.alloc("d_qkv", model_.dtype, {rows_, c.qkv_width()});
  device.rmsnorm_bwd({.dx = dx,
                      .dw = gradients.final_norm,
                      .dy = d_hidden.rows(0, rows_),
                      .x = input_of(layers),
                      .w = model_.views.final_norm,
                      .rstd = rstd_,
                      .accumulate = false});
  for (int l = layers - 1; l >= 0; l--) {
    if (keep_ == Keep::inputs) block_forward(model_, l, buffers_of(l), input_of(l), pos_, *this, {});
    if (d_qkv_.empty()) device.zero({d_qkv});
    block_backward(model_, l, buffers_of(l), input_of(l), pos_, *this, gradients.layers[l], dx,
                   d_qkv_.empty() ? d_qkv : d_qkv_[l], arena_);
  }
  device.embedding_bwd({.dtable = gradients.embedding, .dy = dx, .ids = ids_});
}

void Pass::attend(int layer, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o) {
  const BlockBuffers* parent = prefix_ ? &prefix_->buffers_of(layer) : nullptr;
  model_.device.attn_fwd({.o = o,
                          .lse = lse_of_[lse_of_.size() == 1 ? 0 : layer],
                          .q = q,
                          .k = k,
                          .v = v,
                          .pk = parent ? parent->k : k,
                          .pv = parent ? parent->v : v,
                          .segments = segments_,
                          .pairs = pairs_,
                          .scale = model_.attention_scale()});
}

void Pass::attend_backward(int layer, const BlockBuffers& b, const Tensor& d_o, const Tensor& dq, const Tensor& dk,
                           const Tensor& dv) {
  const ModelConfig& c = model_.config;
  const BlockBuffers* parent = prefix_ ? &prefix_->buffers_of(layer) : nullptr;
  model_.device.attn_bwd({.dq = dq,
                          .dk = dk,
                          .dv = dv,
                          .dpk = prefix_ ? k_columns(c, prefix_->d_qkv_[layer]) : dk,
                          .dpv = prefix_ ? v_columns(c, prefix_->d_qkv_[layer]) : dv,
                          .d_o = d_o,
                          .o = b.o.heads(c.heads),
                          .q = b.q,
                          .k = b.k,
                          .v = b.v,
                          .pk = parent ? parent->k : b.k,
                          .pv = parent ? parent->v : b.v,
                          .lse = lse_of_[lse_of_.size() == 1 ? 0 : layer],
                          .segments = segments_,
                          .pairs = pairs_,
                          .scale = model_.attention_scale()});
}

void Pass::copy_row(const Tensor& to, int64_t to_row, const Tensor& from, int64_t from_row) {
  const auto index = static_cast<int32_t>(from_row);
  model_.device.upload({row_index_, &index});
  model_.device.gather_rows({.y = to.rows(to_row, 1), .x = from, .index = row_index_});
}

}  // namespace pare
