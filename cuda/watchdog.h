// A wait for an mbarrier that lasts too long, because an arrival was lost, is recorded and ends the kernel; the error
// reports it.  Without this the program would hang silently.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace pare::cuda {

constexpr uint32_t kPatience = 3;  // units of the clock, 4.3 s

struct LostArrival {
  volatile uint32_t is, byte, parity, thread, block[3];  // is: 1; byte of shared memory at which the mbarrier lies
};

std::vector<LostArrival**>& watched_files();  // the variable of each, on the device

// Returns the recorded wait, "" if there is none.
std::string lost_arrival_report();

}  // namespace pare::cuda
