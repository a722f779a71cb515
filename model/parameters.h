// Parameters on a device: what files hold and an optimizer changes, of a model or of its adapters.
#pragma once
#include <string>
#include <vector>

#include "base/arena.h"
#include "model/hf/config.h"
#include "ops/device.h"

namespace pare {

// Where parameters lie: one or more that follow one another in the layout, as a vector or as the rows of a weight.
struct ParameterBlock {
  int64_t offset;   // of the first, as in Parameter
  Tensor vector;    // act [n]; or absent, and
  Weight weight;    // [O, I]
  double rate = 1;  // of learning, relative to the optimizer's
  int64_t size() const { return vector ? vector.size() : weight.size(); }
};

class Parameters {
 public:
  // Copies the parameters to the device, a piece at a time, rounded to `dtype`.
  void set_parameters(const ParameterReader& read);
  void set_parameters(const std::vector<float>& host);  // in the order of the layout
  ParameterReader reader() const;  // of the device's, or of the master where there is one; `this` lives as long
  std::vector<float> get_parameters() const;
  int64_t size() const;

  Device& device;
  const DType dtype, stat;  // roles act and stat (list.h)
  const std::vector<Parameter> layout;
  const Tensor master;  // stat [parameters] in the order of the layout, or absent: what the optimizer changes where the
                        // parameters are its rounding
  std::vector<ParameterBlock> blocks;  // in the order of the layout

 protected:
  // With `trainable` allocates what the optimizer needs beside the parameters, which is a master for bf16.
  Parameters(Device& device, Arena& weights, DType dtype, bool trainable, std::vector<Parameter> layout);
  // The blocks, in order, then complete().  They are undefined until set_parameters.
  Tensor add_vector(Arena& weights, const std::string& name, int64_t n);
  Weight add_weight(Arena& weights, const std::string& name, int64_t outputs, int64_t inputs, double rate = 1);
  void complete(Arena& weights);

 private:
  int64_t next_offset() const;
  const ParameterBlock& block_of(const Parameter& parameter) const;
  Tensor staged(int64_t rows, int64_t inputs) const;
  Tensor staging_;  // act: rows of a weight on their way
};

}  // namespace pare
