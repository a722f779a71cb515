#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/rng.h"
#include "tokenizer/tokenizer.h"

namespace pare {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<int32_t>;

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

void expect_mentions(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" in: " << text;
}

// ---- ssa

TEST(SsaTokenizer, VocabularyIsTheStringOfSymbols) {
  const auto t = make_tokenizer("ssa");
  const std::string symbols = "_^$+-*=;#?:>0123456789abcdefghijklmnopqrstuvwxyz";
  ASSERT_EQ(t->vocab_size(), 48);
  EXPECT_EQ(Ids({t->pad(), t->bos(), t->eos()}), t->encode("_^$"));
  const Ids ids = t->encode(symbols);
  for (int32_t i = 0; i < 48; i++) EXPECT_EQ(ids[i], i);
  EXPECT_EQ(t->decode(ids), symbols);
  EXPECT_EQ(t->encode_prompt("a4;"), (Ids{1, 22, 16, 7}));
  EXPECT_EQ(t->decode(Ids{1, 22, 16, 1, 2, 0}), "a4^$_") << "only a BOS at the front is dropped";
  EXPECT_EQ(t->decode(Ids{22, 48, -1, 23}), "a\uFFFD\uFFFDb");
  EXPECT_EQ(t->encode(""), Ids{});
  EXPECT_EQ(t->encode_prompt(""), Ids{1});
  EXPECT_EQ(t->decode(Ids{}), "");
}

TEST(SsaTokenizer, OtherCharactersAreErrors) {
  const auto t = make_tokenizer("ssa");
  expect_mentions(message([&] { t->encode("a4b9A2"); }), {"'A'", "position 4", "a4b9A2"});
  expect_mentions(message([&] { t->encode("a4\n"); }), {"byte 10", "position 2"});
  expect_mentions(message([&] { t->encode_prompt("\xff"); }), {"byte 255", "position 0"});
  EXPECT_THROW(t->encode(std::string_view("a\0b", 3)), Error);
}

// ---- SentencePiece

struct Piece {
  std::string text;
  float score;
};

std::string file_of(const std::vector<Piece>& pieces, int32_t longest = 9) {
  std::string bytes(reinterpret_cast<const char*>(&longest), 4);
  for (const Piece& p : pieces) {
    const auto length = static_cast<int32_t>(p.text.size());
    bytes.append(reinterpret_cast<const char*>(&p.score), 4);
    bytes.append(reinterpret_cast<const char*>(&length), 4);
    bytes += p.text;
  }
  return bytes;
}

class SentencePieceFile : public testing::Test {
 protected:
  SentencePieceFile() {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
  }
  ~SentencePieceFile() override { fs::remove_all(directory_); }

  std::string write(const std::string& bytes) {
    std::ofstream(path(), std::ios::binary) << bytes;
    return path();
  }
  std::unique_ptr<Tokenizer> load(const std::vector<Piece>& pieces) {
    return load_sentencepiece(write(file_of(pieces)));
  }
  std::string path() const { return directory_ + "/tokenizer.bin"; }

  const std::string directory_ =
      testing::TempDir() + "pare_" + testing::UnitTest::GetInstance()->current_test_info()->name();
};

// ids:                          0              1               2          3    4    5    6    7    8 ...
const std::vector<Piece> kBase{{"<unk>", 0}, {"\n<s>\n", 0}, {"\n</s>\n", 0}, {" ", -9},
                               {"a", -9},    {"b", -9},      {"c", -9}};

std::vector<Piece> with(std::initializer_list<Piece> more) {
  std::vector<Piece> pieces = kBase;
  pieces.insert(pieces.end(), more);
  return pieces;
}

TEST_F(SentencePieceFile, MergesTheBestScoreFirst) {
  // ab 7, bc 8, abc 9: the better of ab and bc is merged first, whether or not a longer piece comes of it.
  EXPECT_EQ(load(with({{"ab", -1}, {"bc", -2}}))->encode("abc"), (Ids{7, 6}));
  EXPECT_EQ(load(with({{"ab", -2}, {"bc", -1}}))->encode("abc"), (Ids{4, 8}));
  EXPECT_EQ(load(with({{"ab", -2}, {"bc", -1}, {"abc", -3}}))->encode("abc"), Ids{9});
  EXPECT_EQ(load(with({{"ab", -1}, {"cab", -2}}))->encode("cabcab"), (Ids{8, 8}));
  // A piece that no pair leads to is not found.
  EXPECT_EQ(load(with({{"abc", 5}}))->encode("abc"), (Ids{4, 5, 6}));
}

TEST_F(SentencePieceFile, EqualScoresMergeFromTheLeft) {
  EXPECT_EQ(load(with({{"aa", -1}}))->encode("aaaaa"), (Ids{7, 7, 4}));
  EXPECT_EQ(load(with({{"ab", -1}, {"bc", -1}}))->encode("abcbc"), (Ids{7, 6, 8}));
}

// All neighbours are looked at again after each merge.
TEST_F(SentencePieceFile, MergesAsDefined) {
  Rng rng(rng_key(4, RngStream::test, 0));
  const auto below = [&](size_t n) { return rng.below(static_cast<uint32_t>(n)); };
  for (int round = 0; round < 20; round++) {
    std::vector<Piece> pieces = kBase;
    while (pieces.size() < 30) {
      std::string text;
      for (uint32_t n = 2 + below(4); n > 0; n--) text += "abc"[below(3)];
      const auto same = [&](const Piece& p) { return p.text == text; };
      if (std::none_of(pieces.begin(), pieces.end(), same)) pieces.push_back({text, -static_cast<float>(below(6))});
    }
    const auto t = load(pieces);
    const auto find = [&](const std::string& text) {
      size_t id = 3;
      while (id < pieces.size() && pieces[id].text != text) id++;
      return id;
    };
    for (int i = 0; i < 100; i++) {
      std::vector<std::string> parts;
      std::string text;
      for (uint32_t n = 1 + below(30); n > 0; n--) text += parts.emplace_back(1, "abc"[below(3)]);
      for (;;) {
        size_t best = parts.size();
        float score = 0;
        for (size_t k = 0; k + 1 < parts.size(); k++)
          if (const size_t id = find(parts[k] + parts[k + 1]); id < pieces.size())
            if (best == parts.size() || pieces[id].score > score) {
              best = k;
              score = pieces[id].score;
            }
        if (best == parts.size()) break;
        parts[best] += parts[best + 1];
        parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      }
      Ids ids;
      for (const std::string& part : parts) ids.push_back(static_cast<int32_t>(find(part)));
      EXPECT_EQ(t->encode(text), ids) << text;
    }
  }
}

TEST_F(SentencePieceFile, LongText) {
  const auto t = load(with({{"aa", -1}, {"aaaa", -2}}));
  EXPECT_EQ(t->encode(std::string(1 << 20, 'a')), Ids(1 << 18, 8));
}

TEST_F(SentencePieceFile, PromptGetsBosAndASpace) {
  const auto t = load(with({{" a", -1}}));
  EXPECT_EQ(t->encode_prompt("ab a"), (Ids{1, 7, 5, 7}));
  EXPECT_EQ(t->encode("ab a"), (Ids{4, 5, 7}));
  EXPECT_EQ(t->encode_prompt(""), Ids{1});
  EXPECT_EQ(t->decode(Ids{1, 7, 5, 7}), "ab a");
  EXPECT_EQ(t->decode(Ids{7, 5, 7}), " ab a") << "a continuation keeps its space";
  EXPECT_EQ(t->decode(t->encode_prompt(" a")), " a") << "one space is dropped, not all";
  EXPECT_EQ(t->decode(Ids{7, 1, 7, 2}), " a\n<s>\na\n</s>\n") << "special pieces inside are shown";
  EXPECT_EQ(t->decode(Ids{4, 8, -1}), "a\uFFFD\uFFFD");
}

// What streams after the beginning of a text is what decoding all of it adds.
TEST_F(SentencePieceFile, StreamsAsItDecodes) {
  const auto t = load(with({{" a", -1}, {"<0xC3>", 0}, {"<0xA9>", 0}}));
  for (const Ids& all : {Ids{1, 7, 5, 7}, Ids{7, 1, 7, 8, 9, 7}, Ids{1, 1, 7, 2, 7}, Ids{1, 8, 9, 3, 4}})
    for (size_t begin = 1; begin < all.size(); begin++) {
      const std::span<const int32_t> before = std::span(all).first(begin);
      StreamDecoder stream(*t, before.back());
      std::string text;
      for (size_t i = begin; i < all.size(); i++) text += stream.push(all[i]);
      if (all[begin] == 9) continue;  // begins inside a character
      EXPECT_EQ(t->decode(before) + text, t->decode(all)) << begin;
      EXPECT_EQ(stream.finish(), "");
    }
}

TEST_F(SentencePieceFile, FallsBackToBytes) {
  const auto t = load(with({{"<0xC3>", 0}, {"<0xA9>", 0}, {"\xc3\xa0", -5}, {"<0xFF>", 0}}));
  EXPECT_EQ(t->encode("a\u00e9b"), (Ids{4, 7, 8, 5}));
  EXPECT_EQ(t->encode("\u00e0"), Ids{9}) << "a character with a piece";
  EXPECT_EQ(t->encode("\xff\xc3"), (Ids{10, 7})) << "bytes that are not UTF-8";
  EXPECT_EQ(t->decode(Ids{4, 7, 8, 5}), "a\u00e9b");
  EXPECT_EQ(t->decode(Ids{7}), "\xc3");
  expect_mentions(message([&] { t->encode("ab\u00e8"); }), {"\u00e8", "at byte 3", "tokenizer.bin"});
  expect_mentions(message([&] { t->encode("x"); }), {"\"x\"", "at byte 0"});
}

TEST_F(SentencePieceFile, PiecesThatLookLikeBytesAreText) {
  const auto t = load(with({{"<0x41)", -1}, {"<1x41>", -1}, {"abc41>", -1}, {"<0x4g>", -1}, {"<0x41>1", -1}}));
  EXPECT_EQ(t->decode(Ids{7, 8, 9, 10, 11}), "<0x41)<1x41>abc41><0x4g><0x41>1");
}

TEST_F(SentencePieceFile, TheFirstThreePiecesAreSpecial) {
  const auto t = load(kBase);
  for (int32_t id = -1; id <= 7; id++) EXPECT_EQ(t->is_special(id), id >= 0 && id < 3) << id;
}

TEST_F(SentencePieceFile, AFileThatCannotBeOpenedIsNamedAsSuch) {
  expect_mentions(message([&] { load_sentencepiece(path()); }), {path().c_str(), "cannot be opened"});
}

TEST_F(SentencePieceFile, SpecialPiecesDoNotComeOutOfText) {
  const auto t = load(with({{"<", -9},
                            {"s", -9},
                            {">", -9},
                            {"\n", -9},
                            {"<s", -1},
                            {"<s>", -1},
                            {"\n<s>", -1},
                            {"0", -9},
                            {"x", -9},
                            {"A", -9},
                            {"<0", -1},
                            {"<0x", -1},
                            {"<0xA", -1},
                            {"<0xAA", -1},
                            {"<0xAA>", -1}}));
  const Ids ids = t->encode("\n<s>\n<0xAA>");
  EXPECT_EQ(ids, (Ids{13, 10, 20, 9}));
  EXPECT_EQ(t->decode(ids), "\n<s>\n<0xAA>");
}

TEST_F(SentencePieceFile, BrokenFilesAreErrors) {
  const std::vector<Piece> pieces = with({{"ab", -1}});
  const std::string bytes = file_of(pieces);
  size_t whole = 0;  // lengths at which at least three pieces are complete
  for (size_t n = 0; n < bytes.size(); n++) {
    write(bytes.substr(0, n));
    size_t end = 4, complete = 0;
    while (end < n) end += 8 + pieces[complete++].text.size();
    if (end == n && complete >= 3) {
      EXPECT_EQ(load_sentencepiece(path())->vocab_size(), static_cast<int32_t>(complete));
      whole++;
    } else {
      EXPECT_THROW(load_sentencepiece(path()), Error) << n;
    }
  }
  EXPECT_EQ(whole, 5u);
  const auto with_int = [&](size_t at, int32_t value) {
    std::string broken = bytes;
    std::memcpy(broken.data() + at, &value, 4);
    return write(broken);
  };
  for (int32_t length : {-1, 0, 10, INT32_MAX, INT32_MIN})
    expect_mentions(message([&] { load_sentencepiece(with_int(8, length)); }),
                    {"piece 0", std::to_string(length).c_str()});
  for (int32_t longest : {-1, 0, 5}) EXPECT_THROW(load_sentencepiece(with_int(0, longest)), Error);
  EXPECT_THROW(load_sentencepiece(with_int(4, 0x7fc00000)), Error) << "a score that is not a number";
}

TEST_F(SentencePieceFile, ListsOfPieces) {
  const std::string json = directory_ + "/vocab_pieces.json";
  const auto load_list = [&](const std::string& text) {
    std::ofstream(json) << text;
    return make_tokenizer(directory_);
  };
  const std::string start = R"([{"id": 0, "score": 0, "piece": "<unk>"}, {"id": 1, "score": 0, "piece": "<s>"},
                                {"id": 2, "score": 0, "piece": "</s>"}, {"id": 3, "score": 0, "piece": "<0x41>"},)";
  const auto t = load_list(start + R"({"id": 4, "score": -1, "piece": " "}, {"id": 5, "score": -2, "piece": "b"},
                                      {"id": 6, "score": -3, "piece": " b"}])");
  EXPECT_EQ(t->encode_prompt("bA b"), (Ids{1, 6, 3, 6}));
  EXPECT_EQ(t->decode(Ids{1, 6, 3, 6}), "bA b");
  EXPECT_EQ(t->piece(3), "A");
  EXPECT_EQ(t->piece(7), "\uFFFD");
  EXPECT_TRUE(t->is_special(1) && t->is_special(2) && !t->is_special(3) && !t->is_special(-1));
  for (const char* row : {"7]", R"({"id": 4, "score": 0}])", R"({"id": 4, "score": "0", "piece": "x"}])",
                          R"({"id": 4, "score": 0, "piece": 7}])", R"({"id": 4, "score": 0, "piece": ""}])",
                          R"({"id": 5, "score": 0, "piece": "x"}])", R"({"id": "4", "score": 0, "piece": "x"}])",
                          R"({"id": 4, "score": 1e300, "piece": "x"}])"})
    expect_mentions(message([&] { load_list(start + row); }), {"vocab_pieces.json", "piece 4"});
  for (const char* text : {"", "{}", "[]", "[1"})
    expect_mentions(message([&] { load_list(text); }), {"vocab_pieces.json"});
}

TEST_F(SentencePieceFile, FactoryFindsOrExplains) {
  expect_mentions(message([&] { make_tokenizer(directory_); }), {"no tokenizer.bin", "ssa"});
  std::ofstream(directory_ + "/tokenizer.json") << "{}";
  expect_mentions(message([&] { make_tokenizer(directory_); }), {"tokenizer.json", "model is missing"});
  write(file_of(kBase));
  EXPECT_EQ(make_tokenizer(directory_)->vocab_size(), 7);
  EXPECT_EQ(make_tokenizer(path())->vocab_size(), 7);
  expect_mentions(message([&] { make_tokenizer(directory_ + "/none"); }), {"no such file", "supported"});
  expect_mentions(message([&] { make_tokenizer("Owner/Na.me"); }), {"hf download Owner/Na.me --local-dir Na.me"});
  write("GGUF\x03");
  expect_mentions(message([&] { make_tokenizer(path()); }), {"tokenizer.bin", "is GGUF", "safetensors"});
}

// ---- stories260K

const std::string kStories = "../shared/data/tiny_models/stories260k/";

class Stories : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kStories + "tokenizer.bin")) GTEST_SKIP() << kStories << " is not on this machine";
    tokenizer_ = make_tokenizer(kStories + "tokenizer.bin");
  }
  nlohmann::json read(const char* name) { return nlohmann::json::parse(std::ifstream(kStories + name)); }
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(Stories, PiecesAreThoseOfTheList) {
  const auto pieces = read("vocab_pieces.json");
  ASSERT_EQ(tokenizer_->vocab_size(), 512);
  ASSERT_EQ(pieces.size(), 512u);
  for (const auto& piece : pieces) {
    const int32_t id = piece["id"];
    const std::string text = piece["piece"];
    const bool byte = id >= 3 && id < 259;
    if (id == tokenizer_->bos()) continue;  // dropped at the front
    EXPECT_EQ(tokenizer_->decode(Ids{id}), byte ? std::string(1, static_cast<char>(id - 3)) : text);
    if (id >= 259) {
      EXPECT_EQ(tokenizer_->encode(text), Ids{id}) << text;
    }
  }
}

TEST_F(Stories, ListOfPiecesIsTheSameTokenizer) {
  const auto listed = make_tokenizer(kStories + "vocab_pieces.json");
  ASSERT_EQ(listed->vocab_size(), 512);
  const Ids tokens = read("golden_visible.json")["sequences"][0]["tokens"];
  const std::string text = tokenizer_->decode(tokens);
  EXPECT_EQ(listed->decode(tokens), text);
  EXPECT_EQ(listed->encode_prompt(text + "\u00e9\xff"), tokenizer_->encode_prompt(text + "\u00e9\xff"));
  for (int32_t id = 0; id < 512; id++) EXPECT_EQ(listed->piece(id), tokenizer_->piece(id));
}

TEST_F(Stories, GoldenTexts) {
  const auto golden = read("golden_visible.json");
  for (const auto& sequence : golden["sequences"]) {
    const Ids tokens = sequence["tokens"];
    const std::string text = sequence["text"];
    EXPECT_EQ(tokenizer_->decode(tokens), text);
    EXPECT_EQ(tokenizer_->decode(tokenizer_->encode_prompt(text)), text);
  }
  const Ids greedy = golden["sequences"][0]["tokens"];
  const std::string sentence = "Once upon a time, there was a little girl named Lily.";
  const Ids ids = tokenizer_->encode_prompt(sentence);
  EXPECT_EQ(ids, Ids(greedy.begin(), greedy.begin() + static_cast<std::ptrdiff_t>(ids.size())));
}

TEST_F(Stories, AnyBytesComeBack) {
  Rng rng(rng_key(1, RngStream::test, 0));
  for (int i = 0; i < 200; i++) {
    std::string text;
    for (uint32_t n = rng.below(40); n > 0; n--)
      text += static_cast<char>(rng.below(2) ? rng.below(256) : "etaoin shr<0x>."[rng.below(15)]);
    EXPECT_EQ(tokenizer_->decode(tokenizer_->encode(text)), text);
    EXPECT_EQ(tokenizer_->decode(tokenizer_->encode_prompt(text)), text);
  }
}

}  // namespace
}  // namespace pare
