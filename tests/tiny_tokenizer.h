// A tokenizer.json of our own: the 256 bytes, some merges, control tokens.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace pare::test {

inline std::string utf8_of(char32_t c) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | (c >> shift & 0x3f)); };
  if (c < 0x80) return std::string(1, static_cast<char>(c));
  if (c < 0x800) return {static_cast<char>(0xc0 | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xe0 | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xf0 | c >> 18), tail(12), tail(6), tail(0)};
}
// A character of the byte-level alphabet for each byte, in the order of the bytes' ids; GPT-2's rule.
inline std::string byte_level(const std::string& bytes) {
  static const std::vector<std::string> alphabet = [] {
    std::vector<std::string> a(256);
    char32_t next = 0x100;
    for (int b = 0; b < 256; b++) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
      a[static_cast<size_t>(b)] = utf8_of(printable ? static_cast<char32_t>(b) : next++);
    }
    return a;
  }();
  std::string text;
  for (const char c : bytes) text += alphabet[static_cast<uint8_t>(c)];
  return text;
}

inline const char* const kQwenRegex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline const char* const kLlamaRegex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

inline nlohmann::json split_by(const char* regex) {
  using nlohmann::json;
  const json split = {{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
  const json bytes = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  return {{"type", "Sequence"}, {"pretokenizers", json::array({split, bytes})}};
}

// Byte b has the id b, merge k the id 256 + k; the pieces of a merge are bytes.
using MergeList = std::vector<std::pair<std::string, std::string>>;
inline nlohmann::json tokenizer_json(const MergeList& merges, const std::vector<std::string>& special = {}) {
  using nlohmann::json;
  json vocab = json::object(), list = json::array(), added = json::array();
  for (int b = 0; b < 256; b++) vocab[byte_level(std::string(1, static_cast<char>(b)))] = b;
  for (const auto& [left, right] : merges) {
    vocab[byte_level(left + right)] = vocab.size();
    list.push_back(byte_level(left) + " " + byte_level(right));
  }
  for (const std::string& content : special)
    added.push_back({{"id", vocab.size() + added.size()},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", split_by(kQwenRegex)},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", list}}}};
}

inline nlohmann::json bos_template(const std::string& token, int id) {
  using nlohmann::json;
  return {{"type", "TemplateProcessing"},
          {"single", json::array({{{"SpecialToken", {{"id", token}, {"type_id", 0}}}},
                                  {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}})},
          {"pair", json::array()},
          {"special_tokens", {{token, {{"id", token}, {"ids", {id}}, {"tokens", {token}}}}}}};
}

// A real tokenizer.json of ../shared/data, unpacked into a folder of its own for as long as this lives; no folder where
// there is no such data or no xz.
class RealFile {
 public:
  explicit RealFile(const std::string& name) {
    const std::string packed = "../shared/data/tokenizers/" + name + ".tokenizer.json.xz";
    if (!std::filesystem::exists(packed)) return;
    folder_ = testing::TempDir() + "pare_real_" + name + "_" + std::to_string(getpid()) + "/";
    std::filesystem::create_directories(folder_);
    if (std::system(("xz -dc '" + packed + "' > '" + folder_ + "tokenizer.json'").c_str()) == 0) return;
    std::filesystem::remove_all(folder_);
    folder_.clear();
  }
  ~RealFile() {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  RealFile(const RealFile&) = delete;
  RealFile& operator=(const RealFile&) = delete;
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
};

inline std::vector<nlohmann::json> rows_of(const std::string& path) {
  std::vector<nlohmann::json> rows;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) rows.push_back(nlohmann::json::parse(line));
  return rows;
}

}  // namespace pare::test
