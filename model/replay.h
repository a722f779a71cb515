// Sparse attention of a rollout, repeated by the learner (`learner.attention = replay`): kept sets as recorded, block
// lists by the same selection.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "ops/device.h"
#include "ops/options.h"
#include "ops/rows.h"

namespace pare {

// Ids that the truncated draw of each token of a response kept, ascending.
struct KeptIds {
  std::vector<int32_t> ids = {};   // of all tokens, one after another
  std::vector<int64_t> ends = {};  // of each token: of its own
  std::span<const int32_t> of(int64_t token) const {
    const int64_t begin = token == 0 ? 0 : ends[static_cast<size_t>(token - 1)];
    return std::span(ids).subspan(static_cast<size_t>(begin),
                                  static_cast<size_t>(ends[static_cast<size_t>(token)] - begin));
  }
};

struct PackedBatch;

// A compression of one layer of a sequence: which of its slots stayed.
struct KvTrace {
  int32_t layer, tokens;   // tokens of the sequence when it happened
  int32_t slots, first;    // slots before it; of them, the first that stayed anyway
  std::vector<bool> keep;  // [K, slots - first]: which of the others stayed

  int64_t kv_heads() const { return static_cast<int64_t>(keep.size()) / (slots - first); }
  // The slots (of before) that stayed, the first ones included, ascending.
  std::vector<int32_t> kept(int64_t kv_head) const;
};
using KvTraces = std::vector<KvTrace>;  // of a sequence; those of a layer in the order of their tokens

// Attention of one layer of a packed batch (AttnFwd).  The rows of a sequence between two compressions are an epoch,
// and a segment: its parent is what the cache held when it began, in the order of its slots.
struct ReplayAttention {
  std::vector<SegmentRow> segments;  // epochs ascending in place of a segment of the batch
  std::vector<int32_t> lists;        // [G, K]; empty: nothing was evicted, the segments are those of the batch
  int64_t pairs = 0;
};
ReplayAttention replay_attention(const PackedBatch& batch, int layer);

// Block-sparse reads: every row of a response reads the blocks that its decode step read (AttnBlockSelect).
struct BlockReads {
  BlockSummary kind;
  int32_t block, first_blocks, last_blocks;
  int64_t dense_layers;                    // the first layers read everything
  std::function<int64_t(int64_t)> budget;  // blocks that a row reads of n
};

// Blocks that rows of a segment read in common, in the last layer: sums over rows that choose, and over key heads.
struct BlockSharing {
  int64_t read = 0, again = 0;         // of rows whose row before chooses too: blocks, and those that both read
  int64_t run_read = 0, together = 0;  // of runs of kRun rows: blocks, and different ones
  static constexpr int kRun = 10;
  BlockSharing& operator+=(const BlockSharing& o) {
    read += o.read;
    again += o.again;
    run_read += o.run_read;
    together += o.together;
    return *this;
  }
};

}  // namespace pare
