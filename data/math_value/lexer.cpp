#include "data/math_value/lexer.h"

#include <algorithm>

#include "data/math_value/number.h"
#include "data/text.h"

namespace pare::math_value {
namespace {

using Kind = Token::Kind;
struct Pair {
  const char *from, *to;
};

// Before anything else, in this order.
constexpr Pair kReplaced[] = {{"{,}", ","},
                              {"\\,", " "},
                              {"^{\\circ}", "\\degree "},
                              {"^\\circ", "\\degree "},
                              {"^{\\degree}", "\\degree "},
                              {"−", "-"},
                              {"–", "-"},
                              {"×", "*"},
                              {"·", "*"},
                              {"⋅", "*"},
                              {"÷", "/"},
                              {"≤", "\\le "},
                              {"≥", "\\ge "},
                              {"⩽", "\\le "},
                              {"⩾", "\\ge "},
                              {"≠", "\\ne "},
                              {"∞", "\\infty "},
                              {"π", "\\pi "},
                              {"√", "sqrt "},
                              {"±", "\\pm "},
                              {"°", "\\degree "},
                              {"∪", "\\cup "},
                              {"∈", "\\in "},
                              {"²", "^2"},
                              {"³", "^3"},
                              {"½", " 1/2"},
                              {"¼", " 1/4"},
                              {"¾", " 3/4"},
                              {" ", " "},
                              {" ", " "},
                              {"，", ","},
                              {"（", "("},
                              {"）", ")"},
                              {"；", ";"},
                              {"≈", "\\approx "},
                              {"ℝ", "\\mathbb{R}"},
                              {"∖", "\\setminus "},
                              {"⌊", "\\lfloor "},
                              {"⌋", "\\rfloor "},
                              {"⌈", "\\lceil "},
                              {"⌉", "\\rceil "},
                              {"∅", "\\emptyset "}};

constexpr Pair kSynonyms[] = {{"dfrac", "frac"},
                              {"tfrac", "frac"},
                              {"cfrac", "frac"},
                              {"leq", "le"},
                              {"leqslant", "le"},
                              {"geq", "ge"},
                              {"geqslant", "ge"},
                              {"neq", "ne"},
                              {"lt", "<"},
                              {"gt", ">"},
                              {"times", "*"},
                              {"cdot", "*"},
                              {"div", "/"},
                              {"lbrace", "\\{"},
                              {"rbrace", "\\}"},
                              {"lvert", "|"},
                              {"rvert", "|"},
                              {"vert", "|"},
                              {"mid", "|"},
                              {"langle", "("},
                              {"rangle", ")"},
                              {"varnothing", "emptyset"},
                              {"dbinom", "binom"},
                              {"tbinom", "binom"},
                              {"asin", "arcsin"},
                              {"acos", "arccos"},
                              {"atan", "arctan"},
                              {"approxeq", "approx"},
                              {"simeq", "approx"},
                              {"lbrack", "["},
                              {"rbrack", "]"},
                              {"colon", ":"},
                              {"land", "and"},
                              {"lor", "or"},
                              {"cosec", "csc"},
                              {"lg", "log"},
                              {"tg", "tan"},
                              {"ctg", "cot"},
                              {"cotg", "cot"},
                              {"arctg", "arctan"},
                              {"arcctg", "arccot"},
                              {"sh", "sinh"},
                              {"ch", "cosh"},
                              {"th", "tanh"},
                              {"sfrac", "frac"},
                              {"nicefrac", "frac"},
                              {"smallsetminus", "setminus"},
                              {"backslash", "setminus"},
                              {"Bbb", "mathbb"},
                              {"R", "reals"},
                              {"Reals", "reals"}};

constexpr const char* kDropped[] = {
    "left",   "right",  "big",        "Big",     "bigg",           "Bigg",      "bigl",         "bigr",
    "Bigl",   "Bigr",   "biggl",      "biggr",   "Biggl",          "Biggr",     "displaystyle", "textstyle",
    "limits", "quad",   "qquad",      "boxed",   "fbox",           "mathbf",    "boldsymbol",   "bm",
    "mathit", "mathsf", "mathtt",     "vec",     "overrightarrow", "hat",       "widehat",      "bar",
    "bf",     "rm",     "it",         "hline",   "boldmath",       "thinspace", "space",        "middle",
    "hfill",  "color",  "ensuremath", "mathcal", "angle",          "triangle",  "therefore"};

constexpr const char* kTextCommands[] = {"text",   "textnormal", "textbf", "textit",     "textsl",      "textup",
                                         "textsc", "textrm",     "textmd", "textsf",     "emph",        "texttt",
                                         "mbox",   "hbox",       "mathrm", "mathnormal", "operatorname"};

// Letters that stand together in plain text and are no product.
constexpr const char* kUnits[] = {"cm", "mm",  "km", "kg", "mg", "ft", "mph", "kph", "hr",  "hrs", "min", "sec",
                                  "lb", "lbs", "oz", "yd", "mi", "pm", "am",  "ml",  "yes", "no",  "odd"};

// Functions only in front of their arguments: "5 min" has none.
constexpr const char* kCalled[] = {"max", "min", "gcd", "lcm", "floor", "ceil"};

template <class Words>
bool among(const Words& words, std::string_view s) {
  return std::any_of(std::begin(words), std::end(words), [&](const char* w) { return s == w; });
}

std::string spelling(const std::string& name) {
  for (const Pair& p : kSynonyms)
    if (name == p.from) return p.to;
  return name;
}

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

class Lexer {
 public:
  Lexer(std::string_view s, size_t limit, int depth) : s_(s), limit_(limit), nesting_(depth) {}

  bool run(std::vector<Token>& out) {
    while (at_ < s_.size()) {
      if (out.size() > limit_) return false;
      if (!step(out)) return false;
    }
    return true;
  }

 private:
  char peek(size_t i) const { return at_ + i < s_.size() ? s_[at_ + i] : '\0'; }

  void put(std::vector<Token>& out, Kind kind, std::string text) {
    out.push_back({kind, std::move(text), space_});
    space_ = false;
  }

  bool step(std::vector<Token>& out) {
    const char c = s_[at_];
    if (is_space(c) || c == '~' || c == '$') {
      space_ |= c != '$';
      at_++;
      return true;
    }
    if (c == '\\') return backslash(out);
    if (is_digit(c) || (c == '.' && is_digit(peek(1)))) return number(out);
    single_ = 0;
    if (is_letter(c)) return letters(out);
    if (c == '\'' && !out.empty() && out.back().kind == Kind::letter) {
      out.back().text += c;
      at_++;
      return true;
    }
    constexpr Pair kDouble[] = {{"**", "^"}, {"<=", "le"}, {">=", "ge"}, {"!=", "ne"}, {"==", "="}};
    for (const Pair& p : kDouble)
      if (s_.substr(at_, 2) == p.from) {
        at_ += 2;
        put(out, is_letter(*p.to) ? Kind::command : Kind::symbol, p.to);
        return true;
      }
    if (c == '(' || c == '[') brackets_++;
    if (c == ')' || c == ']') brackets_--;
    const size_t size = character_size(s_, at_);
    put(out, Kind::symbol, std::string(s_.substr(at_, size)));
    at_ += size;
    return true;
  }

  // The digits of the number at at_, groups of three joined where they cannot be the elements of a list.
  std::string digits() {
    std::string d;
    while (is_digit(peek(0))) d += s_[at_++];
    if (d.size() > 3 || d.empty() || brackets_ > 0) return d;
    for (const char mark : {',', ' '}) {
      const auto group_at = [&](size_t i) {
        return peek(i) == mark && is_digit(peek(i + 1)) && is_digit(peek(i + 2)) && is_digit(peek(i + 3)) &&
               !is_digit(peek(i + 4));
      };
      if (!group_at(0)) continue;
      for (; group_at(0); at_ += 4) d.append(s_.substr(at_ + 1, 3));
      return d;
    }
    return d;
  }

  bool number(std::vector<Token>& out) {
    if (single_ > 0 && c_is_digit()) {
      single_--;
      put(out, Kind::number, std::string(1, s_[at_++]));
      return true;
    }
    std::string d = digits();
    if (peek(0) == '.' && (is_digit(peek(1)) || s_.substr(at_ + 1).starts_with("\\overline"))) {  // 0.\overline{3}
      d += s_[at_++];
      while (is_digit(peek(0))) d += s_[at_++];
    }
    put(out, Kind::number, d);
    return true;
  }
  bool c_is_digit() const { return is_digit(s_[at_]); }

  bool letters(std::vector<Token>& out) {
    std::string w;
    while (is_letter(peek(0))) w += s_[at_++];
    word(out, w);
    return true;
  }

  void word(std::vector<Token>& out, const std::string& w) {
    const std::string low = lower(w);
    const bool capitals = w.size() > 1 && std::all_of(w.begin(), w.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
    if (low == "and" || low == "or")
      put(out, Kind::separator, low);
    else if (w.size() == 3 && w.starts_with("or") && w[2] >= 'A' && w[2] <= 'Z') {  // "f(1)=2orF(1)=3"
      put(out, Kind::separator, "or");
      put(out, Kind::letter, w.substr(2));
    } else if (low == "percent" || low == "pct")
      put(out, Kind::symbol, "%");
    else if (low == "degrees" || low == "degree")
      put(out, Kind::command, "degree");
    else if (low == "infinity" || low == "inf" || low == "oo")
      put(out, Kind::command, "infty");
    else if (w == "pi" || w == "sqrt" || (w.size() > 1 && is_function(w.c_str())))
      put(out, Kind::command, w);
    else if (among(kCalled, low) && arguments_follow())
      put(out, Kind::command, low);
    else if (w.size() > 1 && (w.size() > 3 || capitals || among(kUnits, low)))
      put(out, Kind::word, w);
    else
      for (const char c : w) put(out, Kind::letter, std::string(1, c));
  }

  bool arguments_follow() const {
    size_t spaces = 0;
    while (is_space(peek(spaces))) spaces++;
    std::string_view rest = s_.substr(at_ + spaces);
    for (const std::string_view size : {"\\left", "\\big", "\\Big"})
      if (rest.starts_with(size)) rest.remove_prefix(size.size());
    return rest.starts_with("(") || rest.starts_with("\\{");
  }

  // {...} at at_ (white space in front of it left out): its content.
  bool group(std::string_view& content) {
    while (is_space(peek(0))) at_++;
    if (peek(0) != '{') return false;
    int depth = 0;
    for (size_t i = at_; i < s_.size(); i++) {
      const bool escaped = i > 0 && s_[i - 1] == '\\';
      depth += s_[i] == '{' && !escaped;
      depth -= s_[i] == '}' && !escaped;
      if (depth == 0) {
        content = s_.substr(at_ + 1, i - at_ - 1);
        at_ = i + 1;
        return true;
      }
    }
    return false;
  }

  bool backslash(std::vector<Token>& out) {
    const char next = peek(1);
    if (!is_letter(next)) {
      at_ += next ? 2 : 1;
      if (next == ',' || next == ';' || next == ':' || is_space(next) || next == '(' || next == ')' || next == '[' ||
          next == ']' || next == '\0') {
        space_ = true;
        return true;
      }
      if (next == '{') brackets_++;
      if (next == '}') brackets_--;
      const bool plain_symbol = next == '%' || next == '|' || next == '#' || next == '&' || next == '_';
      put(out, Kind::symbol, plain_symbol ? std::string(1, next) : std::string("\\") + next);
      return true;
    }
    size_t end = at_ + 1;
    while (end < s_.size() && is_letter(s_[end])) end++;
    std::string name(s_.substr(at_ + 1, end - at_ - 1));
    at_ = end;
    return command(out, spelling(name));
  }

  bool command(std::vector<Token>& out, const std::string& name) {
    single_ = name == "frac" || name == "binom" ? 2 : name == "sqrt" ? 1 : 0;
    if (among(kDropped, name)) {
      space_ = true;
      if ((name == "left" || name == "right") && peek(0) == '.') at_++;
      return true;
    }
    if (among(kTextCommands, name)) return text(out, name);
    if (name == "mathbb") return blackboard(out);
    if (name == "begin" || name == "end") {
      std::string_view environment;
      if (!group(environment)) return false;
      std::string_view columns;
      if (name == "begin" && environment == "array") group(columns);
      put(out, Kind::command, name + " " + std::string(environment));
    } else if (name == "and" || name == "or") {
      put(out, Kind::separator, name);
    } else if (name == "{" || !is_letter(name[0])) {
      if (name == "\\{" || name == "(" || name == "[") brackets_++;
      if (name == "\\}" || name == ")" || name == "]") brackets_--;
      put(out, Kind::symbol, name);
    } else {
      put(out, Kind::command, name);
    }
    return true;
  }

  // \mathbb{R} is the set of real numbers; other letters stay letters.
  bool blackboard(std::vector<Token>& out) {
    const size_t begin = at_;
    std::string_view content;
    if (!group(content)) {
      content = s_.substr(std::min(at_, s_.size()), 1);
      at_ += content.size();
    }
    if (trim(content) == "R")
      put(out, Kind::command, "reals");
    else {
      at_ = begin;
      space_ = true;
    }
    return true;
  }

  bool text(std::vector<Token>& out, const std::string& name) {
    std::string_view content;
    if (name == "operatorname" && peek(0) == '*') at_++;
    if (!group(content)) return true;  // "\mathrm x"
    content = trim(content);
    if (content.empty()) return true;
    std::string words(content);
    const auto separates = [](char c) { return c == ' ' || c == ',' || c == '.'; };
    while (!words.empty() && separates(words.back())) words.pop_back();
    while (!words.empty() && separates(words.front())) words.erase(0, 1);
    if (name == "operatorname") words = spelling(words);
    const bool letters = std::any_of(words.begin(), words.end(), is_letter);
    const bool single = words.size() == 1 && name == "mathrm";
    const bool known =
        among(std::initializer_list<const char*>{"and", "or", "percent", "pct", "degrees", "degree"}, lower(words));
    if (among(kCalled, lower(words)) && (name == "operatorname" || arguments_follow())) {
      put(out, Kind::command, lower(words));
      return true;
    }
    if ((!letters || single || known || is_function(words.c_str())) && nesting_ < 8) {
      Lexer inner(words, limit_, nesting_ + 1);
      inner.space_ = space_;
      inner.brackets_ = brackets_;
      space_ = false;
      return inner.run(out);
    }
    put(out, Kind::text, std::string(content));
    return true;
  }

  std::string_view s_;
  size_t limit_, at_ = 0;
  int nesting_, brackets_ = 0;  // brackets: open ones, in which a comma separates
  int single_ = 0;              // digits that are arguments by themselves: \frac12
  bool space_ = false;
};

std::string prepare(std::string_view text) {
  std::string s(text);
  for (const Pair& p : kReplaced) s = replace_all(s, p.from, p.to);
  // "32,\! 349": a negative space, and any space around it, is nothing.
  for (size_t at = s.find("\\!"); at != std::string::npos; at = s.find("\\!", at)) {
    size_t begin = at, end = at + 2;
    while (begin > 0 && s[begin - 1] == ' ') begin--;
    while (end < s.size() && s[end] == ' ') end++;
    s.erase(begin, end - begin);
    at = begin;
  }
  // "\\frac" is "\frac" written once too often, unless the lines of a matrix end so.
  if (s.find("\\begin") == std::string::npos)
    for (size_t at = s.find("\\\\"); at != std::string::npos; at = s.find("\\\\", at + 1))
      if (at + 2 < s.size() && is_letter(s[at + 2])) s.erase(at, 1);
  return s;
}

bool braces_match(const std::vector<Token>& tokens) {
  int depth = 0;
  for (const Token& t : tokens) {
    depth += t.symbol("{");
    depth -= t.symbol("}");
    if (depth < 0) return false;
  }
  return depth == 0;
}

// TeX's {a \over b} is \frac{a}{b}, {a \choose b} is \binom{a}{b}: both take all of the group that they stand in.
// Commas, relations and the cells of a matrix end a group here as well, so that x = 1 \over 2 is what it looks like. Of
// two in one group, an error in TeX, the first one stays.
void infix_to_prefix(std::vector<Token>& t) {
  const auto ends = [](const Token& x) {
    for (const char* s : {",", ";", "=", "<", ">", "&", "\\\\"})
      if (x.symbol(s)) return true;
    for (const char* s : {"le", "ge", "ne", "approx", "cup", "in", "over", "choose"})
      if (x.command(s)) return true;
    return x.kind == Kind::separator;
  };
  for (size_t at = 0; at < t.size(); at++) {
    const bool over = t[at].command("over");
    if (!over && !t[at].command("choose")) continue;
    size_t begin = at, end = at + 1;
    for (int depth = 0; begin > 0; begin--) {
      const Token& x = t[begin - 1];
      depth += closes(x) - opens(x);
      if (depth < 0 || (depth == 0 && !closes(x) && !opens(x) && ends(x))) break;
    }
    for (int depth = 0; end < t.size(); end++) {
      const Token& x = t[end];
      depth += opens(x) - closes(x);
      if (depth < 0 || (depth == 0 && !closes(x) && !opens(x) && ends(x))) break;
    }
    if ((end < t.size() && (t[end].command("over") || t[end].command("choose"))) ||
        (begin > 0 && (t[begin - 1].command("over") || t[begin - 1].command("choose"))))
      continue;
    const bool braces = begin > 0 && t[begin - 1].symbol("{") && end < t.size() && t[end].symbol("}");
    const Token open{Kind::symbol, "{", false}, close{Kind::symbol, "}", false};
    std::vector<Token> prefix{{Kind::command, over ? "frac" : "binom", t[begin - braces].space}, open};
    prefix.insert(prefix.end(), t.begin() + begin, t.begin() + at);
    prefix.insert(prefix.end(), {close, open});
    prefix.insert(prefix.end(), t.begin() + at + 1, t.begin() + end);
    prefix.push_back(close);
    t.erase(t.begin() + (begin - braces), t.begin() + (end + braces));
    t.insert(t.begin() + (begin - braces), prefix.begin(), prefix.end());
    at = begin - braces;  // the parts may hold others
  }
}

}  // namespace

std::vector<Token> lex(std::string_view s, size_t limit) {
  std::vector<Token> tokens;
  const std::string prepared = prepare(s);
  if (!Lexer(prepared, limit, 0).run(tokens) || tokens.size() > limit || !braces_match(tokens)) return {};
  infix_to_prefix(tokens);
  return tokens;
}

bool opens(const Token& t) {
  return t.symbol("(") || t.symbol("[") || t.symbol("{") || t.symbol("\\{") ||
         (t.kind == Kind::command && t.text.starts_with("begin ")) || t.command("lfloor") || t.command("lceil");
}

bool closes(const Token& t) {
  return t.symbol(")") || t.symbol("]") || t.symbol("}") || t.symbol("\\}") ||
         (t.kind == Kind::command && t.text.starts_with("end ")) || t.command("rfloor") || t.command("rceil");
}

size_t closing(Tokens t, size_t open) {
  int depth = 0;
  for (size_t i = open; i < t.size(); i++) {
    depth += opens(t[i]);
    depth -= closes(t[i]);
    if (depth == 0) return i;
  }
  return npos;
}

std::string plain(Tokens t) {
  std::string s;
  const auto word_like = [](const Token& x) { return x.kind != Kind::symbol && x.kind != Kind::command; };
  for (size_t i = 0; i < t.size(); i++) {
    if (i > 0 && word_like(t[i - 1]) && word_like(t[i]) && t[i].space) s += ' ';
    if (t[i].kind == Kind::command) s += '\\';
    s += t[i].text;
    if (t[i].kind == Kind::command && i + 1 < t.size() && t[i + 1].kind == Kind::letter) s += ' ';
  }
  return s;
}

}  // namespace pare::math_value
