#include "tokenizer/tokenizer.h"

#include <filesystem>

#include "base/error.h"

namespace pare {

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& spec) {
  namespace fs = std::filesystem;
  constexpr const char* kSupported =
      "supported: \"ssa\", a llama2.c tokenizer.bin, or a directory that contains a tokenizer.bin";
  if (spec == "ssa") return make_ssa_tokenizer();
  std::error_code ignored;
  const fs::path path(spec);
  if (!fs::exists(path, ignored)) fail("tokenizer \"", spec, "\": no such file; ", kSupported);
  if (!fs::is_directory(path, ignored)) return load_sentencepiece(spec);
  if (fs::exists(path / "tokenizer.bin", ignored)) return load_sentencepiece((path / "tokenizer.bin").string());
  if (fs::exists(path / "tokenizer.json", ignored))
    fail("tokenizer \"", spec, "\": tokenizer.json (byte-level BPE) is not supported yet; ", kSupported,
         "; data with \"prompt_ids\" needs no tokenizer");
  fail("tokenizer \"", spec, "\": the directory has no tokenizer.bin; ", kSupported);
}

}  // namespace pare
