// The answer when memory does not suffice: the total, the memory that there is, and settings that fit.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "run/session.h"

namespace pare {

// Memory for arenas.
struct Room {
  size_t bytes = 0;          // 0: unknown
  std::string where;         // "of this machine", "free on this device"; why it is unknown
  std::string size() const;  // "80.0GB (80000000000) of --memory"
};
// On `table`; of the host, as much as the limits of the process leave (ulimit -v, ulimit -d).
Room room_on(const Table& table);

// Halves `value` until `fits` holds, then returns the largest value below it that fits; 0: none does.
int64_t largest_that_fits(int64_t value, const std::function<bool(int64_t)>& fits);

// The same with the first choice of Fitted that fits: nothing recomputed, one block, two and so on, then fewer rows of
// logits; the last if none does, or without `fits`.  What the keys state is left alone.
Config fit_memory(Config config, const std::function<bool(const Config&)>& fits = {});
// "the learner recomputes 12 of 28 blocks to fit the 80.0GB (80000000000) of --memory"; empty: the keys state all.
std::string fitted_text(const Config& config, const Room& room);

// Settings of which each alone makes `config` fit, found by planning; if none does, several together.  `sizes`: keys of
// numbers, for which the largest value that fits is found.  `choices`: lists of settings ("key=value key=value"), of
// each of which the first that fits is named.  `fits` may throw an Error for a configuration that no run can have.
std::vector<std::string> what_fits(const Config& config, const std::vector<std::string>& sizes,
                                   const std::vector<std::vector<std::string>>& choices,
                                   const std::function<bool(const Config&)>& fits);

// "a step can take 3.0GB, 1.0GB (1000000000) more than the 2.0GB (2000000000) of this machine; with one of these it
// fits: ...".  `what`: "a step can take".
std::string excess_text(const std::string& what, size_t needed, const Room& room, const std::vector<std::string>& fits);
// Throws Error(memory): that text, with the arenas.
[[noreturn]] void does_not_fit(const std::string& what, const ArenaLimits& needed, const Room& room,
                               const std::vector<std::string>& fits);

}  // namespace pare
