// Jinja templates that pare writes: for folders whose model was trained in another format than their own template's.
#pragma once
#include "tokenizer/chat.h"

namespace pare {

// The value of data.chat_template for a format that is no text.
const char* format_name(const ChatFormat& format);
// The format of this name or text with "{problem}", if it is one.
std::optional<ChatFormat> named_format(const std::string& name);
// The format whose chat_jinja() is exactly this text, if there is one.
std::optional<ChatFormat> own_format(const std::string& jinja);

}  // namespace pare
