// Progress of long work, on stderr.  Work that ends within a second shows nothing.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace pare {

class LongWork {
 public:
  LongWork(std::string what, int64_t all);  // "loading models/mine"
  ~LongWork();                              // says how long it took
  LongWork(const LongWork&) = delete;
  LongWork& operator=(const LongWork&) = delete;

  // So far, of `all`.  A terminal has a line that is overwritten; elsewhere a line is written every ten seconds.
  void done(int64_t n);

  inline static bool quiet = false;  // nothing is shown

 private:
  using Clock = std::chrono::steady_clock;
  const std::string what_;
  const int64_t all_;
  const bool terminal_;
  const Clock::time_point start_;
  Clock::time_point drawn_;
  bool whole_ = false;
};

}  // namespace pare
