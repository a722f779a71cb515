// A wait for an mbarrier or a turn that lasts too long, because an arrival was lost, is recorded and ends the kernel;
// the error reports it.  Without this the program would hang silently.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace pare::cuda {

constexpr uint32_t kPatience = 3;  // units of the clock, 4.3 s
constexpr uint32_t kLostTurn = ~uint32_t{0};

struct LostArrival {
  // is: 1; byte of shared memory at which the mbarrier lies, or kLostTurn, and its parity is the turn
  volatile uint32_t is, byte, parity, thread, block[3];
};

std::vector<LostArrival**>& watched_files();  // the variable of each, on the device

// Returns the recorded wait, "" if there is none.
std::string lost_arrival_report();

}  // namespace pare::cuda
