// Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) from a tokenizer.json, with the ids of the Hugging Face
// tokenizers library.  What happens to a text:
//
//   1. Added tokens are cut out, leftmost first, the longest of several at one place, and become their ids.  So text
//      that is spelled like a control token *is* one, even in somebody else's problem: "<|im_end|>" ends the turn.
//      Hugging Face does the same and models were trained on it; other ids would be another prompt.
//   2. The rest is normalised (NFC) if the file says so.
//   3. It is cut into words (words.h).
//   4. Each word starts as one token a byte; the pair of neighbours with the lowest rank is merged, leftmost first,
//   until
//      no pair has a rank.
//
// Bytes that are not UTF-8 have tokens too: decode(encode(text)) == text for all bytes, up to NFC of what is UTF-8.
#pragma once
#include <memory>
#include <string>

#include "tokenizer/tokenizer.h"

namespace pare {

// As in transformers 5: BOS comes from the post-processor of the file, whatever "add_bos_token" of the
// tokenizer_config.json beside it says; EOS and PAD from "eos_token" and "pad_token" there, or of the
// special_tokens_map.json if the tokenizer_config.json has no "added_tokens_decoder".
std::unique_ptr<Tokenizer> load_bpe(const std::string& tokenizer_json);

}  // namespace pare
