// Ranks that are threads of this process: for plans of many devices and for tests.
#pragma once
#include <functional>

#include "comm/comm.h"

namespace pare {

// Calls f(comm) on nodes * node_ranks threads at a time, rank r of them on "node r / node_ranks"; with one, on the
// caller's.  Returns when all have ended.  What a rank throws ends those that wait for it, and reaches the caller: of
// several that of the lowest rank.
void run_ranks(int nodes, int node_ranks, const std::function<void(Comm&)>& f);

}  // namespace pare
