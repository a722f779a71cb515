#include "app/console.h"

#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace pare {

Console::Console() : terminal_(isatty(STDOUT_FILENO)) {}

void Console::clear() {
  if (shown_) std::printf("\r%*s\r", static_cast<int>(shown_), "");
  shown_ = 0;
}

void Console::line(const std::string& text) {
  clear();
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void Console::progress(const std::string& stage, int64_t done, int64_t all) {
  if (!terminal_ || all == 0) return;
  constexpr int width = 30;
  const auto filled = static_cast<int>(done * width / all);
  const std::string bar = std::string(filled, '#') + std::string(width - filled, '.');
  const std::string text = format("  %-10s [%s] %lld/%lld", stage.c_str(), bar.c_str(), static_cast<long long>(done),
                                  static_cast<long long>(all));
  clear();
  std::printf("%s", text.c_str());
  std::fflush(stdout);
  shown_ = text.size();
}

std::string format(const char* pattern, ...) {
  va_list args, again;
  va_start(args, pattern);
  va_copy(again, args);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, args)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(args);
  va_end(again);
  return text;
}

std::string human(double count) {
  const char* unit[] = {"", "k", "M", "G", "T", "P", "E"};
  int i = 0;
  while (std::abs(count) >= 999.5 && i < 6) count /= 1000, i++;
  return i == 0 ? format("%.0f", count)
                : format(count < 10    ? "%.2f%s"
                         : count < 100 ? "%.1f%s"
                                       : "%.0f%s",
                         count, unit[i]);
}

std::string duration(double seconds) {
  if (seconds < 60) return format("%.1f s", seconds);
  const auto s = static_cast<long long>(seconds + 0.5);
  if (s < 3600) return format("%lld min %02lld s", s / 60, s % 60);
  return format("%lld h %02lld min", s / 3600, s % 3600 / 60);
}

}  // namespace pare
