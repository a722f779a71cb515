// A task: problems, a teacher's responses for SFT, and rewards.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "tokenizer/chat.h"

namespace pare {

struct Problem {
  std::string prompt;                     // text without BOS
  std::vector<Message> messages;          // the prompt as a conversation, if it is one or has a system message
  std::vector<int32_t> prompt_ids;        // given by a data set in place of the text (BOS included); else empty
  std::optional<std::string> answer;      // what the reward compares with
  std::optional<std::string> completion;  // a finished response given by the data set
  std::optional<Message> reply;           // the same as a turn of the assistant
  int64_t max_tokens = 0;                 // of a response to `pare generate`; 0: the row does not say
  std::string where;                      // names the problem in messages: "rows.jsonl:17"
  std::string told;                       // what a RewardCommand is told of it: members of an object; else empty
};

// The conversation that a chat format renders.  Empty messages: the text, as a turn of the user.
inline std::vector<Message> conversation(const Problem& problem) {
  return problem.messages.empty() ? std::vector<Message>{{"user", problem.prompt}} : problem.messages;
}
// The text that people read: the prompt, or the last turn of a conversation; empty: the data set gives ids.
inline std::string problem_text(const Problem& problem) {
  return problem.prompt.empty() && !problem.messages.empty() ? problem.messages.back().content : problem.prompt;
}

// A response as a reward sees it: its text without the closing EOS, and whether it had one.
struct Response {
  std::string_view text;
  bool finished = false;
  int64_t tokens = 0;  // that EOS included
};

struct Reward {
  double score = 0;
  std::vector<std::pair<std::string, double>> components;  // name, value; for the logs
  std::string extracted;                                   // what was taken for the answer
  bool parsed = false;                                     // an answer was found where it is expected
};

class Task {
 public:
  virtual ~Task() = default;
  // Problems of the set; INT64_MAX for a generator without end.
  virtual int64_t size() const = 0;
  // 0 <= index < size().  The same problem for the same index, always.
  virtual Problem problem(int64_t index) const = 0;
  // A response to learn from (without EOS).  A noisy teacher errs in proportion to `ramp` in [0, 1]: 0 never, 1 as
  // often as the task says.  Draws come from `rng`.
  virtual std::string teach(const Problem& problem, double ramp, Rng& rng) const = 0;
  virtual Reward reward(const Problem& problem, const Response& response) const = 0;
  // For each extracted answer the index of the first one that counts as the same, its own if none does: the same text,
  // or what the reward compares.
  virtual std::vector<size_t> first_equal(std::span<const std::string> answers) const {
    std::vector<size_t> first;
    for (const std::string& a : answers)
      first.push_back(static_cast<size_t>(std::find(answers.begin(), answers.end(), a) - answers.begin()));
    return first;
  }
  // Keeps these problems alone, in this order, which become 0, 1, ...  A generator has none to leave out.
  virtual void keep(const std::vector<int64_t>& rows) { expect(rows.empty(), "a generator keeps all its problems"); }
};

}  // namespace pare
