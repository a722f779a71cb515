// A machine file (run/machine.h) of the machine that it runs on.
#pragma once
#include "ops/list.h"
#include "run/machine.h"

namespace pare {

// Ceilings, the seconds of a call that does nothing, and the share of every op at its default sizes (those of
// Qwen2.5-1.5B), each measured for about `seconds`.  FLOP/s of a type that the table's ceilings are not of are
// assumed: the cpu has f32 alone, and vector units of a GPU reach about a fifteenth of its matrix units.  So is what
// ranks on a host send; what GPUs send is not in the file, since one alone does not know it.
Machine measure_machine(const Table& table, const std::string& name, DType act, double seconds);

}  // namespace pare
