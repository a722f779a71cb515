#include "tokenizer/chat.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/foreign_file.h"
#include "base/json_file.h"
#include "base/text.h"
#include "tokenizer/chat_jinja.h"
#include "tokenizer/unicode.h"

namespace pare {
namespace {

using Kind = ChatFormat::Kind;

constexpr const char* kQwenSystem = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";
constexpr std::string_view kProblem = "{problem}";
constexpr const char* kNames = "plain, chatml, qwen2.5, qwen3, llama-3, deepseek-r1";

std::string replace_all(std::string text, std::string_view what, std::string_view by) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size()))
    text.replace(at, what.size(), by);
  return text;
}

// ---- which format a template is ------------------------------------------------------------------------------------

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view space = " \t\r\n";
  text.remove_prefix(std::min(text.find_first_not_of(space), text.size()));
  return text.substr(0, text.find_last_not_of(space) + 1);
}

// Of the template without white space around it (FNV-1a, Fowler, Noll and Vo).
uint64_t fingerprint(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : trimmed(text)) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return hash;
}

struct KnownTemplate {
  uint64_t fingerprint;  // of ChatML: of the template with an empty default system message
  Kind kind;
  const char* of;
};
constexpr KnownTemplate kKnown[] = {
    {0xdbc23851eea954b9, Kind::chatml, "Qwen2, SmolLM2"},
    {0xc73efc1fda3307ad, Kind::chatml, "Qwen2.5"},
    {0xa41d6bae9b9141bc, Kind::chatml, "SmolLM, and others without a default system message"},
    {0x17fde6ecda9c7c01, Kind::chatml, "Hermes 2 and others: the same behind a default of add_generation_prompt"},
    {0x2bfdb7aa9754484e, Kind::qwen3, "Qwen3, first release"},
    {0x959a4551391a6549, Kind::qwen3, "Qwen3, revised"},
    {0xcc0368e1ffb6b958, Kind::llama3, "Llama-3.1"},
    {0x368f4c34b8554414, Kind::llama3, "Llama-3.2"},
    {0x845fdf813c637ee2, Kind::deepseek, "DeepSeek-R1-Distill-Qwen and -Llama"},
};

// The default system message that a template of ChatML holds, as Jinja writes it: Instruct, base and Math models differ
// in nothing else.
std::optional<std::string> default_system(const std::string& jinja) {
  constexpr std::string_view before = R"('<|im_start|>system\n)", after = R"(<|im_end|>\n')";
  for (size_t at = jinja.find(before); at != std::string::npos; at = jinja.find(before, at + 1)) {
    const size_t begin = at + before.size(), end = jinja.find(after, begin);
    if (end != std::string::npos && jinja.find('\'', begin) > end) return jinja.substr(begin, end - begin);
  }
  return std::nullopt;
}

std::optional<ChatFormat> known_format(const std::string& jinja) {
  if (const auto own = own_format(jinja)) return own;
  // Inside a literal of Jinja a line may end as \n or as it does.
  for (const std::string& text : {jinja, replace_all(std::string(trimmed(jinja)), "\n", R"(\n)")}) {
    const std::optional<std::string> system = default_system(text);
    const uint64_t mark = fingerprint(system && !system->empty() ? replace_all(text, *system, "") : text);
    for (const KnownTemplate& known : kKnown) {
      if (known.fingerprint != mark) continue;
      ChatFormat format = {.kind = known.kind};
      if (system && known.kind == Kind::chatml)
        format.system = replace_all(replace_all(*system, R"(\n)", "\n"), R"(\\)", "\\");
      return format;
    }
  }
  return std::nullopt;
}

ChatFormat recognise(const std::string& jinja, const std::string& where) {
  if (jinja.empty()) fail(where, ": the chat template is empty, so every prompt would be; set data.chat_template");
  if (const auto known = known_format(jinja)) return *known;
  fail(where, ": this chat template (fingerprint ", std::hex, fingerprint(jinja),
       ") is unknown; set data.chat_template to its format (", kNames,
       "), or to a text with {problem} in place of the user's message: "
       "data.chat_template='\"Question: {problem}\\nAnswer:\"'");
}

// With line ends as transformers reads them.
std::string text_of_file(const std::string& path) {
  std::error_code ignored;
  std::ifstream in(path, std::ios::binary);
  if (!in || !std::filesystem::is_regular_file(path, ignored)) fail(path, ": cannot be read");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (const std::string pointer = lfs_pointer(path, text); !pointer.empty()) fail(path, ": ", pointer);
  return replace_all(replace_all(text, "\r\n", "\n"), "\r", "\n");
}

// The chat_template of tokenizer_config.json: a text, or several by name, of which the last of a name counts.
std::optional<std::string> template_in(const nlohmann::json& given, const std::string& where) {
  if (given.is_null()) return std::nullopt;
  if (given.is_string()) return given.get<std::string>();
  std::optional<std::string> found;
  if (given.is_object() && given.contains("default") && given["default"].is_string()) found = given["default"];
  if (given.is_array())
    for (const nlohmann::json& entry : given) {
      const auto is = [&](const char* key) {
        return entry.is_object() && entry.contains(key) && entry[key].is_string();
      };
      if (is("name") && is("template") && entry["name"] == "default") found = entry["template"];
    }
  if (!found)
    fail(where, ": chat_template is neither a text nor a list with an entry named default; set data.chat_template");
  return found;
}

// The default template of a model folder, if there is one.  `where`: the file that holds it.
std::optional<std::string> template_of(const std::string& tokenizer_spec, std::string& where) {
  namespace fs = std::filesystem;
  if (tokenizer_spec == "ssa") return std::nullopt;
  std::error_code ignored;
  const fs::path path(tokenizer_spec), folder = fs::is_directory(path, ignored) ? path : path.parent_path();
  bool others = false;
  for (const auto& entry : fs::directory_iterator(folder / "additional_chat_templates", ignored))
    others |= entry.path().extension() == ".jinja";
  for (const fs::path& file : {folder / "additional_chat_templates/default.jinja", folder / "chat_template.jinja"})
    if (fs::exists(file, ignored)) return text_of_file(where = file.string());
  if (others)
    fail((folder / "additional_chat_templates").string(), ": holds templates, but ",
         (folder / "chat_template.jinja").string(), ", the default one, is missing; set data.chat_template");
  where = (folder / "tokenizer_config.json").string();
  if (!fs::exists(where, ignored)) return std::nullopt;
  const nlohmann::json config = read_json_file(where);
  return config.is_object() && config.contains("chat_template") ? template_in(config["chat_template"], where)
                                                                : std::nullopt;
}

// ---- rendering -----------------------------------------------------------------------------------------------------

void check_messages(Kind kind, std::span<const Message> messages) {
  expect(!messages.empty(), "a conversation without messages");
  for (const Message& m : messages) {
    if (m.role != "system" && m.role != "user" && m.role != "assistant")
      fail("chat: the role \"", m.role, "\" is not supported; there are system, user and assistant");
    if (m.reasoning_content && (kind != Kind::qwen3 || m.role != "assistant"))
      fail(
          "chat: \"reasoning_content\" is rendered for assistants of the format qwen3 only; write the thought into "
          "\"content\", or remove the key");
  }
}

const std::string& only_message(std::span<const Message> messages) {
  if (messages.size() != 1 || messages[0].role != "user")
    fail(
        "chat: a format without turns takes exactly one message, from the user; choose another format with "
        "data.chat_template");
  return messages[0].content;
}

std::string qwen_turn(const std::string& role, std::string_view content) {
  return cat("<|im_start|>", role, "\n", content, "<|im_end|>\n");
}

std::string chatml(const std::optional<std::string>& system, std::span<const Message> messages,
                   bool generation_prompt) {
  std::string text;
  if (system && messages[0].role != "system") text += qwen_turn("system", *system);
  for (const Message& m : messages) text += qwen_turn(m.role, m.content);
  return text += generation_prompt ? "<|im_start|>assistant\n" : "";
}

// Without newlines at the front, at the back.
std::string_view lstrip(std::string_view s) {
  s.remove_prefix(std::min(s.find_first_not_of('\n'), s.size()));
  return s;
}
std::string_view rstrip(std::string_view s) { return s.substr(0, s.find_last_not_of('\n') + 1); }

std::string_view after_last(std::string_view s, std::string_view mark) {
  const size_t at = s.rfind(mark);
  return at == std::string_view::npos ? s : s.substr(at + mark.size());
}

std::string qwen3(bool thinking, std::span<const Message> messages, bool generation_prompt) {
  // After the last question the assistant's thoughts stay.  What a tool said, in a user's turn, is no question.
  size_t question = messages.size() - 1;
  for (size_t i = messages.size(); i-- > 0;) {
    const std::string& s = messages[i].content;
    if (messages[i].role == "user" && !(s.starts_with("<tool_response>") && s.ends_with("</tool_response>"))) {
      question = i;
      break;
    }
  }
  std::string text;
  for (size_t i = 0; i < messages.size(); i++) {
    const Message& m = messages[i];
    std::string_view content = m.content, thought;
    if (m.role == "assistant") {
      if (m.reasoning_content) {
        thought = *m.reasoning_content;
      } else if (const size_t end = content.find("</think>"); end != std::string_view::npos) {
        thought = lstrip(after_last(rstrip(content.substr(0, end)), "<think>"));
        content = lstrip(after_last(content, "</think>"));
      }
      if (i > question && (i + 1 == messages.size() || !thought.empty())) {
        text += qwen_turn(m.role, cat("<think>\n", rstrip(lstrip(thought)), "\n</think>\n\n", lstrip(content)));
        continue;
      }
    }
    text += qwen_turn(m.role, content);
  }
  if (generation_prompt)
    text += thinking ? "<|im_start|>assistant\n" : "<|im_start|>assistant\n<think>\n\n</think>\n\n";
  return text;
}

// As Python's str.strip(): White_Space and the four separators of ASCII.
std::string_view strip(std::string_view s) {
  const char *p = s.data(), *end = p + s.size(), *first = nullptr, *last = p;
  while (p < end) {
    const Utf8Step step = next_utf8(p, end);
    const CharClass kind = step.kind == Utf8Step::character ? char_classes()[step.value] : CharClass::other;
    const bool separator = step.kind == Utf8Step::character && step.value >= 0x1c && step.value <= 0x1f;
    if (kind != CharClass::space && kind != CharClass::newline && !separator) {
      if (!first) first = p;
      last = p + step.length;
    }
    p += step.length;
  }
  return first ? std::string_view(first, static_cast<size_t>(last - first)) : std::string_view();
}

std::string llama3(const std::string& date, std::span<const Message> messages, bool generation_prompt) {
  const auto header = [](std::string_view role) { return cat("<|start_header_id|>", role, "<|end_header_id|>\n\n"); };
  std::string_view system;
  if (messages[0].role == "system") {
    system = strip(messages[0].content);
    messages = messages.subspan(1);
  }
  std::string text = cat("<|begin_of_text|>", header("system"),
                         "Cutting Knowledge Date: December 2023\nToday Date: ", date, "\n\n", system, "<|eot_id|>");
  for (const Message& m : messages) text += cat(header(m.role), strip(m.content), "<|eot_id|>");
  return text += generation_prompt ? header("assistant") : "";
}

std::string deepseek(std::span<const Message> messages, bool generation_prompt) {
  std::string_view system;
  for (const Message& m : messages)
    if (m.role == "system") system = m.content;  // the last one, wherever it stands
  std::string text = cat("<｜begin▁of▁sentence｜>", system);
  for (const Message& m : messages) {
    if (m.role == "user") text += "<｜User｜>" + m.content;
    if (m.role == "assistant")
      text += cat("<｜Assistant｜>", after_last(m.content, "</think>"), "<｜end▁of▁sentence｜>");
  }
  return text += generation_prompt ? "<｜Assistant｜><think>\n" : "";
}

// Tokens without which the format is only text.
std::vector<const char*> control_tokens(Kind kind) {
  switch (kind) {
    case Kind::chatml:
    case Kind::qwen3:
      return {"<|im_start|>", "<|im_end|>"};
    case Kind::llama3:
      return {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    case Kind::deepseek:
      return {"<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"};
    case Kind::plain:
    case Kind::problem:
      break;
  }
  return {};
}

// Null, false, or an empty text, list or object: nothing is lost without it.
bool says_nothing(const nlohmann::ordered_json& value) {
  return value.is_null() || value == false || value == "" || (value.is_structured() && value.empty());
}

std::string text_member(const nlohmann::ordered_json& message, const char* key, size_t number) {
  const auto& value = message[key];
  if (!value.is_string())
    fail("message ", number, ": \"", key, "\" is of type ", value.type_name(), ", expected a string",
         value.is_array() ? ": join its parts" : "");
  return value.get<std::string>();
}

}  // namespace

std::vector<Message> messages_of(const nlohmann::ordered_json& list) {
  if (!list.is_array() || list.empty()) fail("\"messages\" is not a list of {\"role\", \"content\"}");
  std::vector<Message> all;
  for (const auto& m : list) {
    const size_t number = all.size() + 1;
    if (!m.is_object() || !m.contains("role") || !m.contains("content"))
      fail("message ", number, " is not {\"role\", \"content\"}");
    for (const auto& [key, value] : m.items())
      if (key != "role" && key != "content" && key != "reasoning_content" && !says_nothing(value))
        fail("message ", number, " has the key ", nlohmann::json(key).dump(),
             ", which is not rendered; write it into \"content\" as the template would, or remove it");
    all.push_back({text_member(m, "role", number), text_member(m, "content", number)});
    if (m.contains("reasoning_content") && !m["reasoning_content"].is_null())
      all.back().reasoning_content = text_member(m, "reasoning_content", number);
  }
  return all;
}

nlohmann::ordered_json to_json(const std::vector<Message>& messages) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Message& m : messages) {
    list.push_back({{"role", m.role}, {"content", m.content}});
    if (m.reasoning_content) list.back()["reasoning_content"] = *m.reasoning_content;
  }
  return list;
}

void refuse_unrendered(const nlohmann::ordered_json& row) {
  for (const char* key : {"tools", "functions", "documents"})
    if (row.contains(key) && !says_nothing(row[key]))
      fail("has \"", key, "\", which no chat format here renders; write it into the system message, or remove it");
  for (const char* key : {"chat_template_kwargs", "enable_thinking"})
    if (row.contains(key) && !row[key].is_null() && !(row[key].is_structured() && row[key].empty()))
      fail("has \"", key,
           "\", which is not read from rows; set data.apply_chat_template_kwargs for all rows, and remove "
           "it");
}

std::optional<ChatFormat> named_format(const std::string& name) {
  if (name == "plain") return ChatFormat{};
  if (name == "chatml") return ChatFormat{.kind = Kind::chatml};
  if (name == "qwen2.5") return ChatFormat{.kind = Kind::chatml, .system = kQwenSystem};
  if (name == "qwen3") return ChatFormat{.kind = Kind::qwen3};
  if (name == "llama-3") return ChatFormat{.kind = Kind::llama3};
  if (name == "deepseek-r1") return ChatFormat{.kind = Kind::deepseek};
  if (name.find(kProblem) != std::string::npos) return ChatFormat{.kind = Kind::problem, .text = name};
  return std::nullopt;
}

ChatFormat find_chat_format(const std::string& wanted, const std::string& tokenizer_spec) {
  std::string where;
  if (const auto named = named_format(wanted)) {
    if (wanted != "chatml" || tokenizer_spec.empty()) return *named;
    const auto known = known_format(template_of(tokenizer_spec, where).value_or(""));
    return known && known->kind == Kind::chatml ? *known : *named;
  }
  if (wanted != "auto")
    fail("data.chat_template is \"", printable(wanted), "\", expected auto, ", kNames, " or a text with {problem}");
  const std::optional<std::string> jinja = template_of(tokenizer_spec, where);
  return jinja ? recognise(*jinja, where) : ChatFormat{};
}

std::string described(const ChatFormat& format) {
  std::string text = format.kind == Kind::problem ? cat("\"", printable(format.text), "\"") : format_name(format);
  if (format.kind == Kind::chatml)
    text += format.system ? cat(", system message \"", printable(*format.system), "\"") : ", no system message";
  if (format.kind == Kind::qwen3 && !format.thinking) text += ", without thoughts";
  if (format.kind == Kind::llama3) text += cat(", date ", printable(format.date));
  return text;
}

std::string end_of_turn(const ChatFormat& format) {
  switch (format.kind) {
    case Kind::chatml:
    case Kind::qwen3:
      return "<|im_end|>";
    case Kind::llama3:
      return "<|eot_id|>";
    case Kind::deepseek:
      return "<｜end▁of▁sentence｜>";
    case Kind::plain:
    case Kind::problem:
      break;
  }
  return "";
}

std::string render_chat(const ChatFormat& format, std::span<const Message> messages, bool generation_prompt) {
  check_messages(format.kind, messages);
  switch (format.kind) {
    case Kind::plain:
      return only_message(messages);
    case Kind::problem:
      return replace_all(format.text, kProblem, only_message(messages));
    case Kind::chatml:
      return chatml(format.system, messages, generation_prompt);
    case Kind::qwen3:
      return qwen3(format.thinking, messages, generation_prompt);
    case Kind::llama3:
      return llama3(format.date, messages, generation_prompt);
    case Kind::deepseek:
      return deepseek(messages, generation_prompt);
  }
  return {};
}

std::vector<int32_t> encode_chat(const ChatFormat& format, const Tokenizer& tokenizer,
                                 std::span<const Message> messages, bool generation_prompt) {
  const std::string text = render_chat(format, messages, generation_prompt);
  if (format.kind == Kind::plain || format.kind == Kind::problem) {
    // A custom text that begins with BOS gets no second one.
    const bool has_bos = format.kind == Kind::problem && format.text.starts_with(tokenizer.piece(tokenizer.bos()));
    return has_bos ? tokenizer.encode(text) : tokenizer.encode_prompt(text);
  }
  for (const char* control : control_tokens(format.kind))
    if (tokenizer.encode(control).size() != 1)
      fail("chat: the tokenizer has no token ", control, ", so data.chat_template is the format of another model");
  return tokenizer.encode(text);
}

}  // namespace pare
