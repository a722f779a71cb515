// Causal attention of packed sequences, forward.  For own row i of a segment and its visible slots s in
// [0, parent_len + i]:  o = sum_s p_s v_s / sum_s p_s,  p_s = 2^(scale log2(e) q.k_s - max),
// lse = max + log2(sum_s p_s).
//
// q, o [N, H, D]; k, v [N, K, D]; pk, pv [P, K, D]; lists [G, K]; lse [N, H].  o and lse are overwritten in the rows of
// segments; other rows are not touched.  D <= 256.
// Order: slots in blocks of 64 aligned to slot 0 (parent first), blocks ascending, online softmax.  A block that is
// hidden from a row leaves it exactly as it was.  So a row's bits depend on its sequence only, not on where its rows
// lie, what else is in the batch, or where the parent ends.
// f32: as list.h states it, bit for bit the `cpu` table.
// bf16: tensor cores with f32 accumulators, p rounded to bf16 for the product with V; k-steps of 16 ascending.  A
// hidden slot of a visible tile enters with weight 0, so a V that is not finite reaches earlier rows of its tile.
// Two kernels with the same bits: attn_bf16 (mma.sync) below, and attention_wgmma.cuh for compute capability 9.0.
//
// Lists of blocks: softmax over the listed slots, in the order of the list, as if they were all that the sequence has,
// in the same order and so with the same bits: a list of every block, or no list, gives those of attention without
// lists.  A row's bits depend on its sequence and its list only.
//
// Bytes: q and o once, k and v once per tile of query rows (from L2 for the most part).  Limited by the tensor cores
// and the exponentials, which overlap them with wgmma only; f32 by shared-memory bandwidth (for tests).
// With lists, k and v of the slots that a row reads, once for up to 16 heads of their group, which is the limit: rows
// share nothing, also where they have no lists.
#include "attention_wgmma.cuh"
#include "machine.cuh"

namespace pare::PARE_CUDA {

namespace {

template <class T>
struct Args {
  T* o;        // [N, H, D]
  float* lse;  // [N, H]
  Packed<T> x;
  BlockLists blocks;  // where rows have them
  bool vector;        // q, k, v rows are 16-byte aligned and D a multiple of 8
};

// ---- f32

// kColumns: ceil(D / 32), columns of V per lane.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) attn_f32(const Args<float> a) {
  const Packed<float>& x = a.x;
  const HeadTile<kRows32> t(x);
  if (t.len == 0) return;
  const int head_dim = x.head_dim, head = t.head, kv = t.kv;
  const int rows = min(kRows32, t.len - t.first), slots = t.parent_len + t.first + rows;
  const Shared32 s = shared32(head_dim);
  for (int i = threadIdx.x; i < rows * head_dim; i += kThreads)
    s.q[i] = x.q.row(t.row + t.first + i / head_dim)[head * head_dim + i % head_dim];
  Rows32<kColumns> r;
  for (int begin = 0; begin < slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < min(kSlots, slots - begin) * head_dim; i += kThreads) {
      const int slot = i / head_dim, c = i % head_dim;
      s.k[slot * (head_dim + 1) + c] = x.key(t, kv, begin + slot)[c];
      s.v[i] = x.value(t, kv, begin + slot)[c];
    }
    __syncthreads();
    r.add_block(s, head_dim, rows, x.softmax(), [&](int row) { return t.parent_len + t.first + row + 1 - begin; });
  }
  r.write(
      rows,
      [&](int row, float lse) {
        const int64_t at = int64_t{t.row + t.first + row} * x.heads + head;
        if (threadIdx.x % 32 == 0) a.lse[at] = lse;
        return a.o + at * head_dim;
      },
      head_dim);
}

// ---- bf16: four warps of 16 query rows, two stages of K and V

constexpr int kRows16 = 64;

template <int kD>
__global__ void __launch_bounds__(kThreads) attn_bf16(const Args<bf16> a) {
  const Packed<bf16>& x = a.x;
  const HeadTile<kRows16> t(x);
  if (t.len == 0) return;
  const int first = t.first + threadIdx.x / 32 * 16, head_dim = x.head_dim, head = t.head, kv = t.kv;  // of the warp
  const int rows = min(kRows16, t.len - t.first), slots = t.parent_len + t.first + rows;
  bf16* smem = dynamic_smem<bf16>();
  const SharedTile<kD> sq{smem};
  auto stage = [&](int i) { return SharedTile<kD>{smem + (1 + i) * 64 * kD}; };  // k: 0, 1; v: 2, 3
  auto load_block = [&](int block) {
    const int begin = block * kSlots, present = slots - begin;
    load_tile<kSlots>(stage(block % 2), x.q.p, present, head_dim, a.vector,
                      [&](int r) { return x.key(t, kv, begin + r); });
    load_tile<kSlots>(stage(2 + block % 2), x.q.p, present, head_dim, a.vector,
                      [&](int r) { return x.value(t, kv, begin + r); });
  };
  load_tile<kRows16>(sq, x.q.p, rows, head_dim, a.vector,
                     [&](int r) { return x.q.row(t.row + t.first + r) + head * head_dim; });
  load_block(0);
  cp_async_commit();

  Rows16<kD> r;
  const int n_blocks = ceil_div(slots, kSlots);
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
        if (leads_quad()) a.lse[at] = lse;
        return a.o + at * head_dim;
      },
      head_dim);
}

// ---- rows that read only the blocks of slots that they list, or, without a list, everything

constexpr int kHeads = 16;  // query heads of a block: rows of a tile of the tensor cores
static_assert(kHeads == kRows32);

// What a block computes: own row blockIdx.x, heads blockIdx.z * kHeads + [0, heads) of the group of key head
// blockIdx.y.
struct Row {
  Tile t;
  int row, kv, head, heads;  // head: the first one
  int slots, block;          // that it reads, and of a selection block
  const int32_t* list;       // null: it reads everything
  // Where slot i of those that it reads lies in the sequence.
  __device__ int slot(int i) const { return list ? list[i / block] * block + i % block : i; }
};
template <class T>
__device__ Row find_row(const Args<T>& a) {
  const Packed<T>& x = a.x;
  Row r{};
  r.t = find_tile<1>(x.segments, x.n_segments, blockIdx.x);
  r.row = r.t.row + r.t.first, r.kv = blockIdx.y, r.head = r.kv * x.group + blockIdx.z * kHeads;
  r.heads = min(kHeads, x.group - static_cast<int>(blockIdx.z) * kHeads);
  r.slots = r.t.parent_len + r.t.first + 1, r.block = a.blocks.block;
  if (r.t.len && a.blocks.listed(r.row, r.slots)) {
    r.list = a.blocks.list(r.row, r.kv);
    r.slots = a.blocks.budget[r.row] * r.block - (r.block - 1 - (r.slots - 1) % r.block);
  }
  return r;
}

// Where the results of head `i` go; the lane that says so writes its lse.
template <class T>
__device__ __forceinline__ T* place(const Args<T>& a, const Row& r, int i, float lse, bool says) {
  const int64_t at = int64_t{r.row} * a.x.heads + r.head + i;
  if (says) a.lse[at] = lse;
  return a.o + at * a.x.head_dim;
}

// kColumns: ceil(D / 32), columns of V per lane.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) listed_f32(const Args<float> a) {
  const Packed<float>& x = a.x;
  const Row row = find_row(a);
  if (row.t.len == 0) return;
  const int head_dim = x.head_dim;
  const Shared32 s = shared32(head_dim);
  for (int i = threadIdx.x; i < row.heads * head_dim; i += kThreads) s.q[i] = x.q.row(row.row)[row.head * head_dim + i];
  Rows32<kColumns> r;
  for (int begin = 0; begin < row.slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < min(kSlots, row.slots - begin) * head_dim; i += kThreads) {
      const int slot = row.slot(begin + i / head_dim);
      s.k[i / head_dim * (head_dim + 1) + i % head_dim] = x.key(row.t, row.kv, slot)[i % head_dim];
      s.v[i] = x.value(row.t, row.kv, slot)[i % head_dim];
    }
    __syncthreads();
    r.add_block(s, head_dim, row.heads, x.softmax(), [&](int) { return row.slots - begin; });
  }
  r.write(
      row.heads, [&](int i, float lse) { return place(a, row, i, lse, threadIdx.x % 32 == 0); }, head_dim);
}

// One warp: the heads of a row are one tile of the tensor cores.  Two stages of K and V.
template <int kD>
__global__ void __launch_bounds__(32) listed_bf16(const Args<bf16> a) {
  const Packed<bf16>& x = a.x;
  const Row row = find_row(a);
  if (row.t.len == 0) return;
  const int head_dim = x.head_dim;
  bf16* smem = dynamic_smem<bf16>();
  const SharedTile<kD> q{smem};
  const auto stage = [&](int i) { return SharedTile<kD>{smem + (kHeads + i * kSlots) * kD}; };  // k: 0, 1; v: 2, 3
  const auto load_block = [&](int block) {
    const int begin = block * kSlots, present = row.slots - begin;
    load_tile<kSlots, 32>(stage(block % 2), x.q.p, present, head_dim, a.vector,
                          [&](int i) { return x.key(row.t, row.kv, row.slot(begin + i)); });
    load_tile<kSlots, 32>(stage(2 + block % 2), x.q.p, present, head_dim, a.vector,
                          [&](int i) { return x.value(row.t, row.kv, row.slot(begin + i)); });
  };
  load_tile<kHeads, 32>(q, x.q.p, row.heads, head_dim, a.vector,
                        [&](int i) { return x.q.row(row.row) + (row.head + i) * head_dim; });
  load_block(0);
  cp_async_commit();
  Rows16<kD> r;
  const int n_blocks = ceil_div(row.slots, kSlots);
  for (int block = 0; block < n_blocks; block++) {
    if (block + 1 < n_blocks) load_block(block + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncwarp();
    r.add_block(q, 0, stage(block % 2), stage(2 + block % 2), x.softmax(),
                [&](int) { return row.slots - block * kSlots; });
    __syncwarp();  // everyone is done with this stage before the block after next lands in it
  }
  cp_async_wait<0>();
  r.write(
      row.heads, [&](int i, float lse) { return place(a, row, i, lse, leads_quad()); }, head_dim);
}

// ---- launchers

void run(const Args<float>& a, const AttnFwd& call, Stream stream) {
  launch(
      "attn_fwd",
      a.x.head_dim <= 64    ? attn_f32<2>
      : a.x.head_dim <= 128 ? attn_f32<4>
                            : attn_f32<8>,
      {.grid = tile_grid("attn_fwd", a.x, call.q.shape[0], kRows32), .block = kThreads, .smem = smem32(a.x.head_dim)},
      stream, a);
}

void run(const Args<bf16>& a, const AttnFwd& call, Stream stream) {
  const int64_t n = call.q.shape[0], parents = call.pk.shape[0];
  const int padded = a.x.head_dim <= 64 ? 64 : a.x.head_dim <= 128 ? 128 : 256;
  if (takes_wgmma(true) && suits_tensor_copies(a.x, a.vector)) {
    padded == 64 ? launch_attn_wgmma<64>("attn_fwd", a.o, a.lse, a.x, n, parents, stream)
                 : launch_attn_wgmma<128>("attn_fwd", a.o, a.lse, a.x, n, parents, stream);
    return;
  }
  launch("attn_fwd",
         padded == 64    ? attn_bf16<64>
         : padded == 128 ? attn_bf16<128>
                         : attn_bf16<256>,
         {.grid = tile_grid("attn_fwd", a.x, n, kRows16), .block = kThreads, .smem = 5 * 64 * padded * sizeof(bf16)},
         stream, a);
}

void run_listed(const Args<float>& a, dim3 grid, Stream stream) {
  launch("attn_fwd",
         a.x.head_dim <= 64    ? listed_f32<2>
         : a.x.head_dim <= 128 ? listed_f32<4>
                               : listed_f32<8>,
         {.grid = grid, .block = kThreads, .smem = smem32(a.x.head_dim)}, stream, a);
}

void run_listed(const Args<bf16>& a, dim3 grid, Stream stream) {
  const int padded = a.x.head_dim <= 64 ? 64 : a.x.head_dim <= 128 ? 128 : 256;
  launch("attn_fwd",
         padded == 64    ? listed_bf16<64>
         : padded == 128 ? listed_bf16<128>
                         : listed_bf16<256>,
         {.grid = grid, .block = 32, .smem = (kHeads + 4 * kSlots) * padded * sizeof(bf16)}, stream, a);
}

}  // namespace

void attn_fwd(const AttnFwd& a, Stream stream) {
  const char* op = "attn_fwd";
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    const int64_t n = a.q.shape[0];
    Args<T> x{.o = a.o.as<T>(), .lse = a.lse.as<float>(), .x = packed<T>(op, a), .blocks = {}, .vector = false};
    x.vector = rows_aligned16(a, x.x);
    if (n == 0 || x.x.heads == 0 || x.x.n_segments == 0) return;
    if (a.blocks) {
      x.blocks = block_lists(a);
      run_listed(x, dim3(blocks(op, n, 1), static_cast<unsigned>(x.x.kv_heads), blocks(op, x.x.group, kHeads)), stream);
    } else {
      run(x, a, stream);
    }
  });
}

}  // namespace pare::PARE_CUDA
