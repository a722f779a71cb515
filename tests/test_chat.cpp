// Chat formats: against renderings by Jinja of the real templates, and how a format is chosen.
#include <gtest/gtest.h>

#include <map>

#include "base/error.h"
#include "tests/tiny_tokenizer.h"
#include "tokenizer/chat.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Ids = std::vector<int32_t>;
using Kind = ChatFormat::Kind;

const std::string kTemplates = "../shared/data/chat_templates/";

std::string text_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class Chat : public testing::Test {
 protected:
  Chat() { fs::create_directories(folder_); }
  ~Chat() override { fs::remove_all(folder_); }
  void write(const char* name, const std::string& text) { std::ofstream(folder_ + name, std::ios::binary) << text; }
  ChatFormat recognised(const json& chat_template) {
    write("tokenizer_config.json", json({{"chat_template", chat_template}}).dump());
    return find_chat_format("auto", folder_);
  }
  std::string error(const std::string& wanted) {
    try {
      find_chat_format(wanted, folder_);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  const std::string folder_ = testing::TempDir() + "pare_chat_" +
                              testing::UnitTest::GetInstance()->current_test_info()->name() + std::to_string(getpid()) +
                              "/";
};

const std::vector<Message> kQuestion = {{"user", "1+1?"}};
const std::vector<Message> kTalk = {{"system", " S\n"},
                                    {"user", "a"},
                                    {"assistant", "<think>\nx\n</think>\n\nb"},
                                    {"user", " c "},
                                    {"assistant", "<think>\ny\n</think>\n\nd"}};

TEST_F(Chat, Qwen2) {
  const ChatFormat f = find_chat_format("qwen2.5", "");
  EXPECT_EQ(render_chat(f, kQuestion),
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(render_chat(f, kTalk, false),
            "<|im_start|>system\n S\n<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nx\n"
            "</think>\n\nb<|im_end|>\n<|im_start|>user\n c <|im_end|>\n<|im_start|>assistant\n<think>\ny\n</think>\n\n"
            "d<|im_end|>\n");
}

TEST_F(Chat, Qwen3) {
  ChatFormat f = find_chat_format("qwen3", "");
  EXPECT_EQ(render_chat(f, kQuestion), "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(render_chat(f, kTalk, false),
            "<|im_start|>system\n S\n<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
            "<|im_start|>user\n c <|im_end|>\n<|im_start|>assistant\n<think>\ny\n</think>\n\nd<|im_end|>\n");
  EXPECT_EQ(render_chat(f, std::vector<Message>{{"user", "q"}, {"assistant", "\n\nr"}}, false),
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nr<|im_end|>\n");
  f.thinking = false;
  EXPECT_EQ(render_chat(f, kQuestion),
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
}

TEST_F(Chat, Llama3) {
  ChatFormat f = find_chat_format("llama-3", "");
  f.date = "01 Jan 2025";
  EXPECT_EQ(render_chat(f, kQuestion),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            "Today Date: 01 Jan 2025\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
  EXPECT_EQ(render_chat(f, std::vector<Message>{{"system", " S\n"}, {"user", "\u3000\x1f a b\t\u0085"}}, false),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            "Today Date: 01 Jan 2025\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\na b<|eot_id|>");
  EXPECT_EQ(find_chat_format("llama-3", "").date, "26 Jul 2024");
}

TEST_F(Chat, DeepSeek) {
  const ChatFormat f = find_chat_format("deepseek-r1", "");
  EXPECT_EQ(render_chat(f, kQuestion), "<｜begin▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜><think>\n");
  EXPECT_EQ(
      render_chat(f, kTalk, false),
      "<｜begin▁of▁sentence｜> S\n<｜User｜>a<｜Assistant｜>\n\nb<｜end▁of▁sentence｜><｜User｜> c <｜Assistant｜>"
      "\n\nd<｜end▁of▁sentence｜>");
}

TEST_F(Chat, TextsOfTheUser) {
  write("tokenizer.json", [] {
    json file = tokenizer_json({}, {"<s>"});
    file["post_processor"] = bos_template("<s>", 256);
    return file.dump();
  }());
  const auto t = make_tokenizer(folder_);
  const std::vector<Message> problem = {{"user", "{problem}1"}};
  const ChatFormat plain = find_chat_format("plain", ""), q = find_chat_format("Q:{problem};{problem}", "");
  EXPECT_EQ(render_chat(plain, problem), "{problem}1");
  EXPECT_EQ(render_chat(q, problem), "Q:{problem}1;{problem}1");
  EXPECT_EQ(encode_chat(q, *t, std::vector<Message>{{"user", "1"}}), (Ids{256, 'Q', ':', '1', ';', '1'}));
  EXPECT_EQ(encode_chat(find_chat_format("<s>{problem}", ""), *t, std::vector<Message>{{"user", "1"}}), (Ids{256, '1'}))
      << "BOS once";
  EXPECT_EQ(encode_chat(plain, *t, std::vector<Message>{{"user", "1"}}), (Ids{256, '1'}));
  EXPECT_THROW(render_chat(plain, kTalk), Error);
  EXPECT_THROW(render_chat(q, std::vector<Message>{{"system", "x"}}), Error);
  EXPECT_THROW(encode_chat(find_chat_format("qwen3", ""), *t, kQuestion), Error) << "<|im_start|> is no token";
}

TEST_F(Chat, SpelledControlTokensAreControlTokens) {
  write("tokenizer.json", tokenizer_json({}, {"<|im_start|>", "<|im_end|>"}).dump());
  const auto t = make_tokenizer(folder_);
  const Ids ids = encode_chat(find_chat_format("qwen3", ""), *t, std::vector<Message>{{"user", "<|im_end|>"}});
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 257), 2);
}

TEST_F(Chat, RolesThatThereAreNot) {
  for (const char* name : {"qwen2.5", "qwen3", "llama-3", "deepseek-r1"})
    EXPECT_THROW(render_chat(find_chat_format(name, ""), std::vector<Message>{{"tool", "x"}}), Error);
}

// A format without turns would lose what is said besides the user's message.
TEST_F(Chat, AFormatWithoutTurnsTakesOneMessageOfTheUser) {
  for (const char* name : {"plain", "Solve {problem}."}) {
    const ChatFormat f = find_chat_format(name, "");
    EXPECT_NO_THROW(render_chat(f, kQuestion));
    EXPECT_THROW(render_chat(f, kTalk), Error) << name;
    EXPECT_THROW(render_chat(f, std::vector<Message>{{"system", "x"}}), Error) << name;
    EXPECT_THROW(render_chat(f, std::vector<Message>{{"user", "x"}, {"assistant", "y"}}), Error) << name;
  }
}

// As the template of Qwen3: behind the last question, an answer without thoughts gets empty ones if it is the last.
TEST_F(Chat, Qwen3AnswersInARow) {
  const std::vector<Message> row = {{"user", "q"}, {"assistant", "a"}, {"assistant", "b"}};
  EXPECT_EQ(render_chat(find_chat_format("qwen3", ""), row, false),
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n");
}

TEST_F(Chat, UnknownTemplatesAreErrors) {
  EXPECT_EQ(find_chat_format("auto", folder_).kind, Kind::plain) << "there is none";
  EXPECT_EQ(find_chat_format("auto", "ssa").kind, Kind::plain);
  for (const json& unknown :
       {json("{{ messages[0]['content'] }}"), json(7), json::array({{{"name", "tool_use"}, {"template", "x"}}})}) {
    write("tokenizer_config.json", json({{"chat_template", unknown}}).dump());
    const std::string what = error("auto");
    for (const char* part : {"tokenizer_config.json", "data.chat_template"})
      EXPECT_NE(what.find(part), std::string::npos) << what;
    EXPECT_EQ(find_chat_format("qwen3", folder_).kind, Kind::qwen3) << "what is set wins";
  }
  write("tokenizer_config.json", R"({"chat_template": null})");
  EXPECT_EQ(find_chat_format("auto", folder_).kind, Kind::plain);
  write("chat_template.jinja", "{{ x }}");
  EXPECT_NE(error("auto").find("chat_template.jinja"), std::string::npos);
  const std::string what = error("chatml");
  for (const char* part : {"chatml", "qwen2.5", "llama-3", "deepseek-r1", "plain", "{problem}"})
    EXPECT_NE(what.find(part), std::string::npos) << what;
}

TEST_F(Chat, RecognisesQwen2AndItsDefaultSystemMessage) {
  const auto jinja = [](const std::string& system) {
    return R"({% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %})"
           R"({{ '<|im_start|>system\n)" +
           system +
           R"(<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>')"
           R"( + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})";
  };
  const ChatFormat f = recognised(jinja("You are a helpful assistant."));
  EXPECT_EQ(f.kind, Kind::qwen2);
  EXPECT_EQ(f.text, "You are a helpful assistant.");
  EXPECT_EQ(recognised(jinja(R"(Use \\boxed{}.\nThink.)")).text, "Use \\boxed{}.\nThink.");
  EXPECT_THROW(recognised(jinja("Yes.") + "{{ 'x' }}"), Error);
  EXPECT_THROW(recognised(jinja("' + date + '")), Error) << "no text";
}

// The files of the real templates: recognised as they are, and not when one word is changed.
TEST_F(Chat, RecognisesTheRealTemplates) {
  if (!fs::exists(kTemplates)) GTEST_SKIP() << kTemplates << " is not on this machine";
  const std::map<std::string, Kind> files = {{"Qwen-Qwen2.5-7B-Instruct", Kind::qwen2},
                                             {"Qwen-Qwen3-0.6B", Kind::qwen3},
                                             {"meta-llama-Llama-3.1-8B-Instruct", Kind::llama3},
                                             {"meta-llama-Llama-3.2-3B-Instruct", Kind::llama3},
                                             {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", Kind::deepseek},
                                             {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B", Kind::deepseek}};
  for (const auto& [name, kind] : files) {
    const std::string jinja = text_of(kTemplates + name + ".jinja");
    ASSERT_FALSE(jinja.empty()) << name;
    EXPECT_EQ(recognised(jinja).kind, kind) << name;
    EXPECT_EQ(recognised(json::array({{{"name", "default"}, {"template", jinja + "\n"}}})).kind, kind) << name;
    std::string changed = jinja;
    changed.replace(changed.rfind("add_generation_prompt"), 3, "sub");
    EXPECT_THROW(recognised(changed), Error) << name;
  }
  EXPECT_EQ(recognised(text_of(kTemplates + "Qwen-Qwen2.5-7B-Instruct.jinja")).text,
            find_chat_format("qwen2.5", "").text);
  EXPECT_THROW(recognised(text_of(kTemplates + "Qwen-QwQ-32B.jinja")), Error) << "not supported";
}

TEST_F(Chat, RendersAsJinja) {
  const auto rows = rows_of(kTemplates + "rendered_visible.jsonl");
  if (rows.empty()) GTEST_SKIP() << kTemplates << " is not on this machine";
  const std::map<std::string, std::pair<std::string, std::string>> families = {
      {"qwen2.5", {"Qwen-Qwen2.5-7B-Instruct", "qwen2.5"}},
      {"qwen3", {"Qwen-Qwen3-0.6B", "qwen3"}},
      {"llama-3.2", {"meta-llama-Llama-3.2-3B-Instruct", "llama-3.1"}}};  // the two have one tokenizer
  for (const auto& [family, files] : families) {
    ChatFormat format = recognised(text_of(kTemplates + files.first + ".jinja"));
    const RealFile file(files.second);
    const auto tokenizer = file.folder().empty() ? nullptr : make_tokenizer(file.folder());
    int tested = 0;
    for (const json& row : rows) {
      if (row["family"] != family) continue;
      std::vector<Message> messages;
      for (const json& m : row["messages"]) messages.push_back({m["role"], m["content"]});
      format.thinking = row["enable_thinking"] != false;
      const bool prompt = row["add_generation_prompt"];
      EXPECT_EQ(render_chat(format, messages, prompt), row["rendered"]) << row["case"];
      if (tokenizer) {
        EXPECT_EQ(encode_chat(format, *tokenizer, messages, prompt), row["ids"].get<Ids>()) << row["case"];
      }
      tested++;
    }
    EXPECT_GE(tested, 12) << family;
  }
}

}  // namespace
}  // namespace pare::test
