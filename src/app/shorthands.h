// Command-line options that stand for configuration keys.
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace pare {

class Shorthands {
 public:
  struct Flag {
    const char *name, *key;
    const char* meaning = nullptr;  // where the key's own does not fit the command
  };
  explicit Shorthands(std::vector<Flag> flags) : flags_(std::move(flags)), values_(flags_.size()) {}

  void add(CLI::App& command);
  // Those that were given, as overrides key=value.
  std::vector<std::string> overrides(const CLI::App& command) const;

 private:
  const std::vector<Flag> flags_;
  std::vector<std::string> values_;
};

}  // namespace pare
