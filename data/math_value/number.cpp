#include "data/math_value/number.h"

#include <algorithm>
#include <cstring>

namespace pare::math_value {
namespace {

constexpr size_t kRationalBits = 16384;    // numerator and denominator together; longer ones become inexact
constexpr mpfr_exp_t kExponent = 1 << 20;  // of an inexact number's parts; larger ones become undefined
constexpr mpfr_exp_t kArgument = 64;       // exponent of what trigonometric functions are applied to
constexpr int kEqualBits = 180;

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
MaybeNumber checked(const mpq_class& q) {
  if (bits(q) <= kRationalBits) return q;
  return checked(Wide(q));
}

using Binary = int (*)(mpc_ptr, mpc_srcptr, mpc_srcptr, mpc_rnd_t);
using Unary = int (*)(mpc_ptr, mpc_srcptr, mpc_rnd_t);

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

// |z| <= 2^-kEqualBits * scale, where scale is at least 1.
bool negligible(const Wide& z, mpfr_exp_t scale_exponent) {
  const auto small = [&](mpfr_srcptr x) { return mpfr_zero_p(x) || mpfr_get_exp(x) <= scale_exponent - kEqualBits; };
  return small(mpc_realref(z.get())) && small(mpc_imagref(z.get()));
}
mpfr_exp_t magnitude(const Wide& z) {
  mpfr_exp_t e = 0;
  for (mpfr_srcptr x : {mpc_realref(z.get()), mpc_imagref(z.get())})
    if (!mpfr_zero_p(x)) e = std::max(e, mpfr_get_exp(x));
  return e;
}

// q^n, |n| small enough for the result; nothing: too long, or 0^-1.
std::optional<mpq_class> integer_power(const mpq_class& q, const mpz_class& n) {
  if (n == 0) return mpq_class(1);
  if (q == 0) return n > 0 ? std::optional<mpq_class>(0) : std::nullopt;
  const mpz_class m = abs(n);
  if (m > kRationalBits || bits(q) * m.get_ui() > 2 * kRationalBits) return {};
  mpz_class num, den;
  mpz_pow_ui(num.get_mpz_t(), q.get_num_mpz_t(), m.get_ui());
  mpz_pow_ui(den.get_mpz_t(), q.get_den_mpz_t(), m.get_ui());
  mpq_class x = n > 0 ? mpq_class(num, den) : mpq_class(den, num);
  x.canonicalize();
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
  const Wide product = result(mpc_mul, result(mpc_log, a), b);
  // The result must stay in range, and its argument precise.
  if (!below(product, 20)) return {};
  return checked(result(mpc_exp, product));
}

Wide constant(int (*f)(mpfr_ptr, mpfr_rnd_t)) {
  Wide z;
  mpc_set_ui(z.get(), 0, MPC_RNDNN);
  f(mpc_realref(z.get()), MPFR_RNDN);
  return z;
}

bool is_real(const Wide& z) {
  const auto* im = mpc_imagref(z.get());
  return mpfr_zero_p(im) || mpfr_get_exp(im) <= magnitude(z) - kEqualBits;
}

}  // namespace

MaybeNumber add(const Number& a, const Number& b) {
  if (exact(a) && exact(b)) return checked(mpq_class(*exact(a) + *exact(b)));
  return checked(result(mpc_add, wide(a), wide(b)));
}

MaybeNumber subtract(const Number& a, const Number& b) {
  if (exact(a) && exact(b)) return checked(mpq_class(*exact(a) - *exact(b)));
  return checked(result(mpc_sub, wide(a), wide(b)));
}

MaybeNumber multiply(const Number& a, const Number& b) {
  if (exact(a) && exact(b)) return checked(mpq_class(*exact(a) * *exact(b)));
  return checked(result(mpc_mul, wide(a), wide(b)));
}

MaybeNumber divide(const Number& a, const Number& b) {
  if (is_zero(b)) return {};
  if (exact(a) && exact(b)) return checked(mpq_class(*exact(a) / *exact(b)));
  return checked(result(mpc_div, wide(a), wide(b)));
}

MaybeNumber power(const Number& base, const Number& exponent) {
  const mpq_class *a = exact(base), *b = exact(exponent);
  if (b && b->get_den() == 1) {
    if (*b == 0) return mpq_class(1);
    if (a) {
      if (*a == 0 && *b < 0) return {};
      if (const auto x = integer_power(*a, b->get_num())) return checked(*x);
    } else if (abs(b->get_num()) <= 4096) {
      Wide z;
      mpc_pow_z(z.get(), wide(base).get(), b->get_num_mpz_t(), MPC_RNDNN);
      return checked(z);
    }
  } else if (a && b && *a >= 0 && b->get_den() <= 64) {
    if (const auto r = rational_root(*a, b->get_den().get_ui()))
      if (const auto x = integer_power(*r, b->get_num())) return checked(*x);
  }
  return principal_power(wide(base), wide(exponent));
}

MaybeNumber root(const Number& x, unsigned long n) {
  if (n == 0 || n > 4096) return {};
  const bool negate = n % 2 == 1 && sign(x).value_or(0) < 0;
  const MaybeNumber y = negate ? subtract(mpq_class(0), x) : MaybeNumber(x);
  if (!y) return {};
  const MaybeNumber r =
      !negate && n == 2 && !exact(*y) ? checked(result(mpc_sqrt, wide(*y))) : power(*y, mpq_class(1, n));
  return r && negate ? subtract(mpq_class(0), *r) : r;
}

MaybeNumber factorial(const Number& x) {
  const mpq_class* q = exact(x);
  if (!q || q->get_den() != 1 || *q < 0 || *q > 1000) return {};
  mpz_class f;
  mpz_fac_ui(f.get_mpz_t(), q->get_num().get_ui());
  return checked(mpq_class(f));
}

MaybeNumber binomial(const Number& n, const Number& k) {
  const mpq_class *a = exact(n), *b = exact(k);
  if (!a || !b || a->get_den() != 1 || b->get_den() != 1 || *a < 0 || *b < 0 || *a > 1000000) return {};
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
  return checked(z);
}

MaybeNumber floor(const Number& x) {
  mpz_class n;
  if (const mpq_class* q = exact(x)) {
    mpz_fdiv_q(n.get_mpz_t(), q->get_num_mpz_t(), q->get_den_mpz_t());
  } else {
    const Wide& z = std::get<Wide>(x);
    if (!is_real(z) || !below(z, 200)) return {};
    mpfr_get_z(n.get_mpz_t(), mpc_realref(z.get()), MPFR_RNDD);
  }
  return mpq_class(n);
}

namespace {

MaybeNumber reciprocal(const MaybeNumber& x) { return x ? divide(mpq_class(1), *x) : x; }

Number quotient_of_logs(const Wide& x) {
  return divide(result(mpc_log, x), result(mpc_log, Wide(mpq_class(10)))).value();
}

// arctan z = (log(1 - iz) - log(1 + iz)) i / 2;  arcsin z = -i log(iz + sqrt(1 - z^2)).
MaybeNumber arctan(const Wide& z) {
  const Wide one(mpq_class(1)), i = wide(imaginary_unit()), iz = result(mpc_mul, i, z);
  const Wide below_one = result(mpc_sub, one, iz), above_one = result(mpc_add, one, iz);
  if (is_zero(below_one) || is_zero(above_one)) return {};
  const Wide difference = result(mpc_sub, result(mpc_log, below_one), result(mpc_log, above_one));
  return multiply(result(mpc_mul, i, difference), mpq_class(1, 2));
}
MaybeNumber arcsin(const Wide& z) {
  const Wide one(mpq_class(1)), i = wide(imaginary_unit());
  const Wide cosine = result(mpc_sqrt, result(mpc_sub, one, result(mpc_mul, z, z)));
  const Wide log = result(mpc_log, result(mpc_add, result(mpc_mul, i, z), cosine));
  return subtract(mpq_class(0), result(mpc_mul, i, log));
}

struct Function {
  const char* name;
  MaybeNumber (*apply)(const Wide&);
};
constexpr Function kFunctions[] = {
    {"sin", [](const Wide& z) { return checked(result(mpc_sin, z)); }},
    {"cos", [](const Wide& z) { return checked(result(mpc_cos, z)); }},
    {"tan", [](const Wide& z) { return divide(result(mpc_sin, z), result(mpc_cos, z)); }},
    {"cot", [](const Wide& z) { return divide(result(mpc_cos, z), result(mpc_sin, z)); }},
    {"sec", [](const Wide& z) { return reciprocal(result(mpc_cos, z)); }},
    {"csc", [](const Wide& z) { return reciprocal(result(mpc_sin, z)); }},
    {"arcsin", arcsin},
    {"arccos",
     [](const Wide& z) {
       const MaybeNumber x = arcsin(z), half = divide(pi(), mpq_class(2));
       return x ? subtract(*half, *x) : x;
     }},
    {"arctan", arctan},
    {"sinh", [](const Wide& z) { return checked(result(mpc_sinh, z)); }},
    {"cosh", [](const Wide& z) { return checked(result(mpc_cosh, z)); }},
    {"tanh", [](const Wide& z) { return divide(result(mpc_sinh, z), result(mpc_cosh, z)); }},
    {"ln", [](const Wide& z) { return checked(result(mpc_log, z)); }},
    {"log", [](const Wide& z) { return MaybeNumber(quotient_of_logs(z)); }},
    {"exp", [](const Wide& z) { return checked(result(mpc_exp, z)); }},
};

const Function* find_function(const char* name) {
  for (const Function& f : kFunctions)
    if (std::strcmp(f.name, name) == 0) return &f;
  return nullptr;
}

}  // namespace

bool is_function(const char* name) { return find_function(name) != nullptr; }

MaybeNumber apply(const char* function, const Number& x) {
  const Function* f = find_function(function);
  const bool log = function[0] == 'l', grows = function[0] == 'e' || std::strchr(function, 'h');
  if (!f || (log && is_zero(x))) return {};
  const Wide z = wide(x);
  // What the arguments of the others may be keeps their results in range and their cost small.
  if (!log && !below(z, grows ? 16 : kArgument)) return {};
  if (!log && !grows && !part_below(mpc_imagref(z.get()), 16)) return {};
  return f->apply(z);
}

Number pi() { return constant(mpfr_const_pi); }

Number euler() {
  Wide z;
  mpc_set_ui(z.get(), 1, MPC_RNDNN);
  mpc_exp(z.get(), z.get(), MPC_RNDNN);
  return z;
}

Number imaginary_unit() {
  Wide z;
  mpc_set_ui_ui(z.get(), 0, 1, MPC_RNDNN);
  return z;
}

bool equal(const Number& a, const Number& b) {
  if (exact(a) && exact(b)) return *exact(a) == *exact(b);
  const Wide x = wide(a), y = wide(b);
  return negligible(result(mpc_sub, x, y), std::max(magnitude(x), magnitude(y)));
}

bool is_zero(const Number& x) {
  if (exact(x)) return *exact(x) == 0;
  return negligible(std::get<Wide>(x), 0);
}

std::optional<int> sign(const Number& x) {
  if (exact(x)) return sgn(*exact(x));
  const Wide& z = std::get<Wide>(x);
  if (!is_real(z)) return {};
  return is_zero(x) ? 0 : mpfr_sgn(mpc_realref(z.get()));
}

}  // namespace pare::math_value
