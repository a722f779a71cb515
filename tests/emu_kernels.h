// Kernels for the tests of the emulator: small ones, most of them with one mistake.
#pragma once
#include "cuda/emu/include/cuda_bf16.h"

namespace pare::test::emu {

constexpr int kN = 128;         // threads of a block
constexpr int kZeros = 7 * kN;  // out holds zeros from here, and was never written before

// out [8 * kN], in [4 * kN]; dynamic shared memory of kN floats
using Kernel = void(float* out, const float* in);

Kernel oob_static, oob_dynamic, oob_global, oob_local, misaligned, reads_memory;
Kernel uninit_shared, uninit_dynamic, uninit_global;
Kernel barrier_skipped, barrier_two_places, barrier_counts, barrier_unmet;
Kernel shuffle_divergent, shuffle_self_out, shuffle_from_outside, shuffle_returned, shuffle_half_warps, warp_functions;
Kernel async_no_barrier, async_at_exit, add_plain, add_atomic;
template <bool kUse>
void copied(float* out, const float* in);
// Right with true, a barrier or fence is missing with false.
template <bool kSync>
void reverse(float* out, const float* in);
template <bool kSync>
void rotate(float* out, const float* in);
template <bool kSync>
void swap_pairs(float* out, const float* in);
template <bool kEmpty>
void ring(float* out, const float* in);
template <bool kFence>
void last_block(float* out, const float* in);
template <int kWait, bool kBarrier>
void async_copies(float* out, const float* in);
template <int kPitch>
void transpose_32(float* out, const float* in);
template <int kStep>
void every_other(float* out, const float* in);

// Launched before the kernel before has ended; what is wrong with it.
enum class EarlyBug { none, reads, writes, copies, one_returns };
template <EarlyBug kBug>
void early(float* out, const float* in);

// Of compute capability 9.0 (emu_hopper.cu): what is wrong with them.
#define EMU_COPY_BUGS(X) \
  X(none)                \
  X(no_init)             \
  X(no_proxy_fence)      \
  X(small_count)         \
  X(few_bytes)           \
  X(many_bytes) X(no_empty_wait) X(no_full_wait) X(wrong_parity) X(early_arrival) X(not_awaited) X(within_16_bytes)
#define EMU_PRODUCT_BUGS(X) \
  X(none)                   \
  X(no_proxy_fence)         \
  X(no_barrier)             \
  X(no_fence) X(no_fence_again) X(no_wait) X(waits_for_one) X(wrong_stride) X(different_matrices) X(overwritten)
#define EMU_STORE_BUGS(X) \
  X(none)                 \
  X(no_commit)            \
  X(no_last_wait)         \
  X(divergent) X(no_read_wait) X(waits_for_one) X(no_proxy_fence) X(no_barrier) X(reads_target) X(misaligned)
#define EMU_CLUSTER_BUGS(X) \
  X(none)                   \
  X(no_first_barrier)       \
  X(no_init_fence)          \
  X(no_last_barrier)        \
  X(no_last_wait)           \
  X(arrives_twice) X(releases_own) X(awaits_own) X(copies_to_own) X(copies_to_three) X(expects_in_one) X(returns_early)
#define X(bug) bug,
enum class ClusterBug { EMU_CLUSTER_BUGS(X) };
enum class StoreBug { EMU_STORE_BUGS(X) };
enum class CopyBug { EMU_COPY_BUGS(X) };
enum class ProductBug { EMU_PRODUCT_BUGS(X) };
#undef X
enum class RegisterBug { none, too_many, nobody_gives, one_warp_keeps, gives_more, one_lane };
enum class LeftBug { none, no_fence, overwritten };
enum class AddBug { none, twice, reads_target, no_proxy_fence };
enum class FreshBug { none, no_fence, adds, never_begun };
template <CopyBug kBug>
void copy_ring(float* out, const float* in);
enum class Source { written, unwritten, unwritten_used };
template <Source kSource>
void copy_alone(float* out, const float* in);
template <RegisterBug kBug>  // of 384 threads
void move_registers(float* out, const float* in);
template <ClusterBug kBug>  // by clusters of two blocks
void cluster_ring(float* out, const float* in);
enum class SharedBug { none, no_first_barrier, no_last_barrier, third_block, behind_the_end };
template <SharedBug kBug>  // by clusters of two blocks
void cluster_shared(float* out, const float* in);
enum class PartsBug { none, no_barrier, no_fence, no_block_barrier };
template <PartsBug kBug>  // by two clusters of two blocks
void cluster_parts(float* out, const float* in);
template <bool kMnMajorA, bool kMnMajorB, ProductBug kBug>
void group_product(float* out, const float* in);
template <LeftBug kBug>
void left_in_registers(float* out, const float* in);
template <StoreBug kBug>
void store_boxes(float* out, const float* in);
template <AddBug kBug>
void add_box(float* out, const float* in);
template <FreshBug kBug>
void fresh_sums(float* out, const float* in);

// out [16][8] = a [16][16] b [16][8], by one warp.
void one_mma(float* out, const __nv_bfloat16* a, const __nv_bfloat16* b);

}  // namespace pare::test::emu
