// Problems from files, one JSON object a line; data/formats.md describes them.
#pragma once
#include <memory>

#include "data/reward_command.h"
#include "data/task.h"
#include "data/verify/verify.h"

namespace pare {

// Keys of a row, or paths to them, that replace the usual ones, and the system message of rows without one.
// Empty: the usual keys, no system message.
struct RowKeys {
  std::string prompt, answer, system;
};

// Reads the prompt of a line: a text, token ids, or a conversation, whose last turn of the assistant becomes the reply.
// Throws an Error that begins with `where`.
Problem read_prompt(const std::string& line, const RowKeys& keys, const std::string& where);

class JsonlTask : public Task {
 public:
  // The rows of all files (or presets, data/presets.h), one after another.  `reward` names a verifier; empty: the rows
  // are for training on completions only.  `command` grades in place of a verifier: then rows need no answer.  A row
  // that cannot be used, and a file without rows, is an Error naming file, line and key.
  JsonlTask(const std::vector<std::string>& paths, const std::string& reward, RowKeys keys = {},
            std::shared_ptr<RewardCommand> command = nullptr);

  int64_t size() const override { return static_cast<int64_t>(problems_.size()); }
  Problem problem(int64_t index) const override;
  // The row's completion; a row without one is an Error.
  std::string teach(const Problem& problem, double ramp, Rng& rng) const override;
  Reward reward(const Problem& problem, const Response& response) const override;
  std::vector<size_t> first_equal(std::span<const std::string> answers) const override;
  void keep(const std::vector<int64_t>& rows) override;

 private:
  void read(const std::string& path);

  const RowKeys keys_;
  const Verifier* verifier_ = nullptr;
  const std::shared_ptr<RewardCommand> command_;
  std::vector<Problem> problems_;
};

}  // namespace pare
