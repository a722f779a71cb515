// Causal attention of packed sequences, forward.  For own row i of a segment and its visible slots s in
// [0, parent_len + i]:  o = sum_s p_s v_s / sum_s p_s,  p_s = 2^(scale log2(e) q.k_s - max),
// lse = max + log2(sum_s p_s).
//
// q, o [N, H, D]; k, v [N, K, D]; pk, pv [P, K, D]; lists [G, K]; lse [N, H].  o and lse are overwritten in the rows of
// segments; other rows are not touched.  D <= 256.
// Order: slots in blocks of 64 aligned to slot 0 (parent first), blocks ascending, online softmax.  A block that is
// hidden from a row leaves it exactly as it was.  So a row's bits depend on its sequence only, not on where its rows
// lie, what else is in the batch, or where the parent ends.
// f32: as ops.h states it, bit for bit the `cpu` table.
// bf16: tensor cores with f32 accumulators, p rounded to bf16 for the product with V; k-steps of 16 ascending.  A
// hidden slot of a visible tile enters with weight 0, so a V that is not finite reaches earlier rows of its tile.
// Two kernels with the same bits: attn_bf16 (mma.sync) below, and attention_wgmma.cuh for compute capability 9.0.
// Bytes: q and o once, k and v once per tile of query rows (from L2 for the most part).  Limited by the tensor cores
// and the exponentials, which overlap them with wgmma only; f32 by shared-memory bandwidth (for tests).
#include "attention_wgmma.cuh"
#include "machine.cuh"

namespace pare::PARE_CUDA {

namespace {

template <class T>
struct Args {
  T* o;        // [N, H, D]
  float* lse;  // [N, H]
  Packed<T> x;
  bool vector;  // q, k, v rows are 16-byte aligned and D a multiple of 8
};

// ---- f32

// kColumns: ceil(D / 32), columns of V per lane.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) attn_f32(const Args<float> a) {
  const Packed<float>& x = a.x;
  const Tile t = find_tile<kRows32>(x.segments, x.n_segments, blockIdx.x);
  if (t.len == 0) return;
  const int d = x.d, head = blockIdx.y, kv = head / x.group;
  const int rows = min(kRows32, t.len - t.first), slots = t.parent_len + t.first + rows;
  const Shared32 s = shared32(d);
  for (int i = threadIdx.x; i < rows * d; i += kThreads) s.q[i] = x.q.row(t.row + t.first + i / d)[head * d + i % d];
  Rows32<kColumns> r;
  for (int begin = 0; begin < slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < min(kSlots, slots - begin) * d; i += kThreads) {
      const int slot = i / d, c = i % d;
      s.k[slot * (d + 1) + c] = x.key(t, kv, begin + slot)[c];
      s.v[i] = x.value(t, kv, begin + slot)[c];
    }
    __syncthreads();
    r.add_block(s, d, rows, x.softmax(), [&](int row) { return t.parent_len + t.first + row + 1 - begin; });
  }
  r.write(
      rows,
      [&](int row, float lse) {
        const int64_t at = int64_t{t.row + t.first + row} * x.heads + head;
        if (threadIdx.x % 32 == 0) a.lse[at] = lse;
        return a.o + at * d;
      },
      d);
}

// ---- bf16: four warps of 16 query rows, two stages of K and V

constexpr int kRows16 = 64;

template <int kD>
__global__ void __launch_bounds__(kThreads) attn_bf16(const Args<bf16> a) {
  const Packed<bf16>& x = a.x;
  const Tile t = find_tile<kRows16>(x.segments, x.n_segments, blockIdx.x);
  if (t.len == 0) return;
  const int first = t.first + threadIdx.x / 32 * 16, d = x.d, head = blockIdx.y, kv = head / x.group;  // of the warp
  const int rows = min(kRows16, t.len - t.first), slots = t.parent_len + t.first + rows;
  bf16* smem = dynamic_smem<bf16>();
  const SharedTile<kD> sq{smem};
  auto stage = [&](int i) { return SharedTile<kD>{smem + (1 + i) * 64 * kD}; };  // k: 0, 1; v: 2, 3
  auto load_block = [&](int block) {
    const int begin = block * kSlots, present = slots - begin;
    load_tile<kSlots>(stage(block % 2), x.q.p, present, d, a.vector, [&](int r) { return x.key(t, kv, begin + r); });
    load_tile<kSlots>(stage(2 + block % 2), x.q.p, present, d, a.vector,
                      [&](int r) { return x.value(t, kv, begin + r); });
  };
  load_tile<kRows16>(sq, x.q.p, rows, d, a.vector, [&](int r) { return x.q.row(t.row + t.first + r) + head * d; });
  load_block(0);
  cp_async_commit();

  Rows16<kD> r;
  const int n_blocks = (slots + kSlots - 1) / kSlots;
  for (int block = 0; block < n_blocks; block++) {
    if (block + 1 < n_blocks) load_block(block + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const int begin = block * kSlots;
    r.add_block(sq, first - t.first, stage(block % 2), stage(2 + block % 2), x.softmax(),
                [&](int i) { return t.parent_len + first + i + 1 - begin; });
    __syncthreads();  // everyone is done with this stage before the block after next lands in it
  }
  cp_async_wait<0>();
  r.write(
      t.len - first,
      [&](int row, float lse) {
        const int64_t at = int64_t{t.row + first + row} * x.heads + head;
        if (threadIdx.x % 4 == 0) a.lse[at] = lse;
        return a.o + at * d;
      },
      d);
}

// ---- launchers

void run(const Args<float>& a, const AttnFwd& call, Stream stream) {
  launch("attn_fwd",
         a.x.d <= 64    ? attn_f32<2>
         : a.x.d <= 128 ? attn_f32<4>
                        : attn_f32<8>,
         {.grid = tile_grid("attn_fwd", a.x, call.q.shape[0], kRows32), .block = kThreads, .smem = smem32(a.x.d)},
         stream, a);
}

void run(const Args<bf16>& a, const AttnFwd& call, Stream stream) {
  const int64_t n = call.q.shape[0], parents = call.pk.shape[0];
  const int d = a.x.d <= 64 ? 64 : a.x.d <= 128 ? 128 : 256;
  if (takes_wgmma(true) && suits_tensor_copies(a.x, a.vector)) {
    d == 64 ? launch_attn_wgmma<64>("attn_fwd", a.o, a.lse, a.x, n, parents, stream)
            : launch_attn_wgmma<128>("attn_fwd", a.o, a.lse, a.x, n, parents, stream);
    return;
  }
  launch("attn_fwd",
         d == 64    ? attn_bf16<64>
         : d == 128 ? attn_bf16<128>
                    : attn_bf16<256>,
         {.grid = tile_grid("attn_fwd", a.x, n, kRows16), .block = kThreads, .smem = 5 * 64 * d * sizeof(bf16)}, stream,
         a);
}

}  // namespace

void attn_fwd(const AttnFwd& a, Stream stream) {
  if (a.blocks) return attn_fwd_listed(a, stream);
  const char* op = "attn_fwd";
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    const Packed<T> x = packed<T>(op, a);
    const int64_t n = a.q.shape[0], d = x.d;
    expect(is_shape(a.o, {n, x.heads, d}) && a.o.contiguous(), op, ": o ", a.o.str(), " for q ", a.q.str());
    if (n == 0 || x.heads == 0 || x.n_segments == 0) return;
    run(Args<T>{a.o.as<T>(), a.lse.as<float>(), x, rows_aligned16(a, x)}, a, stream);
  });
}

}  // namespace pare::PARE_CUDA
