// Rows of data files as others publish them, the page that describes them, and files that are something else.
#include <map>
#include <sstream>

#include "base/foreign_file.h"
#include "base/hub_cache.h"
#include "data/jsonl.h"
#include "data/presets.h"
#include "model/hf/folder.h"
#include "run/config.h"
#include "tests/program.h"
#include "tests/tiny.h"

namespace pare::test {
namespace {

class Formats : public Program {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(testing::TempDir()) /
            (std::string("pare_formats_") + testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  Problem problem(const std::string& row, const std::string& reward, const std::string& prompt_key = "",
                  const std::string& answer_key = "") const {
    return JsonlTask({write("row.jsonl", row)}, reward, RowKeys{prompt_key, answer_key, ""}).problem(0);
  }
  std::string error(const std::string& name, const std::string& text, const std::string& reward = "exact") const {
    try {
      JsonlTask({write(name, text)}, reward);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::usage);
      return e.what();
    }
    return "no error";
  }
  // The error for a row at line 2, after a good one, without its place.
  std::string row_error(const std::string& row, const std::string& reward = "exact") const {
    const std::string good = R"({"prompt": "p", "answer": "a", "completion": "c"})";
    const std::string what = error("rows.jsonl", good + "\n" + row + "\n", reward), where = at("rows.jsonl") + ":2: ";
    EXPECT_TRUE(what.starts_with(where)) << what;
    return what.substr(std::min(where.size(), what.size()));
  }
  // Runs the command in the last line of a message.
  int run_advice(const std::string& message) const {
    return std::system(cat("cd '", at(""), "' && ", message.substr(message.rfind('\n') + 1), " 2>", at("err")).c_str());
  }
};

std::string text_of(const std::vector<Message>& messages) {
  std::string s;
  for (const Message& m : messages) s += cat(m.role, "=", m.content, "|");
  return s;
}

TEST_F(Formats, EveryExampleOfThePageIsRead) {
  std::istringstream page{std::string(*preset_text("formats", "md"))};
  std::string reward = "none yet";
  int rows = 0;
  for (std::string line; std::getline(page, line);) {
    if (const size_t at = line.rfind("(data.reward="); at != std::string::npos)
      reward = line.substr(at + 13, line.rfind(')') - at - 13);
    if (!line.starts_with("    {")) continue;
    SCOPED_TRACE(line);
    const Problem p = problem(line, reward);
    rows++;
    EXPECT_TRUE(!p.prompt.empty() + !p.messages.empty() + !p.prompt_ids.empty() == 1);
    EXPECT_EQ(p.answer.has_value(), !reward.empty());
    EXPECT_EQ(p.completion || p.reply, reward.empty());
  }
  EXPECT_GE(rows, 13);
}

TEST_F(Formats, AnInstalledProgramHasThePage) {
  Program::SetUp();
  const Outcome o = run("help data");
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.out, read_text("data/formats.md"));
  EXPECT_EQ(run("help weather").code, 2);
  for (const char* command : {"train", "sft", "eval"})
    EXPECT_NE(run(cat(command, " --help")).out.find("pare help data"), std::string::npos) << command;
}

TEST_F(Formats, ConversationsAsPublished) {
  const char* verl =
      R"({"data_source": "s", "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],)"
      R"( "reward_model": {"style": "rule", "ground_truth": "42"}, "extra_info": {"question": "E", "split": "train"}})";
  for (const char* key : {"", "reward_model.ground_truth"}) {
    const Problem p = problem(verl, "gsm8k-strict", "", key);
    EXPECT_EQ(text_of(p.messages), "system=S|user=Q|");
    EXPECT_EQ(p.answer, "42");
    EXPECT_TRUE(p.prompt.empty());
  }
  EXPECT_EQ(problem(verl, "exact", "extra_info.question").prompt, "E");
  EXPECT_EQ(problem(R"({"a.b": "whole", "a": {"b": "path"}, "answer": 1})", "exact", "a.b").prompt, "whole");
  EXPECT_EQ(problem(R"({"prompt": "p", "answer": 7})", "exact").answer,
            problem(R"({"prompt": "p", "answer": "7"})", "exact").answer);
}

// Tables that became JSON lines have every column in every row.
TEST_F(Formats, NullsAreAbsent) {
  const Problem p = problem(
      R"({"prompt": null, "messages": null, "question": "Q", "reward_model": {"ground_truth": null}, "answer": null, "solution": "S", "completion": null, "tools": null})",
      "exact");
  EXPECT_EQ(p.prompt, "Q");
  EXPECT_EQ(p.answer, "S");
  EXPECT_FALSE(p.completion);
  const Problem talk = problem(
      R"({"conversations": [{"from": "human", "value": "a", "weight": null}], "prompt": null, "answer": 1})", "exact");
  EXPECT_EQ(text_of(talk.messages), "user=a|");
  EXPECT_EQ(problem_text(talk), "a");
}

// A grader and the chat format get the same conversation.
TEST_F(Formats, TheSystemMessageIsPartOfTheProblem) {
  const auto with_system = [&](const std::string& row) {
    return JsonlTask({write("row.jsonl", row)}, "exact", RowKeys{"", "", "S"}).problem(0);
  };
  const Problem text = with_system(R"({"prompt": "Q", "answer": 1})");
  EXPECT_EQ(text_of(conversation(text)), "system=S|user=Q|");
  EXPECT_EQ(problem_text(text), "Q");
  EXPECT_EQ(text_of(conversation(with_system(R"({"messages": [{"role": "user", "content": "Q"}], "answer": 1})"))),
            "system=S|user=Q|");
  EXPECT_EQ(
      text_of(conversation(with_system(
          R"({"messages": [{"role": "system", "content": "T"}, {"role": "user", "content": "Q"}], "answer": 1})"))),
      "system=T|user=Q|");
  EXPECT_EQ(text_of(conversation(problem(R"({"prompt": "Q", "answer": 1})", "exact"))), "user=Q|");
  EXPECT_THROW(with_system(R"({"ids": [1], "answer": 1})"), Error);
}

TEST_F(Formats, TheLastTurnOfTheAssistantIsTaught) {
  const std::map<std::string, std::string> rows = {
      {R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})", "user=a|>b"},
      {R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})",
       "user=a|assistant=b|user=c|>d"},
      {R"({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})",
       "system=s|user=a|>b"},
      {R"({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})", "user=a|>b"},
      {R"({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})",
       "user=a|assistant=b|user=c|>d"},
      {R"({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]})", ">b"},
      {R"({"prompt": [{"role": "user", "content": "a"}], "completion": " b"})", "user=a|> b"},
  };
  for (const auto& [row, expected] : rows) {
    SCOPED_TRACE(row);
    const JsonlTask task({write("row.jsonl", row)}, "");
    const Problem p = task.problem(0);
    Rng rng(1);
    EXPECT_EQ(cat(text_of(p.messages), ">", task.teach(p, 0, rng)), expected);
  }
  // The same row as a problem: its prompt is the same.
  const Problem p = problem(
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "z"})",
      "exact");
  EXPECT_EQ(text_of(p.messages), "user=a|");
  EXPECT_EQ(p.answer, "z");
}

TEST_F(Formats, WrongRowsAreErrors) {
  const std::pair<const char*, const char*> rows[] = {
      {R"({"prompt": "p", "answer": "a", "answer": "b"})", "key \"answer\" occurs twice"},
      {R"({"prompt": "p", "answer": "a", "x": {"y": [{"z": 1, "z": 1}]}})", "key \"z\" occurs twice"},
      {R"({"messages": [], "answer": "a"})", "\"messages\" is of type array"},
      {R"({"messages": "hi", "prompt": "p", "answer": "a"})", "exactly one"},
      {R"({"messages": [{"role": "assistant", "content": "a"}], "answer": "a"})", "no turn of the user"},
      {R"({"messages": [{"role": "system", "content": "a"}], "answer": "a"})", "no turn of the user"},
      {R"({"messages": [{"role": "user"}], "answer": "a"})", "message 1 is not"},
      {R"({"messages": [{"role": "user", "content": 7}], "answer": "a"})", "\"content\" is of type number"},
      {R"({"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}], "answer": "a"})",
       "\"conversations\": turn 2 is {\"from\":\"narrator\""},
      {R"({"conversations": [{"from": "human", "value": "a"}, {"role": "user", "content": "b"}], "answer": "a"})",
       "\"conversations\": turn 2 is"},
      {R"({"conversations": [{"from": "human", "value": "a", "loss": 1}], "answer": "a"})", "has the key \"loss\""},
      {R"({"prompt": "p", "completion": []})", "\"completion\": is empty"},
      {R"({"prompt": null, "answer": "a"})", "exactly one"},
      {R"({"prompt": "p", "answer": null})", "no \"answer\""},
      {R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "completion": "c"})",
       "remove one of them"},
      {R"({"prompt": "p", "completion": [{"role": "user", "content": "b"}]})", "does not end with a turn"},
      {R"({"prompt": "p", "completion": 7})", "\"completion\" is of type number"},
      {R"({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}], "answer": "a"})", "\"tools\""},
      {R"({"conversations": [{"from": "human", "value": "a"}], "functions": "f", "answer": "a"})", "\"functions\""},
      {R"({"prompt": [{"role": "user", "content": "a"}], "documents": [1], "answer": "a"})", "\"documents\""},
      {R"({"prompt": [{"role": "user", "content": "a"}], "enable_thinking": false, "answer": "a"})",
       "\"enable_thinking\""},
      {R"({"prompt": "p", "reward_model": {"ground_truth": true}})",
       "\"reward_model.ground_truth\" is of type boolean"},
  };
  for (const auto& [row, says] : rows) {
    const std::string what = row_error(row);
    EXPECT_NE(what.find(says), std::string::npos) << row << "\n" << what;
  }
  EXPECT_NE(row_error(R"({"prompt": "p"})", "").find("no \"completion\" and no turn"), std::string::npos);
  EXPECT_NE(row_error(R"({"messages": [{"role": "user", "content": "a"}]})", "").find("no turn of an assistant"),
            std::string::npos);
}

TEST_F(Formats, LineEndsAndMarksOfOtherSystems) {
  const std::string row = R"({"prompt": "p", "answer": "a"})";
  const JsonlTask task({write("rows.jsonl", cat("\xEF\xBB\xBF", row, "\r\n\r\n  \t\r\n", row, "\r\n\n", row))},
                       "exact");
  ASSERT_EQ(task.size(), 3);
  EXPECT_EQ(task.problem(2).where, at("rows.jsonl") + ":6");
}

// The file that the command in the message writes can be read.
TEST_F(Formats, TablesAndArraysAreConvertedByThePrintedLine) {
  if (std::system("python3 -c ''") != 0) GTEST_SKIP() << "no python3";
  std::string utf16 = "\xff\xfe";
  for (const char c : std::string("{\"prompt\": \"p, q\", \"answer\": \"a\"}\n")) {
    utf16 += c;
    utf16 += '\0';
  }
  const std::string pickle = "(lp0\n(dp1\nVprompt\np2\nVp, q\np3\nsVanswer\np4\nVa\np5\nsa.";
  const std::tuple<const char*, std::string, const char*> files[] = {
      {"a b.csv", "prompt,answer\n\"p, q\",a\n", "is a CSV file"},
      {"mark.csv", "\xEF\xBB\xBFprompt;answer\r\np, q;a\r\n", "is a table separated by ;"},
      {"a.tsv", "prompt\tanswer\np, q\ta\n", "is a TSV file"},
      {"named_wrong.jsonl", "prompt\tanswer\np, q\ta\n", "looks like a TSV file"},
      {"a.json", "[{\"prompt\": \"p, q\", \"answer\": \"a\"}]", "is one JSON array"},
      {"lines.json", "[\n  {\"prompt\": \"p, q\",\n \"answer\": \"a\"}\n]\n", "is one JSON array"},
      {"data.json", "{\"version\": 1, \"data\": [{\"prompt\": \"p, q\", \"answer\": \"a\"}]}", "rows under \"data\""},
      {"pretty.json", "{\n  \"prompt\": \"p, q\",\n  \"answer\": \"a\"\n}\n", "over several lines"},
      {"utf16.txt", utf16, "is UTF-16"},
      {"utf16.json", utf16.substr(2), "is UTF-16"},
      {"columns.json", "{\"prompt\": {\"0\": \"p, q\"}, \"answer\": {\"0\": \"a\"}}", "object of columns"},
      {"old.pkl", pickle, "is a pickle, which runs code when it is loaded"},
      {"pickle.dat", "\x80\x02" + pickle, "is a pickle"},
      {"a.yml", "prompt: p, q\nanswer: a\n", "is a YAML file"},
      {"yaml.txt", "---\n- prompt: p, q\n  answer: a\n", "is a YAML file"},
  };
  const bool yaml = std::system("python3 -c 'import yaml' 2>/dev/null") == 0;
  for (const auto& [name, text, says] : files) {
    SCOPED_TRACE(name);
    const std::string what = error(name, text);
    EXPECT_NE(what.find(cat(at(name), ": ")), std::string::npos) << what;
    EXPECT_NE(what.find(says), std::string::npos) << what;
    if (!yaml && what.find("YAML") != std::string::npos) continue;
    ASSERT_EQ(run_advice(what), 0) << what << read_text(at("err"));
    std::string out = std::filesystem::path(at(name)).replace_extension(".jsonl").string();
    if (out == at(name)) out = at("named_wrong.converted.jsonl");
    const JsonlTask task({out}, "exact");
    EXPECT_EQ(task.problem(0).prompt, "p, q");
    EXPECT_EQ(task.problem(0).answer, "a");
  }
}

TEST_F(Formats, BinaryFilesAreRecognisedByTheirContent) {
  const std::tuple<const char*, std::string, const char*> files[] = {
      {"a.parquet", "PAR1\x15\x04", "is a parquet file"},
      {"b.jsonl", "PAR1\x15\x04", "pyarrow.parquet"},
      {"a.arrow", std::string("ARROW1\0\0", 8), "open_file"},
      {"b.arrow", std::string("\xff\xff\xff\xff\x10\0", 6), "open_stream"},
      {"a.jsonl.gz", "\x1f\x8b\x08", "\n  gunzip -k "},
      {"c.jsonl", "\x1f\x8b\x08", ".gz && gunzip -k "},
      {"a.jsonl.zst", "\x28\xb5\x2f\xfd", "\n  zstd -d "},
      {"a.zip", "PK\x03\x04", "unzip"},
      {"a.xlsx", "PK\x03\x04", "read_excel"},
      {"p.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git -C "},
      {"a.html", "<!DOCTYPE html><html>", "HTML page"},
      {"a.avro", "Obj\x01\x04", "is an Avro file"},
      {"a.h5", "\x89HDF\r\n\x1a\n", "is an HDF5 file"},
      {"a.db", std::string("SQLite format 3\0, ", 18), "is an SQLite database"},
      {"a.npy", std::string("\x93NUMPY\1\0v, {'descr'", 20), "is a binary file of an unknown format"},
  };
  for (const auto& [name, text, says] : files) {
    const std::string what = error(name, text);
    EXPECT_NE(what.find(says), std::string::npos) << name << ": " << what;
    EXPECT_NE(what.find(at(name)), std::string::npos) << what;
  }
  const std::string folder = std::filesystem::path(at("p.jsonl")).parent_path();
  EXPECT_NE(foreign_rows(at("p.jsonl")).find("\n  git -C " + folder + " lfs pull"), std::string::npos);
  std::filesystem::create_directories(at("saved"));
  write("saved/dataset_info.json", "{}");
  EXPECT_NE(foreign_rows(at("saved")).find("load_from_disk"), std::string::npos);
  EXPECT_NE(foreign_rows("openai/gsm8k").find("hf download openai/gsm8k --repo-type dataset"), std::string::npos);
  EXPECT_EQ(foreign_rows(at("none.jsonl")), "");
}

// Paths that people give as a model by mistake.
TEST_F(Formats, ModelsOfOtherFormatsSayWhatToDo) {
  const auto refused = [&](const std::string& path, const std::vector<std::string>& says) {
    try {
      const ModelConfig config = load_model_config(path);
      match_weights(open_weights(path), config);
      ADD_FAILURE() << "accepted: " << path;
    } catch (const Error& e) {
      for (const std::string& s : says)
        EXPECT_NE(std::string(e.what()).find(s), std::string::npos) << s << " in: " << e.what();
    }
  };
  const std::string config = to_json(tiny_config("qwen2", true)).dump(),
                    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n";
  const auto folder = [&](const std::string& name, const std::map<std::string, std::string>& files) {
    std::filesystem::create_directories(at(name));
    for (const auto& [file, text] : files) write(name + "/" + file, text);
    return at(name);
  };
  refused("Qwen/Qwen2.5-0.5B", {"hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B", "no such model in "});
  refused("https://huggingface.co/Qwen/Qwen3-0.6B", {"hf download Qwen/Qwen3-0.6B "});
  refused(at("no/such"), {"no such directory"});
  refused(folder("run", {{"config.toml", ""}, {"model/config.json", config}}), {"is a run; its model is", "run/model"});
  refused(folder("lfs", {{"config.json", config}, {"model.safetensors", pointer}}),
          {"model.safetensors", "pointer of Git LFS", "lfs pull"});
  refused(folder("lfs_config", {{"config.json", pointer}}), {"config.json", "lfs pull"});
  refused(folder("bin", {{"config.json", config}, {"pytorch_model.bin", "PK\x03\x04"}}),
          {"pytorch_model.bin", "checkpoint of PyTorch", "save_pretrained"});
  refused(folder("pth", {{"params.json", "{}"}, {"consolidated.00.pth", "PK\x03\x04"}}),
          {"consolidated.00.pth", "checkpoint of PyTorch"});
  refused(folder("gguf", {{"model-q4.gguf", "GGUF\x03"}}), {"is GGUF", "hf download"});
  refused(at("gguf/model-q4.gguf"), {"is GGUF"});
  refused(folder("flax", {{"config.json", config}, {"flax_model.msgpack", "x"}}), {"Flax"});
  refused(folder("shards", {{"config.json", config}, {"model-00001-of-00002.safetensors", "x"}}),
          {"only model-00001-of-00002.safetensors"});
  refused(folder("empty", {}), {"has no config.json"});
  refused(folder("adapter", {{"adapter_config.json", "{\"base_model_name_or_path\": \"Qwen/Qwen3-0.6B\"}"}}),
          {"is an adapter", "--adapter"});
  refused(write("bin/config.json", config), {"is a file; expected the folder"});
}

// A download by huggingface_hub: models--OWNER--NAME/refs/main names the folder of snapshots/.
TEST_F(Formats, ModelsComeFromTheCacheOfTheHub) {
  const char* variables[] = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"};
  std::map<std::string, std::string> before;
  for (const char* v : variables) {
    if (const char* value = std::getenv(v)) before[v] = value;
    unsetenv(v);
  }
  const auto cached = [&](const std::string& cache) {
    const std::string folder = at(cache + "/models--Own-er--Na.me/");
    std::filesystem::create_directories(folder + "refs");
    std::filesystem::create_directories(folder + "snapshots/0f1e");
    std::ofstream(folder + "refs/main") << "0f1e\n";
    std::ofstream(folder + "snapshots/0f1e/config.json") << to_json(tiny_config("qwen2", true)).dump();
    return folder + "snapshots/0f1e";
  };
  const std::string home = cached("home/.cache/huggingface/hub"), xdg = cached("xdg/huggingface/hub"),
                    hf = cached("hf/hub"), old = cached("home/old"), hub = cached("hub");
  EXPECT_EQ(in_hub_cache("Own-er/Na.me"), "Own-er/Na.me");
  for (const auto& [variable, value, found] : {std::tuple("HOME", at("home"), home),
                                               {"XDG_CACHE_HOME", at("xdg"), xdg},
                                               {"HF_HOME", at("hf"), hf},
                                               {"HUGGINGFACE_HUB_CACHE", "~/old", old},
                                               {"HF_HUB_CACHE", at("hub"), hub}}) {
    setenv(variable, value.c_str(), 1);
    EXPECT_EQ(in_hub_cache("Own-er/Na.me"), found) << variable;
  }
  EXPECT_EQ(in_hub_cache("https://huggingface.co/Own-er/Na.me"), hub);
  EXPECT_EQ(load_model_config(in_hub_cache("Own-er/Na.me")).model_type, "qwen2");
  std::vector<std::string> notes;
  const Config config = read_config({"model.path=Own-er/Na.me", "data.tokenizer=Own-er/Na.me"}, &notes);
  EXPECT_EQ(config.model.path, hub);
  EXPECT_EQ(config.data.tokenizer, hub);
  EXPECT_NE(notes.at(0).find("Own-er/Na.me is " + hub + ", from the cache"), std::string::npos) << notes[0];
  for (const char* other : {"Own-er/Other", "Na.me", "", "ssa", "./Own-er/Na.me", "../hub/x"})
    EXPECT_EQ(in_hub_cache(other), other);
  try {
    load_model_config("Own-er/Other");
    ADD_FAILURE();
  } catch (const Error& e) {
    const std::string what = e.what();
    EXPECT_NE(what.find("no such model in " + at("hub")), std::string::npos) << what;
    EXPECT_NE(what.find("\n  hf download Own-er/Other --local-dir Other\n"), std::string::npos) << what;
  }
  for (const char* ref : {"", "1234", "../snapshots/0f1e", "0f1e/..", "main"}) {
    std::ofstream(at("hub/models--Own-er--Na.me/refs/main")) << ref;
    EXPECT_EQ(in_hub_cache("Own-er/Na.me"), "Own-er/Na.me") << ref;
  }
  for (const char* v : variables) {
    if (before.contains(v))
      setenv(v, before[v].c_str(), 1);
    else
      unsetenv(v);
  }
}

TEST(ForeignFile, WordsOfAShell) {
  for (const char* word : {"a/b-c_1.jsonl", "a b", "it's", "$HOME", "*", "-x", "\"q\"", "a\\b"}) {
    std::string out;
    FILE* shell = popen(cat("printf %s ", shell_word(word)).c_str(), "r");
    for (int c; (c = fgetc(shell)) != EOF;) out += static_cast<char>(c);
    pclose(shell);
    EXPECT_EQ(out, word[0] == '-' ? cat("./", word) : word);
  }
}

TEST(ForeignFile, NamesOnTheHub) {
  for (const char* name :
       {"Qwen/Q-2.5_b", "Qwen/Q-2.5_b/", "https://huggingface.co/Qwen/Q-2.5_b", "hf://Qwen/Q-2.5_b",
        "https://huggingface.co/Qwen/Q-2.5_b/tree/main", "https://huggingface.co/datasets/Qwen/Q-2.5_b"})
    EXPECT_EQ(hub_name(name), "Qwen/Q-2.5_b") << name;
  for (const char* name :
       {"gpt2", "./a/b", "/a/b", "a/b/c", "~/a", "a/", "a b/c", "../x", "https://huggingface.co/a", ""})
    EXPECT_EQ(hub_name(name), "") << name;
}

}  // namespace
}  // namespace pare::test
