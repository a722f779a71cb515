#include "data/math_value/answer.h"

#include <algorithm>

#include "data/math_value/real_set.h"
#include "data/text.h"

namespace pare::math_value {
namespace {

using Kind = Token::Kind;
using A = Answer::Kind;

constexpr size_t kTokens = 600, kItems = 64;
constexpr int kNesting = 12;

const Samples kZero{mpq_class(0)};

Samples minus(const Samples& a, const Samples& b) {
  return combine(a, b, [](const Number& x, const Number& y) { return subtract(x, y); });
}

// One spelling for a unit: "centimeters" and "cm" are "cm", "square inches" is "inch^2".
std::string unit_name(std::string_view s) {
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"centimeter", "cm"}, {"centimetre", "cm"}, {"meter", "m"},     {"metre", "m"},   {"kilometer", "km"},
      {"kilometre", "km"},  {"millimeter", "mm"}, {"inche", "inch"},  {"feet", "foot"}, {"ft", "foot"},
      {"hr", "hour"},       {"min", "minute"},    {"sec", "second"},  {"gram", "g"},    {"kilogram", "kg"},
      {"$", "dollar"},      {"cent", "cent"},     {"liter", "l"},     {"litre", "l"},   {"lb", "pound"},
      {"mi", "mile"},       {"yd", "yard"},       {"percentage", "%"}};
  std::string result, word, power;
  const auto flush = [&] {
    if (word.size() > 2 && word.back() == 's') word.pop_back();
    for (const auto& [from, to] : kNames)
      if (word == from) word = to;
    if (word == "square" || word == "sq")
      power = "^2";
    else if (word == "cubic" || word == "cu")
      power = "^3";
    else
      result += word;
    word.clear();
  };
  for (const char c : lower(s)) {
    if (is_letter(c) || c == '$' || static_cast<unsigned char>(c) >= 0x80) {
      word += c;
      continue;
    }
    flush();
    if (c == '^' || c == '/' || is_digit(c)) result += c;
  }
  flush();
  return result + power;
}

bool is_operator(const Token& t) { return t.symbol("+") || t.symbol("-") || t.symbol("*") || t.symbol("/"); }

// What may stand for something without being a computation: x, f(x), |AB|, (p, q), S_{MBCN}:S.
bool is_name(Tokens t) {
  bool letters = false;
  int depth = 0, words = 0;
  for (size_t i = 0; i < t.size(); i++) {
    if (opens(t[i])) depth++;
    if (closes(t[i])) depth--;
    if (t[i].kind == Kind::word && ++words > 1) return false;  // a sentence
    letters |= t[i].kind == Kind::letter || t[i].kind == Kind::word || t[i].kind == Kind::text;
    if (t[i].kind == Kind::command && !opens(t[i]) && !closes(t[i])) {
      if (is_function(t[i].text.c_str()) || t[i].text == "frac" || t[i].text == "sqrt" || t[i].text == "pi" ||
          t[i].text == "degree" || t[i].text == "infty" || t[i].text == "pm" || t[i].text == "mp" ||
          t[i].text == "binom" || is_fold(t[i].text.c_str()))
        return false;
      letters = true;
    }
    if (depth > 0) continue;
    const bool subscript = i > 0 && t[i - 1].symbol("_");
    if ((t[i].kind == Kind::number && !subscript) || is_operator(t[i]) || t[i].symbol("^") || t[i].symbol("!"))
      return false;
  }
  return letters;
}

// Without the arguments of a function: f(x) is f.
std::string base_name(Tokens t) {
  const std::string all = plain(t);
  const size_t open = all.find('(');
  return open == 0 ? all : all.substr(0, open);
}

// Where a token outside of all brackets fulfils a condition, which none that closes a bracket does.
template <class F>
std::vector<size_t> places(Tokens t, F&& holds) {
  std::vector<size_t> found;
  int depth = 0;
  for (size_t i = 0; i < t.size(); i++) {
    depth += opens(t[i]);
    depth -= closes(t[i]);
    if (depth == 0 && holds(t[i])) found.push_back(i);
  }
  return found;
}

std::vector<Tokens> split(Tokens t, const std::vector<size_t>& at) {
  std::vector<Tokens> parts;
  size_t begin = 0;
  for (const size_t i : at) {
    parts.push_back(t.subspan(begin, i - begin));
    begin = i + 1;
  }
  parts.push_back(t.subspan(begin));
  return parts;
}

bool separates(const Token& t) {
  return t.symbol(",") || t.symbol(";") || t.kind == Kind::separator || t.command("cup");
}
bool relates(const Token& t) {
  return t.symbol("=") || t.symbol("<") || t.symbol(">") || t.command("le") || t.command("ge") || t.command("ne") ||
         t.command("approx");
}

class Reader {
 public:
  Answer read(Tokens t, int nesting) {
    t = trimmed(t);
    Answer a;
    a.text = plain(t);
    if (t.empty() || nesting > kNesting) return a;
    using Step = bool (Reader::*)(Tokens, int, Answer&);
    for (const Step step :
         {&Reader::quoted, &Reader::member, &Reader::list, &Reader::relation, &Reader::reals, &Reader::without,
          &Reader::bracket, &Reader::ratio, &Reader::matrix, &Reader::numeral, &Reader::signs, &Reader::scalar}) {
      Answer b = a;
      if ((this->*step)(t, nesting, b)) return b;
    }
    return a;
  }

 private:
  static Tokens trimmed(Tokens t) {
    const auto dot = [](const Token& x) {
      return x.symbol(".") || x.symbol(",") || x.symbol(";") || x.symbol(":") || x.symbol("\\\\");
    };
    while (!t.empty() && dot(t.back())) t = t.first(t.size() - 1);
    while (!t.empty() && dot(t.front())) t = t.subspan(1);
    return t;
  }

  // The text is the answer: \text{Evelyn}.
  bool quoted(Tokens t, int nesting, Answer& a) {
    if (t.size() != 1 || t[0].kind != Kind::text) return false;
    const std::vector<Token> inner = lex(t[0].text, kTokens);
    if (inner.empty()) return false;
    a = read(inner, nesting + 1);
    return true;
  }

  // x \in S
  bool member(Tokens t, int nesting, Answer& a) {
    const auto at = places(t, [](const Token& x) { return x.command("in"); });
    if (at.size() != 1 || !is_name(t.first(at[0])) || !places(t.first(at[0]), separates).empty()) return false;
    a = read(t.subspan(at[0] + 1), nesting + 1);
    a.name = base_name(t.first(at[0]));
    return true;
  }

  bool list(Tokens t, int nesting, Answer& a) {
    const auto at = places(t, separates);
    if (at.empty() || at.size() > kItems) return false;
    a.kind = A::list;
    if (!items(split(t, at), nesting, a)) return false;
    if (std::all_of(at.begin(), at.end(), [&](size_t i) { return t[i].command("cup"); }))
      if (std::optional<std::vector<Answer>> parts = united(a.items, effort_))
        becomes(pieces(std::move(*parts)), a.items[0].name, a);
    return true;
  }

  static Answer pieces(std::vector<Answer> intervals) {
    for (Answer& x : intervals) x.name.clear();
    if (intervals.size() == 1) return intervals[0];
    Answer a;
    a.kind = intervals.empty() ? A::set : A::list;
    a.items = std::move(intervals);
    return a;
  }

  // \mathbb{R}, its positive numbers and the like.
  bool reals(Tokens t, int, Answer& a) {
    const auto end = [](int sign) { return sign == 0 ? endpoint_of(kZero) : infinite(sign < 0); };
    const auto interval = [&](int low, int high, bool closed) {
      return interval_of(end(low), end(high), low != 0 || !closed, high != 0 || !closed);
    };
    constexpr const char* kAll[] = {"all real numbers",        "all reals",
                                    "the real numbers",        "real numbers",
                                    "set of all real numbers", "the set of all real numbers"};
    const std::string low = lower(a.text);
    const bool words = std::any_of(std::begin(kAll), std::end(kAll), [&](const char* s) { return low == s; });
    if (!words && !t[0].command("reals")) return false;
    std::string kind;
    for (const Token& x : t.subspan(words ? t.size() : 1))
      if (!x.symbol("{") && !x.symbol("}") && !x.symbol("_") && !x.symbol("^")) kind += x.text;
    if (kind.empty() && (words || t.size() == 1))
      becomes(interval(-1, 1, false), "", a);
    else if (kind == "+" || kind == ">0")
      becomes(interval(0, 1, false), "", a);
    else if (kind == "-" || kind == "<0")
      becomes(interval(-1, 0, false), "", a);
    else if (kind == "ge0" || kind == "le0")
      becomes(kind[0] == 'g' ? interval(0, 1, true) : interval(-1, 0, true), "", a);
    else if (kind == "*")
      becomes(pieces({interval(-1, 0, false), interval(0, 1, false)}), "", a);
    else
      return false;
    return true;
  }

  // Intervals without some numbers: \mathbb{R} \setminus \{2\}, also with a minus sign.
  bool without(Tokens t, int nesting, Answer& a) {
    size_t at = npos;
    for (const size_t i : places(t, [](const Token& x) { return x.command("setminus") || x.symbol("-"); }))
      if (at == npos && i > 0 && i + 1 < t.size() &&
          (t[i].command("setminus") || (t[i + 1].symbol("\\{") && (t[i - 1].command("reals") || closes(t[i - 1])))))
        at = i;
    if (at == npos) return false;
    const Answer left = read(t.first(at), nesting + 1), right = read(t.subspan(at + 1), nesting + 1);
    std::optional<std::vector<Answer>> rest =
        without_points(left.kind == A::list ? left.items : std::vector<Answer>{left}, right, effort_);
    if (!rest || rest->size() > kItems) return false;
    becomes(pieces(std::move(*rest)), left.name, a);
    return true;
  }

  // The items of a list, without empty ones ("2, and 3"); those of a list inside are its own.
  bool items(const std::vector<Tokens>& parts, int nesting, Answer& a) {
    for (const Tokens part : parts) {
      if (part.empty()) continue;
      Answer item = read(part, nesting + 1);
      if (item.kind == A::list && a.kind != A::tuple && item.name.empty())
        a.items.insert(a.items.end(), item.items.begin(), item.items.end());
      else
        a.items.push_back(std::move(item));
    }
    return !a.items.empty() && a.items.size() <= kItems;
  }

  std::optional<Samples> expression(Tokens t) {
    size_t used = 0;
    std::optional<Samples> x = read_expression(t, used, effort_);
    return used == t.size() ? x : std::nullopt;
  }

  bool relation(Tokens t, int nesting, Answer& a) {
    std::vector<size_t> at = places(t, relates);
    if (at.empty()) return false;
    std::vector<Tokens> terms = split(t, at);
    // What is about equal is not the answer.
    for (size_t i = 0; i < at.size(); i++)
      if (t[at[i]].command("approx")) {
        at.resize(i);
        terms.resize(i + 1);
        if (i == 0) {
          a = read(terms[0], nesting);
          return true;
        }
      }
    const auto all = [&](auto&& holds) {
      return std::all_of(at.begin(), at.end(), [&](size_t i) { return holds(t[i]); });
    };
    if (all([](const Token& x) { return x.symbol("="); })) return equation(terms, nesting, a);
    if (at.size() == 1 && t[at[0]].command("ne")) return unequal(terms, a);
    const auto up = [](const Token& x) { return x.symbol("<") || x.command("le"); };
    const auto down = [](const Token& x) { return x.symbol(">") || x.command("ge"); };
    std::vector<bool> strict;
    for (const size_t i : at) strict.push_back(t[i].kind == Kind::symbol);
    if (all(down)) {
      std::reverse(terms.begin(), terms.end());
      std::reverse(strict.begin(), strict.end());
    } else if (!all(up)) {
      return false;
    }
    return interval(terms, strict, nesting, a) || inequality(terms, strict, a);
  }

  bool difference(Tokens left, Tokens right, Answer& a) {
    const std::optional<Samples> x = expression(left), y = expression(right);
    if (!x || !y) return false;
    a.difference = minus(*x, *y);
    return true;
  }

  bool equation(const std::vector<Tokens>& terms, int nesting, Answer& a) {
    Tokens name = terms.front(), value = terms.back();
    if (terms.size() == 2 && !is_name(name) && is_name(value)) std::swap(name, value);
    if (is_name(name)) {
      Answer b = read(value, nesting + 1);
      if (b.kind == A::text && b.text.empty()) return false;
      b.text = a.text;
      b.name = base_name(name);
      if (terms.size() == 2) difference(name, value, b);
      a = b;
      return true;
    }
    // A chain of numbers says the last one.
    const bool numbers = std::all_of(terms.begin(), terms.end(), [&](Tokens t) {
      const std::optional<Samples> x = expression(t);
      return x && x->constant;
    });
    if (numbers) {
      a = read(value, nesting + 1);
      return true;
    }
    a.kind = A::equation;
    return terms.size() == 2 && difference(terms[0], terms[1], a);
  }

  static Answer endpoint_of(const Samples& x) {
    Answer a;
    a.kind = A::value;
    a.value = x;
    return a;
  }
  static Answer infinite(bool negative) {
    Answer a;
    a.kind = A::infinity;
    a.negative = negative;
    return a;
  }
  // slope (x - zero)
  struct Line {
    std::string name;
    Number slope, zero;
  };
  // The line that an expression of one variable is.
  static std::optional<Line> line_of(const std::vector<Tokens>& terms, const Samples& y) {
    const Token* name = nullptr;
    for (const Tokens t : terms)
      for (const Token& token : t) {
        const bool variable = is_variable(token);
        if (token.kind == Kind::word || token.symbol("_") || (variable && name && token.text != name->text)) return {};
        if (variable) name = &token;
      }
    if (y.constant || !name || !y[0] || !y[1]) return {};
    const Samples x = variable(name->text);
    const MaybeNumber rise = subtract(*y[1], *y[0]), run = subtract(*x[1], *x[0]);
    const MaybeNumber slope = rise ? divide(*rise, *run) : rise;
    if (!slope || is_zero(*slope)) return {};
    const MaybeNumber ahead = divide(*y[0], *slope), zero = ahead ? subtract(*x[0], *ahead) : ahead;
    if (!zero || !sign(*slope) || !sign(*zero)) return {};
    const Samples line = combine(minus(x, Samples(zero)), Samples(slope), math_value::multiply);
    return equal(line, y) ? std::optional<Line>({plain({name, 1}), *slope, *zero}) : std::nullopt;
  }

  static Answer endpoint(const Line& line, const Answer& height) {
    if (height.kind == A::infinity) return infinite(height.negative != (sign(line.slope) < 0));
    const Samples ahead = combine(height.value, Samples(line.slope), divide);
    return endpoint_of(minus(Samples(line.zero), minus(kZero, ahead)));
  }
  // Where the line is between two heights.
  static Answer between(const Line& line, const Answer& low, const Answer& high, bool strict_low, bool strict_high) {
    Answer a = endpoint(line, low), b = endpoint(line, high);
    if (sign(line.slope) > 0) return interval_of(std::move(a), std::move(b), strict_low, strict_high);
    return interval_of(std::move(b), std::move(a), strict_high, strict_low);
  }

  static void becomes(Answer b, const std::string& name, Answer& a) {
    b.text = a.text;
    b.name = name;
    a = std::move(b);
  }

  // Ascending terms of which one is a name or a line, or one of these between bars, and the others are constant.
  bool interval(const std::vector<Tokens>& terms, const std::vector<bool>& strict, int nesting, Answer& a) {
    if (terms.size() > 3) return false;
    const auto barred = [](Tokens t) { return t.size() > 2 && t.front().symbol("|") && t.back().symbol("|"); };
    const size_t middle = terms.size() == 3 ? 1 : is_name(terms[0]) || barred(terms[0]) ? 0 : 1;
    Tokens t = terms[middle];
    const bool bars = barred(t);
    if (bars) t = t.subspan(1, t.size() - 2);
    std::optional<Line> line = Line{"", mpq_class(1), mpq_class(0)};
    if (is_name(t)) {
      line->name = base_name(t);
    } else {
      const std::optional<Samples> y = expression(t);
      line = y ? line_of({t}, *y) : std::nullopt;
      if (!line) return false;
    }
    Answer low = infinite(true), high = infinite(false);
    const auto bound = [&](Tokens term, Answer& x) {
      x = read(term, nesting + 1);
      return (x.kind == A::value && x.value.constant) || x.kind == A::infinity;
    };
    if (middle > 0 && !bound(terms[middle - 1], low)) return false;
    if (middle + 1 < terms.size() && !bound(terms[middle + 1], high)) return false;
    const bool strict_low = middle == 0 || strict[middle - 1];
    const bool strict_high = middle + 1 == terms.size() || strict[middle];
    const auto negated = [](const Answer& x) {
      return x.kind == A::infinity ? infinite(!x.negative) : endpoint_of(minus(kZero, x.value));
    };
    Answer b;
    if (!bars) {
      b = between(*line, low, high, strict_low, strict_high);
    } else if (middle == 0) {
      b = between(*line, negated(high), high, strict_high, strict_high);
    } else {
      b.kind = A::list;
      b.items = {between(*line, negated(high), negated(low), strict_high, strict_low),
                 between(*line, low, high, strict_low, strict_high)};
    }
    becomes(std::move(b), line->name, a);
    return true;
  }

  // x - 1 < 0 is the interval that x < 1 is.
  bool inequality(const std::vector<Tokens>& terms, const std::vector<bool>& strict, Answer& a) {
    a.kind = A::inequality;
    a.relation = strict[0] ? '<' : 'l';
    if (terms.size() != 2 || !difference(terms[1], terms[0], a)) return false;
    if (const std::optional<Line> line = line_of(terms, *a.difference))
      becomes(between(*line, endpoint_of(kZero), infinite(false), strict[0], true), line->name, a);
    return true;
  }

  bool unequal(const std::vector<Tokens>& terms, Answer& a) {
    a.kind = A::inequality;
    a.relation = '!';
    if (!difference(terms[0], terms[1], a)) return false;
    if (const std::optional<Line> line = line_of(terms, *a.difference)) {
      Answer b;
      b.kind = A::list;
      const Answer zero = endpoint_of(Samples(line->zero));
      b.items = {interval_of(infinite(true), zero, true, true), interval_of(zero, infinite(false), true, true)};
      becomes(std::move(b), line->name, a);
    }
    return true;
  }

  bool bracket(Tokens t, int nesting, Answer& a) {
    if (t.size() == 1 && t[0].command("emptyset")) {
      a.kind = A::set;
      return true;
    }
    if (t[0].kind != Kind::symbol || !opens(t[0])) return false;
    const size_t close = closing(t, 0);
    if (close == npos || (close + 1 < t.size() && !is_unit(t.subspan(close + 1), a.unit))) return false;
    t = t.first(close + 1);
    const Tokens inner = t.subspan(1, t.size() - 2);
    const auto at = places(inner, separates);
    const bool set = t[0].symbol("\\{") || (t[0].symbol("{") && !at.empty());
    if (set) {
      a.kind = A::set;
      return inner.empty() || (at.size() <= kItems && items(split(inner, at), nesting, a));
    }
    if (at.empty()) {  // parentheses around one thing
      if (inner.empty() || !a.unit.empty() || (!t[0].symbol("(") && !t[0].symbol("{"))) return false;
      a = read(inner, nesting + 1);
      return true;
    }
    a.kind = A::tuple;
    a.open = t.front().text[0];
    a.close = t.back().text[0];
    return at.size() <= kItems && items(split(inner, at), nesting, a);
  }

  bool ratio(Tokens t, int nesting, Answer& a) {
    const auto at = places(t, [](const Token& x) { return x.symbol(":"); });
    if (at.empty() || at.size() > 4) return false;
    a.kind = A::tuple;
    // 5:00x is no time, though 00x is zero.
    const auto number = [](const Answer& x) {
      return x.kind == A::value && (x.value.constant || !equal(x.value, kZero));
    };
    return items(split(t, at), nesting, a) && a.items.size() == at.size() + 1 &&
           std::all_of(a.items.begin(), a.items.end(), number);
  }

  // Sums of matrices with numbers in front.
  bool matrix(Tokens t, int nesting, Answer& a) {
    a.kind = A::matrix;
    bool any = false;
    while (!t.empty()) {
      const auto begin = std::find_if(t.begin(), t.end(), [](const Token& x) {
        return x.kind == Kind::command && x.text.starts_with("begin ") && x.text.ends_with("matrix");
      });
      if (begin == t.end()) {
        const auto array = std::find_if(t.begin(), t.end(), [](const Token& x) { return x.command("begin array"); });
        if (any || array == t.end()) return false;
        return array_of(t, nesting, a);
      }
      const auto open = static_cast<size_t>(begin - t.begin());
      Samples factor{mpq_class(1)};
      if (!leading_factor(t.first(open), any, factor)) return false;
      const size_t close = closing(t, open);
      if (close == npos) return false;
      Answer term;
      if (!rows(t.subspan(open + 1, close - open - 1), nesting, term) || !accumulate(factor, term, any, a))
        return false;
      any = true;
      t = t.subspan(close + 1);
    }
    return any;
  }

  // \left[\begin{array}{cc}...\end{array}\right]
  bool array_of(Tokens t, int nesting, Answer& a) {
    if (t.size() > 4 && (t[0].symbol("(") || t[0].symbol("[")) && closing(t, 0) == t.size() - 1)
      t = t.subspan(1, t.size() - 2);
    if (!t[0].command("begin array") || closing(t, 0) != t.size() - 1) return false;
    return rows(t.subspan(1, t.size() - 2), nesting, a);
  }

  bool leading_factor(Tokens t, bool need_sign, Samples& factor) {
    if (need_sign && (t.empty() || !(t[0].symbol("+") || t[0].symbol("-")))) return false;
    const bool negative = !t.empty() && t[0].symbol("-");
    if (!t.empty() && (negative || t[0].symbol("+"))) t = t.subspan(1);
    if (!t.empty() && (t.back().symbol("*"))) t = t.first(t.size() - 1);
    if (!t.empty()) {
      const std::optional<Samples> x = expression(t);
      if (!x) return false;
      factor = *x;
    }
    if (negative) factor = minus(kZero, factor);
    return true;
  }

  bool rows(Tokens t, int nesting, Answer& a) {
    while (!t.empty() && t.back().symbol("\\\\")) t = t.first(t.size() - 1);
    a.columns = 0;
    for (const Tokens row : split(t, places(t, [](const Token& x) { return x.symbol("\\\\"); }))) {
      const std::vector<Tokens> cells = split(row, places(row, [](const Token& x) { return x.symbol("&"); }));
      if (a.columns != 0 && cells.size() != a.columns) return false;
      a.columns = cells.size();
      for (const Tokens cell : cells) a.items.push_back(read(cell, nesting + 1));
      if (a.items.size() > kItems) return false;
    }
    return true;
  }

  // a += factor * term, cell by cell.
  bool accumulate(const Samples& factor, const Answer& term, bool any, Answer& a) {
    const bool plain_term = factor.constant && factor[0] && equal(*factor[0], mpq_class(1));
    if (!any && plain_term) {
      a.items = term.items;
      a.columns = term.columns;
      return true;
    }
    if (any && (a.columns != term.columns || a.items.size() != term.items.size())) return false;
    if (!any) {
      a.items.assign(term.items.size(), endpoint_of(kZero));
      a.columns = term.columns;
    }
    if (!effort_.spend(8 * static_cast<int>(term.items.size()))) return false;
    for (size_t i = 0; i < a.items.size(); i++) {
      if (a.items[i].kind != A::value || term.items[i].kind != A::value) return false;
      const Samples scaled =
          combine(factor, term.items[i].value, [](const Number& x, const Number& y) { return multiply(x, y); });
      a.items[i] = endpoint_of(minus(a.items[i].value, minus(kZero, scaled)));
    }
    return true;
  }

  // 1101_2, 1101_{2}
  bool numeral(Tokens t, int, Answer& a) {
    const size_t sign = t[0].symbol("-") ? 1 : 0;
    if (t.size() < sign + 3 || t[sign].kind != Kind::number || !t[sign + 1].symbol("_")) return false;
    Tokens base = t.subspan(sign + 2);
    if (base.size() == 3 && base[0].symbol("{") && base[2].symbol("}")) base = base.subspan(1, 1);
    if (base.size() != 1 || base[0].kind != Kind::number) return false;
    a.kind = A::numeral;
    a.text = (sign ? "-" : "") + without_leading_zeros(t[sign].text) + "_" + base[0].text;
    return true;
  }

  // 1 \pm \sqrt{2} and 1 \mp \sqrt{2} are two values.
  bool signs(Tokens t, int, Answer& a) {
    if (std::none_of(t.begin(), t.end(), [](const Token& x) { return x.command("pm") || x.command("mp"); }))
      return false;
    a.kind = A::list;
    for (const bool minus_sign : {false, true}) {
      size_t used = 0;
      const std::optional<Samples> x = read_expression(t, used, effort_, minus_sign);
      if (!x || used != t.size()) return false;
      a.items.push_back(endpoint_of(*x));
    }
    return true;
  }

  static bool is_currency(const Token& t) { return t.symbol("\\$") || t.symbol("€") || t.symbol("£") || t.symbol("¥"); }

  bool scalar(Tokens t, int, Answer& a) {
    const bool negative_money = t.size() > 2 && t[0].symbol("-") && is_currency(t[1]);
    std::vector<Token> moved;
    if (negative_money) {
      moved.assign(t.begin(), t.end());
      std::swap(moved[0], moved[1]);
      t = moved;
    }
    if (is_currency(t[0])) {
      a.unit = unit_name(t[0].symbol("\\$") ? "$" : t[0].text);
      t = t.subspan(1);
    }
    const bool angle = std::any_of(t.begin(), t.end(), [](const Token& x) { return is_function(x.text.c_str()); });
    if (!t.empty() && t.back().command("degree") && !angle) {
      a.unit = "degree";
      t = t.first(t.size() - 1);
    }
    if (t.empty()) return false;
    const size_t sign = t[0].symbol("-") || t[0].symbol("+");
    if (t.size() == sign + 1 && t[sign].command("infty")) {
      a.kind = A::infinity;
      a.negative = t[0].symbol("-");
      return true;
    }
    size_t used = 0;
    const std::optional<Samples> x = read_expression(t, used, effort_);
    if (!x || !x->defined()) return false;
    if (used < t.size()) {
      if (!a.unit.empty() && a.unit != "dollar") return false;
      if (!x->constant && t[used].kind != Kind::text) return false;
      if (!is_unit(t.subspan(used), a.unit)) return false;
    }
    a.kind = A::value;
    a.value = *x;
    return true;
  }

  static bool is_unit(Tokens t, std::string& unit) {
    if (t.size() > 8 || (t[0].kind != Kind::text && t[0].kind != Kind::word)) return false;
    std::string all;
    for (size_t i = 0; i < t.size(); i++) {
      const bool exponent = i > 0 && (t[i - 1].symbol("^") || t[i - 1].symbol("{"));
      const bool word = t[i].kind == Kind::text || t[i].kind == Kind::word || t[i].kind == Kind::letter;
      if (word && std::any_of(t[i].text.begin(), t[i].text.end(), is_digit)) return false;
      if (!word && !(t[i].kind == Kind::number && exponent) && !t[i].symbol("^") && !t[i].symbol("/") &&
          !t[i].symbol("{") && !t[i].symbol("}"))
        return false;
      if (!t[i].symbol("{") && !t[i].symbol("}")) all += t[i].text + (word ? " " : "");
    }
    unit = unit_name(all);
    return true;
  }

  Effort effort_;
};

}  // namespace

Answer read_answer(std::string_view s) {
  Answer a;
  a.text = s.substr(0, kAnswerBytes);
  if (s.size() > kAnswerBytes) return a;
  const std::vector<Token> tokens = lex(s, kTokens);
  return tokens.empty() ? a : Reader().read(tokens, 0);
}

}  // namespace pare::math_value
