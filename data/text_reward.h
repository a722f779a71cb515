// Rewards that look at the text of a response, by name.
#pragma once
#include "data/task.h"

namespace pare {

// Every reward is 1 or 0 and compares with the problem's answer; white space around the answer does not count.
struct TextReward {
  const char* name;
  // A response that was cut at its limit gets 0: its text is not what the model meant to say.
  bool needs_finished;
  bool accepts_empty_answer;
  bool (*holds)(std::string_view answer, std::string_view text);
};

// exact        the finished text is the answer, white space around it aside
// contains     the answer occurs as whole words, in upper or lower case (ASCII), in the text so far
// starts_with  the text begins with the answer as whole words, in the same case, white space before it aside
// Words end where no letter, digit or byte of a non-ASCII character follows.  An unknown name is an Error that names
// the nearest and lists all.
const TextReward& find_text_reward(const std::string& name);

Reward score_text(const TextReward& reward, std::string_view answer, const Response& response);

}  // namespace pare
