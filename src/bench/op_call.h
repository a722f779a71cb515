// Calls of single ops on operands of a chosen size: what `pare bench` measures.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/arena.h"
#include "ops/device.h"

namespace pare {

// A size of an op's operands.  The letters are those of list.h, but M, N, K of a linear layer are those of every GEMM:
// y[M, N] = x[M, K] wT.
struct Dim {
  const char* name;
  int64_t value;        // where none is given: a layer of Qwen2.5-1.5B
  const char* meaning;  // with the unit
  int64_t least = 1;
};

class Dims {
 public:
  // `text`: "M=64,K=128"; what it leaves out has its default.  Throws Error(Exit::usage) listing the names there are.
  Dims(const char* op, const std::vector<Dim>& dims, const std::string& text);
  int64_t operator[](const char* name) const;
  const std::vector<std::pair<std::string, int64_t>>& all() const { return values_; }  // in the order of the list
  std::string str() const;                                                             // "M=64,N=1536,K=128"

 private:
  std::vector<std::pair<std::string, int64_t>> values_;
};

// Makes operands: random numbers in [-1, 1) unless said otherwise, the same at every call of the same sequence.
class Operands {
 public:
  Operands(Device& device, DType act, Arena& arena) : device(device), act_type(act), arena_(arena) {}

  using Shape = std::initializer_list<int64_t>;
  Tensor act(Shape shape) { return filled(act_type, shape, false); }
  Tensor stat(Shape shape) { return filled(DType::f32, shape, false); }
  Tensor bf16(Shape shape) { return filled(DType::bf16, shape, false); }
  Tensor positive(Shape shape, DType dtype = DType::f32) { return filled(dtype, shape, true); }  // [0, 1)
  Weight weight(int64_t outputs, int64_t inputs) { return {act({weight_panels(outputs), inputs, kPanel}), outputs}; }
  Tensor bytes(int64_t n) { return arena_.alloc("bytes", DType::u8, {n}); }  // not written
  Tensor list(Shape shape, const std::vector<int32_t>& values);
  Tensor indices(Shape shape, const std::function<int64_t(int64_t)>& f);  // f(i) for element i in order

  Device& device;
  const DType act_type;

 private:
  Tensor filled(DType dtype, Shape shape, bool positive);
  Arena& arena_;
};

struct OpCall {
  std::function<void()> run;  // may be repeated; on a queued table it returns at once
  Cost cost;                  // of one run, as the ledger counts it
};

struct OpBench {
  const char* op;  // its name in PARE_OPS
  std::vector<Dim> dims;
  OpCall (*make)(Operands& operands, const Dims& dims);
};

// Every op of the list.
const std::vector<OpBench>& op_benches();
// Throws Error(Exit::usage) listing the names there are.
const OpBench& op_bench(const std::string& op);

// Parts of the list.
void add_layer_benches(std::vector<OpBench>& list);
void add_logits_benches(std::vector<OpBench>& list);
void add_attention_benches(std::vector<OpBench>& list);
void add_kv_benches(std::vector<OpBench>& list);

// n numbers below n in a random order.
std::vector<int32_t> shuffled(int64_t n);

// Which kernel computes from now on what is written twice (TensorKernel).
inline const Dim kTensorKernel{"kernel", 0, "in bf16 on a GPU: 0 what it chooses, 1 mma.sync, 2 wgmma", 0};
void choose_tensor_kernel(const Operands& o, const Dims& d);

namespace detail {
template <class Args>
OpCall op_call(Operands& o, void (Device::*op)(const Args&), const Args& a) {
  return {[&device = o.device, op, a] { (device.*op)(a); }, a.cost()};
}
}  // namespace detail

}  // namespace pare
