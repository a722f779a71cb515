// Named memory.  Every byte that ops touch comes from an arena, so the arenas of a run account for all its memory.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/tensor.h"

namespace pare {

// One piece of memory for the arenas of two sides, which use it by turns (MemoryTurn): what one side holds is lost when
// the other one has its turn.
class SharedMemory {
 public:
  // Reserves `bytes` of `memory`: of the sides, what the arenas of the larger one take.
  SharedMemory(const Memory& memory, size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  struct Side {
    SharedMemory& memory;
    size_t taken = 0;  // bytes, by its arenas
    int turns = 0;     // that are being had
  };
  Side sides[2] = {{*this}, {*this}};

 private:
  friend class Arena;
  const Memory& memory_;
  const size_t bytes_;
  char* base_ = nullptr;
};

class Arena {
 public:
  // Reserves `limit` bytes of `memory`, the most it will ever hold; without a limit, all of the memory.  With a `side`
  // they are the next ones of that side.
  Arena(std::string name, const Memory& memory, size_t limit, SharedMemory::Side* side = nullptr);
  explicit Arena(std::string name, const Memory& memory = host_memory)
      : Arena(std::move(name), memory, memory.total()) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns a contiguous tensor, 64-byte aligned, not zeroed.  Throws Error(Exit::memory), naming the arena and its
  // largest entries, if it would exceed `limit`.
  Tensor alloc(const std::string& name, DType dtype, std::initializer_list<int64_t> shape);

  // rewind() frees everything allocated since the mark (last in, first out).
  size_t mark() const { return used_; }
  void rewind(size_t mark);

  const std::string& name() const { return name_; }
  size_t used() const { return used_; }
  size_t peak() const { return peak_; }  // high-water mark of used(), since the start or reset_peak()
  void reset_peak() { peak_ = used_; }
  size_t limit() const { return limit_; }

  struct Entry {
    std::string name;
    size_t offset, bytes;  // bytes rounded up to the alignment
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  friend class MemoryTurn;
  std::string name_;
  const Memory& memory_;
  SharedMemory::Side* const side_;  // null: its memory is its own
  size_t limit_, used_ = 0, peak_ = 0;
  char* base_ = nullptr;
  std::vector<Entry> entries_;
};

// While it lives, so does what the arenas of that side hold.  Throws std::logic_error where the other side has a turn.
// No effect for an arena that is not shared.
class MemoryTurn {
 public:
  explicit MemoryTurn(const Arena& arena);
  ~MemoryTurn();
  MemoryTurn(const MemoryTurn&) = delete;
  MemoryTurn& operator=(const MemoryTurn&) = delete;

 private:
  SharedMemory::Side* const side_;
};

// Frees at the end of a scope what was allocated in it.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.rewind(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  size_t mark_;
};

}  // namespace pare
