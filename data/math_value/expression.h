// Values of expressions: a number, or with variables the numbers at a few fixed points.
#pragma once
#include <array>
#include <functional>
#include <optional>

#include "data/math_value/lexer.h"
#include "data/math_value/number.h"

namespace pare::math_value {

// Values of an expression at the fixed points, where every variable has a rational value that depends on its name; two
// points have positive ones only.  Expressions that are the same function have the same samples.
struct Samples {
  static constexpr size_t kPoints = 4;
  bool constant = true;  // no variables: all points are the first
  std::array<MaybeNumber, kPoints> at;

  explicit Samples(MaybeNumber x = {}) { at[0] = std::move(x); }
  const MaybeNumber& operator[](size_t point) const { return at[constant ? 0 : point]; }
  bool defined() const;  // somewhere
};

// Equal at every point, and defined at the same ones, two at least.
bool equal(const Samples& a, const Samples& b);
// a = c b with the same number c != 0 at every point; `positive`: c > 0.
bool proportional(const Samples& a, const Samples& b, bool positive);

using Operation = std::function<MaybeNumber(const Number&, const Number&)>;
Samples combine(const Samples& a, const Samples& b, const Operation& operation);

// Budget of reading an answer, in operations on numbers; functions and long numbers count more.  Shared by all
// parts of an answer.
struct Effort {
  int left = 20000;
  bool spend(int n) { return (left -= n) >= 0; }
};

// x at the points.
Samples variable(const std::string& name);
// Stands for a number by itself: a letter that is no constant, a Greek one.
bool is_variable(const Token& t);

// The beginning of `t` that is an expression: sums, products (also implied), quotients, powers, roots, factorials,
// binomials, absolute values, elementary functions, mixed numbers, degrees (as pi / 180), percentages.  `used` is how
// many tokens it takes; nothing where the beginning is no expression or the effort does not suffice.  \pm is read as a
// plus, or as a minus with `minus`.
std::optional<Samples> read_expression(Tokens t, size_t& used, Effort& effort, bool minus = false);

// A bracket that is never deeper than this is read.
constexpr int kDepth = 40;

}  // namespace pare::math_value
