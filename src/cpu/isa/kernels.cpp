#include "cpu/isa/kernel_list.h"
#include "cpu/isa/tile.h"

namespace pare {

#define PARE_PASTE(a, b) a##b
#define PARE_NAME(isa) PARE_PASTE(kernels_, isa)
#define PARE_STRING(x) #x
#define PARE_QUOTE(x) PARE_STRING(x)

using namespace PARE_ISA;

const Kernels PARE_NAME(PARE_ISA) = {
    .name = PARE_QUOTE(PARE_ISA),
    .tile_rows = kTileRows,
    .exp = exp_all,
    .log = log_all,
    .add = add_all,
    .add_rows = add_rows,
    .sum_rows = sum_rows,
    .rmsnorm_fwd = rmsnorm_fwd,
    .rmsnorm_bwd_input = rmsnorm_bwd_input,
    .rmsnorm_bwd_weight = rmsnorm_bwd_weight,
    .rope = rope,
    .qk_norm_rope_fwd = qk_norm_rope_fwd,
    .qk_norm_rope_bwd = qk_norm_rope_bwd,
    .qk_norm_rope_bwd_weight = qk_norm_rope_bwd_weight,
    .swiglu_fwd = swiglu_fwd,
    .swiglu_bwd = swiglu_bwd,
    .sum_squares = sum_squares,
    .adamw = adamw,
    .adamw_weight = adamw_weight,
    .pack = pack,
    .unpack = unpack,
    .gemm = gemm,
    .gemm_transposed = gemm_transposed,
    .gemm_t = gemm_t,
    .attn_fwd = attn_fwd,
    .attn_bwd = attn_bwd,
    .attn_paged = attn_paged,
    .attn_blocks_bwd = attn_blocks_bwd,
    .block_summary = block_summary,
    .span_summary = span_summary,
    .segment_summary = segment_summary,
    .block_scores = block_scores,
    .kv_window_scores = kv_window_scores,
    .kv_redundancy = kv_redundancy,
    .kv_nearest = kv_nearest,
    .logprob = logprob,
    .overlap = overlap,
    .logits_loss = logits_loss,
    .sample = sample,
};

}  // namespace pare
