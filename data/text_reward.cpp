#include "data/text_reward.h"

#include "base/error.h"
#include "base/nearest.h"

namespace pare {
namespace {

constexpr std::string_view kSpace = " \t\r\n\v\f";

std::string_view trim(std::string_view s) {
  const size_t first = s.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return s.substr(first, s.find_last_not_of(kSpace) - first + 1);
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

std::string lower(std::string_view s) {
  std::string result(s);
  for (char& c : result) c = lower(c);
  return result;
}

bool in_word(char c) {
  return (lower(c) >= 'a' && lower(c) <= 'z') || (c >= '0' && c <= '9') || static_cast<unsigned char>(c) >= 0x80;
}

// No word goes on across the border between text[at - 1] and text[at].
bool word_border(std::string_view text, size_t at) {
  return at == 0 || at == text.size() || !in_word(text[at - 1]) || !in_word(text[at]);
}

bool contains(std::string_view answer, std::string_view text) {
  const std::string word = lower(answer), all = lower(text);
  for (size_t at = all.find(word); at != std::string::npos; at = all.find(word, at + 1)) {
    if (word_border(all, at) && word_border(all, at + word.size())) return true;
  }
  return false;
}

constexpr TextReward kRewards[] = {
    {"exact", true, true, [](std::string_view answer, std::string_view text) { return text == answer; }},
    {"contains", false, false, contains},
    {"starts_with", false, false,
     [](std::string_view answer, std::string_view text) {
       return text.substr(0, answer.size()) == answer && word_border(text, answer.size());
     }},
};

}  // namespace

const TextReward& find_text_reward(const std::string& name) {
  std::vector<std::string> names;
  std::string list;
  for (const TextReward& reward : kRewards) {
    if (name == reward.name) return reward;
    names.push_back(reward.name);
    list += cat(list.empty() ? "" : ", ", reward.name);
  }
  fail("reward \"", name, "\" does not exist; the nearest is ", nearest(name, names), "; there are ", list);
}

Reward score_text(const TextReward& rule, std::string_view answer, const Response& response) {
  Reward reward;
  reward.parsed = response.finished || !rule.needs_finished;
  reward.extracted = trim(response.text);
  reward.score = reward.parsed && rule.holds(trim(answer), reward.extracted) ? 1 : 0;
  reward.components = {{rule.name, reward.score}};
  return reward;
}

}  // namespace pare
