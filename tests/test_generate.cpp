// pare generate, as users run it: streams, samples, files, chats, conversations, and what it says of time and memory.
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/text.h"
#include "model/hf/folder.h"
#include "rollout/scheduler.h"
#include "tests/program.h"
#include "tests/tiny.h"
#include "tests/tiny_tokenizer.h"
#include "tokenizer/chat.h"
#include "tokenizer/unicode.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Words = std::vector<std::string>;
using Ids = std::vector<int32_t>;

// A random model over bytes and the control tokens of Qwen.  It ends on <|im_end|> where it draws it.
class Generate : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    if (IsSkipped()) return;
    config_ = tiny_config("qwen3", true);
    config_.vocab = 260;
    config_.eos_ids = {257};
    make_model("model", config_);
    tokenizer_ = make_tokenizer(at("model"));
  }
  void make_model(const std::string& name, const ModelConfig& config) {
    save_weights(at(name), config, tiny_parameters(config, 5), DType::f32);
    write(name + "/tokenizer.json", tokenizer_json({{" ", "a"}}, {"<|im_start|>", "<|im_end|>"}).dump());
  }
  Outcome generate(const Words& words, const std::string& model = "model") {
    Words arguments = {program_path().string(), "generate", "--model", at(model), "--threads", "1"};
    arguments.insert(arguments.end(), words.begin(), words.end());
    return run(arguments);
  }
  // The same, of a command that must be right.
  std::string text(const Words& words, const std::string& model = "model") {
    const Outcome o = generate(words, model);
    EXPECT_EQ(o.code, 0) << o.err;
    return o.out;
  }
  std::vector<json> rows(const Words& words) {
    std::istringstream lines(text(words));
    std::vector<json> all;
    for (std::string line; std::getline(lines, line);) all.push_back(json::parse(line));
    return all;
  }
  // Greedy, a dozen tokens, no statistics.
  static Words plain(Words words) {
    words.insert(words.end(), {"--greedy", "--max-new-tokens", "12", "--quiet"});
    return words;
  }
  void refused(const Words& words, const Words& parts, Exit code = Exit::usage) {
    const Outcome o = generate(words);
    EXPECT_EQ(o.code, static_cast<int>(code)) << o.err;
    EXPECT_EQ(o.out, "");
    std::string error = o.err;
    while (error.starts_with("note ")) error.erase(0, error.find('\n') + 1);
    EXPECT_TRUE(error.starts_with("pare: ")) << o.err;
    EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 1) << o.err;
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << " not in " << o.err;
  }
  std::string messages_row(const std::vector<Message>& messages) {
    json all = json::array();
    for (const Message& m : messages) all.push_back({{"role", m.role}, {"content", m.content}});
    return json{{"messages", all}}.dump() + "\n";
  }

  ModelConfig config_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

// What is between two texts of a line.
std::string between(const std::string& line, const std::string& before, const std::string& after) {
  const size_t at = line.find(before);
  EXPECT_NE(at, std::string::npos) << before << " is not in " << line;
  if (at == std::string::npos) return "";
  const size_t begin = at + before.size();
  return line.substr(begin, line.find(after, begin) - begin);
}

TEST_F(Generate, StreamsTheTextThatSamplesHave) {
  const Words common = {"--prompt", "xyz a", "--seed", "5", "--max-new-tokens", "40"};
  const std::string streamed = text(common);
  Words many = common;
  many.insert(many.end(), {"--n", "3"});
  const std::vector<json> samples = rows(many);
  ASSERT_EQ(samples.size(), 3u);
  EXPECT_EQ(samples[0]["text"].get<std::string>() + "\n", streamed);
  EXPECT_EQ(lossy_utf8(streamed), streamed) << "always UTF-8, whatever bytes a model writes";
  std::string ids;
  for (size_t i = 0; i < samples.size(); i++) {
    const json& s = samples[i];
    EXPECT_EQ(s["prompt"], "xyz a");
    EXPECT_EQ(s["sample"], i);
    Ids tokens = s["tokens"];
    EXPECT_EQ(s["logprobs"].size(), tokens.size());
    const bool eos = tokens.back() == 257;
    EXPECT_EQ(s["finish"], eos ? "eos" : "length");
    EXPECT_TRUE(eos || tokens.size() == 40u);
    Ids all = tokenizer_->encode_prompt("xyz a");
    all.insert(all.end(), tokens.begin(), tokens.end());
    ids += json{{"ids", all}}.dump() + "\n";
    if (eos) tokens.pop_back();
    EXPECT_EQ(s["text"], lossy_utf8(tokenizer_->decode(tokens)));
  }
  EXPECT_NE(samples[1]["tokens"], samples[2]["tokens"]);
  // The log-probs are those of the learner's forward, bit by bit.
  std::istringstream learner(run("logprobs --model " + at("model") + " --ids " + write("ids.jsonl", ids)).out);
  for (const json& s : samples) {
    std::string line;
    ASSERT_TRUE(std::getline(learner, line));
    const std::vector<double> want = json::parse(line)["logprobs"], got = s["logprobs"];
    EXPECT_EQ(got, std::vector<double>(want.end() - static_cast<std::ptrdiff_t>(got.size()), want.end()));
  }
  many.back() = "1";
  many.push_back("--jsonl");
  EXPECT_EQ(rows(many), std::vector<json>{samples[0]});
}

TEST_F(Generate, ARowLimitsItsResponse) {
  std::string file;
  for (const int most : {3, 1, 1000, 13})
    file += json{{"prompt_ids", {70, 71, 72}}, {"max_tokens", most}}.dump() + "\n";
  write("limits.jsonl", file);
  const std::vector<json> all = rows(plain({"--file", at("limits.jsonl")}));
  ASSERT_EQ(all.size(), 4u);
  const std::vector<int> longest = all[2]["tokens"];
  ASSERT_EQ(longest.size(), 12u) << "the limit of all";
  for (const auto& [row, tokens] : {std::pair{0, 3}, {1, 1}, {3, 12}})
    EXPECT_EQ(all[row]["tokens"].get<std::vector<int>>(), std::vector(longest.begin(), longest.begin() + tokens));
}

TEST_F(Generate, AFileIsItsPromptsOneByOne) {
  const Ids ids = {70, 71, 256, 0, 72};
  const std::vector<Message> talk = {{"system", "s"}, {"user", "u"}, {"assistant", "v"}, {"user", "w"}};
  const std::string file =
      write("prompts.jsonl", "{\"prompt\": \"hello a\", \"answer\": 3}\n\n{\"problem\": \"q\"}\r\n" +
                                 json{{"prompt_ids", ids}}.dump() + "\n" + messages_row(talk));
  const std::vector<json> all = rows(plain({"--file", file, "--chat-format", "qwen2.5"}));
  ASSERT_EQ(all.size(), 4u);
  const ChatFormat format = find_chat_format("qwen2.5", "");
  const Ids prompts[] = {encode_chat(format, *tokenizer_, std::vector<Message>{{"user", "hello a"}}),
                         encode_chat(format, *tokenizer_, std::vector<Message>{{"user", "q"}}), ids,
                         encode_chat(format, *tokenizer_, talk)};
  for (size_t i = 0; i < 4; i++) {
    write("one.jsonl", json{{"prompt_ids", prompts[i]}}.dump());
    const std::vector<json> one = rows(plain({"--file", at("one.jsonl")}));
    ASSERT_EQ(one.size(), 1u);
    EXPECT_EQ(all[i]["tokens"], one[0]["tokens"]) << i;
    EXPECT_EQ(all[i]["row"], i);
    EXPECT_FALSE(all[i].contains("logprobs")) << "greedy draws have none";
  }
  EXPECT_EQ(all[0]["prompt"], "hello a");
  EXPECT_EQ(all[2]["prompt"], ids);
  EXPECT_EQ(all[3]["prompt"], json::parse(messages_row(talk))["messages"]);
  // A text is continued where there is no chat format.
  write("texts.jsonl", "{\"prompt\": \"hello a\"}\n{\"question\": \"q\"}\n");
  const std::vector<json> texts = rows(plain({"--file", at("texts.jsonl")}));
  ASSERT_EQ(texts.size(), 2u);
  for (const json& t : texts) EXPECT_EQ(text(plain({"--prompt", t["prompt"]})), t["text"].get<std::string>() + "\n");
}

// What it writes of the rows of a training set is what RPO begins with.
TEST_F(Generate, AFileIsWhatRpoBeginsWith) {
  const std::string rows =
      write("rows.jsonl", "{\"prompt\": \"hello\", \"answer\": \"3\"}\n\n{\"prompt\": \"a\", \"answer\": \"4\"}\n");
  write("cache.jsonl", text({"--file", rows, "--max-new-tokens", "9", "--quiet"}));
  const Outcome o =
      run(cat("train model.path=", at("model"), " data.train_files=", rows, " data.reward=contains",
              " data.train_batch_size=2 rollout.n=2 data.max_prompt_length=40 data.max_response_length=20",
              " trainer.total_training_steps=1 trainer.threads=1 algorithm.rpo.enable=true",
              " algorithm.rpo.max_cut=1 algorithm.rpo.cache_file=", at("cache.jsonl"), " --quiet --out ", at("run")));
  EXPECT_EQ(o.code, 0) << o.err;
  const json step = json::parse(read_text(at("run/metrics.jsonl")));
  EXPECT_EQ(step["rpo/hit_rate"], 1);
  EXPECT_GT(step["rpo/prefix_tokens"], 3);
}

// However many run together, and in however little memory.
TEST_F(Generate, TheBatchChangesNothing) {
  std::string file;
  for (int i = 0; i < 7; i++) file += json{{"prompt", std::string(1 + 9 * i % 40, 'a')}}.dump() + "\n";
  const Words common = {"--file", write("prompts.jsonl", file), "--n", "3", "--max-new-tokens", "30", "--quiet"};
  const auto with = [&](const Words& more) {
    Words words = common;
    words.insert(words.end(), more.begin(), more.end());
    return text(words);
  };
  const std::string all = with({});
  EXPECT_EQ(std::count(all.begin(), all.end(), '\n'), 21);
  EXPECT_EQ(with({"rollout.max_num_seqs=2"}), all);
  EXPECT_EQ(with({"rollout.max_num_batched_tokens=7", "rollout.max_num_seqs=5"}), all);
  EXPECT_EQ(with({"rollout.kv_cache_bytes=60000"}), all);
  EXPECT_NE(with({"--temperature", "0.5"}), all);
  EXPECT_NE(with({"--top-k", "2"}), all);
  EXPECT_NE(with({"--top-p", "0.3"}), all);
  EXPECT_NE(with({"--seed", "2"}), all);
}

TEST_F(Generate, ChatsHaveTheFormatOfTheModel) {
  const auto same = [&](const Words& words, const std::vector<Message>& messages, const ChatFormat& format) {
    const Ids ids = encode_chat(format, *tokenizer_, messages);
    const std::vector<json> want = rows(plain({"--file", write("ids.jsonl", json{{"prompt_ids", ids}}.dump())}));
    ASSERT_EQ(want.size(), 1u);
    EXPECT_EQ(text(plain(words)), want[0]["text"].get<std::string>() + "\n");
  };
  ChatFormat qwen3 = find_chat_format("qwen3", "");
  same({"--chat", "hi", "--chat-format", "qwen3"}, {{"user", "hi"}}, qwen3);
  same({"--chat", "hi", "data.chat_template=qwen3", "--system", "be brief"}, {{"system", "be brief"}, {"user", "hi"}},
       qwen3);
  qwen3.thinking = false;
  same({"--chat", "hi", "--chat-format", "qwen3", "--no-thinking"}, {{"user", "hi"}}, qwen3);
  const ChatFormat problem = find_chat_format("Q: {problem}\nA:", "");
  same({"--chat", "1+1", "--chat-format", "Q: {problem}\nA:"}, {{"user", "1+1"}}, problem);
  refused({"--chat", "hi"}, {"no chat template", "--chat-format", "--prompt"});
  refused({"--chat", "hi", "--chat-format", "qwen4"}, {"qwen4", "qwen3", "--chat-format"});
  refused({"--chat", "hi", "--chat-format", "qwen2.5", "--no-thinking"}, {"--no-thinking", "qwen3"});
  refused({"--chat", "hi", "--chat-format", "{problem}", "--system", "s"}, {"one message"});
  refused({"--prompt", "hi", "--system", "s"}, {"--system", "--chat"});
  // An unknown template says what to do, but does not keep a text from being continued.
  write("model/tokenizer_config.json", R"({"chat_template": "{{ messages }}"})");
  refused({"--chat", "hi"}, {"tokenizer_config.json", "unknown", "--chat-format"});
  input_ = write("input", "hi\n");
  refused({}, {"unknown", "--chat-format"});
  EXPECT_NE(text(plain({"--prompt", "hi"})), "");
}

// Conversations of every kind that training reads, and a key of one's own.
TEST_F(Generate, ReadsTheRowsOfTraining) {
  const auto of = [&](const std::string& row, Words more = {}) {
    more.insert(more.end(), {"--file", write("row.jsonl", row), "--chat-format", "qwen2.5"});
    const std::vector<json> all = rows(plain(more));
    EXPECT_EQ(all.size(), 1u) << row;
    return all.empty() ? json() : all[0]["tokens"];
  };
  const json want = of(messages_row({{"system", "s"}, {"user", "one"}}));
  EXPECT_EQ(of(R"({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]})"), want);
  EXPECT_EQ(of(R"({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "one"}]})"), want);
  EXPECT_EQ(of(R"({"prompt": "one"})", {"data.system_prompt=s"}), want);
  EXPECT_EQ(of(R"({"prompt": "two", "text": "one"})", {"data.system_prompt=s", "data.prompt_key=text"}), want);
  EXPECT_NE(of(R"({"prompt": "one"})"), want);
}

TEST_F(Generate, AConversationKeepsWhatWasSaid) {
  input_ = write("input", "one\n  \ntwo\nthree");
  const Words common = {"--chat-format", "qwen2.5", "--system", "s"};
  const std::string answers = text(plain(common));
  std::vector<Message> said = {{"system", "s"}};
  std::string want;
  for (const char* line : {"one", "two", "three"}) {
    said.push_back({"user", line});
    const std::vector<json> row =
        rows(plain({"--file", write("talk.jsonl", messages_row(said)), "--chat-format", "qwen2.5"}));
    ASSERT_EQ(row.size(), 1u);
    said.push_back({"assistant", row[0]["text"]});
    want += said.back().content + "\n";
  }
  EXPECT_EQ(answers, want);
  // Without a chat format, every line for itself.
  want.clear();
  for (const char* line : {"one", "two", "three"}) want += text(plain({"--prompt", line}));
  EXPECT_EQ(text(plain({})), want);
  refused({"--system", "s"}, {"--system", "--chat-format"});
  refused({"--n", "2"}, {"--n", "--file"});
  refused({"--jsonl"}, {"--jsonl", "--file"});
  // An end without a line, and statistics for every answer.
  input_ = "/dev/null";
  EXPECT_EQ(text({}), "");
  input_ = write("input", "one\ntwo\n");
  const Outcome o = generate({"--max-new-tokens", "3"});
  EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 2) << o.err;
  // A line that is too long for the model ends a conversation by a pipe.
  input_ = write("input", "one\n" + std::string(200, 'x') + "\n");
  const Outcome full = generate(plain({}));
  EXPECT_EQ(full.code, 2);
  EXPECT_NE(full.out, "");
  EXPECT_NE(full.err.find("200 tokens"), std::string::npos) << full.err;
}

// After which the next line is read.
TEST_F(Generate, CtrlCStopsTheAnswerOnly) {
  ModelConfig endless = config_;
  endless.max_position = 200000;
  endless.eos_ids = {};
  make_model("endless", endless);
  input_ = at("fifo");
  ASSERT_EQ(mkfifo(input_.c_str(), 0600), 0);
  std::atomic<bool> ended = false;
  std::signal(SIGPIPE, SIG_IGN);  // a program that ends too early is to fail the test, not to end it
  std::thread user([&] {
    std::ofstream lines(input_);
    const auto wait_for = [&](const std::string& file, size_t more) {
      while (!ended && (child_ == 0 || read_text(at(file)).size() < more)) usleep(1000);
    };
    wait_for(".stderr", 1);  // the note that nothing ends a turn
    for (int turn = 0; turn < 3 && !ended; turn++) {
      const size_t out = read_text(at(".stdout")).size(), err = read_text(at(".stderr")).size();
      lines << "tell me\n" << std::flush;
      wait_for(".stdout", out + 20);
      if (!ended) send(SIGINT);
      wait_for(".stderr", err + 1);  // the statistics: back at the prompt
    }
  });
  const Outcome o = generate({"--chat-format", "qwen3", "--max-new-tokens", "190000"}, "endless");
  ended = true;
  user.join();
  std::signal(SIGPIPE, SIG_DFL);
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 4) << o.err;
  const std::string first = between(o.err.substr(o.err.find('\n')), "; ", " new tokens");
  EXPECT_LT(std::stoll(first), 190000);
  EXPECT_GT(std::stoll(first), 0);
}

TEST_F(Generate, SaysWhatTheCacheHolds) {
  const Words common = {"--prompt", std::string(33, 'x'), "--max-new-tokens", "60"};
  const Words snapkv = {"rollout.kv.method=snapkv", "rollout.kv.evict.budget=16", "rollout.kv.evict.buffer=8"};
  config_.eos_ids = {};
  make_model("endless", config_);
  const auto statistics = [&](const Words& more) {
    Words words = common;
    words.insert(words.end(), more.begin(), more.end());
    const Outcome o = generate(words, "endless");
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    return o.err.substr(0, o.err.size() - 1);
  };
  const auto bytes = [&](int64_t pages, const KvSpec& spec) {
    return human(static_cast<double>(pages * KvCache::page_bytes(config_, spec, DType::f32))) + "B";
  };
  // 33 + 59 slots in two layers.
  const std::string dense = statistics({});
  EXPECT_TRUE(dense.starts_with("33 prompt tokens, ")) << dense;
  EXPECT_NE(dense.find(" tok/s; 60 new tokens, "), std::string::npos) << dense;
  EXPECT_TRUE(dense.ends_with("; KV " + bytes(12, {}) + " at most")) << dense;
  // The prompt is there as a whole before it is compressed.
  KvSpec spec;
  spec.method = KvMethod::snapkv;
  const std::string sparse = statistics(snapkv);
  EXPECT_TRUE(sparse.ends_with("; KV " + bytes(6, spec) + " at most, dense " + bytes(12, {}))) << sparse;
  const std::string quest = statistics({"rollout.kv.method=quest", "rollout.kv.blocks.count=4"});
  EXPECT_TRUE(quest.ends_with(", dense " + bytes(12, {}))) << quest;
  // Of many samples: what the dense run of the same lengths says of itself.
  const auto last = [](const std::string& line) { return line.substr(line.rfind(' ', line.rfind('B')) + 1); };
  const Words many = {"--n", "5", "rollout.max_num_seqs=3"};
  Words sparse_many = many;
  sparse_many.insert(sparse_many.end(), snapkv.begin(), snapkv.end());
  EXPECT_EQ(last(statistics(sparse_many)), between(statistics(many), "; KV ", " at most"));
  // What evicts nothing changes nothing; what evicts changes the text; a preset or file may say it, too.
  const auto out = [&](const Words& more) {
    Words words = common;
    words.insert(words.end(), more.begin(), more.end());
    return generate(words, "endless").out;
  };
  const std::string unchanged = out({});
  EXPECT_EQ(out({"rollout.kv.method=snapkv", "rollout.kv.evict.budget=160"}), unchanged);
  EXPECT_NE(out(snapkv), unchanged);
  const std::string file = write("kv.toml", "[rollout.kv]\nmethod = \"snapkv\"\nevict.budget = 16\nevict.buffer = 8\n");
  EXPECT_EQ(out({file}), out(snapkv));
  EXPECT_EQ(out({file, "rollout.val_kwargs.kv=dense"}), unchanged);
}

// The reader of the first line sends Ctrl-C: every line that is there is whole.
TEST_F(Generate, CtrlCKeepsTheSamplesThatAreFinished) {
  std::string rows;
  for (int i = 0; i < 3000; i++) rows += "{\"prompt\": \"xyz a\"}\n";
  write("rows.jsonl", rows);
  write("stop.sh",
        cat("mkfifo ", at("pipe"), "\n", program_path().string(), " generate --model ", at("model"),
            " --threads 1 --max-new-tokens 100 --file ", at("rows.jsonl"), " rollout.max_num_seqs=3 > ", at("pipe"),
            " 2> ", at("err"), " &\npid=$!\n{ read -r first; kill -INT $pid; echo \"$first\"; cat; } < ", at("pipe"),
            " > ", at("out.jsonl"), "\nwait $pid\n"));
  const int code = std::system(("sh " + at("stop.sh")).c_str());
  EXPECT_EQ(WEXITSTATUS(code), 75) << read_text(at("err"));
  std::istringstream out(read_text(at("out.jsonl")));
  std::set<int> seen;
  for (std::string line; std::getline(out, line);)
    EXPECT_TRUE(seen.insert(json::parse(line)["row"].get<int>()).second) << line;
  EXPECT_GE(seen.size(), 1u);
  EXPECT_LT(seen.size(), 3000u);
  EXPECT_NE(read_text(at("err")).find(cat("interrupted: ", seen.size(), " of 3000 samples")), std::string::npos)
      << read_text(at("err"));
}

TEST_F(Generate, WrongInput) {
  refused({"--prompt", ""}, {"prompt is empty", "BOS"});
  refused({"--prompt", std::string(160, 'x')}, {"160 tokens", "160 positions"});
  refused({"--prompt", "x", "--chat", "y"}, {"--chat", "--prompt"});
  refused({"--prompt", "x", "--n", "0"}, {"rollout.val_kwargs.n", "0"});
  refused({"--prompt", "x", "--n", "3", "--greedy"}, {"greedy", "3 times"});
  refused({"--prompt", "x", "--n", "2000000000000"}, {"2000000000000"}, Exit::memory);
  refused({"--prompt", "x", "rollout.kv_cache_bytes=10"}, {"rollout.kv_cache_bytes"}, Exit::memory);
  refused({"--prompt", "x", "rollout.kv.bugdet=4"}, {"rollout.kv.bugdet", "nearest is rollout.kv.evict.budget"});
  refused({"--prompt", "x", "rollout.kv.method=snap"}, {"rollout.kv.method", "snapkv"});
  refused({"--prompt", "x", "rollout.kv.method=snapkv", "rollout.kv.evict.budget=4"}, {"rollout.kv.evict.budget"});
  refused({"--prompt", "x", "Once upon"}, {"group.key=value", "Once upon"});
  refused({"--prompt", "x", "--tokenizer", at("none")}, {at("none")});
  refused({"--file", at("none.jsonl")}, {"none.jsonl"});
  refused({"--file", root_.string()}, {root_.string()});
  const auto reject = [&](const std::string& rows, const Words& parts) {
    refused({"--file", write("bad.jsonl", "{\"prompt\": \"x\"}\n\n" + rows), "--chat-format", "qwen3"}, parts);
  };
  reject("{\"prompt\": ", {"bad.jsonl:3: not JSON"});
  reject("[1]", {"bad.jsonl:3", "array"});
  reject("{\"answer\": 1}", {"bad.jsonl:3", "\"prompt\"", "\"messages\""});
  reject("{\"prompt\": 1}", {"bad.jsonl:3", "\"prompt\"", "number"});
  reject("{\"prompt\": \"x\", \"problem\": \"y\"}", {"bad.jsonl:3", "\"prompt\"", "\"problem\""});
  reject("{\"messages\": []}", {"bad.jsonl:3", "messages"});
  reject("{\"messages\": [{\"role\": \"user\"}]}", {"bad.jsonl:3", "message 1"});
  reject("{\"messages\": [{\"role\": \"tool\", \"content\": \"\"}]}", {"bad.jsonl:3", "tool"});
  reject("{\"prompt_ids\": [1, -1]}", {"bad.jsonl:3", "prompt_ids"});
  reject("{\"prompt_ids\": [1, 260]}", {"bad.jsonl:3", "260"});
  reject("{\"prompt_ids\": []}", {"bad.jsonl:3", "empty"});
  for (const char* most : {"0", "-1", "1.5", "\"3\"", "null", "9999999999"})
    reject(cat("{\"prompt\": \"x\", \"max_tokens\": ", most, "}"), {"bad.jsonl:3: max_tokens is", most});
  write("bad.jsonl", "\n");
  refused({"--file", at("bad.jsonl")}, {"bad.jsonl", "no rows"});
  EXPECT_EQ(generate({"--prompt", "x"}, "none").code, 2);
  const Outcome none = run("generate --prompt x");
  EXPECT_EQ(none.code, 2);
  EXPECT_NE(none.err.find("--model DIR"), std::string::npos) << none.err;
  // A model without a tokenizer goes from tokens to tokens.
  fs::remove(at("model/tokenizer.json"));
  refused({"--prompt", "x"}, {"no tokenizer", "--tokenizer"});
  refused({}, {"no tokenizer", "--tokenizer"});
  const std::vector<json> row = rows(plain({"--file", write("ids.jsonl", R"({"ids": [5, 6, 7]})")}));
  ASSERT_EQ(row.size(), 1u);
  EXPECT_FALSE(row[0].contains("text"));
  EXPECT_EQ(row[0]["finish"], row[0]["tokens"].back() == 257 ? "eos" : "length");
}

// Responses end with the positions of the model, which the default length may pass.
TEST_F(Generate, EndsWithThePositions) {
  config_.eos_ids = {};
  make_model("endless", config_);
  const Outcome o = generate({"--prompt", std::string(150, 'x')}, "endless");
  EXPECT_NE(o.err.find("150 prompt tokens"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("; 10 new tokens"), std::string::npos) << o.err;
}

TEST_F(Generate, TheGoldenStory) {
  const std::string folder = "../shared/data/tiny_models/stories260k";
  if (!fs::exists(folder)) GTEST_SKIP() << folder << " is not on this machine";
  const json golden = json::parse(read_text(folder + "/golden_visible.json"))["sequences"][0];
  const std::string story = golden["text"];
  const auto tokens = golden["tokens"].size() - 1;  // after BOS
  const auto tell = [&](const std::string& prompt, size_t length) {
    Words words = {
        program_path().string(), "generate", "--model", folder, "--prompt", prompt, "--greedy", "--max-new-tokens",
        std::to_string(length)};
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 0) << o.err;
    return o.out;
  };
  EXPECT_EQ(tell("", tokens), story + "\n");
  const std::string begin = "Once upon a time";
  ASSERT_TRUE(story.starts_with(begin));
  const std::string rest = tell(begin, 60);
  EXPECT_EQ(rest.substr(0, rest.size() - 1), story.substr(begin.size(), rest.size() - 1));
}

}  // namespace
}  // namespace pare::test
