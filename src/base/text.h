// Text for people: numbers, and lines that fit a terminal.  Text is UTF-8; widths are terminal columns.
#pragma once
#include <string>
#include <vector>

namespace pare {

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
// As a stream prints it, but a NaN has no sign: that bit only tells which instruction made it.
std::string number_text(double x);
std::string human(double count);       // 1234567 -> "1.23M"
std::string duration(double seconds);  // "12.3 s", "4 min 05 s"
std::string clock(double seconds);     // "0:12", "4:05", "1:04:05"

// Columns that `text` takes in a terminal: none for combining characters, two for East Asian wide ones and most emoji.
// A byte that is not UTF-8 counts as one.
size_t display_width(const std::string& text);

// Bytes of `text` before the first that is not UTF-8; all of them if there is none.
size_t utf8_bytes(const std::string& text);

// `text` as one line that is safe to print: control characters and changes of writing direction become \n, \t, \x1b or
// \u{202e}, bytes that are not UTF-8 become \xff.
std::string printable(const std::string& text);
// The same for a text of several lines: \n and \t stay.
std::string printable_lines(const std::string& text);

// `text` where it fits into `width` columns; else its ends around " … " in `width` columns or one less, cut between
// characters.  Expects a printable line and a width of at least 5.
std::string shortened(const std::string& text, size_t width);
// The beginning of a printable line: `width` columns, or one less if a wide character does not fit.
std::string cut(const std::string& text, size_t width);

// Blanks before or after a text up to `width` columns; a longer text stays as it is.
std::string pad_left(const std::string& text, size_t width);
std::string pad_right(const std::string& text, size_t width);

// Lines of at most `width` columns broken at blanks, each with `indent` in front; a longer word has its own line.
std::string wrapped(const std::string& text, size_t width, const std::string& indent);

// Rows under a line of titles, right-aligned, a blank between columns.
class TextTable {
 public:
  struct Column {
    std::string title;
    size_t width;  // of the cells; at least that of the title is taken.  A longer cell moves the rest of its row.
  };
  explicit TextTable(std::vector<Column> columns);
  std::string header() const;
  std::string row(const std::vector<std::string>& cells) const;  // one per column

 private:
  std::vector<Column> columns_;
};

}  // namespace pare
