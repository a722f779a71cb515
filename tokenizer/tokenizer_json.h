// Reads tokenizer.json files of the Hugging Face tokenizers library with BPE: byte-level (Qwen2, 2.5 and 3, Llama-3,
// the DeepSeek distills of both, SmolLM2, GPT-2), and over characters with bytes as a fallback (Llama-2, TinyLlama,
// Mistral).
#pragma once
#include <array>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <unordered_map>
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
  std::vector<std::string> tokens;    // by id: the bytes each stands for; added tokens as they are written
  std::array<int32_t, 256> byte_ids;  // the token of each byte; -1: there is none
  // Not byte-level: a word begins as characters, and as bytes where a character has no token.  In the text, spaces are
  // "▁", and one more is put in front of all that follows an added token or begins a sequence.
  bool characters = false;
  std::unordered_map<std::string, int32_t> character_ids = {};  // as in the vocabulary
  int32_t model_tokens = 0;  // ids below come from the vocabulary of the model, the others are added
  struct Merge {
    int32_t left, right, merged;
  };
  std::vector<Merge> merges;      // by rank
  bool ignore_merges = false;     // a word that is a token becomes that token, whatever the merges say
  bool nfc = false;               // text is normalised
  std::vector<WordSplit> splits;  // cut the text one after another; none: all of it is one word
  std::vector<AddedToken> added;
  int32_t first = -1;  // put in front of a sequence by the post-processor: BOS; -1: nothing
};

// Throws, naming file and place, if anything is broken, unknown or unsupported: nothing in the file is ignored but
// "unk_token" (bpe.h).  Ids must run from 0 without gaps, and merges may use only tokens of the vocabulary.
TokenizerFile read_tokenizer_file(const std::string& path);

}  // namespace pare
