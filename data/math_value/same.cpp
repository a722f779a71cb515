// Equality of answers.
#include <algorithm>

#include "data/math_value/answer.h"
#include "data/text.h"

namespace pare::math_value {
namespace {

using A = Answer::Kind;

bool all_same(const Answer& gold, const Answer& answer) {
  if (gold.items.size() != answer.items.size()) return false;
  for (size_t i = 0; i < gold.items.size(); i++)
    if (!same(gold.items[i], answer.items[i])) return false;
  return true;
}

bool same_in_any_order(const Answer& gold, const Answer& answer) {
  const auto points = [](const Answer& a) {
    return std::all_of(a.items.begin(), a.items.end(), [](const Answer& x) { return x.kind == A::tuple; });
  };
  if (gold.kind == A::set || (points(gold) && points(answer))) {
    const auto in = [](const Answer& x, const Answer& all) {
      return std::any_of(all.items.begin(), all.items.end(), [&](const Answer& y) { return same(x, y); });
    };
    return std::all_of(gold.items.begin(), gold.items.end(), [&](const Answer& x) { return in(x, answer); }) &&
           std::all_of(answer.items.begin(), answer.items.end(), [&](const Answer& x) { return in(x, gold); });
  }
  if (gold.items.size() != answer.items.size()) return false;
  std::vector<bool> taken(answer.items.size());
  for (const Answer& g : gold.items) {
    size_t i = 0;
    while (i < taken.size() && (taken[i] || !same(g, answer.items[i]))) i++;
    if (i == taken.size()) return false;
    taken[i] = true;
  }
  return true;
}

bool same_words(const std::string& a, const std::string& b) {
  const auto words = [](const std::string& s) {
    return s.size() > 1 && std::all_of(s.begin(), s.end(), [](char c) { return is_letter(c) || c == ' '; });
  };
  return words(a) && words(b) && lower(a) == lower(b);
}

// The real line, and a letter that means it.
bool is_line(const Answer& a) {
  return a.kind == A::tuple && a.open == '(' && a.close == ')' && a.items.size() == 2 &&
         a.items[0].kind == A::infinity && a.items[0].negative && a.items[1].kind == A::infinity &&
         !a.items[1].negative;
}
bool is_letter_of_line(const Answer& a) { return a.kind == A::value && a.text == "R"; }

bool is_group(const Answer& a) { return a.kind == A::list || a.kind == A::set; }

}  // namespace

bool same(const Answer& gold, const Answer& answer) {
  if (gold.kind == A::equation || answer.kind == A::equation)
    return gold.difference && answer.difference && proportional(*gold.difference, *answer.difference, false);
  if (!gold.name.empty() && !answer.name.empty() && gold.name != answer.name)
    return gold.difference && answer.difference && proportional(*gold.difference, *answer.difference, false);
  if (!gold.unit.empty() && !answer.unit.empty() && gold.unit != answer.unit) return false;
  if ((is_line(gold) && is_letter_of_line(answer)) || (is_letter_of_line(gold) && is_line(answer))) return true;
  if (gold.kind == A::value && answer.kind == A::value) return equal(gold.value, answer.value);
  if (!gold.text.empty() && gold.text == answer.text) return true;
  if (is_group(gold) && is_group(answer)) return same_in_any_order(gold, answer);
  if (is_group(gold) && gold.items.size() == 1) return same(gold.items[0], answer);
  if (is_group(answer) && answer.items.size() == 1) return same(gold, answer.items[0]);
  const auto point = [](const Answer& a) { return a.kind == A::tuple && a.open == '(' && a.close == ')'; };
  if ((point(gold) && answer.kind == A::list) || (gold.kind == A::list && point(answer))) return all_same(gold, answer);
  if (gold.kind != answer.kind) return false;
  switch (gold.kind) {
    case A::infinity:
      return gold.negative == answer.negative;
    case A::tuple:
      return gold.open == answer.open && gold.close == answer.close && all_same(gold, answer);
    case A::matrix:
      return gold.columns == answer.columns && all_same(gold, answer);
    case A::inequality:
      return gold.relation == answer.relation &&
             proportional(*gold.difference, *answer.difference, gold.relation != '!');
    case A::text:
      return same_words(gold.text, answer.text);
    default:
      return false;
  }
}

bool understood(const Answer& a) {
  return a.kind != A::text && std::all_of(a.items.begin(), a.items.end(), understood);
}

namespace {

// The only comma of a number outside of brackets, with digits in front of it; `digits`: how many behind it.
size_t comma_of(std::string_view s, size_t& digits) {
  const size_t comma = s.find(',');
  if (comma == std::string_view::npos || comma == 0 || s.find(',', comma + 1) != std::string_view::npos) return 0;
  if (!is_digit(s[comma - 1]) || s.find_first_of("([|:") != std::string_view::npos) return 0;
  if (s.find("\\{") != std::string_view::npos) return 0;
  size_t end = comma + 1;
  while (end < s.size() && is_digit(s[end])) end++;
  digits = end - comma - 1;
  return digits > 0 ? comma : 0;
}

// Without the spaces that are not between two words.
std::string squeezed(std::string_view s) {
  const auto in_word = [](char c) { return is_digit(c) || is_letter(c); };
  std::string r;
  for (size_t i = 0; i < s.size(); i++)
    if (s[i] != ' ' || (!r.empty() && i + 1 < s.size() && in_word(r.back()) && in_word(s[i + 1]))) r += s[i];
  return r;
}

}  // namespace

bool same_text(std::string_view gold, std::string_view answer) {
  gold = trim(gold);
  answer = trim(answer);
  if (gold.size() > kAnswerBytes || answer.size() > kAnswerBytes) return gold == answer;
  if (!gold.empty() && squeezed(gold) == squeezed(answer)) return true;
  const Answer g = read_answer(gold);
  if (same(g, read_answer(answer))) return true;
  const std::string plain_answer = replace_all(answer, "{,}", ",");
  size_t digits = 0;
  if (comma_of(plain_answer, digits) > 0) {
    if (digits != 3 && g.kind == A::value)  // a decimal comma
      return same(g, read_answer(replace_all(plain_answer, ",", ".")));
    return digits == 3 && g.kind == A::list && same(g, read_answer(replace_all(plain_answer, ",", ", ")));
  }
  return comma_of(gold, digits) > 0 && digits != 3 && squeezed(replace_all(gold, ",", ".")) == squeezed(answer);
}

std::string describe(const Answer& answer) {
  if (answer.kind != A::value || !answer.value.constant) return answer.text;
  const mpq_class* q = std::get_if<mpq_class>(&*answer.value[0]);
  return q && mpz_sizeinbase(q->get_num_mpz_t(), 10) < 100 ? q->get_str() : answer.text;
}

}  // namespace pare::math_value
