// pare tokenize: text to token ids and back, a line at a time.
#include <cstdio>
#include <iostream>
#include <memory>

#include "app/commands.h"
#include "base/json.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/unicode.h"

namespace pare {

namespace {

using Json = nlohmann::json;

struct Options {
  std::string tokenizer;
  bool decode = false, special = false;
};

std::string decode_line(const Tokenizer& tokenizer, const Json& ids, bool special, const std::string& where) {
  if (!ids.is_array()) fail(where, ": is of type ", ids.type_name(), ", expected a list of ids");
  std::string text;
  for (const Json& value : ids) {
    if (!value.is_number_integer() || value < 0 || value >= tokenizer.vocab_size())
      fail(where, ": ", value.dump(), " is no id; the tokenizer has ", tokenizer.vocab_size(), " tokens");
    const auto id = value.get<int32_t>();
    if (special || !tokenizer.is_special(id)) text += tokenizer.piece(id);
  }
  return Json(lossy_utf8(text)).dump(-1, ' ', true);  // ASCII: some readers take U+2028 for the end of the line
}

std::string encode_line(const Tokenizer& tokenizer, const Json& text, bool special, const std::string& where) {
  if (!text.is_string()) fail(where, ": is of type ", text.type_name(), ", expected a string");
  const auto& s = text.get_ref<const std::string&>();
  return Json(special ? tokenizer.encode_prompt(s) : tokenizer.encode(s)).dump();
}

void tokenize(const Options& o) {
  const auto tokenizer = make_tokenizer(o.tokenizer);
  std::string line;
  for (int64_t number = 1; std::getline(std::cin, line); number++) {
    const std::string where = cat("line ", number);
    const Json row = parse_json(line, where);
    line = o.decode ? decode_line(*tokenizer, row, o.special, where) : encode_line(*tokenizer, row, o.special, where);
    line += '\n';
    std::fwrite(line.data(), 1, line.size(), stdout);
  }
}

}  // namespace

void add_tokenize(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand("tokenize", "text to token ids: a JSON string a line in, a list of ids a line out");
  c->add_option("--tokenizer", o->tokenizer, "ssa, a tokenizer file or a folder with one")->required();
  c->add_flag("--decode", o->decode, "the other way: lists of ids in, strings out");
  c->add_flag("--special", o->special, "put BOS in front; with --decode: show special tokens");
  c->callback([o] { tokenize(*o); });
}

}  // namespace pare
