// Which instruction set the `cpu` table computes with.  All give the same bits.
#pragma once

namespace pare {

struct Kernels;

// "avx512", "avx2", "neon" or "generic": the best of this machine, or what the environment variable PARE_ISA names.
const char* cpu_isa();
// Changes it, for tests; null: to the best.  Error if this machine lacks it.  Not to be called while ops run.
void set_cpu_isa(const char* name);
const Kernels& cpu_kernels();

}  // namespace pare
