// Counts what the readers of strangers' text do (data/verify/verify.h, tokenizer/), in steps: a branch of theirs, 16
// bytes that the C library compares, searches or copies for them.  For one file of a program whose objects of data/ and
// tokenizer/ are compiled with -fsanitize-coverage=trace-pc and which is linked with --wrap for each function below.
#pragma once
#include <functional>
#include <memory>

#include "base/text.h"
#include "data/math_value/extract.h"
#include "data/verify/verify.h"
#include "tests/tiny_tokenizer.h"
#include "tokenizer/bpe.h"
#include "tokenizer/unicode.h"
#include "tools/fuzz/fuzz.h"

namespace pare::fuzz {

struct Reader {
  std::string name;
  std::function<void(const std::string& text)> read;
};

inline void add_verifiers(std::vector<Reader>& readers) {
  for (const char* mode : {"exact", "contains", "starts_with", "gsm8k-strict", "gsm8k-flexible", "math-string", "dapo",
                           "countdown", "math-value"}) {
    const Verifier& v = find_verifier(mode);
    readers.push_back({mode, [&v](const std::string& text) {
                         const bool countdown = v.gold_kind == Verifier::Gold::countdown;
                         v.grade(v.lead + text, true, countdown ? R"({"target": 9, "numbers": [9, 1]})" : "9");
                       }});
  }
  readers.push_back({"math-value's gold", [](const std::string& text) { grade_math_value("9", true, text); }});
}

inline void add_tokenizers(std::vector<Reader>& readers) {
  readers.push_back({"nfc", [](const std::string& text) { nfc(text); }});
  const auto add = [&](const char* name, std::shared_ptr<Tokenizer> tokenizer) {
    readers.push_back({name, [tokenizer](const std::string& text) {
                         StreamDecoder stream(*tokenizer);
                         for (const int32_t id : tokenizer->encode(text)) stream.push(id);
                       }});
  };
  const test::MergeList merges = {{"a", "a"},   {"aa", "aa"}, {"aaaa", "aaaa"}, {"a", "b"}, {"ab", "ab"}, {" ", " "},
                                  {"  ", "  "}, {"1", "2"},   {"\n", "\n"},     {"<", "|"}, {"\\", "b"},  {"ab", "a"}};
  nlohmann::json file = test::tokenizer_json(merges, {"<s>", "</s>", "<s><s><s>x", "  "});
  file["normalizer"] = {{"type", "NFC"}};
  add("bpe, qwen2", load_bpe(MemoryFile(file.dump()).path()));
  file["normalizer"] = nullptr;
  file["model"]["ignore_merges"] = true;
  file["pre_tokenizer"] = test::split_by(test::kLlamaRegex);
  add("bpe, llama3", load_bpe(MemoryFile(file.dump()).path()));
  file["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  add("bpe, gpt2", load_bpe(MemoryFile(file.dump()).path()));
  nlohmann::json rows = nlohmann::json::array();
  const auto piece = [&](const std::string& text, double score) {
    rows.push_back({{"id", rows.size()}, {"score", score}, {"piece", text}});
  };
  for (const char* text : {"<unk>", "<s>", "</s>"}) piece(text, 0);
  for (int b = 0; b < 256; b++) piece(format("<0x%02X>", b), 0);
  for (const char* text : {"a", "b", " ", "\\", "1"}) piece(text, -100);
  for (const char* text : {"aa", "aaaa", "ab", "ba", "aba", "  ", "    ", "\\b", "11"})
    piece(text, -double(rows.size()));
  add("sentencepiece", load_sentencepiece_json(MemoryFile(rows.dump()).path()));
}

inline const std::vector<Reader>& readers() {
  static const std::vector<Reader> all = [] {
    std::vector<Reader> made;
    add_verifiers(made);
    add_tokenizers(made);
    return made;
  }();
  return all;
}

// Limit for any text; the most expensive of tests/test_steps.cpp takes 433 a byte.  An answer of up to 2000 bytes is
// read in many ways, and costs up to the second number, whatever the length of the text that it stands in.
constexpr uint64_t kStepsPerByte = 600, kStepsOfAnswer = 20'000'000;

inline uint64_t steps_of(const Reader& reader, const std::string& text) {
  const uint64_t before = steps;
  reader.read(text);
  return steps - before;
}

// `head`, `part` again and again for `size` bytes, `tail`.
inline std::string repeated(const std::string& head, const std::string& part, const std::string& tail, size_t size) {
  std::string text = head;
  while (!part.empty() && text.size() < size) text += part;
  return text + tail;
}

}  // namespace pare::fuzz
