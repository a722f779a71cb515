// countdown: TinyZero's verl/utils/reward_score/countdown.py.
//
// The equation is in the last <answer></answer> of the last line after "Assistant:".  No equation: 0.  Its numbers are
// the given ones, each once, and its value is the target: 1.  Else 0.1.  TinyZero evaluates with Python's eval, so
// powers, // and unary signs count, and so do complex numbers on the way.
#include <gmpxx.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <optional>
#include <variant>

#include "base/error.h"
#include "base/json.h"
#include "data/text.h"
#include "data/verify/verify.h"

namespace pare {
namespace {

using Complex = std::complex<double>;
using Number = std::variant<mpz_class, double, Complex>;  // int, float, complex
using Result = std::optional<Number>;                     // nothing: Python raises

constexpr size_t kBits = size_t{1} << 20;  // of an integer; a larger one is no target anyway
constexpr size_t kLength = 4096;           // of an equation
constexpr int kDepth = 200;                // Python's own limit for parentheses

bool fits(const mpz_class& x) { return mpz_sizeinbase(x.get_mpz_t(), 2) <= kBits; }

Result real_of(const Number& x) {
  if (!std::holds_alternative<mpz_class>(x)) return x;
  const double d = std::get<mpz_class>(x).get_d();
  return std::isfinite(d) ? Result(d) : std::nullopt;
}

Complex complex_of(const Number& x) {
  return std::holds_alternative<Complex>(x) ? std::get<Complex>(x) : Complex(std::get<double>(x));
}

// a / b, rounded once.
Result true_quotient(const mpz_class& a, const mpz_class& b) {
  if (b == 0) return {};
  // Scale to an integer quotient of at least 66 bits with a sticky last bit; then one rounding by long division.
  const auto bits = [](const mpz_class& x) { return static_cast<long>(mpz_sizeinbase(x.get_mpz_t(), 2)); };
  const long shift = 66 - (bits(a) - bits(b));
  mpz_class n = abs(a), d = abs(b), q, r;
  if (shift > 0)
    n <<= static_cast<mp_bitcnt_t>(shift);
  else
    d <<= static_cast<mp_bitcnt_t>(-shift);
  mpz_tdiv_qr(q.get_mpz_t(), r.get_mpz_t(), n.get_mpz_t(), d.get_mpz_t());
  if (r != 0) mpz_setbit(q.get_mpz_t(), 0);
  const mpz_class low = q & 0xffff, high = q >> 16;  // high has at most 52 bits: exact; their sum rounds once
  const double x = std::ldexp(std::ldexp(high.get_d(), 16) + low.get_d(), static_cast<int>(-shift));
  if (!std::isfinite(x)) return {};
  return Number(sgn(a) * sgn(b) < 0 ? -x : x);
}

Result power(const Complex& a, const Complex& b) {
  if (b == 0.0) return Complex(1);
  if (a == 0.0) return b.imag() != 0 || b.real() < 0 ? Result() : Result(Complex(0));
  const double r = std::abs(a), angle = std::arg(a);
  const double length = std::pow(r, b.real()) * std::exp(-angle * b.imag());
  const Complex x = std::polar(1.0, angle * b.real() + b.imag() * std::log(r)) * length;
  return std::isfinite(x.real()) ? Result(x) : std::nullopt;  // an infinite length makes neither part finite
}

Result power(double a, double b) {
  if (a == 0 && b < 0) return {};
  if (a < 0 && std::isfinite(a) && std::isfinite(b) && b != std::floor(b)) return power(Complex(a), Complex(b));
  const double x = std::pow(a, b);
  return std::isinf(x) && std::isfinite(a) && std::isfinite(b) ? Result() : Result(x);
}

Result power(const mpz_class& a, const mpz_class& b) {
  if (b < 0) {
    const Result x = real_of(a), y = real_of(b);
    return x && y ? power(std::get<double>(*x), std::get<double>(*y)) : Result();
  }
  if (abs(a) <= 1) return a == -1 && mpz_even_p(b.get_mpz_t()) ? mpz_class(1) : b == 0 ? mpz_class(1) : a;
  if (b > kBits || mpz_sizeinbase(a.get_mpz_t(), 2) * b.get_ui() > kBits) return {};
  mpz_class x;
  mpz_pow_ui(x.get_mpz_t(), a.get_mpz_t(), b.get_ui());
  return x;
}

enum class Op { add, subtract, multiply, divide, floor_divide, power };

Result integer_result(Op op, const mpz_class& a, const mpz_class& b) {
  mpz_class x;
  switch (op) {
    case Op::add:
      x = a + b;
      break;
    case Op::subtract:
      x = a - b;
      break;
    case Op::multiply:
      x = a * b;
      break;
    case Op::divide:
      return true_quotient(a, b);
    case Op::floor_divide:
      if (b == 0) return {};
      mpz_fdiv_q(x.get_mpz_t(), a.get_mpz_t(), b.get_mpz_t());
      break;
    case Op::power:
      return power(a, b);
  }
  return fits(x) ? Result(x) : std::nullopt;
}

double floor_quotient(double a, double b) {
  const double rest = std::fmod(a, b);
  return std::round((a - rest) / b) - (rest != 0 && (b < 0) != (rest < 0) ? 1 : 0);
}

Result real_result(Op op, double a, double b) {
  switch (op) {
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    case Op::divide:
      return b == 0 ? Result() : Result(a / b);
    case Op::floor_divide:
      return b == 0 ? Result() : Result(floor_quotient(a, b));
    case Op::power:
      return power(a, b);
  }
  return {};
}

Result complex_result(Op op, const Complex& a, const Complex& b) {
  switch (op) {
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    case Op::divide:
      return b == 0.0 ? Result() : Result(a / b);
    case Op::floor_divide:
      return {};
    case Op::power:
      return power(a, b);
  }
  return {};
}

Result apply(Op op, const Result& a, const Result& b) {
  if (!a || !b) return {};
  if (std::holds_alternative<mpz_class>(*a) && std::holds_alternative<mpz_class>(*b))
    return integer_result(op, std::get<mpz_class>(*a), std::get<mpz_class>(*b));
  const Result x = real_of(*a), y = real_of(*b);
  if (!x || !y) return {};
  if (std::holds_alternative<double>(*x) && std::holds_alternative<double>(*y))
    return real_result(op, std::get<double>(*x), std::get<double>(*y));
  return complex_result(op, complex_of(*x), complex_of(*y));
}

// Python's grammar of arithmetic:  sum: term ((+|-) term)*   term: signed ((*|/|//) signed)*
// signed: (+|-)* power   power: atom (** signed)?   atom: number | ( sum )
class Evaluator {
 public:
  explicit Evaluator(std::string_view s) : s_(s) {}

  Result run() {
    const Result x = sum();
    skip_space();
    return at_ == s_.size() && !failed_ ? x : Result();
  }

 private:
  void skip_space() {
    while (at_ < s_.size() && (s_[at_] == ' ' || s_[at_] == '\t' || s_[at_] == '\f' || (s_[at_] == '\r' && depth_ > 0)))
      at_++;
  }
  bool take(std::string_view symbol) {
    skip_space();
    if (s_.substr(at_, symbol.size()) != symbol) return false;
    at_ += symbol.size();
    return true;
  }
  Result failed() {
    failed_ = true;
    at_ = s_.size();  // so that nothing more is read
    return {};
  }

  Result sum() {
    Result x = term();
    for (;;) {
      if (take("+"))
        x = apply(Op::add, x, term());
      else if (take("-"))
        x = apply(Op::subtract, x, term());
      else
        return x;
    }
  }
  Result term() {
    Result x = signed_power();
    for (;;) {
      if (take("//"))
        x = apply(Op::floor_divide, x, signed_power());
      else if (take("/"))
        x = apply(Op::divide, x, signed_power());
      else if (take("*"))
        x = apply(Op::multiply, x, signed_power());
      else
        return x;
    }
  }
  Result signed_power() {
    bool negative = false;
    for (;;) {
      if (take("-"))
        negative = !negative;
      else if (!take("+"))
        break;
    }
    Result x = atom();
    if (take("**")) {
      if (++powers_ > kDepth) return failed();
      x = apply(Op::power, x, signed_power());
      powers_--;
    }
    return negative ? apply(Op::multiply, x, mpz_class(-1)) : x;
  }
  Result atom() {
    if (take("(")) {
      if (++depth_ > kDepth) return failed();
      const Result x = sum();
      if (!take(")")) return failed();
      depth_--;
      return x;
    }
    skip_space();
    const size_t begin = at_;
    size_t digits = 0, points = 0;
    for (; at_ < s_.size() && (is_digit(s_[at_]) || (s_[at_] == '.' && points == 0)); at_++)
      (s_[at_] == '.' ? points : digits)++;
    if (digits == 0) return failed();
    const std::string number(s_.substr(begin, at_ - begin));
    if (points) return std::strtod(number.c_str(), nullptr);
    const mpz_class x(number, 10);
    if (number[0] == '0' && x != 0) return failed();  // Python has no 007
    return x;
  }

  std::string_view s_;
  size_t at_ = 0;
  int depth_ = 0, powers_ = 0;
  bool failed_ = false;
};

std::optional<std::string_view> equation_of(std::string_view s) {
  constexpr auto npos = std::string_view::npos;
  const std::string_view plain = "Assistant:", chat = "<|im_start|>assistant";
  if (const size_t at = s.find(plain); at != npos)
    s.remove_prefix(at + plain.size());
  else if (const size_t other = s.find(chat); other != npos)
    s.remove_prefix(other + chat.size());
  else
    return {};
  s.remove_prefix(s.rfind('\n') + 1);  // npos + 1 = 0
  const std::string_view open = "<answer>", close = "</answer>";
  std::optional<std::string_view> equation;
  for (size_t at = 0;;) {
    const size_t begin = s.find(open, at);
    const size_t end = begin == npos ? npos : s.find(close, begin + open.size());
    if (end == npos) return equation;
    equation = trim(s.substr(begin + open.size(), end - begin - open.size()));
    at = end + close.size();
  }
}

// The runs of digits, as integers, in ascending order of their text.
std::vector<std::string> numbers_of(std::string_view s) {
  std::vector<std::string> numbers;
  for (size_t at = 0; at < s.size();) {
    size_t end = at;
    while (end < s.size() && is_digit(s[end])) end++;
    if (end > at) numbers.push_back(without_leading_zeros(s.substr(at, end - at)));
    at = std::max(end, at + 1);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

bool makes(std::string_view equation, const mpz_class& target) {
  if (equation.size() > kLength || equation.find_first_not_of("0123456789+-*/(). \t\f\r") != std::string_view::npos)
    return false;
  const Result x = Evaluator(equation).run();
  const Result difference = apply(Op::subtract, x, target);
  if (!difference) return false;
  if (std::holds_alternative<mpz_class>(*difference)) return std::get<mpz_class>(*difference) == 0;
  return std::abs(complex_of(*difference)) < 1e-5;
}

struct Puzzle {
  mpz_class target;
  std::vector<std::string> numbers;
};

Puzzle puzzle_of(std::string_view gold) {
  using Json = nlohmann::json;
  const Json json = try_parse_json(gold);
  const auto integer = [&](const Json& x) {
    if (!x.is_number_integer())
      fail("countdown: the gold is ", gold.substr(0, 200),
           ", expected an object {\"target\": 24, \"numbers\": [1, 2, 3, 4]} of integers");
    return x.dump();
  };
  const char* numbers = json.contains("nums") ? "nums" : "numbers";  // as the data set has it, as TinyZero passes it on
  const bool complete = json.is_object() && json.contains("target") && json.contains(numbers) &&
                        json[numbers].is_array() && !json[numbers].empty();
  Puzzle puzzle{mpz_class(integer(complete ? json["target"] : Json()), 10), {}};
  for (const Json& x : json[numbers]) puzzle.numbers.push_back(integer(x));
  std::sort(puzzle.numbers.begin(), puzzle.numbers.end());
  return puzzle;
}

}  // namespace

Verdict grade_countdown(std::string_view response, bool, std::string_view gold) {
  const Puzzle puzzle = puzzle_of(gold);
  const std::optional<std::string_view> equation = equation_of(response);
  if (!equation) return {};
  const bool right = numbers_of(*equation) == puzzle.numbers && makes(*equation, puzzle.target);
  return {right ? 1 : 0.1, std::string(*equation), std::string(*equation), true};
}

}  // namespace pare
