// Files of tokenizers: the bytes are a tokenizer.json, what is changed in a good one (a JSON Patch, RFC 6902), a
// vocab_pieces.json and a tokenizer.bin.  What loads, works.
#include <memory>
#include <vector>

#include "tests/tiny_tokenizer.h"
#include "tokenizer/bpe.h"
#include "tools/fuzz/fuzz.h"

namespace pare::fuzz {
namespace {

using Loader = std::unique_ptr<Tokenizer> (*)(const std::string& path);

// `complete`: every text has ids.
void load(Loader loader, std::string_view bytes, bool complete) {
  const MemoryFile file(bytes);
  accepted([&] {
    const auto tokenizer = loader(file.path());
    const std::string text = "It's 12 \n\n e\xcc\x81\xff<s></s>";
    const bool encoded = accepted([&] { tokenizer->decode(tokenizer->encode_prompt(text)); });
    check(encoded || !complete, "a tokenizer that does not take every text");
    for (int32_t id = -1; id <= tokenizer->vocab_size(); id++) {
      tokenizer->piece(id);
      tokenizer->is_special(id);
    }
  });
}

}  // namespace
}  // namespace pare::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pare;
  static const nlohmann::json good = test::tokenizer_json({{"a", "b"}, {"ab", "ab"}, {" ", "t"}}, {"<s>", "</s>"});
  const std::string_view bytes = fuzz::text_of(data, size);
  fuzz::load(load_bpe, bytes, true);
  fuzz::load(load_sentencepiece_json, bytes, false);
  fuzz::load(load_sentencepiece, bytes, false);
  const nlohmann::json patch = nlohmann::json::parse(bytes, nullptr, false);
  nlohmann::json changed;
  try {
    changed = good.patch(patch);
  } catch (const nlohmann::json::exception&) {  // no patch, or not for this file
    return 0;
  }
  fuzz::load(load_bpe, changed.dump(), true);
  return 0;
}
