// Thrown by arenas, for callers that can say how much memory is needed in all and how to need less.
#pragma once
#include "base/error.h"

namespace pare {

// An arena is full, or the system refuses its memory.
struct ArenaError : Error {
  explicit ArenaError(const std::string& what) : Error(Exit::memory, what) {}
};

}  // namespace pare
