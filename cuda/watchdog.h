// A wait for an mbarrier that lasts too long, as an arrival was lost, is noted and ends the kernel, whose error then
// says so.  Otherwise the program would hang, and say nothing.
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

// What was noted, "" if nothing; of use when a kernel has failed.
std::string lost_arrival_report();

}  // namespace pare::cuda
