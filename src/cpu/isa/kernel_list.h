// The kernels of one instruction set; kernels.h says what each does.
#pragma once
#include "cpu/kernels.h"

namespace pare::PARE_ISA {

void exp_all(float* y, const float* x, int64_t n);
void log_all(float* y, const float* x, int64_t n);
void add_all(float* y, const float* x, int64_t n);
void add_rows(float* y, int64_t y_stride, const float* x, int64_t x_stride, const int32_t* index, int64_t rows,
              Range columns);
void sum_rows(float* y, const float* x, int64_t x_stride, int64_t rows, Range columns);
void rmsnorm_fwd(const NormArgs& a, Range rows);
void rmsnorm_bwd_input(const NormBwdArgs& a, Range rows);
void rmsnorm_bwd_weight(const NormBwdArgs& a, Range columns);
void rope(const RopeArgs& a, Range rows);
void qk_norm_rope_fwd(const QkNormRopeArgs& a, Range heads);
void qk_norm_rope_bwd(const QkNormRopeBwdArgs& a, Range heads, bool weights, float* room);
void qk_norm_rope_bwd_weight(const QkNormRopeBwdArgs& a, Range pairs);
void swiglu_fwd(float* y, const float* gate_up, int64_t width, Range rows);
void swiglu_bwd(float* dgate_up, const float* dy, const float* gate_up, int64_t width, Range rows);
float sum_squares(const float* x, int64_t n);
void adamw(const AdamWArgs& a, Range elements);
void adamw_weight(const AdamWArgs& a, Range panels);

void pack(float* packed, const float* w, int64_t outputs, int64_t inputs, Range rows);
void unpack(float* w, const float* packed, int64_t inputs, Range rows);
void gemm(const GemmArgs& g, Range rows, Range panels, float* scratch, int64_t scratch_rows);
void gemm_transposed(const GemmArgs& g, Range rows, Range panels, float* scratch);
void gemm_t(const GemmTArgs& g, Range outputs, Range panels, float* scratch);

void attn_fwd(const AttnArgs& a, const AttnTurn& turn);
void attn_bwd(const AttnBwdArgs& a, const AttnTurn& turn);
void attn_paged(const PagedArgs& a, const PagedRow& row, int64_t kv_head, float* scratch);

void attn_blocks_bwd(const AttnBwdArgs& a, const BlockListArgs& lists, const SegmentRow& s, int64_t kv_head,
                     float* scratch);
void block_summary(float* summary, const float* k_page, int64_t width, int64_t slots, int64_t block, BlockSummary kind);
void span_summary(float* summary, const float* k_pages, const int32_t* pages, int64_t page_step, int64_t width,
                  BlockSummary kind);
void segment_summary(float* summary, const AttnArgs& a, const SegmentRow& s, int64_t kv_head, Range blocks,
                     int64_t block, BlockSummary kind);
void block_scores(float* score, const BlockScoreArgs& a, const int32_t* blocks, int64_t n, float* scratch);
void kv_window_scores(const KvWindowArgs& a, const KvEvent& e, float* scratch);
void kv_redundancy(const KvRedundancyArgs& a, const KvEvent& e, float* scratch);
void kv_nearest(const KvNearestArgs& a, const KvEvent& e, float* scratch);

void logprob(float* logprob, float* entropy, const float* logits, const int32_t* target, int64_t vocabulary,
             float temperature, Range rows);
void overlap(float* overlap, float* mass, const float* p, const float* q, int64_t vocabulary, float temperature,
             float lambda, const int32_t* common, int64_t n_common);
void logits_loss(const LogitsLossArgs& a, Range rows);
int32_t sample(const float* logits, int64_t vocabulary, float temperature, uint64_t key, const int32_t* counter,
               float* logprob);

}  // namespace pare::PARE_ISA
