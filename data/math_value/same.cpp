// When two answers say the same.
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

bool is_group(const Answer& a) { return a.kind == A::list || a.kind == A::set; }

}  // namespace

bool same(const Answer& gold, const Answer& answer) {
  if (gold.kind == A::equation || answer.kind == A::equation)
    return gold.difference && answer.difference && proportional(*gold.difference, *answer.difference, false);
  if (!gold.name.empty() && !answer.name.empty() && gold.name != answer.name)
    return gold.difference && answer.difference && proportional(*gold.difference, *answer.difference, false);
  if (gold.kind == A::value && answer.kind == A::value) {
    const bool units = gold.unit.empty() || answer.unit.empty() || gold.unit == answer.unit;
    return units && equal(gold.value, answer.value);
  }
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

// "12,345" without its groups being of three digits, or exactly that; `digits` many behind the comma.
bool two_numbers(std::string_view s, size_t& comma, size_t& digits) {
  comma = s.find(',');
  if (comma == std::string_view::npos || !is_integer(s.substr(0, comma))) return false;
  const std::string_view rest = s.substr(comma + 1);
  digits = rest.size();
  return is_integer(rest) && rest[0] != '-';
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
  gold = trim(gold), answer = trim(answer);
  if (gold.size() > kAnswerBytes || answer.size() > kAnswerBytes) return gold == answer;
  if (!gold.empty() && squeezed(gold) == squeezed(answer)) return true;
  const Answer g = read_answer(gold);
  if (same(g, read_answer(answer))) return true;
  size_t comma = 0, digits = 0;
  if (!two_numbers(answer, comma, digits)) return false;
  if (digits != 3 && g.kind == A::value)  // a decimal comma
    return same(g, read_answer(replace_all(answer, ",", ".")));
  return digits == 3 && g.kind == A::list && same(g, read_answer(replace_all(answer, ",", ", ")));
}

std::string describe(const Answer& answer) {
  if (answer.kind != A::value || !answer.value.constant) return answer.text;
  const mpq_class* q = std::get_if<mpq_class>(&*answer.value[0]);
  return q && mpz_sizeinbase(q->get_num_mpz_t(), 10) < 100 ? q->get_str() : answer.text;
}

}  // namespace pare::math_value
