// One packed batch through the model: the forward pass, and the backward pass from the gradient of its hidden states.
#pragma once
#include <algorithm>
#include <optional>

#include "model/block.h"
#include "model/packed.h"

namespace pare {

class Pass : AttentionContext, AttentionBackward {
 public:
  // Activations that the forward pass keeps for the backward.
  //   all      everything, but of the first `recompute` blocks their inputs only: the backward computes these blocks
  //            again (bitwise the same)
  //   nothing  there will be no backward
  //   prefix   everything, and room for what batches of members add to the gradients of this prefix
  enum class Keep { all, nothing, prefix };

  // `prefix`: the pass of the carried prefix when batch.carried.  `blocks`: what rows behind a prefix read; null:
  // everything that the traces of the batch leave them.  All memory comes from `arena`, which the caller rewinds.
  // recompute: 0 to layers - 1.
  Pass(const Model& model, Arena& arena, const PackedBatch& batch, Keep keep, const BlockReads* blocks = nullptr,
       Pass* prefix = nullptr, int64_t recompute = 0);

  void forward();
  // After forward(); zeros if no row of the last layer chooses its blocks.  `batch` is that of the pass.
  BlockSharing block_sharing(const PackedBatch& batch) const;
  // Reads d_hidden; adds to the gradients that are present, and to those of the prefix.  d_hidden is consumed.
  void backward(const ParameterViews& gradients);

  // Final hidden states (after the last norm) [N, C], and one row more when a prefix is carried: its last.
  Tensor hidden, d_hidden;  // d_hidden: zero, or (last row) what members before have added; absent with Keep::nothing

 private:
  void attend(int layer, const LinearFwd& qkv, const Rotation& rotation, const Tensor& q, const Tensor& k,
              const Tensor& v, const Tensor& o) override;
  void attend_backward(int layer, const BlockBuffers& b, const Tensor& d_o, const Tensor& dq, const Tensor& dk,
                       const Tensor& dv) override;
  Tensor input_of(int layer) const { return inputs_[keep_ == Keep::nothing ? 0 : layer]; }
  // The place of the layer's buffers.  The first share_ + 1 layers share a set, which the last of them fills.
  size_t place_of(int layer) const { return static_cast<size_t>(std::max<int64_t>(0, layer - share_)); }
  const BlockBuffers& buffers_of(int layer) const { return blocks_[place_of(layer)]; }
  // Rows of the pass that choose their blocks, and what the ops want to know of them.
  struct ChosenBlocks {
    BlockReads reads;
    Tensor budget;              // i32 [N]
    std::vector<Tensor> lists;  // i32 [N, K, room], by place_of(layer)
    int64_t pairs = 0, scored = 0, slots = 0, longest = 0;
  };
  void plan_segments(const PackedBatch& batch);
  void plan_blocks(const PackedBatch& batch, const BlockReads& reads);
  bool chooses(int layer) const { return chosen_ && layer >= chosen_->reads.dense_layers; }
  void copy_row(const Tensor& to, int64_t to_row, const Tensor& from, int64_t from_row);

  const Model& model_;
  Arena& arena_;
  const Keep keep_;
  Pass* const prefix_;
  const int64_t rows_, share_;
  Tensor ids_, pos_, rstd_, row_index_;
  struct LayerAttention {
    Tensor segments, lists;
    int64_t pairs;
  };
  const LayerAttention& attention_of(int layer) const { return attention_[attention_.size() == 1 ? 0 : layer]; }
  AttnExtent extent_;                      // without replay, for estimates
  std::vector<LayerAttention> attention_;  // one for all layers unless a cache's compressions are replayed
  std::optional<ChosenBlocks> chosen_;     // if any row chooses
  std::vector<Tensor> inputs_;             // [N, C] of each block and of the last norm
  std::vector<BlockBuffers> blocks_;       // by place_of(layer)
  std::vector<Tensor> lse_of_;             // [N, H] likewise
  std::vector<Tensor> d_qkv_;              // [N, (H+2K) D] per layer with Keep::prefix
};

}  // namespace pare
