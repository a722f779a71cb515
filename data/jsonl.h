// Problems from files, one JSON object a line:
//   {"prompt": "Lily has a", "answer": "dog"}                          any reward
//   {"question": "...", "answer": "...\n#### 72"}                      GSM8K
//   {"problem": "...", "solution": "... \\boxed{\\frac{1}{2}}."}       MATH
//   {"nums": [26, 19, 23], "target": 30}                               countdown; a prompt is written where there is
//   none
// The prompt is "prompt", "problem" or "question" (text), or "prompt_ids" (token ids, BOS included; also under the name
// "ids"); "answer", or else "solution", is there where there is a reward; "completion" (text) where the row is learnt
// from.  Other keys are left alone; empty lines are skipped.
//
// A mathematical reward compares with the answer proper: what follows "####" without commas, else the content of the
// last \boxed{}, without dollars around it; integers lose leading zeros (AIME's "025") and a zero fraction (27.0); the
// elements of an array are joined by commas.  Other rewards take the text as it is, and numbers as JSON writes them.
#pragma once
#include <memory>

#include "data/reward_command.h"
#include "data/task.h"
#include "data/verify/verify.h"

namespace pare {

class JsonlTask : public Task {
 public:
  // The rows of all files (or presets, data/presets.h), one after another.  `reward` names a verifier; empty: the rows
  // are for training on completions only.  `prompt_key` and `answer_key` name the keys to read instead of those above;
  // empty: those above.  `command` grades in place of a verifier: then rows need no answer.  A row that cannot be used,
  // and a file without rows, is an Error naming file, line and key.
  JsonlTask(const std::vector<std::string>& paths, const std::string& reward, std::string prompt_key = "",
            std::string answer_key = "", std::shared_ptr<RewardCommand> command = nullptr);

  int64_t size() const override { return static_cast<int64_t>(problems_.size()); }
  Problem problem(int64_t index) const override;
  // The row's completion; a row without one is an Error.
  std::string teach(const Problem& problem, double ramp, Rng& rng) const override;
  Reward reward(const Problem& problem, const Response& response) const override;
  std::vector<size_t> first_equal(std::span<const std::string> answers) const override;

 private:
  void read(const std::string& path);

  const std::string prompt_key_, answer_key_;
  const Verifier* verifier_ = nullptr;
  const std::shared_ptr<RewardCommand> command_;
  std::vector<Problem> problems_;
};

}  // namespace pare
