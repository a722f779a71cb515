// Scalars for TensorBoard: the event file that its reader (and everything built on it) expects, written by hand.
//
// A file is a row of records (the TFRecord format): length as uint64, masked CRC-32C of those 8 bytes, the bytes,
// masked CRC-32C of the bytes; all little-endian.  Each record is an Event message of protocol buffers; the first one
// names the version of the format.
#pragma once
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

#include "rl/metrics.h"

namespace pare {

// Castagnoli's polynomial, reflected (RFC 3720, appendix B.4).
uint32_t crc32c(std::string_view bytes);

class EventWriter {
 public:
  // Appends to the file at `path`, or begins one at `wall_time` (seconds since 1970).  For TensorBoard to find it, its
  // name has to contain "tfevents".
  EventWriter(const std::string& path, double wall_time);
  // One event with every metric that is finite, as fp32; on the disk, as far as this process can tell, on return.
  void log(int64_t step, double wall_time, const Metrics& metrics);

 private:
  void record(const std::string& event);

  const std::string path_;
  std::ofstream file_;
};

}  // namespace pare
