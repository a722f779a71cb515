// Pages of the key/value storage: which are in use, and by how many sequences.
#pragma once
#include <cstdint>
#include <vector>

namespace pare {

// Page ids 0 .. pages-1 with reference counts, on the host: the pages of a sequence follow from its length alone.  The
// free list is a stack: the page released last is allocated first (its memory is warm, and a pool that was never full
// never touches its upper pages).  A new pool allocates 0, 1, 2, ...
class PagePool {
 public:
  explicit PagePool(int64_t pages);

  int32_t allocate();                      // a free page, with one reference; requires that one is free
  void retain(int32_t page);               // adds a reference
  void release(int32_t page);              // removes a reference; the last one frees the page
  int32_t references(int32_t page) const;  // 0: free
  int64_t pages() const { return static_cast<int64_t>(references_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t used() const { return pages() - free(); }
  int64_t peak() const { return peak_; }  // high-water mark of used(), since the start or reset_peak()
  void reset_peak() { peak_ = used(); }

 private:
  std::vector<int32_t> free_, references_;
  int64_t peak_ = 0;
};

}  // namespace pare
