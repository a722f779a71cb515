// Facts that the ranks of a run must agree on (comm/comm.h).
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "comm/comm.h"
#include "rl/metrics.h"
#include "run/config.h"

namespace pare {

// An Error(usage) where this number of ranks and nodes is not what the configuration asks for; `trains`: and where the
// shards of an update cannot be dealt to them.
void check_ranks(const Config& config, Comm& comm, bool trains);

// Threads of this rank where nothing else is said: the cores that the ranks of this machine may use, shared.  0: alone.
int shared_threads(Comm& comm);
// A sentence where ranks may use a core each, or less, of a machine that has more; else empty.
std::string binding_note(Comm& comm);

// Names and values that must be the same on all ranks: an Error(failed) names the first that differs, its
// ranks and values.
using Facts = std::vector<std::pair<std::string, std::string>>;
void expect_equal(Comm& comm, const Facts& facts);
Facts facts_of(const Config& config);    // every key
Facts facts_of(const Metrics& metrics);  // all but times
// Hashes of what a run reads, but for weights, and of the program that grades; "none": there is no such file.
Facts facts_of_files(const Config& config);

// An Error(usage) naming rank, host and folder where a rank does not see what rank 0 writes into it.
void check_shared_folder(Comm& comm, const std::string& folder);

}  // namespace pare
