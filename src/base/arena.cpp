#include "base/arena.h"

#include <algorithm>

#include "base/arena_error.h"

namespace pare {

namespace {
constexpr size_t kAlign = 64;
size_t round_up(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }
}  // namespace

SharedMemory::SharedMemory(const Memory& memory, size_t bytes) : memory_(memory), bytes_(bytes) {
  if (bytes == 0 || &memory == &no_memory) return;
  base_ = static_cast<char*>(memory.take(bytes));
  if (!base_) throw ArenaError(cat("the system refused ", bytes, " bytes, which arenas share"));
}

SharedMemory::~SharedMemory() {
  if (base_) memory_.give(base_, bytes_);
}

Arena::Arena(std::string name, const Memory& memory, size_t limit, SharedMemory::Side* side)
    : name_(std::move(name)), memory_(memory), side_(side), limit_(limit) {
  if (limit == 0 || &memory == &no_memory) return;
  if (side) {
    expect(round_up(limit) <= side->memory.bytes_ - side->taken, "arena '", name_, "' of ", limit,
           " bytes is more than is left of its side");
    base_ = side->memory.base_ + side->taken;
    side->taken += round_up(limit);
    return;
  }
  base_ = static_cast<char*>(memory.take(limit));
  if (!base_) throw ArenaError(cat("arena '", name_, "': the system refused ", limit, " bytes"));
}

Arena::~Arena() {
  if (base_ && !side_) memory_.give(base_, limit_);
}

MemoryTurn::MemoryTurn(const Arena& arena) : side_(arena.side_) {
  if (!side_) return;
  for (const SharedMemory::Side& s : side_->memory.sides)
    expect(&s == side_ || s.turns == 0, "arena '", arena.name(), "' is used while others hold its memory");
  side_->turns++;
}

MemoryTurn::~MemoryTurn() {
  if (side_) side_->turns--;
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
    throw ArenaError(cat("arena '", name_, "': ", name, " ", t.str(), " needs ", bytes, " bytes, but ", used_, " of ",
                         limit_, " are in use", list));
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
