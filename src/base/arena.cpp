#include "base/arena.h"

#include <algorithm>

namespace pare {

namespace {
constexpr size_t kAlign = 64;
size_t round_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }
}  // namespace

Arena::Arena(std::string name, const Memory& memory, size_t limit)
    : name_(std::move(name)), memory_(memory), limit_(limit) {
  if (limit == 0 || &memory == &no_memory) return;
  base_ = static_cast<char*>(memory.take(limit));
  if (!base_) throw Error(Exit::memory, cat("arena '", name_, "': the system refused ", limit, " bytes"));
}

Arena::~Arena() {
  if (base_) memory_.give(base_, limit_);
}

Tensor Arena::alloc(const std::string& name, DType dtype, std::initializer_list<int64_t> shape) {
  Tensor t = make_tensor(nullptr, dtype, shape);
  const size_t bytes = round_up(t.bytes());
  if (bytes > limit_ - used_) {
    std::vector<Entry> largest = entries_;
    std::sort(largest.begin(), largest.end(), [](const Entry& a, const Entry& b) { return a.bytes > b.bytes; });
    std::string list;
    for (size_t i = 0; i < std::min<size_t>(largest.size(), 5); i++)
      list += cat(i ? ", " : "; the largest entries: ", largest[i].name, " ", largest[i].bytes);
    throw Error(Exit::memory, cat("arena '", name_, "': ", name, " ", t.str(), " needs ", bytes, " bytes, but ", used_,
                                  " of ", limit_, " are in use", list));
  }
  if (base_) t.data = base_ + used_;
  entries_.push_back({name, used_, bytes});
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return t;
}

void Arena::rewind(size_t mark) {
  expect(mark <= used_, "arena '", name_, "' rewound to ", mark, ", past ", used_);
  while (!entries_.empty() && entries_.back().offset >= mark) entries_.pop_back();
  used_ = mark;
}

}  // namespace pare
