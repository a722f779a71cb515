// Attention of packed sequences in which a row reads only the blocks of slots that it lists, forward (AttnFwd::blocks):
// softmax over the listed slots, in the order of the list, as if they were all that the sequence has.  attn_bwd.cu is
// the other direction.
//
// q, o [N, H, D]; k, v [N, K, D]; pk, pv [P, K, D]; lse [N, H]; blocks [N, K, max_blocks]; budget [N].  o and lse are
// overwritten in the rows of segments; other rows are not touched.  D <= 256.
// Order: that of attn_fwd.cu over the listed slots, and so are the bits, in f32 and in bf16: a list of every block, or
// no list, gives the bits of attn_fwd.cu.  A row's bits depend on its sequence and its list only. Bytes: k and v of the
// slots that a row reads, once for up to 16 heads of their group (from L2 for the most part), which is the limit: rows
// share nothing, also where they have no lists.
#include "attention_mma.cuh"

namespace pare::PARE_CUDA {

namespace {

constexpr int kHeads = 16;  // query heads of a block: rows of a tile of the tensor cores
static_assert(kHeads == kRows32);

template <class T>
struct Args {
  T* o;        // [N, H, D]
  float* lse;  // [N, H]
  Packed<T> x;
  BlockLists blocks;
  bool vector;  // q, k, v rows are 16-byte aligned and D a multiple of 8
};

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
  return a.o + at * a.x.d;
}

// kColumns: ceil(D / 32), columns of V per lane.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) attend_f32(const Args<float> a) {
  const Packed<float>& x = a.x;
  const Row row = find_row(a);
  if (row.t.len == 0) return;
  const int d = x.d;
  const Shared32 s = shared32(d);
  for (int i = threadIdx.x; i < row.heads * d; i += kThreads) s.q[i] = x.q.row(row.row)[row.head * d + i];
  Rows32<kColumns> r;
  for (int begin = 0; begin < row.slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < min(kSlots, row.slots - begin) * d; i += kThreads) {
      const int slot = row.slot(begin + i / d);
      s.k[i / d * (d + 1) + i % d] = x.key(row.t, row.kv, slot)[i % d];
      s.v[i] = x.value(row.t, row.kv, slot)[i % d];
    }
    __syncthreads();
    r.add_block(s, d, row.heads, x.softmax(), [&](int) { return row.slots - begin; });
  }
  r.write(
      row.heads, [&](int i, float lse) { return place(a, row, i, lse, threadIdx.x % 32 == 0); }, d);
}

// One warp: the heads of a row are one tile of the tensor cores.  Two stages of K and V.
template <int kD>
__global__ void __launch_bounds__(32) attend_bf16(const Args<bf16> a) {
  const Packed<bf16>& x = a.x;
  const Row row = find_row(a);
  if (row.t.len == 0) return;
  const int d = x.d;
  bf16* smem = dynamic_smem<bf16>();
  const SharedTile<kD> q{smem};
  const auto stage = [&](int i) { return SharedTile<kD>{smem + (kHeads + i * kSlots) * kD}; };  // k: 0, 1; v: 2, 3
  const auto load_block = [&](int block) {
    const int begin = block * kSlots, present = row.slots - begin;
    load_tile<kSlots, 32>(stage(block % 2), x.q.p, present, d, a.vector,
                          [&](int i) { return x.key(row.t, row.kv, row.slot(begin + i)); });
    load_tile<kSlots, 32>(stage(2 + block % 2), x.q.p, present, d, a.vector,
                          [&](int i) { return x.value(row.t, row.kv, row.slot(begin + i)); });
  };
  load_tile<kHeads, 32>(q, x.q.p, row.heads, d, a.vector, [&](int i) { return x.q.row(row.row) + (row.head + i) * d; });
  load_block(0);
  cp_async_commit();
  Rows16<kD> r;
  const int n_blocks = (row.slots + kSlots - 1) / kSlots;
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
      row.heads, [&](int i, float lse) { return place(a, row, i, lse, threadIdx.x % 4 == 0); }, d);
}

void run(const char* op, const Args<float>& a, dim3 grid, Stream stream) {
  launch(op,
         a.x.d <= 64    ? attend_f32<2>
         : a.x.d <= 128 ? attend_f32<4>
                        : attend_f32<8>,
         {.grid = grid, .block = kThreads, .smem = smem32(a.x.d)}, stream, a);
}

void run(const char* op, const Args<bf16>& a, dim3 grid, Stream stream) {
  const int d = a.x.d <= 64 ? 64 : a.x.d <= 128 ? 128 : 256;
  launch(op,
         d == 64    ? attend_bf16<64>
         : d == 128 ? attend_bf16<128>
                    : attend_bf16<256>,
         {.grid = grid, .block = 32, .smem = (kHeads + 4 * kSlots) * d * sizeof(bf16)}, stream, a);
}

}  // namespace

void attn_fwd_listed(const AttnFwd& a, Stream stream) {
  const char* op = "attn_fwd";
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    const Packed<T> x = packed<T>(op, a);
    const int64_t n = a.q.shape[0];
    expect(is_shape(a.o, {n, x.heads, x.d}) && a.o.contiguous(), op, ": o ", a.o, " for q ", a.q);
    const BlockLists lists = block_lists(op, a);
    if (n == 0 || x.heads == 0 || x.n_segments == 0) return;
    const dim3 grid(blocks(op, n, 1), static_cast<unsigned>(x.kv_heads), blocks(op, x.group, kHeads));
    run(op, Args<T>{a.o.as<T>(), a.lse.as<float>(), x, lists, rows_aligned16(a, x)}, grid, stream);
  });
}

}  // namespace pare::PARE_CUDA
