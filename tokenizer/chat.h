// Chat formats: how a conversation becomes the text that a model was trained on.  Jinja is not interpreted: the
// templates of the supported families are functions here, and a template in a model folder is recognised by its exact
// text or not at all.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace pare {

struct Message {
  std::string role, content;                          // system, user or assistant
  std::optional<std::string> reasoning_content = {};  // an assistant's thought, apart from its answer (qwen3)
};

// Reads [{"role", "content"}, ...].  Throws an Error that names the key if a message has one that no format renders
// (tool_calls, name, ...) and that is neither null nor empty.
std::vector<Message> messages_of(const nlohmann::ordered_json& list);
// The list that messages_of reads.
nlohmann::ordered_json to_json(const std::vector<Message>& messages);
// Throws an Error that names the key if a row with a conversation has more that templates render, such as "tools".
void refuse_unrendered(const nlohmann::ordered_json& row);

struct ChatFormat {
  enum class Kind {
    plain,     // the one message as it is, after BOS if the tokenizer has one
    problem,   // `text` with the one message in place of each "{problem}", after BOS
    chatml,    // Qwen2 and 2.5, SmolLM2: without a system message `system` is one
    qwen3,     // thoughts of assistants are dropped before the last question
    llama3,    // Llama-3.1 and 3.2: always a system message, with a date
    deepseek,  // the R1 distills: the prompt opens the thought; BOS in the template
  };
  Kind kind = Kind::plain;
  std::string text = {};
  std::optional<std::string> system = {};
  bool thinking = true;              // qwen3: false closes the thought before the response begins
  std::string date = "26 Jul 2024";  // llama3.  Fixed: with today's date log-probs would change every day
};

// `wanted`: plain, chatml, qwen2.5, qwen3, llama-3, deepseek-r1, a text with "{problem}", or auto: the format of the
// default template in the folder of the tokenizer, plain if there is none.  chatml has the default system message of
// that template if it is ChatML, else none; qwen2.5 is ChatML with Qwen's.  As in transformers 5, the templates of
// chat_template.jinja and additional_chat_templates/ replace those of tokenizer_config.json.  Throws an Error that says
// what to set if the template is unknown.
ChatFormat find_chat_format(const std::string& wanted, const std::string& tokenizer_spec);

// A Jinja template of the format, which find_chat_format recognises.  `bos`: the text of the BOS that encode_chat puts
// in front of formats without turns; empty: there is none.
std::string chat_jinja(const ChatFormat& format, const std::string& bos);

// The format in words: its name, and what it adds to messages.
std::string described(const ChatFormat& format);

// The control token that ends an assistant's turn; empty: the format has no turns.
std::string end_of_turn(const ChatFormat& format);

// The text; with `generation_prompt` it ends with the beginning of the assistant's turn.  Throws an Error if the format
// has no such role, does not render a reasoning_content, or cannot take that many messages.
std::string render_chat(const ChatFormat& format, std::span<const Message> messages, bool generation_prompt = true);

// The ids of that text, BOS once.  As with Hugging Face, control tokens that a message spells out become control tokens
// (bpe.h says why).  Throws an Error if the tokenizer does not have the control tokens of the format.
std::vector<int32_t> encode_chat(const ChatFormat& format, const Tokenizer& tokenizer,
                                 std::span<const Message> messages, bool generation_prompt = true);

}  // namespace pare
