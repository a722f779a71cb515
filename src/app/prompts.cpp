#include "app/prompts.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/foreign_file.h"
#include "base/json.h"
#include "data/jsonl.h"
#include "model/hf/config.h"

namespace pare {

using Json = nlohmann::ordered_json;

namespace {

const std::string& model_path(const Config& c) {
  if (c.model.path.empty()) fail("which model? give --model DIR, a Hugging Face folder");
  return c.model.path;
}

}  // namespace

Prompts::Prompts(const Config& config)
    : model(load_model_config(model_path(config))), config_(config), tokenizer_spec_(tokenizer_spec(config)) {
  if (tokenizer_spec_ != config.model.path || !tokenizer_file(tokenizer_spec_).empty())
    tokenizer_ = make_tokenizer(tokenizer_spec_);
  if (tokenizer_ && tokenizer_->vocab_size() > model.vocab)
    fail("the tokenizer has ", tokenizer_->vocab_size(), " tokens, the model's vocabulary only ", model.vocab);
  eos = model.eos_ids;
  if (eos.empty() && tokenizer_ && tokenizer_->eos() >= 0) eos = {tokenizer_->eos()};
  stop = make_stop(config.rollout, tokenizer_.get(), model.vocab);
}

std::vector<std::string> Prompts::notes() const {
  if (!tokenizer_) return {};
  const std::string note = turn_end_note(chat_ ? *chat_ : ChatFormat{}, *tokenizer_, eos, stop);
  return note.empty() ? std::vector<std::string>() : std::vector{note};
}

const Tokenizer& Prompts::tokenizer() const {
  if (!tokenizer_) fail(config_.model.path, " has no tokenizer; name one with --tokenizer");
  return *tokenizer_;
}

const ChatFormat& Prompts::chat() const {
  if (chat_) return *chat_;
  ChatFormat format;
  try {
    if (config_.data.task != "ssa") format = find_chat_format(config_.data.chat_template, tokenizer_spec_);
  } catch (const Error& e) {
    fail(e.what(), " (--chat-format)");
  }
  const ChatTemplateKeys& k = config_.data.apply_chat_template_kwargs;
  if (!k.enable_thinking && format.kind != ChatFormat::Kind::qwen3)
    fail("--no-thinking (data.apply_chat_template_kwargs.enable_thinking) is for the chat format qwen3");
  format.thinking = k.enable_thinking;
  format.date = k.date_string;
  chat_ = std::make_unique<ChatFormat>(format);
  return *chat_;
}

Prompt Prompts::checked(Json given, std::vector<int32_t> ids, int64_t max_tokens) const {
  const auto size = static_cast<int64_t>(ids.size());
  if (ids.empty()) fail("the prompt is empty, and there is no BOS to begin with: a sequence needs at least one token");
  for (const int32_t id : ids)
    if (id >= model.vocab) fail("the prompt has the token ", id, ", the model's vocabulary is ", model.vocab);
  if (size >= model.max_position)
    fail("the prompt has ", size, " tokens, which leaves none of the model's ", model.max_position,
         " positions for a response");
  const int64_t room = std::min({config_.data.max_response_length, model.max_position - size, max_tokens});
  return {std::move(given), std::move(ids), static_cast<int>(room)};
}

Prompt Prompts::text(const std::string& text) const { return checked(text, tokenizer().encode_prompt(text)); }

Prompt Prompts::messages(const std::vector<Message>& messages) const {
  return checked(to_json(messages), encode_chat(chat(), tokenizer(), messages));
}

Prompt Prompts::row(const std::string& line, const std::string& where) const {
  const Problem problem = read_prompt(line, {config_.data.prompt_key, "", config_.data.system_prompt}, where);
  const int64_t most = problem.max_tokens ? problem.max_tokens : INT64_MAX;
  if (!problem.prompt_ids.empty()) return checked(problem.prompt_ids, problem.prompt_ids, most);
  const std::vector<Message> turns = conversation(problem);
  Prompt prompt = checked(to_json(turns), encode_chat(chat(), tokenizer(), turns), most);
  if (problem.messages.empty()) prompt.given = problem.prompt;
  return prompt;
}

std::vector<Prompt> Prompts::file(const std::string& path) const {
  std::error_code ignored;
  std::ifstream in(path, std::ios::binary);
  const auto foreign = [&](const std::string& otherwise) {
    const std::string what = foreign_rows(path);
    return what.empty() ? otherwise : cat(path, ": ", what);
  };
  if (!in || std::filesystem::is_directory(path, ignored))
    fail(foreign(cat(path, ": cannot be read; expected JSON lines")));
  std::vector<Prompt> all;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); number++) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = cat(path, ":", number);
    try {
      all.push_back(row(line, where));
    } catch (const Error& e) {
      const std::string what = cat(std::string_view(e.what()).starts_with(where) ? "" : where + ": ", e.what());
      fail(all.empty() ? foreign(what) : what);
    }
  }
  if (all.empty()) fail(path, ": has no rows");
  return all;
}

}  // namespace pare
