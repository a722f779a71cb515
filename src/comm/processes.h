// Ranks that are processes of this machine, started by the program itself and connected by UNIX sockets.
#pragma once
#include <sys/types.h>

#include "comm/comm.h"

namespace pare {

constexpr int kMostRanks = 16;  // on one machine: each has a socket to every other

// Starts `ranks` processes and returns in each of them: world() is theirs from then on.  1: does nothing.  The caller's
// process passes signals on, waits, and exits with the code of the job; a rank that dies, is silent or stands still
// ends the others.  Call it before threads, files or devices are opened.  Throws Error(usage) under mpirun or srun.
void start_ranks(int ranks);
// Returns the launcher's process in a rank that start_ranks() started, else 0.
pid_t launcher_of_ranks();

// The parts of that, for tests.  sockets[r][q]: the end of rank r to rank q; -1: its own.
std::vector<std::vector<int>> connect_sockets(int ranks);
// Takes over the sockets of a rank.  `launcher`: a socket for its pulses; -1: none.
std::unique_ptr<Comm> make_socket_comm(int rank, std::vector<int> sockets, int launcher);

}  // namespace pare
