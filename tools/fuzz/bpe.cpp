// Byte-level BPE: any bytes, encoded, decode to themselves (composed, where the tokenizer does that), at once and as a
// stream.  PARE_TOKENIZER names a tokenizer.json to use beside the small ones made here.
#include "tokenizer/bpe.h"

#include <memory>
#include <vector>

#include "tests/tiny_tokenizer.h"
#include "tokenizer/unicode.h"
#include "tools/fuzz/fuzz.h"

namespace pare::fuzz {
namespace {

// NFC has to hold for the text that was cut at added tokens, so it is looked at where there are none.
struct Subject {
  std::unique_ptr<Tokenizer> tokenizer;
  bool exact;
};

const std::vector<Subject>& subjects() {
  static const std::vector<Subject> all = [] {
    const test::MergeList merges = {{"a", "b"},       {"ab", "ab"},     {"e", " "},       {" ", "t"}, {"t", "h"},
                                    {" t", "he"},     {"h", "e"},       {"\xc3", "\xa9"}, {"1", "2"}, {"12", "3"},
                                    {"\n", "\n"},     {"'", "s"},       {"\xe4", "\xb8"}, {" ", " "}, {"  ", "  "},
                                    {"\xcc", "\x81"}, {"e", "\xcc\x81"}};
    std::vector<Subject> made;
    const auto add = [&](const nlohmann::json& file, bool exact) {
      made.push_back({load_bpe(MemoryFile(file.dump()).path()), exact});
    };
    nlohmann::json file = test::tokenizer_json(merges, {"<s>", "</s>", "<s>x", "\xc3\xa9"});
    add(file, true);
    file["model"]["ignore_merges"] = true;
    file["pre_tokenizer"] = test::split_by(test::kLlamaRegex);
    add(file, true);
    file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
    for (auto& token : file["added_tokens"]) token["normalized"] = true;
    add(file, true);
    file["normalizer"] = {{"type", "NFC"}};
    file["added_tokens"] = nlohmann::json::array();
    add(file, false);
    if (const char* path = std::getenv("PARE_TOKENIZER")) made.push_back({load_bpe(path), false});
    return made;
  }();
  return all;
}

}  // namespace
}  // namespace pare::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pare;
  const std::string text(fuzz::text_of(data, size));
  for (const auto& [tokenizer, exact] : fuzz::subjects()) {
    const std::vector<int32_t> ids = tokenizer->encode(text);
    const std::string back = tokenizer->decode(ids);
    fuzz::check(exact ? back == text : nfc(back) == nfc(text), "decode(encode(text)) is another text");
    fuzz::check(tokenizer->encode(text) == ids, "another time, other ids");
    StreamDecoder stream(*tokenizer);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.push(id);
    fuzz::check(streamed + stream.finish() == lossy_utf8(back), "the stream is another text");
    // Any ids have a text.
    std::vector<int32_t> any;
    for (const char c : text) any.push_back(3 * static_cast<int8_t>(c));
    tokenizer->decode(any);
  }
  return 0;
}
