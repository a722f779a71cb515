// The choice of the slots that stay, and their compaction (KvSelect, KvCompact).
//
// score [E, K, max_slots] f32; keep [R, K, max_keep] i32, of which the first `keep` entries of a row are overwritten;
// k_pages [pages, K, D, 16], v_pages [pages, K, 16, D] act, and per slot pos, mass, count [pages, K, 16], of which
// slots [first, first + keep) of the dst pages are overwritten.
//
// kv_select: a thread block has a row of scores.  Radix select on the integers that order floats: four rounds of 8 bits
// find the least score that is chosen, and how many slots with exactly that score are; then one ascending walk writes
// the slots in order.  It reads the scores five times (from L2 after the first), keeps none of them, and takes linear
// time for any number of slots; a sort in shared memory would limit that number.
//
// kv_compact moves bits, without rounding.  Slots of K lie apart, a channel a line, so whole pages enter shared memory,
// and their kept slots leave it:
//
//   src   |a b c d e f g h ...|i j k ...    16-byte copies of whole pages that hold a moving slot
//   dst   |a c d f g h i k ...              2-byte stores of neighbouring slots: a warp fills sectors of 32 bytes
//
// V moves directly, in words of 16 bytes.
//
// Order: none is left to a schedule.  Counts are integers, and slots are written ascending.
// Bytes: scores five times; K of the pages and V of the slots that move, read and written once.  kv_select is limited
// by latency, kv_compact by memory bandwidth.
#include "compression.cuh"

namespace pare::PARE_CUDA {

namespace {

// ---- choice

struct SelectArgs {
  int32_t* keep;
  const float* score;  // null: nothing is chosen, the recent slots stay
  Compressions compressions;
  int64_t max_keep, max_slots;
  bool shared_heads;  // a block chooses for all heads
};

struct Digit {
  int value, left, equal;  // the digit; how many numbers with it are wanted; how many there are
};
// Finds the digit of the wanted-th largest number, where count[d] numbers have digit d.  One warp does, and one of its
// lanes writes `to`.
__device__ __forceinline__ void find_digit(Digit* to, const int* count, int wanted) {
  const int lane = threadIdx.x, highest = 255 - 8 * lane;  // lane's digits: highest, highest - 1, ...
  int own = 0;
  for (int i = 0; i < 8; i++) own += count[highest - i];
  int above = own;
  for (int o = 1; o < 32; o *= 2) {
    const int x = __shfl_up_sync(kAllLanes, above, o);
    if (lane >= o) above += x;
  }
  above -= own;  // numbers with the digits of lower lanes
  if (above >= wanted || above + own < wanted) return;
  int d = highest;
  for (; above + count[d] < wanted; d--) above += count[d];
  *to = {d, wanted - above, count[d]};
}

__global__ void __launch_bounds__(kThreads) choose(const SelectArgs a) {
  __shared__ int count[256], above_of[kWarps], equal_of[kWarps];
  __shared__ Digit digit;
  static_assert(kThreads == 256);
  const int kv_heads = a.compressions.kv_heads, first_head = a.shared_heads ? 0 : a.compressions.head();
  const int compression = a.shared_heads ? static_cast<int>(blockIdx.x) : a.compressions.compression();
  const KvCompression e = a.compressions.list[compression];
  const int end = e.slots - e.recent, chosen = e.keep - e.recent, heads = a.shared_heads ? kv_heads : 1;
  int32_t* const keep = a.keep + (int64_t{compression} * kv_heads + first_head) * a.max_keep;
  for (int i = threadIdx.x; i < e.recent; i += kThreads)
    for (int h = 0; h < heads; h++) keep[h * a.max_keep + chosen + i] = end + i;
  if (chosen == 0) return;
  const float* const score = a.score + (int64_t{compression} * kv_heads + first_head) * a.max_slots;
  const auto key = [&](int slot) {
    float x = score[slot];
    for (int h = 1; h < heads; h++) x += score[h * a.max_slots + slot];
    return ordered(x);
  };
  uint32_t least = 0, known = 0;   // the least chosen key, and which of its bits are known
  int left = chosen, surplus = 0;  // chosen among the keys that agree with it so far; how many of these are not
  for (int shift = 24; shift >= 0; shift -= 8) {
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int s = e.first + threadIdx.x; s < end; s += kThreads) {
      const uint32_t u = key(s);
      if ((u & known) == least) atomicAdd(&count[u >> shift & 255], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) find_digit(&digit, count, left);
    __syncthreads();
    least |= static_cast<uint32_t>(digit.value) << shift;
    known |= 255u << shift;
    left = digit.left;
    surplus = digit.equal - digit.left;
  }
  // Of equal scores the larger slots win: the first `surplus` ones with the least key go.
  const int warp = threadIdx.x / 32;
  const unsigned below = (1u << threadIdx.x % 32) - 1;
  int above = 0, equal = 0;  // slots before this thread's
  for (int begin = e.first; begin < end; begin += kThreads) {
    const int s = begin + static_cast<int>(threadIdx.x);
    const uint32_t u = s < end ? key(s) : 0;
    const bool is_above = s < end && u > least, is_equal = s < end && u == least;
    const unsigned above_mask = __ballot_sync(kAllLanes, is_above), equal_mask = __ballot_sync(kAllLanes, is_equal);
    if (threadIdx.x % 32 == 0) {
      above_of[warp] = __popc(above_mask);
      equal_of[warp] = __popc(equal_mask);
    }
    __syncthreads();
    int above_here = above + __popc(above_mask & below), equal_here = equal + __popc(equal_mask & below);
    for (int w = 0; w < kWarps; w++) {
      if (w < warp) {
        above_here += above_of[w];
        equal_here += equal_of[w];
      }
      above += above_of[w];
      equal += equal_of[w];
    }
    if (is_above || (is_equal && equal_here >= surplus))
      for (int h = 0; h < heads; h++) keep[h * a.max_keep + above_here + max(0, equal_here - surplus)] = s;
    __syncthreads();
  }
}

// ---- compaction

constexpr int kMoved = 4;                                  // units that a thread has in flight
constexpr int kUnits = 16, kMovedSlots = kMoved * kLanes;  // units of a slot, slots that a thread block moves at once

template <class T>
struct CompactArgs {
  T *k, *v;
  uint32_t *pos, *mass;  // 4 bytes a slot; mass may be null
  const int32_t *keep, *dst;
  Compressions compressions;
  int64_t dst_stride, max_keep;
  int head_dim;
};

// Moves the slots that `keep` names to slots [first, first + keep) of dst; at(head, place, unit) is a unit of a slot,
// or null.  A block moves its units of a head, kMovedSlots slots at a time, ascending: all are read, then a barrier,
// then all are written.
//
// No slot is read after it has been overwritten: slot first + i comes from slot keep[i] >= first + i, as keep ascends
// from first.  So a later round reads only slots at or past those that it writes, which are past all that earlier
// rounds wrote: another slot of the same page, or another page (a page is src and dst only in one place of the list).
// Within a round the barrier lies between.  Other blocks move other units or heads, and no compression reads the slots
// that another writes (KvCompact).
template <class Unit, class At>
__device__ __forceinline__ void move_slots(const KvCompression& e, const int32_t* keep, const HeadPages& src,
                                           const HeadPages& dst, int slot_of_thread, At at) {
  const int end = e.first + e.keep;
  for (int begin = e.first / kPageSlots * kPageSlots; begin < end; begin += kMovedSlots) {
    Unit held[kMoved];
    Unit* place[kMoved];
#pragma unroll
    for (int i = 0; i < kMoved; i++) {
      const int to = begin + i * kLanes + slot_of_thread;
      place[i] = nullptr;
      if (to < e.first || to >= end) continue;
      const int from = keep[to - e.first];
      const int64_t from_head = src.head(from), to_head = dst.head(to);
      if (from == to && from_head == to_head) continue;
      const Unit* x = at(from_head, from % kPageSlots);
      if (!x) continue;
      held[i] = *x;
      place[i] = at(to_head, to % kPageSlots);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMoved; i++)
      if (place[i]) *place[i] = held[i];
  }
}

// Moves the channels [channel, channel + kChannels) of a head's keys: 128 slots at a time, ascending, as whole pages
// into shared memory, and from there to their places.  A round reads only slots past those that earlier rounds wrote,
// as in move_slots.
template <class T>
struct MovedKeys {
  static constexpr int kChannels = 128 / static_cast<int>(sizeof(T));
  static constexpr int kSlots = 128, kPages = kSlots / kPageSlots, kGroups = kThreads / kSlots;
  alignas(16) T line[kPages][(kChannels + 1) * kPageSlots];  // the lines of neighbouring pages begin in other banks
  int here[kWarps];                                          // kept slots of a round
  unsigned pages[kWarps];                                    // that hold a slot which moves

  __device__ __forceinline__ void move(T* k, int head_dim, int channel, const KvCompression& e, const int32_t* keep,
                                       const HeadPages& src, const HeadPages& dst) {
    const int channels = min(kChannels, head_dim - channel), own = threadIdx.x % kSlots, warp = threadIdx.x / 32;
    const auto at = [&](int64_t head) { return k + (head * head_dim + channel) * kPageSlots; };
    for (int begin = e.first / kPageSlots * kPageSlots, next = 0; next < e.keep; begin += kSlots) {
      const int to = e.first + next + own, from = next + own < e.keep ? keep[next + own] : e.slots;
      const bool is_here = from < min(begin + kSlots, e.slots);
      const bool moves = is_here && (from != to || src.head(from) != dst.head(to));
      const int page = (from - begin) / kPageSlots;
      unsigned mask = 0;
      for (int p = 0; p < kPages; p++)
        if (__any_sync(kAllLanes, moves && page == p)) mask |= 1u << p;
      const int count = __popc(__ballot_sync(kAllLanes, is_here));
      if (threadIdx.x % 32 == 0) {
        here[warp] = count;
        pages[warp] = mask;
      }
      __syncthreads();  // the round before has been stored, too
      mask = 0;
      for (int w = 0; w < kSlots / 32; w++) {
        next += here[w];
        mask |= pages[w];
      }
      constexpr int kPacks = kPageSlots / kPack<T>;  // of a line
      for (int i = threadIdx.x; i < kPages * kChannels * kPacks; i += kThreads) {
        const int p = i / (kChannels * kPacks), d = i / kPacks % kChannels, slot = i % kPacks * kPack<T>;
        const int first = begin + p * kPageSlots, count = min(kPack<T>, e.slots - first - slot);
        if (mask >> p & 1 && d < channels && count > 0)
          cp_async_16(line[p] + d * kPageSlots + slot, at(src.head(first)) + d * kPageSlots + slot,
                      count * static_cast<int>(sizeof(T)));
      }
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
      if (!moves) continue;
      const T* const x = line[page] + from % kPageSlots;
      T* const y = at(dst.head(to)) + to % kPageSlots;
#pragma unroll 8
      for (int d = threadIdx.x / kSlots; d < channels; d += kGroups) y[d * kPageSlots] = x[d * kPageSlots];
    }
  }
};

// blockIdx.y: channels of K; then kUnits units of V each, packs of 16 bytes or elements; then pos, mass and count.
template <class T, class Unit>
__global__ void __launch_bounds__(kThreads) compact(const CompactArgs<T> a) {
  const KvCompression e = a.compressions.get();
  const HeadPages src = a.compressions.head_pages();
  const HeadPages dst{a.dst + a.compressions.compression() * a.dst_stride, src.kv_heads, src.h};
  const int32_t* const keep = a.keep + int64_t{blockIdx.x} * a.max_keep;
  constexpr int kSize = sizeof(Unit) / sizeof(T);
  __shared__ MovedKeys<T> keys;
  const int of_k = ceil_div(a.head_dim, keys.kChannels), units = a.head_dim / kSize, of_v = ceil_div(units, kUnits);
  const int part = blockIdx.y, low = threadIdx.x % kUnits, high = threadIdx.x / kUnits;
  // Neighbouring threads: neighbouring slots of K, pos, mass and count; units of V.
  if (part < of_k) {
    keys.move(a.k, a.head_dim, part * keys.kChannels, e, keep, src, dst);
  } else if (part < of_k + of_v) {
    const int unit = (part - of_k) * kUnits + low;
    move_slots<Unit>(e, keep, src, dst, high, [&](int64_t head, int place) {
      return unit < units ? reinterpret_cast<Unit*>(a.v) + (head * kPageSlots + place) * units + unit : nullptr;
    });
  } else {
    uint32_t* const array = high == 0 ? a.pos : high == 1 ? a.mass : nullptr;
    move_slots<uint32_t>(e, keep, src, dst, low,
                         [&](int64_t head, int place) { return array ? array + head * kPageSlots + place : nullptr; });
  }
}

}  // namespace

void kv_select(const KvSelect& a, Stream stream) {
  const char* op = "kv_select";
  const int64_t kv_heads = a.keep.shape[1];
  SelectArgs args{};
  args.compressions = compressions_of(a.compressions, {}, kv_heads);
  args.keep = a.keep.as<int32_t>();
  args.max_keep = a.keep.shape[2];
  args.shared_heads = a.shared_heads;
  if (a.score) {
    args.score = a.score.as<float>();
    args.max_slots = a.score.shape[2];
  }
  if (args.compressions.count == 0) return;
  launch(op, choose,
         {.grid = blocks(op, args.compressions.count * (a.shared_heads ? 1 : kv_heads), 1), .block = kThreads}, stream,
         args);
}

void kv_compact(const KvCompact& a, Stream stream) {
  const char* op = "kv_compact";
  const int64_t kv_heads = a.k_pages.shape[1], head_dim = a.k_pages.shape[2];
  const Compressions compressions = compressions_of(a.compressions, a.src_pages, kv_heads);
  if (compressions.count == 0) return;
  const auto words = [](const Tensor& t) { return static_cast<uint32_t*>(t.data); };
  with_act(op, a.k_pages, [&](auto type) {
    using T = decltype(type);
    const CompactArgs<T> args{.k = a.k_pages.as<T>(),
                              .v = a.v_pages.as<T>(),
                              .pos = words(a.pos_pages),
                              .mass = words(a.mass_pages),
                              .keep = a.keep.as<int32_t>(),
                              .dst = a.dst_pages.as<int32_t>(),
                              .compressions = compressions,
                              .dst_stride = a.dst_pages.stride[0],
                              .max_keep = a.keep.shape[2],
                              .head_dim = static_cast<int>(head_dim)};
    expect(aligned16(a.k_pages, {}), op, ": pages must be 16-byte aligned");
    const bool vector = aligned16(a.v_pages, {head_dim});
    const unsigned heads = blocks(op, int64_t{compressions.count} * kv_heads, 1);
    const unsigned parts =
        blocks(op, head_dim, MovedKeys<T>::kChannels) + blocks(op, vector ? head_dim / kPack<T> : head_dim, kUnits) + 1;
    launch(op, vector ? compact<T, Pack<T>> : compact<T, T>, {.grid = dim3(heads, parts), .block = kThreads}, stream,
           args);
  });
}

}  // namespace pare::PARE_CUDA
