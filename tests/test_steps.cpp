// Text that repeats itself, as a policy in a loop writes it, takes time in proportion to its length: steps are counted,
// not seconds (tools/fuzz/count.h).  A program of its own: `make steps`.
#include <gtest/gtest.h>

#include "tools/fuzz/steps.h"

namespace pare::fuzz {
namespace {

const char* const kParts[] = {"\\boxed{1}",
                              "\\[ ",
                              "\\( ",
                              "$ ",
                              "$$ ",
                              "\\boxed 1",
                              "\\boxed1 ",
                              "\\boxed{",
                              "\\fbox{1}",
                              "\\boxed{1}, ",
                              "\\boxed{1} and ",
                              "\\boxed ",
                              "\\boxed\n",
                              "\\boxedx",
                              "\\fbox",
                              "{",
                              "}",
                              "{}",
                              "\\text{",
                              "\\frac",
                              "\\frac1",
                              "\\sqrt",
                              "\\sqrt\\sqrt{2}",
                              "\\text{ a}",
                              "=",
                              "x=1 ",
                              "answer",
                              "answer ",
                              "answer*",
                              "answer is ",
                              "answer is 1. ",
                              "Answer: ",
                              "Answer: 1\n",
                              "Answer :",
                              "ANSWER",
                              "#### ",
                              "#### 1\n",
                              "####",
                              "<answer>",
                              "</answer>",
                              "<answer>1</answer>",
                              "<answer>1",
                              "<think>",
                              "</think>",
                              "<think></think>",
                              "I hope it is correct",
                              "I hope it is correct. ",
                              "The answer is 5. ",
                              "It is 5. ",
                              "is ",
                              " is 5",
                              ". ",
                              ".",
                              "\n",
                              " ",
                              "  \n",
                              "\t",
                              "*",
                              "_",
                              "`",
                              "1",
                              "1 ",
                              "1,",
                              "1.",
                              "-",
                              "-1",
                              "9+",
                              "(9+1)",
                              "((",
                              "9**",
                              "1\\n",
                              "$1$ ",
                              "$1$. ",
                              "$1",
                              "\\$",
                              "\\\\",
                              "\\",
                              "%",
                              "percent ",
                              "a",
                              "ab",
                              "aa ",
                              "a a",
                              "aab",
                              "The quick brown fox. ",
                              "x",
                              "word ",
                              "'s",
                              "don't ",
                              "!?",
                              "\r\n",
                              "<s>",
                              "<s><s>",
                              "<s",
                              "</s",
                              "<|",
                              "Assistant:",
                              "<|im_start|>assistant",
                              "9",
                              "9 9",
                              "e\u0301",
                              "\u0301",
                              "\u0301\u0323",
                              "\u0323\u0301",
                              "a\u0301\u0323",
                              "\u0f73",
                              "\u0344\u0323",
                              "\u1100\u1161\u11a8",
                              "\u1161",
                              "\u05b0\u0301\u0316",
                              "\u0345\u0301",
                              "\u3000",
                              "\u4e2d",
                              "\U0001F600",
                              "\xff",
                              "\xe4",
                              "\xe4\xb8",
                              "\xc3",
                              "\u2028",
                              "\u00a0",
                              "\x85"};

// The counter sees our own loops and those of the C library.
TEST(Steps, AreCounted) {
  const Reader composer{"nfc", [](const std::string& text) { nfc(text); }};
  const uint64_t some = steps_of(composer, repeated("", "\u0301\u0323", "", 1 << 14));
  EXPECT_GT(some, 1u << 14);
  EXPECT_NEAR(static_cast<double>(steps_of(composer, repeated("", "\u0301\u0323", "", 1 << 15))),
              2.0 * static_cast<double>(some), 0.2 * static_cast<double>(some));
  const Reader boxes{"boxed_gold", [](const std::string& text) { math_value::boxed_gold(text); }};
  EXPECT_GE(steps_of(boxes, std::string(1 << 20, 'a')), 1u << 16);
}

struct Form {
  const char *head, *tail;
};
constexpr Form kForms[] = {{"", ""}, {"\\boxed{", "}"}, {"The answer is ", "."}};

void expect_few_steps(const Reader& reader, const std::string& text, uint64_t beside) {
  const uint64_t taken = steps_of(reader, text);
  EXPECT_LE(taken, kStepsPerByte * text.size() + beside) << reader.name << ": " << text.substr(0, 80);
}

TEST(Steps, AreProportionalToTheText) {
  for (const Reader& reader : readers())
    for (const auto& [head, tail] : kForms)
      if (*head == '\0' || reader.name.find("math") != std::string::npos)
        for (const char* part : kParts) expect_few_steps(reader, repeated(head, part, tail, 1 << 15), 1'000'000);
}

// A short answer is read in many ways, which effort bounds.
TEST(Steps, OfAnAnswerAreBounded) {
  const Reader math_value{"math-value", [](const std::string& text) { grade_math_value(text, true, text + " "); }};
  for (const char* part : kParts)
    for (const size_t size : {250, 1900})
      for (const auto& [head, tail] : kForms)
        expect_few_steps(math_value, repeated(head, part, tail, size), kStepsOfAnswer);
  const std::pair<const char*, const char*> nested[] = {{"(", ")"},           {"x<1:(", ")"},
                                                        {"x=(", ")"},         {"x<(", ")"},
                                                        {"1:(", ")"},         {"\\text{", "}"},
                                                        {"(1,", ")"},         {"(x<1,", ",x<1:2)"},
                                                        {"\\{x=1,", "\\}"},   {"|", "|<1"},
                                                        {"-2<|", "|<x"},      {"x\\in(", ")"},
                                                        {"x<1:\\{", ",2\\}"}, {"y=x<1:(", ",3)"},
                                                        {"\\frac{", "}{2}"},  {"\\begin{pmatrix}1&", "\\end{pmatrix}"},
                                                        {"\\sqrt{", "}"},     {"x^{", "}"},
                                                        {"\\sin(", ")"},      {"\\sum_{k=1}^{99}(", ")"},
                                                        {"x\\ne(", ",1):2"},  {"\\lfloor ", "\\rfloor"},
                                                        {"2x<3:(2x<3,", ")"}};
  for (const auto& [open, close] : nested)
    for (const int depth : {4, 10, 40, 100}) {
      std::string text = "x";
      for (int i = 0; i < depth; i++) text = open + text + close;
      expect_few_steps(math_value, "\\boxed{" + text + "}", kStepsOfAnswer);
    }
}

}  // namespace
}  // namespace pare::fuzz
