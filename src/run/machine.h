// A machine to plan for (data/machines/*.toml): what it holds and how fast it is, each figure with its source.
//
//   name = "NVIDIA H200"
//   [published]            # or [measured], [assumed]: the source of the figures below
//   memory = 141e9         # bytes
//   flops_bf16 = 989e12    # FLOP/s of matrix products
//   share.attn_fwd = 0.4   # part of the roofline that an op reaches
#pragma once
#include <map>
#include <string>

#include "base/tensor.h"
#include "ops/cost.h"

namespace pare {

struct Machine {
  struct Figure {
    double value;
    std::string source;  // measured, published or assumed
  };
  std::string name;
  // memory (bytes), reserve (bytes of it that a run does not get), flops_f32, flops_bf16 (FLOP/s), bandwidth (bytes/s,
  // reads plus writes), launch (seconds of a call that does nothing), share.OP, share.other (ops without a line);
  // multiprocessors, of a GPU; and, needed by plans of several ranks alone, link and network (bytes/s that a device
  // sends within its node and beyond).
  std::map<std::string, Figure> figures;

  // Throws Error(usage), naming the key, where there is none.
  double figure(const std::string& key) const;
  int multiprocessors() const;  // 1: of a device whose kernels divide all work evenly
  // Bytes that a run can have.
  size_t memory() const { return static_cast<size_t>(figure("memory") - figure("reserve")); }
  // Returns launch + max(stretch FLOP / FLOP/s, stretch bytes / bandwidth, bytes sent within the machine / link, bytes
  // sent beyond / network) / share for a call of `op`.
  double seconds(const std::string& op, const Cost& cost, DType act, const Stretch& stretch = {}) const;
  // Is the time of the call that of its bytes?
  bool bound_by_memory(const Cost& cost, DType act) const;
  // Returns the share of each of `n` processes that compute on it at the same time.
  Machine shared_by(int n) const;
};

// `file`: or the name of one of data/machines.  Throws Error(usage) with file and line for what is no figure: an
// unknown key (naming the nearest), one given twice, a negative number, a share of 0; and for figures that are missing.
Machine read_machine(const std::string& file);

// The same file: reads back as the same machine.
std::string to_toml(const Machine& machine);

}  // namespace pare
