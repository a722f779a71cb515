// Keys and values in pages (ops.h: KvWrite, AttnPaged, KvCopyPages).
//
// k_pages [pages, K, D, 16], v_pages [pages, K, 16, D]; page_table [sequences, max_pages] with any stride between rows;
// queries [S, 4]: PagedRow.  kv_write overwrites the new slots and nothing else; attn_paged overwrites the rows of its
// entries in o [N, H, D].  D <= 256.
// Order of attn_paged: ops.h, in f32 whatever the element type, so f32 has the bits of attn_fwd and of the `cpu` table.
// Bytes: K and V of the listed slots once for each 16 query rows of a key head; limited by memory bandwidth in decode.
// This first version does its products without tensor cores, a block of 64 slots at a time through shared memory.
#include "attention.cuh"

namespace pare::PARE_CUDA {

namespace {

// The slots of an entry: queries read as the segments of find_tile, {row, rows, slots, table_row}.
template <class T>
struct Pages {
  T *k, *v;
  const int32_t* table;
  int64_t table_stride;
  const int4* queries;
  int n_queries, kv_heads, d;
  __device__ __forceinline__ int64_t head(int64_t table_row, int slot, int h) const {  // number of (page, head)
    return int64_t{table[table_row * table_stride + slot / kPageSlots]} * kv_heads + h;
  }
  __device__ __forceinline__ T* k_at(int64_t head, int slot, int c) const {
    return k + (head * d + c) * kPageSlots + slot % kPageSlots;
  }
  __device__ __forceinline__ T* v_at(int64_t head, int slot, int c) const {
    return v + (head * kPageSlots + slot % kPageSlots) * d + c;
  }
};

struct Beside {  // absent: null
  int32_t* pos_pages;
  const int32_t* pos;
  float* count_pages;
};

// blockIdx.x is a new row.
template <class T>
__global__ void __launch_bounds__(kThreads) write_rows(Pages<T> pages, const T* __restrict__ k, const T* __restrict__ v,
                                                       int64_t k_stride, int64_t v_stride, Beside beside) {
  const Tile t = find_tile<1>(pages.queries, pages.n_queries, blockIdx.x);
  if (t.len == 0) return;
  const int slots = t.parent_row, table_row = t.parent_len, slot = slots - t.len + t.first;
  const int64_t row = t.row + t.first;
  for (int i = threadIdx.x; i < pages.kv_heads * pages.d; i += kThreads) {
    const int h = i / pages.d, c = i % pages.d;
    const int64_t head = pages.head(table_row, slot, h);
    *pages.k_at(head, slot, c) = k[row * k_stride + i];
    *pages.v_at(head, slot, c) = v[row * v_stride + i];
  }
  for (int h = threadIdx.x; h < pages.kv_heads; h += kThreads) {
    const int64_t at = pages.head(table_row, slot, h) * kPageSlots + slot % kPageSlots;
    if (beside.pos_pages) beside.pos_pages[at] = beside.pos[row];
    if (beside.count_pages) beside.count_pages[at] = 1.f;
  }
}

template <class T>
struct Args {
  T* o;
  const T* q;
  int64_t q_stride;
  Pages<const T> pages;
  const int32_t *blocks, *budget;  // null: everything is read
  const float* counts;             // [pages, K, 16]: log(count) is added to the score of a slot; or null
  int max_blocks, block;           // room of a list; slots of a selection block
  int heads, group;
  float scale;
};

// blockIdx.x is a tile of query rows of an entry, in the order (own row, head of the group); blockIdx.y the key head.
template <class T, int kColumns>
__global__ void __launch_bounds__(kThreads) attend(const Args<T> a) {
  const Tile t = find_tile<kRows32>(a.pages.queries, a.pages.n_queries, blockIdx.x, a.group);
  if (t.len == 0) return;
  const int d = a.pages.d, kv = blockIdx.y, own = t.len / a.group, total = t.parent_row, table_row = t.parent_len;
  const int rows = min(kRows32, t.len - t.first), last = (t.first + rows - 1) / a.group;  // the last own row
  // Entries of one row may have a list, of whose slots the blocks of 64 are then made.
  const bool listed = a.blocks && own == 1 && (total + a.block - 1) / a.block > a.budget[t.entry];
  const int budget = listed ? a.budget[t.entry] : 0;
  const int32_t* list = listed ? a.blocks + (int64_t{t.entry} * a.pages.kv_heads + kv) * a.max_blocks : nullptr;
  const int slots = listed ? budget * a.block - (a.block - 1 - (total - 1) % a.block) : total - own + last + 1;
  const Shared32 s = shared32(d);
  const auto place = [&](int row) {  // of a query row in q and o
    return int64_t{t.row + (t.first + row) / a.group} * a.heads + kv * a.group + (t.first + row) % a.group;
  };
  for (int i = threadIdx.x; i < rows * d; i += kThreads) {
    const int64_t at = place(i / d);
    s.q[i] = to_float(a.q[at / a.heads * a.q_stride + at % a.heads * d + i % d]);
  }
  Rows32<kColumns> r;
  for (int begin = 0; begin < slots; begin += kSlots) {
    __syncthreads();  // everyone is done with the previous block
    for (int i = threadIdx.x; i < kSlots * d; i += kThreads) {
      // Neighbouring threads: neighbouring slots of K, channels of V.
      const int k_slot = begin + i % kSlots, v_slot = begin + i / d, k_c = i / kSlots, v_c = i % d;
      const auto where = [&](int slot) { return list ? list[slot / a.block] * a.block + slot % a.block : slot; };
      if (k_slot < slots) {
        const int at = where(k_slot);
        s.k[i % kSlots * (d + 1) + k_c] = to_float(*a.pages.k_at(a.pages.head(table_row, at, kv), at, k_c));
      }
      if (v_slot < slots) {
        const int at = where(v_slot);
        s.v[i] = to_float(*a.pages.v_at(a.pages.head(table_row, at, kv), at, v_c));
      }
    }
    __syncthreads();
    r.add_block(
        s, d, rows, a.scale,
        [&](int row) { return (listed ? slots : total - own + (t.first + row) / a.group + 1) - begin; },
        [&](int i, float z) {
          if (!a.counts) return z;
          const int slot = begin + i;
          const int64_t page = a.pages.head(table_row, slot, kv);
          return z + log_f32(a.counts[page * kPageSlots + slot % kPageSlots]);
        });
  }
  r.write(
      rows, [&](int row, float) { return a.o + place(row) * d; }, d);
}

// blockIdx.x is a pair (src, dst) of pages of `words` 4-byte words.
__global__ void __launch_bounds__(kThreads)
    copy_pages(uint32_t* pages, int64_t words, const int32_t* __restrict__ pairs) {
  const uint32_t* from = pages + pairs[2 * blockIdx.x] * words;
  uint32_t* to = pages + pairs[2 * blockIdx.x + 1] * words;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) to[i] = from[i];
}

template <class T>
Pages<T> pages_of(const char* op, const Tensor& k, const Tensor& v, const Tensor& table, const Tensor& queries) {
  expect(k.rank == 4 && k.shape[3] == kPageSlots && k.contiguous(), op, ": k_pages ", k.str(),
         " must be [pages, K, D, 16]");
  const int64_t kv_heads = k.shape[1], d = k.shape[2];
  expect(d >= 1 && d <= 256 && kv_heads >= 1 && kv_heads <= 65535, op, ": k_pages ", k.str());
  expect(is_shape(v, {k.shape[0], kv_heads, kPageSlots, d}) && v.contiguous(), op, ": v_pages ", v.str(),
         " for k_pages ", k.str());
  expect(table.rank == 2 && table.stride[1] == 1, op, ": page_table ", table.str());
  expect(queries.rank == 2 && queries.shape[1] == 4 && queries.contiguous() &&
             reinterpret_cast<uintptr_t>(queries.data) % 16 == 0,
         op, ": queries ", queries.str(), " must be [S, 4], 16-byte aligned");
  return {k.as<std::remove_const_t<T>>(),
          v.as<std::remove_const_t<T>>(),
          table.as<int32_t>(),
          table.stride[0],
          reinterpret_cast<const int4*>(queries.as<int32_t>()),
          static_cast<int>(queries.shape[0]),
          static_cast<int>(kv_heads),
          static_cast<int>(d)};
}

// Row stride of a [rows, heads, D] tensor with contiguous heads.
int64_t row_stride(const char* op, const char* field, const Tensor& t, int64_t heads, int64_t d) {
  expect(t.rank == 3 && t.shape[1] == heads && t.shape[2] == d && t.stride[1] == d && t.stride[2] == 1, op, ": ", field,
         " ", t.str(), " must be [rows, ", heads, ", ", d, "] with contiguous heads");
  return t.stride[0];
}

}  // namespace

void kv_write(const KvWrite& a, Stream stream) {
  const char* op = "kv_write";
  with_act(op, a.k, [&](auto type) {
    using T = decltype(type);
    const auto pages = pages_of<T>(op, a.k_pages, a.v_pages, a.page_table, a.queries);
    const int64_t k_stride = row_stride(op, "k", a.k, pages.kv_heads, pages.d),
                  v_stride = row_stride(op, "v", a.v, pages.kv_heads, pages.d), rows = a.k.shape[0];
    expect(a.v.shape[0] == rows && (!a.pos_pages || is_shape(a.pos, {rows})), op, ": v ", a.v.str(), ", pos ",
           a.pos.str(), " for k ", a.k.str());
    if (rows == 0 || pages.n_queries == 0) return;
    const Beside beside{a.pos_pages ? a.pos_pages.as<int32_t>() : nullptr, a.pos_pages ? a.pos.as<int32_t>() : nullptr,
                        a.count_pages ? a.count_pages.as<float>() : nullptr};
    launch(op, write_rows<T>, {.grid = blocks(op, rows, 1), .block = kThreads}, stream, pages, a.k.as<T>(), a.v.as<T>(),
           k_stride, v_stride, beside);
  });
}

void attn_paged(const AttnPaged& a, Stream stream) {
  const char* op = "attn_paged";
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    Args<T> x{};
    x.pages = pages_of<const T>(op, a.k_pages, a.v_pages, a.page_table, a.queries);
    const int64_t n = a.q.shape[0], heads = a.q.shape[1];
    expect(heads % x.pages.kv_heads == 0, op, ": ", heads, " query heads with ", x.pages.kv_heads, " key heads");
    x.q_stride = row_stride(op, "q", a.q, heads, x.pages.d);
    expect(is_shape(a.o, {n, heads, x.pages.d}) && a.o.contiguous(), op, ": o ", a.o.str(), " for q ", a.q.str());
    if (a.blocks) {
      expect(a.block == 4 || a.block == 16, op, ": blocks of ", a.block, " slots, expected 4 or 16");
      expect(a.blocks.rank == 3 && a.blocks.shape[0] == x.pages.n_queries && a.blocks.shape[1] == x.pages.kv_heads &&
                 a.blocks.contiguous() && is_shape(a.budget, {x.pages.n_queries}),
             op, ": blocks ", a.blocks.str(), " and budget ", a.budget.str());
      x.blocks = a.blocks.as<int32_t>(), x.budget = a.budget.as<int32_t>();
      x.max_blocks = static_cast<int>(a.blocks.shape[2]), x.block = a.block;
    }
    if (a.count_pages) {
      expect(!a.blocks && is_shape(a.count_pages, {a.k_pages.shape[0], x.pages.kv_heads, kPageSlots}) &&
                 a.count_pages.contiguous(),
             op, ": count_pages ", a.count_pages.str(), a.blocks ? " together with block lists" : "");
      x.counts = a.count_pages.as<float>();
    }
    if (n == 0 || x.pages.n_queries == 0) return;
    x.o = a.o.as<T>(), x.q = a.q.as<T>(), x.heads = static_cast<int>(heads);
    x.group = static_cast<int>(heads / x.pages.kv_heads), x.scale = a.scale;
    // The entries have at most n rows together, and each wastes at most one tile.
    const int64_t tiles = n * x.group / kRows32 + x.pages.n_queries;
    const int d = x.pages.d;
    launch(op,
           d <= 64    ? attend<T, 2>
           : d <= 128 ? attend<T, 4>
                      : attend<T, 8>,
           {.grid = dim3(blocks(op, tiles, 1), static_cast<unsigned>(x.pages.kv_heads)),
            .block = kThreads,
            .smem = smem32(d)},
           stream, x);
  });
}

void kv_copy_pages(const KvCopyPages& a, Stream stream) {
  const char* op = "kv_copy_pages";
  expect(a.pairs.rank == 2 && a.pairs.shape[1] == 2 && a.pairs.contiguous(), op, ": pairs ", a.pairs.str());
  if (a.pairs.shape[0] == 0) return;
  for (const Tensor& t : {a.k_pages, a.v_pages, a.pos_pages, a.mass_pages, a.count_pages}) {
    if (!t) continue;
    const int64_t bytes = t.stride[0] * static_cast<int64_t>(dtype_size(t.dtype));
    expect(t.contiguous() && t.shape[0] == a.k_pages.shape[0] && bytes % 4 == 0, op, ": an array of pages is ", t.str(),
           ", k_pages ", a.k_pages.str());
    launch(op, copy_pages, {.grid = blocks(op, a.pairs.shape[0], 1), .block = kThreads}, stream,
           static_cast<uint32_t*>(t.data), bytes / 4, a.pairs.as<int32_t>());
  }
}

}  // namespace pare::PARE_CUDA
