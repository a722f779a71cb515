#include "base/toml.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <toml.hpp>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace pare {
namespace {

// The shortest text that reads back as x and is not that of an integer.
std::string number_text(double x) {
  std::array<char, 32> s;
  const std::string t(s.data(), std::to_chars(s.data(), s.data() + s.size(), x).ptr);
  return t.find_first_of(".ein") == std::string::npos ? t + ".0" : t;
}

#if TOML11_VERSION_MAJOR >= 4

size_t offset_of(const toml::value& v) { return v.location().first_offset(); }

size_t line_of(const toml::exception& e) {
  const auto* error = dynamic_cast<const toml::syntax_error*>(&e);
  return error && !error->errors().empty() ? error->errors()[0].locations().at(0).first.first_line_number() : 1;
}

// toml11 refuses integers of more than 64 bits.
bool fits(const toml::value&) { return true; }

// "function: what", and why.
std::string one_line(const toml::exception& e) {
  const auto* error = dynamic_cast<const toml::syntax_error*>(&e);
  if (!error || error->errors().empty()) return e.what();
  const std::string &what = error->errors()[0].title(), &why = error->errors()[0].locations().at(0).second;
  const size_t function = what.starts_with("toml::") ? what.find(' ') + 1 : 0;
  return cat(what.substr(function), why.empty() ? "" : ": ", why);
}

#else

// The region of a value: its location() would count the lines before it and copy its own, whatever their length.
const toml::detail::region& region_of(const toml::value& v) {
  const auto* region = dynamic_cast<const toml::detail::region*>(toml::detail::get_region(v));
  expect(region != nullptr, "a value of TOML without its place");
  return *region;
}

size_t offset_of(const toml::value& v) { return static_cast<size_t>(region_of(v).first() - region_of(v).begin()); }

size_t line_of(const toml::exception& e) { return e.location().line(); }

// The integer, as it is written, fits 64 bits.
bool fits(const toml::value& v) {
  std::string digits = region_of(v).str();
  std::erase(digits, '_');
  if (digits.starts_with('+')) digits.erase(0, 1);
  const int base = digits.starts_with("0x") ? 16 : digits.starts_with("0o") ? 8 : digits.starts_with("0b") ? 2 : 10;
  int64_t i = 0;
  return std::from_chars(digits.data() + (base == 10 ? 0 : 2), digits.data() + digits.size(), i, base).ec ==
         std::errc{};
}

// toml11's message in one line: it has several, "[error] function: what" and, below a line of the document, "^--- why".
std::string one_line(const toml::exception& e) {
  const std::string report = e.what();
  std::string what = report.substr(0, report.find('\n'));
  if (const size_t function = what.find("toml::"); function != std::string::npos)
    what = what.substr(what.find(' ', function) + 1);
  else if (const size_t error = what.find("] "); error != std::string::npos)
    what = what.substr(error + 2);
  const size_t mark = report.rfind("^--- ");
  if (mark == std::string::npos) return what;
  const std::string why = report.substr(mark + 5, report.find('\n', mark) - mark - 5);
  return what.empty() ? why : what + ": " + why;
}

#endif

TomlValue value_of(const toml::value& v, const std::string& where) {
  if (v.is_string()) return {toml::get<std::string>(v), TomlValue::Kind::string};
  const auto word = [](std::string text) { return TomlValue{std::move(text), TomlValue::Kind::word}; };
  if (v.is_integer()) {
    const int64_t i = v.as_integer();
    // toml11 reads an integer that does not fit as the nearest one that does.
    const bool extreme = i == std::numeric_limits<int64_t>::max() || i == std::numeric_limits<int64_t>::min();
    if (extreme && !fits(v)) fail(where, ": an integer of more than 64 bits");
    return word(std::to_string(i));
  }
  if (v.is_floating()) return word(number_text(v.as_floating()));
  if (v.is_boolean()) return word(v.as_boolean() ? "true" : "false");
  return word(v.is_table() ? "a table" : v.is_array() ? "an array" : "a date or time");
}

TomlItem item_of(std::string key, const toml::value& v, std::string where) {
  TomlItem item{std::move(key), v.is_array(), {}, std::move(where)};
  if (v.is_array())
    for (const toml::value& element : v.as_array()) item.values.push_back(value_of(element, item.where));
  else
    item.values.push_back(value_of(v, item.where));
  return item;
}

struct Leaf {
  std::string key;
  const toml::value* value;
  size_t offset;  // in the document
};
void flatten(const toml::value& table, const std::string& prefix, std::vector<Leaf>& leaves) {
  for (const auto& [name, v] : table.as_table())
    if (v.is_table())
      flatten(v, prefix + name + ".", leaves);
    else
      leaves.push_back({prefix + name, &v, offset_of(v)});
}

// Tables or arrays are nested more than 64 deep, by brackets or by the dots of a key.
bool too_deep(const std::string& document) {
  constexpr int most = 64;
  int brackets = 0, dots = 0;
  for (size_t i = 0; i < document.size(); i++) {
    const char c = document[i];
    if (c == '#') {
      i = std::min(document.find('\n', i), document.size()) - 1;
    } else if (c == '"' || c == '\'') {  // to the end of the string
      const std::string quotes(document.compare(i, 3, std::string(3, c)) == 0 ? 3 : 1, c);
      for (i += quotes.size(); i < document.size() && document.compare(i, quotes.size(), quotes) != 0; i++) {
        if (quotes.size() == 1 && document[i] == '\n') break;
        i += c == '"' && document[i] == '\\';
      }
      i += quotes.size() - 1;
    }
    brackets += c == '[' || c == '{';
    brackets -= c == ']' || c == '}';
    dots = c == '\n' || c == ',' || c == '=' ? 0 : dots + (c == '.');
    if (brackets > most || dots > most) return true;
  }
  return false;
}

// Looks through all of a line for the comments of each of its values.
void check_line_lengths(const std::string& document, const std::string& where) {
  constexpr size_t most = 100'000'000;  // bytes that it looks at: a second
  size_t work = 0, number = 1;
  for (size_t begin = 0, end = 0; begin < document.size(); begin = end + 1, number++) {
    end = std::min(document.find('\n', begin), document.size());
    const auto line = std::string_view(document).substr(begin, end - begin);
    work += line.size() * static_cast<size_t>(std::count(line.begin(), line.end(), ','));
    if (work > most)
      fail(where, ":", number, ": too many values on lines of ", line.size(),
           " bytes; write each value on a line of its own");
  }
}

// Refuses what toml11 cannot handle: it recurses, takes quadratic time, and reads past the end of strings that are not
// UTF-8.
toml::value read(const std::string& document, const std::string& where) {
  const size_t good = utf8_bytes(document);
  if (good < document.size())
    fail(where, ":", 1 + std::count(document.begin(), document.begin() + static_cast<std::ptrdiff_t>(good), '\n'),
         format(": the byte 0x%02x is not UTF-8", static_cast<unsigned char>(document[good])));
  if (too_deep(document)) fail(where, ": nested too deeply");
  check_line_lengths(document, where);
  std::istringstream stream(document);
  return toml::parse(stream);
}

std::string trimmed(std::string_view s) {
  const size_t begin = s.find_first_not_of(' ');
  return begin == std::string_view::npos ? "" : std::string(s.substr(begin, s.find_last_not_of(' ') + 1 - begin));
}

// A value that is complete TOML and a string or an array, or nothing.
std::optional<TomlItem> quoted_or_array(const std::string& value) {
  if (!value.starts_with('"') && !value.starts_with('\'') && !value.starts_with('[')) return std::nullopt;
  try {
    const toml::value table = read("value = " + value, value);
    const toml::value& v = table.at("value");
    if (table.size() == 1 && (v.is_string() || v.is_array())) return item_of("", v, value);
  } catch (const toml::exception&) {
  }
  return std::nullopt;
}

}  // namespace

std::vector<TomlItem> parse_toml(const std::string& document, const std::string& where) {
  toml::value table;
  try {
    table = read(document, where);
  } catch (const toml::exception& e) {
    // toml11 counts the end of the document as a line.
    const auto lines = 1 + std::count(document.begin(), document.end(), '\n');
    fail(where, ":", std::min<int64_t>(static_cast<int64_t>(line_of(e)), lines), ": ", one_line(e));
  }
  std::vector<Leaf> leaves;
  flatten(table, "", leaves);
  std::sort(leaves.begin(), leaves.end(), [](const Leaf& a, const Leaf& b) { return a.offset < b.offset; });
  std::vector<TomlItem> items;
  size_t line = 1, counted = 0;
  for (Leaf& leaf : leaves) {
    line += static_cast<size_t>(std::count(document.data() + counted, document.data() + leaf.offset, '\n'));
    counted = leaf.offset;
    items.push_back(item_of(std::move(leaf.key), *leaf.value, cat(where, ":", line)));
  }
  return items;
}

TomlItem parse_toml_override(const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) fail("expected group.key=value, found ", toml_quote(argument));
  check_utf8(argument.substr(0, equals), "command line");
  check_utf8(argument.substr(equals + 1), cat("command line: ", argument.substr(0, equals)));
  const std::string value = trimmed(std::string_view(argument).substr(equals + 1));
  TomlItem item;
  if (auto toml = quoted_or_array(value)) {
    item = std::move(*toml);
  } else if (value.starts_with('[')) {
    if (!value.ends_with(']')) fail(argument, ": expected ] at the end of the array");
    item.array = true;
    if (value.find_first_of("\"'") != std::string::npos) fail(argument, ": quote all strings of the array or none");
    std::stringstream list(value.substr(1, value.size() - 2));
    for (std::string element; std::getline(list, element, ',');)
      item.values.push_back({trimmed(element), TomlValue::Kind::text});
  } else if (value.starts_with('"') || value.starts_with('\'')) {
    fail(argument, ": the quoted string is not complete");
  } else {
    item.values.push_back({value, TomlValue::Kind::text});
  }
  item.key = argument.substr(0, equals);
  item.where = "command line";
  return item;
}

std::string toml_quote(const std::string& text) {
  std::string s = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      s += '\\';
      s += c;
    } else if (c == '\n')
      s += "\\n";
    else if (c == '\t')
      s += "\\t";
    else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      s += format("\\u%04X", c);
    else
      s += c;
  }
  return s + '"';
}

void check_utf8(const std::string& text, const std::string& where) {
  const size_t good = utf8_bytes(text);
  if (good == text.size()) return;
  fail(where, ": byte ", good + 1, format(" is 0x%02x", static_cast<unsigned char>(text[good])),
       ", which is not UTF-8: no configuration file can hold it");
}

}  // namespace pare
