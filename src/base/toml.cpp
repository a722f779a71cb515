#include "base/toml.h"

#include <toml++/toml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string_view>
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

TomlValue value_of(const toml::node& node) {
  if (const auto s = node.value_exact<std::string>()) return {*s, TomlValue::Kind::string};
  const auto word = [](std::string text) { return TomlValue{std::move(text), TomlValue::Kind::word}; };
  if (const auto i = node.value_exact<int64_t>()) return word(std::to_string(*i));
  if (const auto d = node.value_exact<double>()) return word(number_text(*d));
  if (const auto b = node.value_exact<bool>()) return word(*b ? "true" : "false");
  return word(node.is_table() ? "a table" : node.is_array() ? "an array" : "a date or time");
}

TomlItem item_of(std::string key, const toml::node& node, std::string where) {
  TomlItem item{std::move(key), node.is_array(), {}, std::move(where)};
  if (const toml::array* array = node.as_array())
    for (const toml::node& element : *array) item.values.push_back(value_of(element));
  else
    item.values.push_back(value_of(node));
  return item;
}

using Leaf = std::pair<std::string, const toml::node*>;
void flatten(const toml::table& table, const std::string& prefix, std::vector<Leaf>& leaves) {
  for (auto&& [name, node] : table) {
    const std::string key = prefix + std::string(std::string_view(name));
    if (const toml::table* inner = node.as_table())
      flatten(*inner, key + ".", leaves);
    else
      leaves.emplace_back(key, &node);
  }
}

std::string trimmed(std::string_view s) {
  const size_t begin = s.find_first_not_of(' ');
  return begin == std::string_view::npos ? "" : std::string(s.substr(begin, s.find_last_not_of(' ') + 1 - begin));
}

// A value that is complete TOML and a string or an array, or nothing.
std::optional<TomlItem> quoted_or_array(const std::string& value) {
  try {
    const toml::table table = toml::parse("value = " + value);
    const toml::node* node = table.get("value");
    if (table.size() == 1 && (node->is_string() || node->is_array())) return item_of("", *node, "");
  } catch (const toml::parse_error&) {
  }
  return std::nullopt;
}

}  // namespace

std::vector<TomlItem> parse_toml(const std::string& document, const std::string& where) {
  toml::table table;
  try {
    table = toml::parse(document);
  } catch (const toml::parse_error& e) {
    fail(where, ":", e.source().begin.line, ": ", e.description());
  }
  std::vector<Leaf> leaves;
  flatten(table, "", leaves);
  const auto begin = [](const Leaf& leaf) { return leaf.second->source().begin; };
  std::sort(leaves.begin(), leaves.end(), [&](const Leaf& a, const Leaf& b) { return begin(a) < begin(b); });
  std::vector<TomlItem> items;
  for (const Leaf& leaf : leaves) items.push_back(item_of(leaf.first, *leaf.second, cat(where, ":", begin(leaf).line)));
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
