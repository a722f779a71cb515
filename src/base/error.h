// Errors that a user can act on: they name what was expected, what was found, where, and what to do.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace pare {

// Exit codes of the program (src/app/README.md).
enum class Exit : int { ok = 0, failed = 1, usage = 2, memory = 3, non_finite = 4, interrupted = 75 };

class Error : public std::runtime_error {
 public:
  Error(Exit code, const std::string& what) : std::runtime_error(what), code(code) {}
  Exit code;
};

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream s;
  (s << ... << parts);
  return s.str();
}

// A user's mistake: a file, an option, a configuration.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(Exit::usage, cat(parts...));
}

// A caller's mistake: a contract between two parts of the program is broken.  Always checked.
template <class... Parts>
void expect(bool holds, const Parts&... parts) {
  if (!holds) [[unlikely]]
    throw std::logic_error(cat(parts...));
}

}  // namespace pare
