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

// Random conversations of each family that transformers rendered (tools/make_chat_golden.py), by the published template
// and by the one that pare writes.
TEST_F(Chat, RendersAsTransformers) {
  const json golden = json::parse(text_of("tests/golden/chat.json"));
  for (const auto& [name, family] : golden["families"].items()) {
    ChatFormat format = find_chat_format(name, "");
    if (family["system"].is_string()) format.system = family["system"];
    const std::string written = chat_jinja(format, "");
    EXPECT_EQ(written.substr(written.find('\n') + 1), family["jinja"]) << "run tools/make_chat_golden.py";
    int two_answers = 0;
    for (const json& row : family["rows"]) {
      format.thinking = row["thinking"];
      const std::vector<Message> messages = messages_of(nlohmann::ordered_json(row["messages"]));
      EXPECT_EQ(render_chat(format, messages, row["prompt"]), row["rendered"]) << name << row["messages"];
      for (size_t i = 1; i < messages.size(); i++)
        two_answers += messages[i - 1].role == "assistant" && messages[i].role == "assistant";
    }
    EXPECT_GE(two_answers, 5) << name;
  }
  for (const json& row : golden["texts"]) {
    const std::string jinja = chat_jinja(find_chat_format(row["text"], ""), row["bos"]);
    EXPECT_EQ(jinja.substr(jinja.find('\n') + 1), row["jinja"]);
  }
}

TEST_F(Chat, Qwen3KeepsTheEmptyThoughtOfTheLastAnswerAlone) {
  const std::vector<Message> talk = {{"user", "q"}, {"assistant", "a"}, {"assistant", "\nb"}};
  EXPECT_EQ(render_chat(find_chat_format("qwen3", ""), talk, false),
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
            "</think>\n\nb<|im_end|>\n");
}

// A template that pare wrote is recognised as the format that it was written for.
TEST_F(Chat, RecognisesItsOwnTemplates) {
  std::vector<ChatFormat> formats;
  for (const char* name :
       {"plain", "qwen2.5", "qwen3", "llama-3", "deepseek-r1", "Q: {problem}", "it's \\ #} -#}\n{problem}\x01\xc3\xa9"})
    formats.push_back(find_chat_format(name, ""));
  formats.push_back(find_chat_format("chatml", ""));
  for (const char* system : {"Think #} 'first'.\n", ""}) formats.push_back({.kind = Kind::chatml, .system = system});
  formats.push_back({.kind = Kind::llama3, .date = "01 Jan 2025"});
  for (const ChatFormat& f : formats)
    for (const char* bos : {"", "<s>"}) {
      write("chat_template.jinja", chat_jinja(f, bos));
      const ChatFormat found = find_chat_format("auto", folder_);
      EXPECT_EQ(found.kind, f.kind) << f.text;
      EXPECT_EQ(found.text, f.text);
      EXPECT_EQ(found.system, f.system);
      EXPECT_EQ(found.date, f.date);
      write("chat_template.jinja", chat_jinja(f, bos) + " ");
      EXPECT_EQ(error("auto").find("unknown") == std::string::npos, false) << "changed";
      EXPECT_EQ(chat_jinja(f, end_of_turn(f).empty() ? "" : bos), chat_jinja(f, "")) << "turns have a BOS of their own";
    }
  // Qwen2 with another system message, as it was written before `chatml` was a name.
  std::string older = chat_jinja({.kind = Kind::chatml, .system = "Think."}, "");
  older.replace(older.find("chatml"), 6, "qwen2.5");
  write("chat_template.jinja", older);
  EXPECT_EQ(find_chat_format("auto", folder_).system, "Think.");
  for (const char* broken : {"{#- pare: ", "{#- pare: 7 -#}\n", "{#- pare: {\"data.chat_template\":\"auto\"} -#}\nx",
                             "{#- pare: {\"data.chat_template\":[1]} -#}\nx", "{#- pare: {\"data.chat_templ -#}\nx"}) {
    write("chat_template.jinja", broken);
    EXPECT_NE(error("auto").find("unknown"), std::string::npos) << broken;
  }
}

// As transformers 5.24 reads a folder.
TEST_F(Chat, FilesOfTemplatesWinOverTheConfig) {
  const std::string qwen3 = chat_jinja({.kind = Kind::qwen3}, ""), deepseek = chat_jinja({.kind = Kind::deepseek}, "");
  const std::string llama = chat_jinja({.kind = Kind::llama3}, "");
  const auto kind = [&] { return find_chat_format("auto", folder_).kind; };
  const auto config = [&](const json& value) {
    write("tokenizer_config.json", json({{"chat_template", value}}).dump());
  };
  config(qwen3);
  EXPECT_EQ(kind(), Kind::qwen3);
  write("chat_template.jinja", deepseek);
  for (const json& other : {json(qwen3), json(""), json(), json("{{ unknown }}"), json(7)}) {
    config(other);
    EXPECT_EQ(kind(), Kind::deepseek) << other;
  }
  EXPECT_EQ(find_chat_format("auto", folder_ + "tokenizer.json").kind, Kind::deepseek) << "beside a file";
  write("chat_template.jinja", "");
  EXPECT_NE(error("auto").find("chat_template.jinja: the chat template is empty"), std::string::npos) << error("auto");
  for (const char* end : {"\r\n", "\r"}) {
    std::string text = deepseek;
    for (size_t i = 0; (i = text.find('\n', i)) != text.npos; i += 2) text.replace(i, 1, end);
    write("chat_template.jinja", text);
    EXPECT_EQ(kind(), Kind::deepseek) << "line ends of other systems";
  }
  write("chat_template.jinja", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n");
  EXPECT_NE(error("auto").find("lfs pull"), std::string::npos) << error("auto");
  fs::remove(folder_ + "chat_template.jinja");
  fs::create_directory(folder_ + "chat_template.jinja");
  EXPECT_NE(error("auto").find("chat_template.jinja: cannot be read"), std::string::npos) << error("auto");
  fs::remove(folder_ + "chat_template.jinja");
  write("chat_template.jinja", deepseek);
  fs::create_directories(folder_ + "additional_chat_templates");
  write("additional_chat_templates/tool_use.jinja", "{{ tools }}");
  EXPECT_EQ(kind(), Kind::deepseek) << "others are not the default";
  write("additional_chat_templates/default.jinja", llama);
  EXPECT_EQ(kind(), Kind::llama3);
  fs::remove(folder_ + "additional_chat_templates/default.jinja");
  fs::remove(folder_ + "chat_template.jinja");
  config(qwen3);
  EXPECT_NE(error("auto").find("chat_template.jinja, the default one, is missing"), std::string::npos) << error("auto");
  fs::remove_all(folder_ + "additional_chat_templates");
  config(json::array({{{"name", "default"}, {"template", qwen3}}, {{"name", "default"}, {"template", llama}}}));
  EXPECT_EQ(kind(), Kind::llama3) << "the last of a name";
  config({{"default", deepseek}, {"tool_use", "x"}});
  EXPECT_EQ(kind(), Kind::deepseek);
  config("");
  EXPECT_NE(error("auto").find("tokenizer_config.json: the chat template is empty"), std::string::npos);
  for (const json& broken : {json::array({7, {{"name", 1}}, {{"name", "default"}, {"template", 3}}}),
                             json({{"default", 1}}), json({{"tool_use", "x"}}), json(true)}) {
    config(broken);
    EXPECT_NE(error("auto").find("set data.chat_template"), std::string::npos) << broken;
  }
}

// Keys that no format renders are errors that name them, unless they say nothing.
TEST_F(Chat, NothingInAMessageIsDropped) {
  using Row = nlohmann::ordered_json;
  const auto refused = [](const Row& row) -> std::string {
    try {
      if (row.is_object()) refuse_unrendered(row);
      render_chat(ChatFormat{.kind = Kind::qwen3}, messages_of(row.is_array() ? row : row["messages"]));
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const Row user = {{"role", "user"}, {"content", "q"}};
  for (const auto& [key, value] : std::map<std::string, Row>{{"tool_calls", Row::array({{{"name", "f"}}})},
                                                             {"name", "Ann"},
                                                             {"tool_call_id", "7"},
                                                             {"weight", 0},
                                                             {"train", true},
                                                             {"refusal", "no"}}) {
    Row message = user;
    message[key] = value;
    EXPECT_NE(refused(Row::array({user, message})).find("message 2 has the key \"" + key + "\""), std::string::npos)
        << refused(Row::array({user, message}));
    for (const Row& nothing : {Row(), Row(false), Row(""), Row::array(), Row::object()}) {
      message[key] = nothing;
      EXPECT_EQ(refused(Row::array({message})), "") << message;
    }
  }
  for (const char* key : {"tools", "functions", "documents"}) {
    EXPECT_NE(refused({{"messages", Row::array({user})}, {key, Row::array({1})}}).find(key), std::string::npos);
    EXPECT_EQ(refused({{"messages", Row::array({user})}, {key, nullptr}}), "");
  }
  for (const Row& value : {Row(true), Row(false), Row::object({{"enable_thinking", false}})})
    for (const char* key : {"enable_thinking", "chat_template_kwargs"})
      EXPECT_NE(refused({{"messages", Row::array({user})}, {key, value}}).find("data.apply_chat_template_kwargs"),
                std::string::npos);
  for (const Row& nothing : {Row(), Row::object()})
    EXPECT_EQ(refused({{"messages", Row::array({user})}, {"chat_template_kwargs", nothing}}), "");
  const Row parts = {{"role", "user"}, {"content", Row::array({{{"type", "text"}, {"text", "q"}}})}};
  EXPECT_NE(refused(Row::array({parts})).find("\"content\" is of type array"), std::string::npos);
  EXPECT_NE(refused(Row::array({{{"role", "assistant"}, {"content", "a"}, {"reasoning_content", 1}}})).find("string"),
            std::string::npos);
  for (const char* key : {"role", "content"}) {
    Row message = user;
    message.erase(key);
    EXPECT_NE(refused(Row::array({message})).find("message 1"), std::string::npos);
  }
  const std::vector<Message> thought = {{"user", "q"}, {"assistant", "a", "t"}};
  for (const char* name : {"chatml", "qwen2.5", "llama-3", "deepseek-r1"})
    EXPECT_THROW(render_chat(find_chat_format(name, ""), thought), Error) << name;
  EXPECT_THROW(render_chat(ChatFormat{.kind = Kind::qwen3}, std::vector<Message>{{"user", "q", "t"}}), Error);
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
  for (const char* name : {"chatml", "qwen2.5", "qwen3", "llama-3", "deepseek-r1"})
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
  for (const std::string& what : {error("auto"), error("llama-2\x1b")})
    for (const char* part : {"chatml", "qwen2.5", "qwen3", "llama-3", "deepseek-r1", "plain", "{problem}"})
      EXPECT_NE(what.find(part), std::string::npos) << what;
  EXPECT_NE(error("auto").find("data.chat_template='\"Question: {problem}\\nAnswer:\"'"), std::string::npos)
      << error("auto");
  EXPECT_NE(error("llama-2\x1b").find("\"llama-2\\x1b\""), std::string::npos) << error("llama-2\x1b");
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
  EXPECT_EQ(f.kind, Kind::chatml);
  EXPECT_EQ(f.system, "You are a helpful assistant.");
  EXPECT_EQ(recognised(jinja(R"(Use \\boxed{}.\nThink.)")).system, "Use \\boxed{}.\nThink.");
  EXPECT_EQ(render_chat(recognised(jinja("")), kQuestion),
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_THROW(recognised(jinja("Yes.") + "{{ 'x' }}"), Error);
  EXPECT_THROW(recognised(jinja("' + date + '")), Error) << "no text";
}

// SmolLM2's template: lines inside its literals end as they do.  The format is `chatml` with its own system message,
// under `auto` as well as under its name; ChatML without a default system message has none.
TEST_F(Chat, ChatmlHasTheSystemMessageOfTheTemplate) {
  const std::string turns =
      "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
      "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
  const std::string smollm =
      "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
      "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
      "{% endif %}" +
      turns;
  const std::string question = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n";
  const ChatFormat f = recognised(smollm);
  EXPECT_EQ(render_chat(f, kQuestion),
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n" +
                question);
  EXPECT_EQ(described(f),
            "chatml, system message \"You are a helpful AI assistant named SmolLM, trained by Hugging Face\"");
  EXPECT_EQ(find_chat_format("chatml", folder_).system, f.system);
  EXPECT_EQ(find_chat_format("qwen2.5", folder_).system, find_chat_format("qwen2.5", "").system);
  EXPECT_EQ(render_chat(find_chat_format("chatml", ""), kQuestion), question);
  for (const std::string& without :
       {"{% for message in messages %}" + turns,
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false "
        "%}{% endif %}{% for message in messages %}" +
            turns}) {
    EXPECT_EQ(render_chat(recognised(without), kQuestion), question);
    EXPECT_EQ(described(recognised(without)), "chatml, no system message");
  }
  write("tokenizer_config.json", json({{"chat_template", "{{ unknown }}"}}).dump());
  EXPECT_EQ(described(find_chat_format("chatml", folder_)), "chatml, no system message");
  EXPECT_THROW(recognised("\n" + smollm + "{{ 'x' }}"), Error);
}

TEST_F(Chat, DescribesFormats) {
  EXPECT_EQ(described(find_chat_format("plain", "")), "plain");
  EXPECT_EQ(described(find_chat_format("Q:\n{problem}", "")), "\"Q:\\n{problem}\"");
  EXPECT_EQ(described(find_chat_format("llama-3", "")), "llama-3, date 26 Jul 2024");
  EXPECT_EQ(described({.kind = Kind::qwen3, .thinking = false}), "qwen3, without thoughts");
  EXPECT_EQ(described(find_chat_format("deepseek-r1", "")), "deepseek-r1");
  EXPECT_EQ(described(find_chat_format("qwen2.5", "")).find("qwen2.5, system message \"You are Qwen"), 0u);
}

// The files of the real templates: recognised as they are, and not when one word is changed.
TEST_F(Chat, RecognisesTheRealTemplates) {
  if (!fs::exists(kTemplates)) GTEST_SKIP() << kTemplates << " is not on this machine";
  const std::map<std::string, Kind> files = {{"Qwen-Qwen2.5-7B-Instruct", Kind::chatml},
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
  EXPECT_EQ(recognised(text_of(kTemplates + "Qwen-Qwen2.5-7B-Instruct.jinja")).system,
            find_chat_format("qwen2.5", "").system);
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
