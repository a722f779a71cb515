// Lines for people: widths of UTF-8, escapes, cuts.
#include <gtest/gtest.h>

#include <limits>

#include "base/text.h"

namespace pare::test {
namespace {

TEST(Text, Numbers) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(number_text(nan), "nan");
  EXPECT_EQ(number_text(-nan), "nan");
  EXPECT_EQ(number_text(-inf), "-inf");
  EXPECT_EQ(number_text(-0.25), "-0.25");
  EXPECT_EQ(human(0), "0");
  EXPECT_EQ(human(999), "999");
  EXPECT_EQ(human(999.6), "1.00k");
  EXPECT_EQ(human(1234567), "1.23M");
  EXPECT_EQ(human(-25300), "-25.3k");
  EXPECT_EQ(human(3.21e11), "321G");
  EXPECT_EQ(duration(9.96), "10.0 s");
  EXPECT_EQ(duration(245), "4 min 05 s");
  EXPECT_EQ(duration(7259), "2 h 00 min");
  EXPECT_EQ(clock(0.4), "0:00");
  EXPECT_EQ(clock(65), "1:05");
  EXPECT_EQ(clock(3599.7), "1:00:00");
  EXPECT_EQ(clock(90061), "25:01:01");
}

TEST(Text, WidthIsInColumns) {
  EXPECT_EQ(display_width(""), 0u);
  EXPECT_EQ(display_width("plain"), 5u);
  EXPECT_EQ(display_width("naïve …"), 7u);
  EXPECT_EQ(display_width("数学"), 4u);
  EXPECT_EQ(display_width("e\u0301"), 1u);  // a combining accent
  EXPECT_EQ(display_width("😀"), 2u);
  // One column for each byte that is not UTF-8: stray, truncated, overlong, a surrogate, beyond Unicode.
  EXPECT_EQ(display_width("\xff"), 1u);
  EXPECT_EQ(display_width("a\xe6\x95"), 3u);
  EXPECT_EQ(display_width("\xc0\xaf"), 2u);
  EXPECT_EQ(display_width("\xed\xa0\x80"), 3u);
  EXPECT_EQ(display_width("\xf4\x90\x80\x80"), 4u);
}

TEST(Text, Utf8) {
  for (const std::string good : {"", "a", "\u00e9\u4e2d\U0001F600"}) EXPECT_EQ(utf8_bytes(good), good.size());
  EXPECT_EQ(utf8_bytes("\u4e2d\xffz"), 3u);
  EXPECT_EQ(utf8_bytes("ab\xe4\xb8"), 2u) << "cut";
}

TEST(Text, PrintableIsOneHarmlessLine) {
  EXPECT_EQ(printable("a b\\frac{1}{2} é 数"), "a b\\frac{1}{2} é 数");
  EXPECT_EQ(printable_lines("a\n\tb\r\x1b[m\n"), "a\n\tb\\r\\x1b[m\n");
  EXPECT_EQ(printable("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(printable(std::string("\0\x1b[31m\x7f", 7)), "\\x00\\x1b[31m\\x7f");
  EXPECT_EQ(printable("\xe6\x95|\xff"), "\\xe6\\x95|\\xff");
  EXPECT_EQ(printable("\u0085\u202e\u2066"), "\\u{85}\\u{202e}\\u{2066}");  // next line, right to left
}

TEST(Text, ShortenedKeepsBothEnds) {
  EXPECT_EQ(shortened("0123456789", 10), "0123456789");
  EXPECT_EQ(shortened("0123456789A", 10), "0123 … 89A");
  EXPECT_EQ(shortened("0123456789A", 5), "0 … A");
  // Never inside a character, never wider than asked for, whatever the text.
  const std::string text = "数学é😀e\u0301 は\xff\xe6難しい xyz 数学é😀e\u0301";
  for (size_t width = 5; width < 40; width++) {
    const std::string s = shortened(text, width);
    EXPECT_LE(display_width(s), width);
    EXPECT_GE(display_width(s) + 2, std::min(width, display_width(text))) << width;
    if (s == text) continue;
    const size_t gap = s.find(" … ");
    ASSERT_NE(gap, std::string::npos) << s;
    EXPECT_EQ(text.substr(0, gap), s.substr(0, gap));
    EXPECT_TRUE(text.ends_with(s.substr(gap + std::string(" … ").size())));
    EXPECT_EQ(display_width(s.substr(0, gap)) + display_width(s.substr(gap)), display_width(s)) << "cut in a character";
    EXPECT_FALSE(s.substr(gap + 5).starts_with("\u0301")) << "an accent without its letter";
  }
}

TEST(Text, CutAndPad) {
  EXPECT_EQ(cut("abc", 3), "abc");
  EXPECT_EQ(cut("abc", 2), "ab");
  EXPECT_EQ(cut("数学", 3), "数");
  EXPECT_EQ(cut("é", 0), "");
  EXPECT_EQ(pad_left("é", 3), "  é");
  EXPECT_EQ(pad_right("数", 3), "数 ");
  EXPECT_EQ(pad_left("long", 2), "long");
}

TEST(Text, Wrapped) {
  EXPECT_EQ(wrapped("one two three", 9, ""), "one two\nthree\n");
  EXPECT_EQ(wrapped("one two three", 9, "  "), "  one two\n  three\n");
  EXPECT_EQ(wrapped("a incomprehensible b", 5, " "), " a\n incomprehensible\n b\n");
  EXPECT_EQ(wrapped("", 5, " "), "");
}

TEST(Text, TablesLineUp) {
  const TextTable table({{"step", 5}, {"reward", 2}, {"é", 3}});
  EXPECT_EQ(table.header(), " step reward   é");
  EXPECT_EQ(table.row({"1", "-", "数"}), "    1      -  数");
  EXPECT_EQ(table.row({"1234567", "0.5", "x"}), "1234567    0.5   x");
  EXPECT_THROW(table.row({"1"}), std::logic_error);
}

}  // namespace
}  // namespace pare::test
