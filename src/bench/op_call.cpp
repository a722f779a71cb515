#include "bench/op_call.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "base/half.h"
#include "base/rng.h"
#include "ops/probe.h"

namespace pare {

Dims::Dims(const char* op, const std::vector<Dim>& dims, const std::string& text) {
  const auto known = [&] {
    std::string s;
    for (const Dim& d : dims) s += cat(s.empty() ? " " : "; ", d.name, "=", d.value, " (", d.meaning, ")");
    return s;
  };
  for (const Dim& d : dims) values_.emplace_back(d.name, d.value);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto dim = std::find_if(dims.begin(), dims.end(), [&](const Dim& d) { return d.name == name; });
    if (equals == std::string::npos || dim == dims.end())
      fail(op, " has no size ", part, "; it has, with their defaults:", known());
    int64_t value = 0;
    const char *first = part.data() + equals + 1, *last = part.data() + part.size();
    const auto [stop, error] = std::from_chars(first, last, value);
    if (error != std::errc{} || stop != last || first == last || value < dim->least)
      fail(op, ": ", part, " is not a whole number of at least ", dim->least, " (", dim->meaning, ")");
    values_[static_cast<size_t>(dim - dims.begin())].second = value;
  }
}

int64_t Dims::operator[](const char* name) const {
  for (const auto& [n, value] : values_)
    if (n == name) return value;
  throw std::logic_error(cat("a benchmark reads the size ", name, ", which is not in its list"));
}

std::string Dims::str() const {
  std::string s;
  for (const auto& [name, value] : values_) s += cat(s.empty() ? "" : ",", name, "=", value);
  return s;
}

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

}  // namespace

Tensor Operands::filled(DType dtype, Shape shape, bool positive) {
  const Tensor t = arena_.alloc("operand", dtype, shape);
  if (device.planning()) return t;
  const int64_t all = t.size();
  const void* const block = block_of(dtype, positive);
  for (int64_t first = 0; first < all; first += kBlock) {
    const int64_t n = std::min(kBlock, all - first);
    void* const to = static_cast<char*>(t.data) + first * static_cast<int64_t>(dtype_size(dtype));
    device.upload({make_tensor(to, dtype, {n}), block});
    if (first / kBlock % 64 == 63) device.wait();
  }
  device.wait();
  return t;
}

Tensor Operands::list(Shape shape, const std::vector<int32_t>& values) {
  const Tensor t = arena_.alloc("indices", DType::i32, shape);
  expect(t.size() == static_cast<int64_t>(values.size()), t, " for ", values.size(), " values");
  device.upload({t, values.data()});
  return t;
}

Tensor Operands::indices(Shape shape, const std::function<int64_t(int64_t)>& f) {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  std::vector<int32_t> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i++) values[static_cast<size_t>(i)] = static_cast<int32_t>(f(i));
  return list(shape, values);
}

std::vector<int32_t> shuffled(int64_t n) {
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(rng_key(2, RngStream::test, 0));
  for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[rng.below(static_cast<uint32_t>(i))]);
  return order;
}

void choose_tensor_kernel(const Operands& o, const Dims& d) {
  const int64_t kernel = d["kernel"];
  if (kernel > 2) fail("kernel=", kernel, ": it is 0, 1 or 2");
  const Probe* const probe = o.device.table().probe;
  if (probe && !probe->tensor_kernel(static_cast<TensorKernel>(kernel)))
    fail("kernel=", kernel, ": wgmma is of compute capability 9.0");
}

const std::vector<OpBench>& op_benches() {
  static const std::vector<OpBench> all = [] {
    std::vector<OpBench> list;
    add_layer_benches(list);
    add_logits_benches(list);
    add_attention_benches(list);
    add_kv_benches(list);
    return list;
  }();
  return all;
}

const OpBench& op_bench(const std::string& op) {
  std::string all;
  for (const OpBench& b : op_benches()) {
    if (op == b.op) return b;
    all += cat(all.empty() ? "" : ", ", b.op);
  }
  fail("there is no op ", op, "; there are ", all);
}

}  // namespace pare
