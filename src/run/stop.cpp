#include "run/stop.h"

#include <algorithm>

#include "base/error.h"

namespace pare {

namespace {

bool contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

// True if one of `texts` ends in the bytes of the last token.
bool completes(const Tokenizer& tokenizer, const std::vector<std::string>& texts, size_t longest,
               std::span<const int32_t> prefix, std::span<const int32_t> tokens) {
  std::string tail = tokenizer.piece(tokens.back());
  const size_t last = tail.size();
  const size_t given = prefix.size() + tokens.size();
  for (size_t i = given - 1; i-- > 0 && tail.size() - last + 1 < longest;)
    tail.insert(0, tokenizer.piece(i < prefix.size() ? prefix[i] : tokens[i - prefix.size()]));
  const size_t before = tail.size() - last;
  return std::any_of(texts.begin(), texts.end(), [&](const std::string& text) {
    return tail.find(text, before < text.size() ? 0 : before - text.size() + 1) != std::string::npos;
  });
}

}  // namespace

Stop make_stop(const RolloutKeys& keys, const Tokenizer* tokenizer, int64_t vocab) {
  Stop stop;
  for (const int64_t id : keys.stop_token_ids) {
    if (id >= vocab) fail("rollout.stop_token_ids has ", id, ", the model's vocabulary is ", vocab);
    stop.token_ids.push_back(static_cast<int32_t>(id));
  }
  size_t longest = 0;
  for (const std::string& text : keys.stop) {
    if (text.empty()) fail("rollout.stop has an empty text, which would end every response at once");
    longest = std::max(longest, text.size());
  }
  if (longest == 0) return stop;
  if (!tokenizer) fail("rollout.stop needs a tokenizer, and there is none; give rollout.stop_token_ids");
  stop.text = [tokenizer, texts = keys.stop, longest](auto prefix, auto tokens) {
    return completes(*tokenizer, texts, longest, prefix, tokens);
  };
  return stop;
}

size_t text_tokens(const Completion& c, const Stop& stop, const Tokenizer& tokenizer) {
  const bool hidden =
      c.finish == Finish::eos ||
      (c.finish == Finish::stop && contains(stop.token_ids, c.tokens.back()) && tokenizer.is_special(c.tokens.back()));
  return c.tokens.size() - (hidden ? 1 : 0);
}

std::optional<int32_t> turn_end(const ChatFormat& chat, const Tokenizer& tokenizer) {
  const std::string token = end_of_turn(chat);
  if (token.empty()) return tokenizer.eos() < 0 ? std::nullopt : std::optional(tokenizer.eos());
  const std::vector<int32_t> ids = tokenizer.encode(token);
  return ids.size() == 1 ? std::optional(ids[0]) : std::nullopt;
}

std::string turn_end_note(const ChatFormat& chat, const Tokenizer& tokenizer, const std::vector<int32_t>& eos,
                          const Stop& stop) {
  const std::optional<int32_t> end = turn_end(chat, tokenizer);
  if (!end || contains(eos, *end) || contains(stop.token_ids, *end)) return "";
  return cat(end_of_turn(chat).empty() ? "the tokenizer's eos_token is " : "the chat format ends a turn by ",
             tokenizer.piece(*end), " (id ", *end, "), which is no EOS of the model: responses go on after it; set ",
             "rollout.stop_token_ids=[", *end, "], or add it to eos_token_id of generation_config.json");
}

}  // namespace pare
