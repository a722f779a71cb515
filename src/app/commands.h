// The commands of `pare`.  Each adds its options to the program and runs as the callback of its subcommand.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"

namespace pare {

// What an option must be: a number of at least `low`.
inline CLI::Validator at_least(int low) {
  const auto check = [low](const std::string& text) -> std::string {
    char* end = nullptr;
    const double x = std::strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0' && x >= low && x <= 1e9) return "";
    return cat("expected a number of at least ", low, ", found ", text.empty() ? "nothing" : text);
  };
  return CLI::Validator(check, "", "at_least");
}

// Refuses to write over a file unasked; what is no file (/dev/stdout, a pipe) holds nothing that could be lost.
inline void check_output_file(const std::string& path, const char* option, bool force) {
  std::error_code none;
  if (!force && std::filesystem::is_regular_file(path, none))
    fail(path, " exists; choose another ", option, ", or --force to replace it");
}

void add_bench(CLI::App& app);
void add_compare(CLI::App& app);
void add_convert(CLI::App& app);
void add_eval(CLI::App& app);
void add_generate(CLI::App& app);
void add_inspect(CLI::App& app);
void add_logprobs(CLI::App& app);
void add_merge(CLI::App& app);
void add_plan(CLI::App& app);
void add_report(CLI::App& app);
void add_sft(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_train(CLI::App& app);
void add_verify(CLI::App& app);

}  // namespace pare
