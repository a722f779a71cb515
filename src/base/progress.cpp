#include "base/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <vector>

#include "base/text.h"

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
  activities().open.push_back(this);
  activities().begun++;
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

ProgressLine::ProgressLine(std::string what, int64_t all, bool ends)
    : what_(std::move(what)),
      all_(all),
      terminal_(isatty(STDERR_FILENO)),
      ends_(ends),
      start_(Clock::now()),
      drawn_(start_) {}

ProgressLine::~ProgressLine() {
  hide();
  if (quiet || !ends_ || seconds() < 1) return;
  std::fprintf(stderr, "%s: %s %.1f s\n", what_.c_str(), whole_ ? "done in" : "stopped after", seconds());
}

void ProgressLine::hide() {
  if (shown_ > 0) std::fprintf(stderr, "\r%*s\r", static_cast<int>(shown_), "");
  shown_ = 0;
}

void ProgressLine::done(int64_t n, const std::string& note) {
  whole_ = n == all_;
  const auto now = Clock::now();
  const auto wait = !terminal_         ? std::chrono::milliseconds(10'000)
                    : drawn_ == start_ ? std::chrono::milliseconds(1'000)
                                       : std::chrono::milliseconds(100);
  if (quiet || whole_ || now - drawn_ < wait) return;
  drawn_ = now;
  const double percent = 100 * static_cast<double>(n) / static_cast<double>(all_);
  std::string line = format("%s: %3.0f %%%s%s", what_.c_str(), percent, note.empty() ? "" : ", ", note.c_str());
  if (!terminal_) return static_cast<void>(std::fprintf(stderr, "%s\n", line.c_str()));
  line.resize(std::min<size_t>(line.size(), 79));
  const size_t before = shown_;
  shown_ = line.size();
  std::fprintf(stderr, "\r%s%*s", line.c_str(), static_cast<int>(std::max(before, shown_) - shown_), "");
}

}  // namespace pare
