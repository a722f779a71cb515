#include "tokenizer/bpe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/error.h"
#include "base/json_file.h"
#include "base/rng.h"
#include "base/text.h"
#include "tokenizer/tokenizer_json.h"

namespace pare {
namespace {

// Finds added tokens: a tree of their bytes.
class AddedTokens {
 public:
  void add(std::string_view text, int32_t id) {
    size_t node = 0;
    for (const char c : text) {
      size_t next = child(node, c);
      if (next == 0) {
        next = nodes_.size();
        nodes_[node].children.emplace_back(c, next);
        nodes_.emplace_back();
      }
      node = next;
    }
    nodes_[node].id = id;
    begins_[static_cast<uint8_t>(text[0])] = true;
  }

  struct Match {
    const char* begin;  // `end` of the text: none
    size_t length;
    int32_t id;
  };
  // The leftmost match in [p, end), the longest of several there.
  Match find(const char* p, const char* end) const {
    for (; p < end; p++) {
      if (!begins_[static_cast<uint8_t>(*p)]) continue;
      Match match{p, 0, -1};
      size_t node = 0;
      for (const char* q = p; q < end && (node = child(node, *q)) != 0; q++)
        if (nodes_[node].id >= 0) {
          match.length = static_cast<size_t>(q + 1 - p);
          match.id = nodes_[node].id;
        }
      if (match.id >= 0) return match;
    }
    return {end, 0, -1};
  }

 private:
  struct Node {
    int32_t id = -1;
    std::vector<std::pair<char, size_t>> children;
  };
  size_t child(size_t node, char c) const {
    for (const auto& [byte, next] : nodes_[node].children)
      if (byte == c) return next;
    return 0;
  }
  std::vector<Node> nodes_ = {{}};
  std::array<bool, 256> begins_{};
};

// The rank of a pair of tokens, by open addressing.
class PairRanks {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit PairRanks(size_t pairs) : slots_(std::bit_ceil(pairs * 3 / 2 + 1)) {}
  // False if the table already holds the pair.
  bool add(int32_t left, int32_t right, uint32_t rank) {
    Slot& slot = slots_[place(key(left, right))];
    if (slot.rank != kNone) return false;
    slot = {key(left, right), rank};
    return true;
  }
  uint32_t find(int32_t left, int32_t right) const { return slots_[place(key(left, right))].rank; }

 private:
  struct Slot {
    uint64_t key = 0;
    uint32_t rank = kNone;
  };
  static uint64_t key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }
  size_t place(uint64_t key) const {
    size_t i = mix64(key) & (slots_.size() - 1);
    while (slots_[i].rank != kNone && slots_[i].key != key) i = (i + 1) & (slots_.size() - 1);
    return i;
  }
  std::vector<Slot> slots_;
};

// Words seen before, one cache line each; a new word takes the place of the old one in its slot.
class WordCache {
 public:
  struct Slot {
    static constexpr size_t kBytes = 30, kIds = 8;
    uint8_t length = 0, count = 0;
    char bytes[kBytes];
    int32_t ids[kIds];
  };
  static_assert(sizeof(Slot) == 64);

  // The slot of the word; it may hold another one.
  Slot& slot(std::string_view word) {
    uint64_t hash = word.size();
    for (size_t i = 0; i < word.size(); i += 8) {
      uint64_t part = 0;
      std::memcpy(&part, word.data() + i, std::min<size_t>(8, word.size() - i));
      hash = mix64(hash ^ part);
    }
    return slots_[hash & (slots_.size() - 1)];
  }

 private:
  std::vector<Slot> slots_{size_t{1} << 15};
};

class Bpe : public Tokenizer {
 public:
  Bpe(TokenizerFile file, const std::string& path, int32_t bos, int32_t eos, int32_t pad)
      : Tokenizer(static_cast<int32_t>(file.tokens.size()), bos, eos, pad),
        file_(std::move(file)),
        path_(path),
        lacks_bytes_(std::count(file_.byte_ids.begin(), file_.byte_ids.end(), -1) > 0),
        ranks_(file_.merges.size()),
        special_(file_.tokens.size(), false),
        is_added_(file_.tokens.size(), false) {
    for (size_t rank = 0; rank < file_.merges.size(); rank++) {
      const TokenizerFile::Merge& m = file_.merges[rank];
      if (!ranks_.add(m.left, m.right, static_cast<uint32_t>(rank)))
        fail("tokenizer ", path, ": model.merges: merge ", rank, " occurs twice");
    }
    for (int32_t id = 0; file_.ignore_merges && id < file_.model_tokens; id++)
      ids_.emplace(file_.tokens[static_cast<size_t>(id)], id);
    for (const AddedToken& token : file_.added) {
      if (token.normalized)
        normalized_.add(normalized(token.content, true), token.id);
      else
        added_.add(token.content, token.id);
      special_[static_cast<size_t>(token.id)] = token.special;
      is_added_[static_cast<size_t>(token.id)] = true;
    }
  }

  std::vector<int32_t> encode(std::string_view text) const override { return encode(text, false); }

  std::vector<int32_t> encode_prompt(std::string_view text) const override {
    std::vector<int32_t> ids = encode(text, true);
    if (bos() >= 0) ids.insert(ids.begin(), bos());
    return ids;
  }

  std::string decode(std::span<const int32_t> ids) const override {
    if (!file_.characters) return Tokenizer::decode(ids);
    std::string text;
    for (size_t i = 0; i < ids.size(); i++) {
      if (i == 0 && ids[i] == bos()) continue;
      const std::string bytes = piece(ids[i]);
      const bool spaced = i > 0 && added(ids[i - 1]) && bytes.starts_with(' ') && ids[i] != file_.byte_ids[' '];
      text.append(bytes, spaced ? 1 : 0);
    }
    return text;
  }

  std::string piece(int32_t id) const override {
    return id >= 0 && id < vocab_size() ? file_.tokens[static_cast<size_t>(id)] : "\uFFFD";
  }

  bool is_special(int32_t id) const override {
    return id >= 0 && id < vocab_size() && special_[static_cast<size_t>(id)];
  }

 private:
  bool added(int32_t id) const { return id >= 0 && id < vocab_size() && is_added_[static_cast<size_t>(id)]; }

  // `begins`: whether a sequence does.
  std::vector<int32_t> encode(std::string_view text, bool begins) const {
    std::vector<int32_t> ids;
    ids.reserve(text.size() / 4 + 8);
    const std::lock_guard lock(mutex_);
    around(added_, text, ids, [&](std::string_view part) {
      const auto before = static_cast<size_t>(part.data() - text.data());
      if (!file_.characters && !(file_.nfc && may_need_nfc(part))) return encode_normalized(part, before, ids);
      encode_normalized(normalized(part, begins || before > 0), before, ids);
    });
    return ids;
  }

  std::string normalized(std::string_view text, bool spaced) const {
    if (!file_.characters) return file_.nfc ? nfc(text) : std::string(text);
    std::string marked = spaced ? "▁" : "";
    for (const char c : text) c == ' ' ? marked += "▁" : marked += c;
    return marked;
  }

  // Ids of the added tokens in `text`, and whatever `rest` makes of the parts between them.
  template <class F>
  static void around(const AddedTokens& tokens, std::string_view text, std::vector<int32_t>& ids, F rest) {
    for (const char *p = text.data(), *end = p + text.size(); p < end;) {
      const AddedTokens::Match match = tokens.find(p, end);
      if (match.begin > p) rest(std::string_view(p, static_cast<size_t>(match.begin - p)));
      if (match.id >= 0) ids.push_back(match.id);
      p = match.begin + match.length;
    }
  }

  // `before`: bytes in front of it in what encode was given.
  void encode_normalized(std::string_view text, size_t before, std::vector<int32_t>& ids) const {
    around(normalized_, text, ids, [&](std::string_view part) {
      check_bytes(part, before + static_cast<size_t>(part.data() - text.data()));
      cut(part, 0, ids);
    });
  }

  // Is there a token for each?
  void check_bytes(std::string_view text, size_t before) const {
    if (!lacks_bytes_) return;
    for (size_t i = 0; i < text.size(); i++)
      if (const auto byte = static_cast<uint8_t>(text[i]); file_.byte_ids[byte] < 0) {
        const size_t begin = i - std::min<size_t>(i, 20);
        fail("tokenizer ", path_, ": the vocabulary has no token for the byte ", format("0x%02x", byte),
             " at position ", before + i, ", in \"", printable(std::string(text.substr(begin, i + 20 - begin))),
             "\"; remove the character from the text");
      }
  }

  // By the splits from `level` on.
  void cut(std::string_view text, size_t level, std::vector<int32_t>& ids) const {
    if (level == file_.splits.size()) return encode_word(text, ids);
    const WordSplit& split = file_.splits[level];
    if (!matches_everything(split.pattern) || split.behavior != WordSplit::Behavior::isolated) {
      for (const std::string_view word : split_words(split, text)) cut(word, level + 1, ids);
      return;
    }
    for (const char *p = text.data(), *end = p + text.size(); p < end;) {
      const char* next = word_end(split.pattern, p, end);
      cut({p, static_cast<size_t>(next - p)}, level + 1, ids);
      p = next;
    }
  }

  void encode_word(std::string_view word, std::vector<int32_t>& ids) const {
    if (word.size() > WordCache::Slot::kBytes) return merge(word, ids);
    WordCache::Slot& slot = cache_.slot(word);
    if (slot.length != word.size() || std::memcmp(slot.bytes, word.data(), word.size()) != 0) {
      const size_t before = ids.size();
      merge(word, ids);
      const size_t count = ids.size() - before;
      if (count > WordCache::Slot::kIds) return;
      slot.length = static_cast<uint8_t>(word.size());
      slot.count = static_cast<uint8_t>(count);
      std::copy(word.begin(), word.end(), slot.bytes);
      std::copy(ids.begin() + static_cast<std::ptrdiff_t>(before), ids.end(), slot.ids);
      return;
    }
    ids.insert(ids.end(), slot.ids, slot.ids + slot.count);
  }

  // Symbols of a word in a list, linked by index; a heap of (rank, position) of the pairs in it.
  void merge(std::string_view word, std::vector<int32_t>& ids) const {
    if (file_.ignore_merges)
      if (const auto it = ids_.find(word); it != ids_.end()) return ids.push_back(it->second);
    expect(word.size() < UINT32_MAX, "a word of ", word.size(), " bytes");
    symbols_.clear();
    heap_.clear();
    for (const char *p = word.data(), *end = p + word.size(); p < end;) p = begin_symbols(p, end);
    const auto n = static_cast<uint32_t>(symbols_.size());
    for (uint32_t i = 0; i < n; i++) {
      symbols_[i].previous = i - 1;
      symbols_[i].next = i + 1;
    }
    for (uint32_t i = 0; i + 1 < n; i++) {
      symbols_[i].rank = ranks_.find(symbols_[i].id, symbols_[i + 1].id);
      if (symbols_[i].rank != PairRanks::kNone) heap_.push_back(uint64_t{symbols_[i].rank} << 32 | i);
    }
    std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      const uint64_t top = heap_.back();
      heap_.pop_back();
      const auto at = static_cast<uint32_t>(top);
      Symbol& symbol = symbols_[at];
      if (symbol.rank != top >> 32) continue;  // stale: one of the two has been merged since
      const uint32_t gone = symbol.next;
      symbol.id = file_.merges[symbol.rank].merged;
      symbol.next = symbols_[gone].next;
      symbols_[gone].rank = PairRanks::kNone;
      if (symbol.next < n) symbols_[symbol.next].previous = at;
      rank_pair(at, n);
      if (symbol.previous < n) rank_pair(symbol.previous, n);
    }
    for (uint32_t i = 0; i < n; i = symbols_[i].next) ids.push_back(symbols_[i].id);
  }

  // Of the first byte, or character, of a word; returns its end.
  const char* begin_symbols(const char* p, const char* end) const {
    const size_t length = file_.characters ? next_utf8(p, end).length : 1;
    if (file_.characters)
      if (const auto it = file_.character_ids.find(std::string(p, length)); it != file_.character_ids.end()) {
        symbols_.push_back({.id = it->second});
        return p + length;
      }
    for (size_t i = 0; i < length; i++) symbols_.push_back({.id = file_.byte_ids[static_cast<uint8_t>(p[i])]});
    return p + length;
  }

  void rank_pair(uint32_t at, uint32_t n) const {
    Symbol& symbol = symbols_[at];
    symbol.rank = symbol.next < n ? ranks_.find(symbol.id, symbols_[symbol.next].id) : PairRanks::kNone;
    if (symbol.rank == PairRanks::kNone) return;
    heap_.push_back(uint64_t{symbol.rank} << 32 | at);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  struct Symbol {
    int32_t id;
    uint32_t rank = PairRanks::kNone;  // of the pair that this one and the next are
    uint32_t previous = 0, next = 0;   // the number of symbols and beyond: none
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
  };

  const TokenizerFile file_;
  const std::string path_;
  const bool lacks_bytes_;
  PairRanks ranks_;
  std::vector<bool> special_, is_added_;
  AddedTokens added_, normalized_;
  std::unordered_map<std::string_view, int32_t, Hash, std::equal_to<>> ids_;  // of the model, for ignore_merges

  mutable std::mutex mutex_;  // of what follows: encode may be called from many threads
  mutable WordCache cache_;
  mutable std::vector<Symbol> symbols_;
  mutable std::vector<uint64_t> heap_;
};

// The object in a file beside the tokenizer; empty if there is no such file.
nlohmann::json object_beside(const std::string& tokenizer_json, const char* name, std::string& path) {
  path = (std::filesystem::path(tokenizer_json).parent_path() / name).string();
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return nlohmann::json::object();
  nlohmann::json object = read_json_file(path);
  if (!object.is_object()) fail(path, ": expected an object");
  return object;
}

}  // namespace

std::unique_ptr<Tokenizer> load_bpe(const std::string& tokenizer_json) {
  TokenizerFile file = read_tokenizer_file(tokenizer_json);
  std::string config_path, map_path;
  const nlohmann::json config = object_beside(tokenizer_json, "tokenizer_config.json", config_path);
  nlohmann::json map = object_beside(tokenizer_json, "special_tokens_map.json", map_path);
  if (config.contains("added_tokens_decoder")) map.clear();
  // "eos_token": null, "</s>" or {"content": "</s>", ...}
  const auto id_of = [&](const char* key) -> int32_t {
    const nlohmann::json& object = map.contains(key) ? map : config;
    if (!object.contains(key) || object[key].is_null()) return -1;
    const nlohmann::json& value = object[key];
    const nlohmann::json& text = value.is_object() && value.contains("content") ? value["content"] : value;
    for (const AddedToken& token : file.added)
      if (text == token.content) return token.id;
    fail(map.contains(key) ? map_path : config_path, ": ", key, " is ", value.dump(),
         ", which is none of the added_tokens of ", tokenizer_json);
  };
  const int32_t bos = file.first, eos = id_of("eos_token"), pad = id_of("pad_token");
  return std::make_unique<Bpe>(std::move(file), tokenizer_json, bos, eos, pad);
}

}  // namespace pare
