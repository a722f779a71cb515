// Tokens of an answer in LaTeX or plain text, without markup that does not change its value.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pare::math_value {

struct Token {
  enum class Kind {
    number,     // digits, with a decimal point or without: "1000", "0.5"
    letter,     // a variable: "x"
    word,       // letters that are no product of variables: "cm", "Evelyn", "ABC"
    text,       // of \text{...}
    command,    // without its backslash: "frac", "pi", also for "sin" and "pi" in plain text
    separator,  // "and", "or"
    symbol      // everything else: + ( \{ as "\\{" , a line break of a matrix as "\\\\"
  };
  Kind kind;
  std::string text;
  bool space;  // white space in front

  bool is(Kind k, std::string_view t) const { return kind == k && text == t; }
  bool symbol(std::string_view t) const { return is(Kind::symbol, t); }
  bool command(std::string_view t) const { return is(Kind::command, t); }
};

using Tokens = std::span<const Token>;

// Spaces, dollars, \left, \right, fonts and decorations are gone; synonyms have one spelling (\dfrac is frac, <= is le,
// ** is ^), TeX's infix commands are prefix (1\over2 is \frac{1}{2}); "1,000", "1 000" and "1{,}000" are one number
// outside of brackets.  At most `limit` tokens; more, or braces that do not match: no tokens.
std::vector<Token> lex(std::string_view s, size_t limit);

// The place of the bracket that closes the one at `open`; npos: none does.  Any closing bracket closes any opening one,
// as in [0, 1).
size_t closing(Tokens t, size_t open);
bool opens(const Token& t);
bool closes(const Token& t);
constexpr size_t npos = static_cast<size_t>(-1);

// The tokens as text: what two answers are compared by where their values are not understood.
std::string plain(Tokens t);

}  // namespace pare::math_value
