#include "base/toml.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <toml.hpp>
#include <utility>

#include "base/error.h"

namespace pare {
namespace {

// The shortest text that reads back as x and is not that of an integer.
std::string number_text(double x) {
  std::array<char, 32> s;
  const std::string t(s.data(), std::to_chars(s.data(), s.data() + s.size(), x).ptr);
  return t.find_first_of(".ein") == std::string::npos ? t + ".0" : t;
}

TomlValue value_of(const toml::value& v, const std::string& where) {
  if (v.is_string()) return {toml::get<std::string>(v), TomlValue::Kind::string};
  const auto word = [](std::string text) { return TomlValue{std::move(text), TomlValue::Kind::word}; };
  if (v.is_integer()) {
    const int64_t i = v.as_integer();
    const std::string text = std::to_string(i);
    // What does not fit is read as the nearest that does.
    const bool extreme = i == std::numeric_limits<int64_t>::max() || i == std::numeric_limits<int64_t>::min();
    const toml::source_location at = v.location();
    const std::string written = extreme ? at.line_str().substr(at.column() - 1) : text;
    if (!written.starts_with(text) || std::isdigit(static_cast<unsigned char>(written[text.size()])))
      fail(where, ": an integer of more than 64 bits");
    return word(text);
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

using Leaf = std::pair<std::string, const toml::value*>;
void flatten(const toml::value& table, const std::string& prefix, std::vector<Leaf>& leaves) {
  for (const auto& [name, v] : table.as_table())
    if (v.is_table())
      flatten(v, prefix + name + ".", leaves);
    else
      leaves.emplace_back(prefix + name, &v);
}

toml::value read(const std::string& document) {
  std::istringstream stream(document);
  return toml::parse(stream);
}

// In one line what the reader says in several: "[error] function: what" and, under a line of the document, "^--- why".
std::string one_line(const std::string& report) {
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

std::string trimmed(std::string_view s) {
  const size_t begin = s.find_first_not_of(' ');
  return begin == std::string_view::npos ? "" : std::string(s.substr(begin, s.find_last_not_of(' ') + 1 - begin));
}

// A value that is complete TOML and a string or an array, or nothing.
std::optional<TomlItem> quoted_or_array(const std::string& value) {
  try {
    const toml::value table = read("value = " + value);
    const toml::value& v = table.at("value");
    if (table.size() == 1 && (v.is_string() || v.is_array())) return item_of("", v, value);
  } catch (const toml::syntax_error&) {
  }
  return std::nullopt;
}

}  // namespace

std::vector<TomlItem> parse_toml(const std::string& document, const std::string& where) {
  toml::value table;
  try {
    table = read(document);
  } catch (const toml::syntax_error& e) {
    // The end of the document is a line of its own to the reader.
    const auto lines = 1 + std::count(document.begin(), document.end(), '\n');
    fail(where, ":", std::min<int64_t>(e.location().line(), lines), ": ", one_line(e.what()));
  }
  std::vector<Leaf> leaves;
  flatten(table, "", leaves);
  const auto begin = [](const Leaf& leaf) {
    const toml::source_location at = leaf.second->location();
    return std::pair(at.line(), at.column());
  };
  std::sort(leaves.begin(), leaves.end(), [&](const Leaf& a, const Leaf& b) { return begin(a) < begin(b); });
  std::vector<TomlItem> items;
  for (const Leaf& leaf : leaves)
    items.push_back(item_of(leaf.first, *leaf.second, cat(where, ":", begin(leaf).first)));
  return items;
}

TomlItem parse_toml_override(const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) fail("expected group.key=value, found ", toml_quote(argument));
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
