// Harness of the op tests: buffers with red zones, and an OpRun that builds the arguments of one call on one table.
//
// A call is written once, as a function of an OpRun: a case of src/cases, or what a test needs beside those.  The same
// function then runs on `ref` in f64 and on every table under test in f32: values depend only on the names of the
// tensors and are rounded to f32, so all tables see the same.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/half.h"
#include "cases/cases.h"
#include "kernels.h"
#include "ops/data.h"

namespace pare::test {

// The arguments of a case of src/cases, of a size and, where a test has one of its own, with a layout.
template <class Args>
Args arguments(cases::Operands& o, const char* op, const std::string& size, const cases::Layout& layout = {}) {
  const cases::OpCase& c = cases::op_case(op);
  return std::any_cast<Args>(c.make(o, cases::Dims(c.op, c.dims, size, layout)));
}

// Unit roundoff of f32.
inline constexpr double kRound = 0x1p-24;

// Relative to the sum of the magnitudes of its terms, the error of a result that went through n roundings in a row (and
// a few more: a scaling, a division).  Roundings go up as often as down, so n of them add up to about sqrt(n); twice
// that is allowed.  Values are the same in every run, so this is a bound that holds or does not, not a matter of luck.
inline double chain(double n) { return (2 * std::sqrt(n) + 4) * kRound; }
// The same for a row sum of n terms in 16 lanes and a tree.
inline double lanes(double n) { return chain(n / 16 + 5); }

using cases::below;
using cases::normal;
using cases::Shape;
using cases::Use;

inline int64_t elements(const Shape& shape) {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

// Rows [outputs, inputs] in the layout of Weight::packed: panels ...
inline std::vector<double> panels(const std::vector<double>& rows, int64_t outputs, int64_t inputs) {
  std::vector<double> v(weight_panels(outputs) * inputs * kPanel);
  for (int64_t o = 0; o < outputs; o++)
    for (int64_t i = 0; i < inputs; i++) v[weight_place(o, i, inputs)] = rows[o * inputs + i];
  return v;
}

// ... or one after the other, zeros behind.
inline std::vector<double> padded(std::vector<double> rows, int64_t outputs, int64_t inputs) {
  rows.resize(static_cast<size_t>(weight_panels(outputs) * kPanel * inputs));
  return rows;
}

// A tensor with red zones of 64 bytes before and after it and of `gap` elements after each row of the first dimension.
// A red zone is all ones: NaN to whoever reads it as f32 or f64, -1 as an index.
class Buffer {
 public:
  Buffer(DType dtype, const Shape& shape, int64_t gap = 0) {
    tensor_.dtype = dtype;
    tensor_.rank = static_cast<int>(shape.size());
    int64_t step = 1;
    for (int i = tensor_.rank - 1; i >= 0; i--) {
      tensor_.shape[i] = shape[i];
      tensor_.stride[i] = i == 0 && tensor_.rank > 1 ? step + gap : step;
      step *= shape[i];
    }
    row_ = tensor_.rank > 1 ? (shape[0] ? step / shape[0] : 0) : step;
    pitch_ = tensor_.rank > 1 ? row_ + gap : row_;
    const size_t rows = tensor_.rank > 1 ? shape[0] : 1;
    bytes_.assign(kZone * 3 + rows * pitch_ * dtype_size(dtype), 0xff);
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    first_ = kZone + (kZone - address % kZone) % kZone;  // elements start 64-byte aligned
    tensor_.data = bytes_.data() + first_;
    memory_.emplace(tensor_);
  }
  Buffer(Buffer&&) = default;

  const Tensor& tensor() const { return tensor_; }
  int64_t size() const { return tensor_.size(); }

  double get(int64_t i) const { return get(bytes_, i); }
  void set(int64_t i, double x) {
    void* p = bytes_.data() + byte(i);
    if (tensor_.dtype == DType::f64)
      store(p, x);
    else if (tensor_.dtype == DType::f32)
      store(p, static_cast<float>(x));
    else if (tensor_.dtype == DType::bf16)
      store(p, f32_to_bf16(static_cast<float>(x)));
    else if (tensor_.dtype == DType::u8)
      store(p, static_cast<uint8_t>(x));
    else
      store(p, static_cast<int32_t>(x));
    KernelMemory::wrote(p, dtype_size(tensor_.dtype));
  }
  std::vector<double> values() const { return values(bytes_); }
  std::vector<double> values_before() const { return values(before_); }  // as they were at the last remember()

  // The bytes of the elements in order, for bitwise comparison.
  std::vector<unsigned char> element_bytes() const {
    const std::string all = bits();
    return {all.begin(), all.end()};
  }
  std::string bits(int64_t begin, int64_t end) const {
    std::string s;
    for (int64_t i = begin; i < end; i++)
      s.append(reinterpret_cast<const char*>(&bytes_[byte(i)]), dtype_size(tensor_.dtype));
    return s;
  }
  std::string bits() const { return bits(0, size()); }
  void remember() { before_ = bytes_; }
  bool unchanged() const { return bytes_ == before_; }
  bool zones_intact() const {
    size_t at = 0;
    const auto ones_until = [&](size_t end) {
      while (at < end && bytes_[at] == 0xff) at++;
      return at >= end;
    };
    for (int64_t i = 0; i < size(); i += row_) {
      if (!ones_until(byte(i))) return false;
      at = byte(i + row_ - 1) + dtype_size(tensor_.dtype);
    }
    return ones_until(bytes_.size());
  }

 private:
  static constexpr size_t kZone = 64;
  double get(const KernelVector<unsigned char>& bytes, int64_t i) const {
    const void* p = bytes.data() + byte(i);
    if (tensor_.dtype == DType::f64) return load<double>(p);
    if (tensor_.dtype == DType::f32) return load<float>(p);
    if (tensor_.dtype == DType::bf16) return bf16_to_f32(load<uint16_t>(p));
    if (tensor_.dtype == DType::u8) return load<uint8_t>(p);
    return load<int32_t>(p);
  }
  std::vector<double> values(const KernelVector<unsigned char>& bytes) const {
    std::vector<double> v(size());
    for (int64_t i = 0; i < size(); i++) v[i] = get(bytes, i);
    return v;
  }
  template <class T>
  static T load(const void* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  template <class T>
  static void store(void* p, T x) {
    std::memcpy(p, &x, sizeof x);
  }
  size_t byte(int64_t i) const { return first_ + (i / row_ * pitch_ + i % row_) * dtype_size(tensor_.dtype); }

  Tensor tensor_;
  int64_t row_, pitch_;  // elements of a row of the first dimension; from one such row to the next
  size_t first_;
  KernelVector<unsigned char> bytes_, before_;
  std::optional<KernelMemory> memory_;
};

inline uint16_t to_bf16(double x) { return f32_to_bf16(static_cast<float>(x)); }
inline float from_bf16(uint16_t b) { return bf16_to_f32(b); }

// The tensors of one op call on one table, by name.
class OpRun : public cases::Operands {
 public:
  // act: f64 for the reference, f32 for the tables under test.
  OpRun(const Table& table, DType act) : OpRun(table, act, false) {}

  const Table& table;
  const bool by_rows;                 // the table reads a weight row by row, not in panels
  bool skipped = false;               // the table does not implement the op
  std::vector<std::string> problems;  // broken red zones, changed inputs

  Weight weight(const std::string& name, int64_t outputs, int64_t inputs, Use use = Use::in) override {
    inputs_[name] = inputs;
    const std::vector<double> rows = normal(name, outputs * inputs);
    return {make(name, use, act, {weight_panels(outputs), inputs, kPanel}, 0,
                 by_rows ? padded(rows, outputs, inputs) : panels(rows, outputs, inputs)),
            outputs};
  }
  // By `ref`, rounded to f32 (op_cases.cpp).  In bf16, which `ref` has not, they stay NaN until a test sets them.
  void compute(const cases::Call& call) override;

  template <class Args>
  void call(void (*Table::*op)(const Args&, Stream), const Args& a) {
    if (!(table.*op)) {
      skipped = true;
      return;
    }
    for (auto& [name, e] : entries_) e.buffer->remember();
    check("op", a);
    (table.*op)(a, {});
    Buffer nothing(DType::i32, {1});
    nothing.set(0, 0);
    int32_t sink;
    if (table.download) table.download({&sink, nothing.tensor()}, {});  // waits for the op
    for (auto& [name, e] : entries_) {
      if (!e.buffer->zones_intact()) problems.push_back(name + ": written outside its elements");
      if (e.use == Use::in && !e.buffer->unchanged()) problems.push_back(name + ": an input was changed");
    }
  }

  // The largest error that an output may have against the reference: per element, or one for all.  Not stated: equal.
  // Called after call(); in the reference run the values are the reference's.
  void bound(const std::string& name, std::vector<double> b) { bounds[name] = std::move(b); }
  void bound(const std::string& name, double b) { bounds[name] = {b}; }
  void bound(const Tensor& t, std::vector<double> b) { bound(name(t), std::move(b)); }
  void bound(const Tensor& t, double b) { bound(name(t), b); }
  std::map<std::string, std::vector<double>> bounds;

  // False: something was written beside a tensor.
  bool zones_intact() const {
    return std::all_of(buffers_.begin(), buffers_.end(), [](const Buffer& b) { return b.zones_intact(); });
  }
  bool has(const std::string& name) const { return entries_.count(name); }
  bool is_weight(const std::string& name) const { return inputs_.count(name); }
  const std::string& name(const Tensor& t) const {
    for (const auto& [name, e] : entries_)
      if (e.buffer->tensor().data == t.data) return name;
    throw std::logic_error(cat("no operand: ", t));
  }
  const Buffer& buffer(const std::string& name) const { return *entries_.at(name).buffer; }
  Use use(const std::string& name) const { return entries_.at(name).use; }
  const Buffer& buffer(const Tensor& t) const { return buffer(name(t)); }
  // In order; of a weight in panels, whatever the table's layout.
  std::vector<double> values(const std::string& name) const {
    const std::vector<double> all = buffer(name).values();
    const auto inputs = inputs_.find(name);
    if (!by_rows || inputs == inputs_.end()) return all;
    return panels(all, static_cast<int64_t>(all.size()) / inputs->second, inputs->second);
  }
  std::vector<double> values(const Tensor& t) const { return values(name(t)); }
  double max_abs(const std::string& name) const {
    double m = 0;
    for (double x : values(name)) m = std::fmax(m, std::fabs(x));
    return m;
  }
  double max_abs(const Tensor& t) const { return max_abs(name(t)); }
  std::vector<std::string> outputs() const { return names({Use::out, Use::inout}); }
  std::vector<std::string> names(const std::vector<Use>& uses) const {
    std::vector<std::string> names;
    for (const auto& [name, e] : entries_)
      if (std::count(uses.begin(), uses.end(), e.use)) names.push_back(name);
    return names;
  }
  // Of a weight without panels: row by row.
  void set(const std::string& name, std::vector<double> v) {
    if (const auto inputs = inputs_.find(name); inputs != inputs_.end())
      v = panels(v, static_cast<int64_t>(v.size()) / inputs->second, inputs->second);
    Buffer& b = *entries_.at(name).buffer;
    for (size_t i = 0; i < v.size(); i++) b.set(static_cast<int64_t>(i), v[i]);
  }

 protected:
  // several: calls by hand, in a test of bf16.  Values are such as bf16 holds, and a later tensor may take the name of
  // an earlier one.
  OpRun(const Table& table, DType act, bool several)
      : Operands(act, act == DType::f64 ? act : DType::f32),
        table(table),
        by_rows(std::string_view(table.name).ends_with("_fast")),
        several_(several) {}
  Tensor make(const std::string& name, Use use, DType dtype, const Shape& shape, int64_t gap,
              const cases::Fill& fill) override {
    std::vector<double> v;
    if (fill.values) v = fill.values(name, elements(shape));
    return add(name, use, dtype, shape, gap, v);
  }
  Tensor make_index(const std::string& name, Use use, const Shape& shape, int64_t gap,
                    const std::vector<int32_t>& v) override {
    return add(name, use, DType::i32, shape, gap, {v.begin(), v.end()});
  }

 private:
  struct Entry {
    Use use;
    Buffer* buffer;
  };
  Tensor add(const std::string& name, Use use, DType dtype, const Shape& shape, int64_t gap,
             const std::vector<double>& v) {
    Buffer& b = buffers_.emplace_back(dtype, shape, gap);
    expect(v.empty() || static_cast<int64_t>(v.size()) == b.size(), name, ": ", v.size(), " values for ",
           b.tensor().str());
    const bool round = several_ && dtype != DType::i32;
    for (size_t i = 0; i < v.size(); i++) b.set(static_cast<int64_t>(i), round ? from_bf16(to_bf16(v[i])) : v[i]);
    expect(entries_.insert_or_assign(name, Entry{use, &b}).second || several_, "two tensors named ", name);
    return b.tensor();
  }

  const bool several_;
  std::deque<Buffer> buffers_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, int64_t> inputs_;  // of the weights
};

// Compares the outputs of a run with the reference's; returns what is wrong, at most one line per output.
inline std::vector<std::string> differences(const OpRun& run, const OpRun& reference) {
  std::vector<std::string> lines = run.problems;
  for (const std::string& name : reference.outputs()) {
    const std::vector<double> is = run.values(name), should = reference.values(name);
    const auto bound = reference.bounds.find(name);
    for (size_t i = 0; i < is.size(); i++) {
      const double allowed = bound == reference.bounds.end() ? 0 : bound->second[bound->second.size() == 1 ? 0 : i];
      if (is[i] == should[i] || std::fabs(is[i] - should[i]) <= allowed) continue;
      if (std::isnan(is[i]) && std::isnan(should[i])) continue;  // rows that the op leaves alone
      lines.push_back(cat(name, "[", i, "] is ", is[i], ", ref ", should[i], ", error ", std::fabs(is[i] - should[i]),
                          " > ", allowed));
      break;
    }
  }
  return lines;
}

inline std::string joined(const std::vector<std::string>& lines) {
  std::string s;
  for (const std::string& line : lines) s += "\n  " + line;
  return s;
}

}  // namespace pare::test
