// The part of TOML that configurations use: sections, dotted keys, strings, numbers, booleans, arrays of them,
// comments. Everything else (tables in line, arrays of tables, dates, quoted keys, multi-line strings) is an error with
// file and line, never ignored.
#pragma once
#include <string>
#include <vector>

namespace pare {

struct TomlValue {
  // word: a bare word of a file, hence a number or a boolean; text: of a command line, where quotes are not needed
  enum class Kind { string, word, text };
  std::string text;  // without quotes, escapes resolved
  Kind kind;
};

struct TomlItem {
  std::string key;  // section included: "actor.optim.lr"
  bool array = false;
  std::vector<TomlValue> values;  // one unless `array`
  std::string where;              // "FILE:LINE", for messages
};

// The items of a document in their order; a key given twice is an error.  `where` names the document in messages.
std::vector<TomlItem> parse_toml(const std::string& document, const std::string& where);

// One "key=value" of a command line.  Strings may be given without quotes, also inside [a, b].
TomlItem parse_toml_override(const std::string& argument);

std::string toml_quote(const std::string& text);  // a TOML string that reads back as `text`

}  // namespace pare
