// Causal attention of packed sequences, forward.  For own row i of a segment and its visible slots s in
// [0, parent_len + i]:  o = sum_s p_s v_s / sum_s p_s,  p_s = 2^(scale log2(e) q.k_s - max),
// lse = max + log2(sum_s p_s).
//
// q, o [N, H, D]; k, v [N, K, D]; pk, pv [P, K, D]; lists [G, K]; lse [N, H].  o and lse are overwritten in the rows of
// segments; other rows are not touched.  D <= 256.
//
//                    slots, 128 a turn (f32: 64) ->
//                    +--------+--------+-...-+--------+
//   64 rows of a     |        |        |     |\       |    bf16: 16 rows a warp
//   head (f32: 16)   |        |        |     |   \    |
//                    +--------+--------+-...-+------\-+    the keys of the next turn arrive while values are used
//
// Order: list.h; f32 has the bits of the `cpu` table.  A block of slots that is hidden from a row leaves it exactly as
// it was.  So a row's bits depend on its sequence only, not on the place of its rows, the rest of the batch, or the end
// of its parent.
//
// bf16: a hidden slot of a visible tile enters with weight 0, so a V that is not finite reaches earlier rows of its
// tile.  Two kernels have the same bits: attn_bf16 (mma.sync) below and, on compute capability 9.0, attn_wgmma
// (attention_wgmma.cuh).
//
// Lists of blocks: softmax over the listed slots; a row whose list names every block has the bits of attention without
// lists.  A row's bits depend on its sequence and its list only.
//
// Bytes: q and o once, k and v once per tile of query rows, mostly from L2.  Limited by the tensor cores and the
// exponentials, which overlap only with wgmma; f32, for comparisons with the CPU, by shared-memory bandwidth.  With
// lists of blocks: in bf16 attention_lists.cuh; in f32 k and v of the slots that a row reads, once for up to 16 heads
// of their group.
#include "attention_lists.cuh"
#include "attention_wgmma.cuh"
#include "runtime/machine.cuh"

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

// ---- bf16: four warps of 16 query rows

// The memory of `rows` query rows and a tile of keys and values.
template <int kD>
struct Tiles16 {
  static constexpr size_t bytes(int rows) { return sizeof(bf16) * (rows * kD + kBlock16 * (kD + kValues16<kD>)); }
  SharedTile<kD> q, k;
  SharedTile<kValues16<kD>> v;
  __device__ explicit Tiles16(int rows) : q{dynamic_smem<bf16>()}, k{q.p + rows * kD}, v{k.p + kBlock16 * kD} {}
};

template <int kD>
__global__ void __launch_bounds__(kThreads) attn_bf16(const Args<bf16> a) {
  const Packed<bf16>& x = a.x;
  const HeadTile<kRows16> t(x);
  if (t.len == 0) return;
  const int first = t.first + threadIdx.x / 32 * 16, head_dim = x.head_dim, head = t.head, kv = t.kv;  // of the warp
  const int rows = min(kRows16, t.len - t.first), slots = t.parent_len + t.first + rows,
            channel = blockIdx.z * kValues16<kD>;
  const Tiles16<kD> s(kRows16);
  load_tile<kRows16>(s.q, x.q.p, rows, head_dim, a.vector,
                     [&](int r) { return x.q.row(t.row + t.first + r) + head * head_dim; });
  typename Rows16<kD, kValues16<kD>>::Total total;
  Rows16<kD, kValues16<kD>> r(total);
  for_tiles([&](int i) { return i * kBlock16 < slots; },
            [&](int i) {
              load_tile<kBlock16>(s.k, x.q.p, slots - i * kBlock16, head_dim, a.vector,
                                  [&](int r) { return x.key(t, kv, i * kBlock16 + r); });
            },
            [&](int i) {
              load_tile<kBlock16>(s.v, x.q.p, slots - i * kBlock16, head_dim - channel, a.vector,
                                  [&](int r) { return x.value(t, kv, i * kBlock16 + r) + channel; });
            },
            [&](int i) { r.score(s.q, first - t.first, s.k, slots - i * kBlock16); },
            [&](int i) {
              if (ends_cut(i)) r.end_cut();
              r.weigh(x.softmax(), [&](int row) { return t.parent_len + first + row + 1 - i * kBlock16; });
            },
            [&](int i) { r.add(s.v, slots - i * kBlock16); });
  r.write(
      t.len - first,
      [&](int row, float lse) {
        const int64_t at = int64_t{t.row + first + row} * x.heads + head;
        if (leads_quad() && channel == 0) a.lse[at] = lse;
        return a.o + at * head_dim + channel;
      },
      head_dim - channel);
}

// ---- rows that read only the blocks of slots that they list, or, without a list, everything

// The work of a block of the f32 kernel: own row blockIdx.x, heads blockIdx.z * kRows32 + [0, heads) of the group of
// key head blockIdx.y.
struct Row {
  Tile t;
  int row, kv, head, heads;  // head: the first one
  int total, block, budget;  // slots that it sees; slots of a selection block; entries of its list
  const int32_t* list;       // null: it reads everything
  // The listed slots are all that there is: how many, and where slot i of them lies in the sequence.
  __device__ int slots() const { return list ? budget * block - (block - 1 - (total - 1) % block) : total; }
  __device__ int slot(int i) const { return list ? list[i / block] * block + i % block : i; }
};
__device__ Row find_row(const Args<float>& a) {
  const Packed<float>& x = a.x;
  Row r{};
  r.t = find_tile<1>(x.segments, x.n_segments, blockIdx.x);
  r.row = r.t.row + r.t.first;
  r.kv = blockIdx.y;
  r.head = r.kv * x.group + blockIdx.z * kRows32;
  r.heads = min(kRows32, x.group - static_cast<int>(blockIdx.z) * kRows32);
  r.total = r.t.parent_len + r.t.first + 1;
  r.block = a.blocks.block;
  if (r.t.len && a.blocks.listed(r.row, r.total)) {
    r.list = a.blocks.list(r.row, r.kv);
    r.budget = a.blocks.budget[r.row];
  }
  return r;
}

// kColumns: ceil(D / 32), columns of V per lane.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) listed_f32(const Args<float> a) {
  const Packed<float>& x = a.x;
  const Row row = find_row(a);
  if (row.t.len == 0) return;
  const int head_dim = x.head_dim, slots = row.slots();
  const Shared32 s = shared32(head_dim);
  for (int i = threadIdx.x; i < row.heads * head_dim; i += kThreads) s.q[i] = x.q.row(row.row)[row.head * head_dim + i];
  Rows32<kColumns> r;
  for (int begin = 0; begin < slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < min(kSlots, slots - begin) * head_dim; i += kThreads) {
      const int slot = row.slot(begin + i / head_dim);
      s.k[i / head_dim * (head_dim + 1) + i % head_dim] = x.key(row.t, row.kv, slot)[i % head_dim];
      s.v[i] = x.value(row.t, row.kv, slot)[i % head_dim];
    }
    __syncthreads();
    r.add_block(s, head_dim, row.heads, x.softmax(), [&](int) { return slots - begin; });
  }
  r.write(
      row.heads,
      [&](int i, float lse) {
        const int64_t at = int64_t{row.row} * x.heads + row.head + i;
        if (threadIdx.x % 32 == 0) a.lse[at] = lse;
        return a.o + at * head_dim;
      },
      head_dim);
}

// Four warps of 16 rows of a tile of own rows x heads.  First the pages that lists name, then all slots for the rows
// without a list.  Slots that a row does not read leave it as it is.
template <int kD>
__global__ void __launch_bounds__(kThreads) listed_bf16(const Args<bf16> a) {
  __shared__ ListMemory memory;
  const Packed<bf16>& x = a.x;
  const GroupTile t(x);
  if (t.len == 0) return;
  const int first = threadIdx.x / 32 * 16, head_dim = x.head_dim, channel = blockIdx.z * kValues16<kD>;
  const Tiles16<kD> s(kRows16);
  load_tile<kRows16>(s.q, x.q.p, t.rows, head_dim, a.vector,
                     [&](int r) { return x.q.row(t.row_of(r)) + t.head(r) * head_dim; });
  typename Rows16<kD, kValues16<kD>>::Total total;
  Rows16<kD, kValues16<kD>> r(total);
  const SlotRows key(x.k, x.pk, t, t.kv * head_dim), value(x.v, x.pv, t, t.kv * head_dim + channel);
  ListedPages<false> pages(t, a.blocks, memory);
  PerRow<Listed> listed;
  if (pages.left())
    for_tiles([&](int) { return pages.left(); }, [&](int) { pages.load<kSlots>(s.k, key, head_dim, a.vector); },
              [&](int) {
                pages.load<kSlots>(s.v, value, head_dim - channel, a.vector);
                listed = pages.take<kSlots>(first);
              },
              [&](int) { r.score_pages(s.q, first, s.k); }, [](int) {},
              [&](int) { r.add_pages(s.v, x.softmax(), listed); });
  const int slots = t.most_without_list(a.blocks);
  PerRow<int> sees;
  for_rows([&](LaneRow row) { sees[row] = t.without_list(a.blocks, first + row); });
  const auto begin = [](int i) { return i * kBlock16; };
  if (slots > 0)
    for_tiles([&](int i) { return begin(i) < slots; },
              [&](int i) {
                load_tile<kBlock16>(s.k, x.q.p, slots - begin(i), head_dim, a.vector,
                                    [&](int r) { return key(begin(i) + r); });
              },
              [&](int i) {
                load_tile<kBlock16>(s.v, x.q.p, slots - begin(i), head_dim - channel, a.vector,
                                    [&](int r) { return value(begin(i) + r); });
              },
              [&](int i) { r.score(s.q, first, s.k, slots - begin(i)); },
              [&](int i) {
                if (ends_cut(i)) r.end_cut();
                r.weigh(x.softmax(), [&](LaneRow row) { return sees[row] - begin(i); });
              },
              [&](int i) { r.add(s.v, slots - begin(i)); });
  r.write(
      t.rows - first,
      [&](int row, float lse) {
        const int64_t at = t.row_of(first + row) * x.heads + t.head(first + row);
        if (leads_quad() && channel == 0) a.lse[at] = lse;
        return a.o + at * head_dim + channel;
      },
      head_dim - channel);
}

// ---- launchers

// f<kD>() for the least kD that has room for a head.
template <class F>
void with_padded(int head_dim, F f) {
  head_dim <= 64    ? f.template operator()<64>()
  : head_dim <= 128 ? f.template operator()<128>()
                    : f.template operator()<256>();
}

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
  if (takes_wgmma(true) && suits_tensor_copies(a.x, a.vector && aligned16(call.o, {}))) {
    a.x.head_dim <= 64 ? launch_attn_wgmma<64>("attn_fwd", a.o, a.lse, a.x, n, parents, stream)
                       : launch_attn_wgmma<128>("attn_fwd", a.o, a.lse, a.x, n, parents, stream);
    return;
  }
  with_padded(a.x.head_dim, [&]<int kD>() {
    dim3 grid = tile_grid("attn_fwd", a.x, n, kRows16);
    grid.z = kD / kValues16<kD>;
    launch("attn_fwd", attn_bf16<kD>, {.grid = grid, .block = kThreads, .smem = Tiles16<kD>::bytes(kRows16)}, stream,
           a);
  });
}

void run_listed(const Args<float>& a, int64_t n, Stream stream) {
  const char* op = "attn_fwd";
  launch(op,
         a.x.head_dim <= 64    ? listed_f32<2>
         : a.x.head_dim <= 128 ? listed_f32<4>
                               : listed_f32<8>,
         {.grid = dim3(blocks(op, n, 1), static_cast<unsigned>(a.x.kv_heads), blocks(op, a.x.group, kRows32)),
          .block = kThreads,
          .smem = smem32(a.x.head_dim)},
         stream, a);
}

void run_listed(const Args<bf16>& a, int64_t n, Stream stream) {
  with_padded(a.x.head_dim, [&]<int kD>() {
    dim3 grid = group_grid("attn_fwd", a.x, n);
    grid.z = kD / kValues16<kD>;
    launch("attn_fwd", listed_bf16<kD>, {.grid = grid, .block = kThreads, .smem = Tiles16<kD>::bytes(kRows16)}, stream,
           a);
  });
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
      run_listed(x, n, stream);
    } else {
      run(x, a, stream);
    }
  });
}

}  // namespace pare::PARE_CUDA
