// SentencePiece BPE (Kudo and Richardson, 2018; Llama's variant with byte fallback) from llama2.c's tokenizer.bin or a
// list of pieces in JSON.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.h"
#include "base/foreign_file.h"
#include "base/json_file.h"
#include "tokenizer/tokenizer.h"

namespace pare {
namespace {

static_assert(std::endian::native == std::endian::little, "tokenizer.bin is read as it lies in the file");

constexpr int32_t kBos = 1, kEos = 2;

struct Vocabulary {
  std::vector<std::string> pieces;
  std::vector<float> scores;
};

// The byte of a piece `<0xNN>`, or -1.
int byte_of(const std::string& piece) {
  if (piece.size() != 6 || piece.compare(0, 3, "<0x") != 0 || piece[5] != '>') return -1;
  int value = 0;
  for (int i = 3; i < 5; i++) {
    const size_t digit = std::string_view("0123456789ABCDEF").find(piece[static_cast<size_t>(i)]);
    if (digit == std::string_view::npos) return -1;
    value = 16 * value + static_cast<int>(digit);
  }
  return value;
}

void check_size(const Vocabulary& v, const std::string& path) {
  if (v.pieces.size() <= static_cast<size_t>(kEos))
    fail(path, ": has ", v.pieces.size(), " pieces, expected at least <unk>, <s> and </s>");
}

Vocabulary read_vocabulary(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(path, ": cannot be opened");
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  if (bytes.starts_with("GGUF")) fail(path, ": ", foreign_model_file(path));
  size_t at = 0;
  const auto take = [&](auto& value, const char* what) {
    if (bytes.size() - at < sizeof value) fail(path, ": ends at byte ", bytes.size(), " inside the ", what);
    std::memcpy(&value, bytes.data() + at, sizeof value);
    at += sizeof value;
  };
  int32_t longest = 0;
  take(longest, "header");
  if (longest < 1) fail(path, ": not a llama2.c tokenizer.bin: the longest piece has ", longest, " bytes");
  Vocabulary v;
  while (at < bytes.size()) {
    const std::string where = cat("piece ", v.pieces.size());
    float score = 0;
    int32_t length = 0;
    take(score, (where + ": score").c_str());
    take(length, (where + ": length").c_str());
    if (length < 1 || length > longest)
      fail(path, ": ", where, " has ", length, " bytes, expected 1 to ", longest,
           "; is this a llama2.c tokenizer.bin?");
    if (bytes.size() - at < static_cast<size_t>(length)) fail(path, ": ends inside ", where);
    if (!std::isfinite(score)) fail(path, ": the score of ", where, " is not finite");
    v.pieces.push_back(bytes.substr(at, static_cast<size_t>(length)));
    v.scores.push_back(score);
    at += static_cast<size_t>(length);
  }
  check_size(v, path);
  return v;
}

Vocabulary read_pieces(const std::string& path) {
  const nlohmann::json rows = read_json_file(path);
  if (!rows.is_array()) fail(path, ": is of type ", rows.type_name(), ", expected a list of pieces");
  Vocabulary v;
  for (const auto& row : rows) {
    const std::string where = cat(path, ": piece ", v.pieces.size());
    if (!row.is_object() || !row.contains("id") || !row.contains("score") || !row.contains("piece"))
      fail(where, ": expected {\"id\", \"score\", \"piece\"}");
    if (!row["piece"].is_string() || !row["score"].is_number())
      fail(where, ": expected \"piece\" to be a string and \"score\" a number");
    if (row["id"] != v.pieces.size()) fail(where, ": has the id ", row["id"].dump(), "; expected the ids in order");
    v.pieces.push_back(row["piece"].get<std::string>());
    v.scores.push_back(row["score"].get<float>());
    if (v.pieces.back().empty()) fail(where, ": is empty");
    if (!std::isfinite(v.scores.back())) fail(where, ": the score is not finite");
  }
  check_size(v, path);
  return v;
}

// Bytes of the character that begins with `lead`; 1 for a byte that begins none.
size_t utf8_length(char lead) {
  const auto c = static_cast<unsigned char>(lead);
  return c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
}

class SentencePiece : public Tokenizer {
 public:
  SentencePiece(Vocabulary vocabulary, std::string path)
      : Tokenizer(static_cast<int32_t>(vocabulary.pieces.size()), kBos, kEos, 0),
        vocabulary_(std::move(vocabulary)),
        path_(std::move(path)) {
    byte_ids_.fill(-1);
    for (int32_t id = kEos + 1; id < vocab_size(); id++) {
      const std::string& piece = vocabulary_.pieces[static_cast<size_t>(id)];
      if (const int byte = byte_of(piece); byte >= 0)
        byte_ids_[static_cast<size_t>(byte)] = id;
      else
        ids_.emplace(piece, id);
    }
  }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    append(text, ids);
    return ids;
  }

  std::vector<int32_t> encode_prompt(std::string_view text) const override {
    std::vector<int32_t> ids{kBos};
    if (text.empty()) return ids;
    std::string spaced = " ";  // the space that words have in front of them
    append(spaced += text, ids);
    return ids;
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (size_t i = 0; i < ids.size(); i++) {
      if (i == 0 && ids[i] == kBos) continue;
      const std::string bytes = piece(ids[i]);
      text.append(bytes, i > 0 && ids[i - 1] == kBos && bytes[0] == ' ' && byte(ids[i]) < 0 ? 1 : 0);
    }
    return text;
  }

  std::string piece(int32_t id) const override {
    if (id < 0 || id >= vocab_size()) return "\uFFFD";
    return byte(id) >= 0 ? std::string(1, static_cast<char>(byte(id))) : vocabulary_.pieces[static_cast<size_t>(id)];
  }

  bool is_special(int32_t id) const override { return id >= 0 && id <= kEos; }

 private:
  int byte(int32_t id) const {
    return id >= 0 && id < vocab_size() ? byte_of(vocabulary_.pieces[static_cast<size_t>(id)]) : -1;
  }

  // In a list, linked by index; `text.size()` and beyond: none.
  struct Symbol {
    std::string_view text;  // empty: it is part of one before
    int32_t merged = -1;    // the piece of this symbol and the next one together, -1: none
    uint32_t previous, next;
  };
  // A pair that may be merged: the best score first, the leftmost of equals.
  struct Pair {
    float score;
    uint32_t at;
    int32_t merged;
    bool operator<(const Pair& other) const { return score != other.score ? score < other.score : at > other.at; }
  };

  int32_t find(std::string_view piece) const {
    const auto it = ids_.find(piece);
    return it == ids_.end() ? -1 : it->second;
  }

  void append(std::string_view text, std::vector<int32_t>& ids) const {
    for (const Symbol& symbol : merge(text)) {
      if (const int32_t id = find(symbol.text); id >= 0) {
        ids.push_back(id);
        continue;
      }
      for (const char& c : symbol.text) {
        const int32_t id = byte_ids_[static_cast<unsigned char>(c)];
        if (id < 0)
          fail("tokenizer ", path_, ": \"", symbol.text, "\" at byte ", &c - text.data(), " of \"", text.substr(0, 60),
               "\" is not in the vocabulary, nor is its byte");
        ids.push_back(id);
      }
    }
  }

  std::vector<Symbol> merge(std::string_view text) const {
    if (text.size() >= UINT32_MAX) fail("tokenizer ", path_, ": a text of ", text.size(), " bytes");
    std::vector<Symbol> symbols;
    for (size_t at = 0; at < text.size(); at += symbols.back().text.size()) {
      const auto i = static_cast<uint32_t>(symbols.size());
      symbols.push_back({text.substr(at, utf8_length(text[at])), -1, i - 1, i + 1});
    }
    std::vector<Pair> heap;
    // Symbols lie side by side in `text`, so a pair is one longer view.
    const auto pair_up = [&](uint32_t at) {
      Symbol& left = symbols[at];
      left.merged =
          left.next < symbols.size() ? find({left.text.data(), left.text.size() + symbols[left.next].text.size()}) : -1;
      if (left.merged < 0) return;
      heap.push_back({vocabulary_.scores[static_cast<size_t>(left.merged)], at, left.merged});
      std::push_heap(heap.begin(), heap.end());
    };
    for (uint32_t at = 0; at < symbols.size(); at++) pair_up(at);
    while (!heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      const Pair best = heap.back();
      heap.pop_back();
      Symbol& left = symbols[best.at];
      if (left.merged != best.merged) continue;  // one of the two has been merged since
      Symbol& right = symbols[left.next];
      left.text = {left.text.data(), left.text.size() + right.text.size()};
      left.next = right.next;
      right.text = {};
      right.merged = -1;
      if (left.next < symbols.size()) symbols[left.next].previous = best.at;
      pair_up(best.at);
      if (left.previous < symbols.size()) pair_up(left.previous);
    }
    std::erase_if(symbols, [](const Symbol& s) { return s.text.empty(); });
    return symbols;
  }

  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
  };
  Vocabulary vocabulary_;
  std::string path_;
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> ids_;  // without special and byte pieces
  std::array<int32_t, 256> byte_ids_;
};

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& tokenizer_bin) {
  return std::make_unique<SentencePiece>(read_vocabulary(tokenizer_bin), tokenizer_bin);
}

std::unique_ptr<Tokenizer> load_sentencepiece_json(const std::string& vocab_pieces) {
  return std::make_unique<SentencePiece>(read_pieces(vocab_pieces), vocab_pieces);
}

}  // namespace pare
