// Attention of packed sequences, backward (AttnBwd); rows may be limited to the blocks that they list.
//   p = exp(scale * q.k) / 2^lse;  dv += p do;  ds = p (do.v - do.o) scale;  dq = ds k;  dk += ds q
//
// dq, q, o, d_o [N, H, D]; dk, dv, k, v [N, K, D]; dpk, dpv, pk, pv [P, K, D]; lse [N, H].  dq is overwritten in the
// rows of segments; dk, dv, dpk, dpv are added to in the rows that a segment sees; no other row is touched.  D <= 256;
// bf16 also requires D >= 2.  dpk and dpv are dk and dv themselves, or lie apart from them.
//
// Three kernels.  row_sums leaves do.o in the first four bytes of each row of dq, until query_gradients overwrites it.
// In the other two a block owns a tile of results:
//
//   key_gradients, of a key head                      query_gradients, of a head
//              rows, for each head of the group ->                slots ->
//             +------+------+-...                               +------+------+-...-+----+
//   64 keys   |      |      |      dv += p do         64 rows   |      |      |     |\   |     dq += ds k
//             |      |      |      dk += ds q                   |      |      |     | \  |
//             +------+------+-...                               +------+------+-...-+----+
//
// (bf16 by mma.sync, 16 keys or rows a warp.  f32: 32 keys, 16 rows.)
//
// Order: a row of dk and dv goes over the segments in list order, then the heads of its group, then the rows of the
// segment, ascending; a row of dq over its slots, ascending.  One owner for each sum costs seven matrix products in
// place of five.  (With wgmma, blocks own parts of dk and dv, of tiles of slots in place of rows, and add them in turn:
// the same order, whichever blocks have them.)  f32: the chains of list.h, with the bits of the `cpu` table.
//
// bf16: tensor cores with f32 accumulators; p and ds / scale are rounded to bf16 for their products.  A row of dk and
// dv is a sum of parts (list.h).  `work` holds it while the next part is computed, and one rounding adds the sum to the
// row.  k-steps of 16 begin at slot 0, or at the first own row of a segment, and hidden pairs add nothing: the bits of
// a row of dq depend on its sequence only, those of dk and dv on the segments that see the row.  Inputs that are not
// finite reach pairs of their tile that do not see them.  key_gradients_bf16 and query_gradients_bf16 below have the
// bits of those in attention_bwd_wgmma.cuh, for compute capability 9.0.
//
// Lists of blocks: pairs that are not listed are hidden.  In bf16 a tile of query_gradients_listed goes over the pages
// that any of its rows lists (attention_lists.cuh), and key_gradients_bf16 over steps of 16 rows of which any lists a
// key of the tile: the other steps would add zeros.  f32 skips tiles without a visible pair.
//
// Bytes: q and d_o once for each 64 keys, k and v once for each 64 query rows (128 with wgmma), mostly from L2; with
// wgmma also the f32 sums of dk and dv once for each part.  Limited by the tensor cores and the exponentials, which
// overlap only with wgmma; f32, for comparisons with the CPU, by shared-memory bandwidth.  By mma.sync a prefix that
// many segments share is the longest chain of work; with wgmma the parts of its rows wait for one another.  With
// `lists` every tile of keys searches the lists of all segments.
#include "attention_bwd_wgmma.cuh"
#include "attention_lists.cuh"
#include "runtime/machine.cuh"

namespace pare::PARE_CUDA {

namespace {

// 16 threads for a row: its chains, and the tree of a row sum.  In bf16 turns begin with 0.
template <class T>
__global__ void __launch_bounds__(kThreads) row_sums(const Args<T> a) {
  if constexpr (sizeof(T) == 2) {
    const PartTurns parts(a);
    const int64_t blocks = int64_t{gridDim.x} * gridDim.y, block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    for (int64_t i = block * kThreads + threadIdx.x; i < parts.count; i += blocks * kThreads) parts.tickets[i] = 0;
  }
  const Tile t = find_tile<kThreads>(a.x.segments, a.x.n_segments, blockIdx.x);
  const int rows = min(kThreads, t.len - t.first), head_dim = a.x.head_dim, column = blockIdx.y * head_dim,
            lane = threadIdx.x % 16;
  for (int first = 0; first < rows; first += kThreads / 16) {
    const int r = first + threadIdx.x / 16, row = t.row + t.first + min(r, rows - 1);
    const T *x = a.d_o.row(row) + column, *y = a.o.row(row) + column;
    float sum = 0;
    for (int c = lane; c < head_dim; c += 16) sum = fmaf(to_float(x[c]), to_float(y[c]), sum);
    for (int o = 8; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
    if (r < rows && lane == 0) put_delta(a.dq.row(row) + column, sum);
  }
}

// ---- f32: 16 query rows against 32 keys at a time

constexpr int kQueries32 = 16, kKeys32 = 32, kEach32 = kQueries32 / kWarps;

struct Tiles32 {
  float *k, *v;        // [32][D + 1]
  float *q, *d_o;      // [16][D]
  float *p, *ds;       // [16][32], 0 where hidden
  float *lse, *delta;  // [16]
};
constexpr size_t smem_tiles32(int head_dim) {
  return sizeof(float) * (2 * kKeys32 * (head_dim + 1) + 2 * kQueries32 * (head_dim + kKeys32 + 1));
}
__device__ Tiles32 tiles32(int head_dim) {
  float *k = dynamic_smem<float>(), *v = k + kKeys32 * (head_dim + 1), *q = v + kKeys32 * (head_dim + 1),
        *d_o = q + kQueries32 * head_dim;
  float *p = d_o + kQueries32 * head_dim, *ds = p + kQueries32 * kKeys32, *lse = ds + kQueries32 * kKeys32;
  return {k, v, q, d_o, p, ds, lse, lse + kQueries32};
}

// Own rows [row, row + n) of head `head`.
__device__ void load_queries32(const Tiles32& s, const Args<float>& a, int64_t row, int n, int head) {
  const int head_dim = a.x.head_dim;
  for (int i = threadIdx.x; i < n * head_dim; i += kThreads) {
    s.q[i] = a.x.q.row(row + i / head_dim)[head * head_dim + i % head_dim];
    s.d_o[i] = a.d_o.row(row + i / head_dim)[head * head_dim + i % head_dim];
  }
  if (const int i = threadIdx.x; i < n) {
    s.lse[i] = a.lse[(row + i) * a.x.heads + head];
    s.delta[i] = get_delta(a.dq.row(row + i) + head * head_dim);
  }
}

// p and ds of `rows` query rows; warp w has the rows w * kEach32 + [0, kEach32), lane l key l.
template <class Visible>
__device__ __forceinline__ void weigh32(const Tiles32& s, const Packed<float>& x, int rows, Visible visible) {
  const int lane = threadIdx.x % 32, head_dim = x.head_dim;
  for (int r = 0; r < kEach32; r++) {
    const int row = threadIdx.x / 32 * kEach32 + r;
    if (row >= rows) continue;
    float p = 0, ds = 0;
    if (visible(row, lane)) {
      const float *q = s.q + row * head_dim, *d_o = s.d_o + row * head_dim, *k = s.k + lane * (head_dim + 1),
                  *v = s.v + lane * (head_dim + 1);
      float score = 0, product = 0;
      for (int c = 0; c < head_dim; c++) {
        score = fmaf(q[c], k[c], score);
        product = fmaf(d_o[c], v[c], product);
      }
      p = exp2_f32(fmaf(score, x.score_scale, -s.lse[row]));
      ds = p * (product - s.delta[row]) * x.scale;
    }
    s.p[row * kKeys32 + lane] = p;
    s.ds[row * kKeys32 + lane] = ds;
  }
}

// kColumns: ceil(D / 32), columns of dk and dv per lane.
template <int kColumns, bool kBlocks>
__global__ void __launch_bounds__(kThreads) key_gradients_f32(const Args<float> a) {
  constexpr int kKeysOfWarp = kKeys32 / kWarps;
  __shared__ int listed[kKeys32];
  __shared__ uint64_t masks[kQueries32];
  const Packed<float>& x = a.x;
  const KeyTile t = key_tile<kKeys32>(a, blockIdx.x);
  const int head_dim = x.head_dim, kv = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tiles32 s = tiles32(head_dim);
  for (int i = threadIdx.x; i < t.rows * head_dim; i += kThreads) {
    const int at = i / head_dim * (head_dim + 1) + i % head_dim, row = t.first + i / head_dim,
              c = kv * head_dim + i % head_dim;
    s.k[at] = (t.own ? x.k : x.pk).row(row)[c];
    s.v[at] = (t.own ? x.v : x.pv).row(row)[c];
  }
  float dk[kKeysOfWarp][kColumns], dv[kKeysOfWarp][kColumns];
  const auto for_elements = [&](unsigned keys, auto f) {  // of the warp's keys that are in `keys`, in registers
#pragma unroll
    for (int i = 0; i < kKeysOfWarp; i++)
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        const int key = warp * kKeysOfWarp + i, c = lane + 32 * j;
        if (keys >> key & 1 && c < head_dim)
          f(dk[i][j], dv[i][j], (t.own ? a.dk : a.dpk).row(t.first + key) + kv * head_dim + c,
            (t.own ? a.dv : a.dpv).row(t.first + key) + kv * head_dim + c, key, c);
      }
  };
  unsigned touched = 0;  // bit k: key k of the tile is seen, and its sums so far are in registers
  for_segments<kKeys32>(a, t, listed, [&](const SegmentRow& g, bool parents) {
    const int first = first_query(t, g, lane, x.lists ? listed : nullptr);
    const unsigned seen = __ballot_sync(kAllLanes, first != kNobody);
    for_elements(seen & ~touched, [](float& k, float& v, float* at_k, float* at_v, int, int) {
      k = *at_k;
      v = *at_v;
    });
    touched |= seen;
    const int begin = parents ? 0 : max(0, t.first - g.row);
    for (int head = kv * x.group; head < (kv + 1) * x.group; head++)
      for (int i = begin; i < g.len; i += kQueries32) {
        const int rows = min(kQueries32, g.len - i);
        if (kBlocks &&
            !fill_masks<kQueries32>(masks, [&](int r) { return r < rows ? keys_read(a.blocks, t, g, kv, i + r) : 0; }))
          continue;
        __syncthreads();  // everyone is done with the previous rows
        load_queries32(s, a, g.row + i, rows, head);
        __syncthreads();
        weigh32(s, x, rows,
                [&](int row, int key) { return i + row >= first && (!kBlocks || (masks[row] >> key & 1)); });
        __syncthreads();
        for (int r = 0; r < rows; r++)
          for_elements(seen, [&](float& k, float& v, float*, float*, int key, int c) {
            v = fmaf(s.p[r * kKeys32 + key], s.d_o[r * head_dim + c], v);
            k = fmaf(s.ds[r * kKeys32 + key], s.q[r * head_dim + c], k);
          });
      }
  });
  for_elements(touched, [](float& k, float& v, float* at_k, float* at_v, int, int) {
    *at_k = k;
    *at_v = v;
  });
}

template <int kColumns, bool kBlocks>
__global__ void __launch_bounds__(kThreads) query_gradients_f32(const Args<float> a) {
  __shared__ uint64_t masks[kQueries32];
  const Packed<float>& x = a.x;
  const HeadTile<kQueries32> t(x);
  if (t.len == 0) return;
  const int head_dim = x.head_dim, head = t.head, kv = t.kv, lane = threadIdx.x % 32;
  const int rows = min(kQueries32, t.len - t.first), slots = t.parent_len + t.first + rows;
  const Tiles32 s = tiles32(head_dim);
  load_queries32(s, a, t.row + t.first, rows, head);
  float dq[kEach32][kColumns] = {};
  for (int begin = 0; begin < slots; begin += kKeys32) {
    if (kBlocks && !fill_masks<kQueries32>(masks, [&](int r) -> uint64_t {
          const int i = t.first + r;
          return r < rows ? slots_read(a.blocks, t.row + i, kv, t.parent_len + i + 1, begin, 0, kKeys32) : 0;
        }))
      continue;
    __syncthreads();  // everyone is done with the previous slots
    for (int i = threadIdx.x; i < min(kKeys32, slots - begin) * head_dim; i += kThreads) {
      const int slot = i / head_dim, c = i % head_dim;
      s.k[slot * (head_dim + 1) + c] = x.key(t, kv, begin + slot)[c];
      s.v[slot * (head_dim + 1) + c] = x.value(t, kv, begin + slot)[c];
    }
    __syncthreads();
    weigh32(s, x, rows, [&](int row, int slot) {
      return begin + slot <= t.parent_len + t.first + row && (!kBlocks || (masks[row] >> slot & 1));
    });
    __syncwarp();  // a warp reads its own rows only
#pragma unroll
    for (int r = 0; r < kEach32; r++) {
      const int row = threadIdx.x / 32 * kEach32 + r, end = min(kKeys32, t.parent_len + t.first + row + 1 - begin);
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        const int c = lane + 32 * j;
        if (row < rows && c < head_dim)
          for (int slot = 0; slot < end; slot++)
            dq[r][j] = fmaf(s.ds[row * kKeys32 + slot], s.k[slot * (head_dim + 1) + c], dq[r][j]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kEach32; r++) {
    const int row = threadIdx.x / 32 * kEach32 + r;
#pragma unroll
    for (int j = 0; j < kColumns; j++)
      if (row < rows && lane + 32 * j < head_dim)
        a.dq.row(t.row + t.first + row)[head * head_dim + lane + 32 * j] = dq[r][j];
  }
}

// ---- bf16: four warps, each with 16 rows of the results; queries or keys arrive in two stages

constexpr int kOwned16 = 64;  // keys of a block

// Computes the pieces next(0, .), next(that + 1, .), ... below `count`.  next(i, stage) starts loading the first piece
// from i on that has anything to compute, and returns its number.
template <class Next, class Compute>
__device__ __forceinline__ void two_stages(int count, Next next, Compute compute) {
  int stage = 0;
  for (int i = next(0, 0); i < count; stage ^= 1) {
    const int following = next(i + 1, stage ^ 1);
    cp_async_wait<1>();
    __syncthreads();
    compute(i, stage);
    __syncthreads();  // everyone is done with this stage before the piece after next lands in it
    i = following;
  }
}

template <int kD>
constexpr int kQueries16 = kD <= 64 ? 64 : 32;  // query rows of a stage
template <int kD>
constexpr int kColumns16 = kD < 128 ? kD : 128;  // columns of dk and dv of a block
template <int kD>
constexpr size_t kKeySmem = (2 * kOwned16 + 4 * kQueries16<kD>)*kD * sizeof(bf16);

// blockIdx.y is the key head, blockIdx.z a part of the columns.
template <int kD, bool kBlocks>
__global__ void __launch_bounds__(kThreads) key_gradients_bf16(const Args<bf16> a) {
  constexpr int kQueries = kQueries16<kD>, kColumns = kColumns16<kD>;
  constexpr int kWide = kBlocks ? 16 : kQueries;  // queries of a product: a warp leaves out steps of blocks
  using Pieces = std::conditional_t<kBlocks, ListedPieces<kQueries>, AllPieces<kQueries>>;
  __shared__ typename Pieces::Memory memory;
  __shared__ int listed[kOwned16];
  __shared__ uint64_t masks[2][kBlocks ? kQueries : 1];
  __shared__ float lse[2][kQueries], delta[2][kQueries];
  const Packed<bf16>& x = a.x;
  const KeyTile t = key_tile<kOwned16>(a, blockIdx.x);
  const int head_dim = x.head_dim, kv = blockIdx.y, own = threadIdx.x / 32 * 16,
            column = kColumns < kD ? blockIdx.z * kColumns : 0;
  bf16* smem = dynamic_smem<bf16>();
  const SharedTile<kD> k{smem}, v{smem + kOwned16 * kD};
  const auto q = [&](int stage) { return SharedTile<kD>{smem + (2 * kOwned16 + stage * kQueries) * kD}; };
  const auto d_o = [&](int stage) { return q(2 + stage); };
  load_tile<kOwned16>(k, x.k.p, t.rows, head_dim, a.vector,
                      [&](int r) { return (t.own ? x.k : x.pk).row(t.first + r) + kv * head_dim; });
  load_tile<kOwned16>(v, x.k.p, t.rows, head_dim, a.vector,
                      [&](int r) { return (t.own ? x.v : x.pv).row(t.first + r) + kv * head_dim; });
  cp_async_commit();
  Accumulator<kColumns> dk = {}, dv = {};
  PartSums<kColumns, kThreads> before(a.work, (int64_t{blockIdx.x} * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z,
                                      threadIdx.x);
  bool some = false;  // of a part
  PerRow<bool> touched = {};
  for_segments<kOwned16>(a, t, listed, [&](const SegmentRow& g, bool parents) {
    PerRow<int> first;
    for_rows([&](LaneRow row) {
      first[row] = first_query(t, g, own + row, x.lists ? listed : nullptr);
      touched[row] |= first[row] != kNobody;
    });
    Pieces pieces(a, t, g, kv, first_piece<kQueries>(t, g, parents), memory);
    typename Pieces::Piece now, coming{};
    int last_part = -1;
    const auto next = [&](int i, int stage) {
      now = coming;
      const bool left = pieces.take(coming);
      if (left) {
        const int head = kv * x.group + coming.head;
        const auto load = [&](SharedTile<kD> to, const Matrix<const bf16>& from) {
          load_tile<kQueries>(to, x.k.p, kQueries, head_dim, a.vector, [&](int r) {
            const int i = coming.own(r);
            return i < g.len ? from.row(g.row + i) + head * head_dim : nullptr;
          });
        };
        load(q(stage), x.q);
        load(d_o(stage), a.d_o);
        if (const int r = threadIdx.x; r < kQueries) {  // rows that are absent have q = do = 0
          const int i = coming.own(r);
          const int64_t row = g.row + i;
          lse[stage][r] = i < g.len ? a.lse[row * x.heads + head] : 0.f;
          delta[stage][r] = i < g.len ? get_delta(a.dq.row(row) + head * head_dim) : 0.f;
          if constexpr (kBlocks) masks[stage][r] = i < g.len ? keys_read(a.blocks, t, g, kv, i) : 0;
        }
      }
      cp_async_commit();
      return left ? i : INT_MAX;
    };
    two_stages(INT_MAX, next, [&](int, int stage) {
      if (some && now.part != last_part) before.end_part(dk, dv);
      some = true;
      last_part = now.part;
      const auto add = [&](int n) {
        const int first_of = n * kWide;
        if constexpr (kBlocks) {  // keys of the warp that a row of the step lists
          const uint64_t listed = masks[stage][first_of + threadIdx.x % kWide] >> own;
          if (!__any_sync(kAllLanes, (listed & 0xffff) != 0)) return;
        }
        const auto step = [&](SharedTile<kD> rows) { return SharedTile<kD>{rows.p + first_of * kD}; };
        Accumulator<kWide> p = {}, ds = {};
        add_dots(p, k, own, step(q(stage)));
        dots_to_p(p, lse[stage] + first_of, x.softmax(), [&](LaneRow row, int query) {
          const bool visible = now.own(first_of) + query >= first[row];
          return visible && (!kBlocks || (masks[stage][first_of + query] >> (own + row) & 1));
        });
        add_weighted(dv, p, step(d_o(stage)), column);
        add_dots(ds, v, own, step(d_o(stage)));
        dots_to_ds(ds, p, delta[stage] + first_of);
        add_weighted(dk, ds, step(q(stage)), column);
      };
#pragma unroll
      for (int n = 0; n < kQueries / kWide; n++) add(n);
    });
  });
  cp_async_wait<0>();
  before.add(dk, dv);
  PerRow<KeyGradients> to = {};
  for_rows([&](LaneRow row) {
    if (touched[row]) to[row] = gradients_of(a, t.own, t.first + own + row, kv);
  });
  add_key_gradients(a, to, column, dk, dv);
}

// 64 query rows of a block, and two stages of kCount keys and values.
template <int kD, int kCount>
struct QueryTiles {
  static constexpr size_t kBytes = (2 * kRows16 + 4 * kCount) * kD * sizeof(bf16);
  bf16* const smem = dynamic_smem<bf16>();
  const SharedTile<kD> q{smem}, d_o{smem + kRows16 * kD};
  __device__ __forceinline__ SharedTile<kD> k(int stage) const { return {smem + (2 * kRows16 + stage * kCount) * kD}; }
  __device__ __forceinline__ SharedTile<kD> v(int stage) const { return k(2 + stage); }

  // at(r): QueryAt of row r.
  template <class At>
  __device__ __forceinline__ void load_queries(const Args<bf16>& a, At at) const {
    const auto load = [&](SharedTile<kD> to, const Matrix<const bf16>& from) {
      load_tile<kRows16>(to, a.x.k.p, kRows16, a.x.head_dim, a.vector, [&](int r) {
        const QueryAt q = at(r);
        return q.row < 0 ? nullptr : from.row(q.row) + q.head * a.x.head_dim;
      });
    };
    load(q, a.x.q);
    load(d_o, a.d_o);
  }
  // Adds the terms of a stage's slots to dq of the warp's 16 rows, from `own` on.  visible(row, slot).
  template <class Visible>
  __device__ __forceinline__ void add(Accumulator<kD>& dq, int own, int stage, QueryTerms& terms,
                                      const Softmax& softmax, Visible visible) const {
    Accumulator<kCount> p = {}, ds = {};
    add_dots(p, q, own, k(stage));
    add_dots(ds, d_o, own, v(stage));
    ds.for_each(p, [&](LaneRow row, int slot, float& z, float dot) {
      const float w = softmax.cubic(dot, terms.lse[row]) * (z - terms.delta[row]);
      z = visible(row, slot) ? w : 0.f;
    });
    add_weighted(dq, ds, k(stage));
  }
};

template <int kD>
constexpr int kSlots16 = kD <= 128 ? 64 : 32;  // slots of a stage

template <int kD>
__global__ void __launch_bounds__(kThreads) query_gradients_bf16(const Args<bf16> a) {
  constexpr int kCount = kSlots16<kD>;
  const Packed<bf16>& x = a.x;
  const HeadTile<kRows16> t(x);
  if (t.len == 0) return;
  const int head_dim = x.head_dim, kv = t.kv, own = threadIdx.x / 32 * 16;
  const int slots = t.parent_len + min(t.first + kRows16, t.len);
  const QueryTiles<kD, kCount> s;
  s.load_queries(a, own_rows(t, t.first, t.head));
  QueryTerms terms(a, own_rows(t, t.first + own, t.head));
  const int pieces = ceil_div(slots, kCount);
  const auto next = [&](int piece, int stage) {
    if (piece < pieces) {
      const int begin = piece * kCount;
      load_tile<kCount>(s.k(stage), x.k.p, slots - begin, head_dim, a.vector,
                        [&](int r) { return x.key(t, kv, begin + r); });
      load_tile<kCount>(s.v(stage), x.k.p, slots - begin, head_dim, a.vector,
                        [&](int r) { return x.value(t, kv, begin + r); });
    }
    cp_async_commit();
    return piece;
  };
  Accumulator<kD> dq = {};
  two_stages(pieces, next, [&](int piece, int stage) {
    s.add(dq, own, stage, terms, x.softmax(),
          [&](LaneRow row, int slot) { return piece * kCount + slot <= t.parent_len + t.first + own + row; });
  });
  cp_async_wait<0>();
  write_query_gradients(a, own_rows(t, t.first + own, t.head), dq);
}

constexpr int kListedSlots = 32;  // of a stage: fewer make room for more blocks of threads

// The same over the pages that the rows of a tile list.
template <int kD>
__global__ void __launch_bounds__(kThreads) query_gradients_listed(const Args<bf16> a) {
  __shared__ ListMemory memory;
  const Packed<bf16>& x = a.x;
  const GroupTile t(x);
  if (t.len == 0) return;
  const int head_dim = x.head_dim, own = threadIdx.x / 32 * 16;
  const QueryTiles<kD, kListedSlots> s;
  const auto at = [&](int r) { return QueryAt{r < t.rows ? t.row_of(r) : -1, t.head(r)}; };
  const auto mine = [&](int r) { return at(own + r); };
  s.load_queries(a, at);
  QueryTerms terms(a, mine);
  ListedPages<true> pages(t, a.blocks, memory);
  PerRow<Listed> listed = {}, coming = {};
  const auto next = [&](int piece, int stage) {
    listed = coming;
    const bool left = pages.left();
    if (left) {
      const int column = t.kv * head_dim;
      pages.load<kListedSlots>(s.k(stage), SlotRows(x.k, x.pk, t, column), head_dim, a.vector);
      pages.load<kListedSlots>(s.v(stage), SlotRows(x.v, x.pv, t, column), head_dim, a.vector);
      coming = pages.take<kListedSlots>(own);
    }
    cp_async_commit();
    return left ? piece : INT_MAX;
  };
  Accumulator<kD> dq = {};
  two_stages(INT_MAX, next, [&](int, int stage) {
    if (__any_sync(kAllLanes, (listed.v[0] | listed.v[1]) != 0))  // some row of the warp
      s.add(dq, own, stage, terms, x.softmax(), [&](LaneRow row, int slot) { return counts(listed[row], slot); });
  });
  cp_async_wait<0>();
  write_query_gradients(a, mine, dq);
}

// ---- launchers

struct Grids {
  dim3 rows, keys, queries;
};

template <bool kBlocks>
void run(const char* op, const Args<float>& a, const Grids& g, Stream stream) {
  const int head_dim = a.x.head_dim;
  const size_t smem = smem_tiles32(head_dim);
  launch(op,
         head_dim <= 64    ? key_gradients_f32<2, kBlocks>
         : head_dim <= 128 ? key_gradients_f32<4, kBlocks>
                           : key_gradients_f32<8, kBlocks>,
         {.grid = g.keys, .block = kThreads, .smem = smem}, stream, a);
  launch(op,
         head_dim <= 64    ? query_gradients_f32<2, kBlocks>
         : head_dim <= 128 ? query_gradients_f32<4, kBlocks>
                           : query_gradients_f32<8, kBlocks>,
         {.grid = g.queries, .block = kThreads, .smem = smem}, stream, a);
}

template <int kD, bool kBlocks>
void run_tiles(const char* op, const Args<bf16>& a, const Grids& g, Stream stream) {
  const dim3 keys(g.keys.x, g.keys.y, blocks(op, a.x.head_dim, kColumns16<kD>));
  launch(op, key_gradients_bf16<kD, kBlocks>, {.grid = keys, .block = kThreads, .smem = kKeySmem<kD>}, stream, a);
  if constexpr (kBlocks)
    launch(op, query_gradients_listed<kD>,
           {.grid = group_grid(op, a.x, a.rows), .block = kThreads, .smem = QueryTiles<kD, kListedSlots>::kBytes},
           stream, a);
  else
    launch(op, query_gradients_bf16<kD>,
           {.grid = g.queries, .block = kThreads, .smem = QueryTiles<kD, kSlots16<kD>>::kBytes}, stream, a);
}
template <bool kBlocks>
void run(const char* op, const Args<bf16>& a, const Grids& g, Stream stream) {
  if (!kBlocks && takes_wgmma(true) && suits_wgmma(a)) {
    a.x.head_dim <= 64 ? launch_wgmma_gradients<64>(op, a, stream) : launch_wgmma_gradients<128>(op, a, stream);
    return;
  }
  a.x.head_dim <= 64    ? run_tiles<64, kBlocks>(op, a, g, stream)
  : a.x.head_dim <= 128 ? run_tiles<128, kBlocks>(op, a, g, stream)
                        : run_tiles<256, kBlocks>(op, a, g, stream);
}

// Do the rows of x and y lie in different memory?
bool apart(const Tensor& x, const Tensor& y) {
  const auto begin = [](const Tensor& t) { return static_cast<const char*>(t.data); };
  const auto end = [&](const Tensor& t) { return begin(t) + t.shape[0] * t.stride[0] * int64_t(dtype_size(t.dtype)); };
  return end(x) <= begin(y) || end(y) <= begin(x);
}

template <class T>
Args<T> arguments(const char* op, const AttnBwd& a) {
  Args<T> x{};
  x.x = packed<T>(op, a);
  const int64_t n = a.q.shape[0], parents = a.pk.shape[0];
  expect(sizeof(T) == 4 || x.x.head_dim >= 2, op, ": head_dim 1 in bf16: a row of dq has no room for do.o");
  x.d_o = matrix<const T>(a.d_o);
  x.o = matrix<const T>(a.o);
  x.dq = matrix<T>(a.dq);
  x.dk = matrix<T>(a.dk);
  x.dv = matrix<T>(a.dv);
  x.dpk = matrix<T>(a.dpk);
  x.dpv = matrix<T>(a.dpv);
  x.lse = a.lse.as<float>();
  x.rows = static_cast<int>(n);
  x.parent_rows = static_cast<int>(parents);
  const auto same = [](const Tensor& x, const Tensor& y) {
    return x.data == y.data && x.shape == y.shape && x.stride == y.stride;
  };
  x.one = same(a.dpk, a.dk);
  if (x.one)
    expect(same(a.dpv, a.dv) && same(a.pk, a.k) && same(a.pv, a.v), op,
           ": dpk is dk, but dpv, pk, pv are not dv, k, v");
  else
    expect(apart(a.dpk, a.dk) && apart(a.dpv, a.dv), op, ": dpk and dpv overlap dk and dv, but are not the same");
  x.vector = rows_aligned16(a, x.x) && aligned16(a.d_o, {x.d_o.stride});
  if constexpr (sizeof(T) == 2) x.work = a.work.as<float>();
  return x;
}

}  // namespace

void attn_bwd(const AttnBwd& a, Stream stream) {
  const char* op = "attn_bwd";
  with_act(op, a.q, [&](auto type) {
    using T = decltype(type);
    Args<T> x = arguments<T>(op, a);
    if (x.rows == 0 || x.x.heads == 0 || x.x.n_segments == 0) return;
    constexpr int kKeys = sizeof(T) == 2 ? kOwned16 : kKeys32, kQueries = sizeof(T) == 2 ? kRows16 : kQueries32;
    const auto heads = static_cast<unsigned>(x.x.heads), kv_heads = static_cast<unsigned>(x.x.kv_heads);
    // Segments are disjoint in q: together they have at most all rows, and each wastes at most one tile.
    const Grids g{{blocks(op, x.rows / kThreads + x.x.n_segments, 1), heads},
                  {blocks(op, x.rows, kKeys) + (x.one ? 0 : blocks(op, x.parent_rows, kKeys)), kv_heads},
                  tile_grid(op, x.x, x.rows, kQueries)};
    launch(op, row_sums<T>, {.grid = g.rows, .block = kThreads}, stream, x);
    if (a.blocks) {
      x.blocks = block_lists(a);
      run<true>(op, x, g, stream);
    } else {
      run<false>(op, x, g, stream);
    }
  });
}

}  // namespace pare::PARE_CUDA
