// The ends of a response besides EOS: rollout.stop_token_ids and rollout.stop.
#pragma once
#include <optional>
#include <string>

#include "rollout/scheduler.h"
#include "run/config.h"
#include "tokenizer/chat.h"

namespace pare {

// The stops of a configuration.  Throws an Error that names the key if an id is outside the vocabulary, a text is
// empty, or texts are given without a tokenizer.  The tokenizer must outlive the result.
Stop make_stop(const RolloutKeys& keys, const Tokenizer* tokenizer, int64_t vocab);

// The number of tokens of a response whose text is shown and graded: all but a closing EOS, or a closing stop token
// that is special.
size_t text_tokens(const Completion& completion, const Stop& stop, const Tokenizer& tokenizer);

// The token that ends a turn of the format, or a text in formats without turns (the tokenizer's EOS); none: there is no
// such token.
std::optional<int32_t> turn_end(const ChatFormat& chat, const Tokenizer& tokenizer);
// Says that this token ends no response, and what to do; empty: it does.
std::string turn_end_note(const ChatFormat& chat, const Tokenizer& tokenizer, const std::vector<int32_t>& eos,
                          const Stop& stop);

}  // namespace pare
