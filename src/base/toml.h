// Configurations as a flat list of dotted keys; toml11 parses the files.
#pragma once
#include <string>
#include <vector>

namespace pare {

struct TomlValue {
  // word: a number, a boolean, or the name of a type that configurations do not use ("a date", "a table");
  // text: from a command line, where strings need no quotes, so that the key decides its type
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

// Returns the items of a TOML document in order.  Throws an Error with file and line if it is not TOML.  `where` names
// the document in messages.
std::vector<TomlItem> parse_toml(const std::string& document, const std::string& where);

// One "key=value" of a command line.  Strings may be given without quotes, also inside [a, b].
TomlItem parse_toml_override(const std::string& argument);

// A TOML string that reads back as `text`, which is UTF-8.
std::string toml_quote(const std::string& text);
// Throws Error(usage), naming the first byte that is not UTF-8, if there is one.
void check_utf8(const std::string& text, const std::string& where);

}  // namespace pare
