// Reads tokenizer.json files of the Hugging Face tokenizers library with byte-level BPE: Qwen2, 2.5 and 3, Llama-3, the
// DeepSeek distills of both, GPT-2.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tokenizer/words.h"

namespace pare {

// A token that is found in the text before anything else happens to it.
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;     // a control token, left out where special tokens are skipped
  bool normalized = false;  // matched after normalisation, in what the other added tokens leave
};

struct TokenizerFile {
  std::vector<std::string> tokens;  // by id: the bytes each stands for; added tokens as they are written
  int32_t model_tokens = 0;         // ids below come from the vocabulary of the model, the others are added
  struct Merge {
    int32_t left, right, merged;
  };
  std::vector<Merge> merges;          // by rank
  bool ignore_merges = false;         // a word that is a token becomes that token, whatever the merges say
  bool nfc = false;                   // text is normalised
  std::vector<WordPattern> patterns;  // cut the text one after another; none: all of it is one word
  std::vector<AddedToken> added;
  int32_t first = -1;  // put in front of a sequence by the post-processor: BOS; -1: nothing
};

// Throws, naming file and place, if anything is broken, unknown or unsupported: nothing in the file is ignored.  Ids
// must run from 0 without gaps, the vocabulary must hold all 256 bytes, and merges may use only its tokens.
TokenizerFile read_tokenizer_file(const std::string& path);

}  // namespace pare
