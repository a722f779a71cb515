#include "kv/kv_cache.h"

#include "ops/blocks.h"
#include "ops/data.h"

namespace pare {

namespace {
int64_t pages_of(int64_t slots) { return (slots + kPageSlots - 1) / kPageSlots; }
}  // namespace

int64_t KvCache::page_bytes(const ModelConfig& config, const KvSpec& spec, DType dtype) {
  const int64_t act = static_cast<int64_t>(dtype_size(dtype)), stat = act == 8 ? 8 : 4;
  const int64_t slots = config.kv_heads * kPageSlots;
  int64_t bytes = 2 * slots * config.head_dim * act;
  if (spec.evicts()) bytes += slots * 4;
  if (spec.method == KvMethod::h2o) bytes += slots * stat;
  if (spec.sparse_reads())
    bytes += kPageSlots / spec.blocks.size * config.kv_heads * summary_rows(summary_kind(spec)) * config.head_dim * act;
  return bytes;
}

KvCache::KvCache(const ModelConfig& config, const KvSpec& spec, Device& device, Arena& arena, DType dtype,
                 int64_t pages, int max_sequences, int64_t max_slots)
    : k_pages(arena.alloc("kv.k_pages", dtype, {pages, config.kv_heads, config.head_dim, kPageSlots})),
      v_pages(arena.alloc("kv.v_pages", dtype, {pages, config.kv_heads, kPageSlots, config.head_dim})),
      device_(device),
      layers_(config.layers),
      max_slots_(max_slots),
      max_pages_(pages_of(max_slots)),
      pool_(pages),
      sequences_(max_sequences),
      host_table_(max_sequences * layers_ * max_pages_),
      table_(arena.alloc("kv.page_table", DType::i32, {max_sequences, layers_ * max_pages_})),
      // One page of a layer is partly filled; nothing is shared where slots have mass.
      copies_(arena.alloc("kv.copies", DType::i32, {layers_ * (spec.method == KvMethod::h2o ? max_pages_ : 1), 2})) {
  const DType stat = dtype == DType::f64 ? DType::f64 : DType::f32;
  if (spec.evicts()) fields.pos = arena.alloc("kv.pos", DType::i32, {pages, config.kv_heads, kPageSlots});
  if (spec.method == KvMethod::h2o) fields.mass = arena.alloc("kv.mass", stat, {pages, config.kv_heads, kPageSlots});
  const int64_t rows = summary_rows(summary_kind(spec));
  if (spec.sparse_reads())
    fields.summary = arena.alloc("kv.summary", dtype,
                                 {pages, config.kv_heads, kPageSlots / spec.blocks.size * rows, config.head_dim});
}

int KvCache::index(int sequence) const {
  expect(sequence >= 0 && sequence < static_cast<int>(sequences_.size()) && sequences_[sequence].open, "sequence ",
         sequence, " is not open");
  return sequence;
}

Tensor KvCache::page_table(int layer) const { return table_.columns(layer * max_pages_, max_pages_); }

bool KvCache::reserve(int64_t pages) {
  expect(pages >= 0, "reservation of ", pages, " pages");
  if (pages > pool_.free() - reserved_) return false;
  reserved_ += pages;
  return true;
}

void KvCache::unreserve(int64_t pages) {
  expect(pages >= 0 && pages <= reserved_, pages, " pages unreserved, but ", reserved_, " are reserved");
  reserved_ -= pages;
}

int KvCache::open(int64_t reservation) {
  for (size_t i = lowest_closed_; i < sequences_.size(); i++)
    if (!sequences_[i].open) {
      lowest_closed_ = i + 1;
      sequences_[i] = {.open = true, .changed = false, .reservation = reservation, .layers = {}};
      sequences_[i].layers.resize(layers_);
      return static_cast<int>(i);
    }
  expect(false, "all ", sequences_.size(), " sequences of the cache are open");
  return -1;
}

int32_t KvCache::take_page(Sequence& s) {
  expect(s.reservation > 0, "a sequence takes more pages than were reserved for it");
  s.reservation--;
  unreserve(1);
  return pool_.allocate();
}

void KvCache::put_page(int sequence, int layer, int32_t page) {
  Sequence& s = sequences_[sequence];
  std::vector<int32_t>& pages = s.layers[layer].pages;
  host_table_[(sequence * layers_ + layer) * max_pages_ + static_cast<int64_t>(pages.size())] = page;
  pages.push_back(page);
  s.changed = true;
}

int KvCache::fork(int parent, int64_t reservation, int64_t shared) {
  const Sequence& from = at(parent);
  const int sequence = open(reservation);
  std::vector<int32_t> copies;
  for (int layer = 0; layer < layers_; layer++) {
    const LayerState& state = from.layers[layer];
    const int64_t full = std::min(state.slots, shared) / kPageSlots;
    for (int64_t i = 0; i < full; i++) {
      pool_.retain(state.pages[i]);
      put_page(sequence, layer, state.pages[i]);
    }
    for (int64_t i = full; i < static_cast<int64_t>(state.pages.size()); i++) {
      const int32_t page = take_page(sequences_[sequence]);
      copies.insert(copies.end(), {state.pages[i], page});
      put_page(sequence, layer, page);
    }
    sequences_[sequence].layers[layer].slots = state.slots;
  }
  if (!copies.empty()) copy_pages(copies_.rows(0, static_cast<int64_t>(copies.size()) / 2), copies);
  return sequence;
}

void KvCache::copy_pages(const Tensor& pairs, const std::vector<int32_t>& host) {
  device_.upload({.dst = pairs, .src = host.data()});
  device_.kv_copy_pages(
      {.k_pages = k_pages, .v_pages = v_pages, .pairs = pairs, .pos_pages = fields.pos, .mass_pages = fields.mass});
}

void KvCache::extend(int sequence, int64_t reservation) { at(sequence).reservation += reservation; }

void KvCache::append(int sequence, int64_t n) {
  Sequence& s = at(sequence);
  for (int layer = 0; layer < layers_; layer++) {
    LayerState& state = s.layers[layer];
    expect(state.slots + n <= max_slots_, "a sequence of ", state.slots + n, " slots, where ", max_slots_,
           " are the limit");
    state.slots += n;
    while (static_cast<int64_t>(state.pages.size()) < pages_of(state.slots)) put_page(sequence, layer, take_page(s));
  }
}

void KvCache::cut(int sequence, int layer, int64_t first, int64_t slots, bool renew, int32_t* src, int32_t* dst) {
  Sequence& s = at(sequence);
  LayerState& state = s.layers[layer];
  expect(slots <= state.slots, "a layer of ", state.slots, " slots is cut to ", slots);
  std::copy(state.pages.begin(), state.pages.end(), src);
  const auto kept = static_cast<size_t>(pages_of(slots));
  for (auto i = static_cast<size_t>(first / kPageSlots); i < state.pages.size(); i++) {
    int32_t& page = state.pages[i];
    const bool shared = pool_.references(page) > 1;
    if (i < kept && !shared) continue;
    cut_.push_back({page, renew && !shared ? sequence : -1});
    if (i >= kept) continue;
    const int32_t fresh = take_page(s);
    if (static_cast<int64_t>(i) * kPageSlots < first) {
      cut_copies_.insert(cut_copies_.end(), {page, fresh});
      src[i] = fresh;
    }
    host_table_[(sequence * layers_ + layer) * max_pages_ + static_cast<int64_t>(i)] = page = fresh;
    s.changed = true;
  }
  state.pages.resize(kept);
  state.slots = slots;
  std::copy(state.pages.begin(), state.pages.end(), dst);
}

void KvCache::copy_cut(Arena& scratch) {
  if (cut_copies_.empty()) return;
  const auto n = static_cast<int64_t>(cut_copies_.size()) / 2;
  copy_pages(scratch.alloc("kv.cut_copies", DType::i32, {n, 2}), cut_copies_);
  cut_copies_.clear();
}

// Not before: a page given up by one compression must not become the fresh page of another of the same pass.
void KvCache::drop_cut() {
  for (const Cut& c : cut_) {
    pool_.release(c.page);
    if (c.sequence < 0) continue;
    const bool back = reserve(1);
    expect(back, "a page given up is not free");
    at(c.sequence).reservation++;
  }
  cut_.clear();
}

void KvCache::close(int sequence) {
  Sequence& s = at(sequence);
  for (const LayerState& layer : s.layers)
    for (int32_t page : layer.pages) pool_.release(page);
  unreserve(s.reservation);
  s.open = false;
  lowest_closed_ = std::min(lowest_closed_, static_cast<size_t>(sequence));
}

void KvCache::upload_tables() {
  constexpr int64_t kCall = int64_t{64} << 10;  // bytes whose copy takes about as long as one more call
  const int64_t width = layers_ * max_pages_, gap = kCall / (width * 4);
  int64_t first = 0, end = 0;
  const auto upload = [&] {
    if (end > first)
      device_.upload({.dst = table_.rows(first, end - first), .src = host_table_.data() + first * width});
  };
  for (int64_t i = 0; i < std::ssize(sequences_); i++) {
    Sequence& s = sequences_[static_cast<size_t>(i)];
    if (!s.open || !std::exchange(s.changed, false)) continue;
    if (end == first || i - end > gap) {
      upload();
      first = i;
    }
    end = i + 1;
  }
  upload();
}

}  // namespace pare
