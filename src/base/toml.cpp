#include "base/toml.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <string_view>

#include "base/error.h"

namespace pare {
namespace {

bool is_key_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
}

// A cursor over the document; every message starts with FILE:LINE.
class Reader {
 public:
  Reader(std::string_view text, std::string where, bool command_line)
      : text_(text), where_(std::move(where)), command_line_(command_line) {}

  bool at_end() const { return i_ == text_.size(); }
  char peek() const { return at_end() ? '\n' : text_[i_]; }
  void advance() {
    if (text_[i_++] == '\n') line_++;
  }
  std::string place() const { return command_line_ ? where_ : cat(where_, ":", line_); }
  template <class... Parts>
  [[noreturn]] void error(const Parts&... parts) const {
    fail(place(), ": ", parts...);
  }
  // What stands here, for messages.
  std::string found() const {
    if (at_end()) return command_line_ ? "the end" : "the end of the file";
    return peek() == '\n' ? "the end of the line" : cat("'", peek(), "'");
  }

  void skip_blanks() {
    while (!at_end() && (peek() == ' ' || peek() == '\t' || peek() == '\r')) advance();
  }
  // Blanks, comments and ends of lines.
  void skip_space() {
    for (;;) {
      skip_blanks();
      if (!at_end() && peek() == '#' && !command_line_)
        while (!at_end() && peek() != '\n') advance();
      if (at_end() || peek() != '\n') return;
      advance();
    }
  }
  void end_of_line() {
    skip_blanks();
    if (!at_end() && peek() == '#' && !command_line_)
      while (!at_end() && peek() != '\n') advance();
    if (!at_end() && peek() != '\n') error("expected the end of the line after the value, found ", found());
  }

  std::string key() {
    const size_t begin = i_;
    while (!at_end() && is_key_char(peek())) advance();
    const std::string k(text_.substr(begin, i_ - begin));
    if (k.empty() || k.front() == '.' || k.back() == '.' || k.find("..") != std::string::npos)
      error("expected a key of letters, digits, _ and -, found ", k.empty() ? found() : toml_quote(k));
    return k;
  }

  TomlValue quoted() {
    const char quote = peek();
    std::string s;
    for (advance(); at_end() || peek() != quote; advance()) {
      if (at_end() || peek() == '\n') error("the string that starts with ", quote, s, " is not closed on its line");
      if (peek() != '\\' || quote == '\'') {
        s += peek();
        continue;
      }
      advance();
      static constexpr std::string_view escapes = "\"\\nt", meaning = "\"\\\n\t";
      const size_t e = at_end() ? std::string_view::npos : escapes.find(peek());
      if (e == std::string_view::npos) error("expected one of \\\" \\\\ \\n \\t in a string, found \\", found());
      s += meaning[e];
    }
    advance();
    return {std::move(s), TomlValue::Kind::string};
  }

  // Up to a character of `stop` or, in a file, a blank or a comment.
  TomlValue word(std::string_view stop) {
    const size_t begin = i_;
    while (!at_end() && peek() != '\n' && stop.find(peek()) == std::string_view::npos &&
           (command_line_ || (peek() != '#' && peek() != ' ' && peek() != '\t' && peek() != '\r')))
      advance();
    std::string s(text_.substr(begin, i_ - begin));
    if (command_line_) {
      while (!s.empty() && s.back() == ' ') s.pop_back();
      return {std::move(s), TomlValue::Kind::text};
    }
    if (s.size() > 1 && s[0] == '+' && s[1] != '-') s.erase(0, 1);
    double number;
    const auto [end, code] = std::from_chars(s.data(), s.data() + s.size(), number);
    if (s != "true" && s != "false" && (code != std::errc() || end != s.data() + s.size()))
      error("expected a number, true, false, a \"string\" or an [array], found ", s.empty() ? found() : s);
    return {std::move(s), TomlValue::Kind::word};
  }

  void value(TomlItem& item) {
    item.where = place();
    skip_blanks();
    if (peek() == '"' || peek() == '\'') return item.values.push_back(quoted());
    if (peek() != '[') return item.values.push_back(word(""));
    item.array = true;
    for (advance();;) {
      skip_space();
      if (at_end()) error("expected ] at the end of the array, found ", found());
      if (peek() == ']') break;
      if (peek() == '[' || peek() == '{') error("arrays inside arrays and tables in line are not used here");
      item.values.push_back(peek() == '"' || peek() == '\'' ? quoted() : word(",]"));
      skip_space();
      if (at_end() || (peek() != ',' && peek() != ']')) error("expected , or ] in the array, found ", found());
      if (peek() == ',') advance();
    }
    advance();
  }

 private:
  std::string_view text_;
  std::string where_;
  bool command_line_;
  size_t i_ = 0;
  int line_ = 1;
};

}  // namespace

std::vector<TomlItem> parse_toml(const std::string& document, const std::string& where) {
  Reader in(document, where, false);
  std::vector<TomlItem> items;
  std::set<std::string> seen;
  std::string section;
  for (in.skip_space(); !in.at_end(); in.skip_space()) {
    if (in.peek() == '[') {
      in.advance();
      if (in.peek() == '[') in.error("arrays of tables ([[...]]) are not used here");
      section = in.key() + ".";
      if (in.peek() != ']') in.error("expected ] after the section's name, found ", in.found());
      in.advance();
      in.end_of_line();
      continue;
    }
    TomlItem item;
    item.key = section + in.key();
    in.skip_blanks();
    if (in.peek() != '=') in.error("expected = after the key ", item.key, ", found ", in.found());
    in.advance();
    in.value(item);
    in.end_of_line();
    if (!seen.insert(item.key).second) fail(item.where, ": the key ", item.key, " is given twice in this file");
    items.push_back(std::move(item));
  }
  return items;
}

TomlItem parse_toml_override(const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) fail("expected group.key=value, found ", toml_quote(argument));
  Reader in(std::string_view(argument).substr(equals + 1), argument, true);
  TomlItem item;
  item.key = argument.substr(0, equals);
  in.value(item);
  in.end_of_line();
  item.where = "command line";
  return item;
}

std::string toml_quote(const std::string& text) {
  std::string s = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      s += '\\', s += c;
    else if (c == '\n')
      s += "\\n";
    else if (c == '\t')
      s += "\\t";
    else
      s += c;
  }
  return s + '"';
}

}  // namespace pare
