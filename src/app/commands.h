// The commands of `pare`.  Each adds its options to the program and runs as the callback of its subcommand.
#pragma once
#include <filesystem>
#include <string>

#include "app/command_line.h"
#include "base/error.h"

namespace pare {

// Refuses to write over a file unasked; what is no file (/dev/stdout, a pipe) holds nothing that could be lost.
inline void check_output_file(const std::string& path, const char* option, bool force) {
  std::error_code none;
  if (!force && std::filesystem::is_regular_file(path, none))
    fail(path, " exists; choose another ", option, ", or --force to replace it");
}

void add_audit(const Command& program);
void add_bench(const Command& program);
void add_compare(const Command& program);
void add_convert(const Command& program);
void add_eval(const Command& program);
void add_generate(const Command& program);
void add_help(const Command& program);
void add_inspect(const Command& program);
void add_logprobs(const Command& program);
void add_merge(const Command& program);
void add_plan(const Command& program);
void add_report(const Command& program);
void add_sft(const Command& program);
void add_tokenize(const Command& program);
void add_train(const Command& program);
void add_verify(const Command& program);

}  // namespace pare
