// dapo: verl's verl/utils/reward_score/math_dapo.py, the comparison of DAPO (arXiv 2503.14476) after Minerva's
// (Lewkowycz et al., arXiv 2206.14858, appendix D.1).
//
// The answer is what follows the last "Answer:" within the last 300 characters, to the end of its line.  Both sides are
// rewritten by normalise() and compared as strings.  1 or -1.
#include "data/text.h"
#include "data/verify/verify.h"

namespace pare {
namespace {

constexpr auto npos = std::string_view::npos;
constexpr size_t kCharacters = 300;

// In this order.
constexpr std::pair<const char*, const char*> kReplaced[] = {
    {"an ", ""}, {"a ", ""},       {".$", "$"},           {"\\$", ""},          {"\\ ", ""},
    {" ", ""},   {"mbox", "text"}, {",\\text{and}", ","}, {"\\text{and}", ","}, {"\\text{m}", "\\text{}"}};
constexpr const char* kRemoved[] = {"square",     "ways",       "integers",  "dollars",      "mph",
                                    "inches",     "hours",      "km",        "units",        "\\ldots",
                                    "sue",        "points",     "feet",      "minutes",      "digits",
                                    "cents",      "degrees",    "cm",        "gm",           "pounds",
                                    "meters",     "meals",      "edges",     "students",     "childrentickets",
                                    "multiples",  "\\text{s}",  "\\text{.}", "\\text{\ns}",  "\\text{}^2",
                                    "\\text{}^3", "\\text{\n}", "\\text{}",  "\\mathrm{th}", "^\\circ",
                                    "^{\\circ}",  "\\;",        ",\\!",      "{,}",          "\"",
                                    "\\dots"};

std::string_view line_at(std::string_view s, size_t at) { return s.substr(at, s.find('\n', at) - at); }

// A line with two dollars becomes what they enclose, between dollars.
std::string keep_first_formula(std::string_view s) {
  std::string result;
  for (size_t at = 0; at <= s.size();) {
    const std::string_view line = line_at(s, at);
    const size_t open = line.find('$'), close = open == npos ? npos : line.find('$', open + 1);
    result += close == npos ? line : line.substr(open, close + 1 - open);
    at += line.size() + 1;
    if (at <= s.size()) result += '\n';
  }
  return result;
}

// `command`, such as \text{, and the brace that closes it go; its content stays.  The first brace of the line closes
// it, or with `longest` the last one.
std::string unwrap(std::string_view s, std::string_view command, bool longest = false) {
  std::string result;
  for (size_t at = 0;;) {
    const size_t hit = s.find(command, at);
    result += s.substr(at, hit - at);
    if (hit == npos) return result;
    const size_t begin = hit + command.size();
    const std::string_view line = line_at(s, begin);
    const size_t close = longest ? line.rfind('}') : line.find('}');
    if (close == npos) {
      result += s[hit];
      at = hit + 1;
    } else {
      result += line.substr(0, close);
      at = begin + close + 1;
    }
  }
}

// "frac12" -> "frac{1}{2}" and "sqrt2" -> "sqrt{2}": puts the `count` characters behind `name` into braces.  The first
// of them is no brace, the second no line break.
std::string brace(std::string_view s, std::string_view name, int count) {
  std::string result;
  for (size_t at = 0;;) {
    const size_t hit = s.find(name, at);
    if (hit == npos) return result.append(s.substr(at));
    result += s.substr(at, hit + name.size() - at);
    at = hit + name.size();
    if (at == s.size() || s[at] == '{') continue;
    const size_t first = character_size(s, at), second = at + first;
    if (count == 2 && (second == s.size() || s[second] == '\n')) continue;
    result.append("{").append(s.substr(at, first)).append("}");
    at = second;
    if (count < 2) continue;
    result.append("{").append(s.substr(at, character_size(s, at))).append("}");
    at += character_size(s, at);
  }
}

std::string normalise(std::string_view text) {
  const size_t equals = text.rfind('=');
  std::string s(equals == npos ? text : text.substr(equals + 1));
  for (const auto& [from, to] : kReplaced) s = replace_all(s, from, to);
  for (const char* word : kRemoved) s = replace_all(s, word, "");
  s = keep_first_formula(s);
  for (const char* command : {"\\text{", "\\textbf{", "\\overline{"}) s = unwrap(s, command);
  s = unwrap(s, "\\boxed{", true);
  s = brace(s, "frac", 2);
  s = brace(s, "sqrt", 1);
  s = replace_all(s, "$", "");
  const std::string digits = replace_all(s, ",", "");
  if (is_integer(digits) && digits[0] != '-') s = digits;
  return std::string(trim(s));
}

// What follows the last "Answer:" on its line (?i)Answer\s*:\s*([^\n]+); matches do not overlap.
std::string_view answer_of(std::string_view s) {
  const std::string low = lower(s), word = "answer";
  const auto skip_space = [&](size_t at) {
    while (at < s.size() && space_size(s, at)) at += space_size(s, at);
    return at;
  };
  std::string_view answer;
  for (size_t hit = low.find(word); hit != npos; hit = low.find(word, hit)) {
    size_t at = skip_space(hit += word.size());
    if (at == s.size() || s[at] != ':') continue;
    const size_t begin = at + 1;
    at = skip_space(begin);
    if (at == s.size()) {  // nothing but white space: the last of it that is no line break is the answer
      size_t last = npos;
      for (size_t i = begin; i < s.size(); i += space_size(s, i))
        if (s[i] != '\n') last = i;
      if (last == npos) continue;
      at = last;
    }
    answer = line_at(s, at);
    hit = at + answer.size();
  }
  return answer;
}

}  // namespace

Verdict grade_dapo(std::string_view response, bool, std::string_view gold) {
  const std::string_view answer = answer_of(last_characters(response, kCharacters));
  const bool found = !answer.empty();
  // verl reports, and compares, the normalised answer.
  const std::string parsed = normalise(found ? answer : "[INVALID]");
  return {parsed == normalise(gold) ? 1.0 : -1.0, parsed, found ? parsed : "", found};
}

}  // namespace pare
