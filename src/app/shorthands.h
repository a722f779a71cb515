// Command-line options that stand for configuration keys.
#pragma once
#include <string>
#include <vector>

#include "app/command_line.h"

namespace pare {

class Shorthands {
 public:
  struct Flag {
    const char* name;               // in the row of its key
    const char* meaning = nullptr;  // if the key's own does not fit the command
  };
  explicit Shorthands(std::vector<Flag> flags) : flags_(std::move(flags)), values_(flags_.size()) {}

  void add(const Command& command);
  // Returns the given flags as overrides key=value.
  std::vector<std::string> overrides(const Command& command) const;

 private:
  const std::vector<Flag> flags_;
  std::vector<std::string> values_;
};

// --ranks of a command, for start_ranks(); 1 unless it is given.
void add_ranks(const Command& command, int& ranks);

}  // namespace pare
