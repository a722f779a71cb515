// Progress of long work, on stderr.  Work shorter than a second shows nothing.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace pare {

// Work of the host that may take long and calls no op: grading, reading, hashing, flushing to the disk.  Ranks that
// wait for this one count it as progress, and name it.  From any thread.
class Activity {
 public:
  explicit Activity(std::string what);  // "hashing models/mine/model.safetensors"
  ~Activity();
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

  static std::string current();  // the latest that has not ended; empty: none
  static uint64_t begun();       // how many have begun in this process

 private:
  const std::string what_;
};

class ProgressLine {
 public:
  // "loading models/mine".  `ends`: at its end it prints how long it took.
  ProgressLine(std::string what, int64_t all, bool ends = true);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // Work done so far, of `all`, with a note about it.  On a terminal the line, at most 79 columns, is overwritten;
  // elsewhere one is printed every ten seconds.
  void done(int64_t n, const std::string& note = "");
  void hide();  // erases that line of a terminal, for other output
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  inline static bool quiet = false;  // nothing is shown

 private:
  using Clock = std::chrono::steady_clock;
  const std::string what_;
  const int64_t all_;
  const bool terminal_, ends_;
  const Clock::time_point start_;
  Clock::time_point drawn_;
  bool whole_ = false;
  size_t shown_ = 0;  // columns of the line that will be overwritten
};

}  // namespace pare
