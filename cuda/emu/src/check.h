// Hooks of the access checker (check.cpp), which the `check` build links; in the others they are empty.
#pragma once
#include "internal.h"

namespace cuemu::check {

#ifdef CUEMU_CHECK

void launch_begin();
void block_begin();
void block_end();
void meet(unsigned first, unsigned last);  // these threads of the block are at the same point
// A barrier of the whole block, or of some of its threads.
void sync_block();
void sync_threads(const uint16_t* who, unsigned n);
void fence();
void access(const void* p, size_t bytes, bool write, bool atomic, const Loc&);
void copy(void* to, const void* from, size_t bytes, const Loc&);
void async_issue(const AsyncCopy&);
void async_done(const AsyncCopy&);
void add(Alloc&);  // memory that kernels may use: nothing in it is written yet
void remove(Alloc&);
void host_wrote(const void* p, size_t bytes);

// Accesses do not count while one of these lives.
struct Pause {
  Pause();
  ~Pause();
};

#else

inline void launch_begin() {}
inline void block_begin() {}
inline void block_end() {}
inline void meet(unsigned, unsigned) {}
inline void sync_block() {}
inline void sync_threads(const uint16_t*, unsigned) {}
inline void fence() {}
inline void access(const void*, size_t, bool, bool, const Loc&) {}
inline void copy(void*, const void*, size_t, const Loc&) {}
inline void async_issue(const AsyncCopy&) {}
inline void async_done(const AsyncCopy&) {}
inline void add(Alloc&) {}
inline void remove(Alloc&) {}
inline void host_wrote(const void*, size_t) {}
struct Pause {
  Pause() {}
  ~Pause() {}
};

#endif

}  // namespace cuemu::check
