// pare tokenize: text and conversations to token ids and back, line by line.
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>

#include "app/commands.h"
#include "app/console.h"
#include "app/prompts.h"
#include "base/hub_cache.h"
#include "base/json.h"
#include "tokenizer/chat.h"
#include "tokenizer/unicode.h"

namespace pare {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string tokenizer, chat_format = "auto", date;
  std::optional<std::string> system;
  bool decode = false, special = false, chat = false, ids = false, no_thinking = false;
};

// ASCII: some readers take U+2028 for the end of the line.
std::string ascii_json(const std::string& text) { return Json(lossy_utf8(text)).dump(-1, ' ', true); }

std::string decode_line(const Tokenizer& tokenizer, const Json& ids, bool special, const std::string& where) {
  if (!ids.is_array()) fail(where, ": is of type ", ids.type_name(), ", expected a list of ids");
  std::string text;
  for (const Json& value : ids) {
    if (!value.is_number_integer() || value < 0 || value >= tokenizer.vocab_size())
      fail(where, ": ", value.dump(), " is no id; the tokenizer has ", tokenizer.vocab_size(), " tokens");
    const auto id = value.get<int32_t>();
    if (special || !tokenizer.is_special(id)) text += tokenizer.piece(id);
  }
  return ascii_json(text);
}

std::string encode_line(const Tokenizer& tokenizer, const Json& text, bool special, const std::string& where) {
  if (!text.is_string()) fail(where, ": is of type ", text.type_name(), ", expected a string");
  const auto& s = text.get_ref<const std::string&>();
  return Json(special ? tokenizer.encode_prompt(s) : tokenizer.encode(s)).dump();
}

// A conversation to the text that the model would answer, or its ids.
class Chat {
 public:
  Chat(const Options& o, const Tokenizer& tokenizer)
      : options_(o), tokenizer_(tokenizer), format_(find_chat_format(o.chat_format, o.tokenizer)) {
    if (o.no_thinking && format_.kind != ChatFormat::Kind::qwen3) fail("--no-thinking is for the chat format qwen3");
    if (!o.date.empty() && format_.kind != ChatFormat::Kind::llama3) fail("--date is for the chat format llama-3");
    format_.thinking = !o.no_thinking;
    if (!o.date.empty()) format_.date = o.date;
  }
  std::string line(const Json& row, const std::string& where) const {
    try {
      const std::vector<Message> all = messages(row);
      return options_.ids ? Json(encode_chat(format_, tokenizer_, all)).dump() : ascii_json(render_chat(format_, all));
    } catch (const Error& e) {
      fail(where, ": ", e.what());
    }
  }

 private:
  std::vector<Message> messages(const Json& row) const {
    std::vector<Message> all;
    if (row.is_object()) refuse_unrendered(row);
    if (row.is_string())
      all = {{"user", row.get<std::string>()}};
    else
      all = messages_of(row.is_object() && row.contains("messages") ? row["messages"] : row);
    if (!options_.system) return all;
    if (all[0].role == "system") fail("has a system message, and --system gives one");
    all.insert(all.begin(), {"system", *options_.system});
    return all;
  }

  const Options& options_;
  const Tokenizer& tokenizer_;
  ChatFormat format_;
};

void tokenize(Options o) {
  o.tokenizer = in_hub_cache(o.tokenizer);
  const auto tokenizer = make_tokenizer(o.tokenizer);
  const std::optional<Chat> chat = o.chat ? std::optional<Chat>(std::in_place, o, *tokenizer) : std::nullopt;
  std::string line;
  for (int64_t number = 1; std::getline(std::cin, line); number++) {
    const std::string where = cat("line ", number);
    const Json row = parse_json(line, where);
    print((o.decode ? decode_line(*tokenizer, row, o.special, where)
           : chat   ? chat->line(row, where)
                    : encode_line(*tokenizer, row, o.special, where)) +
          "\n");
  }
}

}  // namespace

void add_tokenize(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("tokenize", "text to token ids: JSON lines, strings in, lists of ids out");
  c.option("--tokenizer", o->tokenizer, "ssa, a tokenizer file or a folder with one").required();
  const Option decode = c.flag("--decode", o->decode, "reads lists of ids, prints strings");
  const Option special = c.flag("--special", o->special, "prepends BOS; with --decode: prints special tokens");
  const Option chat =
      c.flag("--chat", o->chat,
             "reads conversations: [{\"role\", \"content\"}], {\"messages\"} or a user message; prints the "
             "rendered prompt as a JSON string");
  chat.excludes(decode).excludes(special);
  c.flag("--ids", o->ids, "prints its token ids instead, as `pare generate` and training see them").needs(chat);
  c.option("--chat-format", o->chat_format,
           "chatml, qwen2.5, qwen3, llama-3, deepseek-r1, plain or a text with {problem}; that of the tokenizer's chat "
           "template if not given")
      .needs(chat);
  c.option("--system", o->system, "system message of every conversation").needs(chat);
  c.flag("--no-thinking", o->no_thinking, "qwen3: starts the answer after an empty thought").needs(chat);
  c.option("--date", o->date, "llama-3: date in the system message").needs(chat);
  c.action([o] { tokenize(*o); });
}

}  // namespace pare
