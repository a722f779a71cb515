// math-string: verl's verl/utils/reward_score/math_reward.py, which is Hendrycks et al.'s comparison for MATH
// (arXiv 2103.03874) as lm-evaluation-harness has it.
//
// The answer is the content of the last \boxed{} (or \fbox), by counting braces.  Both sides are rewritten by the steps
// of normalise() and compared as strings; where a step cannot be done on one side, as they stand.
#include <map>
#include <optional>

#include "data/text.h"
#include "data/verify/verify.h"

namespace pare {
namespace {

constexpr auto npos = std::string_view::npos;

// The answer; nothing: there is none, or the box was \fbox{...}, which is found but not opened.
std::optional<std::string_view> boxed(std::string_view s) {
  const std::string_view bare = "\\boxed ";
  if (const size_t at = s.rfind(bare); at != npos) {
    const std::string_view rest = s.substr(at + bare.size());
    return rest.substr(0, rest.find('$'));
  }
  const std::string_view box = "\\boxed";
  const size_t at = s.rfind(box);
  if (at == npos || s.substr(at + box.size(), 1) != "{") return {};
  std::string_view content;
  if (!last_braced(s, box, content)) return {};
  return content;
}

// "\sqrt3" -> "\sqrt{3}"; nothing where a \sqrt ends the text.
std::optional<std::string> brace_roots(std::string_view s) {
  const std::string_view root = "\\sqrt";
  std::string result;
  for (size_t at = 0;;) {
    const size_t hit = s.find(root, at);
    result += s.substr(at, hit - at);
    if (hit == npos) return result;
    result += root;
    at = hit + root.size();
    // Another root right behind counts as nothing to take the root of.
    if (at == s.size() || s.substr(at, root.size()) == root) return {};
    if (s[at] == '{') continue;
    const size_t n = character_size(s, at);
    result.append("{").append(s.substr(at, n)).append("}");
    at += n;
  }
}

// "\frac12" -> "\frac{1}{2}", "\frac1{72}" -> "\frac{1}{72}"; as it stands where a \frac has one character left;
// nothing where it has none.
std::optional<std::string> brace_fractions(std::string_view s) {
  const std::string_view frac = "\\frac";
  std::string result(s.substr(0, s.find(frac)));
  for (size_t hit = s.find(frac); hit != npos;) {
    const size_t begin = hit + frac.size();
    hit = s.find(frac, begin);
    const std::string_view part = s.substr(begin, hit - begin);
    result += frac;
    if (part.empty()) return {};
    if (part[0] == '{') {
      result += part;
      continue;
    }
    const size_t a = character_size(part, 0);
    if (part.size() == a) return std::string(s);
    const size_t b = character_size(part, a);
    result.append("{").append(part.substr(0, a)).append("}");
    if (part[a] == '{')
      result += part.substr(a);
    else
      result.append("{").append(part.substr(a, b)).append("}").append(part.substr(a + b));
  }
  return result;
}

// As Python writes an int that it read; numbers of more digits than Python reads are none.
bool is_python_integer(std::string_view s) {
  return is_integer(s) && s.size() <= 4300 && without_leading_zeros(s) == s && s != "-0";
}

// "3/4" -> "\frac{3}{4}" for integers.
std::string slash_to_fraction(const std::string& s) {
  const size_t slash = s.find('/');
  if (slash == npos || s.find('/', slash + 1) != npos) return s;
  const std::string a = s.substr(0, slash), b = s.substr(slash + 1);
  return is_python_integer(a) && is_python_integer(b) ? "\\frac{" + a + "}{" + b + "}" : s;
}

std::optional<std::string> normalise(std::string_view text) {
  std::string s(text);
  constexpr std::pair<const char*, const char*> first[] = {
      {"\n", ""},     {"\\!", ""},     {"\\\\", "\\"},    {"tfrac", "frac"}, {"dfrac", "frac"},
      {"\\left", ""}, {"\\right", ""}, {"^{\\circ}", ""}, {"^\\circ", ""},   {"\\$", ""}};
  for (const auto& [from, to] : first) s = replace_all(s, from, to);
  const std::string_view unit = "\\text{ ";  // a unit on the right
  if (const size_t at = s.find(unit); at != npos) {
    if (s.find(unit, at + unit.size()) != npos) return {};
    s.resize(at);
  }
  constexpr std::pair<const char*, const char*> second[] = {{"\\\\%", ""}, {"\\%", ""}, {" .", " 0."}, {"{.", "{0."}};
  for (const auto& [from, to] : second) s = replace_all(s, from, to);
  if (s.empty()) return s;
  if (s[0] == '.') s = "0" + s;
  // "k = 3" -> "3"
  const size_t equals = s.find('=');
  if (equals != npos && s.find('=', equals + 1) == npos && character_count(s.substr(0, equals)) <= 2)
    s = s.substr(equals + 1);
  const std::optional<std::string> roots = brace_roots(s);
  if (!roots) return {};
  const std::optional<std::string> fractions = brace_fractions(replace_all(*roots, " ", ""));
  if (!fractions) return {};
  return slash_to_fraction(*fractions == "0.5" ? "\\frac{1}{2}" : *fractions);
}

}  // namespace

Verdict grade_math_string(std::string_view response, bool, std::string_view gold) {
  const std::optional<std::string_view> answer = boxed(response);
  if (!answer) return {};
  const std::optional<std::string> a = normalise(*answer), b = normalise(gold);
  const bool equal = *answer == gold || (a && a == b);
  return {equal ? 1.0 : 0.0, std::string(*answer), a ? *a : std::string(*answer), true};
}

std::vector<size_t> first_equal_math_string(std::span<const std::string> answers) {
  std::map<std::string, size_t> seen;
  std::vector<size_t> first;
  for (const std::string& a : answers)
    first.push_back(seen.emplace(normalise(a).value_or(a), first.size()).first->second);
  return first;
}

}  // namespace pare
