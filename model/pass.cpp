#include "model/pass.h"

#include <algorithm>
#include <iterator>

#include "ops/attention.h"
#include "ops/blocks.h"
#include "ops/data.h"
#include "ops/norm.h"

namespace pare {

Pass::Pass(const Model& model, Arena& arena, const PackedBatch& batch, Keep keep, const BlockReads* blocks,
           Pass* prefix, int64_t recompute)
    : model_(model),
      arena_(arena),
      keep_(keep),
      prefix_(prefix),
      rows_(batch.rows()),
      share_(keep == Keep::nothing ? model.config.layers - 1 : recompute) {
  expect(batch.carried == (prefix != nullptr), "a carried prefix and its batch come together");
  expect(recompute == 0 || (keep == Keep::all && recompute < model.config.layers), recompute, " of ",
         model.config.layers, " blocks to compute again");
  Device& device = model.device;
  const ModelConfig& c = model.config;
  ids_ = arena.alloc("ids", DType::i32, {rows_});
  pos_ = arena.alloc("pos", DType::i32, {rows_});
  row_index_ = arena.alloc("row_index", DType::i32, {1, 2});
  device.upload({ids_, batch.ids.data()});
  device.upload({pos_, batch.pos.data()});
  plan_segments(batch);

  hidden = arena.alloc("hidden", model.dtype, {rows_ + (prefix ? 1 : 0), c.hidden});
  rstd_ = arena.alloc("rstd", model.stat, {rows_});
  for (int64_t l = 0; l < (keep == Keep::nothing ? 1 : c.layers + 1); l++)
    inputs_.push_back(arena.alloc("x", model.dtype, {rows_, c.hidden}));
  for (int64_t l = share_; l < c.layers; l++) {
    blocks_.emplace_back(model, arena, rows_);
    lse_of_.push_back(arena.alloc("lse", model.stat, {rows_, c.heads}));
  }
  if (blocks) plan_blocks(batch, *blocks);
  if (keep == Keep::nothing) return;
  d_hidden = arena.alloc("d_hidden", model.dtype, {hidden.shape[0], c.hidden});
  if (keep == Keep::prefix)
    for (int64_t l = 0; l < c.layers; l++) {
      d_qkv_.push_back(arena.alloc("d_qkv", model.dtype, {rows_, c.qkv_width()}));
      device.zero({d_qkv_.back()});
    }
}

void Pass::plan_segments(const PackedBatch& batch) {
  const auto upload = [&](const char* name, const void* data, int64_t rows, int64_t columns) {
    const Tensor t = arena_.alloc(name, DType::i32, {rows, columns});
    model_.device.upload({t, data});
    return t;
  };
  const auto segments = [&](const std::vector<SegmentRow>& s) {
    return upload("segments", s.data(), static_cast<int64_t>(s.size()), 4);
  };
  extent_ = attn_extent(batch.segments, batch.carried, batch.pairs);
  const LayerAttention whole{segments(batch.segments), {}, batch.pairs};
  const bool replays =
      std::any_of(batch.traces.begin(), batch.traces.end(), [](const auto& t) { return t != nullptr; });
  if (!replays) {
    attention_ = {whole};
    return;
  }
  const int64_t kv_heads = model_.config.kv_heads;
  for (int l = 0; l < model_.config.layers; l++) {
    const ReplayAttention r = replay_attention(batch, l);
    attention_.push_back(whole);
    if (r.lists.empty()) continue;
    const auto entries = static_cast<int64_t>(r.lists.size()) / kv_heads;
    attention_.back() = {segments(r.segments), upload("kept slots", r.lists.data(), entries, kv_heads), r.pairs};
  }
}

// Budgets are those of decode steps; a prompt reads everything.
void Pass::plan_blocks(const PackedBatch& batch, const BlockReads& reads) {
  ChosenBlocks b{.reads = reads, .budget = {}, .lists = {}};
  std::vector<int32_t> budgets(rows_, INT32_MAX);
  int64_t room = 0;
  for (const SegmentRow& s : batch.segments) {
    for (int32_t i = 0; i < s.len; i++) {
      const int64_t seen = s.parent_len + i + 1, n = blocks_of(seen, reads.block);
      int32_t& budget = budgets[s.row + i];
      if (!batch.of_prefix[s.row + i]) budget = static_cast<int32_t>(reads.budget(n));
      b.pairs += listed_slots(seen, budget, reads.block);
      if (budget >= n) continue;
      room = std::max<int64_t>(room, budget);
      b.scored += n - reads.first_blocks - reads.last_blocks;
    }
    b.slots += s.parent_len + s.len;
    b.longest = std::max<int64_t>(b.longest, s.parent_len + s.len);
  }
  if (room == 0) return;
  b.budget = arena_.alloc("block budget", DType::i32, {rows_});
  for (size_t l = 0; l < lse_of_.size(); l++)
    b.lists.push_back(arena_.alloc("block lists", DType::i32, {rows_, model_.config.kv_heads, room}));
  model_.device.upload({b.budget, budgets.data()});
  chosen_ = std::move(b);
}

BlockSharing Pass::block_sharing(const PackedBatch& batch) const {
  BlockSharing sum;
  if (!chooses(static_cast<int>(model_.config.layers) - 1)) return sum;
  const BlockReads& reads = chosen_->reads;
  const Tensor& lists = chosen_->lists.back();
  const int64_t heads = lists.shape[1], room = lists.shape[2];
  std::vector<int32_t> host(static_cast<size_t>(lists.size()));
  model_.device.download({host.data(), lists});
  std::vector<int32_t> common, run;
  for (const SegmentRow& s : batch.segments)
    for (int64_t h = 0; h < heads; h++) {
      std::span<const int32_t> before;
      int rows = 0;  // of the run
      for (int32_t i = 0; i < s.len; i++) {
        const int64_t row = s.row + i, n = blocks_of(s.parent_len + i + 1, reads.block), budget = reads.budget(n);
        if (batch.of_prefix[row] || budget >= n) {
          before = {};
          rows = 0;
          continue;
        }
        const std::span<const int32_t> list(host.data() + (row * heads + h) * room, static_cast<size_t>(budget));
        if (!before.empty()) {
          common.clear();
          std::set_intersection(before.begin(), before.end(), list.begin(), list.end(), std::back_inserter(common));
          sum.read += budget;
          sum.again += std::ssize(common);
        }
        before = list;
        if (rows == 0) run.clear();
        run.insert(run.end(), list.begin(), list.end());
        if (++rows < BlockSharing::kRun) continue;
        sum.run_read += std::ssize(run);
        std::sort(run.begin(), run.end());
        sum.together += std::unique(run.begin(), run.end()) - run.begin();
        rows = 0;
      }
    }
  return sum;
}

void Pass::forward() {
  Device& device = model_.device;
  const auto layers = static_cast<int>(model_.config.layers);
  device.embedding_fwd({.y = input_of(0), .table = model_.embedding, .ids = ids_});
  for (int l = 0; l < layers; l++) {
    const Range range(device, "layer", l);
    block_forward(model_, l, buffers_of(l), input_of(l), pos_, *this, input_of(l + 1));
  }
  device.rmsnorm_fwd({.y = hidden.rows(0, rows_),
                      .rstd = rstd_,
                      .x = input_of(layers),
                      .w = model_.final_norm,
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
  norm_backward(device,
                {.dx = dx,
                 .dw = gradients.final_norm,
                 .dy = d_hidden.rows(0, rows_),
                 .x = input_of(layers),
                 .w = model_.final_norm,
                 .rstd = rstd_,
                 .accumulate = false},
                arena_);
  for (int l = layers - 1; l >= 0; l--) {
    const Range range(device, "layer", l);
    if (l < share_) block_forward(model_, l, buffers_of(l), input_of(l), pos_, *this, {});
    if (d_qkv_.empty()) device.zero({d_qkv});
    block_backward(model_, l, buffers_of(l), input_of(l), pos_, *this, gradients.layers[l], dx,
                   d_qkv_.empty() ? d_qkv : d_qkv_[l], arena_);
  }
  if (gradients.embedding) device.embedding_bwd({.dtable = gradients.embedding, .dy = dx, .ids = ids_});
}

void Pass::attend(int layer, const LinearFwd& qkv, const Rotation& rotation, const Tensor& q, const Tensor& k,
                  const Tensor& v, const Tensor& o) {
  if (qkv.y) model_.device.linear_fwd(qkv);
  rotate(model_.device, rotation);
  const BlockBuffers* parent = prefix_ ? &prefix_->buffers_of(layer) : nullptr;
  const size_t kept = place_of(layer);
  const LayerAttention& a = attention_of(layer);
  AttnFwd args{.o = o,
               .lse = lse_of_[kept],
               .q = q,
               .k = k,
               .v = v,
               .pk = parent ? parent->k : k,
               .pv = parent ? parent->v : v,
               .segments = a.segments,
               .pairs = a.pairs,
               .scale = model_.attention_scale(),
               .lists = a.lists,
               .extent = extent_};
  if (!chooses(layer)) return model_.device.attn_fwd(args);
  const BlockReads& reads = chosen_->reads;
  const Tensor& lists = chosen_->lists[kept];
  {
    const ArenaScope scope(arena_);
    const int64_t rows = (chosen_->longest / reads.block + 1) * summary_rows(reads.kind);
    model_.device.attn_block_select(
        {.blocks = lists,
         .summary = arena_.alloc("block summary", model_.dtype, {a.segments.shape[0], k.shape[1], rows, k.shape[2]}),
         .q = q,
         .k = k,
         .pk = args.pk,
         .segments = a.segments,
         .budget = chosen_->budget,
         .scored = chosen_->scored,
         .slots = chosen_->slots,
         .block = reads.block,
         .first_blocks = reads.first_blocks,
         .last_blocks = reads.last_blocks,
         .kind = reads.kind});
  }
  args.pairs = chosen_->pairs;
  args.blocks = lists;
  args.budget = chosen_->budget;
  args.block = reads.block;
  model_.device.attn_fwd(args);
}

void Pass::attend_backward(int layer, const BlockBuffers& b, const Tensor& d_o, const Tensor& dq, const Tensor& dk,
                           const Tensor& dv) {
  const ModelConfig& c = model_.config;
  const BlockBuffers* parent = prefix_ ? &prefix_->buffers_of(layer) : nullptr;
  const size_t kept = place_of(layer);
  const LayerAttention& a = attention_of(layer);
  AttnBwd args{.dq = dq,
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
               .lse = lse_of_[kept],
               .segments = a.segments,
               .pairs = a.pairs,
               .scale = model_.attention_scale(),
               .lists = a.lists,
               .extent = extent_};
  if (chooses(layer)) {
    args.pairs = chosen_->pairs;
    args.blocks = chosen_->lists[kept];
    args.budget = chosen_->budget;
    args.block = chosen_->reads.block;
  }
  const ArenaScope scope(arena_);
  if (model_.dtype == DType::bf16)
    args.work = arena_.alloc(
        "sums of dk and dv", model_.stat,
        {attn_bwd_work(rows_, prefix_ ? args.pk.shape[0] : 0, c.kv_heads, c.head_dim, args.segments.shape[0])});
  model_.device.attn_bwd(args);
}

void Pass::copy_row(const Tensor& to, int64_t to_row, const Tensor& from, int64_t from_row) {
  const int32_t index[2] = {static_cast<int32_t>(from_row), static_cast<int32_t>(to_row)};
  model_.device.upload({row_index_, index});
  model_.device.copy_rows({.y = to, .x = from, .index = row_index_});
}

}  // namespace pare
