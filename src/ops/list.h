// THE op list: every operation of the project, once.  An op is a struct of named arguments with their shapes, check()
// (contract.h) and cost() (cost.h), in the header of its family; ref, cpu and cuda have a file of the same name.  A
// table implements every op for one kind of device; `model`, `rollout` and `rl` know only these headers.
//
// Letters: N rows (tokens), C model width, I and O inputs and outputs of a linear layer, F feed-forward width, H query
// heads, K key/value heads, D head dim, V vocabulary, S segments or sequences, R loss rows, P parent rows.
//
// Types have roles, and no other combination exists.  `act` (activations, weights): f32 in `cpu`, f64 or f32 in `ref`,
// bf16 or f32 in `cuda`.  `stat` (statistics, log-probs, gradients of parameters, optimizer state but for moments in
// bf16): f32, but f64 where act is f64.  Index tensors are i32.  All tensors of an op are on the table's device.
//
// "out" is overwritten and need not be initialised; "acc" is added to, in the order the op states; "in" is only read.
// Tensors may have strided rows where an op says so; otherwise they are contiguous.  Outputs never overlap inputs
// unless the op says "in place".
//
// Orders of sums: the definition that makes decode, prefill and learner agree bit by bit, for any batch, layout of
// pages, micro-batch, slot and number of ranks, and whatever kernel computes them.  `ref` sums in double.  A chain adds
// to one sum, term by term.
//
// In both types:
//   row sums    16 lanes, lane i takes elements i, i+16, ... ascending as one chain from +0 (fused multiply-adds for
//               sums of products); then the tree ((l0+l8)+(l4+l12)) ... : lanes i and i+8, then i+4, i+2, i+1
//   vocabulary  by tiles of 128 ids from id 0, the last may be shorter; exponentials are relative to the tile's maximum
//               m_t: s is the row sum of exp(z - m_t), w that of (z - m_t) exp(z - m_t); with m the largest m_t, tiles
//               ascending from +0: sum = fma(s, exp(m_t - m), sum), weighted = fma(fma(m_t - m, s, w),
//               exp(m_t - m), weighted); a tile of -infinity adds nothing.  Other sums over ids (KL, overlaps) are row
//               sums of tiles, added ascending from +0.  So the product that makes logits can sum its own tiles
//   updates     an update is dealt to shards (learner.shards), each a chain of gradients over its rows, groups
//   ascending,
//               from +0; shards are added ascending in blocks of eight, each from +0, and the blocks ascending, the
//               first as it is: so no number of ranks changes a bit.  One shard is taken as it is
//
// In f32, which `cpu` and the other f32 tables of one architecture family share:
//   linear      one chain of fused multiply-adds per output element, k ascending from +0; then + bias; then + residual
//   attention   keys in blocks of 64 slots aligned to slot 0 of the sequence (parent first; of a list its slots, as if
//               they were all that there is), blocks ascending, online softmax; inside a block: q.k is a chain over d,
//               a weight is 2^fma(q.k, scale log2(e), -max), max that of q.k * scale log2(e), the sum of weights is the
//               row-sum tree over 64 lanes (absent slots are exactly +0), the weighted V is one chain over slots
//               ascending; a new block scales what is there by alpha = 2^(old max - new max): sum = fma(sum, alpha,
//               tree), o = o * alpha; backward, a weight is 2^fma(q.k, scale log2(e), -lse), do.o a row sum
//   parameter gradients   one chain over rows ascending, starting from the value stored in the accumulator
//
// In bf16 sums are f32.  A product is a chain of steps: a tensor core adds 16 products to what it holds at once.
//   linear      k in parts of one length (linear_part: by the shape of the weight, at most 4096), a chain each from +0;
//               parts ascending from +0; then + bias; then + residual.  So decoding can compute the parts of a narrow
//               layer side by side, and no chain, which truncates, grows long
//   dw          rows of the call in parts of 4096, a chain each, added to dw ascending.  So rows may come in calls of
//               4096, and one chain fits wide tiles
//   attention   the score of a slot is q.k * scale log2(e), q.k a product over d; its weight is 2^fma(q.k,
//               scale log2(e), -m) by a polynomial of degree 3, +0 where hidden, and rounded to bf16 for the product
//               with V, a step a page; lane i of four adds the weights of slots with slot % 8 / 2 == i, ascending; a
//               row ends with (l0+l1)+(l2+l3) and one reciprocal.
//               Dense rows: cuts at multiples of 1024 slots of the sequence (parent first), in a cut blocks of 128
//               slots ascending; m is the running maximum of the cut; the lanes of a block begin at +0; a new block
//               scales lanes and o by alpha = 2^(old m - new m) before it is added.  A cut ends with its sum s; cuts
//               ascending, the first as it is: M' = max(M, m), S = S 2^(M - M') + s 2^(m - M'), O alike.  So any
//               number of thread blocks can share a long row, and tiles of 128 suit training.
//               Rows with a list of blocks: pages that hold a listed slot, ascending; m becomes the largest score of a
//               page if that is more than m + 64 (from -infinity on), which scales lanes and o, and else stays; a lane
//               goes on from what it holds.  So the bits do not depend on the tiles that a kernel takes.
//               Backward, p is that polynomial of fma(q.k, scale log2(e), -lse); ds = p (do.v - do.o) is rounded to
//               bf16, and scale multiplies the sums.  dq is a product over slots.  dk and dv of a key are the sums of
//               parts, ascending from the first: segments in list order, heads of the group, runs of 1024 own rows from
//               the segment's first; a product each from +0.  So parts of a shared prompt can be computed side by side
//   RMSNorm dw  1024 strands, row r in strand r % 1024: a chain each; eight neighbours are added ascending, those 128
//               sums ascending from +0, then to dw.  So a pass over the rows can hold a strand in a warp
//   masses, compressions, merging   ops/paged.h, compression.h, merge.h; products of queries and keys as here
//
// Cost: flops counts multiply and add as two.  Matrix products and attention follow the closed forms 2*N*I*O and
// 4*H*D*pairs (10*H*D*pairs backward), where `pairs` is the number of visible (query, key) pairs of one head, which the
// caller knows; other ops state their multiply-adds per element.  Bytes are what must move when every tensor is read or
// written once.
#pragma once
#include <memory>
#include <string>

#include "base/memory.h"
#include "base/tensor.h"
#include "comm/comm.h"

namespace pare {

constexpr int kAttnBlock = 64;  // slots of a block of attention in f32
constexpr int kShardBlock = 8;  // shards of an update that are added before they meet the others

// The number of the arithmetic of all tables but `ref`.  Raise it when an order of sums above, or a function such as an
// exponential, changes a bit of a run.  Checkpoints and certificates state it, and no run is resumed in another one.
// 1: checkpoints without a number.  2: the vocabulary by tiles, and the orders of bf16 above.  3: a shorter
// exponential of numbers below 0.
constexpr int kArithmetic = 3;

#define PARE_OPS(X)                     \
  X(upload, Upload)                     \
  X(download, Download)                 \
  X(zero, Zero)                         \
  X(accumulate, Accumulate)             \
  X(scatter_add_rows, ScatterAddRows)   \
  X(all_to_all, AllToAll)               \
  X(all_gather, AllGather)              \
  X(pack_weight, PackWeight)            \
  X(unpack_weight, UnpackWeight)        \
  X(embedding_fwd, EmbeddingFwd)        \
  X(embedding_bwd, EmbeddingBwd)        \
  X(rmsnorm_fwd, RmsnormFwd)            \
  X(rmsnorm_bwd, RmsnormBwd)            \
  X(linear_fwd, LinearFwd)              \
  X(linear_bwd_input, LinearBwdInput)   \
  X(linear_bwd_weight, LinearBwdWeight) \
  X(rope_fwd, RopeFwd)                  \
  X(rope_bwd, RopeBwd)                  \
  X(qk_norm_rope_fwd, QkNormRopeFwd)    \
  X(qk_norm_rope_bwd, QkNormRopeBwd)    \
  X(swiglu_fwd, SwigluFwd)              \
  X(swiglu_bwd, SwigluBwd)              \
  X(attn_fwd, AttnFwd)                  \
  X(attn_bwd, AttnBwd)                  \
  X(kv_write, KvWrite)                  \
  X(attn_paged, AttnPaged)              \
  X(kv_block_summary, KvBlockSummary)   \
  X(kv_block_select, KvBlockSelect)     \
  X(attn_block_select, AttnBlockSelect) \
  X(kv_copy_pages, KvCopyPages)         \
  X(copy_rows, CopyRows)                \
  X(hash_runs, HashRuns)                \
  X(kv_window_scores, KvWindowScores)   \
  X(kv_redundancy, KvRedundancy)        \
  X(kv_mass_scores, KvMassScores)       \
  X(kv_select, KvSelect)                \
  X(kv_compact, KvCompact)              \
  X(kv_merge, KvMerge)                  \
  X(logprob, Logprob)                   \
  X(overlap_probs, OverlapProbs)        \
  X(logits_loss, LogitsLoss)            \
  X(truncate, Truncate)                 \
  X(list_kept, ListKept)                \
  X(keep_listed, KeepListed)            \
  X(sample, Sample)                     \
  X(square_sums, SquareSums)            \
  X(adamw, AdamW)

// Each is defined in the header of its family; code that calls an op includes that header.
#define X(op, Args) struct Args;
PARE_OPS(X)
#undef X

struct Stream;

// Where kernels can be gathered and launched together, which costs the host one call in place of one for each.
class Graphs {
 public:
  virtual ~Graphs() = default;
  virtual void begin() = 0;  // of a piece of work: ops called with Stream::graphs are gathered
  // Its end: launches what was gathered.  False: some of it was launched before, one by one, as an op came in between
  // that must be in order with it and is no kernel.
  virtual bool launch(Stream) = 0;
  virtual void drop() = 0;  // in place of launch(): what was gathered and not launched is not wanted
};

struct Stream {
  void* handle = nullptr;  // cudaStream_t; unused on the CPU
  Graphs* graphs = nullptr;
};

struct Probe;  // ops/probe.h

struct Table {
  const char* name;
#define X(op, Args) void (*op)(const Args&, Stream);
  PARE_OPS(X)
#undef X
  DType act = DType::u8;                // the only one that it computes in; u8: several
  const Memory* memory = &host_memory;  // of its tensors
  // Where calls return before the work is done, which is in order: page-locked memory of the host, from which an upload
  // is queued too (from other memory it may wait).  A download waits for all that was called.
  const Memory* staging = nullptr;
  std::unique_ptr<Graphs> (*graphs)() = nullptr;  // makes those of a Device; null: there are none
  // Opens the device of this rank and, where there are several, its way to the others, Comm::link: all ranks call it.
  // Error(Exit::usage): it cannot be used.
  void (*open)(Comm& comm, DeviceComm by) = nullptr;
  std::string (*describe)() = nullptr;  // what was opened
  // Throws Error(Exit::usage): the opened device cannot compute attention with such heads.
  void (*expect_head_dim)(DType act, int64_t head_dim) = nullptr;
  void (*range_begin)(const char* name) = nullptr;  // for a profiler: the name of all that is called up to range_end
  void (*range_end)() = nullptr;
  const Probe* probe = nullptr;  // what a benchmark asks of the device beside its ops
};

extern const Table table_ref;   // src/ref: naive loops, double accumulators; f64 and f32
extern const Table table_cpu;   // src/cpu: fast f32
extern const Table table_null;  // does nothing: planning, memory and FLOPs
extern const Table table_cuda;  // cuda/*.cu by nvcc: bf16 and f32
extern const Table table_emu;   // the same sources by the host compiler, on the CPU
// The same with linear layers by cuBLASLt, in an order of sums of its own that depends on the number of rows: whatever
// reads a weight takes it row by row, [16 ceil(O / 16)][I], zeros past the last output, in the memory of its panels.
extern const Table table_cuda_fast, table_emu_fast;

}  // namespace pare
