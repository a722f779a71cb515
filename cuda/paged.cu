// Attention over keys and values in pages, and copies of pages (AttnPaged, KvCopyPages).  The formula is that of
// attention_fwd.cu.
//
// k_pages [pages, K, D, 16], v_pages [pages, K, 16, D]; page_table [sequences, max_pages] with any stride between
// rows; queries [S, 4]: PagedRow.  The rows of its entries in o [N, H, D] are overwritten.  D <= 256.
//
//   page_table     | 7 | 2 | 9 | ...       16 slots a page
//                    |   |   |
//                  +---+---+---+-...-+---+
//   64 (f32: 16)   |   |   |   |     |\  |     rows of an entry, each with the heads of a key head's group
//   query rows     |   |   |   |     | \ |     128 (f32: 64) slots a turn
//                  +---+---+---+-...-+---+
//
// Order: that of attn_fwd, with its code (attention.cuh, attention_mma.cuh), so a row has the bits that attn_fwd gives
// it in the packed sequence; f32 has those of the `cpu` table.  Slots at or past PagedRow::slots change nothing.
//
// In bf16 rows alone, as in decoding, have kernels of their own (paged_decode.cuh).  Masses of other entries:
// paged_mass.cu.
//
// Bytes: K and V of the listed slots once for each 64 (f32: 16) query rows of a key head.  Limited by latency: one
// block walks the slots of a tile.
#include "paged_decode.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

namespace {

template <int kColumns>
__global__ void __launch_bounds__(kThreads) attend32(const PagedArgs<float> a) {
  // blockIdx.x is the tile.
  const PagedTile<float, kRows32> e(
      a, find_tile<kRows32, PagedRow>(a.pages.queries, a.pages.n_queries, blockIdx.x, a.group));
  if (e.rows == 0) return;
  const int head_dim = a.pages.head_dim;
  const Shared32 s = shared32(head_dim);
  for (int i = threadIdx.x; i < e.rows * head_dim; i += kThreads) s.q[i] = e.query(i / head_dim)[i % head_dim];
  Rows32<kColumns> r;
  for (int begin = 0; begin < e.slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < kSlots * head_dim; i += kThreads) {
      // Neighbouring threads: neighbouring slots of K, channels of V.
      const int k_slot = begin + i % kSlots, v_slot = begin + i / head_dim, k_c = i / kSlots, v_c = i % head_dim;
      if (k_slot < e.slots) {
        const int at = e.where(k_slot);
        s.k[i % kSlots * (head_dim + 1) + k_c] = *a.pages.k_at(a.pages.head(e.t.table_row, at, e.kv), at, k_c);
      }
      if (v_slot < e.slots) {
        const int at = e.where(v_slot);
        s.v[i] = *a.pages.v_at(a.pages.head(e.t.table_row, at, e.kv), at, v_c);
      }
    }
    __syncthreads();
    r.add_block(s, head_dim, e.rows, Softmax{a.scale * kLog2E}, [&](int row) { return e.visible(row) - begin; });
  }
  r.write(
      e.rows, [&](int row, float) { return e.result(row); }, head_dim);
}

// blockIdx.x is a tile of 64 query rows.
template <int kD>
__global__ void __launch_bounds__(kThreads, kD == 64 ? 2 : 1) attend16(const PagedArgs<bf16> a) {
  __shared__ typename SlotLoader<kD>::Memory notes;
  const int n = a.pages.n_queries;
  const Piece p = find_piece(n, blockIdx.x, [&](int i) {
    const int rows = a.pages.queries[i].y;
    return rows == 1 && a.group <= 16 ? 0 : ceil_div(rows * a.group, kRows16);
  });
  if (p.owner == n) return;
  const PagedTile16 e(a, {entry_at<PagedRow>(a.pages.queries, p.owner), p.index * kRows16, p.owner});
  constexpr int kV = kValues16<kD>;
  const int head_dim = a.pages.head_dim, first = threadIdx.x / 32 * 16, channel = blockIdx.z * kV;
  const PagedTiles<kD, false> s;
  SlotLoader<kD> loader(e, notes);
  const Softmax softmax{a.scale * kLog2E};
  const auto begin = [](int i) { return i * kBlock16; };
  const auto k = s.template k<kBlock16>();
  const SharedTile<kV> v = s.template v<kV>();
  load_tile<kRows16>(s.q(), a.q, e.rows, head_dim, a.vector, [&](int row) { return e.query(row); });
  typename Rows16<kD, kV>::Total total;
  Rows16<kD, kV> r(total);
  FourSlots four = four_of(e, 0);
  for_tiles([&](int i) { return begin(i) < e.slots; },
            [&](int i) {
              loader.note(four);
              loader.keys(k);
              four = four_of(e, begin(i + 1));
            },
            [&](int) { loader.template values<kBlock16>(v, channel); },
            [&](int i) { r.score(s.q(), first, k, e.slots - begin(i)); },
            [&](int i) {
              if (ends_cut(i)) r.end_cut();
              r.weigh(softmax, [&](int row) { return e.visible(first + row) - begin(i); });
            },
            [&](int i) { r.add(v, e.slots - begin(i)); });
  r.write(
      e.rows - first, [&](int i, float) { return e.result(first + i) + channel; }, head_dim - channel);
}

// Returns the grid of tiles of tile_rows query rows, for at most `rows` rows: each entry wastes at most one tile.
template <class T>
dim3 tiles(const PagedArgs<T>& a, int64_t rows, int64_t tile_rows) {
  return {blocks("attn_paged", rows * a.group / tile_rows + a.pages.n_queries, 1),
          static_cast<unsigned>(a.pages.kv_heads)};
}
void attend(const PagedArgs<float>& a, int64_t rows, int64_t /*pages*/, Stream stream) {
  const int head_dim = a.pages.head_dim;
  launch("attn_paged",
         head_dim <= 64    ? attend32<2>
         : head_dim <= 128 ? attend32<4>
                           : attend32<8>,
         {.grid = tiles(a, rows, kRows32), .block = kThreads, .smem = smem32(head_dim)}, stream, a);
}
template <int kD>
void decode(const PagedArgs<bf16>& a, int64_t pages, Stream stream) {
  const char* op = "attn_paged";
  LaunchShape shape{
      .grid = dim3(a.pieces, a.pages.kv_heads), .block = kThreads, .smem = PagedTiles<kD, true>::kBytes, .early = true};
  if constexpr (kD <= 128)
    if (takes_wgmma(true) && !a.blocks && a.pages.head_dim == kD) {
      shape.grid.x = std::min(shape.grid.x, ceil_div(2u * machine().multiprocessors, shape.grid.y));
      shape.smem = sizeof(typename PageRing<kD>::Shared);
      launch(op, a.mass_pages ? decode_pages<kD, true> : decode_pages<kD, false>, shape, stream, a,
             page_maps(op, a.pages, pages));
      return;
    }
  launch(op, a.mass_pages ? decode16<kD, true> : decode16<kD, false>, shape, stream, a);
}
template <int kD>
void attend(const PagedArgs<bf16>& a, int64_t rows, int64_t pages, Stream stream) {
  const char* op = "attn_paged";
  if (a.group <= 16 && a.pieces > 0) decode<kD>(a, pages, stream);
  if (a.group <= 16 && rows <= a.pages.n_queries) return;  // rows alone
  dim3 grid = tiles(a, rows, kRows16);
  grid.z = kD / kValues16<kD>;
  launch(op, attend16<kD>, {.grid = grid, .block = kThreads, .smem = PagedTiles<kD, false>::kBytes}, stream, a);
}
void attend(const PagedArgs<bf16>& a, int64_t rows, int64_t pages, Stream stream) {
  const int head_dim = a.pages.head_dim;
  head_dim <= 64    ? attend<64>(a, rows, pages, stream)
  : head_dim <= 128 ? attend<128>(a, rows, pages, stream)
                    : attend<256>(a, rows, pages, stream);
}

// blockIdx.x is a pair (src, dst) of pages of `words` 4-byte words.
__global__ void __launch_bounds__(kThreads)
    copy_pages(uint32_t* pages, int64_t words, const int32_t* __restrict__ pairs) {
  const uint32_t* from = pages + pairs[2 * blockIdx.x] * words;
  uint32_t* to = pages + pairs[2 * blockIdx.x + 1] * words;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) copy_word(to + i, from + i);
}

}  // namespace

void add_mass(const AttnPaged& a, Stream stream);  // paged_mass.cu

// For wide heads no kernel takes more shared memory than those of attn_paged.
void expect_head_dim(DType act, int64_t head_dim) {
  const Machine& m = machine();
  expect(act == DType::f32 || act == DType::bf16, "expect_head_dim: act ", dtype_name(act));
  if (head_dim > 256) fail(m.name, ": heads of ", head_dim, " channels, but the kernels are written for 256 at most");
  const size_t bytes = act == DType::f32 ? smem32(static_cast<int>(head_dim))
                       : head_dim <= 64  ? kPagedBytes<64>
                       : head_dim <= 128 ? kPagedBytes<128>
                                         : kPagedBytes<256>;
  if (bytes > m.shared_memory)
    fail(m.name, ": heads of ", head_dim, " channels in ", dtype_name(act), " need ", bytes,
         " bytes of shared memory for a block, which has ", m.shared_memory, "; run with --device cpu");
}

void attn_paged(const AttnPaged& a, Stream stream) {
  const char* op = "attn_paged";
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    PagedArgs<T> x{};
    x.pages = pages_of<const T>(op, a.k_pages, a.v_pages, a.page_table, a.queries);
    const int64_t n = a.q.shape[0], heads = a.q.shape[1];
    x.q_stride = a.q.stride[0];
    if (a.blocks) {
      x.blocks = a.blocks.as<int32_t>();
      x.budget = a.budget.as<int32_t>();
      x.max_blocks = static_cast<int>(a.blocks.shape[2]);
      x.block = a.block;
    }
    if (n == 0 || x.pages.n_queries == 0) return;
    x.o = a.o.as<T>();
    x.q = a.q.as<T>();
    x.heads = static_cast<int>(heads);
    x.group = static_cast<int>(heads / x.pages.kv_heads);
    x.scale = a.scale;
    const bool pages_aligned = aligned16(a.k_pages, {}) && aligned16(a.v_pages, {});
    expect(sizeof(T) == 4 || pages_aligned, op, ": pages must be 16-byte aligned");
    expect(sizeof(T) == 4 || x.group <= 16 || (!a.blocks && !a.mass_pages), op, ": ", x.group,
           " query heads share a key head; with lists or masses at most 16 can");
    if (sizeof(T) == 2 && a.mass_pages) {
      expect(a.weights && aligned16(a.weights, {}), op, ": masses need 16-byte aligned weights");
      x.mass_pages = a.mass_pages.as<float>();
      x.weights = a.weights.as<float>();
      x.first = a.first.as<int32_t>();
    }
    if (a.work) {
      x.work = reinterpret_cast<const int2*>(a.work.as<int32_t>());
      x.pieces = static_cast<int>(a.work.shape[0]);
    }
    x.vector = aligned16(a.q, {x.q_stride, x.pages.head_dim});
    if (const int64_t most = paged_cuts(a.page_table.shape[1] * kPageSlots); sizeof(T) == 2 && most > 1) {
      expect(a.cuts.results && a.cuts.arrivals, op, ": rows of several cuts need memory for their results");
      x.results = a.cuts.results.as<float>();
      x.most_cuts = static_cast<int>(most);
      x.arrivals = reinterpret_cast<unsigned*>(a.cuts.arrivals.as<int32_t>());
    }
    attend(x, n, a.k_pages.shape[0], stream);
  });
  if (a.mass_pages) add_mass(a, stream);
}

void kv_copy_pages(const KvCopyPages& a, Stream stream) {
  const char* op = "kv_copy_pages";
  if (a.pairs.shape[0] == 0) return;
  for (const Tensor& t : {a.k_pages, a.v_pages, a.pos_pages, a.mass_pages}) {
    if (!t) continue;
    const int64_t bytes = t.stride[0] * static_cast<int64_t>(dtype_size(t.dtype));
    expect(bytes % 4 == 0, op, ": a page of ", t, " is not a whole number of words");
    launch(op, copy_pages, {.grid = blocks(op, a.pairs.shape[0], 1), .block = kThreads}, stream,
           static_cast<uint32_t*>(t.data), bytes / 4, a.pairs.as<int32_t>());
  }
}

}  // namespace pare::PARE_CUDA
