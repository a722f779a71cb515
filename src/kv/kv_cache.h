// The keys and values of all sequences that are being generated: pages from one pool, and page tables.
#pragma once
#include <vector>

#include "base/arena.h"
#include "kv/page_pool.h"
#include "model/config.h"
#include "ops/device.h"

namespace pare {

// A page holds kPageSlots slots of all key heads of one layer; a sequence has a list of pages per layer.  All state
// that decides anything is on the host; the device holds the pages and a copy of the page tables.
//
// Nobody takes a page that was not reserved: reserve() sets pages aside, open(), fork() and extend() hand them to a
// sequence as its promise, append() and fork() spend it, close() returns what is left.  So a sequence that was admitted
// with its worst case never runs out of memory.
//
// Sequences are numbered by their row in the page tables.  Uploads read host memory of the cache until the stream has
// passed them: between two forward passes the caller waits for the device (it downloads the tokens).
class KvCache {
 public:
  // Allocates from `arena`, named kv.*: the pages in type `dtype`, the tables of `max_sequences` sequences of at most
  // `max_slots` slots in a layer.
  KvCache(const ModelConfig& config, Device& device, Arena& arena, DType dtype, int64_t pages, int max_sequences,
          int64_t max_slots);

  static int64_t page_bytes(const ModelConfig& config, DType dtype);  // K and V of one page

  // Pages, over all layers, of `slots` slots per layer; of the full pages among them.
  static int64_t pages_for(const ModelConfig& config, int64_t slots);
  static int64_t full_pages_for(const ModelConfig& config, int64_t slots);

  // Sets `pages` aside; false, and nothing is done, where fewer are free and not set aside.
  bool reserve(int64_t pages);
  void unreserve(int64_t pages);

  // A new empty sequence, and one that continues `parent`: it shares the full pages and gets a copy of the page that is
  // partly filled, at once.  `promise`: pages, reserved before, that it may take (the copy counts).
  int open(int64_t promise);
  int fork(int parent, int64_t promise);
  void extend(int sequence, int64_t promise);  // adds to the promise
  void append(int sequence, int64_t n);        // n more slots in every layer
  void close(int sequence);

  // Copies page tables that changed to the device.  Before the pass that uses them.
  void upload_tables();

  int64_t slots(int sequence, int layer) const { return at(sequence).layers[layer].slots; }
  const std::vector<int32_t>& pages(int sequence, int layer) const { return at(sequence).layers[layer].pages; }
  int64_t reserved() const { return reserved_; }  // set aside and not yet taken
  const PagePool& pool() const { return pool_; }
  void reset_peak() { pool_.reset_peak(); }
  Device& device() { return device_; }

  int layers() const { return static_cast<int>(layers_); }
  Tensor k_pages, v_pages;             // act [pages, K, D, 16] and [pages, K, 16, D], every layer's
  Tensor page_table(int layer) const;  // i32 [max_sequences, max pages], strided rows

 private:
  // Layers keep their own counts: dense caches have equal ones, caches that evict need not.
  struct LayerState {
    int64_t slots = 0;
    std::vector<int32_t> pages;
  };
  struct Sequence {
    bool open = false, changed = false;
    int64_t promise = 0;
    std::vector<LayerState> layers;
  };
  int index(int sequence) const;  // itself, if open
  const Sequence& at(int sequence) const { return sequences_[index(sequence)]; }
  Sequence& at(int sequence) { return sequences_[index(sequence)]; }
  void put_page(int sequence, int layer, int32_t page);
  int32_t take_page(Sequence& s);

  Device& device_;
  const int64_t layers_, max_slots_, max_pages_;  // max_pages_: of one sequence in one layer
  PagePool pool_;
  int64_t reserved_ = 0;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> host_table_, host_copies_;
  Tensor table_;   // i32 [max_sequences, layers * max pages]: one upload brings a sequence up to date
  Tensor copies_;  // i32 [max_sequences, layers, 2]: the (src, dst) pages of the fork that made the sequence
};

}  // namespace pare
