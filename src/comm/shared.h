// Parts that every kind of Comm needs.
#pragma once
#include "comm/comm.h"

namespace pare {

// Bytes that a rank sends to another and expects from it; each rank has [ranks] of these in an exchange.
struct Sizes {
  uint64_t sent, expected;
};
std::vector<Sizes> sizes_of(std::span<const Comm::Piece> out, std::span<const Comm::Piece> in);
// Throws std::logic_error if those of this rank are not what the others have of it.
void expect_sizes(int rank, std::span<const Sizes> own, std::span<const Sizes> others);

// Exchanges nothing, at the end of a rank's process, so that a rank which has ended is not taken for lost.
void meet_at_end(Comm& comm);

// Makes `comm` the one that world() returns.
void set_world(std::unique_ptr<Comm> comm);
// Throws Error(usage) if mpirun or srun has started this process as one of several ranks.
void check_not_launched(int ranks);

}  // namespace pare
