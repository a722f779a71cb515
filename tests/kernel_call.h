// Calls of ops on the CUDA kernels (table_kernels) in f32 and bf16, and on `ref`, with the same values.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/rng.h"
#include "comm/comm.h"
#include "op_harness.h"
#include "ops/linear.h"
#include "ops/list.h"
#include "ops/paged.h"
#include "ops/probe.h"

namespace pare::test::kernel {

using test::Buffer;

inline uint16_t to_bf16(float f) { return f32_to_bf16(f); }
inline float from_bf16(uint16_t b) { return bf16_to_f32(b); }

// The tensors of one op call on one table, by name.  Inputs are random values that bf16 holds exactly, a function of
// their names, so that every table and type sees the same numbers.
class Call {
 public:
  Call(const Table& table, DType act) : table(table), act_(act), stat_(act == DType::f64 ? act : DType::f32) {}
  const Table& table;

  Tensor act(const std::string& name, const Shape& shape, int64_t gap = 0) {
    return filled(add(name, act_, shape, gap), name);
  }
  Tensor stat(const std::string& name, const Shape& shape) { return filled(add(name, stat_, shape, 0), name); }
  Tensor act_out(const std::string& name, const Shape& shape, int64_t gap = 0) {
    return add(name, act_, shape, gap).tensor();
  }
  Tensor stat_out(const std::string& name, const Shape& shape) { return add(name, stat_, shape, 0).tensor(); }
  // A workspace: what it holds is not compared.
  Tensor stat_scratch(const Shape& shape) { return buffers_.emplace_back(stat_, shape, 0).tensor(); }
  Tensor index(const std::string& name, const Shape& shape, const std::vector<int32_t>& v) {
    Buffer& b = add(name, DType::i32, shape, 0);
    for (size_t i = 0; i < v.size(); i++) b.set(static_cast<int64_t>(i), v[i]);
    return b.tensor();
  }
  // For parts of y = x wT apart; absent where they cannot be.
  LinearParts parts(int64_t rows, int64_t columns, int64_t depth) {
    const int64_t sums = linear_sums(rows, columns, depth);
    if (sums == 0) return {};
    return {stat_scratch({sums}), index("arrivals", {kLinearTiles}, std::vector<int32_t>(kLinearTiles))};
  }
  // For the cuts of rows of pages; absent where there is room for one only.
  PagedCuts cuts(int64_t entries, int64_t max_pages, int64_t heads, int64_t kv_heads, int64_t head_dim) {
    const int64_t results = paged_cut_results(entries, max_pages, heads, head_dim), n = entries * kv_heads;
    if (results == 0) return {};
    return {stat_scratch({results}), index("cut arrivals", {n}, std::vector<int32_t>(n))};
  }
  // Random numbers.  Its memory is not compared, as every table has its own order there; its rows are.
  Weight weight(const std::string& name, int64_t outputs, int64_t inputs) {
    const Tensor rows = act(name, {outputs, inputs});
    const Weight w{buffers_.emplace_back(act_, Shape{weight_panels(outputs), inputs, kPanel}, 0).tensor(), outputs};
    table.pack_weight({w, rows, 0}, {});
    table.unpack_weight({act_out(name + " back", {outputs, inputs}), w, 0}, {});
    return w;
  }
  // Nothing was written beside a tensor or a weight.
  bool zones_intact() const {
    return std::all_of(buffers_.begin(), buffers_.end(), [](const Buffer& b) { return b.zones_intact(); });
  }
  ~Call() { EXPECT_EQ(kernel_error(), ""); }
  // These wait for the kernels.
  Buffer& operator[](const std::string& name) { return *all().at(name); }
  const std::map<std::string, Buffer*>& all() const {
    EXPECT_EQ(kernel_error(), "");
    return by_name_;
  }

 private:
  Buffer& add(const std::string& name, DType dtype, const Shape& shape, int64_t gap) {
    return *(by_name_[name] = &buffers_.emplace_back(dtype, shape, gap));
  }
  Tensor filled(Buffer& b, const std::string& name) {
    Rng rng(rng_key(1, RngStream::test, 0), std::hash<std::string>{}(name));
    for (int64_t i = 0; i < b.size(); i++) b.set(i, from_bf16(to_bf16(static_cast<float>(rng.normal()))));
    return b.tensor();
  }
  DType act_, stat_;
  std::deque<Buffer> buffers_;
  std::map<std::string, Buffer*> by_name_;
};

using Body = std::function<void(Call&)>;

// Every tensor after body() on `table`, in both types and with `orders` in every order of threads, against `ref`
// in f64.  In f32 the error is at most 1e-5 of max(1, |value|).  In bf16 a result is rounded once, which costs 2^-8 of
// its magnitude, and `inner` bounds what comes from roundings to bf16 on the way.  All orders give the same bits.
inline void check(const Body& body, double inner = 0, bool orders = true, const Table& table = table_kernels) {
  Call ref(table_ref, DType::f64);
  body(ref);
  for (DType act : {DType::f32, DType::bf16}) {
    std::map<std::string, std::string> first;
    auto once = [&] {
      Call emu(table, act);
      body(emu);
      const auto& all = emu.all();
      EXPECT_TRUE(emu.zones_intact());
      for (const auto& [name, buffer] : all) {
        EXPECT_TRUE(buffer->zones_intact()) << name;
        EXPECT_EQ(first.emplace(name, buffer->bits()).first->second, buffer->bits()) << name << " depends on the order";
        const bool rounded = buffer->tensor().dtype == DType::bf16;
        for (int64_t i = 0; i < buffer->size(); i++) {
          const double is = buffer->get(i), should = ref[name].get(i);
          if (std::isnan(is) && std::isnan(should)) continue;  // left alone
          if (is == should) continue;                          // infinite
          double bound = 1e-5 * std::fmax(1, std::fabs(should)) + (rounded ? std::fabs(should) / 256 + inner : 0);
          if (act == DType::bf16 && name == "lse") bound += 1.5e-4;  // a logarithm of weights within 1.02e-4
          ASSERT_LE(std::fabs(is - should), bound)
              << name << "[" << i << "] of " << buffer->tensor().str() << " is " << is << ", not " << should;
        }
      }
    };
    orders ? in_all_orders(once) : once();
  }
}

// What body() on `table` is refused with.
inline std::string refusal(DType act, const Body& body, const Table& table = table_kernels) {
  Call t(table, act);
  try {
    body(t);
  } catch (const std::logic_error& e) {
    return e.what();
  }
  return "no error";
}

// Products by mma.sync, by wgmma where that can compute, or by whatever the device takes.  False: it has mma.sync
// alone. The emulated device is opened again, and chooses wgmma where a GPU would.
inline bool ask_for(TensorKernel kernel) {
  if (const Probe* const probe = table_kernels.probe) return probe->tensor_kernel(kernel);
  static const std::optional<std::string> set =
      std::getenv("PARE_WGMMA") ? std::optional<std::string>(std::getenv("PARE_WGMMA")) : std::nullopt;
  if (kernel == TensorKernel::mma)
    setenv("PARE_WGMMA", "0", 1);
  else
    set ? setenv("PARE_WGMMA", set->c_str(), 1) : unsetenv("PARE_WGMMA");
  table_kernels.open(self(), DeviceComm::any);
  return true;
}

}  // namespace pare::test::kernel
