// Kernels of the `cpu` table: raw pointers, ranges of outputs, one copy of the code per instruction set.  The
// glue (src/cpu/*.cpp) chooses ranges for the threads and owns all scratch memory.
//
// Everything is f32; strides are in elements.  A call writes the outputs in its range and nothing else.
#pragma once
#include <cstdint>

#include "ops/attention.h"
#include "ops/blocks.h"
#include "ops/compression.h"
#include "ops/linear.h"
#include "ops/list.h"
#include "ops/logits.h"

namespace pare {

struct Interval {  // [begin, end)
  int64_t begin, end;
};

// y = x w + bias + residual (bias and residual may be null); w is packed: panels of 16 columns.
struct GemmArgs {
  float* y;
  const float *x, *packed, *bias, *residual;
  int64_t y_stride, x_stride, residual_stride;
  int64_t depth, outputs;
};

// dw += dyT x, over all `rows`.
struct GemmTArgs {
  float* dw;
  const float *dy, *x;
  int64_t dy_stride, x_stride;
  int64_t rows, outputs, inputs;
};

struct NormArgs {
  float *y, *rstd;
  const float *x, *w;
  int64_t y_stride, x_stride;
  int64_t width;
  float eps;
};
struct NormBwdArgs {
  float *dx, *dw;
  const float *dy, *x, *w, *rstd;
  int64_t dx_stride, dy_stride, x_stride;
  int64_t rows, width;
  bool accumulate;
};

struct RopeArgs {
  float* x;
  const float* table;
  const int32_t* pos;
  int64_t x_stride, heads, head_dim;
  float sign;  // 1 forward, -1 backward
};

// Rows of `heads` heads, of which the first `q_heads` are of queries.
struct QkNormRopeArgs {
  float *y, *rstd;
  const float *x, *q_norm, *k_norm, *table;
  const int32_t* pos;
  int64_t y_stride, x_stride;
  int64_t heads, q_heads, head_dim;
  float eps;
};
struct QkNormRopeBwdArgs {
  float *dx, *dq_norm, *dk_norm;
  const float *dy, *x, *q_norm, *k_norm, *rstd, *table;
  const int32_t* pos;
  int64_t dx_stride, dy_stride, x_stride;
  int64_t rows, heads, q_heads, head_dim;
};

// A row of `width`, or `rows` rows of a weight whose p is packed; moments are f32 or (then m and v are null) bf16.
struct AdamWArgs {
  float *p, *m, *v;
  uint16_t *m_bf16, *v_bf16;
  const float* grad;
  float scale, lr, beta1, beta2, eps, weight_decay, c1, c2;
  uint64_t key;  // of the rounding to bf16
  int64_t first, rows, width;
};

// Heads of q, o, k and v are contiguous; `group` query heads read one key head.
struct AttnArgs {
  float *o, *lse;
  const float *q, *k, *v, *pk, *pv;
  const int32_t* lists;  // AttnFwd::lists; null: parents are runs of rows
  int64_t q_stride, k_stride, v_stride, pk_stride, pv_stride;
  int64_t heads, group, head_dim;
  float scale;
};
// Own rows of a segment, and a key head.
struct AttnPiece {
  const SegmentRow* segment;  // or null
  int64_t kv_head;
  Interval rows;
};
// A piece among those that a thread computes one after another.  The first slots of a piece are often those of the one
// before (the parent of siblings): they stay in scratch.  The rows of the next piece are fetched meanwhile.
struct AttnTurn {
  AttnPiece piece, next;
  int64_t packed;  // slots shared with the piece before
  int64_t room;    // slots that scratch is laid out for: as many as the longest piece has, a multiple of 16
  float* scratch;
};
// Query rows that attn_fwd and attn_paged compute at once, for each block of slots.
constexpr int64_t kAttnRows = 96;
// Rows, and slots of dk and dv, that attn_bwd computes at once.
constexpr int64_t kAttnBwdRows = 96, kAttnBwdSlots = 16;
struct AttnBwdArgs {
  AttnArgs fwd;  // o and lse as computed by the forward
  float *dq, *dk, *dv, *dpk, *dpv;
  const float* d_o;
  int64_t dq_stride, dk_stride, dv_stride, dpk_stride, dpv_stride, do_stride, o_stride;
};
struct PagedArgs {
  float *o, *lse;  // lse may be null
  const float *q, *k_pages, *v_pages;
  const int32_t* page_table;       // null: page i is the i-th
  int64_t head_step, page_step;    // from the keys of one head to those of the next; from page to page
  int64_t q_stride, table_stride;  // table_stride: entries from one row of page_table to the next
  int64_t heads, group, head_dim;
  float scale;
  float* mass_pages = nullptr;  // AttnPaged::mass_pages: [pages][kv heads][16], or null
  int64_t first_mass = 0;       // slots below it have none
};
// Lists of blocks: those of a row and key head at blocks[(row * kv_heads + kv_head) * room].
struct BlockListArgs {
  const int32_t *blocks, *budget;
  int64_t kv_heads, room, block;
};
// The summaries of the blocks of a sequence for one key head, and the queries of its group.
struct BlockScoreArgs {
  const float* q;        // [group][head_dim]
  const float* summary;  // of the head in page 0; without pages of block 0
  const int32_t* pages;  // pages[i]: of slots from 16 i on; null: the summaries of the blocks lie one behind the other
  int64_t page_step;     // from page to page; the rows of one page and head lie together
  int64_t group, head_dim, block;
  BlockSummary kind;
};

// Scores of slots of one compression and head (ops/compression.h): score, pages and workspace are those of the
// compression and head, k_pages starts at the head.
struct KvWindowArgs {
  float* score;
  const float *windows, *k_pages;  // windows: head 0 of the group in the first row of the compression's window
  const int32_t* pages;
  int64_t window_stride, page_stride, group, head_dim;
  int64_t window, window_first;
  GqaAgg aggregate;
  SoftmaxSpan span;
  Pool pool;
  int64_t kernel;
  float scale;
};
struct KvRedundancyArgs {
  float *score, *workspace;
  const float* k_pages;
  const int32_t* pages;
  int64_t page_stride, head_dim;
  int64_t row;  // workspace: 4 rows of so many floats
  float lambda, threshold;
};
struct KvNearestArgs {
  const float* k_pages;
  const int32_t *pages, *keep;
  int64_t page_stride, head_dim;
  int32_t* nearest;  // out, by slot, of those that are evicted: the place in `keep`
  float* cosine;     // and the cosine
};
struct LogitsLossArgs {
  float *logprob, *entropy, *loss, *kl;
  int32_t* clipped;
  float* logits;
  const int32_t* target;
  const float *weight, *kl_weight, *advantage, *old_logprob, *log_ratio, *ref_logprob, *ref_logits, *sampler_logits;
  LossSpec spec;
  int64_t vocabulary;
};

// The kernels of one instruction set, which are functions of these names in pare::avx2 and so on.
struct Kernels {
  const char* name;
  int64_t tile_rows;  // rows of a GEMM tile: pieces of work are multiples of it where possible
#define X(name, Result, args) Result(*name) args;
#include "cpu/kernels.inc"
#undef X
};

extern const Kernels kernels_avx2, kernels_avx512, kernels_neon, kernels_generic;

// Scratch, in floats: gemm scratch_rows * depth + 16 with scratch_rows <= kMaxScratchRows; gemm_t
// kGemmTDepth * kPanel * (panels + 1); attention as attn_scratch and attn_bwd_scratch say, for `slots` slots; of an
// compression or entry with `slots` slots, rounded up to whole pages: kv_window_scores window * group * (head_dim +
// slots) + slots
// + 2 * kernel + 64, kv_redundancy head_dim * slots + 1280, kv_nearest (head_dim + 17) * slots + 16 * head_dim.
// attn_paged: paged_scratch, and with mass mass_scratch more.  Those of logits: 3 for each tile of the vocabulary.
constexpr int64_t kMaxScratchRows = 128, kGemmTDepth = 256;
// gemm_transposed takes kTransposedRows rows and kTransposedDepth of the depth at a time: both operands of such a piece
// in its layouts, and accumulators.
constexpr int64_t kTransposedRows = 256, kTransposedDepth = 256;
constexpr int64_t gemm_transposed_scratch(int64_t rows, int64_t panels) {
  const int64_t n = rows < kTransposedRows ? rows : kTransposedRows;
  return kTransposedDepth * (n + 4 * kPanel) + n * panels * kPanel + 32;
}

#ifdef PARE_ISA  // the instruction set that isa/*.cpp is compiled for
namespace PARE_ISA {
#define X(name, Result, args) Result name args;
#include "cpu/kernels.inc"
#undef X
}  // namespace PARE_ISA
#endif

}  // namespace pare
