#pragma once
#include <string>

namespace pare {

// Commit, compiler, the instruction set that this machine gets, and the devices of this build: a line each.
std::string version();

}  // namespace pare
