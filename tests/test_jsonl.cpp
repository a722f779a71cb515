// Problems from JSON lines, and the rewards of texts.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/error.h"
#include "data/jsonl.h"

namespace pare {
namespace {

class Jsonl : public testing::Test {
 protected:
  ~Jsonl() override { std::filesystem::remove(path_); }

  JsonlTask load(const std::string& text, const std::string& reward = "exact") {
    std::ofstream(path_, std::ios::binary) << text;
    return JsonlTask({path_}, reward);
  }
  // The message of the error; it must name file and line.
  std::string error(const std::string& text, int line, const std::string& reward = "exact") {
    try {
      load(text, reward);
    } catch (const Error& e) {
      const std::string what = e.what(), where = path_ + (line ? ":" + std::to_string(line) + ":" : ":");
      EXPECT_NE(what.find(where), std::string::npos) << what;
      return what;
    }
    ADD_FAILURE() << "accepted: " << text;
    return "";
  }
  void expect_error(const std::string& text, int line, const char* says, const std::string& reward = "exact") {
    const std::string what = error(text, line, reward);
    EXPECT_NE(what.find(says), std::string::npos) << "\"" << says << "\" in: " << what;
  }

  const std::string path_ =
      testing::TempDir() + "pare_" + testing::UnitTest::GetInstance()->current_test_info()->name() + ".jsonl";
};

TEST_F(Jsonl, ReadsRows) {
  const JsonlTask task = load(
      "{\"prompt\": \"Lily has a\", \"answer\": \"dog\", \"level\": [1]}\r\n"
      "\n  \t\n"
      "{\"prompt_ids\": [1, 403, 0], \"answer\": 42, \"completion\": \"\"}\n"
      "{\"ids\": [2147483647], \"answer\": -1.5}\n"
      "{\"prompt\": \"\\u00e9\\n\", \"answer\": \"\"}");
  ASSERT_EQ(task.size(), 4);
  EXPECT_EQ(task.problem(0).prompt, "Lily has a");
  EXPECT_EQ(task.problem(0).answer, "dog");
  EXPECT_EQ(task.problem(0).where, path_ + ":1");
  EXPECT_TRUE(task.problem(0).prompt_ids.empty());
  EXPECT_FALSE(task.problem(0).completion.has_value());
  EXPECT_EQ(task.problem(1).prompt_ids, (std::vector<int32_t>{1, 403, 0}));
  EXPECT_EQ(task.problem(1).prompt, "");
  EXPECT_EQ(task.problem(1).answer, "42");
  EXPECT_EQ(task.problem(1).where, path_ + ":4");
  EXPECT_EQ(task.problem(2).prompt_ids, std::vector<int32_t>{INT32_MAX});
  EXPECT_EQ(task.problem(2).answer, "-1.5");
  EXPECT_EQ(task.problem(3).prompt, "\u00e9\n");
  EXPECT_EQ(task.problem(3).answer, "");
  EXPECT_THROW(task.problem(4), std::logic_error);
  EXPECT_THROW(task.problem(-1), std::logic_error);
}

TEST_F(Jsonl, CompletionsTeach) {
  const JsonlTask task = load("{\"prompt\": \"a\", \"completion\": \" b\"}\n", "");
  Rng rng(1);
  EXPECT_EQ(task.teach(task.problem(0), 1, rng), " b");
  EXPECT_THROW(task.reward(task.problem(0), {"b", true}), std::logic_error);
  expect_error("{\"prompt\": \"a\", \"answer\": \"b\"}", 1, "completion", "");
  const JsonlTask rewarded = load("{\"prompt\": \"a\", \"answer\": \"b\"}");
  EXPECT_THROW(rewarded.teach(rewarded.problem(0), 1, rng), Error);
}

TEST_F(Jsonl, BadRowsAreErrors) {
  const std::string good = "{\"prompt\": \"p\", \"answer\": \"a\"}\n";
  expect_error(good + "{\"prompt\": \"p\", \"answer\": \"a\"", 2, "not JSON");
  expect_error(good + "\n" + good.substr(0, 10), 3, "not JSON");
  expect_error(good + "not json", 2, "not JSON");
  expect_error("{\"prompt\": \"p\", \"answer\": 1e999}", 1, "not JSON");
  expect_error("{\"prompt\": \"p\", \"answer\": NaN}", 1, "not JSON");
  expect_error("{\"prompt\": \"\xff\", \"answer\": \"a\"}", 1, "not JSON");
  expect_error(good + good.substr(0, good.size() - 1) + good, 2, "not JSON");
  expect_error(std::string("{\"prompt\": \"\0\"}", 14), 1, "not JSON");
  expect_error(std::string(100000, '['), 1, "nested deeper");
  expect_error("[1]", 1, "expected an object");
  expect_error("null", 1, "expected an object");
  expect_error("\"text\"", 1, "expected an object");
  expect_error("{}", 1, "exactly one");
  expect_error("{\"promt\": \"p\", \"answer\": \"a\"}", 1, "exactly one");
  expect_error("{\"prompt\": \"p\", \"ids\": [1], \"answer\": \"a\"}", 1, "exactly one");
  expect_error("{\"prompt_ids\": [1], \"ids\": [1], \"answer\": \"a\"}", 1, "exactly one");
  expect_error("{\"prompt\": \"\", \"answer\": \"a\"}", 1, "empty");
  expect_error("{\"prompt\": 7, \"answer\": \"a\"}", 1, "expected a string");
  expect_error("{\"prompt\": {\"text\": {}}, \"answer\": \"a\"}", 1, "\"prompt\" is of type object");
  expect_error("{\"prompt\": [{\"role\": \"user\"}], \"answer\": \"a\"}", 1, "message 1 is not");
  expect_error("{\"prompt\": null, \"answer\": \"a\"}", 1, "exactly one");
  expect_error("{\"ids\": [], \"answer\": \"a\"}", 1, "empty");
  expect_error("{\"ids\": \"1 2\", \"answer\": \"a\"}", 1, "string");
  for (const char* id :
       {"-1", "2147483648", "4294967296", "18446744073709551615", "1.0", "\"1\"", "null", "[1]", "true"})
    expect_error(std::string("{\"ids\": [3, ") + id + "], \"answer\": \"a\"}", 1, "element 1");
  expect_error("{\"prompt\": \"p\", \"answer\": true}", 1, "boolean");
  expect_error("{\"prompt\": \"p\", \"answer\": null}", 1, "no \"answer\"");
  expect_error("{\"prompt\": \"p\"}", 1, "no \"answer\"");
  expect_error("{\"prompt\": \"p\", \"answer\": \"a\", \"completion\": 1}", 1, "completion");
  expect_error("{\"prompt\": \"p\", \"answer\": \" \"}", 1, "empty answer", "contains");
  expect_error("{\"prompt\": \"p\", \"answer\": \"\"}", 1, "empty answer", "starts_with");
}

TEST_F(Jsonl, FilesWithoutRowsAreErrors) {
  expect_error("", 0, "no rows");
  expect_error("\n\n  \r\n", 0, "no rows");
  try {
    JsonlTask({testing::TempDir() + "pare_no_such_file.jsonl"}, "exact");
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("no_such_file.jsonl: cannot be read;"), std::string::npos) << e.what();
  }
  EXPECT_THROW(JsonlTask({testing::TempDir()}, "exact"), Error);
  try {
    JsonlTask({"/dev/null"}, "exact");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("has no rows; it is no file"), std::string::npos) << e.what();
  }
}

double score(const char* name, std::string_view answer, std::string_view text, bool finished = true) {
  return find_verifier(name).grade(text, finished, answer).score;
}

TEST(TextReward, Exact) {
  EXPECT_EQ(score("exact", "red ball", " red ball\n"), 1);
  EXPECT_EQ(score("exact", " red ball ", "red ball"), 1);
  EXPECT_EQ(score("exact", "", " \n"), 1);
  EXPECT_EQ(score("exact", "red ball", "red ball", false), 0) << "more might have followed";
  for (const char* text : {"", "red", "Red ball", "red  ball", "red ball.", "a red ball"})
    EXPECT_EQ(score("exact", "red ball", text), 0) << text;
}

TEST(TextReward, Contains) {
  for (const char* text : {"dog", " a dog", "The DOG ran.", "\"dog\"", "dogs dog", "hotdog, dog", "dog's", "dog\n"})
    EXPECT_EQ(score("contains", "dog", text, false), 1) << text;
  for (const char* text : {"", "do", "dogs", "hotdog", "d og", "dog1", "dog\u00e9", "\u00e9dog"})
    EXPECT_EQ(score("contains", "dog", text), 0) << text;
  EXPECT_EQ(score("contains", "Red Ball", "his red ball rolled"), 1);
  EXPECT_EQ(score("contains", "b b", "ab b b"), 1) << "matches that overlap";
  EXPECT_EQ(score("contains", "?", "what?now"), 1) << "an answer without letters has borders everywhere";
}

TEST(TextReward, StartsWith) {
  EXPECT_EQ(score("starts_with", "Yes", "  Yes, she did", false), 1);
  EXPECT_EQ(score("starts_with", "Yes", "Yes"), 1);
  for (const char* text : {"", "Ye", "Yesterday", "yes", "Oh Yes"}) EXPECT_EQ(score("starts_with", "Yes", text), 0);
}

TEST(TextReward, SaysWhatItFound) {
  const Verdict cut = find_verifier("exact").grade(" 7 ", false, "7");
  EXPECT_FALSE(cut.found);
  EXPECT_EQ(cut.extracted, "7");
  const Verdict wrong = find_verifier("exact").grade(" 7 ", true, "8");
  EXPECT_TRUE(wrong.found);
  EXPECT_EQ(wrong.score, 0);
  EXPECT_EQ(find_verifier("contains").grade("so 7", false, "7").parsed, "so 7");
}

TEST(JsonlFiles, FollowOneAnother) {
  const std::string second = testing::TempDir() + "pare_second.jsonl";
  std::ofstream(second) << R"({"prompt": "x", "answer": "y"})";
  const JsonlTask one({"data/presets/stories.jsonl"}, "contains"),
      both({"data/presets/stories.jsonl", second}, "contains");
  ASSERT_EQ(both.size(), one.size() + 1);
  EXPECT_EQ(both.problem(0).prompt, one.problem(0).prompt);
  EXPECT_EQ(both.problem(one.size()).where, second + ":1");
  std::ofstream(second) << "";
  EXPECT_THROW(JsonlTask({"data/presets/stories.jsonl", second}, "contains"), Error);
  std::filesystem::remove(second);
}

TEST(StoriesPreset, AsksForWordsThatThePromptDoesNotHave) {
  const JsonlTask task({"data/presets/stories.jsonl"}, "contains");
  EXPECT_EQ(task.size(), 64);
  std::set<std::string> prompts;
  for (int64_t i = 0; i < task.size(); i++) {
    const Problem p = task.problem(i);
    prompts.insert(p.prompt);
    EXPECT_EQ(task.reward(p, {p.prompt, false}).score, 0) << p.prompt;
    EXPECT_EQ(task.reward(p, {" They saw a " + *p.answer + ".", false}).score, 1) << p.prompt;
  }
  EXPECT_EQ(prompts.size(), 64u);
}

}  // namespace
}  // namespace pare
