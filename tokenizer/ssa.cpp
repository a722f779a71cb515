// The character tokenizer of the task `ssa`: a token is the index of its character in one string.
#include "base/error.h"
#include "tokenizer/tokenizer.h"

namespace pare {
namespace {

constexpr std::string_view kSymbols = "_^$+-*=;#?:>0123456789abcdefghijklmnopqrstuvwxyz";
static_assert(kSymbols.size() == 48);

class SsaTokenizer : public Tokenizer {
 public:
  SsaTokenizer() : Tokenizer(static_cast<int32_t>(kSymbols.size()), 1, 2, 0) {}

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    ids.reserve(text.size());
    for (size_t i = 0; i < text.size(); i++) ids.push_back(id_at(text, i));
    return ids;
  }

  std::vector<int32_t> encode_prompt(std::string_view text) const override {
    std::vector<int32_t> ids = encode(text);
    ids.insert(ids.begin(), bos());
    return ids;
  }

  std::string piece(int32_t id) const override {
    return id >= 0 && id < vocab_size() ? std::string(1, kSymbols[static_cast<size_t>(id)]) : "\uFFFD";
  }

  bool is_special(int32_t id) const override { return id >= 0 && id <= eos(); }

 private:
  static int32_t id_at(std::string_view text, size_t i) {
    const size_t id = kSymbols.find(text[i]);
    if (id != std::string_view::npos) return static_cast<int32_t>(id);
    const auto byte = static_cast<unsigned char>(text[i]);
    const std::string shown = byte >= 0x20 && byte < 0x7f ? std::string("'") + text[i] + "'" : cat("byte ", int{byte});
    fail("tokenizer ssa: ", shown, " at position ", i, " of \"", text.substr(0, 60), "\" is not one of its characters ",
         kSymbols);
  }
};

}  // namespace

std::unique_ptr<Tokenizer> make_ssa_tokenizer() { return std::make_unique<SsaTokenizer>(); }
std::string ssa_tokenizer_file() { return cat(kSymbols, "\n"); }

}  // namespace pare
