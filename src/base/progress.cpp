#include "base/progress.h"

#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <vector>

namespace pare {

namespace {

struct Activities {
  std::mutex mutex;
  std::vector<const Activity*> open;
  uint64_t begun = 0;
};
Activities& activities() {  // never destroyed: the watcher of the ranks outlives static objects
  static Activities& all = *new Activities;
  return all;
}

}  // namespace

Activity::Activity(std::string what) : what_(std::move(what)) {
  const std::lock_guard lock(activities().mutex);
  activities().open.push_back(this), activities().begun++;
}

Activity::~Activity() {
  const std::lock_guard lock(activities().mutex);
  std::erase(activities().open, this);
}

std::string Activity::current() {
  const std::lock_guard lock(activities().mutex);
  return activities().open.empty() ? "" : activities().open.back()->what_;
}

uint64_t Activity::begun() {
  const std::lock_guard lock(activities().mutex);
  return activities().begun;
}

LongWork::LongWork(std::string what, int64_t all)
    : what_(std::move(what)), all_(all), terminal_(isatty(STDERR_FILENO)), start_(Clock::now()), drawn_(start_) {}

LongWork::~LongWork() {
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  if (quiet || seconds < 1) return;
  std::fprintf(stderr, "%s%s: %s %.1f s%s\n", terminal_ ? "\r" : "", what_.c_str(),
               whole_ ? "done in" : "stopped after", seconds, terminal_ ? "    " : "");
}

void LongWork::done(int64_t n) {
  whole_ = n == all_;
  const auto now = Clock::now();
  const auto wait = !terminal_         ? std::chrono::milliseconds(10'000)
                    : drawn_ == start_ ? std::chrono::milliseconds(1'000)
                                       : std::chrono::milliseconds(100);
  if (quiet || whole_ || now - drawn_ < wait) return;
  drawn_ = now;
  std::fprintf(stderr, "%s%s: %3.0f %%%s", terminal_ ? "\r" : "", what_.c_str(),
               100 * static_cast<double>(n) / static_cast<double>(all_), terminal_ ? "" : "\n");
}

}  // namespace pare
