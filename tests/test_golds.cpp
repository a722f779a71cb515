// Answers as data sets state them, and as a verifier gets them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/jsonl.h"

namespace pare {
namespace {

class Golds : public testing::Test {
 protected:
  ~Golds() override { std::filesystem::remove(path_); }
  Problem problem(const std::string& row, const std::string& reward = "math-value", const std::string& prompt_key = "",
                  const std::string& answer_key = "") {
    std::ofstream(path_, std::ios::binary) << row;
    return JsonlTask({path_}, reward, RowKeys{prompt_key, answer_key, ""}).problem(0);
  }
  std::string gold(const std::string& rest, const std::string& reward = "math-value") {
    return *problem("{\"problem\": \"p\", " + rest + "}", reward).answer;
  }
  void expect_error(const std::string& row, const char* says, const std::string& reward = "math-value",
                    const std::string& prompt_key = "", const std::string& answer_key = "") {
    try {
      problem(row, reward, prompt_key, answer_key);
      ADD_FAILURE() << "accepted: " << row;
    } catch (const Error& e) {
      const std::string what = e.what();
      EXPECT_NE(what.find(path_ + ":1: "), std::string::npos) << what;
      EXPECT_NE(what.find(says), std::string::npos) << says << " in: " << what;
    }
  }
  const std::string path_ =
      testing::TempDir() + "pare_golds_" + testing::UnitTest::GetInstance()->current_test_info()->name() + ".jsonl";
};

TEST_F(Golds, AreTheAnswerProper) {
  EXPECT_EQ(gold(R"("answer": "He has 6*7.\n#### 1,042")"), "1042");
  EXPECT_EQ(gold(R"("solution": "so \\boxed{1} then \\boxed{\\frac{1}{2}}.")"), "\\frac{1}{2}");
  EXPECT_EQ(gold(R"("solution": "work", "answer": "7")"), "7");
  EXPECT_EQ(gold(R"("answer": "025")"), "25");
  EXPECT_EQ(gold(R"("answer": "-007")"), "-7");
  EXPECT_EQ(gold(R"("answer": "000")"), "0");
  EXPECT_EQ(gold(R"("answer": 27.0)"), "27");
  EXPECT_EQ(gold(R"("answer": 27)"), "27");
  EXPECT_EQ(gold(R"("answer": 2.5)"), "2.5");
  EXPECT_EQ(gold(R"("answer": ["$2$", "$\\pi$"])"), "2, \\pi");
  EXPECT_EQ(gold(R"("answer": " $\\frac{40}{9}$ ")"), "\\frac{40}{9}");
  EXPECT_EQ(gold(R"("answer": "$1$ and $2$")"), "$1$ and $2$");
  EXPECT_EQ(gold(R"("answer": "025")", "contains"), "025") << "words stay as they are";
  EXPECT_EQ(gold(R"("answer": 27.0)", "contains"), "27.0");
}

TEST_F(Golds, KeysChooseWhatIsRead) {
  const std::string row = R"({"Question": "q", "Answer": 145.0, "prompt": "p", "answer": "3"})";
  const Problem p = problem(row, "math-value", "Question", "Answer");
  EXPECT_EQ(p.prompt, "q");
  EXPECT_EQ(p.answer, "145");
  EXPECT_EQ(problem(row).prompt, "p");
  EXPECT_EQ(problem(R"({"problem": "p", "a": {"b": {"c": "3"}}})", "math-value", "", "a.b.c").answer, "3");
  EXPECT_EQ(problem(R"({"question": "q", "answer": "3"})").prompt, "q");
  EXPECT_EQ(problem(R"({"problem": "q", "problem_ids": [1], "answer": "3"})").prompt, "q");
}

TEST_F(Golds, BadRowsAreErrors) {
  expect_error(R"({"problem": "p", "question": "q", "answer": "1"})", "exactly one");
  expect_error(R"({"problem": "p"})", "no \"answer\" and no \"solution\"");
  expect_error(R"({"problem": "p", "answer": null})", "no \"answer\" and no");
  expect_error(R"({"problem": "p", "answer": []})", "\"answer\" is of type array");
  expect_error(R"({"problem": "p", "answer": [["1"]]})", "array of arrays");
  expect_error(R"({"problem": "p", "answer": [1, true]})", ":1: \"answer\" is of type boolean");
  expect_error(R"({"problem": "p", "answer": ""})", "\"answer\" has an empty answer");
  expect_error(R"({"problem": "p", "answer": "work\n####"})", "\"answer\" has an empty answer");
  expect_error(R"({"problem": "p", "solution": "no box"})", "\"solution\" has no answer in it");
  expect_error(R"({"problem": "p", "answer": "1"})", "no \"q\" (data.prompt_key)", "math-value", "q");
  expect_error(R"({"problem": "p", "answer": "1"})", "no \"a\" (data.answer_key)", "math-value", "", "a");
  expect_error(R"({"problem": 3, "answer": "1"})", "\"problem\" is of type number");
  expect_error(R"({"target": 3})", "\"nums\" (or \"numbers\") is absent", "countdown");
  expect_error(R"({"nums": [1, "2"], "target": 3})", "\"nums\" (or \"numbers\") is [1,\"2\"]", "countdown");
  expect_error(R"({"nums": [1, 2], "target": "3"})", "\"target\" is \"3\"", "countdown");
}

TEST_F(Golds, CountdownRowsNeedNoPrompt) {
  const std::string row = R"({"nums": [26, 19, 23, 88], "target": 31})";
  const Problem p = problem(row, "countdown");
  for (const char* part : {"31", "[26,19,23,88]", "Assistant:"})
    EXPECT_NE(p.prompt.find(part), std::string::npos) << part;
  EXPECT_EQ(problem(R"({"nums": [1], "target": 1, "prompt": "own"})", "countdown").prompt, "own");
  problem(row, "countdown");
  const JsonlTask again({path_}, "countdown");
  const Problem q = again.problem(0);
  // The response comes without the prompt, in which "Assistant:" is.
  EXPECT_EQ(again.reward(q, {"so\n<answer>88 - (19 * (26 - 23))</answer>", true}).score, 1);
  EXPECT_EQ(again.reward(q, {"<answer>88</answer>", true}).score, 0.1);
  EXPECT_EQ(again.reward(q, {"no", true}).score, 0);
}

TEST_F(Golds, RewardsSayWhatWasFound) {
  problem(R"({"problem": "p", "answer": "0.5"})");
  const JsonlTask task({path_}, "math-value");
  const Reward right = task.reward(task.problem(0), {"\\boxed{\\frac12}", true});
  EXPECT_EQ(right.score, 1);
  EXPECT_TRUE(right.parsed);
  EXPECT_EQ(right.extracted, "\\frac12");
  ASSERT_EQ(right.components.size(), 1u);
  EXPECT_EQ(right.components[0].first, "math-value");
  EXPECT_EQ(right.components[0].second, 1);
  const Reward cut = task.reward(task.problem(0), {"\\boxed{\\frac12}", false});
  EXPECT_EQ(cut.score, 0);
  EXPECT_FALSE(cut.parsed);
}

TEST(VerifierData, RealSetsAreReadAndTheirSolutionsAreRight) {
  const std::string folder = "../shared/data/math/";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "no " << folder;
  const JsonlTask gsm8k({folder + "gsm8k_train.jsonl"}, "gsm8k-strict", RowKeys{"", "solution", ""});
  EXPECT_EQ(gsm8k.size(), 7473);
  for (int64_t i = 0; i < gsm8k.size(); i += 50) {
    const Problem p = gsm8k.problem(i);
    EXPECT_EQ(gsm8k.reward(p, {"#### " + *p.answer, true}).score, 1) << p.where;
  }
  const JsonlTask aime({folder + "aime_1983_2023_975.jsonl"}, "math-string");
  for (int64_t i = 0; i < aime.size(); i++)
    EXPECT_TRUE((*aime.problem(i).answer)[0] != '0' || *aime.problem(i).answer == "0");
  const JsonlTask puzzles({folder + "countdown_train_2000.jsonl"}, "countdown");
  EXPECT_EQ(puzzles.size(), 2000);
  std::ifstream in(folder + "countdown_train_2000.jsonl");
  for (int64_t i = 0; i < puzzles.size(); i++) {
    std::string line;
    std::getline(in, line);
    const std::string equation = nlohmann::json::parse(line)["solution"];
    EXPECT_EQ(puzzles.reward(puzzles.problem(i), {"<answer>" + equation + "</answer>", true}).score, 1);
  }
}

}  // namespace
}  // namespace pare
