#include "tokenizer/tokenizer.h"

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/hub_cache.h"
#include "tokenizer/bpe.h"
#include "tokenizer/unicode.h"

namespace pare {

namespace fs = std::filesystem;

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  if (!ids.empty() && ids[0] == bos_) ids = ids.subspan(1);
  std::string text;
  for (const int32_t id : ids) text += piece(id);
  return text;
}

std::string StreamDecoder::push(int32_t id) {
  if (before_ < 0) {
    waiting_ += tokenizer_.piece(id);
  } else {
    const std::array<int32_t, 2> pair = {before_, id};
    const std::span<const int32_t> all = pair;
    waiting_ += tokenizer_.decode(all).substr(tokenizer_.decode(all.first(1)).size());
  }
  before_ = id;
  const size_t certain = waiting_.size() - cut_bytes(waiting_);
  const std::string text = lossy_utf8(std::string_view(waiting_).substr(0, certain));
  waiting_.erase(0, certain);
  return text;
}

std::string StreamDecoder::finish() {
  before_ = -1;
  return lossy_utf8(std::exchange(waiting_, {}));
}

std::string tokenizer_file(const std::string& folder) {
  std::error_code ignored;
  for (const char* name : {"tokenizer.ssa", "tokenizer.bin", "tokenizer.json", "vocab_pieces.json"})
    if (const fs::path path = fs::path(folder) / name; fs::exists(path, ignored)) return path.string();
  return "";
}

static std::unique_ptr<Tokenizer> load_ssa(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text != ssa_tokenizer_file()) fail(path.string(), ": does not hold the symbols of the tokenizer ssa");
  return make_ssa_tokenizer();
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec) {
  constexpr const char* kSupported =
      "supported: \"ssa\", a tokenizer.json (BPE), a llama2.c tokenizer.bin, a vocab_pieces.json, or a "
      "directory that contains one of these";
  if (spec == "ssa") return make_ssa_tokenizer();
  std::error_code ignored;
  fs::path path(spec);
  if (const std::string how = how_to_download(spec); !how.empty()) fail("tokenizer ", spec, ": ", how);
  if (!fs::exists(path, ignored)) fail("tokenizer \"", spec, "\": no such file; ", kSupported);
  if (fs::is_directory(path, ignored)) {
    path = tokenizer_file(spec);
    if (path.empty())
      fail("tokenizer \"", spec, "\": the directory has no tokenizer.json and no tokenizer.bin; ", kSupported);
  }
  if (path.filename() == "vocab_pieces.json") return load_sentencepiece_json(path.string());
  if (path.extension() == ".ssa") return load_ssa(path);
  if (path.extension() == ".json") return load_bpe(path.string());
  return load_sentencepiece(path.string());
}

}  // namespace pare
