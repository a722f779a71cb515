// The access profile: cuemu.h states what it counts.
#pragma once
#include "internal.h"

namespace cuemu::profile {

void launch_begin();
// One access of a thread of the cluster; empty unless the profile is asked for.
void access(uint32_t place, const void* p, size_t bytes, bool write, bool shared, unsigned thread);
void meet(unsigned warp);  // the lanes of a warp are at the same point

}  // namespace cuemu::profile
