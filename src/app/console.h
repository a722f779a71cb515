// Output of commands: lines that stay and, on a terminal, a transient status line.  Files and pipes get plain lines
// only.  Control characters in data and file names are escaped.
#pragma once
#include <chrono>
#include <string>

#include "base/text.h"

namespace pare {

class Console {
 public:
  // A quiet one shows results, not what happens on the way; a silent one nothing.
  explicit Console(bool quiet = false, bool silent = false);
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  void line(const std::string& text);    // a line that stays
  void result(const std::string& text);  // one that stays also when quiet: results, the end of a run
  // Lines that fit the terminal, `label` in front of the first and nine blanks in front of the others.
  void paragraph(const std::string& label, const std::string& text);
  // Such a paragraph on standard error, also when quiet; lines of `text` after the first are printed as they are.
  void warning(const std::string& text);
  // A bar, overwritten by what comes next.  `what` is at the same time the stage: within one, not every call is shown.
  void progress(const std::string& what, int64_t done, int64_t all);
  size_t width() const;                 // columns of the terminal; 120 where there is none
  static size_t columns(int terminal);  // of the terminal behind a file descriptor

 private:
  void clear();
  void put(const std::string& text);
  void flush();
  std::string labelled(const std::string& label, const std::string& text) const;
  const bool quiet_, silent_, terminal_;
  size_t shown_ = 0;  // columns of the transient line
  std::string stage_;
  std::chrono::steady_clock::time_point drawn_;
};

// `text` on standard output, as it is; on a terminal with its control characters escaped.
void print(const std::string& text);
// Prints the notes of read_config to standard error.
void print_notes(const std::vector<std::string>& notes);

// Opens those of the three standard streams that are closed on /dev/null: else the next file that is opened, of a run
// perhaps, would get its number and what is printed.
void open_standard_streams();
// Brings what was printed to its place; an Error(Exit::failed) if not all of it could be written.
void finish_output();

}  // namespace pare
