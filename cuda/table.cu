// The table of the kernels, and the ops that only move data.
#include "common.cuh"

namespace pare {

namespace PARE_CUDA {

// Copies are queued on the stream; from pageable memory `src` is read before the call returns.
void upload(const Upload& a, Stream stream) {
  expect(a.dst.contiguous(), "upload: dst ", a.dst.str(), " must be contiguous");
  check_cuda(cudaMemcpyAsync(a.dst.data, a.src, a.dst.bytes(), cudaMemcpyHostToDevice,
                             static_cast<cudaStream_t>(stream.handle)),
             "upload");
}

// The one op that waits: the host is about to read.
void download(const Download& a, Stream stream) {
  expect(a.src.contiguous(), "download: src ", a.src.str(), " must be contiguous");
  const auto s = static_cast<cudaStream_t>(stream.handle);
  check_cuda(cudaMemcpyAsync(a.dst, a.src.data, a.src.bytes(), cudaMemcpyDeviceToHost, s), "download");
  check_cuda(cudaStreamSynchronize(s), "download");
}

void zero(const Zero& a, Stream stream) {
  expect(a.x.contiguous(), "zero: x ", a.x.str(), " must be contiguous");
  check_cuda(cudaMemsetAsync(a.x.data, 0, a.x.bytes(), static_cast<cudaStream_t>(stream.handle)), "zero");
}

}  // namespace PARE_CUDA

// Implemented so far; the other ops are null.
#ifdef CUEMU
constinit const Table table_emu = [] {
#else
constinit const Table table_cuda = [] {
#endif
  using namespace PARE_CUDA;
  Table t{};
#ifdef CUEMU
  t.name = "emu";
#else
  t.name = "cuda";
#endif
  t.upload = upload;
  t.download = download;
  t.zero = zero;
  t.accumulate = accumulate;
  t.gather_rows = gather_rows;
  t.scatter_add_rows = scatter_add_rows;
  t.embedding_fwd = embedding_fwd;
  t.embedding_bwd = embedding_bwd;
  t.rmsnorm_fwd = rmsnorm_fwd;
  t.rmsnorm_bwd = rmsnorm_bwd;
  t.pack_weight = pack_weight;
  t.unpack_weight = unpack_weight;
  t.linear_fwd = linear_fwd;
  t.linear_bwd_input = linear_bwd_input;
  t.linear_bwd_weight = linear_bwd_weight;
  t.rope_fwd = rope_fwd;
  t.rope_bwd = rope_bwd;
  t.swiglu_fwd = swiglu_fwd;
  t.swiglu_bwd = swiglu_bwd;
  t.attn_fwd = attn_fwd;
  t.attn_bwd = attn_bwd;
  t.kv_write = kv_write;
  t.attn_paged = attn_paged;
  t.kv_block_summary = kv_block_summary;
  t.kv_block_select = kv_block_select;
  t.attn_block_select = attn_block_select;
  t.attn_blocks_fwd = attn_blocks_fwd;
  t.attn_blocks_bwd = attn_blocks_bwd;
  t.kv_copy_pages = kv_copy_pages;
  t.copy_rows = copy_rows;
  t.kv_window_scores = kv_window_scores;
  t.kv_redundancy = kv_redundancy;
  t.kv_mass = kv_mass;
  t.kv_mass_scores = kv_mass_scores;
  t.kv_select = kv_select;
  t.kv_compact = kv_compact;
  t.kv_merge = kv_merge;
  t.logprob = logprob;
  t.overlap_probs = overlap_probs;
  t.logits_loss = logits_loss;
  t.sample = sample;
  t.global_norm = global_norm;
  t.adamw = adamw;
  return t;
}();

}  // namespace pare
