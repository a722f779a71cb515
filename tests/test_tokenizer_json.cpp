// Pre-tokenizers and vocabularies as published, against the Hugging Face tokenizers library
// (tools/make_tokenizer_golden.py).
#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/tiny_tokenizer.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/tokenizer_json.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Ids = std::vector<int32_t>;

class TokenizerJson : public testing::Test {
 protected:
  TokenizerJson() { fs::create_directories(folder_); }
  ~TokenizerJson() override { fs::remove_all(folder_); }
  std::string write(const json& file) {
    std::ofstream(folder_ + "tokenizer.json") << file.dump();
    return folder_ + "tokenizer.json";
  }
  std::string error(const json& file) {
    try {
      make_tokenizer(write(file));
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }

  const json golden_ = json::parse(std::ifstream("tests/golden/tokenizers.json"));
  const std::string folder_ = testing::TempDir() + "pare_tokenizer_json_" + std::to_string(getpid()) + "/";
};

json split_before_bytes(const json& split) {
  json steps = split_by(kQwenRegex);
  steps["pretokenizers"][0] = split;
  return steps;
}

TEST_F(TokenizerJson, SplitsAsTheLibrary) {
  json file = tokenizer_json({});
  for (const json& row : golden_["splits"]) {
    file["pre_tokenizer"] = split_before_bytes(row["split"]);
    const TokenizerFile read = read_tokenizer_file(write(file));
    ASSERT_EQ(read.splits.size(), 1u);
    for (size_t i = 0; i < golden_["texts"].size(); i++) {
      const std::string text = golden_["texts"][i];
      std::vector<std::string> words;
      for (const std::string_view word : split_words(read.splits[0], text)) words.emplace_back(word);
      EXPECT_EQ(words, row["words"][i].get<std::vector<std::string>>()) << row["split"] << " of " << text;
    }
  }
  EXPECT_EQ(golden_["splits"].size(), 61u);
}

// SmolLM2's: single digits, then GPT-2's words in what lies between.
TEST_F(TokenizerJson, DigitsBeforeBytes) {
  json file = tokenizer_json({{"1", "2"}, {" ", "1"}, {" ", "a"}, {" ", " "}});
  file["pre_tokenizer"] = split_before_bytes({{"type", "Digits"}, {"individual_digits", true}});
  file["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = true;
  EXPECT_EQ(make_tokenizer(write(file))->encode("12 1  a 1"), (Ids{'1', '2', ' ', '1', ' ', 258, ' ', '1'}));
  file["pre_tokenizer"]["pretokenizers"][0].erase("individual_digits");
  EXPECT_EQ(make_tokenizer(write(file))->encode("12 1  12"), (Ids{256, ' ', '1', 259, 256}));
}

// What Split removes has no tokens.
TEST_F(TokenizerJson, RemovedTextIsGone) {
  json file = tokenizer_json({{"b", "a"}});
  file["pre_tokenizer"] = split_before_bytes(
      {{"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "Removed"}, {"invert", false}});
  EXPECT_EQ(make_tokenizer(write(file))->encode("ab ab a"), (Ids{'a', 'b', 'a', 'b', 'a'}));
}

TEST_F(TokenizerJson, AVocabularyMayLackBytes) {
  json file = tokenizer_json({{"a", "b"}}, {"<s>", "\x14"});
  for (const int byte : {0x14, 0xf1, 0xff}) {
    file["model"]["vocab"].erase(byte_level(std::string(1, static_cast<char>(byte))));
    file["model"]["vocab"]["unused" + std::to_string(byte)] = byte;
  }
  const auto t = make_tokenizer(write(file));
  EXPECT_EQ(t->encode("ab\x13\xf0\x9f\x98\x80"), (Ids{256, 0x13, 0xf0, 0x9f, 0x98, 0x80}));
  EXPECT_EQ(t->encode("a\x14"), (Ids{'a', 258})) << "an added token";
  const auto refused = [&](const std::string& text) -> std::string {
    try {
      t->encode_prompt(text);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  const std::string what = refused("<s>ab\x1b\xf1\x80\x80\x80 more");
  for (const char* part : {"tokenizer.json", "the byte 0xf1 at position 6", "\"ab\\x1b", "remove the character"})
    EXPECT_NE(what.find(part), std::string::npos) << what;
  EXPECT_NE(refused(std::string(99, 'x') + "\xff").find("0xff at position 99"), std::string::npos);
  EXPECT_EQ(t->encode("ab"), Ids{256}) << "after an error";
  file["normalizer"] = {{"type", "NFC"}};
  const auto composed = make_tokenizer(write(file));
  EXPECT_THROW(composed->encode("e\u0301\xff"), Error);
}

// Llama-2, TinyLlama: characters, with bytes as a fallback.
TEST_F(TokenizerJson, CharactersAsTheLibrary) {
  json file = golden_["llama2"];
  int rows = 0;
  for (const bool normalized : {false, true}) {
    for (json& token : file["added_tokens"]) token["normalized"] = normalized;
    const auto t = make_tokenizer(write(file));
    for (const json& row : golden_["llama2_rows"]) {
      if (row["normalized"] != normalized) continue;
      const std::string text = row["text"];
      const Ids ids = row["ids"];
      EXPECT_EQ(t->encode_prompt(text), ids) << text;
      // The library decodes "▁" to a space, too.
      std::string spaced = text;
      for (size_t at; (at = spaced.find("\u2581")) != std::string::npos;) spaced.replace(at, 3, " ");
      if (!normalized) {
        EXPECT_EQ(t->decode(ids), spaced);
        EXPECT_EQ(t->decode(t->encode("a" + text)), "a" + spaced);
      }
      StreamDecoder stream(*t, ids[0]);
      std::string streamed;
      for (size_t i = 1; i < ids.size(); i++) streamed += stream.push(ids[i]);
      EXPECT_EQ(streamed + stream.finish(), t->decode(ids));
      rows++;
    }
  }
  EXPECT_EQ(rows, 80);
  const auto t = make_tokenizer(write(golden_["llama2"]));
  EXPECT_EQ(t->bos(), 1);
  EXPECT_EQ(t->piece(3 + ' '), " ");
  EXPECT_EQ(t->decode(Ids{1, 3 + ' ', 260}), " a") << "a space that is a byte stays";
  EXPECT_EQ(t->decode(Ids{260, 1, 268, 268}), "a<s>a a") << "one space after an added token is left out";
  std::string bytes;
  for (int b = 1; b < 256; b++) bytes += static_cast<char>(b);
  EXPECT_EQ(t->decode(t->encode(bytes)), bytes);
}

TEST_F(TokenizerJson, OtherCharacterTokenizersAreRefusedByName) {
  const json good = golden_["llama2"];
  const auto refused = [&](const char* pointer, const json& value, std::initializer_list<const char*> parts) {
    json file = good;
    file[json::json_pointer(pointer)] = value;
    const std::string what = error(file);
    for (const char* part : parts) EXPECT_NE(what.find(part), std::string::npos) << what;
  };
  refused("/normalizer", nullptr, {"normalizer", "null", "byte_fallback", "Prepend"});
  refused("/normalizer/normalizers/0/prepend", "_", {"normalizer", "\"_\"", "only"});
  refused("/pre_tokenizer", {{"type", "Metaspace"}}, {"pre_tokenizer", "Metaspace", "only null"});
  refused("/decoder/decoders/3", {{"type", "Fuse"}}, {"decoder", "Strip"});
  refused("/model/ignore_merges", true, {"ignore_merges", "byte_fallback"});
  refused("/model/byte_fallback", false, {"\u2581", "byte-level alphabet"});
  refused("/model/fuse_unk", 1, {"fuse_unk"});
  json file = good;
  file["model"]["vocab"].erase("<0x41>");
  file["model"]["vocab"]["other"] = 3 + 0x41;
  EXPECT_NE(error(file).find("no token for the byte 65, with byte_fallback"), std::string::npos) << error(file);
}

}  // namespace
}  // namespace pare::test
