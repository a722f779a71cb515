// The attention that slots receive (AttnPaged::mass_pages), after attn_paged: mass[s] += sum over rows of p_s.  In bf16
// only of entries of several rows; attn_paged adds up the mass of rows alone (paged.cu).
//
// k_pages [pages, K, D, 16], q [N, H, D] act, D <= 256, at most 16 query heads a key head; mass_pages [pages, K, 16]
// f32.  The mass of slots past `first` is added to, that of new slots overwritten; nothing else is.
//
//                       slots, a tile of 256 ->
//                       +--------+--------+-...      pass 1: maximum and sum of each row, half a warp each
//   16 query rows of    |        |        |          pass 2: products again, weights; a thread adds the column of a
//   a key head's group  |        |        |                  slot to its mass
//                       +--------+--------+-...
//
// Order: AttnPaged.  f32 has the bits of the `cpu` table; in bf16 products are on tensor cores, all else in f32.  One
// block has a key head of an entry, and one thread continues the sum of a slot in mass_pages.
//
// Bytes: K twice for every 16 rows, from L2 but for the first.  Limited by latency, in f32 by fused multiply-adds,
// 2 * H * D * rows * slots a pass: few blocks, one a key head and sequence, walk a long prefill.
#include "compression.cuh"
#include "softmax.cuh"

namespace pare::PARE_CUDA {

namespace {

template <class T>
struct MassArgs {
  float* mass_pages;
  const T *q, *k_pages;
  const int32_t* page_table;
  const PagedRow* queries;
  const int32_t* first;
  int64_t q_stride, table_stride;
  int kv_heads, head_dim, group;
  float scale;
};

template <class T>
constexpr int kBlock = sizeof(T) == 2 ? kBlock16 : kAttnBlock;  // slots of a block of the online softmax
template <class T>
using Worth = float[kQueries][kSlots / kBlock<T>];  // of a weight of a row in each block of a tile

// The online softmax of up to 16 rows over the slots [0, end(row)), where end ascends with the row, a row a half warp,
// in two passes: the first gives the maximum and the sum of the row, the second leaves the weights of a tile in t.z,
// their factors in `worth`, and calls add(slot).
template <class T, class End, class Add>
__device__ __forceinline__ void weigh_rows(const MassArgs<T>& a, const QueryTile<T>& t, const HeadPages& pages,
                                           int count, int last, Worth<T>& worth, End end_of, Add add) {
  constexpr bool k16 = sizeof(T) == 2;
  constexpr int kOwn = kBlock<T> / kLanes;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, end = row < count ? end_of(row) : 0;
  float* const z = t.z + row * QueryTile<T>::kColumnStep;
  const Softmax softmax{a.scale * kLog2E};
  float top = -INFINITY, sum = 0;  // of the row; in bf16 lane 0 has the sum
  for (int pass = 0; pass < 2; pass++) {
    float so_far = -INFINITY, part = 0;  // of the cut; part: the sum of each of four lanes
    for (int begin = 0; begin < last; begin += kSlots) {
      t.multiply(count, last - begin, 1, [&](int j) {
        return Key<T>{key_at(a.k_pages, pages, begin + j, t.head_dim), 0};
      });
      for (int block = 0; block < kSlots && begin + block < last; block += kBlock<T>) {
        if (k16 && ends_cut((begin + block) / kBlock16)) {
          if (pass == 0) merge_cut(top, sum, so_far, quad_sum(part));
          so_far = -INFINITY;
          part = 0;
        }
        const int from = block + lane, visible = end - begin;
        float x[kOwn], next = -INFINITY;
        for (int i = 0; i < kOwn; i++) {
          x[i] = from + i * kLanes < visible ? z[from + i * kLanes] : -INFINITY;
          next = fmaxf(next, softmax.score(x[i]));
        }
        next = fmaxf(so_far, lanes_max(next));
        for (int i = 0; i < kOwn; i++) {
          const float weight = k16 ? softmax.cubic(x[i], next) : softmax.weight(x[i], next);
          x[i] = from + i * kLanes < visible ? weight : 0.f;
          if (k16 || pass == 1) z[from + i * kLanes] = x[i];
        }
        const float fix = next > so_far ? exp2_f32(so_far - next) : 1.f;
        if (pass == 0 && k16) {
          __syncwarp();
          float more = 0;
          if (lane < 4)
            for (int j = block + 2 * lane; j < block + kBlock<T>; j += 8) {
              const float2 two = *reinterpret_cast<const float2*>(z + j);
              more += two.x;
              more += two.y;
            }
          part = part * fix + more;
        } else if (pass == 0) {
          float tree = 0;
          for (float weight : x) tree += weight;
          tree = lanes_sum(tree);
          sum = begin + block ? fmaf(sum, fix, tree) : tree;
        } else if (lane == 0) {
          worth[row][block / kBlock<T>] = k16 ? exp2_f32(next - top) * (1.f / sum) : exp2_f32(next - top) / sum;
        }
        so_far = next;
      }
      if (pass == 0) continue;
      __syncthreads();
      const int slot = begin + static_cast<int>(threadIdx.x);
      if (slot < last) add(slot);
    }
    if (pass == 1) return;
    if (k16)
      merge_cut(top, sum, so_far, quad_sum(part));
    else
      top = so_far;
  }
}

// Adds up the masses of the slots of an entry, blockIdx.x, for a key head, blockIdx.y.
template <class T>
__global__ void __launch_bounds__(kThreads, kTileBlocks) weigh_slots(const MassArgs<T> a) {
  __shared__ Worth<T> worth;
  const PagedRow entry = a.queries[blockIdx.x];
  if (sizeof(T) == 2 && entry.rows == 1) return;
  const int old = entry.slots - entry.rows, group = a.group, h = blockIdx.y, first = a.first[blockIdx.x];
  const HeadPages pages{a.page_table + entry.table_row * a.table_stride, a.kv_heads, h};
  const QueryTile<T> t(a.head_dim);
  for (int row = 0; row < entry.rows * group; row += kQueries) {  // in the order (own row, head of the group)
    const int count = min(kQueries, entry.rows * group - row);
    t.load_rows([&](int i) {
      const int own = entry.row + (row + i) / group;
      return Query<T>{i < count ? a.q + own * a.q_stride + (h * group + (row + i) % group) * a.head_dim : nullptr, 0};
    });
    const auto end_of = [&](int i) { return old + (row + i) / group + 1; };
    weigh_rows(a, t, pages, count, end_of(count - 1), worth, end_of, [&](int slot) {
      if (slot < first) return;
      const bool fresh = slot >= old && (slot - old) * group >= row;  // no row before this tile saw it
      float* const mass = a.mass_pages + pages.at(slot);
      float sum = fresh ? 0.f : *mass;
      for (int i = 0; i < count; i++)
        if (slot < end_of(i))
          sum = fmaf(t.z[i * QueryTile<T>::kColumnStep + threadIdx.x], worth[i][threadIdx.x / kBlock<T>], sum);
      *mass = sum;
    });
  }
}

}  // namespace

void add_mass(const AttnPaged& a, Stream stream) {
  const char* op = "attn_paged";
  const int64_t n = a.queries.shape[0], kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  if (n == 0 || (a.q.dtype == DType::bf16 && a.q.shape[0] <= n)) return;  // rows alone
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    const MassArgs<T> args{.mass_pages = a.mass_pages.as<float>(),
                           .q = a.q.as<T>(),
                           .k_pages = a.k_pages.as<T>(),
                           .page_table = a.page_table.as<int32_t>(),
                           .queries = reinterpret_cast<const PagedRow*>(a.queries.as<int32_t>()),
                           .first = a.first.as<int32_t>(),
                           .q_stride = a.q.stride[0],
                           .table_stride = a.page_table.stride[0],
                           .kv_heads = static_cast<int>(kv_heads),
                           .head_dim = static_cast<int>(head_dim),
                           .group = group_of(op, a.q.shape[1], kv_heads),
                           .scale = a.scale};
    launch(op, weigh_slots<T>,
           {.grid = dim3(blocks(op, n, 1), static_cast<unsigned>(kv_heads)),
            .block = kThreads,
            .smem = QueryTile<T>::bytes(head_dim)},
           stream, args);
  });
}

}  // namespace pare::PARE_CUDA
