// The files of a Hugging Face folder: the table of data/README.md, and what saved folders have.
#include <map>
#include <set>
#include <sstream>

#include "base/text.h"
#include "model/hf/files.h"
#include "model/hf/folder.h"
#include "run/session.h"
#include "tests/program.h"
#include "tests/tiny.h"
#include "tests/tiny_tokenizer.h"
#include "tests/weights.h"
#include "tokenizer/chat.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Words = std::vector<std::string>;

std::string text_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(FolderFiles, ThePageHasTheTable) {
  const std::map<FolderFile::Part, std::string> parts = {{FolderFile::Part::model, "model"},
                                                         {FolderFile::Part::tokenizer, "tokenizer"},
                                                         {FolderFile::Part::adapter, "adapter"},
                                                         {FolderFile::Part::none, "-"}};
  const std::map<FolderFile::Saved, std::string> saved = {
      {FolderFile::Saved::written, "written"}, {FolderFile::Saved::copied, "copied"}, {FolderFile::Saved::no, "no"}};
  std::string table;
  for (const FolderFile& f : folder_files())
    table += cat("| `", f.name, "` | ", parts.at(f.part), " | ", saved.at(f.saved), " | ", *f.read ? f.read : "nothing",
                 " |\n");
  const std::string page = text_of("data/README.md");
  const size_t head = page.find("| file | part | saved folders |");
  ASSERT_NE(head, std::string::npos);
  const size_t begin = page.find("|\n", page.find("|---", head)) + 2;
  EXPECT_EQ(page.substr(begin, page.find("\n\n", begin) + 1 - begin), table);
}

// Every file of the table in a folder that has all of them, and one more of each folder.
TEST(FolderFiles, CopiesAreThoseOfTheTable) {
  const fs::path from = fs::path(testing::TempDir()) / cat("pare_files_", getpid()), to = from / "to";
  fs::create_directories(from / "additional_chat_templates");
  fs::create_directories(to);
  std::set<std::string> tokenizer, model;
  for (const FolderFile& f : folder_files()) {
    std::string name = f.name;
    if (const size_t star = name.find('*'); star != std::string::npos) name.replace(star, 1, "x");
    std::ofstream(from / name) << name;
    if (f.saved == FolderFile::Saved::copied) (f.part == FolderFile::Part::model ? model : tokenizer).insert(name);
  }
  for (const char* other : {"notes.txt", "additional_chat_templates/notes.txt", "pytorch_model.bin"})
    std::ofstream(from / other) << other;
  const auto names = [](const FileSums& sums) {
    std::set<std::string> all;
    for (const auto& [name, sum] : sums) all.insert(name);
    return all;
  };
  EXPECT_EQ(names(copy_generation_config(from, to)), model);
  EXPECT_EQ(model, std::set<std::string>{"generation_config.json"});
  EXPECT_EQ(names(copy_tokenizer(from, to)), tokenizer);
  for (const std::string& name : tokenizer) EXPECT_EQ(text_of(to / name), name);
  fs::remove_all(to);
  fs::create_directories(to);
  EXPECT_EQ(names(copy_tokenizer(from / "tokenizer.json", to)),
            (std::set<std::string>{"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                   "chat_template.jinja", "additional_chat_templates/x.jinja"}));
  fs::remove_all(from);
}

// Runs of the program on a model folder with a template in both places.
class SavedFolders : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    if (IsSkipped()) return;
    config_ = tiny_config("qwen3", true);
    config_.vocab = 260;
    config_.eos_ids = {257};
    save_weights(at("model"), config_, tiny_parameters(config_, 5), DType::bf16);
    write("model/tokenizer.json", tokenizer_json({}, {"<|im_start|>", "<|im_end|>"}).dump());
    jinja_ = chat_jinja({.kind = ChatFormat::Kind::qwen3}, "");
    write("model/chat_template.jinja", jinja_);
    write("model/tokenizer_config.json", R"({"eos_token": "<|im_end|>", "chat_template": "{{ other }}"})");
    write("model/generation_config.json", kGeneration);
    write("rows.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\", \"completion\": \"b\"}\n");
  }
  void train(const std::string& command, const std::string& out, const Words& more = {}) {
    Words words = {program_path().string(),
                   command,
                   "--quiet",
                   "--out",
                   at(out),
                   "model.path=" + at("model"),
                   "data.train_files=" + at("rows.jsonl"),
                   "data.reward=contains",
                   "data.train_batch_size=1",
                   "data.max_prompt_length=100",
                   "data.max_response_length=4",
                   "trainer.total_training_steps=1",
                   "trainer.save_freq=1",
                   "trainer.threads=1"};
    if (command == "train") words.emplace_back("rollout.n=2");
    words.insert(words.end(), more.begin(), more.end());
    const Outcome o = run(words);
    ASSERT_EQ(o.code, 0) << o.err;
  }
  void expect_copies(const std::string& folder, bool generation = true) {
    EXPECT_EQ(text_of(at(folder + "/chat_template.jinja")), jinja_) << folder;
    EXPECT_EQ(text_of(at(folder + "/tokenizer_config.json")), text_of(at("model/tokenizer_config.json"))) << folder;
    EXPECT_EQ(text_of(at(folder + "/generation_config.json")), generation ? kGeneration : "") << folder;
  }

  static constexpr const char* kGeneration =
      R"({"eos_token_id": [257, 256], "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95})";
  ModelConfig config_;
  std::string jinja_;
};

TEST_F(SavedFolders, HaveGenerationConfigAndTheTemplateThatWasUsed) {
  train("train", "grpo");
  train("sft", "sft");
  for (const char* folder : {"grpo/model", "grpo/checkpoints/step-1", "sft/model", "sft/checkpoints/step-1"}) {
    expect_copies(folder);
    EXPECT_EQ(load_model_config(at(folder)).eos_ids, (std::vector<int32_t>{257, 256}));
    EXPECT_EQ(json::parse(text_of(at(cat(folder, "/config.json"))))["eos_token_id"], json::array({257, 256}));
  }
  train("train", "lora", {"model.lora.rank=1"});
  expect_copies("lora/model", false);
  for (const auto& [dtype, stored] : std::map<std::string, DType>{
           {"", DType::bf16}, {"f32", DType::f32}, {"f16", DType::f16}, {"bf16", DType::bf16}}) {
    Words merge = {program_path().string(), "merge", "--model",           at("model"), "--adapter",
                   at("lora/model"),        "--out", at("merged" + dtype)};
    if (!dtype.empty()) merge.insert(merge.end(), {"--dtype", dtype});
    const Outcome o = run(merge);
    ASSERT_EQ(o.code, 0) << o.err;
    expect_copies("merged" + dtype);
    EXPECT_EQ(hf_dtype(at("merged" + dtype), config_), stored);
  }
  Words unknown = {program_path().string(), "merge", "--model",  at("model"), "--adapter",
                   at("lora/model"),        "--out", at("none"), "--dtype",   "f8"};
  const Outcome o = run(unknown);
  EXPECT_EQ(o.code, static_cast<int>(Exit::usage));
  EXPECT_NE(o.err.find("expected f32, bf16 or f16"), std::string::npos) << o.err;
}

// A format that data.chat_template chooses is saved as a template, which the saved folder is read with again.
TEST_F(SavedFolders, HaveATemplateOfTheChosenFormat) {
  fs::create_directories(at("model/additional_chat_templates"));
  write("model/additional_chat_templates/tool_use.jinja", "{{ tools }}");
  train("sft", "own", {"data.chat_template=qwen3"});
  expect_copies("own/model");
  EXPECT_TRUE(fs::exists(at("own/model/additional_chat_templates/tool_use.jinja")));
  const std::vector<std::pair<std::string, ChatFormat::Kind>> formats = {{"qwen2.5", ChatFormat::Kind::chatml},
                                                                         {"plain", ChatFormat::Kind::plain},
                                                                         {"Q: {problem}\n", ChatFormat::Kind::problem}};
  for (const auto& [name, kind] : formats) {
    train("sft", "own", {"data.chat_template=" + name, "--force"});  // over the templates of the run before
    for (const char* folder : {"own/model", "own/checkpoints/step-1"}) {
      const ChatFormat saved = find_chat_format("auto", at(folder)), used = find_chat_format(name, "");
      EXPECT_EQ(saved.kind, kind) << name;
      EXPECT_EQ(saved.text, used.text) << name;
      EXPECT_EQ(saved.system, used.system) << name;
      EXPECT_FALSE(fs::exists(at(cat(folder, "/additional_chat_templates")))) << "one of them might win";
    }
  }
}

// <|im_end|> ends the turns of the format, but config.json has another EOS.
TEST_F(SavedFolders, AnEndOfTurnThatIsNoEosIsSaidAndCanStop) {
  write("model/generation_config.json", R"({"eos_token_id": 256})");
  const std::string said = "the chat format ends a turn by <|im_end|> (id 257), which is no EOS of the model";
  const auto outcome = [&](Words words, const Words& more) {
    words.insert(words.begin(), program_path().string());
    words.insert(words.end(), more.begin(), more.end());
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 0) << o.err;
    return o;
  };
  const Words rl = {"train",
                    "--quiet",
                    "--force",
                    "--out",
                    at("rl"),
                    "model.path=" + at("model"),
                    "data.train_files=" + at("rows.jsonl"),
                    "data.reward=contains",
                    "data.train_batch_size=1",
                    "data.max_prompt_length=100",
                    "data.max_response_length=24",
                    "trainer.total_training_steps=1",
                    "trainer.samples_freq=1",
                    "trainer.threads=1",
                    "rollout.n=64"};
  const auto finishes = [&] {
    std::map<std::string, int> count;
    std::istringstream lines(text_of(at("rl/rollouts.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const json row = json::parse(line);
      const std::vector<int32_t> ids = row["ids"];
      const std::string finish = row["finish"], text = row["response"];
      count[finish]++;
      if (finish == "stop") {
        EXPECT_TRUE(ids.back() == 257 || text.ends_with("e")) << text;
        EXPECT_EQ(std::count(ids.begin(), ids.end(), 257), ids.back() == 257);
      }
    }
    return count;
  };
  EXPECT_NE(outcome(rl, {}).err.find(said), std::string::npos);
  EXPECT_EQ(finishes()["stop"], 0);
  const Words stops = {"rollout.stop_token_ids=[257]", "rollout.stop=e"};
  EXPECT_EQ(outcome(rl, stops).err.find(said), std::string::npos);
  EXPECT_GT(finishes()["stop"], 2);

  const Words eval = {"eval",
                      "--quiet",
                      "--force",
                      "--model",
                      at("model"),
                      "--data",
                      at("rows.jsonl"),
                      "--verifier",
                      "contains",
                      "--n",
                      "64",
                      "--out",
                      at("eval.jsonl"),
                      "data.max_prompt_length=100",
                      "data.max_response_length=24",
                      "trainer.threads=1"};
  EXPECT_NE(outcome(eval, {}).err.find(said), std::string::npos);
  EXPECT_EQ(outcome(eval, stops).err.find(said), std::string::npos);
  int stopped = 0;
  const json evaluated = json::parse(text_of(at("eval.jsonl")));
  for (const json& r : evaluated["responses"]) {
    stopped += r["finish"] == "stop";
    EXPECT_EQ(r["finished"], r["finish"] != "length");
  }
  EXPECT_GT(stopped, 3);

  const Words generate = {"generate", "--model", at("model"), "--threads",        "1", "--chat", "a",
                          "--jsonl",  "--n",     "64",        "--max-new-tokens", "24"};
  EXPECT_NE(outcome(generate, {}).err.find(said), std::string::npos);
  const Outcome o = outcome(generate, stops);
  EXPECT_EQ(o.err.find(said), std::string::npos);
  std::istringstream lines(o.out);
  stopped = 0;
  for (std::string line; std::getline(lines, line);) {
    const json row = json::parse(line);
    const std::string text = row["text"];
    if (row["finish"] != "stop") continue;
    stopped++;
    EXPECT_TRUE(row["tokens"].back() == 257 || text.ends_with("e")) << row;
    EXPECT_EQ(text.find("<|im_end|>"), std::string::npos) << row;
  }
  EXPECT_GT(stopped, 3);
}

// Next-token training ends a completion by the end of turn if that stops, else by EOS.
TEST_F(SavedFolders, CompletionsEndAsResponsesDo) {
  write("model/generation_config.json", R"({"eos_token_id": 256})");
  const auto end = [&](const Words& more) {
    Words words = {"model.path=" + at("model"),  "data.train_files=" + at("rows.jsonl"), "data.reward=contains",
                   "data.max_prompt_length=100", "data.max_response_length=24",          "trainer.threads=1"};
    words.insert(words.end(), more.begin(), more.end());
    const Session session(load_config(words));
    return session.end;
  };
  EXPECT_EQ(end({}), 256);
  EXPECT_EQ(end({"rollout.stop_token_ids=[7,257]"}), 257);
  EXPECT_EQ(end({"rollout.stop_token_ids=[7]"}), 256);
  EXPECT_EQ(end({"rollout.stop_token_ids=[257]", "data.chat_template=plain"}), 257) << "the tokenizer's EOS";
}

}  // namespace
}  // namespace pare::test
