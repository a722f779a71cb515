// Mutants of the host program, all compiled in and chosen at run time (tools/mutants/program.py writes the calls).
// PARE_MUTANT is the number of the one that is on; without it the program is what it was.
#pragma once
#include <type_traits>

namespace pare::mutant {

extern int chosen;              // -1: none
extern unsigned char* reached;  // of each mutant: has its place been evaluated?

// Returns whether mutant n is the chosen one.  Constant expressions stay as they are.
constexpr bool on(int n) {
  if (std::is_constant_evaluated()) return false;
  reached[n] = 1;
  return n == chosen;
}

// Returns x, set to zero first in mutant n: `zeroed(n, x) += y` assigns y.
template <class T>
constexpr T& zeroed(int n, T& x) {
  if (on(n)) x = T{};
  return x;
}

// `a < Less{n} < b` has the operands of `a < b`: no parser is needed to find where they end.
template <class Tag, class A>
struct Left {
  const A& a;
  int n;
};
#define PARE_MUTANT_OPERATOR(Tag, symbol, needs, other)                               \
  struct Tag {                                                                        \
    int n;                                                                            \
  };                                                                                  \
  template <class A>                                                                  \
  constexpr Left<Tag, A> operator symbol(const A& a, Tag t) {                         \
    return {a, t.n};                                                                  \
  }                                                                                   \
  template <class A, class B>                                                         \
  requires(needs) constexpr auto operator symbol(const Left<Tag, A>& l, const B& b) { \
    return on(l.n) ? static_cast<decltype(l.a symbol b)>(other) : l.a symbol b;       \
  }
PARE_MUTANT_OPERATOR(Less, <, true, l.a <= b)
PARE_MUTANT_OPERATOR(Greater, >, true, l.a >= b)
PARE_MUTANT_OPERATOR(LessEqual, <=, true, l.a < b)
PARE_MUTANT_OPERATOR(GreaterEqual, >=, true, l.a > b)
PARE_MUTANT_OPERATOR(Equal, ==, true, !(l.a == b))
PARE_MUTANT_OPERATOR(Unequal, !=, true, l.a == b)
PARE_MUTANT_OPERATOR(NotLast, <, std::is_arithmetic_v<A>, l.a + 1 < b)
#define PARE_MUTANT_NUMBERS (std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
PARE_MUTANT_OPERATOR(Plus, +, PARE_MUTANT_NUMBERS, l.a - b)
PARE_MUTANT_OPERATOR(Minus, -, PARE_MUTANT_NUMBERS, l.a + b)
PARE_MUTANT_OPERATOR(Times, *, PARE_MUTANT_NUMBERS, l.a)
PARE_MUTANT_OPERATOR(Divide, /, PARE_MUTANT_NUMBERS, l.a)

}  // namespace pare::mutant
