// Problems from files, one JSON object a line:
//   {"prompt": "Lily has a", "answer": "dog"}
// "prompt" (text) or "prompt_ids" (token ids, BOS included; also under the name "ids"); "answer" (text or number, which
// is taken as JSON writes it) where there is a reward; "completion" (text) where the row is learnt from.  Other keys
// are left alone; empty lines are skipped.
#pragma once
#include "data/text_reward.h"

namespace pare {

class JsonlTask : public Task {
 public:
  // The rows of all files, one after another.  `reward` names a text reward; empty: the rows are for training on
  // completions only.  A row that cannot be used, and a file without rows, is an Error naming file and line.
  JsonlTask(const std::vector<std::string>& paths, const std::string& reward);

  int64_t size() const override { return static_cast<int64_t>(problems_.size()); }
  Problem problem(int64_t index) const override;
  // The row's completion; a row without one is an Error.
  std::string teach(const Problem& problem, double ramp, Rng& rng) const override;
  Reward reward(const Problem& problem, const Response& response) const override;

 private:
  void read(const std::string& path);

  const TextReward* reward_ = nullptr;
  std::vector<Problem> problems_;
};

}  // namespace pare
