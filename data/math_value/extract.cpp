#include "data/math_value/extract.h"

#include <algorithm>
#include <vector>

#include "data/math_value/answer.h"
#include "data/text.h"

namespace pare::math_value {
namespace {

constexpr auto none = std::string_view::npos;
using Found = std::optional<std::string>;

struct Box {
  size_t begin, end;         // of the whole command
  std::string_view content;  // to the end where it stays open
  bool closed;
};

// Looks for one thing again and again, each time further on; the text is read once.
class Finder {
 public:
  Finder(std::string_view s, std::string_view what) : s_(s), what_(what), hit_(s.find(what)) {}
  // The first one at `at` or behind it; `at` never goes back.
  size_t from(size_t at) {
    if (hit_ < at) hit_ = s_.find(what_, at);  // (none is the largest number)
    return hit_;
  }

 private:
  std::string_view s_, what_;
  size_t hit_;
};

bool understood(std::string_view s) { return s.size() <= 300 && understood(read_answer(s)); }

// What \boxed without braces holds: an answer, up to the end of the sentence.  Words in a row are prose about boxes,
// and so is all else that is no answer; nothing then.
std::string_view bare_content(std::string_view s) {
  for (size_t i = 0; i < s.size(); i++) {
    const bool stop = s[i] == '.' || s[i] == ',' || s[i] == ';' || s[i] == '!' || s[i] == '?';
    if (stop && (i + 1 == s.size() || space_size(s, i + 1))) s = s.substr(0, i);
  }
  while (!s.empty() && (s.back() == ' ' || s.back() == '*' || s.back() == '\\')) s.remove_suffix(1);
  for (size_t i = 0; i + 1 < s.size(); i++)
    if (is_letter(s[i]) && is_letter(s[i + 1])) {
      size_t begin = i;
      while (i + 1 < s.size() && is_letter(s[i + 1])) i++;
      if (begin == 0 || s[begin - 1] != '\\') return {};
    }
  return understood(s) ? s : std::string_view();
}

// An empty box, or one that only shows its place: \boxed{...}.
bool is_blank(std::string_view content) {
  const std::vector<Token> tokens = lex(content, content.size());
  return std::all_of(tokens.begin(), tokens.end(), [](const Token& t) {
    for (const char* mark : {".", "\u2026", "_", "?", "{", "}"})
      if (t.symbol(mark)) return true;
    for (const char* mark : {"dots", "ldots", "cdots", "square", "Box"})
      if (t.command(mark)) return true;
    return false;
  });
}

// For every opening brace the place of the one that closes it, or none.
std::vector<size_t> closing_braces(std::string_view s) {
  std::vector<size_t> close(s.size(), none), open;
  for (size_t i = 0; i < s.size(); i++) {
    if (s[i] == '{') open.push_back(i);
    if (s[i] != '}' || open.empty()) continue;
    close[open.back()] = i;
    open.pop_back();
  }
  return close;
}

// The boxes that hold something, outermost only.  The last one may stay open.
std::vector<Box> boxes(std::string_view s) {
  std::vector<Box> found;
  Finder boxed(s, "\\boxed"), fbox(s, "\\fbox"), dollar(s, "$"), line(s, "\n");
  if (std::min(boxed.from(0), fbox.from(0)) == none) return found;
  const std::vector<size_t> close = closing_braces(s);
  for (size_t at = 0;;) {
    const size_t b = boxed.from(at), f = fbox.from(at), begin = std::min(b, f);
    if (begin == none) return found;
    at = begin + (begin == b ? 6 : 5);
    if (at < s.size() && is_letter(s[at])) continue;  // another command
    while (at < s.size() && s[at] == ' ') at++;
    const size_t next = std::min(boxed.from(at), fbox.from(at));
    if (s.substr(at, 1) != "{") {  // \boxed 42
      const size_t end = std::min({dollar.from(at), line.from(at), next, s.size()});
      const std::string_view content = bare_content(s.substr(at, end - at));
      if (content.empty()) continue;
      at += content.size();
      found.push_back({begin, at, content, true});
      continue;
    }
    const size_t end = close[at];
    const std::string_view content = s.substr(at + 1, end == none ? none : end - at - 1);
    // A brace that stays open in front of another box is prose: "use \boxed{: \boxed{42}".
    if (end == none && next != none) continue;
    at = end == none ? s.size() : end + 1;
    if (end == none || !is_blank(content)) found.push_back({begin, at, content, end != none});
  }
}

bool skip(std::string_view& s, std::string_view word) {
  if (!s.starts_with(word)) return false;
  s.remove_prefix(word.size());
  return true;
}

// Drops formula marks and white space from the front.
void skip_marks(std::string_view& s) {
  for (;;) {
    if (!s.empty() && space_size(s, 0)) {
      s.remove_prefix(space_size(s, 0));
    } else if (!skip(s, "$") && !skip(s, "\\(") && !skip(s, "\\)") && !skip(s, "\\[") && !skip(s, "\\]") &&
               !skip(s, "\\quad") && !skip(s, "\\qquad") && !skip(s, "\\,") && !skip(s, "\\ ") && !skip(s, "*")) {
      return;
    }
  }
}

// Whether what stands between two boxes makes them one answer: a comma, "and", "or", or a word and one of these; behind
// it the name of the second one may follow, "y =", which is given back.
bool joins(std::string_view s, std::string& name) {
  if (s.size() > 100) return false;
  skip_marks(s);
  const auto conjunction = [&] {
    bool any = false;
    for (bool more = true; more; any |= more) {
      skip_marks(s);
      more = skip(s, ",") || skip(s, ";") || skip(s, "\\text{and}") || skip(s, "\\text{ and }") ||
             skip(s, "\\text{or}") || skip(s, "\\text{ or }") || skip(s, "and ") || skip(s, "or ") ||
             skip(s, "and\\") || skip(s, "and$");
    }
    return any;
  };
  if (!conjunction()) {  // "papers and"
    size_t letters = 0;
    while (letters < s.size() && is_letter(s[letters])) letters++;
    s.remove_prefix(letters);
    skip_marks(s);
    if (s.starts_with(",") || s.starts_with(";") || !conjunction()) return false;
  }
  skip_marks(s);
  if (s.empty()) return true;
  const size_t equals = s.find('=');
  if (equals == none) return false;
  name = std::string(trim(s.substr(0, equals)));
  s.remove_prefix(equals + 1);
  skip_marks(s);
  return s.empty() && std::none_of(name.begin(), name.end(), [](char c) { return c == '+' || c == '-' || c == ' '; });
}

// The last box and what is joined to it.
Found boxed(std::string_view s, const std::vector<Box>& all) {
  if (!all.back().closed) return {};
  std::string answer(all.back().content);
  // "28}$ percent"
  std::string_view rest = s.substr(all.back().end);
  skip_marks(rest);
  if (rest.starts_with("%") || rest.starts_with("\\%") || rest.starts_with("percent") || rest.starts_with("pct"))
    answer += "\\%";
  for (size_t i = all.size() - 1; i > 0 && all.size() - i < 64; i--) {
    std::string name;
    if (!all[i - 1].closed || !joins(s.substr(all[i - 1].end, all[i].begin - all[i - 1].end), name)) break;
    if (!name.empty()) answer.insert(0, name + " = ");
    answer = std::string(all[i - 1].content) + ", " + answer;
  }
  return answer;
}

std::string_view without_emphasis(std::string_view s) {
  s = trim(s);
  while (!s.empty() && (s.front() == '*' || s.front() == '_' || s.front() == '`')) s.remove_prefix(1);
  while (!s.empty() && (s.back() == '*' || s.back() == '`')) s.remove_suffix(1);
  return trim(s);
}

// Up to the full stop that ends the sentence, or the end of the line where no formula is open.
std::string_view sentence(std::string_view s) {
  bool formula = false;
  for (size_t i = 0; i < s.size(); i++) {
    if (s[i] == '$') {
      formula = !formula;
      if (s.substr(i, 2) == "$$") i++;
    }
    if (s.substr(i, 2) == "\\[" || s.substr(i, 2) == "\\(") formula = true;
    if (s.substr(i, 2) == "\\]" || s.substr(i, 2) == "\\)") formula = false;
    if (formula) continue;
    if (s[i] == '\n') return s.substr(0, i);
    if (s[i] == '.' && (i + 1 == s.size() || space_size(s, i + 1))) return s.substr(0, i);
  }
  return s;
}

// Formulas of $ $, $$ $$, \( \), \[ \], and what is left without them.
std::vector<std::string_view> formulas(std::string_view s, std::string& rest) {
  struct Mark {
    std::string_view open;
    Finder close;
  };
  Mark marks[] = {{"$$", {s, "$$"}}, {"$", {s, "$"}}, {"\\[", {s, "\\]"}}, {"\\(", {s, "\\)"}}};
  std::vector<std::string_view> found;
  for (size_t at = 0; at < s.size();) {
    const auto mark = std::find_if(std::begin(marks), std::end(marks), [&](const Mark& m) {
      return s.substr(at, m.open.size()) == m.open && (at == 0 || s[at - 1] != '\\');
    });
    const size_t begin = mark == std::end(marks) ? none : at + mark->open.size();
    const size_t close = begin == none ? none : mark->close.from(begin);
    if (close == none) {
      rest += s[at++];
    } else {
      found.push_back(s.substr(begin, close - begin));
      at = close + mark->open.size();
    }
  }
  return found;
}

// The numbers in a text without formulas, with a percent sign or a dollar.
std::vector<std::string> numbers(std::string_view s) {
  std::vector<std::string> found;
  for (size_t at = 0; at < s.size();) {
    const bool inside = at > 0 && (is_digit(s[at - 1]) || is_letter(s[at - 1]) || s[at - 1] == '.');
    const bool negative = s[at] == '-' && at + 1 < s.size() && is_digit(s[at + 1]);
    if (inside || !(is_digit(s[at]) || negative)) {
      at++;
      continue;
    }
    size_t end = at + 1;
    while (end < s.size() && (is_digit(s[end]) || ((s[end] == '.' || s[end] == ',' || s[end] == '/') &&
                                                   end + 1 < s.size() && is_digit(s[end + 1]))))
      end++;
    std::string number(s.substr(at, end - at));
    std::string_view tail = s.substr(end);
    if (!tail.empty() && tail[0] == '\\') tail.remove_prefix(1);
    if (tail.starts_with("%") || tail.starts_with(" percent")) number += "\\%";
    found.push_back(number);
    at = end;
  }
  return found;
}

// The answer that a sentence gives: its only formula, all of it, what comes behind its verb, or its only number.
Found stated(std::string_view s) {
  s = without_emphasis(s);
  if (s.empty()) return {};
  std::string rest;
  const std::vector<std::string_view> all = formulas(s, rest);
  const std::vector<std::string> plain_numbers = numbers(rest);
  if (all.size() == 1 && plain_numbers.empty()) {
    std::string_view tail = s.substr(static_cast<size_t>(all[0].end() - s.begin()));
    skip_marks(tail);
    const bool percent = tail.starts_with("%") || tail.starts_with("percent") || tail.starts_with("pct");
    return std::string(all[0]) + (percent ? "\\%" : "");
  }
  if (understood(s)) return std::string(s);
  const std::string low = lower(s);
  for (const char* verb : {" is ", " are ", " by ", " equals "})
    if (const size_t at = low.rfind(verb); at != none) {
      const std::string_view tail = without_emphasis(s.substr(at + std::string_view(verb).size()));
      if (understood(tail)) return std::string(tail);
    }
  if (all.empty() && plain_numbers.size() == 1) return plain_numbers[0];
  return {};
}

// Behind the last "answer is", "answer:" and the like.
Found announced(std::string_view s) {
  const std::string low = lower(s), word = "answer";
  for (size_t at = low.rfind(word); at != none; at = at == 0 ? none : low.rfind(word, at - 1)) {
    std::string_view tail = s.substr(at + word.size());
    while (!tail.empty() && (tail[0] == '*' || space_size(tail, 0))) tail.remove_prefix(1);
    if (!skip(tail, ":") && !skip(tail, "is") && !skip(tail, "：") && !skip(tail, "=")) continue;
    while (!tail.empty() && (tail[0] == '*' || tail[0] == ':' || space_size(tail, 0)))
      tail.remove_prefix(std::max<size_t>(space_size(tail, 0), 1));
    const std::string_view said = without_emphasis(sentence(tail));
    if (const Found answer = stated(said)) return answer;
    // Words: "The answer is even."
    const bool words = !said.empty() && said.size() <= 60 && said.find('$') == none && numbers(said).empty();
    return words ? Found(said) : std::nullopt;
  }
  return {};
}

std::string_view last_sentence(std::string_view s) {
  std::string_view last;
  for (s = trim(s); !s.empty();) {
    const std::string_view one = sentence(s);
    if (!trim(one).empty()) last = trim(one);
    s.remove_prefix(std::min(s.size(), one.size() + 1));
  }
  return last;
}

// Boxes that hold nothing are words about boxes; there are no others here.
std::string without_boxes(std::string_view s) {
  const std::vector<size_t> close = closing_braces(s);
  std::string kept;
  for (size_t at = 0; at < s.size();) {
    const std::string_view rest = s.substr(at);
    const size_t size = rest.starts_with("\\boxed") ? 6 : rest.starts_with("\\fbox") ? 5 : 0;
    if (size == 0 || (size < rest.size() && is_letter(rest[size]))) {
      kept += s[at++];
      continue;
    }
    at += size;
    const size_t next = s.find_first_not_of(' ', at);
    if (next != none && s[next] == '{' && close[next] != none) at = close[next] + 1;
  }
  return kept;
}

}  // namespace

std::string boxed_gold(std::string_view gold) {
  std::string answers;
  for (const Box& box : boxes(gold)) answers += (answers.empty() ? "" : ", ") + std::string(box.content);
  return answers.empty() ? std::string(gold) : answers;
}

Found extract(std::string_view response) {
  std::string_view s = response;
  const std::string_view begin = "<think>", end = "</think>";
  if (const size_t at = s.rfind(end); at != none) s.remove_prefix(at + end.size());
  if (s.find(begin) != none) return {};
  // The end that Minerva's examples teach, and what a model writes behind it.
  s = trim(s.substr(0, s.rfind("I hope it is correct")));
  if (const std::vector<Box> all = boxes(s); !all.empty()) return boxed(s, all);
  const std::string words = without_boxes(s);
  s = trim(words);
  if (s.empty()) return {};
  if (const size_t at = s.rfind("####"); at != none) {
    const std::string_view line = s.substr(at + 4);
    return std::string(without_emphasis(line.substr(0, line.find('\n'))));
  }
  const std::string_view open = "<answer>", close = "</answer>";
  if (const size_t at = s.rfind(close); at != none) {
    const size_t from = s.substr(0, at).rfind(open);
    if (from == none) return {};
    const std::string_view inner = trim(s.substr(from + open.size(), at - from - open.size()));
    const Found said = stated(inner);
    return said ? said : Found(std::string(inner));
  }
  std::string rest;
  if (s.find('\n') == none && formulas(s, rest).empty() && understood(s)) return std::string(s);
  if (const Found answer = announced(s)) return answer;
  const std::string_view last = last_sentence(s);
  if (const Found answer = stated(last)) return answer;
  // A word or two alone: "even".
  if (s.size() <= 40 && numbers(s).empty()) return std::string(s);
  return {};
}

}  // namespace pare::math_value
