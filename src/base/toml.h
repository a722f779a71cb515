// Configurations as a flat list of dotted keys; toml11 parses the files.
#pragma once
#include <string>
#include <vector>

namespace pare {

struct TomlValue {
  // word: a number, a boolean, or the name of what configurations do not use ("a date", "a table");
  // text: of a command line, where quotes are not needed, so that the key decides what it is
  enum class Kind { string, word, text };
  std::string text;  // of a string: without quotes, escapes resolved
  Kind kind;
};

struct TomlItem {
  std::string key;  // tables included: "actor.optim.lr"
  bool array = false;
  std::vector<TomlValue> values;  // one unless `array`
  std::string where;              // "FILE:LINE", for messages
};

// The items of a TOML document in their order.  What is not TOML is an Error with file and line.  `where` names the
// document in messages.
std::vector<TomlItem> parse_toml(const std::string& document, const std::string& where);

// One "key=value" of a command line.  Strings may be given without quotes, also inside [a, b].
TomlItem parse_toml_override(const std::string& argument);

std::string toml_quote(const std::string& text);  // a TOML string that reads back as `text`

}  // namespace pare
