#include "tokenizer/chat_jinja.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json.h"

namespace pare {
namespace {

using Kind = ChatFormat::Kind;
using Json = nlohmann::ordered_json;

// The first line of a template is a comment that says which format it is, as JSON between these two.
constexpr std::string_view kBefore = "{#- pare: ", kAfter = " -#}\n";

// A string literal of Jinja.
std::string literal(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n')
      quoted += "\\n";
    else if (c == '\\' || c == '\'')
      quoted += {'\\', c};
    else if (byte < 0x20)
      quoted += cat("\\x", "0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]);
    else
      quoted += c;
  }
  return quoted + "'";
}

std::string with(std::string text, std::string_view name, const std::string& value) {
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at + value.size()))
    text.replace(at, name.size(), value);
  return text;
}

constexpr const char* kSystem = R"({%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\n' + SYSTEM + '<|im_end|>\n' }}
{%- endif %}
)";
constexpr const char* kChatml = R"({%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %})";

// The last question is the last turn of a user that is not the answer of a tool; without one, the last message.
constexpr const char* kQwen3 = R"({%- set last = namespace(question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if last.question < 0 %}
    {%- set last.question = messages|length - 1 %}
{%- endif %}
{%- for m in messages %}
    {%- set answer = namespace(text=m.content, thought='') %}
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content is string %}
            {%- set answer.thought = m.reasoning_content %}
        {%- elif '</think>' in m.content %}
            {%- set answer.thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set answer.text = m.content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > last.question and (loop.last or answer.thought) %}
            {%- set answer.text = '<think>\n' + answer.thought.strip('\n') + '\n</think>\n\n' + answer.text.lstrip('\n') %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + answer.text + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %})";

constexpr const char* kLlama3 = R"({%- set given = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n' }}
{{- 'Today Date: ' + (date_string if date_string is defined else DATE) + '\n\n' + given + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %})";

constexpr const char* kDeepSeek = R"({%- set last = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set last.system = message.content %}
    {%- endif %}
{%- endfor %}
{{- '<｜begin▁of▁sentence｜>' + last.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<｜Assistant｜><think>\n' }}
{%- endif %})";

std::string body(const ChatFormat& format, const std::string& bos) {
  switch (format.kind) {
    case Kind::chatml:
      return (format.system ? with(kSystem, "SYSTEM", literal(*format.system)) : "") + kChatml;
    case Kind::qwen3:
      return kQwen3;
    case Kind::llama3:
      return with(kLlama3, "DATE", literal(format.date));
    case Kind::deepseek:
      return kDeepSeek;
    case Kind::plain:
      return cat("{{- ", literal(bos), " + messages[0].content }}");
    case Kind::problem:
      break;
  }
  const std::string first = format.text.starts_with(bos) ? "" : bos;
  const std::string text = literal(first + format.text);
  return cat("{{- ", with(text, "{problem}", "' + messages[0].content + '"), " }}");
}

std::string jinja_of(const ChatFormat& format, const std::string& name, const std::string& bos) {
  Json says = {{"data.chat_template", name}};
  if (end_of_turn(format).empty()) says["bos"] = bos;
  if (format.system) says["system"] = *format.system;
  if (format.kind == Kind::llama3) says["date_string"] = format.date;
  // The end of a comment inside its JSON is escaped.
  return cat(kBefore, with(says.dump(-1, ' ', false, Json::error_handler_t::replace), "#}", "\\u0023}"), kAfter,
             body(format, bos));
}

}  // namespace

const char* format_name(const ChatFormat& format) {
  switch (format.kind) {
    case Kind::chatml:
      return format.system == named_format("qwen2.5")->system ? "qwen2.5" : "chatml";
    case Kind::qwen3:
      return "qwen3";
    case Kind::llama3:
      return "llama-3";
    case Kind::deepseek:
      return "deepseek-r1";
    case Kind::plain:
    case Kind::problem:
      break;
  }
  return "plain";
}

std::string chat_jinja(const ChatFormat& format, const std::string& bos) {
  return jinja_of(format, format.kind == Kind::problem ? format.text : format_name(format), bos);
}

std::optional<ChatFormat> own_format(const std::string& jinja) {
  const size_t end = jinja.find(kAfter);
  if (!jinja.starts_with(kBefore) || end == std::string::npos) return std::nullopt;
  const nlohmann::json says = try_parse_json(std::string_view(jinja).substr(kBefore.size(), end - kBefore.size()));
  const auto text = [&](const char* key) {
    return says.is_object() && says.contains(key) && says[key].is_string() ? says[key].get<std::string>() : "";
  };
  const std::string name = text("data.chat_template");
  std::optional<ChatFormat> format = named_format(name);
  if (!format) return std::nullopt;
  if (format->kind == Kind::chatml && says.contains("system")) format->system = text("system");
  if (format->kind == Kind::llama3) format->date = text("date_string");
  return jinja_of(*format, name, text("bos")) == jinja ? format : std::nullopt;
}

}  // namespace pare
