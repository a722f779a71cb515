// What a run shows: one line a step, and while it works a transient line where there is a terminal.
#pragma once
#include <string>

namespace pare {

class Console {
 public:
  Console();
  void line(const std::string& text);                                  // a line that stays
  void progress(const std::string& stage, int64_t done, int64_t all);  // overwritten by what comes next

 private:
  void clear();
  const bool terminal_;
  size_t shown_ = 0;  // characters of the transient line
};

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string human(double count);       // 1234567 -> "1.23M"
std::string duration(double seconds);  // "12.3 s", "4 min 05 s"

}  // namespace pare
