// A case is the operands of one op for a size: the op test compares tables on them, the gradients of backward ops are
// checked on them, `pare bench` measures on them.
#pragma once
#include <any>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ops/list.h"
#include "ops/probe.h"
#include "ops/rows.h"

namespace pare {
struct Weight;  // ops/linear.h
}

namespace pare::cases {

// The arguments of some op, one of the structs of PARE_OPS (visit: call.h).
using Call = std::any;

// ---- sizes

// A size of an op's operands.  The letters are those of list.h, but M, N, K of a linear layer are those of every GEMM:
// y[M, N] = x[M, K] wT.
struct Dim {
  const char* name;
  int64_t value;        // where none is given: a layer of Qwen2.5-1.5B
  const char* meaning;  // with the unit
  int64_t least = 1;
  bool shown = true;                    // false: in Dims::all() and str() only where it has another value
  std::vector<const char*> words = {};  // names of the values 0, 1, ...
};
// Conditions that no layer has but every op must support: gaps between rows, operations in place, factors.  0 or
// `value` if not given, in hundredths for Dims::share.
inline Dim edge(const char* name, const char* meaning, int64_t value = 0) {
  return {name, value, meaning, 0, false, {}};
}
inline const Dim kGap = edge("gap", "elements between rows"), kInPlace = edge("in_place", "1: in place"),
                 kFrozen = edge("frozen", "1: weights without gradients");

// Where rows and slots lie in a test of its own, in place of the layouts of layouts.h.
struct Layout {
  std::vector<std::pair<int32_t, int32_t>> sequences = {};  // in pages: (new rows, slots in use) of each
  std::vector<int32_t> first = {};                          // protected slots of each
  std::vector<KvCompression> compressions = {};             // window_row: set by Compressions
  std::vector<SegmentRow> segments = {};                    // packed, with what follows
  int64_t rows = 0, parent_rows = 0;
  std::vector<int32_t> lists = {}, budget = {}, blocks = {};  // AttnFwd's; budget of each row, or sequence
};

class Dims {
 public:
  // `text`: "M=64,K=128"; what it leaves out has its default.  Throws Error(Exit::usage) listing the names there are.
  Dims(const char* op, const std::vector<Dim>& dims, const std::string& text, Layout own = {});
  int64_t operator[](const char* name) const;
  int32_t i32(const char* name) const { return static_cast<int32_t>((*this)[name]); }
  float share(const char* name) const { return static_cast<float>((*this)[name]) / 100; }
  std::vector<std::pair<std::string, int64_t>> all() const;  // in the order of the list
  std::string str() const;                                   // "M=64,N=1536,K=128"
  const Layout own;

 private:
  std::vector<std::pair<Dim, int64_t>> values_;
};

// ---- operands

using Shape = std::vector<int64_t>;

// n values of a standard normal, times `scale`, rounded to f32; a function of `name` and n.
std::vector<double> normal(const std::string& name, int64_t n, double scale = 1);
// n whole numbers in [0, limit); a function of `name` and n.
std::vector<int32_t> below(const std::string& name, int64_t n, int64_t limit);
// n numbers below n in a random order.
std::vector<int32_t> shuffled(int64_t n);

// The values of a tensor: a function of its name and number of elements, null for none; each is one of f32.  A
// benchmark takes random numbers in [-1, 1), or in [0, 1) where `positive`, whatever the function says.
struct Fill {
  using Values = std::function<std::vector<double>(const std::string& name, int64_t n)>;
  Fill() = default;
  Fill(Values values, bool positive = false) : values(std::move(values)), positive(positive) {}
  Fill(std::vector<double> v, bool positive = false)
      : values([v = std::move(v)](const std::string&, int64_t) { return v; }), positive(positive) {}
  Values values;
  bool positive = false;
};
Fill scaled(double scale);             // normal(name, n, scale)
Fill positive(double scale = 1);       // their magnitudes
Fill rounded(double scale, int unit);  // normal(name, n, scale) as multiples of 1 / unit: many are equal

enum class Use { in, out, inout, scratch };  // scratch: read or not, undefined afterwards

// Makes the operands of a call, on whatever memory they are wanted.  Every tensor has a name; forward and backward of
// an op use the same names, with a d before that of a gradient.
class Operands {
 public:
  Operands(DType act, DType stat) : act(act), stat(stat) {}
  virtual ~Operands() = default;
  const DType act, stat;  // of the roles (list.h)

  // `gap`: elements between rows of the first dimension.  Without a fill: a standard normal.
  Tensor in(const std::string& name, const Shape& shape, const Fill& fill, int64_t gap = 0) {
    return make(name, Use::in, act, shape, gap, fill);
  }
  Tensor in(const std::string& name, const Shape& shape, int64_t gap = 0) { return in(name, shape, scaled(1), gap); }
  Tensor out(const std::string& name, const Shape& shape, int64_t gap = 0) {
    return make(name, Use::out, act, shape, gap, {});
  }
  Tensor inout(const std::string& name, const Shape& shape, const Fill& fill, int64_t gap = 0) {
    return make(name, Use::inout, act, shape, gap, fill);
  }
  Tensor inout(const std::string& name, const Shape& shape, int64_t gap = 0) {
    return inout(name, shape, scaled(1), gap);
  }
  Tensor scratch(const std::string& name, const Shape& shape, const Fill& fill = {}) {
    return make(name, Use::scratch, act, shape, 0, fill);
  }
  Tensor stat_in(const std::string& name, const Shape& shape, const Fill& fill = scaled(1)) {
    return make(name, Use::in, stat, shape, 0, fill);
  }
  Tensor stat_out(const std::string& name, const Shape& shape) { return make(name, Use::out, stat, shape, 0, {}); }
  Tensor stat_inout(const std::string& name, const Shape& shape, const Fill& fill = scaled(1)) {
    return make(name, Use::inout, stat, shape, 0, fill);
  }
  Tensor stat_scratch(const std::string& name, const Shape& shape) {
    return make(name, Use::scratch, stat, shape, 0, {});
  }
  Tensor inout_bf16(const std::string& name, const Shape& shape, const Fill& fill) {
    return make(name, Use::inout, DType::bf16, shape, 0, fill);
  }
  Tensor bytes(const std::string& name, int64_t n, Use use) { return make(name, use, DType::u8, {n}, 0, {}); }
  Tensor index(const std::string& name, const Shape& shape, const std::vector<int32_t>& v, int64_t gap = 0) {
    return make_index(name, Use::in, shape, gap, v);
  }
  Tensor index_out(const std::string& name, const Shape& shape) { return make_index(name, Use::out, shape, 0, {}); }
  Tensor index_scratch(const std::string& name, const Shape& shape) {
    return make_index(name, Use::scratch, shape, 0, {});
  }
  Tensor index_inout(const std::string& name, const Shape& shape, const std::vector<int32_t>& v) {
    return make_index(name, Use::inout, shape, 0, v);
  }
  // The rows of a weight [outputs, inputs] are a standard normal.
  virtual Weight weight(const std::string& name, int64_t outputs, int64_t inputs, Use use = Use::in);
  void* host(int64_t n);  // n bytes of host memory, as long as this lives

  virtual void compute(const Call& a) = 0;  // fills the outputs of another op, whose operands were made by this
  virtual void choose(TensorKernel) {}      // which kernel computes what is written twice

 protected:
  virtual Tensor make(const std::string& name, Use use, DType dtype, const Shape& shape, int64_t gap,
                      const Fill& fill) = 0;
  // No values: -1.
  virtual Tensor make_index(const std::string& name, Use use, const Shape& shape, int64_t gap,
                            const std::vector<int32_t>& v) = 0;

 private:
  std::deque<std::vector<char>> host_;
};

// ---- the list

struct OpCase {
  const char* op;  // its name in PARE_OPS
  std::vector<Dim> dims;
  std::vector<std::string> odd;  // texts of the sizes that the op test runs
  Call (*make)(Operands&, const Dims&);
};

const std::vector<OpCase>& op_cases();  // of every op, once
// Throws Error(Exit::usage) listing the names there are.
const OpCase& op_case(const std::string& op);

// Parts of the list.
std::vector<OpCase> data_cases();
std::vector<OpCase> linear_cases();
std::vector<OpCase> norm_cases();
std::vector<OpCase> rope_cases();
std::vector<OpCase> swiglu_cases();
std::vector<OpCase> attention_cases();
std::vector<OpCase> paged_cases();
std::vector<OpCase> block_cases();
std::vector<OpCase> compression_cases();
std::vector<OpCase> merge_cases();
std::vector<OpCase> logits_cases();
std::vector<OpCase> optimizer_cases();

// Dimensions shared by several families: rows (tokens), model width; the kernel of a product, and its choice.
inline const Dim kRows{"N", 4096, "rows (tokens)"}, kWidth{"C", 1536, "model width"};
inline const Dim kKernel{"kernel", 0, "in bf16 on a GPU: 0 what it chooses, 1 mma.sync, 2 wgmma", 0};
void choose_kernel(Operands& o, const Dims& d);
inline const Dim kBlock{"block", 16, "slots of a block, 4 or 16", 4};
inline const Dim kFirstBlocks = edge("first_blocks", "that are read anyway", 1),
                 kLastBlocks = edge("last_blocks", "that are read anyway", 1);

template <class T>
std::vector<T> operator+(std::vector<T> a, const std::vector<T>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
// Each text with each of `more` behind it.
std::vector<std::string> with(const std::vector<std::string>& texts, const std::vector<std::string>& more);

}  // namespace pare::cases
