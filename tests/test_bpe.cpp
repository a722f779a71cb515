// Byte-level BPE: the reader of tokenizer.json, word patterns, merges, added tokens, and the vectors of real
// tokenizers.
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>

#include "base/error.h"
#include "base/rng.h"
#include "tests/tiny_tokenizer.h"
#include "tokenizer/bpe.h"
#include "tokenizer/tokenizer_json.h"
#include "tokenizer/unicode.h"
#include "tokenizer/words.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Ids = std::vector<int32_t>;
using Words = std::vector<std::string>;

Words split(WordPattern pattern, const std::string& text) {
  Words words;
  for (const char *p = text.data(), *end = p + text.size(); p < end;) {
    const char* next = word_end(pattern, p, end);
    if (next <= p || next > end) throw std::logic_error("no progress");
    words.emplace_back(p, next);
    p = next;
  }
  return words;
}

// ---- Unicode -------------------------------------------------------------------------------------------------------

TEST(Unicode, ClassesAreThoseOfTheReferenceTokenizers) {
  std::ifstream in("../shared/data/unicode/classes_LNS_unicode16.txt");
  if (!in) GTEST_SKIP() << "../shared/data/unicode is not on this machine";
  std::vector<CharClass> expected(0x110000, CharClass::other);
  int lists = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    const CharClass kind = line[0] == 'L' ? CharClass::letter : line[0] == 'N' ? CharClass::number : CharClass::space;
    std::getline(in, line);
    std::istringstream ranges(line);
    for (std::string range; ranges >> range;) {
      const size_t dash = range.find('-');
      const unsigned long first = std::stoul(range, nullptr, 16),
                          last = dash == std::string::npos ? first : std::stoul(range.substr(dash + 1), nullptr, 16);
      for (unsigned long c = first; c <= last; c++) expected[c] = kind;
    }
    lists++;
  }
  ASSERT_EQ(lists, 3);
  expected['\n'] = expected['\r'] = CharClass::newline;
  for (size_t c = 0; c < expected.size(); c++) ASSERT_EQ(char_classes()[c], expected[c]) << std::hex << c;
}

TEST(Unicode, BadBytesAreReplacedByTheirLongestPart) {
  const std::string r = "\uFFFD";
  const std::map<std::string, std::string> cases = {
      {"a\u00e9\u4e2d\U0001F600", "a\u00e9\u4e2d\U0001F600"},
      {"\x80", r},      // nothing begins with it
      {"\xc3", r},      // cut
      {"\xe4\xb8", r},  // one for the part that is there
      {"\xf0\x9f\x98", r},
      {"\xe4\xb8x", r + "x"},
      {"\xc0\x80", r + r},  // a longer form
      {"\xe0\x80\x80", r + r + r},
      {"\xed\xa0\x80", r + r + r},          // a surrogate
      {"\xf4\x90\x80\x80", r + r + r + r},  // beyond U+10FFFF
      {"\xf5", r},
      {"\xf0\x9f\xff", r + r},
  };
  for (const auto& [bytes, text] : cases) EXPECT_EQ(lossy_utf8(bytes), text) << json(text).dump();
  EXPECT_EQ(cut_bytes("a"), 0u);
  EXPECT_EQ(cut_bytes(""), 0u);
  EXPECT_EQ(cut_bytes("a\xe4"), 1u);
  EXPECT_EQ(cut_bytes("a\xe4\xb8"), 2u);
  EXPECT_EQ(cut_bytes("a\xe4\xb8\xad"), 0u);
  EXPECT_EQ(cut_bytes("\xf0\x9f\x98"), 3u);
  EXPECT_EQ(cut_bytes("\x80\x80\x80\x80"), 0u);
  EXPECT_EQ(cut_bytes("\xed\xa0"), 0u) << "no character can come of it";
  EXPECT_EQ(cut_bytes("\xc0"), 0u);
}

TEST(Unicode, Nfc) {
  EXPECT_EQ(nfc("e\u0301"), "\u00e9");
  EXPECT_EQ(nfc("\u1100\u1161\u11a8"), "\uac01");
  EXPECT_EQ(nfc("\u212b"), "\u00c5") << "a singleton";
  EXPECT_EQ(nfc("\ufb01"), "\ufb01") << "compatibility characters stay";
  EXPECT_EQ(nfc("a\u0323\u0307"), nfc("a\u0307\u0323"));
  EXPECT_EQ(nfc(std::string("e\0\u0301", 4)), std::string("e\0\u0301", 4));
  EXPECT_EQ(nfc("\xff"
                "e\u0301\xc3"
                "e\u0301"),
            "\xff\u00e9\xc3\u00e9");
  for (char32_t c = 0x80; c < 0x300; c++) EXPECT_FALSE(may_need_nfc(utf8_of(c))) << int(c);
  for (char32_t c = 1; c < 0x300; c++) EXPECT_EQ(nfc("a" + utf8_of(c)), "a" + utf8_of(c)) << int(c);
  EXPECT_TRUE(may_need_nfc("e\u0301"));
  EXPECT_FALSE(may_need_nfc("It\u2019s \u4e2d\u6587 \uac01 \U0001F600 \xff"));
  // Characters that are said to stay do so beside any mark that is said to stay, and every other pair is looked at.
  const std::string partners[] = {"a", "\u0301", "\u1161", "\u11a8", "\u3099", "\u0bbe", "\U00011127", "\u0323"};
  for (char32_t c = 0x80; c < 0x20000; c++) {
    if (c >= 0xd800 && c < 0xe000) continue;
    for (const std::string& partner : partners)
      for (const std::string& text : {partner + utf8_of(c), utf8_of(c) + partner})
        if (!may_need_nfc(text)) {
          ASSERT_EQ(nfc(text), text) << int(c);
        }
  }
}

// All code points, alone and beside marks, as the Hugging Face library composes them (tools/make_nfc_table.py): for
// each 4096 of them FNV-1a of what it makes of them.
TEST(Unicode, NfcIsThatOfTheTokenizersLibrary) {
  std::ifstream golden("tests/golden/nfc.txt");
  char32_t c = 0;
  for (std::string line; std::getline(golden, line);) {
    std::string text;
    for (const char32_t first = c; c < first + 0x1000; c++)
      if (const std::string s = utf8_of(c); c < 0xd800 || c >= 0xe000)
        text += s + "\ne\u0345" + s + "\u0334\n" + s + "\u0301\u0323\n\U00011935" + s + "\n";
    uint64_t hash = 0xcbf29ce484222325;
    for (const char byte : nfc(text)) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
    EXPECT_EQ(hash, std::stoull(line, nullptr, 16)) << "below " << std::hex << int(c);
  }
  EXPECT_EQ(c, 0x110000u);
  // What later versions of Unicode compose or reorder stays.
  for (const std::string later :
       {"a\u0898\u0334", "\U00011935\U00011930", "\U00011382\U000113c9", "\U000105d2\u0307", "\U0001611e\U0001611e"})
    EXPECT_EQ(nfc(later), later);
  EXPECT_EQ(nfc("e\u0301\u0898e\u0301"), "\u00e9\u0898\u00e9");
}

// A run of marks is sorted, not shifted.
TEST(Unicode, NfcOfManyMarks) {
  std::string mixed = "a", above, below;
  for (int i = 0; i < 100'000; i++) {
    mixed += "\u0301\u0323";
    above += "\u0301";
    below += "\u0323";
  }
  EXPECT_EQ(nfc(mixed), "\u1ea1" + below.substr(2) + above);
}

// ---- word patterns -------------------------------------------------------------------------------------------------

TEST(WordPatterns, OfGpt2) {
  const std::map<std::string, Words> cases = {
      {"Hello world", {"Hello", " world"}},
      {"don't DON'T we'll", {"don", "'t", " DON", "'", "T", " we", "'ll"}},
      {"a1234 5", {"a", "1234", " 5"}},
      {"x+y  = z!?\n\n", {"x", "+", "y", " ", " =", " z", "!?", "\n\n"}},
      {"a  b", {"a", " ", " b"}},
      {"a \n b", {"a", " \n", " b"}},
      {"a\tb", {"a", "\t", "b"}},
      {"a   ", {"a", "   "}},
      {"'\u017f", {"'", "\u017f"}},
      {"'s's 's", {"'s", "'s", " '", "s"}},
      {"\u3000\u3000a", {"\u3000", "\u3000", "a"}},
  };
  for (const auto& [text, words] : cases) EXPECT_EQ(split(WordPattern::gpt2, text), words) << text;
}

TEST(WordPatterns, OfQwen2AndLlama3) {
  const std::map<std::string, Words> cases = {
      {"Hello world", {"Hello", " world"}},
      {"don't DON'T we'lL 'RE", {"don", "'t", " DON", "'T", " we", "'lL", " '", "RE"}},
      {"x'\u017fy 'k", {"x", "'\u017f", "y", " '", "k"}},
      {"(a.b)\tc", {"(a", ".b", ")", "\tc"}},
      {"x+y  = z!?\n\n \nw", {"x", "+y", " ", " =", " z", "!?\n\n", " \n", "w"}},
      {"a  b", {"a", " ", " b"}},
      {"a \n\t \r\n  b", {"a", " \n\t \r\n", " ", " b"}},
      {"\na", {"\n", "a"}},
      {"a   ", {"a", "   "}},
      {"\u0085\u3000x", {"\u0085", "\u3000x"}},    // white space
      {"\u200b\u200b x", {"\u200b\u200b", " x"}},  // not white space
      {"\u180ex\ufeffy", {"\u180ex", "\ufeffy"}},
      {"\u2028\u2028\n1", {"\u2028\u2028\n", "1"}},
      {"\xff\xff x", {"\xff\xff", " x"}},
      {"e\u0301t", {"e", "\u0301t"}},  // a mark is no letter
  };
  for (const auto& [text, words] : cases)
    for (const WordPattern p : {WordPattern::qwen2, WordPattern::llama3}) EXPECT_EQ(split(p, text), words) << text;
  EXPECT_EQ(split(WordPattern::qwen2, " 12345\u0663"), (Words{" ", "1", "2", "3", "4", "5", "\u0663"}));
  EXPECT_EQ(split(WordPattern::llama3, " 12345\u0663"), (Words{" ", "123", "45\u0663"}));
}

// ---- a tokenizer of our own ----------------------------------------------------------------------------------------

class BpeFile : public testing::Test {
 protected:
  BpeFile() { fs::create_directories(folder_); }
  ~BpeFile() override { fs::remove_all(folder_); }

  std::unique_ptr<Tokenizer> load(const json& file) {
    std::ofstream(folder_ + "tokenizer.json") << file.dump();
    return make_tokenizer(folder_);
  }
  void write_config(const json& config) { std::ofstream(folder_ + "tokenizer_config.json") << config.dump(); }
  std::string error(const json& file) {
    try {
      load(file);
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(folder_), std::string::npos) << "names the file: " << e.what();
      return e.what();
    }
    return "no error";
  }
  void expect_error(const json& file, std::initializer_list<const char*> parts) {
    const std::string what = error(file);
    for (const char* part : parts) EXPECT_NE(what.find(part), std::string::npos) << "\"" << part << "\" in: " << what;
  }

  const std::string folder_ = testing::TempDir() + "pare_bpe_" +
                              testing::UnitTest::GetInstance()->current_test_info()->name() + std::to_string(getpid()) +
                              "/";
};

const MergeList kMerges = {{"a", "b"},   {"b", "c"},  {"ab", "c"},     {"a", "a"},
                           {"aa", "aa"}, {" ", "ab"}, {"\xc3", "\xa9"}};

TEST_F(BpeFile, MergesByRankLeftmostFirst) {
  for (const bool pairs : {false, true}) {
    json file = tokenizer_json(kMerges);
    if (pairs)
      for (json& merge : file["model"]["merges"]) {
        const std::string text = merge;
        merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
      }
    const auto t = load(file);
    EXPECT_EQ(t->vocab_size(), 263);
    EXPECT_EQ(t->encode("abc"), Ids{258});
    EXPECT_EQ(t->encode("bc"), Ids{257});
    EXPECT_EQ(t->encode("aab"), (Ids{'a', 256})) << "ab has the lower rank";
    EXPECT_EQ(t->encode("aaa"), (Ids{259, 'a'})) << "the leftmost of equals";
    EXPECT_EQ(t->encode("aaaaaa"), (Ids{260, 259}));
    EXPECT_EQ(t->encode(" ab ab"), (Ids{261, 261}));
    EXPECT_EQ(t->encode("\u00e9"), Ids{262});
    EXPECT_EQ(t->encode(std::string("\0\xff", 2)), (Ids{0, 255}));
    EXPECT_EQ(t->encode(""), Ids{});
    EXPECT_EQ(t->bos(), -1);
    EXPECT_EQ(t->encode_prompt("abc"), Ids{258});
    EXPECT_EQ(t->decode(Ids{258, 261, 262, 255}), "abc ab\u00e9\xff");
    EXPECT_EQ(t->decode(Ids{263, -1}), "\uFFFD\uFFFD");
  }
}

// All neighbours are looked at again after each merge.
Ids merged_by_definition(const MergeList& merges, const std::string& word) {
  std::vector<std::string> parts;
  for (const char c : word) parts.emplace_back(1, c);
  for (;;) {
    size_t best = parts.size(), best_rank = merges.size();
    for (size_t i = 0; i + 1 < parts.size(); i++) {
      const size_t rank = static_cast<size_t>(
          std::find(merges.begin(), merges.end(), std::pair(parts[i], parts[i + 1])) - merges.begin());
      if (rank < best_rank) {
        best = i;
        best_rank = rank;
      }
    }
    if (best == parts.size()) break;
    parts[best] += parts[best + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  Ids ids;
  for (const std::string& p : parts) {
    int32_t id = static_cast<uint8_t>(p[0]);
    for (size_t k = 0; p.size() > 1 && k < merges.size(); k++)
      if (merges[k].first + merges[k].second == p) id = static_cast<int32_t>(256 + k);
    ids.push_back(id);
  }
  return ids;
}

TEST_F(BpeFile, MergesAsDefined) {
  Rng rng(rng_key(1, RngStream::test, 0));
  for (int round = 0; round < 20; round++) {
    MergeList merges;
    std::vector<std::string> tokens = {"a", "b", "c", "d"};
    while (merges.size() < 25) {
      const auto& left = tokens[rng.below(static_cast<uint32_t>(tokens.size()))];
      const auto& right = tokens[rng.below(static_cast<uint32_t>(tokens.size()))];
      if (std::find(tokens.begin(), tokens.end(), left + right) != tokens.end()) continue;
      merges.emplace_back(left, right);
      tokens.push_back(merges.back().first + merges.back().second);
    }
    const auto t = load(tokenizer_json(merges));
    for (int i = 0; i < 100; i++) {
      std::string word;
      for (uint32_t n = 1 + rng.below(i % 10 ? 20 : 120); n > 0; n--) word += "abcd"[rng.below(4)];
      EXPECT_EQ(t->encode(word), merged_by_definition(merges, word)) << word;
      EXPECT_EQ(t->encode(word), t->encode(word)) << "from the cache";
    }
  }
}

TEST_F(BpeFile, LongWords) {
  MergeList merges;
  for (std::string half = "a"; half.size() < 1024; half += half) merges.emplace_back(half, half);
  const auto t = load(tokenizer_json(merges));
  EXPECT_EQ(t->encode(std::string(1 << 20, 'a')), Ids(1024, 265));
  EXPECT_EQ(t->encode(std::string(1 << 20, '\n')), Ids(1 << 20, '\n'));
}

// Short words are kept with their ids, longer ones are not: all give the same ids when they come again.
TEST_F(BpeFile, WordsOfEveryLengthComeAgain) {
  MergeList merges;
  for (std::string half = "a"; half.size() < 64; half += half) merges.emplace_back(half, half);
  const auto t = load(tokenizer_json(merges));
  for (int again = 0; again < 2; again++)
    for (int n = 1; n <= 300; n++) {
      Ids ids(static_cast<size_t>(n / 64), 261);
      for (int bit = 5; bit > 0; bit--)
        if (n >> bit & 1) ids.push_back(255 + bit);
      if (n & 1) ids.push_back('a');
      EXPECT_EQ(t->encode(std::string(static_cast<size_t>(n), 'a')), ids) << n << " letters";
    }
}

TEST_F(BpeFile, IgnoreMergesTakesWholeWords) {
  json file = tokenizer_json({{"a", "b"}, {"c", "d"}, {"ab", "cd"}});
  file["model"]["merges"].erase(2);  // "abcd" is a token that no merge makes
  EXPECT_EQ(load(file)->encode("abcd abcd"), (Ids{256, 257, ' ', 256, 257}));
  file["model"]["ignore_merges"] = true;
  EXPECT_EQ(load(file)->encode("abcd abcde"), (Ids{258, ' ', 256, 257, 'e'}));
}

TEST_F(BpeFile, AddedTokensComeFirst) {
  json file = tokenizer_json(kMerges, {"<a>", "<a>b", "ab|", "e\u0301"});
  file["normalizer"] = {{"type", "NFC"}};
  file["added_tokens"][1]["special"] = false;
  const auto t = load(file);
  EXPECT_EQ(t->vocab_size(), 267);
  EXPECT_EQ(t->encode("x<a>y"), (Ids{'x', 263, 'y'}));
  EXPECT_EQ(t->encode("<a>b<a>"), (Ids{264, 263})) << "the longest";
  EXPECT_EQ(t->encode("<a>ab|"), (Ids{263, 265}));
  EXPECT_EQ(t->encode("<ab|"), (Ids{'<', 265})) << "the leftmost";
  EXPECT_EQ(t->encode("<a"), (Ids{'<', 'a'}));
  EXPECT_EQ(t->encode("e\u0301\u00e9"), (Ids{266, 262})) << "before normalisation";
  EXPECT_EQ(t->encode("a\u0301"), (Ids{0xc3, 0xa1}));
  EXPECT_TRUE(t->is_special(263) && !t->is_special(264) && !t->is_special('a') && !t->is_special(267));
  EXPECT_EQ(t->decode(Ids{263, 'x', 264}), "<a>x<a>b");
  EXPECT_EQ(t->piece(264), "<a>b");

  file["added_tokens"][3]["normalized"] = true;  // looked for after normalisation, in its own normal form
  EXPECT_EQ(load(file)->encode("e\u0301\u00e9"), (Ids{266, 266}));
  file["added_tokens"][0]["normalized"] = file["added_tokens"][1]["normalized"] = true;
  EXPECT_EQ(load(file)->encode("<ab|<a>b"), (Ids{'<', 265, 264}));
  file["added_tokens"][2]["content"] = "b<";
  EXPECT_EQ(load(file)->encode("<a>b<"), (Ids{263, 265})) << "what is not normalized is found first";
}

TEST_F(BpeFile, AddedTokensMayBeInTheVocabulary) {  // as in GPT-2's file
  json file = tokenizer_json({{"<", "e"}, {"<e", ">"}});
  file["added_tokens"] = json::array({{{"id", 257}, {"content", "<e>"}, {"special", true}}});
  file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}};
  const auto t = load(file);
  EXPECT_EQ(t->vocab_size(), 258);
  EXPECT_EQ(t->encode("12<e>3's"), (Ids{'1', '2', 257, '3', '\'', 's'}));
  EXPECT_TRUE(t->is_special(257));
}

TEST_F(BpeFile, PreTokenizers) {
  const MergeList merges = {{"1", "2"}, {"12", "3"}, {"3", "4"}, {"n", "'"}};
  json file = tokenizer_json(merges);
  EXPECT_EQ(load(file)->encode("1234n't"), (Ids{'1', '2', '3', '4', 'n', '\'', 't'}));
  file["pre_tokenizer"] = split_by(kLlamaRegex);
  EXPECT_EQ(load(file)->encode("1234"), (Ids{257, '4'}));
  file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  EXPECT_EQ(load(file)->encode("a1234n't"), (Ids{'a', 257, '4', 'n', '\'', 't'}));
  file["pre_tokenizer"]["use_regex"] = false;
  EXPECT_EQ(load(file)->encode("n't"), (Ids{259, 't'})) << "one word";
  file["pre_tokenizer"] = split_by(kQwenRegex);
  file["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = true;
  EXPECT_EQ(load(file)->encode("12n't"), (Ids{'1', '2', 'n', '\'', 't'})) << "one pattern inside the other";
}

TEST_F(BpeFile, Bos) {
  json file = tokenizer_json(kMerges, {"<s>", "</s>"});
  file["post_processor"] = bos_template("<s>", 263);
  auto t = load(file);
  EXPECT_EQ(t->bos(), 263);
  EXPECT_EQ(t->eos(), -1);
  EXPECT_EQ(t->encode("abc"), Ids{258});
  EXPECT_EQ(t->encode_prompt("abc"), (Ids{263, 258}));
  EXPECT_EQ(t->encode_prompt(""), Ids{263});
  EXPECT_EQ(t->decode(Ids{263, 258, 263}), "abc<s>");
  EXPECT_EQ(t->piece(263), "<s>");
  const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", false}, {"use_regex", true}};
  file["post_processor"] = {{"type", "Sequence"}, {"processors", json::array({bytes, bos_template("<s>", 263)})}};
  EXPECT_EQ(load(file)->bos(), 263);
  file["post_processor"] = bytes;
  EXPECT_EQ(load(file)->bos(), -1);
  write_config(
      {{"add_bos_token", true}, {"bos_token", {{"content", "<s>"}}}, {"eos_token", "</s>"}, {"pad_token", nullptr}});
  t = load(file);
  EXPECT_EQ(t->encode_prompt("abc"), Ids{258}) << "transformers 5 ignores add_bos_token";
  EXPECT_EQ(t->eos(), 264);
  EXPECT_EQ(t->pad(), -1);
  write_config({{"add_bos_token", false}, {"bos_token", "<s>"}, {"pad_token", "</s>"}});
  t = load(file);
  EXPECT_EQ(t->encode_prompt("abc"), Ids{258});
  EXPECT_EQ(t->pad(), 264);
  write_config({{"eos_token", "<none>"}});
  expect_error(file, {"tokenizer_config.json", "eos_token", "<none>"});
  for (const json& wrong : {json(7), json::array(), json({{"content", 1}}), json(true)}) {
    write_config({{"pad_token", wrong}});
    expect_error(file, {"tokenizer_config.json", "pad_token"});
  }
  const auto write_map = [&](const json& map) { std::ofstream(folder_ + "special_tokens_map.json") << map.dump(); };
  write_map({{"eos_token", {{"content", "<s>"}, {"lstrip", false}}}});
  write_config({{"eos_token", "</s>"}, {"pad_token", "</s>"}});
  EXPECT_EQ(load(file)->eos(), 263) << "the map of older folders wins";
  EXPECT_EQ(load(file)->pad(), 264);
  write_config({{"eos_token", "</s>"}, {"added_tokens_decoder", json::object()}});
  EXPECT_EQ(load(file)->eos(), 264);
  std::filesystem::remove(folder_ + "tokenizer_config.json");
  EXPECT_EQ(load(file)->eos(), 263);
  write_map({{"eos_token", "<none>"}});
  expect_error(file, {"special_tokens_map.json", "eos_token", "<none>"});
  write_map(json::array());
  expect_error(file, {"special_tokens_map.json", "expected an object"});
  std::filesystem::remove(folder_ + "special_tokens_map.json");
  file["post_processor"] = bos_template("<s>", 263);
  write_config({{"add_bos_token", false}, {"add_eos_token", true}});
  EXPECT_EQ(load(file)->encode_prompt("abc"), (Ids{263, 258})) << "the post-processor decides";
}

TEST_F(BpeFile, AnyBytesComeBack) {
  Rng rng(rng_key(2, RngStream::test, 0));
  for (const char* regex : {kQwenRegex, kLlamaRegex, ""}) {
    json file = tokenizer_json(kMerges, {"<s>", "</s>"});
    if (*regex)
      file["pre_tokenizer"] = split_by(regex);
    else
      file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
    const auto t = load(file);
    file["normalizer"] = {{"type", "NFC"}};
    const auto composing = load(file);
    for (int i = 0; i < 400; i++) {
      std::string text;
      const char* const pieces[] = {"ab",     "<s>", "\u0301", "\u4e2d", "\U0001F600",
                                    "\u3000", "12",  "'S",     "\r\n",   "\u1100\u1161"};
      for (uint32_t n = rng.below(40); n > 0; n--) {
        if (rng.below(3) == 0)
          text += pieces[rng.below(std::size(pieces))];
        else
          text += static_cast<char>(rng.below(2) ? rng.below(256) : " ae'\n<s>1.\t"[rng.below(11)]);
      }
      const Ids ids = t->encode(text);
      EXPECT_EQ(t->decode(ids), text);
      std::string streamed;
      StreamDecoder stream(*t);
      for (const int32_t id : ids) {
        streamed += stream.push(id);
        EXPECT_EQ(streamed, lossy_utf8(streamed)) << "always UTF-8";
      }
      EXPECT_EQ(streamed + stream.finish(), lossy_utf8(text));
      EXPECT_EQ(stream.finish(), "");
      // Parts between added tokens are composed one by one.
      std::string composed;
      for (size_t at = 0; at <= text.size();) {
        const size_t s = std::min(text.find("<s>", at), text.find("</s>", at));
        composed += nfc(text.substr(at, s - at));
        if (s == std::string::npos) break;
        const size_t length = text[s + 1] == '/' ? 4 : 3;
        composed += text.substr(s, length);
        at = s + length;
      }
      EXPECT_EQ(composing->decode(composing->encode(text)), composed);
    }
  }
}

TEST_F(BpeFile, StreamingHoldsBackUnfinishedCharacters) {
  const auto t = load(tokenizer_json({}));
  StreamDecoder stream(*t);
  EXPECT_EQ(stream.push(0xe4), "");
  EXPECT_EQ(stream.push(0xb8), "");
  EXPECT_EQ(stream.push(0xad), "\u4e2d");
  EXPECT_EQ(stream.push(0xc3), "");
  EXPECT_EQ(stream.push('x'), "\uFFFDx");
  EXPECT_EQ(stream.push(0x80), "\uFFFD");
  EXPECT_EQ(stream.push(0xf0), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.push('y'), "y");
}

TEST_F(BpeFile, WhatIsNotSupportedIsNamed) {
  const json good = tokenizer_json(kMerges, {"<s>"});
  EXPECT_EQ(error(good), "no error");
  const auto with = [&](const char* pointer, const json& value) {
    json file = good;
    file[json::json_pointer(pointer)] = value;
    return file;
  };
  expect_error(with("/version", "2.0"), {"version", "2.0", "not supported"});
  expect_error(with("/truncation", {{"max_length", 5}}), {"truncation", "max_length"});
  expect_error(with("/padding", {{"strategy", "x"}}), {"padding"});
  expect_error(with("/extra", 1), {"extra"});
  expect_error(with("/normalizer", {{"type", "NFKC"}}), {"normalizer", "NFKC", "not supported"});
  expect_error(with("/normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}}),
               {"normalizer.normalizers[0]", "Lowercase"});
  expect_error(with("/pre_tokenizer", nullptr), {"pre_tokenizer", "ByteLevel"});
  expect_error(with("/pre_tokenizer", {{"type", "Metaspace"}}), {"pre_tokenizer", "Metaspace"});
  expect_error(with("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\w+"),
               {"pretokenizers[0].pattern", "\\\\w+", "regular expression", "not supported"});
  expect_error(with("/pre_tokenizer/pretokenizers/0/pattern", {{"String", ""}}), {"pattern", "not empty"});
  expect_error(with("/pre_tokenizer/pretokenizers/0/pattern", {{"String", " "}, {"Regex", " "}}), {"pattern", "one"});
  expect_error(with("/pre_tokenizer/pretokenizers/0/behavior", "Removed"), {"behavior", "Removed", "everything"});
  expect_error(with("/pre_tokenizer/pretokenizers/0/behavior", "Split"), {"behavior", "Split"});
  expect_error(with("/pre_tokenizer/pretokenizers/0/invert", 1), {"invert", "true or false"});
  expect_error(with("/pre_tokenizer/pretokenizers/1/add_prefix_space", true), {"add_prefix_space"});
  expect_error(with("/pre_tokenizer/pretokenizers/2", {{"type", "Digits"}}), {"pretokenizers[2]", "Digits"});
  expect_error(with("/post_processor", {{"type", "BertProcessing"}}), {"post_processor", "BertProcessing"});
  json twice = bos_template("<s>", 263);
  twice["single"].push_back(twice["single"][0]);
  expect_error(with("/post_processor", twice), {"post_processor.single"});
  expect_error(with("/post_processor", bos_template("<s>", 264)), {"special_tokens", "264"});
  expect_error(with("/decoder", {{"type", "WordPiece"}}), {"decoder", "WordPiece"});
  expect_error(with("/decoder", nullptr), {"decoder"});
  expect_error(with("/model/type", "Unigram"), {"model.type", "Unigram"});
  expect_error(with("/model/dropout", 0.1), {"model.dropout", "0.1"});
  expect_error(with("/model/continuing_subword_prefix", "##"), {"continuing_subword_prefix"});
  expect_error(with("/model/byte_fallback", true), {"byte_fallback"});
  expect_error(with("/model/other", 1), {"model.other"});
  for (const char* flag : {"lstrip", "rstrip", "single_word"})
    expect_error(with((std::string("/added_tokens/0/") + flag).c_str(), true), {"<s>", flag});
}

TEST_F(BpeFile, BrokenFilesAreErrors) {
  const json good = tokenizer_json(kMerges, {"<s>", "</s>"});
  const auto with = [&](const char* pointer, const json& value) {
    json file = good;
    file[json::json_pointer(pointer)] = value;
    return file;
  };
  for (const json& id : {json(-1), json(263), json(1.5), json("7"), json(nullptr), json(UINT64_MAX)})
    expect_error(with("/model/vocab/a", id), {"model.vocab", "\"a\"", id.dump().c_str()});
  expect_error(with("/model/vocab/a", 98), {"two tokens have the id 98"});
  expect_error(with("/model/vocab/\u4e2d", 263), {"\u4e2d", "byte-level alphabet"});
  for (const json& merge : {json("ab"), json("a b c"), json(7), json({"a"}), json({"a", 1}), json({"a", "b", "c"})})
    expect_error(with("/model/merges/1", merge), {"merge 1", merge.dump().c_str(), "expected two tokens"});
  expect_error(with("/model/merges/1", "a z"), {"merge 1", "a z", "model.vocab"});
  expect_error(with("/model/merges/1", "a b"), {"merge 1 occurs twice"});
  expect_error(with("/added_tokens/1/id", 265), {"</s>", "265", "without a hole"});
  expect_error(with("/added_tokens/1/id", 263), {"</s>", "another token has the id 263"});
  expect_error(with("/added_tokens/1/id", 97), {"</s>", "another token of the id 97"});
  expect_error(with("/added_tokens/1/content", ""), {"added_tokens", "content"});
  expect_error(with("/added_tokens", 1), {"added_tokens"});
  expect_error(with("/model", 1), {"model"});
  expect_error(with("/model/vocab", json::array()), {"model.vocab"});
  expect_error(json::array(), {"the file is []"});
  json no_model = good;
  no_model.erase("model");
  expect_error(no_model, {"model is missing"});
  std::ofstream(folder_ + "tokenizer.json") << "{";
  EXPECT_THROW(make_tokenizer(folder_), Error);
  // What prints it would take more stack than there is.
  std::ofstream(folder_ + "tokenizer.json")
      << R"({"x": )" << std::string(400'000, '[') << std::string(400'000, ']') << "}";
  EXPECT_THROW(make_tokenizer(folder_), Error);
  EXPECT_THROW(load_bpe(folder_ + "none.json"), Error);
  EXPECT_THROW(load_bpe(folder_), Error);
}

// A file that a few random changes have been made to is read or refused, and what is read gives the bytes back.
TEST_F(BpeFile, SurvivesMutations) {
  const json good = [] {
    json file = tokenizer_json(kMerges, {"<s>", "</s>"});
    file["normalizer"] = {{"type", "NFC"}};
    file["post_processor"] = bos_template("<s>", 263);
    return file;
  }();
  const json flat = good.flatten();  // its keys are the places of all values
  std::vector<std::string> places;
  for (const auto& [place, value] : flat.items())
    if (place.find("/vocab/") == std::string::npos || value.get<int>() % 8 == 0) places.push_back(place);
  Rng rng(rng_key(3, RngStream::test, 0));
  const json values[] = {nullptr,
                         true,
                         false,
                         0,
                         -1,
                         263,
                         1e300,
                         UINT64_MAX,
                         "",
                         "a",
                         "a b",
                         "<s>",
                         "ByteLevel",
                         "Split",
                         "Sequence",
                         json::array(),
                         json::object(),
                         json::array({"a", "b"}),
                         {{"type", "NFC"}}};
  int read = 0, refused = 0;
  for (int i = 0; i < 600; i++) {
    json file = good;
    std::string text;
    if (i % 3 == 0) {  // the text of the file
      text = good.dump();
      for (uint32_t n = 1 + rng.below(3); n > 0; n--) {
        const size_t at = rng.below(static_cast<uint32_t>(text.size()));
        if (rng.below(3) == 0)
          text.erase(at, 1 + rng.below(9));
        else
          text[at] = static_cast<char>(rng.below(256));
      }
    } else if (i % 3 == 1) {  // other merges, other flags
      json& merges = file["model"]["merges"];
      std::swap(merges[rng.below(7)], merges[rng.below(7)]);
      for (uint32_t n = rng.below(3); n > 0; n--) merges.erase(rng.below(static_cast<uint32_t>(merges.size())));
      file["model"]["ignore_merges"] = rng.below(2) == 0;
      for (json& token : file["added_tokens"]) token["normalized"] = rng.below(2) == 0;
      file["added_tokens"][0]["content"] = rng.below(2) ? "a" : "\u0301";
      text = file.dump();
    } else {  // its values
      for (uint32_t n = 1 + rng.below(2); n > 0; n--) {
        json::json_pointer at(places[rng.below(static_cast<uint32_t>(places.size()))]);
        for (uint32_t up = rng.below(3); up > 0 && !at.parent_pointer().empty(); up--) at = at.parent_pointer();
        if (!file.contains(at)) continue;
        file[at] = values[rng.below(std::size(values))];
      }
      text = file.dump();
    }
    std::ofstream(folder_ + "tokenizer.json") << text;
    std::unique_ptr<Tokenizer> t;
    try {
      t = make_tokenizer(folder_);
    } catch (const Error&) {
      refused++;
      continue;
    }
    read++;
    std::string bytes;
    for (uint32_t n = rng.below(60); n > 0; n--)
      bytes += static_cast<char>(rng.below(2) ? rng.below(256) : "ab <s>/1\n"[rng.below(9)]);
    std::string decoded;
    try {
      for (const int32_t id : t->encode(bytes)) decoded += t->piece(id);
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("no token for the byte"), std::string::npos) << e.what();
      continue;
    }
    EXPECT_EQ(nfc(decoded), nfc(bytes)) << "round " << i;
  }
  EXPECT_GT(read, 200);
  EXPECT_GT(refused, 50);
}

// ---- real tokenizers -----------------------------------------------------------------------------------------------

const std::string kData = "../shared/data/";

struct Family {
  const char *file, *vectors, *external;
};
class RealTokenizer : public testing::TestWithParam<Family> {};

// As the library's decode.
std::string decode(const Tokenizer& tokenizer, const Ids& ids, bool skip_special) {
  std::string text;
  for (const int32_t id : ids)
    if (!skip_special || !tokenizer.is_special(id)) text += tokenizer.piece(id);
  return lossy_utf8(text);
}

void check_encode(const Tokenizer& tokenizer, const std::string& vectors) {
  const auto rows = rows_of(kData + "tokenizer_vectors/encode_" + vectors + ".jsonl");
  ASSERT_GT(rows.size(), 700u);
  for (const json& row : rows) {
    const std::string text = row["text"];
    const Ids ids = row["ids"];
    EXPECT_EQ(tokenizer.encode(text), ids) << row["id"] << ' ' << text;
    Ids prompt = row.value("prefix_with_special", Ids());
    prompt.insert(prompt.end(), ids.begin(), ids.end());
    EXPECT_EQ(tokenizer.encode_prompt(text), prompt) << row["id"];
    const std::string decoded = row.value("decoded", text);
    EXPECT_EQ(decode(tokenizer, ids, false), decoded) << row["id"];
    EXPECT_EQ(decode(tokenizer, ids, true), row.value("decoded_skip_special", decoded)) << row["id"];
    EXPECT_EQ(tokenizer.decode(prompt), decoded) << row["id"];
  }
}

void check_decode(const Tokenizer& tokenizer, const std::string& vectors) {
  const auto rows = rows_of(kData + "tokenizer_vectors/decode_" + vectors + ".jsonl");
  ASSERT_GE(rows.size(), 100u);
  for (const json& row : rows) {
    const Ids ids = row["ids"];
    EXPECT_EQ(decode(tokenizer, ids, false), row["text"]);
    EXPECT_EQ(decode(tokenizer, ids, true), row["text_skip_special"]);
    StreamDecoder stream(tokenizer);
    std::string text;
    for (const int32_t id : ids) text += stream.push(id);
    EXPECT_EQ(text + stream.finish(), row["text"]);
  }
}

TEST_P(RealTokenizer, DoesAsTheLibrary) {
  const RealFile file(GetParam().file);
  if (file.folder().empty()) GTEST_SKIP() << "../shared/data/tokenizers is not on this machine, or xz is not";
  const auto tokenizer = make_tokenizer(file.folder());
  check_encode(*tokenizer, GetParam().vectors);
  check_decode(*tokenizer, GetParam().vectors);
  int external = 0;
  for (const json& row : rows_of(kData + "tokenizer_vectors/external_llamacpp.jsonl")) {
    if (row["family"] != GetParam().external) continue;
    EXPECT_EQ(tokenizer->encode(row["text"].get<std::string>()), row["ids"].get<Ids>()) << row["text"];
    external++;
  }
  EXPECT_GT(external, 40);
}

INSTANTIATE_TEST_SUITE_P(Files, RealTokenizer,
                         testing::Values(Family{"qwen2.5", "qwen2.5", "qwen2"}, Family{"qwen3", "qwen3", "qwen2"},
                                         Family{"llama-3.1", "llama-3", "llama3"}),
                         [](const auto& info) {
                           std::string name = info.param.file;
                           for (char& c : name)
                             if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
                           return name;
                         });

}  // namespace
}  // namespace pare::test
