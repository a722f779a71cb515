#include "tokenizer/tokenizer.h"

#include <filesystem>
#include <utility>

#include "base/error.h"
#include "tokenizer/bpe.h"
#include "tokenizer/unicode.h"

namespace pare {

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  if (!ids.empty() && ids[0] == bos_) ids = ids.subspan(1);
  std::string text;
  for (const int32_t id : ids) text += piece(id);
  return text;
}

std::string StreamDecoder::push(int32_t id) {
  waiting_ += tokenizer_.piece(id);
  const size_t certain = waiting_.size() - cut_bytes(waiting_);
  const std::string text = lossy_utf8(std::string_view(waiting_).substr(0, certain));
  waiting_.erase(0, certain);
  return text;
}

std::string StreamDecoder::finish() { return lossy_utf8(std::exchange(waiting_, {})); }

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec) {
  namespace fs = std::filesystem;
  constexpr const char* kSupported =
      "supported: \"ssa\", a tokenizer.json (byte-level BPE), a llama2.c tokenizer.bin, a vocab_pieces.json, or a "
      "directory that contains one of these";
  if (spec == "ssa") return make_ssa_tokenizer();
  std::error_code ignored;
  fs::path path(spec);
  if (!fs::exists(path, ignored)) fail("tokenizer \"", spec, "\": no such file; ", kSupported);
  if (fs::is_directory(path, ignored)) {
    const fs::path folder = path;
    for (const char* name : {"tokenizer.bin", "tokenizer.json", "vocab_pieces.json"})
      if (path == folder && fs::exists(folder / name, ignored)) path = folder / name;
    if (path == folder)
      fail("tokenizer \"", spec, "\": the directory has no tokenizer.json and no tokenizer.bin; ", kSupported);
  }
  if (path.filename() == "vocab_pieces.json") return load_sentencepiece_json(path.string());
  if (path.extension() == ".json") return load_bpe(path.string());
  return load_sentencepiece(path.string());
}

}  // namespace pare
