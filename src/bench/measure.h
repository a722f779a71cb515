// Times of ops, and what the machine can do at best, measured in the same run.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "bench/op_call.h"
#include "ops/probe.h"

namespace pare {

// Peak rates of the table's device.  `cpu`: fused multiply-adds from registers on all threads, and the faster of
// reading and of copying 256 MB.  A device with a probe: what that measures.  Others: nothing.
struct Ceilings {
  Rate flops, bytes;
};
Ceilings measure_ceilings(const Table& table);

double peak_flops_one_core();  // multiply and add counted as two
// Bytes a second of reading `bytes` of memory again and again, on all threads: the bandwidth of the cache they fit.
double read_bandwidth(int64_t bytes);

struct Timing {
  double median = 0, least = 0, most = 0;  // seconds of a call
  int64_t samples = 0, calls = 0;          // calls of a sample, timed together
};

// Options of the measurement of an op.
struct MeasureOptions {
  bool rotate = true;  // over as many copies of the operands as twice the last cache holds; else one, which stays there
  double seconds = 1;  // at least three samples, at most 30, and no more after so long
};

// A call that is not made.
struct Sized {
  Cost cost;
  std::function<Stretch(int)> stretch;
  int64_t operand_bytes;
};
Sized size_op(DType act, const cases::OpCase& op, const cases::Dims& dims);

struct Measured {
  std::string op, shape;
  DType act;
  Cost cost;                            // of a call
  std::function<Stretch(int)> stretch;  // likewise
  Timing time;
  int64_t copies = 0, operand_bytes = 0;  // of a copy
  double bytes() const { return static_cast<double>(cost.read + cost.written); }
  // Seconds that the call takes at best, with its work divided as the kernels do if `s` says how; 0: not known.
  double bound(const Ceilings& c, const Stretch& s = {}) const;
};

// Throws Error(Exit::usage) for a shape that the op cannot have or that the memory does not hold.
Measured measure_op(const Table& table, DType act, const cases::OpCase& op, const cases::Dims& dims,
                    const MeasureOptions& o = {});

nlohmann::ordered_json to_json(const Rate& rate);
nlohmann::ordered_json to_json(const Measured& m, const cases::Dims& dims, const Ceilings& c);

}  // namespace pare
