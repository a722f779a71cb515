#include "cases/cases.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "ops/linear.h"

namespace pare::cases {

Dims::Dims(const char* op, const std::vector<Dim>& dims, const std::string& text, Layout layout)
    : own(std::move(layout)) {
  const auto known = [&] {
    std::string s;
    for (const Dim& d : dims) s += cat(s.empty() ? " " : "; ", d.name, "=", d.value, " (", d.meaning, ")");
    return s;
  };
  for (const Dim& d : dims) values_.emplace_back(d, d.value);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    const auto dim = std::find_if(dims.begin(), dims.end(), [&](const Dim& d) { return d.name == name; });
    if (equals == std::string::npos || dim == dims.end())
      fail(op, " has no size ", part, "; it has, with their defaults:", known());
    int64_t value = std::find(dim->words.begin(), dim->words.end(), part.substr(equals + 1)) - dim->words.begin();
    if (value < std::ssize(dim->words)) {
      values_[static_cast<size_t>(dim - dims.begin())].second = value;
      continue;
    }
    const char *first = part.data() + equals + 1, *last = part.data() + part.size();
    const auto [stop, error] = std::from_chars(first, last, value);
    if (error != std::errc{} || stop != last || first == last || value < dim->least)
      fail(op, ": ", part, " is not a whole number of at least ", dim->least, " (", dim->meaning, ")");
    values_[static_cast<size_t>(dim - dims.begin())].second = value;
  }
}

int64_t Dims::operator[](const char* name) const {
  for (const auto& [dim, value] : values_)
    if (std::string(dim.name) == name) return value;
  throw std::logic_error(cat("a case reads the size ", name, ", which is not in its list"));
}

std::vector<std::pair<std::string, int64_t>> Dims::all() const {
  std::vector<std::pair<std::string, int64_t>> list;
  for (const auto& [dim, value] : values_)
    if (dim.shown || value != dim.value) list.emplace_back(dim.name, value);
  return list;
}

std::string Dims::str() const {
  std::string s;
  for (const auto& [name, value] : all()) s += cat(s.empty() ? "" : ",", name, "=", value);
  return s;
}

namespace {
Rng generator(const std::string& name, uint64_t uid) {
  for (char c : name) uid = mix64(uid + static_cast<unsigned char>(c));
  return Rng(rng_key(1, RngStream::test, 0), uid);
}
}  // namespace

std::vector<double> normal(const std::string& name, int64_t n, double scale) {
  Rng rng = generator(name, 0);
  std::vector<double> v(static_cast<size_t>(n));
  for (double& x : v) x = static_cast<float>(scale * rng.normal());
  return v;
}

std::vector<int32_t> below(const std::string& name, int64_t n, int64_t limit) {
  Rng rng = generator(name, 1);
  std::vector<int32_t> v(static_cast<size_t>(n));
  for (int32_t& x : v) x = static_cast<int32_t>(rng.below(static_cast<uint32_t>(limit)));
  return v;
}

std::vector<int32_t> shuffled(int64_t n) {
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(rng_key(2, RngStream::test, 0));
  for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[rng.below(static_cast<uint32_t>(i))]);
  return order;
}

Fill scaled(double scale) {
  return Fill([scale](const std::string& name, int64_t n) { return normal(name, n, scale); });
}
Fill positive(double scale) {
  return Fill(
      [scale](const std::string& name, int64_t n) {
        std::vector<double> v = normal(name, n, scale);
        for (double& x : v) x = std::fabs(x);
        return v;
      },
      true);
}
Fill rounded(double scale, int unit) {
  return Fill([scale, unit](const std::string& name, int64_t n) {
    std::vector<double> v = normal(name, n, scale);
    for (double& x : v) x = std::round(x * unit) / unit;
    return v;
  });
}

Weight Operands::weight(const std::string& name, int64_t outputs, int64_t inputs, Use use) {
  return {make(name, use, act, {weight_panels(outputs), inputs, kPanel}, 0, {}), outputs};
}

void* Operands::host(int64_t n) {
  std::vector<char>& bytes = host_.emplace_back(n);
  for (int64_t i = 0; i < n; i++) bytes[static_cast<size_t>(i)] = static_cast<char>(i * 7 + 1);
  return bytes.data();
}

void choose_kernel(Operands& o, const Dims& d) {
  const int64_t kernel = d["kernel"];
  if (kernel > 2) fail("kernel=", kernel, ": it is 0, 1 or 2");
  o.choose(static_cast<TensorKernel>(kernel));
}

std::vector<std::string> with(const std::vector<std::string>& texts, const std::vector<std::string>& more) {
  std::vector<std::string> all;
  for (const std::string& text : texts)
    for (const std::string& m : more) all.push_back(m.empty() ? text : text + "," + m);
  return all;
}

const std::vector<OpCase>& op_cases() {
  static const std::vector<OpCase> all = [] {
    std::vector<OpCase> list;
    for (const auto& part : {data_cases, linear_cases, norm_cases, rope_cases, swiglu_cases, attention_cases,
                             paged_cases, block_cases, compression_cases, merge_cases, logits_cases, optimizer_cases})
      list = list + part();
    return list;
  }();
  return all;
}

const OpCase& op_case(const std::string& op) {
  std::string all;
  for (const OpCase& c : op_cases()) {
    if (op == c.op) return c;
    all += cat(all.empty() ? "" : ", ", c.op);
  }
  fail("there is no op ", op, "; there are ", all);
}

}  // namespace pare::cases
