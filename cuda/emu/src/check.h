// Hooks of the access checker (check.cpp), which the `check` build links; in the others they are empty.
#pragma once
#include "internal.h"

namespace cuemu::check {

#ifdef CUEMU_CHECK

void launch_begin();
void cluster_begin();
void cluster_end();
void block_returned();                     // that of the running thread
void meet(unsigned first, unsigned last);  // these threads of the cluster are at the same point
// A barrier of the whole block, or of some of its threads.
void sync_block();
void sync_threads(const uint16_t* who, unsigned n);
void fence();
void access(const void* p, size_t bytes, bool write, bool atomic, const Loc&);
void copy(void* to, const void* from, size_t bytes, const Loc&);
void async_issue(const AsyncCopy&);
void async_done(const AsyncCopy&);
// mbarriers: by the running thread, but for the end of a phase.
void mbarrier_init(const uint64_t*);
void mbarrier_arrive(const uint64_t*);
void mbarrier_reached(const uint64_t*, const Loc&);  // to arrive: is it known to be initialised?
void mbarrier_init_fence();
void mbarrier_phase(const uint64_t*);
void mbarrier_passed(const uint64_t*);
void proxy_fence();
// The barrier of the cluster: all have arrived; a thread goes on.
void cluster_arrive();
void cluster_met();
void cluster_passed();
void async_access(const void* p, size_t bytes, bool write, const Loc&);  // by a copy or product of the running thread
// Elements that nobody has written are copied as they are; each two bytes of the target are known to be such.
void tensor_source(const void* p, size_t bytes, const Loc&);
void tensor_landed(const void* to, const void* from, const Loc&);
void tensor_issue(const TensorCopy&, size_t bytes);
void tensor_done(const TensorCopy&, size_t bytes);
// Stores: the source, and each row of the target.
void store_reads(const TensorCopy&, size_t bytes, bool done);
void store_writes(const TensorCopy&, const void* to, size_t bytes, bool done);
void products_done(unsigned warp);
void add(Alloc&);  // memory that kernels may use: nothing in it is written yet
void remove(Alloc&);
void host_wrote(const void* p, size_t bytes);

// Accesses do not count while one of these lives.
struct Unchecked {
  Unchecked();
  ~Unchecked();
};

#else

inline void launch_begin() {}
inline void cluster_begin() {}
inline void cluster_end() {}
inline void block_returned() {}
inline void meet(unsigned, unsigned) {}
inline void sync_block() {}
inline void sync_threads(const uint16_t*, unsigned) {}
inline void fence() {}
inline void access(const void*, size_t, bool, bool, const Loc&) {}
inline void copy(void*, const void*, size_t, const Loc&) {}
inline void async_issue(const AsyncCopy&) {}
inline void async_done(const AsyncCopy&) {}
inline void mbarrier_init(const uint64_t*) {}
inline void mbarrier_arrive(const uint64_t*) {}
inline void mbarrier_reached(const uint64_t*, const Loc&) {}
inline void mbarrier_init_fence() {}
inline void mbarrier_phase(const uint64_t*) {}
inline void mbarrier_passed(const uint64_t*) {}
inline void proxy_fence() {}
inline void cluster_arrive() {}
inline void cluster_met() {}
inline void cluster_passed() {}
inline void async_access(const void*, size_t, bool, const Loc&) {}
inline void tensor_source(const void*, size_t, const Loc&) {}
inline void tensor_landed(const void*, const void*, const Loc&) {}
inline void tensor_issue(const TensorCopy&, size_t) {}
inline void tensor_done(const TensorCopy&, size_t) {}
inline void store_reads(const TensorCopy&, size_t, bool) {}
inline void store_writes(const TensorCopy&, const void*, size_t, bool) {}
inline void products_done(unsigned) {}
inline void add(Alloc&) {}
inline void remove(Alloc&) {}
inline void host_wrote(const void*, size_t) {}
struct Unchecked {
  Unchecked() {}
  ~Unchecked() {}
};

#endif

}  // namespace cuemu::check
