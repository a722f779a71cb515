#include "bench/machine.h"

#include <algorithm>

#include "base/error.h"
#include "base/memory_limits.h"
#include "bench/measure.h"

namespace pare {

Machine measure_machine(const Table& table, const std::string& name, DType act, double seconds) {
  const Ceilings ceilings = measure_ceilings(table);
  if (ceilings.flops.per_second <= 0 || ceilings.bytes.per_second <= 0)
    fail("a machine needs ceilings: products ", ceilings.flops.how, ", memory ", ceilings.bytes.how);
  const bool host = table.memory == &host_memory;
  Machine m{.name = name, .figures = {}};
  const auto set = [&](const std::string& key, double value, const char* source) { m.figures[key] = {value, source}; };
  set("memory", static_cast<double>(host ? machine_memory() : table.memory->total()), "measured");
  set("reserve", host ? 0 : static_cast<double>(table.memory->total() - table.memory->free()), "measured");
  set("bandwidth", ceilings.bytes.per_second, "measured");
  // Ranks of a host write what they send and read it again, once on either side.
  if (host) set("link", ceilings.bytes.per_second / 4, "assumed");
  const double flops = ceilings.flops.per_second;
  set("flops_f32", host ? flops : flops / 15, host ? "measured" : "assumed");
  set("flops_bf16", flops, host ? "assumed" : "measured");

  const int multiprocessors = table.probe ? table.probe->multiprocessors() : 1;
  if (multiprocessors > 1) set("multiprocessors", multiprocessors, "measured");

  const auto measure = [&](const cases::OpCase& op, const std::string& shape) {
    return measure_op(table, act, op, cases::Dims(op.op, op.dims, shape), {.seconds = seconds});
  };
  const double launch = measure(cases::op_case("zero"), "n=64").time.median;
  set("launch", launch, "measured");
  for (const cases::OpCase& op : cases::op_cases()) {
    const Measured one = measure(op, "");
    const double bound = one.bound(ceilings, multiprocessors > 1 ? one.stretch(multiprocessors) : Stretch{});
    if (one.time.median < 10 * launch) continue;  // it has nothing to do, as ops between ranks on one
    if (bound > 0) set(cat("share.", op.op), bound / (one.time.median - launch), "measured");
  }
  set("share.other", 1, "assumed");
  return m;
}

}  // namespace pare
