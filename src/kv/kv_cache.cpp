#include "kv/kv_cache.h"

namespace pare {

namespace {
int64_t pages_of(int64_t slots) { return (slots + kPageSlots - 1) / kPageSlots; }
}  // namespace

int64_t KvCache::page_bytes(const ModelConfig& config, DType dtype) {
  return 2 * config.kv_heads * config.head_dim * kPageSlots * static_cast<int64_t>(dtype_size(dtype));
}

int64_t KvCache::pages_for(const ModelConfig& config, int64_t slots) { return config.layers * pages_of(slots); }

int64_t KvCache::full_pages_for(const ModelConfig& config, int64_t slots) {
  return config.layers * (slots / kPageSlots);
}

KvCache::KvCache(const ModelConfig& config, Device& device, Arena& arena, DType dtype, int64_t pages, int max_sequences,
                 int64_t max_slots)
    : k_pages(arena.alloc("kv.k_pages", dtype, {pages, config.kv_heads, config.head_dim, kPageSlots})),
      v_pages(arena.alloc("kv.v_pages", dtype, {pages, config.kv_heads, kPageSlots, config.head_dim})),
      device_(device),
      layers_(config.layers),
      max_slots_(max_slots),
      max_pages_(pages_of(max_slots)),
      pool_(pages),
      sequences_(max_sequences),
      host_table_(max_sequences * layers_ * max_pages_),
      host_copies_(max_sequences * layers_ * 2),
      table_(arena.alloc("kv.page_table", DType::i32, {max_sequences, layers_ * max_pages_})),
      copies_(arena.alloc("kv.copies", DType::i32, {max_sequences, layers_, 2})) {}

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

int KvCache::open(int64_t promise) {
  for (size_t i = 0; i < sequences_.size(); i++)
    if (!sequences_[i].open) {
      sequences_[i] = {.open = true, .changed = false, .promise = promise, .layers = {}};
      sequences_[i].layers.resize(layers_);
      return static_cast<int>(i);
    }
  expect(false, "all ", sequences_.size(), " sequences of the cache are open");
  return -1;
}

int32_t KvCache::take_page(Sequence& s) {
  expect(s.promise > 0, "a sequence takes more pages than were reserved for it");
  s.promise--;
  unreserve(1);
  return pool_.take();
}

void KvCache::put_page(int sequence, int layer, int32_t page) {
  Sequence& s = sequences_[sequence];
  std::vector<int32_t>& pages = s.layers[layer].pages;
  host_table_[(sequence * layers_ + layer) * max_pages_ + static_cast<int64_t>(pages.size())] = page;
  pages.push_back(page);
  s.changed = true;
}

int KvCache::fork(int parent, int64_t promise) {
  const Sequence& from = at(parent);
  const int sequence = open(promise);
  int32_t* const copies = host_copies_.data() + sequence * layers_ * 2;
  int64_t n = 0;
  for (int layer = 0; layer < layers_; layer++) {
    const LayerState& state = from.layers[layer];
    const int64_t full = state.slots / kPageSlots;
    for (int64_t i = 0; i < full; i++) {
      pool_.share(state.pages[i]);
      put_page(sequence, layer, state.pages[i]);
    }
    if (full < static_cast<int64_t>(state.pages.size())) {
      const int32_t page = take_page(sequences_[sequence]);
      copies[2 * n] = state.pages[full], copies[2 * n + 1] = page, n++;
      put_page(sequence, layer, page);
    }
    sequences_[sequence].layers[layer].slots = state.slots;
  }
  if (n) {
    Tensor pairs = copies_.rows(sequence, 1);
    pairs.rank = 2, pairs.shape = {n, 2}, pairs.stride = {2, 1};
    device_.upload({.dst = pairs, .src = copies});
    device_.kv_copy_pages({.k_pages = k_pages, .v_pages = v_pages, .pairs = pairs});
  }
  return sequence;
}

void KvCache::extend(int sequence, int64_t promise) { at(sequence).promise += promise; }

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

void KvCache::close(int sequence) {
  Sequence& s = at(sequence);
  for (const LayerState& layer : s.layers)
    for (int32_t page : layer.pages) pool_.drop(page);
  unreserve(s.promise);
  s.open = false;
}

void KvCache::upload_tables() {
  for (size_t i = 0; i < sequences_.size(); i++)
    if (sequences_[i].open && std::exchange(sequences_[i].changed, false))
      device_.upload({.dst = table_.rows(static_cast<int64_t>(i), 1),
                      .src = host_table_.data() + static_cast<int64_t>(i) * layers_ * max_pages_});
}

}  // namespace pare
