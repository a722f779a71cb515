// The program and its surroundings: results that cannot be written, files of others, and text that would
// steer a terminal.
#include <csignal>
#include <nlohmann/json.hpp>
#include <regex>

#include "base/error.h"
#include "base/text.h"
#include "tests/program.h"
#include "tests/tiny.h"
#include "tests/tiny_run.h"
#include "tokenizer/chat.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Streams : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }

  std::string train(const std::string& name) const {
    std::string all = "train";
    for (const std::string& o : tiny_run()) all += " " + o;
    return cat(all, " trainer.default_local_dir=", at(name));
  }
  std::string eval() const {
    return cat("eval --model ", tiny_folder(), "trained --tokenizer ssa --data ", tiny_folder(),
               "val.jsonl --verifier exact --max-prompt-length 16 --max-response-length 12 --threads 1");
  }
  // `words` as of a shell, with its redirections.
  Outcome shell(const std::string& words) const {
    std::vector<std::string> arguments = {"/bin/sh", "-c", cat(program_path().string(), " ", words)};
    return run(arguments);
  }
  void expect_refused(const Outcome& o, const std::vector<std::string>& parts) const {
    EXPECT_EQ(o.code, static_cast<int>(Exit::usage)) << o.err;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << "\n" << o.err;
  }
};

// A result that is nowhere is no success.
TEST_F(Streams, OutputThatCannotBeWrittenIsAnError) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  ASSERT_EQ(run(train("run")).code, 0);
  const std::string ids = write("ids.jsonl", "{\"ids\": [1, 2, 3]}\n"), words = write("words.jsonl", "\"p0?\"\n");
  const std::string graded = write("graded.jsonl", R"({"response": "a", "gold": "a"})");
  const std::string model = tiny_folder() + "trained";
  for (const std::string& command :
       {std::string("--help"), std::string("train --help"), std::string("train --keys"), train("dry") + " --dry-run",
        "plan" + train("plan").substr(5), "compare " + at("run"), "report " + at("run"), eval(),
        cat("generate --tokenizer ssa --prompt p0? --greedy --model ", model),
        cat("generate --tokenizer ssa --prompt p0? --n 2 --model ", model),
        cat("logprobs --model ", model, " --ids ", ids), "tokenize --tokenizer ssa < " + words,
        "verify --mode exact < " + graded, "inspect " + model}) {
    const Outcome good = shell(command + " > " + at("out")), full = shell(command + " > /dev/full");
    EXPECT_EQ(good.code, 0) << command << "\n" << good.err;
    EXPECT_NE(read_text(at("out")), "") << command;
    EXPECT_EQ(full.code, static_cast<int>(Exit::failed)) << command;
    EXPECT_NE(full.err.find("pare: standard output could not be written"), std::string::npos) << command << "\n"
                                                                                              << full.err;
  }
  // A run does not stop for its lines; that they are lost is said at the end.
  const Outcome o = shell(train("full") + " > /dev/full");
  EXPECT_EQ(o.code, static_cast<int>(Exit::failed));
  EXPECT_NE(o.err.find("standard output"), std::string::npos) << o.err;
  EXPECT_TRUE(read_text(at("full/model/model.safetensors")) == read_text(at("run/model/model.safetensors")));
}

// Not as a wrong tokenizer, which is looked for in the same folder.
TEST_F(Streams, AMissingModelIsNamedAsSuch) {
  const std::string model = at("nowhere"), ids = write("ids.jsonl", "{\"ids\": [1, 2, 3]}\n");
  const std::string data = tiny_folder() + "val.jsonl";
  const std::string commands[] = {cat("eval --data ", data, " --verifier exact --model ", model),
                                  cat("generate --prompt a --model ", model),
                                  cat("train grpo data.reward=exact data.train_files=", data, " model.path=", model),
                                  cat("sft grpo --dry-run data.train_files=", data, " model.path=", model),
                                  cat("logprobs --ids ", ids, " --model ", model)};
  for (const std::string& command : commands)
    EXPECT_EQ(run(command).err, cat("pare: ", model, ": no such directory; expected a Hugging Face model\n"))
        << command;
  expect_refused(run(cat("plan grpo data.train_files=", data, " model.path=", model)),
                 {cat("model.path: there is no ", model)});
}

TEST_F(Streams, FilesAreReplacedOnlyWhenAsked) {
  ASSERT_EQ(run(train("run")).code, 0);
  const std::string mine = write("mine", "precious"), ids = write("ids.jsonl", "{\"ids\": [1, 2, 3]}\n");
  const std::string commands[] = {"report " + at("run") + " --out " + mine, eval() + " --out " + mine,
                                  cat("logprobs --model ", tiny_folder(), "trained --ids ", ids, " --grads ", mine)};
  for (const std::string& command : commands) {
    write("mine", "precious");
    expect_refused(run(command), {mine, "exists", "--force"});
    EXPECT_EQ(read_text(mine), "precious") << command;
    EXPECT_EQ(run(command + " --force").code, 0) << command;
    EXPECT_NE(read_text(mine), "precious") << command;
  }
  // A report of a run is one that is made again and again.
  const std::string report = at("run/report.html");
  for (int i = 0; i < 2; i++) EXPECT_EQ(run("report " + at("run")).code, 0);
  write("run/report.html", read_text(report).substr(0, 30));
  expect_refused(run("report " + at("run")), {report, "--force"});
  // What is no file has nothing to lose.
  EXPECT_EQ(run("report " + at("run") + " --out /dev/null").code, 0);
}

// In messages and lines, names and data are text, whatever they hold.
TEST_F(Streams, NothingSteersTheTerminal) {
  const std::string evil =
                        "\x1b]0;owned\x07\x1b[2J\xc2\x9b"
                        "31m",
                    shown = "\\x1b]0;owned\\x07\\x1b[2J\\u{9b}31m";
  const auto harmless = [&](const Outcome& o, const std::string& what) {
    for (const std::string* text : {&o.out, &o.err})
      for (const char* control : {"\x1b", "\x07", "\xc2\x9b"})
        EXPECT_EQ(text->find(control), std::string::npos) << what << "\n" << *text;
    EXPECT_NE((o.out + o.err).find("]0;ow"), std::string::npos) << what << "\n" << o.out << o.err;
  };
  for (const std::string& command :
       {"train " + evil, "train trainer." + evil + "=2", "report " + at(evil), "compare " + at(evil),
        "inspect " + at(evil), "eval --model " + at(evil), "generate --prompt x --model " + at(evil), evil,
        "tokenize --tokenizer " + at(evil), "verify --mode " + evil, "logprobs --ids x --model " + at(evil)}) {
    const Outcome o = run(command);
    EXPECT_NE(o.code, 0) << printable(command);
    harmless(o, printable(command));
  }
  // A run in a folder of that name, with such an answer in its data, and what is said of it afterwards.
  std::string rows = read_text(tiny_folder() + "train.jsonl");
  const std::string escaped = json(evil).dump();
  for (size_t i; (i = rows.find(R"("answer": "a")")) != std::string::npos;)
    rows.replace(i, 13, R"("answer" : )" + escaped);
  const Outcome o = run(train(evil) + " trainer.samples_freq=1 data.train_files=" + write("evil.jsonl", rows));
  EXPECT_EQ(o.code, 0) << o.err;
  harmless(o, "train");
  EXPECT_NE(o.out.find(at(shown)), std::string::npos) << o.out;
  for (const std::string& command : {"compare " + at(evil), "report " + at(evil), "inspect " + at(evil) + "/model"})
    harmless(run(command), command);
}

// The text of a model is raw in a file, and on a terminal it is text.
TEST_F(Streams, NorDoesWhatAModelWrites) {
  if (!has_terminals()) GTEST_SKIP() << "no pseudo-terminals here";
  // A random model over bytes: sooner or later it writes every one of them.
  ModelConfig config = tiny_config("qwen3", true);
  config.vocab = 256;
  config.eos_ids = {};
  save_weights(at("model"), config, tiny_parameters(config, 5), DType::f32);
  write("model/tokenizer.json", tokenizer_json({}).dump());
  const std::string words =
      "generate --quiet --prompt x --max-new-tokens 150 --threads 1 --temperature 4 --seed 3 --model " + at("model");
  const Outcome file = run(words), terminal = run_on_terminal(words, 80);
  ASSERT_EQ(file.code, 0) << file.err;
  ASSERT_EQ(terminal.code, 0) << terminal.err;
  const auto controls = [](const std::string& text) {
    return std::count_if(text.begin(), text.end(),
                         [](char c) { return c >= 0 && c < ' ' && !std::strchr("\r\n\t", c); });
  };
  EXPECT_GT(controls(file.out), 3);
  EXPECT_EQ(controls(terminal.out), 0) << terminal.out;
  EXPECT_EQ(std::regex_replace(terminal.out, std::regex("\r\n"), "\n"), printable_lines(file.out));
}

// ---- a model folder is enough
// ----------------------------------------------------------------------------------------

// What a run leaves says which tokenizer it has, also the built-in one, and that of a file; so does what is made of it.
TEST_F(Streams, AModelFolderHasItsTokenizer) {
  ASSERT_EQ(run(train("ssa")).code, 0);
  ASSERT_EQ(run(cat(train("file"), " data.tokenizer=", tiny_folder(), "tokenizer.bin")).code, 0);
  ASSERT_EQ(run(cat(train("next"), " data.tokenizer= model.path=", at("ssa/model"))).code, 0);
  const std::string text =
      run(cat("generate --quiet --greedy --prompt p0? --tokenizer ssa --model ", at("ssa/model"))).out;
  EXPECT_GT(text.size(), 1u);
  for (const char* folder : {"ssa/model", "ssa/checkpoints/step-4"}) {
    const Outcome o = run(cat("generate --quiet --greedy --prompt p0? --model ", at(folder)));
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.out, text) << folder;
  }
  input_ = write("text.jsonl", "\"pq0?\"\n");
  for (const auto& [folder, spec] : {std::pair{"ssa/model", std::string("ssa")},
                                     {"next/model", std::string("ssa")},
                                     {"file/model", tiny_folder() + "tokenizer.bin"}}) {
    const Outcome o = run(cat("tokenize --tokenizer ", at(folder)));
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.out, run("tokenize --tokenizer " + spec).out) << folder;
  }
  EXPECT_NE(run("tokenize --tokenizer ssa").out, run(cat("tokenize --tokenizer ", tiny_folder(), "tokenizer.bin")).out);
  const Outcome o = run(cat("eval --data ", tiny_folder(), "val.jsonl --verifier exact --max-prompt-length 16 ",
                            "--max-response-length 12 --model ", at("ssa/model")));
  EXPECT_EQ(o.code, 0) << o.err;
  write("ssa/model/tokenizer.ssa", "abc");
  expect_refused(run(cat("tokenize --tokenizer ", at("ssa/model"))), {"tokenizer.ssa", "symbols"});
}

TEST_F(Streams, AMissingModelIsNoWrongTokenizer) {
  fs::create_directories(at("empty"));
  for (const auto& [folder, what] : {std::pair{at("none"), "no such directory"},
                                     {at("empty"), "config.json"},
                                     {write("file", ""), "is a file; expected the folder"}})
    for (const std::string& command :
         {"eval --model " + folder, cat("eval --data ", tiny_folder(), "val.jsonl --verifier exact --model ", folder),
          "generate --prompt x --model " + folder, "eval quickstart --model " + folder,
          train("run") + " data.tokenizer= model.path=" + folder}) {
      const Outcome o = run(command);
      expect_refused(o, {folder, what});
      EXPECT_EQ(o.err.find("tokenizer"), std::string::npos) << command << "\n" << o.err;
    }
}

// ---- pare tokenize --chat
// --------------------------------------------------------------------------------------------

TEST_F(Streams, TokenizeRendersConversations) {
  const std::vector<std::string> special = {
      "<|im_start|>",      "<|im_end|>",           "<|begin_of_text|>",       "<|start_header_id|>",
      "<|end_header_id|>", "<|eot_id|>",           "<｜begin▁of▁sentence｜>", "<｜User｜>",
      "<｜Assistant｜>",   "<｜end▁of▁sentence｜>"};
  write("t/tokenizer.json", tokenizer_json({}, special).dump());
  const std::vector<Message> turns = {{"user", "Hi"}, {"assistant", "<think>\nx\n</think>\n\nYes?"}, {"user", "2\n+2"}};
  json list = json::array();
  for (const Message& m : turns) list.push_back({{"role", m.role}, {"content", m.content}});
  const std::string lines = list.dump() + "\n" + json{{"messages", list}}.dump() + "\n\"2\\n+2\"\n";
  const auto tokenizer = make_tokenizer(at("t"));
  const auto rows = [&](const std::string& words, const std::string& input) {
    input_ = write("in.jsonl", input);
    std::vector<std::string> arguments = {program_path().string(), "tokenize", "--chat", "--tokenizer", at("t")};
    std::istringstream all(words);
    for (std::string w; all >> w;) arguments.push_back(w);
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, 0) << words << "\n" << o.err;
    std::vector<json> found;
    std::istringstream out(o.out);
    for (std::string line; std::getline(out, line);) found.push_back(json::parse(line));
    return found;
  };
  struct Case {
    const char* words;
    ChatFormat format;
    bool turns = true;
  };
  const auto format = [](const char* name, bool thinking = true) {
    ChatFormat f = find_chat_format(name, "");
    f.thinking = thinking;
    return f;
  };
  ChatFormat dated = format("llama-3");
  dated.date = "1Jan2030";
  for (const Case& c : std::vector<Case>{{"--chat-format qwen2.5", format("qwen2.5")},
                                         {"--chat-format qwen3", format("qwen3")},
                                         {"--chat-format qwen3 --no-thinking", format("qwen3", false)},
                                         {"--chat-format llama-3", format("llama-3")},
                                         {"--chat-format llama-3 --date 1Jan2030", dated},
                                         {"--chat-format deepseek-r1", format("deepseek-r1")},
                                         {"--chat-format plain", format("plain"), false},
                                         {"--chat-format <{problem}>", format("<{problem}>"), false},
                                         {"", format("plain"), false}}) {
    const std::string input = c.turns ? lines : "\"2\\n+2\"\n";
    const std::vector<json> text = rows(c.words, input), ids = rows(std::string(c.words) + " --ids", input);
    ASSERT_EQ(text.size(), c.turns ? 3u : 1u) << c.words;
    ASSERT_EQ(ids.size(), text.size());
    for (size_t i = 0; i < text.size(); i++) {
      const std::vector<Message> messages = i + 1 < text.size() ? turns : std::vector<Message>{{"user", "2\n+2"}};
      EXPECT_EQ(text[i], render_chat(c.format, messages)) << c.words;
      EXPECT_EQ(ids[i], encode_chat(c.format, *tokenizer, messages)) << c.words;
    }
    if (!c.turns) continue;
    const std::vector<json> with = rows(std::string(c.words) + " --system Brief.", "\"2\\n+2\"\n");
    EXPECT_EQ(with.at(0), render_chat(c.format, std::vector<Message>{{"system", "Brief."}, {"user", "2\n+2"}}));
  }
  const auto refused = [&](const std::string& words, const std::string& input, const std::vector<std::string>& parts) {
    input_ = write("in.jsonl", input);
    expect_refused(run(cat("tokenize --tokenizer ", at("t"), " ", words)), parts);
  };
  refused("--chat --chat-format qwen4", lines, {"qwen4"});
  refused("--chat", lines, {"line 1", "exactly one message"});
  refused("--chat --chat-format qwen3", "[]\n", {"line 1", "role"});
  refused("--chat --chat-format qwen3", "\"x\"\n[{\"role\": \"user\"}]\n", {"line 2", "message 1"});
  refused("--chat --chat-format qwen2.5 --no-thinking", "\"x\"\n", {"--no-thinking", "qwen3"});
  refused("--chat --chat-format qwen2.5 --date x", "\"x\"\n", {"--date", "llama-3"});
  refused("--chat --chat-format qwen2.5 --system b", R"([{"role": "system", "content": "a"}])", {"line 1", "--system"});
  refused("--ids", "\"x\"\n", {"--chat"});
  refused("--chat --decode", "\"x\"\n", {"--decode"});
}

// ---- pare compare
// ----------------------------------------------------------------------------------------------------

TEST_F(Streams, CompareFitsATerminal) {
  std::string runs;
  int number = 0;
  for (const char* name : {"a", "a-run-with-a-name-that-is-longer-than-a-column", "b", "c", "d", "e"}) {
    std::string log;
    for (int step = 1; step <= 3; step++)
      log += json{{"training/global_step", step},
                  {"critic/score/mean", 0.5},
                  {"tokens/generated", 123456789 * (1 + number % 3)},
                  {"flops/rollout", 3e15},
                  {"exact/checked_tokens", number == 2 ? 0 : 1000},
                  {"exact/mismatch_tokens", number == 2 ? json() : json(number == 3 ? 1 : 0)},
                  {"certificate", cat("00000000000000", step + 10 * (number % 2 + 1))}}
                 .dump() +
             "\n";
    write(cat(name, "/metrics.jsonl"), log);
    runs += " " + at(name);
    number++;
  }
  const fs::path before = fs::current_path();
  fs::current_path(root_);  // short paths
  const Outcome o = run("compare a a-run-with-a-name-that-is-longer-than-a-column b c d e");
  fs::current_path(before);
  ASSERT_EQ(o.code, 0) << o.err;
  std::istringstream lines(o.out);
  std::string mismatches;
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(display_width(line), 80u) << line;
    if (line.starts_with("of these different"))
      mismatches += std::regex_replace(line.substr(18), std::regex(" +"), " ");
  }
  EXPECT_EQ(mismatches, " 0 0 not checked 3 0 0") << o.out;
  for (const char* part : {"a-run-with … -a-column", "(+100 %)", "(+200 %)", "a and e part at step 1"})
    EXPECT_NE(std::regex_replace(o.out, std::regex("\n *"), " ").find(part), std::string::npos) << part << "\n"
                                                                                                << o.out;
}

}  // namespace
}  // namespace pare::test
