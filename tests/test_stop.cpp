// rollout.stop_token_ids and rollout.stop: where a response ends, what its text is, and what is said of an end of turn
// that ends nothing.
#include <random>

#include "base/error.h"
#include "run/stop.h"
#include "tests/generator.h"
#include "tests/tiny_tokenizer.h"
#include "tokenizer/tokenizer.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<int32_t>;

// Bytes, some merges, and three control tokens from 260 on.
class StopTest : public testing::Test {
 protected:
  StopTest() {
    fs::create_directories(folder_);
    std::ofstream(folder_ + "tokenizer.json") << tokenizer_json({{"a", "b"}, {"ab", "c"}, {"c", "a"}, {"\xc3", "\xa9"}},
                                                                {"<|im_start|>", "<|im_end|>", "<e>"});
    tokenizer_ = make_tokenizer(folder_);
  }
  ~StopTest() override { fs::remove_all(folder_); }
  Stop stop(const std::vector<std::string>& texts, const std::vector<int64_t>& ids = {}) const {
    RolloutKeys keys;
    keys.stop = texts;
    keys.stop_token_ids = ids;
    return make_stop(keys, tokenizer_.get(), 263);
  }
  std::string error(const std::vector<std::string>& texts, const std::vector<int64_t>& ids,
                    bool tokenizer = true) const {
    RolloutKeys keys;
    keys.stop = texts;
    keys.stop_token_ids = ids;
    try {
      make_stop(keys, tokenizer ? tokenizer_.get() : nullptr, 263);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::usage);
      return e.what();
    }
    return "";
  }
  const std::string folder_ = cat(testing::TempDir(), "pare_stop_", getpid(), "/");
  std::unique_ptr<Tokenizer> tokenizer_;
};

// Against the text of all tokens: the first token after which it contains a stop string.
TEST_F(StopTest, AStringEndsAResponseWithTheTokenThatCompletesIt) {
  std::mt19937 rng(5);
  const Ids pool = {'a', 'b', 'c', 256, 257, 258, 259, 0xc3, 0xa9, 261};
  const std::vector<std::vector<std::string>> sets = {{"a"},        {"abc"},          {"bca", "cc"},
                                                      {"\xc3\xa9"}, {"a<|im_end|>b"}, {"abcabcabcabcab", "bb"}};
  int ended = 0, straddled = 0;
  for (int round = 0; round < 600; round++) {
    const std::vector<std::string>& texts = sets[static_cast<size_t>(round) % sets.size()];
    const Stop s = stop(texts);
    Ids prefix(rng() % 4), tokens;
    for (int32_t& id : prefix) id = pool[rng() % pool.size()];
    const auto contains = [&] {
      std::string text;
      for (const Ids* ids : {&prefix, &tokens})
        for (const int32_t id : *ids) text += tokenizer_->piece(id);
      return std::any_of(texts.begin(), texts.end(), [&](const auto& t) { return text.find(t) != std::string::npos; });
    };
    if (contains()) continue;  // a prefix is the beginning of a response that went on
    for (int t = 0; t < 24; t++) {
      tokens.push_back(pool[rng() % pool.size()]);
      const bool ends = contains();
      ASSERT_EQ(end_of({}, s, prefix, tokens), ends ? std::optional(Finish::stop) : std::nullopt) << round;
      if (!ends) continue;
      ended++;
      straddled += std::none_of(texts.begin(), texts.end(), [&](const auto& text) {
        return tokenizer_->piece(tokens.back()).find(text) != std::string::npos;
      });
      break;
    }
  }
  EXPECT_GT(ended, 200);
  EXPECT_GT(straddled, 100);
}

TEST_F(StopTest, EosCountsBeforeAStopTokenAndThatBeforeAString) {
  const Stop s = stop({"c"}, {261, 'b'});
  const Ids eos = {262};
  EXPECT_EQ(end_of(eos, s, {}, Ids{}), std::nullopt);
  EXPECT_EQ(end_of(eos, s, {}, Ids{'a', 262}), Finish::eos);
  EXPECT_EQ(end_of({261}, s, {}, Ids{261}), Finish::eos);
  EXPECT_EQ(end_of(eos, s, {}, Ids{'b'}), Finish::stop);
  EXPECT_EQ(end_of(eos, s, {}, Ids{'a', 257}), Finish::stop) << "abc";
  EXPECT_EQ(end_of(eos, s, {}, Ids{262, 'a'}), std::nullopt) << "the last token alone";
  EXPECT_STREQ(finish_name(Finish::stop), "stop");
}

// The text has a stop string, and a stop token that is not special.
TEST_F(StopTest, TheTextOfAResponse) {
  const Stop s = stop({"c"}, {261, 'b'});
  const auto shown = [&](const Ids& tokens, Finish finish) {
    Completion c;
    c.tokens = tokens;
    c.finish = finish;
    return text_tokens(c, s, *tokenizer_);
  };
  EXPECT_EQ(shown({'a', 262}, Finish::eos), 1u);
  EXPECT_EQ(shown({'a', 261}, Finish::stop), 1u);
  EXPECT_EQ(shown({'a', 'b'}, Finish::stop), 2u);
  EXPECT_EQ(shown({'a', 'c'}, Finish::stop), 2u);
  EXPECT_EQ(shown({'a', 261}, Finish::length), 2u);
}

TEST_F(StopTest, WrongStopsAreErrors) {
  EXPECT_NE(error({}, {263}).find("rollout.stop_token_ids has 263, the model's vocabulary is 263"), std::string::npos);
  EXPECT_NE(error({"a", ""}, {}).find("rollout.stop has an empty text"), std::string::npos);
  EXPECT_NE(error({"a"}, {}, false).find("rollout.stop_token_ids"), std::string::npos);
  EXPECT_EQ(error({}, {262}, false), "");
}

TEST_F(StopTest, AnEndOfTurnThatEndsNothingIsSaid) {
  const ChatFormat qwen = find_chat_format("qwen3", ""), llama = find_chat_format("llama-3", "");
  const std::string note = turn_end_note(qwen, *tokenizer_, {262}, {});
  for (const char* part : {"<|im_end|> (id 261)", "no EOS of the model", "rollout.stop_token_ids=[261]"})
    EXPECT_NE(note.find(part), std::string::npos) << note;
  EXPECT_EQ(turn_end_note(qwen, *tokenizer_, {262, 261}, {}), "");
  EXPECT_EQ(turn_end_note(qwen, *tokenizer_, {262}, stop({}, {261})), "");
  EXPECT_EQ(turn_end_note(llama, *tokenizer_, {262}, {}), "") << "<|eot_id|> is no token";
  EXPECT_EQ(turn_end_note({}, *tokenizer_, {262}, {}), "") << "the tokenizer names no EOS";
  std::ofstream(folder_ + "tokenizer_config.json") << R"({"eos_token": "<e>"})";
  const auto named = make_tokenizer(folder_);
  EXPECT_NE(turn_end_note({}, *named, {261}, {}).find("the tokenizer's eos_token is <e> (id 262)"), std::string::npos);
  EXPECT_EQ(turn_end_note({}, *named, {262}, {}), "");
}

// In the sampler, tokens ahead or not: a response is the beginning of the one without stops, up to the first stop.
TEST(Rollout, StopsEndResponsesWhateverIsQueued) {
  const auto requests = mixed_requests();
  Sampling sampling = mixed_sampling();
  Generator without(table_cpu, config(), kRoomy);
  const auto whole = without.rollout.generate(requests, sampling);
  sampling.stop.token_ids = {5, 6};
  // Two tokens in a row whose sum is a multiple of 7 stand for a string.
  sampling.stop.text = [](std::span<const int32_t>, std::span<const int32_t> t) {
    return t.size() > 1 && (t[t.size() - 1] + t[t.size() - 2]) % 7 == 0;
  };
  int by[3] = {};
  std::vector<Completion> expected = whole;
  for (Completion& c : expected) {
    for (size_t n = 1; n <= c.tokens.size(); n++)
      if (const auto end = end_of(sampling.eos, sampling.stop, {}, std::span(c.tokens).first(n))) {
        c.tokens.resize(n);
        c.logprobs.resize(n);
        c.finish = *end;
        break;
      }
    by[static_cast<int>(c.finish)]++;
  }
  EXPECT_GT(by[static_cast<int>(Finish::stop)], 3);
  for (const int lookahead : {1, 2, 8, 100})
    for (const int sequences : {3, 16}) {
      Generator g(table_cpu, config(),
                  {.max_sequences = sequences, .max_batched_tokens = 64, .max_context = 160, .lookahead = lookahead});
      expect_same(g.rollout.generate(requests, sampling), expected, cat("lookahead ", lookahead));
      EXPECT_EQ(g.rollout.stats().finished, std::ssize(expected));
    }
}

}  // namespace
}  // namespace pare::test
