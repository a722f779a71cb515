// Keys and values of all running sequences: pages from one pool, and page tables.
#pragma once
#include <limits>
#include <vector>

#include "base/arena.h"
#include "kv/page_pool.h"
#include "kv/spec.h"
#include "model/config.h"
#include "ops/device.h"

namespace pare {

// Fields of a page besides K and V, present if a policy needs them.  Roles of types as in list.h.
struct KvFields {
  Tensor pos;      // i32 [pages, K, 16]: absolute position of the token in a slot (evicting methods)
  Tensor mass;     // stat [pages, K, 16]: attention that it received (h2o)
  Tensor summary;  // act [pages, K, 16 / block * summary_rows, D]: of its blocks (quest, block_topk)
};

// A page holds kPageSlots slots of all key heads of one layer; a sequence has a list of pages per layer.  All state
// behind decisions lives on the host; the device holds the pages and a copy of the page tables.
//
// Every page is reserved before it is allocated: reserve() sets pages aside; open(), fork() and extend() hand them to a
// sequence as its reservation; append() and fork() allocate from it; close() returns the rest.  So a sequence admitted
// with its worst case never runs out of memory.
//
// A sequence's number is its row in the page tables.
class KvCache {
 public:
  // Allocates from `arena`, named kv.*: the pages in type `dtype`, with the fields that `spec` needs, and the tables of
  // `max_sequences` sequences of at most `max_slots` slots in a layer.
  KvCache(const ModelConfig& config, const KvSpec& spec, Device& device, Arena& arena, DType dtype, int64_t pages,
          int max_sequences, int64_t max_slots);

  static int64_t page_bytes(const ModelConfig& config, const KvSpec& spec, DType dtype);  // all fields of one page

  // Sets `pages` aside.  Returns false, and changes nothing, if fewer are free and unreserved.
  bool reserve(int64_t pages);
  void unreserve(int64_t pages);

  // An empty sequence, and one that continues `parent`: it shares the full pages of the first `shared` slots and copies
  // the others at once.  `reservation`: pages, reserved before, that it may allocate (the copies count).
  int open(int64_t reservation);
  int fork(int parent, int64_t reservation, int64_t shared = std::numeric_limits<int64_t>::max());
  void extend(int sequence, int64_t reservation);  // adds to its reservation
  void append(int sequence, int64_t n);            // n more slots in every layer
  // A compression: cuts a layer to `slots` slots.  Pages wholly below slot `first` stay; of the others, shared
  // ones are replaced by fresh ones (by a copy, if slots before `first` lie in it), and those past the end are
  // released. src and dst: the page lists between which KvCompact moves the slots, [max pages] each.  `renew`: released
  // pages return to the sequence's reservation, since it will grow again.
  void cut(int sequence, int layer, int64_t first, int64_t slots, bool renew, int32_t* src, int32_t* dst);
  void copy_cut(Arena& scratch);  // copies for all cuts since the last one; before the device moves slots
  void drop_cut();                // releases their pages; after it
  void close(int sequence);

  // Copies changed page tables to the device; required before the pass that uses them.
  void upload_tables();

  int64_t slots(int sequence, int layer) const { return at(sequence).layers[layer].slots; }
  const std::vector<int32_t>& pages(int sequence, int layer) const { return at(sequence).layers[layer].pages; }
  int64_t reserved() const { return reserved_; }  // set aside and not yet allocated
  const PagePool& pool() const { return pool_; }
  void reset_peak() { pool_.reset_peak(); }
  Device& device() { return device_; }

  int layers() const { return static_cast<int>(layers_); }
  int64_t max_sequences() const { return static_cast<int64_t>(sequences_.size()); }
  int64_t max_pages() const { return max_pages_; }  // of one sequence in one layer
  Tensor k_pages, v_pages;                          // act [pages, K, D, 16] and [pages, K, 16, D], every layer's
  KvFields fields;
  Tensor page_table(int layer) const;  // i32 [max_sequences, max pages], strided rows

 private:
  // Layers keep their own counts: dense caches have equal ones, caches that evict need not.
  struct LayerState {
    int64_t slots = 0;
    std::vector<int32_t> pages;
  };
  struct Sequence {
    bool open = false, changed = false;
    int64_t reservation = 0;
    std::vector<LayerState> layers;
  };
  int index(int sequence) const;  // itself, if open
  const Sequence& at(int sequence) const { return sequences_[index(sequence)]; }
  Sequence& at(int sequence) { return sequences_[index(sequence)]; }
  void put_page(int sequence, int layer, int32_t page);
  int32_t take_page(Sequence& s);
  void copy_pages(const Tensor& pairs, const std::vector<int32_t>& host);

  Device& device_;
  const int64_t layers_, max_slots_, max_pages_;
  PagePool pool_;
  int64_t reserved_ = 0;
  std::vector<Sequence> sequences_;
  size_t lowest_closed_ = 0;  // the sequences below are open
  struct Cut {
    int32_t page;
    int sequence;  // to whose reservation it returns; -1: to none
  };
  std::vector<Cut> cut_;
  std::vector<int32_t> cut_copies_;  // (src, dst) pages
  std::vector<int32_t> host_table_;
  Tensor table_;   // i32 [max_sequences, layers * max pages]: one upload brings neighbouring sequences up to date
  Tensor copies_;  // i32 [max copies, 2]: the (src, dst) pages of a fork
};

}  // namespace pare
