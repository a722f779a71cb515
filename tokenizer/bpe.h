// Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) from a tokenizer.json, with the ids of the Hugging Face
// tokenizers library.  What happens to a text:
//
//   1. Added tokens are cut out of it, leftmost first, of several there the longest, and become their ids.  So text
//      that is spelled like a control token *is* one, also in a problem that somebody else wrote: "<|im_end|>" ends the
//      turn.  Hugging Face does this, the models were trained on it, and ids that differ would be another prompt.
//   2. The rest is normalised (NFC) where the file says so.
//   3. It is cut into words (words.h).
//   4. In each word, a token at first for every byte, the neighbours of the lowest rank are merged, leftmost first, as
//      long as there are any.
//
// Bytes that are not UTF-8 have tokens too: decode(encode(text)) == text for all bytes, up to NFC of what is UTF-8.
#pragma once
#include <memory>
#include <string>

#include "tokenizer/tokenizer.h"

namespace pare {

// BOS comes from the post-processor of the file, or from "bos_token" of the tokenizer_config.json beside it if that
// says "add_bos_token": true; EOS and PAD from "eos_token" and "pad_token" there.
std::unique_ptr<Tokenizer> load_bpe(const std::string& tokenizer_json);

}  // namespace pare
