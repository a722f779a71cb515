// Turns the prompts of `pare generate` into tokens.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/config.h"
#include "run/config.h"
#include "run/stop.h"
#include "tokenizer/chat.h"

namespace pare {

struct Prompt {
  nlohmann::ordered_json given;  // a text, messages [{"role", "content"}] or token ids
  std::vector<int32_t> ids;      // BOS included
  int max_new_tokens;  // data.max_response_length or less: the row's max_tokens, or the end of the model's positions
};

// The side of a model that needs no weights: whatever is wrong with a prompt is found before they are read.
class Prompts {
 public:
  explicit Prompts(const Config& config);

  Prompt text(const std::string& text) const;                   // to be continued
  Prompt messages(const std::vector<Message>& messages) const;  // to be answered
  // Rows as in training (data/formats.md): texts and conversations get the chat format of the model.
  std::vector<Prompt> file(const std::string& path) const;

  const ChatFormat& chat() const;  // of data.chat_template; an Error where the model's template is not known
  const Tokenizer& tokenizer() const;
  std::vector<std::string> notes() const;  // on how the prompts that were made are answered
  bool has_tokenizer() const { return tokenizer_ != nullptr; }

  const ModelConfig model;
  std::vector<int32_t> eos;  // any of them ends a sequence; empty: none is known
  Stop stop;                 // as does any of these

 private:
  Prompt checked(nlohmann::ordered_json given, std::vector<int32_t> ids, int64_t max_tokens = INT64_MAX) const;
  Prompt row(const std::string& line, const std::string& where) const;

  const Config& config_;
  const std::string tokenizer_spec_;
  std::unique_ptr<Tokenizer> tokenizer_;
  mutable std::unique_ptr<ChatFormat> chat_;  // read when it is asked for: plain continuation works without
};

}  // namespace pare
