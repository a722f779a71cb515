#include "bench/op_call.h"

#include <algorithm>

#include "base/half.h"
#include "base/rng.h"
#include "cases/call.h"

namespace pare {

namespace {

// Elements that are uploaded again and again; not a power of two, so rows differ.
constexpr int64_t kBlock = (int64_t{1} << 20) - 3;

template <class T>
std::vector<T> random_block(float low, T (*of)(float)) {
  Rng rng(rng_key(1, RngStream::test, 0));
  std::vector<T> block(kBlock);
  for (T& x : block) x = of(low + (1 - low) * uniform_open(rng.next()));
  return block;
}
const void* block_of(DType dtype, bool positive) {
  static const auto f = random_block<float>(-1, [](float x) { return x; });
  static const auto f0 = random_block<float>(0, [](float x) { return x; });
  static const auto b = random_block<uint16_t>(-1, f32_to_bf16);
  static const auto b0 = random_block<uint16_t>(0, f32_to_bf16);
  if (dtype == DType::f32) return positive ? f0.data() : f.data();
  return positive ? b0.data() : b.data();
}

#define X(op, Args) \
  void call(Device& device, const Args& a) { device.op(a); }
PARE_OPS(X)
#undef X
void call_any(Device& device, const cases::Call& a) {
  cases::visit(a, [&](const auto& args, auto) { call(device, args); });
}

}  // namespace

Tensor DeviceOperands::alloc(DType dtype, const cases::Shape& shape, int64_t gap) {
  int64_t row = 1;
  for (size_t i = 1; i < shape.size(); i++) row *= shape[i];
  if (shape.size() == 1) gap = 0;
  Tensor t = arena_.alloc("operand", dtype, {shape[0], row + gap});
  t.rank = static_cast<int>(shape.size());
  for (int64_t i = t.rank - 1, step = 1; i >= 0; step *= shape[i--]) {
    t.shape[i] = shape[i];
    t.stride[i] = i == 0 && t.rank > 1 ? row + gap : step;
  }
  return t;
}

Tensor DeviceOperands::make(const std::string&, cases::Use, DType dtype, const cases::Shape& shape, int64_t gap,
                            const cases::Fill& fill) {
  const Tensor t = alloc(dtype, shape, gap);
  if (device_.planning()) return t;
  if (dtype == DType::u8) {
    device_.zero({t});
    return t;
  }
  const int64_t all = t.rank > 1 ? t.shape[0] * t.stride[0] : t.shape[0];  // gaps too
  const void* const block = block_of(dtype, fill.positive);
  for (int64_t first = 0; first < all; first += kBlock) {
    const int64_t n = std::min(kBlock, all - first);
    void* const to = static_cast<char*>(t.data) + first * static_cast<int64_t>(dtype_size(dtype));
    device_.upload({make_tensor(to, dtype, {n}), block});
    if (first / kBlock % 64 == 63) device_.wait();
  }
  device_.wait();
  return t;
}

Tensor DeviceOperands::make_index(const std::string&, cases::Use, const cases::Shape& shape, int64_t gap,
                                  const std::vector<int32_t>& v) {
  const Tensor t = alloc(DType::i32, shape, gap);
  const int64_t pitch = t.rank > 1 ? t.stride[0] : t.shape[0], row = t.rank > 1 ? pitch - gap : pitch;
  std::vector<int32_t> values(static_cast<size_t>(t.rank > 1 ? t.shape[0] * pitch : row), -1);
  for (size_t i = 0; i < v.size(); i++) values[i / row * pitch + i % row] = v[i];
  device_.upload({make_tensor(t.data, DType::i32, {std::ssize(values)}), values.data()});
  return t;
}

void DeviceOperands::compute(const cases::Call& a) { call_any(device_, a); }

void DeviceOperands::choose(TensorKernel kernel) {
  const Probe* const probe = device_.table().probe;
  if (probe && !probe->tensor_kernel(kernel))
    fail("kernel=", static_cast<int>(kernel), ": wgmma is of compute capability 9.0");
}

OpCall make_call(Device& device, const cases::OpCase& op, DeviceOperands& operands, const cases::Dims& dims) {
  const cases::Call call = op.make(operands, dims);
  OpCall made{[&device, call] { call_any(device, call); }, {}};
  cases::visit(call, [&](const auto& a, auto) {
    made.cost = a.cost();
    made.stretch = [a](int n) { return stretch_of(a, n); };
  });
  return made;
}

}  // namespace pare
