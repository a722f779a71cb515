#include "data/math_value/number.h"

#include <algorithm>
#include <cstring>

namespace pare::math_value {
namespace {

constexpr size_t kRationalBits = 1 << 17;  // numerator and denominator together; longer ones become undefined
constexpr mpfr_exp_t kExponent = 1 << 20;  // of an inexact number's parts; larger ones become undefined
constexpr mpfr_exp_t kArgument = 64;       // exponent of what trigonometric functions are applied to
constexpr int kSlack = 32;                 // what is less than 2^kSlack times an error is nothing
constexpr int kComparable = 128;           // bits that must be right, of the larger number or behind the point

size_t bits(const mpq_class& q) { return mpz_sizeinbase(q.get_num_mpz_t(), 2) + mpz_sizeinbase(q.get_den_mpz_t(), 2); }

const mpq_class* exact(const Number& x) { return std::get_if<mpq_class>(&x); }

Wide wide(const Number& x) { return exact(x) ? Wide(*exact(x)) : std::get<Wide>(x); }

bool part_below(mpfr_srcptr x, mpfr_exp_t limit) {
  return mpfr_zero_p(x) || (mpfr_number_p(x) && mpfr_get_exp(x) <= limit && mpfr_get_exp(x) >= -kExponent);
}
bool below(const Wide& z, mpfr_exp_t limit) {
  return part_below(mpc_realref(z.get()), limit) && part_below(mpc_imagref(z.get()), limit);
}

MaybeNumber checked(const Wide& z) { return below(z, kExponent) ? MaybeNumber(z) : std::nullopt; }
MaybeNumber checked(const mpq_class& q) { return bits(q) <= kRationalBits ? MaybeNumber(q) : std::nullopt; }

// |z| is about 2^magnitude, at least half and less than twice that.
mpfr_exp_t magnitude(const Wide& z) {
  mpfr_exp_t e = Wide::kExact;
  for (mpfr_srcptr x : {mpc_realref(z.get()), mpc_imagref(z.get())})
    if (mpfr_regular_p(x)) e = std::max(e, mpfr_get_exp(x));
  return e;
}

using Binary = int (*)(mpc_ptr, mpc_srcptr, mpc_srcptr, mpc_rnd_t);
using Unary = int (*)(mpc_ptr, mpc_srcptr, mpc_rnd_t);

// A result that is wrong by 2^error because its operands are, and by its rounding.
Wide with_error(Wide z, mpfr_exp_t error) {
  z.error = std::max({error, magnitude(z) - Wide::kBits, Wide::kExact}) + 1;
  return z;
}
Wide result(Binary f, const Wide& a, const Wide& b) {
  Wide z;
  f(z.get(), a.get(), b.get(), MPC_RNDNN);
  return z;
}
Wide result(Unary f, const Wide& a) {
  Wide z;
  f(z.get(), a.get(), MPC_RNDNN);
  return z;
}

// Not to be told from zero.
bool negligible(const Wide& z) { return magnitude(z) <= z.error + kSlack; }

// a + b or a - b; what each is wrong by adds up.
MaybeNumber sum(Binary f, const Wide& a, const Wide& b) {
  const Wide z = with_error(result(f, a, b), std::max(a.error, b.error) + 1);
  for (const Wide* term : {&a, &b})
    if (!negligible(*term) && magnitude(*term) <= z.error + kSlack) return {};  // it would be lost
  return checked(z);
}
Wide product(const Wide& a, const Wide& b) {
  const mpfr_exp_t x = magnitude(a), y = magnitude(b);
  return with_error(result(mpc_mul, a, b), std::max({a.error + y, b.error + x, a.error + b.error}) + 2);
}
Wide quotient(const Wide& a, const Wide& b) {
  const Wide z = result(mpc_div, a, b);
  return with_error(z, std::max(a.error, b.error + magnitude(z)) - magnitude(b) + 3);
}
Wide logarithm(const Wide& a) { return with_error(result(mpc_log, a), a.error - magnitude(a) + 2); }
Wide exponential(const Wide& a) {
  const Wide z = result(mpc_exp, a);
  return with_error(z, a.error + magnitude(z) + 1);
}
Wide square_root(const Wide& a) {
  const Wide z = result(mpc_sqrt, a);
  return with_error(z, negligible(a) ? a.error / 2 + kSlack : a.error - magnitude(z) + 1);
}
// Of sin, cos, sinh or cosh, whose derivative is `slope` up to its sign.
Wide wave(Unary f, Unary slope, const Wide& a) {
  return with_error(result(f, a), a.error + std::max<mpfr_exp_t>(magnitude(result(slope, a)), a.error) + 1);
}

// q^n, n != 0; nothing: too long, or 0^-1.
std::optional<mpq_class> integer_power(const mpq_class& q, const mpz_class& n) {
  if (q == 0) return n > 0 ? std::optional<mpq_class>(0) : std::nullopt;
  const mpz_class m = abs(n);
  if (m > kRationalBits || bits(q) * m.get_ui() > 2 * kRationalBits) return {};
  mpz_class num, den;
  mpz_pow_ui(num.get_mpz_t(), q.get_num_mpz_t(), m.get_ui());
  mpz_pow_ui(den.get_mpz_t(), q.get_den_mpz_t(), m.get_ui());
  mpq_class x = n > 0 ? mpq_class(num, den) : mpq_class(den, num);
  if (x.get_den() < 0) x = mpq_class(-x.get_num(), -x.get_den());  // powers of a reduced fraction are reduced
  return x;
}

// The n-th root of a non-negative rational where it is rational.
std::optional<mpq_class> rational_root(const mpq_class& q, unsigned long n) {
  mpz_class num, den;
  if (!mpz_root(num.get_mpz_t(), q.get_num_mpz_t(), n) || !mpz_root(den.get_mpz_t(), q.get_den_mpz_t(), n)) return {};
  return mpq_class(num, den);
}

// exp(b log a).
MaybeNumber principal_power(const Wide& a, const Wide& b) {
  if (mpfr_zero_p(mpc_realref(a.get())) && mpfr_zero_p(mpc_imagref(a.get()))) {
    const bool positive = mpfr_sgn(mpc_realref(b.get())) > 0;
    return positive ? MaybeNumber(mpq_class(0)) : std::nullopt;
  }
  const Wide x = product(logarithm(a), b);
  // The result must stay in range, and its argument precise.
  if (!below(x, 20)) return {};
  return checked(exponential(x));
}

Wide constant(int (*f)(mpfr_ptr, mpfr_rnd_t)) {
  Wide z;
  mpc_set_ui(z.get(), 0, MPC_RNDNN);
  f(mpc_realref(z.get()), MPFR_RNDN);
  return with_error(z, Wide::kExact);
}

bool is_real(const Wide& z) {
  const auto* im = mpc_imagref(z.get());
  return mpfr_zero_p(im) || mpfr_get_exp(im) <= z.error + kSlack;
}

}  // namespace

Wide::Wide(const mpq_class& q) : Wide() {
  if (mpc_set_q(z_, q.get_mpq_t(), MPC_RNDNN) != 0) error = magnitude(*this) - kBits;
}

MaybeNumber add(const Number& a, const Number& b) {
  if (exact(a) && exact(b)) return checked(mpq_class(*exact(a) + *exact(b)));
  return sum(mpc_add, wide(a), wide(b));
}

MaybeNumber subtract(const Number& a, const Number& b) {
  if (exact(a) && exact(b)) return checked(mpq_class(*exact(a) - *exact(b)));
  return sum(mpc_sub, wide(a), wide(b));
}

MaybeNumber multiply(const Number& a, const Number& b) {
  if (exact(a) && exact(b)) return checked(mpq_class(*exact(a) * *exact(b)));
  return checked(product(wide(a), wide(b)));
}

MaybeNumber divide(const Number& a, const Number& b) {
  if (is_zero(b)) return {};
  if (exact(a) && exact(b)) return checked(mpq_class(*exact(a) / *exact(b)));
  return checked(quotient(wide(a), wide(b)));
}

MaybeNumber power(const Number& base, const Number& exponent) {
  const mpq_class *a = exact(base), *b = exact(exponent);
  if (b && b->get_den() == 1) {
    if (*b == 0) return mpq_class(1);
    if (a) {
      const auto x = integer_power(*a, b->get_num());
      return x ? checked(*x) : std::nullopt;
    }
    if (abs(b->get_num()) <= 4096) {
      const Wide x = wide(base);
      if (*b < 0 && negligible(x)) return {};
      Wide z;
      mpc_pow_z(z.get(), x.get(), b->get_num_mpz_t(), MPC_RNDNN);
      return checked(with_error(z, magnitude(z) + x.error - magnitude(x) + 13));  // |b| <= 2^12
    }
  } else if (a && b && *a >= 0 && b->get_den() <= 64) {
    if (const auto r = rational_root(*a, b->get_den().get_ui())) return power(*r, mpq_class(b->get_num()));
  }
  return principal_power(wide(base), wide(exponent));
}

MaybeNumber root(const Number& x, unsigned long n) {
  if (n == 0 || n > 4096) return {};
  const bool negate = n % 2 == 1 && sign(x).value_or(0) < 0;
  const MaybeNumber y = negate ? subtract(mpq_class(0), x) : MaybeNumber(x);
  if (!y) return {};
  const MaybeNumber r = !negate && n == 2 && !exact(*y) ? checked(square_root(wide(*y))) : power(*y, mpq_class(1, n));
  return r && negate ? subtract(mpq_class(0), *r) : r;
}

MaybeNumber factorial(const Number& x) {
  const mpq_class* q = exact(x);
  if (!q || q->get_den() != 1 || *q < 0 || *q > 1000) return {};
  mpz_class f;
  mpz_fac_ui(f.get_mpz_t(), q->get_num().get_ui());
  return checked(mpq_class(f));
}

MaybeNumber double_factorial(const Number& x) {
  const mpq_class* q = exact(x);
  if (!q || q->get_den() != 1 || *q < 0 || *q > 1000) return {};
  mpz_class f;
  mpz_2fac_ui(f.get_mpz_t(), q->get_num().get_ui());
  return checked(mpq_class(f));
}

MaybeNumber binomial(const Number& n, const Number& k) {
  const mpq_class *a = exact(n), *b = exact(k);
  if (!b || b->get_den() != 1 || *b < 0) return {};
  if (!a || a->get_den() != 1 || *a < 0) {  // as a variable is: n (n - 1) ... (n - k + 1) / k!
    if (*b > 20) return {};
    MaybeNumber c = Number(mpq_class(1));
    for (int i = 0; c && i < *b; i++) {
      const MaybeNumber factor = subtract(n, mpq_class(i));
      const MaybeNumber product = factor ? multiply(*c, *factor) : std::nullopt;
      c = product ? divide(*product, mpq_class(i + 1)) : std::nullopt;
    }
    return c;
  }
  if (*a > 1000000) return {};
  if (*b > *a) return mpq_class(0);
  const mpz_class least = std::min(b->get_num(), mpz_class(a->get_num() - b->get_num()));
  if (least > 1000) return {};
  mpz_class c;
  mpz_bin_ui(c.get_mpz_t(), a->get_num_mpz_t(), least.get_ui());
  return checked(mpq_class(c));
}

MaybeNumber absolute(const Number& x) {
  if (exact(x)) return mpq_class(abs(*exact(x)));
  Wide z;
  mpc_set_ui(z.get(), 0, MPC_RNDNN);
  mpc_abs(mpc_realref(z.get()), std::get<Wide>(x).get(), MPFR_RNDN);
  return checked(with_error(z, std::get<Wide>(x).error));
}

MaybeNumber floor(const Number& x) {
  mpz_class n;
  if (const mpq_class* q = exact(x)) {
    mpz_fdiv_q(n.get_mpz_t(), q->get_num_mpz_t(), q->get_den_mpz_t());
  } else {
    const Wide& z = std::get<Wide>(x);
    if (!is_real(z) || !below(z, 200)) return {};
    mpfr_get_z(n.get_mpz_t(), mpc_realref(z.get()), MPFR_RNDN);
    if (!equal(x, mpq_class(n))) mpfr_get_z(n.get_mpz_t(), mpc_realref(z.get()), MPFR_RNDD);
  }
  return mpq_class(n);
}

namespace {

// arctan z = (log(1 - iz) - log(1 + iz)) i / 2;  arcsin z = -i log(iz + sqrt(1 - z^2)).
MaybeNumber arctan(const Wide& z) {
  const Wide i = wide(imaginary_unit()), iz = product(i, z);
  const MaybeNumber minus = subtract(mpq_class(1), iz), plus = add(mpq_class(1), iz);
  if (!minus || !plus || is_zero(*minus) || is_zero(*plus)) return {};
  const MaybeNumber difference = subtract(logarithm(wide(*minus)), logarithm(wide(*plus)));
  return difference ? multiply(product(i, wide(*difference)), mpq_class(1, 2)) : difference;
}
MaybeNumber arcsin(const Wide& z) {
  const Wide i = wide(imaginary_unit());
  const MaybeNumber square = subtract(mpq_class(1), product(z, z));
  if (!square) return {};
  // At 1 and -1, where the root below would lose half of the bits.
  if (const std::optional<int> side = sign(z); side && is_zero(*square)) return multiply(pi(), mpq_class(*side, 2));
  const MaybeNumber x = add(product(i, z), square_root(wide(*square)));
  return x && !is_zero(*x) ? subtract(mpq_class(0), product(i, logarithm(wide(*x)))) : std::nullopt;
}

// log(z + sqrt(z^2 + c)): arsinh for c = 1, arcosh of z >= 1 for c = -1.
MaybeNumber area(const Wide& z, int c) {
  const MaybeNumber square = add(product(z, z), mpq_class(c));
  const MaybeNumber x = square ? add(z, square_root(wide(*square))) : square;
  return x && !is_zero(*x) ? checked(logarithm(wide(*x))) : std::nullopt;
}
MaybeNumber arcosh(const Wide& z) {
  const MaybeNumber above = subtract(z, mpq_class(1));
  if (above && is_zero(*above)) return mpq_class(0);
  return above && sign(*above).value_or(-1) >= 0 ? area(z, -1) : std::nullopt;
}
// (log(1 + z) - log(1 - z)) / 2
MaybeNumber artanh(const Wide& z) {
  const MaybeNumber plus = add(mpq_class(1), z), minus = subtract(mpq_class(1), z);
  if (!plus || !minus || is_zero(*plus) || is_zero(*minus)) return {};
  const MaybeNumber difference = subtract(logarithm(wide(*plus)), logarithm(wide(*minus)));
  return difference ? multiply(*difference, mpq_class(1, 2)) : difference;
}
MaybeNumber arccos(const Wide& z) {
  const MaybeNumber x = arcsin(z), half = divide(pi(), mpq_class(2));
  return x ? subtract(*half, *x) : x;
}
MaybeNumber arccot(const Wide& z) {
  const int s = sign(z).value_or(-1);
  if (s < 0) return {};
  const MaybeNumber x = arctan(z), half = divide(pi(), mpq_class(2));
  return x ? subtract(*half, *x) : x;
}
// f(1 / z)
template <MaybeNumber (*f)(const Wide&)>
MaybeNumber of_inverse(const Wide& z) {
  const MaybeNumber inverse = divide(mpq_class(1), z);
  return inverse ? f(wide(*inverse)) : inverse;
}
MaybeNumber arsinh(const Wide& z) { return area(z, 1); }

struct Function {
  const char* name;
  MaybeNumber (*apply)(const Wide&);
};
constexpr Function kFunctions[] = {
    {"sin", [](const Wide& z) { return checked(wave(mpc_sin, mpc_cos, z)); }},
    {"cos", [](const Wide& z) { return checked(wave(mpc_cos, mpc_sin, z)); }},
    {"tan", [](const Wide& z) { return divide(wave(mpc_sin, mpc_cos, z), wave(mpc_cos, mpc_sin, z)); }},
    {"cot", [](const Wide& z) { return divide(wave(mpc_cos, mpc_sin, z), wave(mpc_sin, mpc_cos, z)); }},
    {"sec", [](const Wide& z) { return divide(mpq_class(1), wave(mpc_cos, mpc_sin, z)); }},
    {"csc", [](const Wide& z) { return divide(mpq_class(1), wave(mpc_sin, mpc_cos, z)); }},
    {"arcsin", arcsin},
    {"arccos", arccos},
    {"arctan", arctan},
    {"arccot", arccot},
    {"arcsec", of_inverse<arccos>},
    {"arccsc", of_inverse<arcsin>},
    {"asin", arcsin},
    {"acos", arccos},
    {"atan", arctan},
    {"acot", arccot},
    {"asec", of_inverse<arccos>},
    {"acsc", of_inverse<arcsin>},
    {"sinh", [](const Wide& z) { return checked(wave(mpc_sinh, mpc_cosh, z)); }},
    {"cosh", [](const Wide& z) { return checked(wave(mpc_cosh, mpc_sinh, z)); }},
    {"tanh", [](const Wide& z) { return divide(wave(mpc_sinh, mpc_cosh, z), wave(mpc_cosh, mpc_sinh, z)); }},
    {"coth", [](const Wide& z) { return divide(wave(mpc_cosh, mpc_sinh, z), wave(mpc_sinh, mpc_cosh, z)); }},
    {"sech", [](const Wide& z) { return divide(mpq_class(1), wave(mpc_cosh, mpc_sinh, z)); }},
    {"csch", [](const Wide& z) { return divide(mpq_class(1), wave(mpc_sinh, mpc_cosh, z)); }},
    {"arsinh", arsinh},
    {"arcosh", arcosh},
    {"artanh", artanh},
    {"arcsinh", arsinh},
    {"arccosh", arcosh},
    {"arctanh", artanh},
    {"asinh", arsinh},
    {"acosh", arcosh},
    {"atanh", artanh},
    {"ln", [](const Wide& z) { return checked(logarithm(z)); }},
    {"log", [](const Wide& z) { return divide(logarithm(z), logarithm(Wide(mpq_class(10)))); }},
    {"exp", [](const Wide& z) { return checked(exponential(z)); }},
};

const Function* find_function(const char* name) {
  for (const Function& f : kFunctions)
    if (std::strcmp(f.name, name) == 0) return &f;
  return nullptr;
}

}  // namespace

bool is_function(const char* name) { return find_function(name) != nullptr; }

bool is_fold(const char* name) {
  for (const char* f : {"max", "min", "gcd", "lcm"})
    if (std::strcmp(f, name) == 0) return true;
  return false;
}

MaybeNumber fold(const char* function, const Number& a, const Number& b) {
  if (function[0] == 'm') {
    const MaybeNumber d = subtract(a, b);
    if (!d || !sign(a) || !sign(b) || !sign(*d)) return {};
    return (*sign(*d) >= 0) == (std::strcmp(function, "max") == 0) ? a : b;
  }
  const mpq_class *x = exact(a), *y = exact(b);
  if (!x || !y || x->get_den() != 1 || y->get_den() != 1) return {};
  mpz_class r;
  (function[0] == 'g' ? mpz_gcd : mpz_lcm)(r.get_mpz_t(), x->get_num_mpz_t(), y->get_num_mpz_t());
  return checked(mpq_class(r));
}

MaybeNumber apply(const char* function, const Number& x) {
  const Function* f = find_function(function);
  const bool log = function[0] == 'l', inverse = function[0] == 'a';
  const bool grows = function[0] == 'e' || (!inverse && std::strchr(function, 'h'));
  if (!f || (log && is_zero(x))) return {};
  const Wide z = wide(x);
  // What the arguments of the others may be keeps their results in range and their cost small.
  if (!log && !below(z, grows ? 16 : kArgument)) return {};
  if (!log && !grows && !part_below(mpc_imagref(z.get()), 16)) return {};
  return f->apply(z);
}

int length(const Number& x) { return exact(x) ? static_cast<int>(bits(*exact(x)) / 512) : 0; }

Number pi() { return constant(mpfr_const_pi); }

Number euler() { return exponential(Wide(mpq_class(1))); }

Number imaginary_unit() {
  Wide z;
  mpc_set_ui_ui(z.get(), 0, 1, MPC_RNDNN);
  return z;
}

bool equal(const Number& a, const Number& b) {
  if (exact(a) && exact(b)) return *exact(a) == *exact(b);
  const Wide x = wide(a), y = wide(b), z = with_error(result(mpc_sub, x, y), std::max(x.error, y.error));
  return negligible(z) && z.error <= std::max<mpfr_exp_t>({magnitude(x), magnitude(y), 0}) - kComparable;
}

bool is_zero(const Number& x) {
  if (exact(x)) return *exact(x) == 0;
  return negligible(std::get<Wide>(x));
}

std::optional<int> sign(const Number& x) {
  if (exact(x)) return sgn(*exact(x));
  const Wide& z = std::get<Wide>(x);
  if (!is_real(z)) return {};
  return is_zero(x) ? 0 : mpfr_sgn(mpc_realref(z.get()));
}

}  // namespace pare::math_value
