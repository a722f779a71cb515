#include "kv/page_pool.h"

#include <algorithm>

#include "base/arena_error.h"

namespace pare {

PagePool::PagePool(int64_t pages) {
  expect(pages >= 1, "a pool of ", pages, " pages");
  if (pages > INT32_MAX)
    throw ArenaError(cat(pages,
                         " pages of keys and values are more than can be numbered; lower rollout.max_num_seqs or the "
                         "lengths, or set rollout.kv_cache_bytes"));
  references_.assign(pages, 0);
  free_.resize(pages);
  for (int64_t i = 0; i < pages; i++) free_[i] = static_cast<int32_t>(pages - 1 - i);
}

int32_t PagePool::allocate() {
  expect(!free_.empty(), "all ", pages(), " pages are in use: taken without a reservation");
  const int32_t page = free_.back();
  free_.pop_back();
  references_[page] = 1;
  peak_ = std::max(peak_, used());
  return page;
}

void PagePool::retain(int32_t page) {
  expect(references(page) > 0, "page ", page, " is free and cannot be shared");
  references_[page]++;
}

void PagePool::release(int32_t page) {
  expect(references(page) > 0, "page ", page, " is free already");
  if (--references_[page] == 0) free_.push_back(page);
}

int32_t PagePool::references(int32_t page) const {
  expect(page >= 0 && page < pages(), "page ", page, " of ", pages());
  return references_[page];
}

}  // namespace pare
