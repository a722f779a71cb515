// Jinja templates that pare writes: for folders whose model was trained in another format than their own template's.
#pragma once
#include "tokenizer/chat.h"

namespace pare {

// The format of this name or text with "{problem}", if it is one.
std::optional<ChatFormat> named_format(const std::string& name);
// The format whose chat_jinja() is exactly this text, if there is one.
std::optional<ChatFormat> own_format(const std::string& jinja);

}  // namespace pare
