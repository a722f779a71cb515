// The commands of the program; each adds its own subcommand, whose callback does the work.
#pragma once
#include <CLI/CLI.hpp>

namespace pare {

void add_inspect(CLI::App& app);  // what is in a safetensors file or model folder

}  // namespace pare
