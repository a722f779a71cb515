// Problems from files, one JSON object a line; data/formats.md describes them.
#pragma once
#include <memory>

#include "data/reward_command.h"
#include "data/task.h"
#include "data/verify/verify.h"

namespace pare {

class JsonlTask : public Task {
 public:
  // The rows of all files (or presets, data/presets.h), one after another.  `reward` names a verifier; empty: the rows
  // are for training on completions only.  `prompt_key` and `answer_key` name the keys to read instead of the usual
  // ones, or paths to them; empty: the usual ones.  `command` grades in place of a verifier: then rows need no answer.
  // A row that cannot be used, and a file without rows, is an Error naming file, line and key.
  JsonlTask(const std::vector<std::string>& paths, const std::string& reward, std::string prompt_key = "",
            std::string answer_key = "", std::shared_ptr<RewardCommand> command = nullptr);

  int64_t size() const override { return static_cast<int64_t>(problems_.size()); }
  Problem problem(int64_t index) const override;
  // The row's completion; a row without one is an Error.
  std::string teach(const Problem& problem, double ramp, Rng& rng) const override;
  Reward reward(const Problem& problem, const Response& response) const override;
  std::vector<size_t> first_equal(std::span<const std::string> answers) const override;
  void keep(const std::vector<int64_t>& rows) override;

 private:
  void read(const std::string& path);

  const std::string prompt_key_, answer_key_;
  const Verifier* verifier_ = nullptr;
  const std::shared_ptr<RewardCommand> command_;
  std::vector<Problem> problems_;
};

}  // namespace pare
