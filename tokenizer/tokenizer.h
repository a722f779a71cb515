// Text to token ids and back.  A run records tokens; text is derived from them.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pare {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Ids of `text` as the continuation of a sequence: nothing is added, so decode(encode(text)) == text (after NFC if
  // the tokenizer normalises).  Throws an Error that names the first character without a token, and its place.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // Ids of `text` as the beginning of a sequence: BOS in front, and whatever else the model expects there;
  // decode(encode_prompt(text)) == text.
  virtual std::vector<int32_t> encode_prompt(std::string_view text) const = 0;
  // Drops a BOS at the front and shows every other id, special ones too; an id beyond the vocabulary becomes U+FFFD.  A
  // sequence cut inside a character ends with bytes that are not UTF-8.
  virtual std::string decode(std::span<const int32_t> ids) const;
  // The bytes of one token, wherever it stands and special ones as they are written; U+FFFD beyond the vocabulary.
  virtual std::string piece(int32_t id) const = 0;
  // Control tokens (BOS, <|im_end|>), which a reader of the text need not see.
  virtual bool is_special(int32_t id) const = 0;

  int32_t vocab_size() const { return vocab_size_; }
  // -1: the tokenizer has none, or names none.
  int32_t bos() const { return bos_; }
  int32_t eos() const { return eos_; }  // appended to a completed text in training
  int32_t pad() const { return pad_; }

 protected:
  Tokenizer(int32_t vocab_size, int32_t bos, int32_t eos, int32_t pad)
      : vocab_size_(vocab_size), bos_(bos), eos_(eos), pad_(pad) {}

 private:
  int32_t vocab_size_, bos_, eos_, pad_;
};

// Text as its tokens arrive: always UTF-8, since the bytes of an unfinished character wait for the next token.
class StreamDecoder {
 public:
  // `before`: the token in front of the first one, where there is one: a tokenizer may drop the space after BOS.
  explicit StreamDecoder(const Tokenizer& tokenizer, int32_t before = -1) : tokenizer_(tokenizer), before_(before) {}
  std::string push(int32_t id);  // returns the text known so far; bytes that cannot form a character become U+FFFD
  std::string finish();          // returns U+FFFD for an unfinished character, and resets the decoder

 private:
  const Tokenizer& tokenizer_;
  int32_t before_;
  std::string waiting_;
};

// One token per character: the 48 symbols of the task `ssa` (data/ssa.h).  PAD `_` 0, BOS `^` 1, EOS `$` 2.
std::unique_ptr<Tokenizer> make_ssa_tokenizer();
// The contents of tokenizer.ssa, which marks a model folder as using this tokenizer: the symbols in the order of their
// ids.  The format is pare's own.
std::string ssa_tokenizer_file();

// SentencePiece BPE from llama2.c's tokenizer.bin: i32 length of the longest piece, then to the end of the file per
// piece f32 score, i32 length, bytes.  The prompt gets BOS and one space in front; the pair with the best score is
// merged first, the leftmost of equals; what has no piece becomes its bytes `<0xNN>`.  <unk> 0 (also PAD), BOS 1,
// EOS 2; special pieces never come out of text.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& tokenizer_bin);

// The same from a list of pieces in JSON: [{"id": 0, "score": 0.0, "piece": "<unk>"}, ...], ids in order.
std::unique_ptr<Tokenizer> load_sentencepiece_json(const std::string& vocab_pieces);

// The file of a model folder that make_tokenizer reads; empty: there is none.
std::string tokenizer_file(const std::string& folder);

// `spec`: "ssa"; a tokenizer.bin; a tokenizer.json (bpe.h), vocab_pieces.json or tokenizer.ssa; or a model folder with
// one of them.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec);

}  // namespace pare
