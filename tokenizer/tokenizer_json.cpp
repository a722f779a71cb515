#include "tokenizer/tokenizer_json.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <unordered_map>

#include "base/error.h"
#include "base/json_file.h"
#include "tokenizer/unicode.h"

namespace pare {
namespace {

using Json = nlohmann::json;

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= 200 ? text : text.substr(0, 200) + "...";
}

// The byte-level alphabet (GPT-2): a printable character for every byte, at its own code point where that is printable
// in Latin-1, else at the next of U+0100...
class ByteAlphabet {
 public:
  ByteAlphabet() {
    bytes_.fill(-1);
    size_t next = 0x100;
    for (int b = 0; b < 256; b++) {
      const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      bytes_[printable ? static_cast<size_t>(b) : next++] = static_cast<int16_t>(b);
    }
  }
  // False if there is another character in `token`.
  bool to_bytes(std::string_view token, std::string& bytes) const {
    bytes.clear();
    for (const char *p = token.data(), *end = p + token.size(); p < end;) {
      const Utf8Step step = next_utf8(p, end);
      if (step.kind != Utf8Step::character || step.value >= bytes_.size() || bytes_[step.value] < 0) return false;
      bytes += static_cast<char>(bytes_[step.value]);
      p += step.length;
    }
    return true;
  }

 private:
  std::array<int16_t, 256 + 68> bytes_;
};

// The byte of a token `<0xNN>`, or -1.
int fallback_byte(std::string_view token) {
  constexpr std::string_view digits = "0123456789ABCDEF";
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const size_t high = digits.find(token[3]), low = digits.find(token[4]);
  return high > 15 || low > 15 ? -1 : static_cast<int>(16 * high + low);
}

// Of files with byte_fallback: the one normalizer and the one decoder that are read.
const Json& spaces_marked() {
  static const Json json = Json::parse(
      R"({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
          {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]})");
  return json;
}
const Json& spaces_restored() {
  static const Json json = Json::parse(
      R"({"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
          {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})");
  return json;
}

class Reader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) { file_.byte_ids.fill(-1); }

  TokenizerFile read(const Json& root) {
    known_keys(root, "",
               {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor",
                "decoder", "model"});
    only(root, "", "version", {"1.0"});
    only(root, "", "truncation", {nullptr});
    only(root, "", "padding", {nullptr});
    read_model(member(root, "", "model"));
    if (root.contains("added_tokens")) read_added(root["added_tokens"]);
    if (file_.characters)
      read_character_steps(root);
    else
      read_byte_level_steps(root);
    if (root.contains("post_processor")) read_post_processor(root["post_processor"], "post_processor");
    return std::move(file_);
  }

 private:
  template <class... Parts>
  [[noreturn]] void bad(const Parts&... parts) const {
    fail("tokenizer ", path_, ": ", parts...);
  }
  [[noreturn]] void unsupported(const std::string& place, const std::string& what) const {
    bad(place, " ", what, " is not supported");
  }

  static std::string join(const std::string& place, const std::string& key) {
    return place.empty() ? key : place + "." + key;
  }
  const Json& member(const Json& object, const std::string& place, const char* key) const {
    if (!object.is_object()) bad(place.empty() ? "the file" : place, " is ", shown(object), ", expected an object");
    if (!object.contains(key)) bad(join(place, key), " is missing");
    return object[key];
  }
  std::string type_of(const Json& object, const std::string& place) const {
    const Json& type = member(object, place, "type");
    if (!type.is_string()) bad(place, ".type is ", shown(type), ", expected a string");
    return type.get<std::string>();
  }
  void known_keys(const Json& object, const std::string& place, std::initializer_list<std::string_view> keys) const {
    if (!object.is_object()) bad(place.empty() ? "the file" : place, " is ", shown(object), ", expected an object");
    for (const auto& [key, value] : object.items())
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) unsupported(join(place, key), "= " + shown(value));
  }
  // A key that is absent or has one of the values.
  void only(const Json& object, const std::string& place, const char* key, std::initializer_list<Json> values) const {
    if (object.contains(key) && std::find(values.begin(), values.end(), object[key]) == values.end())
      unsupported(join(place, key), "= " + shown(object[key]));
  }
  bool flag(const Json& object, const std::string& place, const char* key, bool otherwise) const {
    if (!object.contains(key)) return otherwise;
    if (!object[key].is_boolean()) bad(join(place, key), " is ", shown(object[key]), ", expected true or false");
    return object[key].get<bool>();
  }

  // ---- model

  void read_model(const Json& model) {
    known_keys(model, "model",
               {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                "byte_fallback", "ignore_merges", "vocab", "merges"});
    only(model, "model", "type", {"BPE"});
    only(model, "model", "dropout", {nullptr, 0});
    only(model, "model", "continuing_subword_prefix", {nullptr, ""});
    only(model, "model", "end_of_word_suffix", {nullptr, ""});
    flag(model, "model", "fuse_unk", false);
    file_.characters = flag(model, "model", "byte_fallback", false);
    file_.ignore_merges = flag(model, "model", "ignore_merges", false);
    if (file_.characters && file_.ignore_merges) unsupported("model.ignore_merges", "= true with byte_fallback");
    read_vocabulary(member(model, "model", "vocab"));
    for (size_t b = 0; file_.characters && b < 256; b++)
      if (file_.byte_ids[b] < 0) bad("model.vocab has no token for the byte ", b, ", with byte_fallback");
    read_merges(member(model, "model", "merges"));
  }

  void read_vocabulary(const Json& vocab) {
    if (!vocab.is_object()) bad("model.vocab is of type ", vocab.type_name(), ", expected an object");
    const size_t n = vocab.size();
    if (n > size_t{1} << 24) bad("model.vocab has ", n, " tokens");
    file_.tokens.resize(n);
    file_.model_tokens = static_cast<int32_t>(n);
    std::vector<bool> seen(n, false);
    std::string bytes;
    for (const auto& [token, id] : vocab.items()) {
      if (!id.is_number_integer() || id < 0 || id >= n)
        bad("model.vocab: ", shown(token), " has the id ", shown(id), ", expected 0 to ", n - 1,
            ": as many as there are tokens");
      const auto i = id.get<size_t>();
      if (seen[i]) bad("model.vocab: two tokens have the id ", i);
      if (!spelled(token, bytes) || bytes.empty())
        bad("model.vocab: ", shown(token), " is not written in the byte-level alphabet");
      seen[i] = true;
      ids_.emplace(bytes, id.get<int32_t>());
      place_token(bytes, id.get<int32_t>());
    }
  }

  // The token in the alphabet of ids_: bytes, or what stands in the file.  False: it is not byte-level.
  bool spelled(std::string_view token, std::string& as) const {
    if (!file_.characters) return alphabet_.to_bytes(token, as);
    as = token;
    return true;
  }

  void place_token(const std::string& token, int32_t id) {
    std::string& text = file_.tokens[static_cast<size_t>(id)] = token;
    int byte = token.size() == 1 ? static_cast<uint8_t>(token[0]) : -1;
    if (file_.characters) {
      byte = fallback_byte(token);
      text = byte < 0 ? spaced(token) : std::string(1, static_cast<char>(byte));
      if (next_utf8(token.data(), token.data() + token.size()).length == token.size())
        file_.character_ids.emplace(token, id);
    }
    if (byte >= 0) file_.byte_ids[static_cast<size_t>(byte)] = id;
  }

  // A token of characters as it is decoded.
  static std::string spaced(std::string token) {
    constexpr std::string_view mark = "▁";
    for (size_t at = token.find(mark); at != std::string::npos; at = token.find(mark, at))
      token.replace(at, mark.size(), " ");
    return token;
  }

  void read_merges(const Json& merges) {
    if (!merges.is_array()) bad("model.merges is of type ", merges.type_name(), ", expected a list");
    file_.merges.reserve(merges.size());
    std::string left, right;
    for (const Json& merge : merges) {
      const std::string* text = merge.get_ptr<const std::string*>();
      std::string_view a, b;
      if (text) {
        const size_t space = text->find(' ');
        if (space == std::string::npos || text->find(' ', space + 1) != std::string::npos)
          bad("model.merges: merge ", file_.merges.size(), " is ", shown(merge), ", expected two tokens");
        a = std::string_view(*text).substr(0, space);
        b = std::string_view(*text).substr(space + 1);
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        a = merge[0].get_ref<const std::string&>();
        b = merge[1].get_ref<const std::string&>();
      } else {
        bad("model.merges: merge ", file_.merges.size(), " is ", shown(merge), ", expected two tokens");
      }
      if (!spelled(a, left) || !spelled(b, right) || !ids_.contains(left) || !ids_.contains(right) ||
          !ids_.contains(left + right))
        bad("model.merges: merge ", file_.merges.size(), ", ", shown(merge),
            ": its parts and what they become must be in model.vocab");
      file_.merges.push_back({ids_.at(left), ids_.at(right), ids_.at(left + right)});
    }
  }

  // ---- added tokens

  void read_added(const Json& list) {
    if (!list.is_array()) bad("added_tokens is ", shown(list), ", expected a list");
    std::vector<const Json*> new_tokens(list.size(), nullptr);  // those that are not in the model, by id
    for (const Json& token : list) {
      known_keys(token, "added_tokens", {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
      const Json& content = member(token, "added_tokens", "content");
      if (!content.is_string() || content.get_ref<const std::string&>().empty())
        bad("added_tokens: the content ", shown(content), " is not a text");
      const std::string place = cat("added_tokens ", shown(content));
      for (const char* key : {"single_word", "lstrip", "rstrip"}) only(token, place, key, {false});
      const Json& id = member(token, place, "id");
      const size_t limit = static_cast<size_t>(file_.model_tokens) + list.size();
      if (!id.is_number_integer() || id < 0 || id >= limit)
        bad(place, ": id is ", shown(id), ", expected the ids to go on after ", file_.model_tokens - 1,
            ", those of the model, without a hole");
      file_.added.push_back({content.get<std::string>(), id.get<int32_t>(), flag(token, place, "special", false),
                             flag(token, place, "normalized", true)});
      place_added(file_.added.back(), place);
    }
    for (size_t i = static_cast<size_t>(file_.model_tokens); i < file_.tokens.size(); i++)
      if (file_.tokens[i].empty()) bad("added_tokens: no token has the id ", i);
  }

  void place_added(const AddedToken& token, const std::string& place) {
    const auto id = static_cast<size_t>(token.id);
    const std::string text = file_.characters ? spaced(token.content) : token.content;
    if (token.id < file_.model_tokens) {
      if (file_.tokens[id] != text) bad(place, ": the vocabulary has another token of the id ", id);
      return;
    }
    if (file_.tokens.size() <= id) file_.tokens.resize(id + 1);
    if (!file_.tokens[id].empty()) bad(place, ": another token has the id ", id);
    file_.tokens[id] = text;
  }

  // ---- steps on the text

  void read_byte_level_steps(const Json& root) {
    if (root.contains("normalizer")) read_normalizer(root["normalizer"], "normalizer");
    if (root.contains("pre_tokenizer")) read_pre_tokenizer(root["pre_tokenizer"], "pre_tokenizer");
    if (!byte_level_) unsupported("pre_tokenizer", "without ByteLevel");
    const Json& decoder = member(root, "", "decoder");
    if (type_of(decoder, "decoder") != "ByteLevel") unsupported("decoder", shown(decoder));
    known_keys(decoder, "decoder", {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  }

  void read_character_steps(const Json& root) {
    const auto must_be = [&](const char* key, const Json& steps) {
      if (const Json& given = root.contains(key) ? root[key] : Json(); given != steps)
        unsupported(key, cat(shown(given), " with byte_fallback (only ", shown(steps), ")"));
    };
    must_be("normalizer", spaces_marked());
    must_be("pre_tokenizer", nullptr);
    must_be("decoder", spaces_restored());
  }

  void read_normalizer(const Json& n, const std::string& place) {
    if (n.is_null()) return;
    const std::string type = type_of(n, place);
    if (type == "NFC") {
      known_keys(n, place, {"type"});
      file_.nfc = true;
    } else if (type == "Sequence") {
      for_each(n, place, "normalizers", [&](const Json& part, const std::string& at) { read_normalizer(part, at); });
    } else {
      unsupported(place, shown(n));
    }
  }

  template <class F>
  void for_each(const Json& sequence, const std::string& place, const char* key, F each) {
    known_keys(sequence, place, {"type", key});
    const Json& list = member(sequence, place, key);
    if (!list.is_array()) bad(join(place, key), " is ", shown(list), ", expected a list");
    if (place.find('[') != std::string::npos) unsupported(place, "(a Sequence in a Sequence)");
    for (size_t i = 0; i < list.size(); i++) each(list[i], cat(join(place, key), "[", i, "]"));
  }

  void read_pre_tokenizer(const Json& p, const std::string& place) {
    if (p.is_null()) return;
    const std::string type = type_of(p, place);
    if (byte_level_) unsupported(place, shown(p) + " after ByteLevel");
    if (type == "Sequence") {
      for_each(p, place, "pretokenizers",
               [&](const Json& part, const std::string& at) { read_pre_tokenizer(part, at); });
    } else if (type == "ByteLevel") {
      known_keys(p, place, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
      if (flag(p, place, "add_prefix_space", true)) unsupported(place + ".add_prefix_space", "= true");
      if (flag(p, place, "use_regex", true)) file_.splits.push_back({WordPattern::gpt2});
      byte_level_ = true;
    } else if (type == "Digits") {
      known_keys(p, place, {"type", "individual_digits"});
      const bool individual = flag(p, place, "individual_digits", false);
      file_.splits.push_back({individual ? WordPattern::digit : WordPattern::digits});
    } else if (type == "Split") {
      read_split(p, place);
    } else {
      unsupported(place, shown(p));
    }
  }

  void read_split(const Json& p, const std::string& place) {
    using enum WordSplit::Behavior;
    known_keys(p, place, {"type", "pattern", "behavior", "invert"});
    WordSplit split = read_pattern(member(p, place, "pattern"), place + ".pattern");
    split.invert = flag(p, place, "invert", false);
    const Json& behavior = member(p, place, "behavior");
    bool known = false;
    for (const auto& [name, value] : {std::pair("Isolated", isolated),
                                      {"Removed", removed},
                                      {"MergedWithPrevious", merged_with_previous},
                                      {"MergedWithNext", merged_with_next},
                                      {"Contiguous", contiguous}})
      if (behavior == name) {
        split.behavior = value;
        known = true;
      }
    if (!known) unsupported(place + ".behavior", "= " + shown(behavior));
    if (matches_everything(split.pattern) && split.behavior == removed && !split.invert)
      unsupported(place + ".behavior", "= \"Removed\": the pattern matches everything, so a text without words");
    file_.splits.push_back(split);
  }

  WordSplit read_pattern(const Json& pattern, const std::string& place) const {
    known_keys(pattern, place, {"Regex", "String"});
    if (pattern.contains("String")) {
      const Json& text = pattern["String"];
      if (pattern.size() != 1 || !text.is_string() || text.get_ref<const std::string&>().empty())
        bad(place, " is ", shown(pattern), ", expected one text that is not empty");
      return {.pattern = WordPattern::literal, .literal = text.get<std::string>()};
    }
    const Json& regex = member(pattern, place, "Regex");
    const auto known = regex.is_string() ? find_word_pattern(regex.get_ref<const std::string&>()) : std::nullopt;
    if (!known) unsupported(place, shown(regex) + ": it is none of the known regular expressions, so it");
    return {.pattern = *known};
  }

  void read_post_processor(const Json& p, const std::string& place) {
    if (p.is_null()) return;
    const std::string type = type_of(p, place);
    if (type == "Sequence") {
      for_each(p, place, "processors", [&](const Json& part, const std::string& at) { read_post_processor(part, at); });
    } else if (type == "ByteLevel") {  // adjusts offsets, which are not used here
      known_keys(p, place, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
    } else if (type == "TemplateProcessing") {
      known_keys(p, place, {"type", "single", "pair", "special_tokens"});
      read_template(p, place);
    } else {
      unsupported(place, shown(p));
    }
  }

  // [BOS] A, or A.
  void read_template(const Json& p, const std::string& place) {
    const Json& single = member(p, place, "single");
    const auto is = [&](size_t i, const char* kind) {
      return single[i].is_object() && single[i].size() == 1 && single[i].contains(kind);
    };
    const bool text_only = single.is_array() && single.size() == 1 && is(0, "Sequence");
    const bool bos_first = single.is_array() && single.size() == 2 && is(0, "SpecialToken") && is(1, "Sequence");
    if (!text_only && !bos_first) unsupported(place + ".single", shown(single));
    if (text_only) return;
    const Json& name = member(single[0]["SpecialToken"], place + ".single[0].SpecialToken", "id");
    const std::string tokens = place + ".special_tokens";
    if (!name.is_string()) bad(place, ".single[0]: the token ", shown(name), " is not a name");
    const Json& token = member(member(p, place, "special_tokens"), tokens, name.get_ref<const std::string&>().c_str());
    const Json& ids = member(token, tokens, "ids");
    if (!ids.is_array() || ids.size() != 1 || !ids[0].is_number_integer() || ids[0] < 0 ||
        ids[0] >= file_.tokens.size())
      unsupported(tokens, shown(token));
    if (file_.first >= 0) unsupported(place, "(a second one that puts a token in front)");
    file_.first = ids[0].get<int32_t>();
  }

  std::string path_;
  const ByteAlphabet alphabet_;
  TokenizerFile file_;
  std::unordered_map<std::string, int32_t> ids_;
  bool byte_level_ = false;
};

}  // namespace

TokenizerFile read_tokenizer_file(const std::string& path) { return Reader(path).read(read_json_file(path)); }

}  // namespace pare
