// The commands of `pare`: each adds its options to the program and runs as the callback of its subcommand.
#pragma once
#include <CLI/CLI.hpp>

namespace pare {

void add_compare(CLI::App& app);
void add_convert(CLI::App& app);
void add_generate(CLI::App& app);
void add_inspect(CLI::App& app);
void add_logprobs(CLI::App& app);
void add_plan(CLI::App& app);
void add_sft(CLI::App& app);
void add_train(CLI::App& app);

}  // namespace pare
