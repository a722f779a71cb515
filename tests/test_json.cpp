// base/json: what is JSON, and not nested deeper than a recursion can bear.
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/json.h"

namespace pare {
namespace {

std::string nested(int depth, const std::string& inside = "") {
  std::string text;
  for (int i = 0; i < depth; i++) text += i % 2 ? "{\"a\":" : "[";
  text += inside.empty() ? "0" : inside;
  for (int i = depth; i-- > 0;) text += i % 2 ? '}' : ']';
  return text;
}
std::string error(const std::string& text) {
  try {
    parse_json(text, "f.json");
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::usage);
    return e.what();
  }
  return "no error";
}

TEST(Json, IsNotNestedDeeply) {
  EXPECT_EQ(error(nested(100)), "no error");
  EXPECT_EQ(error(nested(101)), "f.json: JSON nested deeper than 100");
  EXPECT_EQ(error(nested(99, R"("[[[[[[\"[[[[[[{{{{{\\")")), "no error") << "brackets in a string";
  EXPECT_EQ(error(std::string(1'000'000, '[')), "f.json: JSON nested deeper than 100");
  EXPECT_TRUE(try_parse_json(nested(101)).is_discarded());
  EXPECT_EQ(try_parse_json(nested(100)).dump(), nested(100));
  const std::string wide = "[" + nested(99) + "," + nested(99) + "]";
  EXPECT_EQ(parse_json(wide, "").dump(), wide) << "depth is not number";
}

TEST(Json, WhatIsNoneSaysWhy) {
  EXPECT_EQ(error("{").find("f.json: not JSON: parse error at line 1"), 0u) << error("{");
  for (const char* text : {"", "]", "{]", "\"", "\"\\", "[1] 2", "nan", "\"\xff\""}) {
    EXPECT_EQ(error(text).find("f.json: not JSON: "), 0u) << text;
    EXPECT_TRUE(try_parse_json(text).is_discarded()) << text;
  }
}

// A parser that keeps the last of two values hides the first.
TEST(Json, KeysOccurOnce) {
  EXPECT_EQ(error(R"({"a": 1, "b": {"a": 2, "c": [{"a": 3}, {"a": 4}]}})"), "no error");
  for (const char* text : {R"({"a": 1, "a": 1})", R"([{"b": {"a": 1, "c": 2, "a": 3}}])", R"({"\u0061": 1, "a": 2})"}) {
    EXPECT_EQ(error(text), "f.json: key \"a\" occurs twice in one object");
    EXPECT_TRUE(try_parse_json(text).is_discarded()) << text;
  }
}

}  // namespace
}  // namespace pare
