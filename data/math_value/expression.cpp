#include "data/math_value/expression.h"

#include <algorithm>

#include "base/rng.h"

namespace pare::math_value {
namespace {

using Kind = Token::Kind;

// Between 1/4 and 9/4; at one of the last two points minus that.
Number value_of(const std::string& variable, size_t point) {
  uint64_t name = 0;
  for (const char c : variable) name = mix64(name ^ static_cast<unsigned char>(c));
  const uint64_t h = mix64(name + point);
  mpq_class q(static_cast<unsigned long>((1u << 22) + (h >> 40) * 2 + 1), 1ul << 24);
  q.canonicalize();
  return point == 2 + (name & 1) ? mpq_class(-q) : q;
}

mpq_class decimal(const std::string& digits) {
  const size_t point = digits.find('.');
  if (point == std::string::npos) return mpz_class(digits, 10);
  mpz_class scale;
  mpz_ui_pow_ui(scale.get_mpz_t(), 10, digits.size() - point - 1);
  mpq_class q(mpz_class(digits.substr(0, point) + digits.substr(point + 1), 10), scale);
  q.canonicalize();
  return q;
}

bool is_greek(const std::string& s) {
  for (const char* g :
       {"alpha", "beta",  "gamma", "delta",  "epsilon", "varepsilon", "zeta", "eta",    "theta", "kappa", "lambda",
        "mu",    "nu",    "xi",    "rho",    "sigma",   "tau",        "phi",  "varphi", "chi",   "psi",   "omega",
        "Gamma", "Delta", "Theta", "Lambda", "Sigma",   "Phi",        "Psi",  "Omega",  "ell"})
    if (s == g) return true;
  return false;
}

bool is_whole(const Token& t) { return t.kind == Kind::number && t.text.find('.') == std::string::npos; }

// Recursive descent.  Every function returns nothing once something cannot be read.
class Parser {
 public:
  Parser(Tokens t, Effort& effort, bool minus) : t_(t), effort_(effort), minus_(minus) {}

  using Result = std::optional<Samples>;

  Result sum() {
    if (++depth_ > kDepth) return {};
    Result x = signed_product();
    while (x && at_ < t_.size()) {
      const int s = sign();
      if (s == 0) break;
      at_++;
      const Result y = signed_product();
      if (!y) {
        x = {};
        break;
      }
      x = s > 0 ? binary(math_value::add, *x, *y) : binary(math_value::subtract, *x, *y);
    }
    depth_--;
    return x;
  }
  size_t used() const { return at_; }

 private:
  bool at_symbol(const char* s) const { return at_ < t_.size() && t_[at_].symbol(s); }
  bool at_command(const char* s) const { return at_ < t_.size() && t_[at_].command(s); }
  bool take_symbol(const char* s) { return at_symbol(s) && ++at_; }
  bool take_command(const char* s) { return at_command(s) && ++at_; }
  bool at_number(size_t i) const { return i < t_.size() && is_whole(t_[i]); }

  int sign() const {
    if (at_symbol("+")) return 1;
    if (at_symbol("-")) return -1;
    if (at_command("pm")) return minus_ ? -1 : 1;
    if (at_command("mp")) return minus_ ? 1 : -1;
    return 0;
  }

  Result binary(const Operation& f, const Samples& a, const Samples& b, int cost = 1) {
    if (!effort_.spend(cost * (a.constant && b.constant ? 1 : static_cast<int>(Samples::kPoints)))) return {};
    Samples r = combine(a, b, f);
    for (const MaybeNumber& x : r.at)
      if (x && !effort_.spend(length(*x))) return {};
    return r;
  }
  Result unary(const std::function<MaybeNumber(const Number&)>& f, const Samples& a, int cost = 1) {
    return binary([&](const Number& x, const Number&) { return f(x); }, a, a, cost);
  }
  Result negated(const Samples& a) {
    return unary([](const Number& x) { return math_value::subtract(mpq_class(0), x); }, a);
  }

  Result signed_product() {
    bool negative = false;
    while (at_ < t_.size() && sign() != 0) {
      negative ^= sign() < 0;
      at_++;
    }
    const Result x = product(false);
    return x && negative ? negated(*x) : x;
  }

  // Whether a factor without a sign of multiplication may begin here.
  bool factor_follows(bool of_function) const {
    if (at_ == t_.size()) return false;
    const Token& t = t_[at_];
    if (t.kind == Kind::number) return t_[at_ - 1].kind != Kind::number;  // "2 3" is nothing
    if (t.kind == Kind::letter || t.kind == Kind::word) return t.kind == Kind::letter || is_name(t);
    if (t.kind == Kind::command) {
      if (of_function && is_function(t.text.c_str())) return false;
      return t.text == "frac" || t.text == "sqrt" || t.text == "pi" || t.text == "binom" || t.text == "lfloor" ||
             t.text == "lceil" || t.text == "sum" || t.text == "prod" || t.text == "floor" || t.text == "ceil" ||
             t.text == "root" || is_function(t.text.c_str()) || is_fold(t.text.c_str()) || is_greek(t.text);
    }
    return t.symbol("(") || t.symbol("{") || (t.symbol("[") && !of_function) || (t.symbol("|") && bars_ == 0);
  }

  // `of_function`: the argument of a function without parentheses, as in \sin 2x \cos x.
  Result product(bool of_function) {
    Result x = power();
    while (x) {
      const bool times = !of_function && at_symbol("*"), over = !of_function && at_symbol("/");
      if (!times && !over && !factor_follows(of_function)) break;
      at_ += times || over;
      bool negative = false;
      for (; (times || over) && (at_symbol("-") || at_symbol("+")); at_++) negative ^= at_symbol("-");
      Result y = power();
      if (y && negative) y = negated(*y);
      if (!y) return {};
      x = over ? binary(divide, *x, *y) : binary(math_value::multiply, *x, *y);
    }
    return x;
  }

  Result power() {
    Result x = postfix();
    if (!x || !at_symbol("^")) return x;
    if (++depth_ > kDepth) return {};
    at_++;
    const Result e = exponent();
    depth_--;
    return e ? binary(math_value::power, *x, *e, 20) : Result();
  }

  Result exponent() {
    bool negative = false;
    for (; at_symbol("-") || at_symbol("+"); at_++) negative ^= at_symbol("-");
    const Result x = power();
    return x && negative ? negated(*x) : x;
  }

  Result postfix() {
    Result x = atom();
    for (; x; at_++) {
      if (at_symbol("!") && at_ + 1 < t_.size() && t_[at_ + 1].symbol("!")) {
        at_++;
        x = unary(double_factorial, *x, 5);
      } else if (at_symbol("!"))
        x = unary(factorial, *x, 5);
      else if (at_command("degree"))
        x = binary(math_value::multiply, *x, Samples(divide(pi(), mpq_class(180))));
      else if (at_symbol("%"))
        x = binary(divide, *x, Samples(mpq_class(100)));
      else
        break;
    }
    return x;
  }

  Result atom() {
    if (at_ == t_.size() || !effort_.spend(1)) return {};
    const Token& t = t_[at_];
    switch (t.kind) {
      case Kind::number:
        return number();
      case Kind::letter:
        return letter();
      case Kind::word:
        return is_name(t) ? letter() : Result();
      case Kind::command:
        return command(t);
      case Kind::symbol:
        return bracket(t);
      default:
        return {};
    }
  }

  Result number() {
    const Token& t = t_[at_++];
    mpq_class q = decimal(t.text);
    // 0.1\overline{6}
    if (at_command("overline") && t.text.find('.') != std::string::npos) return repeating(q, t.text);
    if (at_symbol("_")) return {};  // a numeral of another base
    // 1\frac{1}{2} and 1 1/2
    if (is_whole(t)) {
      if (const auto part = mixed()) q += *part;
    }
    return Samples(q);
  }

  Result repeating(mpq_class q, const std::string& digits) {
    at_++;
    if (!take_symbol("{") || !at_number(at_)) return {};
    const std::string& period = t_[at_++].text;
    if (!take_symbol("}")) return {};
    mpz_class scale, nines;
    mpz_ui_pow_ui(scale.get_mpz_t(), 10, digits.size() - digits.find('.') - 1);
    mpz_ui_pow_ui(nines.get_mpz_t(), 10, period.size());
    nines -= 1;
    mpq_class tail(mpz_class(period, 10), scale * nines);
    tail.canonicalize();
    return Samples(mpq_class(q + tail));
  }

  // A proper fraction of whole numbers right behind a whole number.
  std::optional<mpq_class> mixed() {
    size_t n, d, next;
    if (at_number(at_) && t_[at_].space && at_ + 2 < t_.size() && t_[at_ + 1].symbol("/") && at_number(at_ + 2)) {
      n = at_;
      d = at_ + 2;
      next = at_ + 3;
    } else if (at_command("frac")) {
      size_t i = at_ + 1;
      const auto argument = [&](size_t& place) {
        const bool braces = i < t_.size() && t_[i].symbol("{");
        place = i + braces;
        i += braces ? 3 : 1;
        return at_number(place) && (!braces || (place + 1 < t_.size() && t_[place + 1].symbol("}")));
      };
      if (!argument(n) || !argument(d)) return {};
      next = i;
    } else {
      return {};
    }
    const mpz_class num(t_[n].text, 10), den(t_[d].text, 10);
    if (num >= den || num == 0) return {};
    at_ = next;
    mpq_class q(num, den);
    q.canonicalize();
    return q;
  }

  static bool is_name(const Token& t) {  // capitals, such as the points of a segment
    for (const char c : t.text)
      if (c < 'A' || c > 'Z') return false;
    return true;
  }
  Result letter() {
    std::string name = t_[at_++].text;
    if (!at_symbol("_"))
      if (const Index* const i = index(name)) return i->value;
    if (take_symbol("_")) {
      if (at_ == t_.size()) return {};
      const size_t begin = at_, end = at_symbol("{") ? closing(t_, at_) : at_;
      if (end == npos) return {};
      const bool braces = end > begin;
      for (const Token& t : t_.subspan(begin, end - begin + 1))
        if (const Index* const i = index(t.text); i && i->value.constant) return {};  // a_k, term by term
      name += "_" + plain(t_.subspan(begin + braces, end - begin + 1 - 2 * braces));
      at_ = end + 1;
    } else if (name == "e") {
      return Samples(euler());
    } else if (name == "i") {
      return Samples(imaginary_unit());
    }
    return variable(name);
  }

  // The argument of a command: a group, or one token.
  Result argument() {
    if (at_symbol("{")) return bracket(t_[at_]);
    if (at_ < t_.size() && t_[at_].kind == Kind::number) return Samples(decimal(t_[at_++].text));
    return atom();
  }

  Result command(const Token& t) {
    at_++;
    if (t.text == "frac" || t.text == "binom") {
      const Result a = argument(), b = a ? argument() : Result();
      if (!b) return {};
      return t.text == "frac" ? binary(divide, *a, *b) : binary(binomial, *a, *b, 5);
    }
    if (t.text == "sqrt") return square_root();
    if (t.text == "sum" || t.text == "prod") return series(t.text == "prod");
    if (t.text == "pi") return Samples(pi());
    if (t.text == "root") return root_of();
    if (is_fold(t.text.c_str())) return folded(t.text);
    if (t.text == "lfloor" || t.text == "lceil" || t.text == "floor" || t.text == "ceil") {
      const bool up = t.text.ends_with("ceil"), called = t.text[0] != 'l';
      Result x = called ? argument_in_parentheses() : sum();
      if (!x || (!called && !take_command(up ? "rceil" : "rfloor"))) return {};
      if (up) x = negated(*x);
      x = x ? unary(floor, *x) : x;
      return x && up ? negated(*x) : x;
    }
    if (is_function(t.text.c_str())) return function(t.text);
    if (is_greek(t.text)) return --at_, letter();
    return {};
  }

  // \sum_{k=a}^{b} x or \prod, x being the product that follows: term by term between whole numbers.  Other sums are x
  // at some k, times a function of a and b that is none of those that can be written: so x may be written in another
  // way.
  Result series(bool times) {
    if (!take_symbol("_") || !take_symbol("{") || at_ == t_.size() || t_[at_].kind != Kind::letter) return {};
    const std::string k = t_[at_++].text;
    if (!take_symbol("=")) return {};
    const Result a = sum();
    if (!a || !take_symbol("}") || !take_symbol("^")) return {};
    const Result b = argument();
    if (!b || ++depth_ > kDepth) return {};
    const std::optional<long> first = whole(*a), last = whole(*b);
    Result total;
    if (first && last) {
      total = Samples(mpq_class(times));
      const size_t begin = at_;
      for (long i = *first; total && i <= std::max(*first, *last); i++) {  // once at least, to get past x
        at_ = begin;
        indices_.push_back({k, Samples(mpq_class(i))});
        const Result x = product(false);
        indices_.pop_back();
        if (!x || *first > *last) return x ? total : x;
        total = binary(times ? math_value::multiply : math_value::add, *total, *x);
      }
    } else if (!times) {
      indices_.push_back({k, variable("\\sum" + std::to_string(indices_.size()))});
      const Result x = product(false);
      indices_.pop_back();
      const Samples one(mpq_class(1)), scale(mpq_class(355, 113));
      const Result weighted = x ? binary(math_value::multiply, *b, scale) : x;
      const Result bounds = weighted ? binary(math_value::add, *a, *weighted) : weighted;
      const Result shifted = bounds ? binary(math_value::add, *bounds, Samples(mpq_class(577, 408))) : bounds;
      const Result inverse = shifted ? binary(divide, one, *shifted) : shifted;
      const Result factor = inverse ? binary(math_value::add, one, *inverse) : inverse;
      total = factor ? binary(math_value::multiply, *x, *factor) : factor;
    }
    depth_--;
    return total;
  }

  static std::optional<long> whole(const Samples& x) {
    const mpq_class* const q = x.constant && x.at[0] ? std::get_if<mpq_class>(&*x.at[0]) : nullptr;
    return q && q->get_den() == 1 && abs(*q) < 1'000'000 ? std::optional(q->get_num().get_si()) : std::nullopt;
  }

  struct Index {
    std::string name;
    Samples value;
  };
  const Index* index(const std::string& name) const {
    for (auto i = indices_.rbegin(); i != indices_.rend(); i++)
      if (i->name == name) return &*i;
    return nullptr;
  }

  Result square_root() {
    unsigned long n = 2;
    if (take_symbol("[")) {
      if (!at_number(at_) || t_[at_].text.size() > 3) return {};
      n = std::stoul(t_[at_++].text);
      if (!take_symbol("]")) return {};
    }
    const Result x = argument();
    return x ? unary([n](const Number& v) { return root(v, n); }, *x, 20) : Result();
  }

  // \root 3 \of {27}
  Result root_of() {
    if (!at_number(at_) || t_[at_].text.size() > 3) return {};
    const unsigned long n = std::stoul(t_[at_++].text);
    if (!take_command("of")) return {};
    const Result x = argument();
    return x ? unary([n](const Number& v) { return root(v, n); }, *x, 20) : Result();
  }

  Result argument_in_parentheses() { return at_symbol("(") || at_symbol("{") ? bracket(t_[at_]) : Result(); }

  // max(a, b, ...) or \max\{a, b, ...\}, of constants: of variables the four points do not tell the larger one.
  Result folded(const std::string& name) {
    const char* const close = at_symbol("(") ? ")" : at_symbol("\\{") ? "\\}" : nullptr;
    if (!close || ++depth_ > kDepth) return {};
    Result all;
    do {
      at_++;
      const Result x = sum();
      if (!x || !x->constant) return {};
      all = all ? binary([&](const Number& a, const Number& b) { return fold(name.c_str(), a, b); }, *all, *x, 5) : x;
    } while (all && at_symbol(","));
    depth_--;
    return all && take_symbol(close) ? all : Result();
  }

  Result function(const std::string& name) {
    std::optional<Samples> base, exponent;
    bool inverse = false;
    if (name == "log" && take_symbol("_")) {
      if (!(base = argument())) return {};
    }
    if (take_symbol("^")) {
      const bool braces = at_symbol("{");
      if (braces && at_ + 3 < t_.size() && t_[at_ + 1].symbol("-") && t_[at_ + 2].is(Kind::number, "1") &&
          t_[at_ + 3].symbol("}") && is_function(("arc" + name).c_str())) {
        inverse = true;
        at_ += 4;
      } else if (!(exponent = argument())) {
        return {};
      }
    }
    if (++depth_ > kDepth) return {};
    Result x = at_symbol("(") || at_symbol("{") ? postfix() : product(true);
    depth_--;
    if (!x) return {};
    const std::string f = inverse ? "arc" + name : base ? "ln" : name;
    x = unary([&](const Number& v) { return apply(f.c_str(), v); }, *x, 20);
    if (x && base) {
      const Result scale = unary([](const Number& v) { return apply("ln", v); }, *base, 20);
      x = scale ? binary(divide, *x, *scale) : Result();
    }
    return x && exponent ? binary(math_value::power, *x, *exponent, 20) : x;
  }

  Result bracket(const Token& t) {
    at_++;
    if (t.symbol("|")) {
      bars_++;
      const Result x = sum();
      bars_--;
      return x && take_symbol("|") ? unary(absolute, *x) : Result();
    }
    const char* close = t.symbol("(") ? ")" : t.symbol("[") ? "]" : t.symbol("{") ? "}" : nullptr;
    if (!close) return {};
    const int bars = bars_;
    bars_ = 0;
    const Result x = sum();
    bars_ = bars;
    return x && take_symbol(close) ? x : Result();
  }

  Tokens t_;
  Effort& effort_;
  const bool minus_;
  size_t at_ = 0;
  int depth_ = 0, bars_ = 0;    // bars: inside |...|
  std::vector<Index> indices_;  // of the sums that enclose what is read
};

}  // namespace

Samples variable(const std::string& name) {
  Samples s;
  s.constant = false;
  for (size_t i = 0; i < Samples::kPoints; i++) s.at[i] = value_of(name, i);
  return s;
}

bool is_variable(const Token& t) {
  if (t.kind == Kind::letter) return t.text != "e" && t.text != "i";
  return t.kind == Kind::command && is_greek(t.text);
}

bool Samples::defined() const {
  for (size_t i = 0; i < (constant ? 1 : kPoints); i++)
    if (at[i]) return true;
  return false;
}

Samples combine(const Samples& a, const Samples& b, const Operation& operation) {
  Samples r;
  r.constant = a.constant && b.constant;
  for (size_t i = 0; i < (r.constant ? 1 : Samples::kPoints); i++) {
    if (!a[i] || !b[i]) continue;
    r.at[i] = operation(*a[i], *b[i]);
    // x^{2023} at a point is too long to be exact.
    const auto *x = std::get_if<mpq_class>(&*a[i]), *y = std::get_if<mpq_class>(&*b[i]);
    if (!r.at[i] && !r.constant && x && y) r.at[i] = operation(Wide(*x), Wide(*y));
  }
  return r;
}

bool equal(const Samples& a, const Samples& b) {
  const bool constant = a.constant && b.constant;
  size_t same = 0;
  for (size_t i = 0; i < (constant ? 1 : Samples::kPoints); i++) {
    if (a[i].has_value() != b[i].has_value()) return false;
    if (!a[i]) continue;
    if (!equal(*a[i], *b[i])) return false;
    same++;
  }
  return same >= (constant ? 1 : 2);
}

bool proportional(const Samples& a, const Samples& b, bool positive) {
  if (a.constant || b.constant) return false;
  std::optional<Number> ratio;
  size_t same = 0;
  for (size_t i = 0; i < Samples::kPoints; i++) {
    if (a[i].has_value() != b[i].has_value()) return false;
    if (!a[i]) continue;
    const Number r = divide(*a[i], *b[i]).value_or(mpq_class(0));
    if (is_zero(r) || (ratio && !equal(*ratio, r))) return false;
    ratio = r;
    same++;
  }
  return same >= 2 && (!positive || sign(*ratio).value_or(0) > 0);
}

std::optional<Samples> read_expression(Tokens t, size_t& used, Effort& effort, bool minus) {
  Parser parser(t, effort, minus);
  std::optional<Samples> x = parser.sum();
  used = parser.used();
  return x;
}

}  // namespace pare::math_value
