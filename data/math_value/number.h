// Numbers: rationals are exact; everything else is complex with 256 bits and an error bound.
#pragma once
#include <gmpxx.h>
#include <mpc.h>

#include <optional>
#include <variant>

namespace pare::math_value {

// A complex number of 256 bits per part; MPC rounds every operation correctly, so results are the same everywhere.
class Wide {
 public:
  static constexpr mpfr_prec_t kBits = 256;
  static constexpr mpfr_exp_t kExact = -(mpfr_exp_t{1} << 40);  // as an exponent: of zero
  Wide() { mpc_init2(z_, kBits); }
  explicit Wide(const mpq_class& q);
  Wide(const Wide& other) : Wide() { *this = other; }
  Wide& operator=(const Wide& other) {
    mpc_set(z_, other.z_, MPC_RNDNN);
    error = other.error;
    return *this;
  }
  ~Wide() { mpc_clear(z_); }
  mpc_ptr get() { return z_; }
  mpc_srcptr get() const { return z_; }

  mpfr_exp_t error = kExact;  // it is wrong by less than 2^error

 private:
  mpc_t z_;
};

using Number = std::variant<mpq_class, Wide>;
// Nothing: undefined there (a division by zero), or out of what is worth computing: a rational too long to be exact, or
// a sum in which a term is lost to rounding, as the 1 of \sqrt{2} 10^{100} + 1.
using MaybeNumber = std::optional<Number>;

MaybeNumber add(const Number& a, const Number& b);
MaybeNumber subtract(const Number& a, const Number& b);
MaybeNumber multiply(const Number& a, const Number& b);
MaybeNumber divide(const Number& a, const Number& b);
// The principal value; exact where base and result are rational.
MaybeNumber power(const Number& base, const Number& exponent);
// The n-th root, n >= 1: of a negative real the real one where n is odd, else the principal one.
MaybeNumber root(const Number& x, unsigned long n);
MaybeNumber factorial(const Number& x);
// n is any number, k >= 0 an integer.
MaybeNumber binomial(const Number& n, const Number& k);
MaybeNumber absolute(const Number& x);
MaybeNumber floor(const Number& x);
// n!!, the product of n, n - 2, ... down to 1 or 2.
MaybeNumber double_factorial(const Number& x);
// By name: sin, cos, tan, cot, sec, csc, sinh, cosh, tanh, coth, sech, csch and their inverses (arcsin or asin, arsinh,
// arcsinh or asinh), ln, log (base 10), exp.  Nothing for another name, and for arccot of negative numbers, which has
// two conventions.
MaybeNumber apply(const char* function, const Number& x);
bool is_function(const char* name);
// By name: max, min of reals; gcd, lcm of integers.  Nothing for other numbers.
MaybeNumber fold(const char* function, const Number& a, const Number& b);
bool is_fold(const char* name);

Number pi();
Number euler();
Number imaginary_unit();

// Rationals: the same number.  Otherwise no further apart than 2^32 times their error bound, which must be small.
bool equal(const Number& a, const Number& b);
bool is_zero(const Number& x);
// Returns the length of a rational in units of 512 bits.
int length(const Number& x);
// Returns -1, 0 or 1 for a real number, nullopt for any other.
std::optional<int> sign(const Number& x);

}  // namespace pare::math_value
