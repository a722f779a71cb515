// Calls of ops on the CUDA kernels (table_kernels) in f32 and bf16, and on `ref`, with the same values.
#pragma once
#include <cstdlib>
#include <functional>
#include <optional>

#include "cases/layouts.h"
#include "comm/comm.h"
#include "op_cases.h"
#include "ops/linear.h"
#include "ops/paged.h"
#include "ops/probe.h"
#include "ops/rope.h"

namespace pare::test::kernel {

using test::Buffer;

// The tensors of calls on one table, of cases of ops and by hand.  Inputs are random values that bf16 holds, a function
// of their names, so that every table and type sees the same numbers.
class Call : public OpRun {
 public:
  Call(const Table& table, DType act) : OpRun(table, act, true) {}
  ~Call() override { EXPECT_EQ(kernel_error(), ""); }

  Tensor act(const std::string& name, const Shape& shape, int64_t gap = 0) { return inout(name, shape, gap); }
  Tensor stat(const std::string& name, const Shape& shape) { return stat_inout(name, shape); }
  Tensor act_out(const std::string& name, const Shape& shape, int64_t gap = 0) { return out(name, shape, gap); }
  // Its memory is not compared, as every table has its own order there; its rows are.
  Weight weight(const std::string& name, int64_t outputs, int64_t inputs, Use = Use::in) override {
    const Tensor rows = in(name, {outputs, inputs});
    const Weight w{scratch(name + " packed", {weight_panels(outputs), inputs, kPanel}), outputs};
    table.pack_weight({w, rows, 0}, {});
    table.unpack_weight({out(name + " back", {outputs, inputs}), w, 0}, {});
    return w;
  }
  // For parts of y = x wT apart; absent where they cannot be.
  LinearParts parts(int64_t rows, int64_t columns, int64_t depth) {
    const int64_t sums = linear_sums(rows, columns, depth);
    if (sums == 0) return {};
    return {stat_scratch("sums", {sums}), index("arrivals", {kLinearTiles}, std::vector<int32_t>(kLinearTiles))};
  }
  // For the cuts of rows of pages; absent where there is room for one only.
  PagedCuts cuts(int64_t entries, int64_t max_pages, int64_t heads, int64_t kv_heads, int64_t head_dim) {
    const int64_t results = paged_cut_results(entries, max_pages, heads, head_dim), n = entries * kv_heads;
    if (results == 0) return {};
    return {stat_scratch("cuts", {results}), index("cut arrivals", {n}, std::vector<int32_t>(n))};
  }
  // These wait for the kernels.
  Buffer& operator[](const std::string& name) {
    EXPECT_EQ(kernel_error(), "");
    return const_cast<Buffer&>(buffer(name));
  }
  std::map<std::string, const Buffer*> all() const {  // but scratch
    EXPECT_EQ(kernel_error(), "");
    std::map<std::string, const Buffer*> list;
    for (const std::string& name : names({Use::in, Use::out, Use::inout})) list[name] = &buffer(name);
    return list;
  }
};

// One sequence in pages, and rows that read it.
struct InPages {
  // k, v: [n, K, D]; slots lie in the pages of `table`.
  InPages(Call& t, const Tensor& k, const Tensor& v, const std::vector<int32_t>& table) : t(t) {
    const int64_t n = std::ssize(table), K = k.shape[1], D = k.shape[2];
    const auto rows = static_cast<int32_t>(k.shape[0]);
    k_pages = t.act_out("k_pages", {n, K, D, kPageSlots});
    v_pages = t.act_out("v_pages", {n, K, kPageSlots, D});
    page_table = t.index("table", {1, n}, table);
    t.table.kv_write({k_pages, v_pages, k, v, page_table, t.index("all", {1, 4}, {0, rows, rows, 0})}, {});
  }
  // Rows of q, each as many slots as `queries` say, or `reads`, by lists; the result is named `name`.
  AttnPaged read(const std::string& name, const Tensor& q, const std::vector<PagedRow>& queries, float scale,
                 std::vector<int64_t> reads = {}) const {
    if (reads.empty())
      for (const PagedRow& e : queries) reads.push_back(e.slots);
    const int64_t n = std::ssize(queries), H = q.shape[1], D = q.shape[2], K = k_pages.shape[1];
    return {.o = t.act_out(name, {q.shape[0], H, D}),
            .q = q,
            .k_pages = k_pages,
            .v_pages = v_pages,
            .page_table = page_table,
            .queries = t.index("queries of " + name, {n, 4}, cases::flat(queries)),
            .pairs = 0,
            .slots = 0,
            .scale = scale,
            .work = cases::put_work(t, "work of " + name, queries, reads),
            .cuts = t.cuts(n, page_table.shape[1], H, K, D)};
  }
  Call& t;
  Tensor k_pages, v_pages, page_table;
};

using Body = std::function<void(Call&)>;
// A case of src/cases, of a size and, where it has one of its own, with a layout.
Body body_of(const std::string& op, const std::string& size, const cases::Layout& layout = {});

// Every tensor after body() on `table`, in both types and with `orders` in every order of threads, against `ref`
// in f64.  In f32 the error is at most 1e-5 of max(1, |value|).  In bf16 a result is rounded once, which costs 2^-8 of
// its magnitude, and `inner` bounds what comes from roundings to bf16 on the way.  All orders give the same bits.
void check(const Body& body, double inner = 0, bool orders = true, const Table& table = table_kernels);
// The same of a case of each size.
void check(const std::string& op, const std::vector<std::string>& sizes, double inner = 0, bool orders = true,
           const Table& table = table_kernels);

// The message that refuses body() on `table`.
std::string refusal(DType act, const Body& body, const Table& table = table_kernels);

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
