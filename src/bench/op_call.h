// Calls of single ops on a device, on operands of a chosen size: what `pare bench` measures.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "base/arena.h"
#include "cases/cases.h"
#include "ops/device.h"

namespace pare {

// Operands in the memory of a device: random numbers, the same at every call of the same sequence.
class DeviceOperands : public cases::Operands {
 public:
  DeviceOperands(Device& device, DType act, Arena& arena) : Operands(act, DType::f32), device_(device), arena_(arena) {}

  void compute(const cases::Call& call) override;
  void choose(TensorKernel kernel) override;

 protected:
  Tensor make(const std::string& name, cases::Use use, DType dtype, const cases::Shape& shape, int64_t gap,
              const cases::Fill& fill) override;
  Tensor make_index(const std::string& name, cases::Use use, const cases::Shape& shape, int64_t gap,
                    const std::vector<int32_t>& v) override;

 private:
  Tensor alloc(DType dtype, const cases::Shape& shape, int64_t gap);

  Device& device_;
  Arena& arena_;
};

struct OpCall {
  std::function<void()> run;  // may be repeated; on a queued table it returns at once
  Cost cost;                  // of one run, as the ledger counts it
  std::function<Stretch(int)> stretch = {};
};
// `operands` are of `device`; both must outlive the call.
OpCall make_call(Device& device, const cases::OpCase& op, DeviceOperands& operands, const cases::Dims& dims);

}  // namespace pare
