// Scalars for TensorBoard: the event file that its reader (and everything built on it) expects, written by hand.
//
// A file is a row of records (the TFRecord format): length as uint64, masked CRC-32C of those 8 bytes, the bytes,
// masked CRC-32C of the bytes; all little-endian.  Each record is an Event message of protocol buffers; the first one
// names the version of the format.  These functions give the bytes; a run appends them to a file whose name contains
// "tfevents".
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "rl/metrics.h"

namespace pare {

// Castagnoli's polynomial, reflected (RFC 3720, appendix B.4).
uint32_t crc32c(std::string_view bytes);

// Returns the first record of a file.  Times are seconds since 1970.
std::string tensorboard_header(double wall_time);

// Bytes of the whole records that `bytes` begins with, by their lengths and CRCs.
size_t tensorboard_whole(std::string_view bytes);
// One record with every metric that is finite, as fp32.
std::string tensorboard_event(int64_t step, double wall_time, const Metrics& metrics);

}  // namespace pare
