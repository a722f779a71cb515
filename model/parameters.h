// Parameters on a device: what files hold and an optimizer changes, of a model or of its adapters.
#pragma once
#include <string>
#include <vector>

#include "base/arena.h"
#include "model/config.h"
#include "model/parts.h"
#include "ops/device.h"

namespace pare {

class Parameters {
 public:
  // Copies the parameters to the device, a piece at a time, rounded to `dtype`.  `in_parts`: each rank reads its own
  // part and ranks exchange them, which is for values that are computed: files of one rank may differ from another's.
  void set_parameters(const ParameterReader& read, bool in_parts = false);
  void set_parameters(const std::vector<float>& host);  // in the order of the layout
  // Returns a reader of the device's parameters or, if there is a master, of this rank's elements of it; `this` must
  // outlive it.
  ParameterReader reader() const;
  ParameterReader rounded() const;  // of the device's
  std::vector<float> get_parameters() const;
  void gather_parts() const;  // each rank's part of the blocks, to all ranks
  int64_t size() const;
  // The sum modulo 2^64 of HashRuns::element(first + i, x) over this rank's elements i of the layout, of the master
  // where there is one.  The sum over ranks is that of one rank: it depends on the values alone.
  uint64_t hash(uint64_t first = 0) const;
  int64_t own_begin() const { return cuts[device.comm.rank()]; }
  int64_t own_end() const { return cuts[device.comm.rank() + 1]; }
  int64_t own() const { return own_end() - own_begin(); }

  Device& device;
  const DType dtype, stat;  // roles act and stat (list.h)
  const std::vector<Parameter> layout;
  Tensor master;  // stat [own()] in the order of the layout, or absent: what the optimizer changes where the parameters
                  // are its rounding
  std::vector<ParameterBlock> blocks;  // in the order of the layout
  Tensor packed;                       // u8: the memory of them all
  std::vector<int64_t> cuts;           // part_cuts: rank r's part of the optimizer

 protected:
  Parameters(Device& device, Arena& weights, DType dtype, std::vector<Parameter> layout);
  // The blocks, in order, with nothing else from `weights` between them, then complete().  They are undefined until
  // set_parameters.
  Tensor add_vector(Arena& weights, const std::string& name, int64_t n);
  Weight add_weight(Arena& weights, const std::string& name, int64_t outputs, int64_t inputs, double rate = 1);
  // With `trainable` allocates what the optimizer needs beside the parameters: a master for bf16, of this rank's part.
  void complete(Arena& weights, bool trainable);

 private:
  int64_t next_offset() const;
  int64_t place(const Arena& weights) const { return static_cast<int64_t>(weights.mark() - start_); }
  const ParameterBlock& block_of(const Parameter& parameter) const;
  Tensor staged(int64_t rows, int64_t inputs) const;
  uint64_t hash(const Tensor& x, uint64_t first) const;
  const size_t start_;  // of the blocks, in `weights`
  Tensor staging_;      // act: rows of a weight on their way
  Tensor hashes_;       // i32: of runs of parameters
};

std::vector<double> download_stat(Device& device, const Tensor& t);  // f32 or f64

}  // namespace pare
