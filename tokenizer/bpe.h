// BPE (Sennrich et al., 2016; byte-level: Radford et al., 2019) from a tokenizer.json, with the ids of the Hugging Face
// tokenizers library.  What happens to a text:
//
//   1. Added tokens are cut out, leftmost first, the longest of several at one place, and become their ids.  So text
//      that is spelled like a control token *is* one, even in somebody else's problem: "<|im_end|>" ends the turn.
//      Hugging Face does the same and models were trained on it; other ids would be another prompt.
//   2. The rest is normalised if the file says so: NFC, or (Llama-2) spaces become "▁" and one more is put in front of
//      what follows an added token, and of a prompt.  decode leaves that one out.
//   3. It is cut into words (words.h).
//   4. Each word starts as one token a byte (Llama-2: a character, or its bytes if it has no token); the pair of
//      neighbours with the lowest rank is merged, leftmost first, until no pair has a rank.
//
// Bytes that are not UTF-8 have tokens too: decode(encode(text)) == text for all bytes that have one, up to NFC of what
// is UTF-8 ("▁" comes back as a space).  A byte without a token (SmolLM2 lacks 21) is an error of the text; the library
// drops it silently, or puts "unk_token" in its place.
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
