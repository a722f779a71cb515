#include "app/console.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "app/interrupt.h"
#include "base/error.h"

namespace pare {

Console::Console(bool quiet, bool silent)
    : quiet_(quiet || silent), silent_(silent), terminal_(isatty(STDOUT_FILENO)) {}
Console::~Console() { clear(); }

size_t Console::width() const { return terminal_ ? columns(STDOUT_FILENO) : 120; }

size_t Console::columns(int terminal) {
  winsize size{};
  return ioctl(terminal, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

void Console::flush() {
  if (std::fflush(stdout) != 0 && errno == EPIPE) ask_to_stop();  // other errors: finish_output()
}

void Console::clear() {
  if (shown_) std::printf("\r%*s\r", static_cast<int>(shown_), "");
  shown_ = 0;
  flush();
}

void Console::put(const std::string& text) {
  if (silent_) return;
  clear();
  stage_.clear();
  std::printf("%s\n", text.c_str());
  flush();
}

void Console::result(const std::string& text) { put(printable(text)); }
void Console::line(const std::string& text) {
  if (!quiet_) result(text);
}

std::string Console::labelled(const std::string& label, const std::string& text) const {
  const std::string blanks(9, ' '), lines = wrapped(printable(text), std::min<size_t>(width(), 120), blanks);
  return pad_right(label, blanks.size()) + lines.substr(blanks.size(), lines.size() - blanks.size() - 1);
}
void Console::paragraph(const std::string& label, const std::string& text) {
  if (!quiet_) put(labelled(label, text));
}
void Console::warning(const std::string& text) {
  if (silent_) return;
  clear();
  const size_t end = std::min(text.find('\n'), text.size());
  std::fprintf(stderr, "%s%s\n", labelled("warning", text.substr(0, end)).c_str(),
               printable_lines(text.substr(end)).c_str());
}

void Console::progress(const std::string& what, int64_t done, int64_t all) {
  if (!terminal_ || quiet_ || all == 0) return;
  // Twenty times a second is enough for the eye, and over a slow line for the run.
  const auto now = std::chrono::steady_clock::now();
  if (what == stage_ && done < all && now - drawn_ < std::chrono::milliseconds(50)) return;
  stage_ = what;
  drawn_ = now;
  const std::string count = format("%lld/%lld", static_cast<long long>(done), static_cast<long long>(all));
  // The last column stays free: a character there makes some terminals wrap.
  const size_t room = width() - 1, rest = display_width(what) + count.size() + 4;
  const size_t bar = room > rest + 8 ? std::min<size_t>(room - rest, 30) : 0;
  const size_t filled = bar * static_cast<size_t>(done) / static_cast<size_t>(all);
  std::string text = what + " ";
  if (bar) text += "[" + std::string(filled, '#') + std::string(bar - filled, '.') + "] ";
  text = cut(text + count, room);
  const size_t columns = display_width(text);
  std::printf("\r%s%*s", text.c_str(), static_cast<int>(std::max(shown_, columns) - columns), "");
  flush();
  shown_ = columns;
}

void print(const std::string& text) {
  static const bool terminal = isatty(STDOUT_FILENO);
  const std::string shown = terminal ? printable_lines(text) : text;
  std::fwrite(shown.data(), 1, shown.size(), stdout);
}

void print_notes(const std::vector<std::string>& notes) {
  for (const std::string& n : notes) std::fprintf(stderr, "note     %s\n", printable(n).c_str());
}

void open_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF) open("/dev/null", O_RDWR);  // the lowest number that is free: fd
}

void finish_output() {
  errno = 0;
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  throw Error(Exit::failed,
              cat("standard output could not be written", errno ? cat(": ", std::strerror(errno)) : "", "; it is cut"));
}

}  // namespace pare
