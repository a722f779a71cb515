// A resumed run notices when what it reads has changed, and which command it belongs to; a new run starts from a
// checkpoint of another one.
#include "base/file.h"
#include "base/json_file.h"
#include "run/checkpoint.h"
#include "tests/program.h"
#include "tests/sealed_state.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class ResumeInputs : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }

  // Inputs of the run, in the folder in/.
  void make_inputs() {
    fs::remove_all(at("in"));
    const Session session(load_config(
        tiny_run() + Overrides{cat("model.config=", tiny_folder(), "bytes.json"), "model.init=fan_in", "model.path="}));
    save_weights(at("in/model"), session.model_config, session.model->get_parameters(), DType::f32, true);
    nlohmann::json config = nlohmann::json::parse(config_json(16, 270));
    config["rope_theta"] = 10000.0;
    config["rms_norm_eps"] = 1e-6;
    write("in/model/config.json", config.dump(1));
    fs::copy_file(tiny_folder() + "tokenizer.json", at("in/model/tokenizer.json"));
    write("in/model/tokenizer_config.json", R"({"pad_token": "<|im_end|>"})");
    for (const char* name : {"train", "val", "more"})
      write(cat("in/", name, ".jsonl"), read_text(tiny_folder() + "short.jsonl"));
    write("in/cache.jsonl", "{\"row\": 1, \"text\": \"ab\", \"finished\": true}\n");
    write("in/grade.sh", "while read -r line; do echo \"{\\\"score\\\": $((${#line} % 2))}\"; done\n");
  }
  Overrides keys(const Overrides& more = {}) {
    return Overrides{"model.path=" + at("in/model"), "data.task=jsonl",
                     cat("data.train_files=[\"", at("in/train.jsonl"), "\",\"", at("in/more.jsonl"), "\"]"),
                     "data.val_files=" + at("in/val.jsonl"), cat("data.reward=command:sh ", at("in/grade.sh"))} +
           tiny_sizes + Overrides{"data.max_response_length=4", "trainer.total_training_steps=2"} + more;
  }
  Outcome pare(const std::string& kind, const std::string& dir, const Overrides& words) {
    std::vector<std::string> arguments = {program_path().string(), kind, "--out", at(dir)};
    for (const std::string& word : words) arguments.push_back(word);
    return run(arguments);
  }
  Outcome words(const Overrides& list) {
    std::vector<std::string> arguments = Overrides{program_path().string()} + list;
    return run(arguments);
  }
  void expect_ok(const Outcome& o) { ASSERT_EQ(o.code, 0) << o.err << o.out; }
  void expect_refused(const Outcome& o, const std::vector<std::string>& parts) {
    EXPECT_EQ(o.code, static_cast<int>(Exit::usage)) << o.out;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << "\n" << o.err;
  }
  void replace(const std::string& file, const std::string& from, const std::string& to) {
    std::string text = read_text(at(file));
    const size_t found = text.find(from);
    ASSERT_NE(found, std::string::npos) << from << " in " << text;
    write(file, text.replace(found, from.size(), to));
  }
  void restart(const std::string& from, const std::string& to) {
    fs::remove_all(at(to));
    fs::copy(at(from), at(to), fs::copy_options::recursive);
  }
  nlohmann::json state(const std::string& checkpoint) { return read_json_file(at(checkpoint + "/state.json")); }
  // As a program wrote it that knew nothing of these members of "run", of these keys and of a log of responses.
  void make_older(const std::string& checkpoint, const std::vector<std::string>& members) {
    std::string text = read_text(at(checkpoint + "/state.json"));
    nlohmann::ordered_json j = nlohmann::ordered_json::parse(text);
    for (const std::string& m : members) j["run"].erase(m);
    j["run"]["logs"].erase("rollouts.jsonl");
    j.erase("xxh128");
    std::string config = j["config"];
    for (const char* key : {"command = ", "from_checkpoint = "})
      if (const size_t line = config.find(key); line != config.npos)
        config.erase(line, config.find('\n', line) + 1 - line);
    j["config"] = config;
    write(checkpoint + "/state.json", sealed_again("\n\n" + j.dump(2).substr(2) + "\n"));
  }
  std::string weights(const std::string& run) { return read_text(at(run + "/model/model.safetensors")); }
};

struct Change {
  const char* what;
  const char* file;  // below in/
  std::string key, feeds, how;
  std::function<void(const std::string& path)> make;
};

void edit(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = read_text(path);
  const size_t found = text.find(from);
  ASSERT_NE(found, std::string::npos) << from << " in " << text;
  std::ofstream(path, std::ios::binary) << text.replace(found, from.size(), to);
}
std::function<void(const std::string&)> edits(const std::string& from, const std::string& to) {
  return [=](const std::string& path) { edit(path, from, to); };
}
std::function<void(const std::string&)> puts(const std::string& text) {
  return [=](const std::string& path) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
  };
}
void reverse_lines(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.insert(lines.begin(), line);
  std::ofstream out(path);
  for (const std::string& line : lines) out << line << '\n';
}

const Change kChanges[] = {
    {"a prompt", "train.jsonl", "data.train_files", "training problems", "has changed", edits("\"?\"", "\"b\"")},
    {"an answer", "train.jsonl", "data.train_files", "training problems", "has changed", edits("\"a\"", "\"b\"")},
    {"order", "train.jsonl", "data.train_files", "training problems", "has changed", reverse_lines},
    {"second file", "more.jsonl", "data.train_files", "training problems", "has changed", edits("\"a\"", "\"b\"")},
    {"no file", "more.jsonl", "data.train_files", "training problems", "is gone", [](auto& p) { fs::remove(p); }},
    {"validation", "val.jsonl", "data.val_files", "validation problems", "has changed", edits("\"a\"", "\"b\"")},
    {"vocabulary", "model/tokenizer.json", "model.path", "tokenizer", "has changed", edits("\"a\":97", "\"a\":98")},
    {"another tokenizer wins", "model/tokenizer.bin", "model.path", "tokenizer", "has changed", puts("x")},
    {"special tokens", "model/tokenizer_config.json", "model.path", "special tokens", "has changed",
     edits("<|im_end|>", "<|im_start|>")},
    {"no special tokens", "model/tokenizer_config.json", "model.path", "special tokens", "is gone",
     [](auto& p) { fs::remove(p); }},
    {"special tokens by name", "model/special_tokens_map.json", "model.path", "special tokens", "is new", puts("{}")},
    {"chat template", "model/chat_template.jinja", "model.path", "chat template", "is new", puts("{{ messages }}")},
    {"default template", "model/additional_chat_templates/default.jinja", "model.path", "chat template", "is new",
     puts("{{ messages }}")},
    {"EOS", "model/config.json", "model.path", "EOS", "has changed",
     edits("\"eos_token_id\": 2", "\"eos_token_id\": 3")},
    {"theta", "model/config.json", "model.path", "arithmetic", "has changed", edits("10000.0", "500000.0")},
    {"eps", "model/config.json", "model.path", "arithmetic", "has changed", edits("1e-06", "0.01")},
    {"positions", "model/config.json", "model.path", "shape", "has changed", edits(": 160", ": 150")},
    {"generation_config", "model/generation_config.json", "model.path", "EOS of the model", "is new",
     puts("{\"eos_token_id\": [10]}")},
    {"grader", "grade.sh", "data.reward", "a file of the grader", "has changed", edits("% 2", "% 3")},
    {"prefixes", "cache.jsonl", "algorithm.rpo.cache_file", "prefixes of RPO", "has changed", edits("ab", "ba")},
};

TEST_F(ResumeInputs, EveryKindOfChangeIsNoticedAndNamed) {
  make_inputs();
  const Overrides all = keys({"algorithm.rpo.enable=true", "algorithm.rpo.missing=lazy",
                              "algorithm.rpo.cache_file=" + at("in/cache.jsonl"), "trainer.save_freq=1"});
  expect_ok(pare("train", "run", all));
  const std::string metrics = read_text(at("run/metrics.jsonl"));
  fs::rename(at("in"), at("kept"));
  for (const Change& change : kChanges) {
    SCOPED_TRACE(change.what);
    restart("kept", "in");
    const std::string path = at(cat("in/", change.file));
    change.make(path);
    const Outcome o = pare("train", "run", all + Overrides{"--resume", "trainer.total_training_steps=3"});
    const bool lost = std::string(change.what) == "no file";  // and cannot be read, whoever accepts that
    expect_refused(o, {path, "(" + change.key + ": ", change.feeds, change.how, "step-2",
                       change.how == "is gone" ? "=PATH)" : "", lost ? "restore it" : "--accept-changed " + path});
    EXPECT_EQ(o.err.find("--accept-changed") == std::string::npos, lost) << o.err;
  }
  restart("kept", "in");
  expect_refused(pare("train", "run",
                      all + Overrides{"--resume", "trainer.total_training_steps=3",
                                      cat("data.train_files=", at("in/train.jsonl"))}),
                 {at("in/more.jsonl"), "read before"});
  EXPECT_EQ(read_text(at("run/metrics.jsonl")), metrics) << "nothing was done";
  expect_ok(pare("train", "run", all + Overrides{"--resume", "trainer.total_training_steps=3"}));
}

// The log of the run and its later checkpoints say so; only the files that are named may differ.
TEST_F(ResumeInputs, AcceptedChangesAreWrittenDown) {
  make_inputs();
  expect_ok(pare("train", "run", keys()));
  edit(at("in/val.jsonl"), "\"a\"", "\"b\"");
  edit(at("in/model/config.json"), "10000.0", "500000.0");
  const Overrides more = keys({"--resume", "trainer.total_training_steps=4", "trainer.save_freq=2"});
  expect_refused(pare("train", "run", more), {at("in/val.jsonl"), at("in/model/config.json"), "restore them",
                                              "--accept-changed " + at("in/val.jsonl") + "\n"});
  const Overrides one = {"--accept-changed", at("in/../in/val.jsonl")};
  expect_refused(pare("train", "run", more + one), {at("in/model/config.json"), "restore it"});
  expect_refused(pare("train", "run", more + one + Overrides{"--accept-changed", "nothing"}),
                 {"--accept-changed nothing", "no such file"});
  const Outcome o = pare("train", "run", one + Overrides{"--accept-changed", at("in/model/config.json")} + more);
  expect_ok(o);
  EXPECT_NE(one_line(o.err).find("accepted that these have changed: " + at("in")), std::string::npos) << o.err;
  std::istringstream lines(read_text(at("run/metrics.jsonl")));
  std::string line;
  for (int step = 1; std::getline(lines, line); step++)
    EXPECT_EQ(nlohmann::json::parse(line).value("accepted_changes", ""),
              step == 3 ? cat(at("in/model/config.json"), " (model.path/config.json), ", at("in/val.jsonl"),
                              " (data.val_files[0])")
                        : "");
  const auto accepted = state("run/checkpoints/step-4")["run"]["accepted"];
  ASSERT_EQ(accepted.size(), 2u) << accepted;
  EXPECT_EQ(accepted[1]["path"], at("in/val.jsonl"));
  EXPECT_EQ(accepted[1]["step"], 2);
  EXPECT_EQ(accepted[1]["now"], read_sum(at("in/val.jsonl")).xxh128);
  EXPECT_NE(accepted[1]["before"], accepted[1]["now"]);
  // From then on they are the files of the run.
  expect_ok(pare("train", "run", keys({"--resume", "trainer.total_training_steps=5"})));
  expect_refused(pare("train", "fresh", keys() + one), {"--accept-changed", "--resume"});
}

// Contents count, not places: the run goes on bit by bit.
TEST_F(ResumeInputs, InputsMayMove) {
  make_inputs();
  expect_ok(pare("train", "whole", keys({"trainer.total_training_steps=4"})));
  expect_ok(pare("train", "parts", keys()));
  fs::rename(at("in"), at("moved"));
  const Overrides places = {
      "model.path=" + at("moved/model"), "data.val_files=" + at("moved/val.jsonl"),
      cat("data.train_files=[\"", at("moved/train.jsonl"), "\",\"", at("moved/more.jsonl"), "\"]")};
  const Overrides resume = {"train", at("parts/config.toml"), "--resume", "trainer.total_training_steps=4"};
  fs::create_directories(at("in"));
  fs::copy_file(at("moved/grade.sh"), at("in/grade.sh"));  // a command is no place
  expect_refused(words(resume), {at("in/model/config.json"), "is gone", "model.path=PATH"});
  expect_ok(words(resume + places));
  EXPECT_TRUE(weights("parts") == weights("whole"));
  // --accept-changed takes the present path of a file.
  fs::copy_file(at("moved/val.jsonl"), at("in/val.jsonl"));
  edit(at("in/val.jsonl"), "\"a\"", "\"b\"");
  const Overrides changed =
      resume + places + Overrides{"trainer.total_training_steps=5", "data.val_files=" + at("in/val.jsonl")};
  expect_refused(words(changed), {at("in/val.jsonl"), "has changed"});
  expect_ok(words(changed + Overrides{"--accept-changed", at("in/val.jsonl")}));
}

TEST_F(ResumeInputs, AnOlderCheckpointIsContinuedWithANote) {
  make_inputs();
  expect_ok(pare("train", "run", keys()));
  make_older("run/checkpoints/step-2", {"inputs", "weights", "accepted", "drawn"});
  edit(at("in/train.jsonl"), "\"a\"", "\"b\"");
  const Overrides more = keys({"--resume", "trainer.total_training_steps=3"});
  expect_refused(pare("train", "run", more + Overrides{"data.val_files=" + at("in/more.jsonl")}), {"data.val_files"});
  const Outcome o = pare("train", "run", more);
  expect_ok(o);
  EXPECT_NE(one_line(o.err).find("written by an older program, without hashes"), std::string::npos) << o.err;
  EXPECT_EQ(o.err.find("rollouts.jsonl"), std::string::npos) << o.err;
  EXPECT_FALSE(state("run/checkpoints/step-3")["run"]["inputs"].empty());
}

// A checkpoint knows the arithmetic of its run.  Programs that did not write it down had the first.
TEST_F(ResumeInputs, ACheckpointOfAnotherArithmeticIsRefused) {
  for (const auto& [keys, weights] :
       {std::pair{Overrides{}, "model.path="}, {Overrides{"model.lora.rank=3"}, "model.lora.adapter_path="}}) {
    SCOPED_TRACE(weights);
    fs::remove_all(at("run"));
    expect_ok(pare("train", "run", tiny_run() + keys));
    const std::string checkpoint = at("run/checkpoints/step-4"), state = "run/checkpoints/step-4/state.json";
    const std::string text = read_text(at(state)), line = cat("  \"arithmetic\": ", kArithmetic, ",\n");
    const size_t found = text.find(line);
    ASSERT_NE(found, text.npos) << text;
    const auto files = [&] {
      std::map<std::string, std::string> all;
      for (const auto& e : fs::recursive_directory_iterator(at("run")))
        all[e.path().string()] = e.is_directory() ? "" : read_text(e.path().string());
      return all;
    };
    const Overrides resume = {"train", at("run/config.toml"), "--resume", "trainer.total_training_steps=5"};
    const std::string from = cat("pare train ", at("run/config.toml"), " --from ", checkpoint);
    const std::string next = cat("  \"arithmetic\": ", kArithmetic + 1, ",\n");
    for (const auto& [member, number] : {std::pair{std::string(), 1}, {next, kArithmetic + 1}}) {
      std::string other = text;
      write(state, sealed_again(other.replace(found, line.size(), member)));
      EXPECT_EQ(checkpoint_damage(checkpoint), "");
      const auto before = files();
      expect_refused(words(resume), {cat(checkpoint, " was written by a program with arithmetic ", number,
                                         ", this one has arithmetic ", kArithmetic),
                                     from, weights + checkpoint});
      EXPECT_TRUE(files() == before) << "something was changed";
    }
    // The two ways on.
    std::vector<std::string> shell = {"/bin/sh", "-c",
                                      cat("cd ", at("."), " && ", program_path().parent_path().string(), "/", from)};
    expect_ok(run(shell));
    fs::remove_all(at("new"));
    expect_ok(pare("train", "new", tiny_run() + Overrides{weights + checkpoint}));
    write(state, text);
    expect_ok(words(resume));
  }
}

// The base of adapters and the reference of a KL are read at every start, other weights are in the checkpoint.
TEST_F(ResumeInputs, WeightsThatStillMatterAreCompared) {
  struct Case {
    Overrides keys;
    std::string feeds;  // empty: they do not matter
  };
  for (const Case& c : {Case{{}, ""},
                        {{"actor.use_kl_loss=true"}, "model.path: reference of its KL"},
                        {{"model.lora.rank=2"}, "model.path: base of its adapters"}})
    for (const bool older : {false, true}) {
      SCOPED_TRACE(c.feeds + (older ? ", older" : ""));
      make_inputs();
      fs::remove_all(at("run"));
      expect_ok(pare("train", "run", keys(c.keys)));
      if (older) make_older("run/checkpoints/step-2", {"inputs", "weights"});
      const std::string file = at("in/model/model.safetensors");
      std::fstream(file, std::ios::binary | std::ios::in | std::ios::out).seekp(-3, std::ios::end).put('\1');
      const Overrides more = keys(c.keys + Overrides{"--resume", "trainer.total_training_steps=3"});
      const Outcome o = pare("train", "run", more);
      if (!c.feeds.empty()) {
        expect_refused(o, {at("in/model"), c.feeds.substr(c.feeds.find(' ') + 1)});
        if (!older) {
          expect_refused(o, {at("in/model (") + c.feeds, "--accept-changed " + at("in/model")});
          expect_ok(pare("train", "run", more + Overrides{"--accept-changed", at("in/model")}));
        }
        continue;
      }
      expect_ok(o);
      if (!older) {
        EXPECT_NE(one_line(o.err).find("holds other weights"), std::string::npos) << o.err;
        fs::copy(at("in/model"), at("in/other"));
        std::fstream(at("in/other/model.safetensors"), std::ios::binary | std::ios::in | std::ios::out)
            .seekp(-3, std::ios::end)
            .put('\2');
        expect_refused(pare("train", "run", more + Overrides{"model.path=" + at("in/other")}), {at("in/other")});
      }
    }
}

// Adapters given anew are expected to be used: others than those that the run started from are none of its own.
TEST_F(ResumeInputs, OtherInitialAdaptersAreRefused) {
  const Overrides one = tiny_run() + Overrides{"trainer.total_training_steps=1"};
  expect_ok(pare("train", "lora", one + Overrides{"model.lora.rank=2"}));
  expect_ok(pare("train", "run", one + Overrides{"model.lora.adapter_path=" + at("lora/model")}));
  fs::copy(at("run/model"), at("other"));
  expect_refused(
      pare("train", "run",
           one + Overrides{"model.lora.adapter_path=" + at("other"), "--resume", "trainer.total_training_steps=2"}),
      {at("other"), "model.lora.adapter_path: initial adapters"});
}

// ---- the command of a run

TEST_F(ResumeInputs, ARunKnowsItsCommand) {
  for (const auto& [own, other] : {std::pair{"train", "sft"}, {"sft", "train"}}) {
    SCOPED_TRACE(own);
    const std::string config = at(cat(own, "/config.toml")), checkpoint = cat(own, "/checkpoints/step-4");
    expect_ok(pare(own, own, tiny_run()));
    EXPECT_NE(read_text(config).find(cat("\ncommand = \"", own, "\"\n")), std::string::npos);
    EXPECT_NE(state(checkpoint)["config"].get<std::string>().find(cat("command = \"", own, "\"")), std::string::npos);
    const std::string before = read_text(at(cat(own, "/metrics.jsonl")));
    const auto refused = [&, own = std::string(own), other = std::string(other)] {
      const std::string line = cat("type: pare ", own, " ", config);
      expect_refused(words({other, config, "--resume", "trainer.total_training_steps=5"}),
                     {line + " trainer.total_training_steps=5 --resume", cat("of `pare ", own, "`")});
      expect_refused(words({other, config, "--out", at("new")}),
                     {line + " --out " + at("new"), cat("trainer.command=", other)});
      expect_refused(pare(other, own, tiny_run() + Overrides{"--resume", "trainer.total_training_steps=5"}),
                     {cat(line, " --resume")});
      EXPECT_FALSE(fs::exists(at("new")));
    };
    refused();
    expect_refused(words({other, config, "--resume", cat("trainer.command=", other)}), {cat("pare ", own, " ")});
    // A folder that an older program wrote: its metrics tell.
    std::string text = read_text(config);
    text.erase(text.find("command = "), std::string(cat("command = \"", own, "\"\n")).size());
    write(cat(own, "/config.toml"), text);
    make_older(checkpoint, {});
    refused();
    EXPECT_EQ(read_text(at(cat(own, "/metrics.jsonl"))), before);
    expect_ok(words({own, config, "--resume", "trainer.total_training_steps=5"}));
    EXPECT_NE(read_text(config).find(cat("\ncommand = \"", own, "\"\n")), std::string::npos);
    // The keys can be used by the other command where that is asked for.
    expect_ok(words({other, config, "--out", at("new"), cat("trainer.command=", other)}));
    fs::remove_all(at("new"));
  }
}

// ---- a new run from a checkpoint

const Overrides kQuest = {"distill.enable=true",      "model.lora.rank=3",         "rollout.kv.method=quest",
                          "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=3", "rollout.kv.blocks.dense_layers=0"};

// With the same keys its steps are those that --resume would have made, bit by bit: weights, moments and log-probs.
TEST_F(ResumeInputs, ARunFromACheckpointIsTheRunThatGoesOn) {
  struct Case {
    std::string kind;
    Overrides keys;
    std::string file = "model.safetensors";
  };
  for (const Case& c : {Case{"train", {"actor.ppo_epochs=2", "actor.token_subset=urs"}},
                        {"train", {"actor.optim.moments=bf16", "actor.use_kl_loss=true"}},
                        {"train", {"model.lora.rank=3", "model.lora.alpha=7"}, "adapter_model.safetensors"},
                        {"train", kQuest, "adapter/adapter_model.safetensors"},
                        {"train", {"rollout.val_kwargs.temperature=1", "trainer.test_freq=1"}},
                        {"sft", {"actor.optim.moments=bf16", "model.lora.rank=3"}, "adapter_model.safetensors"},
                        {"sft", {}}}) {
    SCOPED_TRACE(c.kind + testing::PrintToString(c.keys));
    for (const char* run : {"whole", "first", "second"}) fs::remove_all(at(run));
    const Overrides all = tiny_run() + c.keys + Overrides{"trainer.samples_freq=1"};
    const auto steps = [](int n) { return Overrides{cat("trainer.total_training_steps=", n)}; };
    expect_ok(pare(c.kind, "whole", all + steps(9)));
    expect_ok(pare(c.kind, "first", all + steps(4)));
    const Outcome o = pare(c.kind, "second", all + steps(5) + Overrides{"--from", at("first/checkpoints/step-4")});
    expect_ok(o);
    EXPECT_NE(o.out.find("data go on"), std::string::npos) << o.out;
    EXPECT_TRUE(read_text(at("whole/model/" + c.file)) == read_text(at("second/model/" + c.file)));
    EXPECT_FALSE(read_text(at("whole/model/" + c.file)).empty());
    EXPECT_TRUE(read_text(at("whole/checkpoints/step-9/optimizer.safetensors")) ==
                read_text(at("second/checkpoints/step-5/optimizer.safetensors")));
    std::istringstream whole(read_text(at("whole/metrics.jsonl"))), second(read_text(at("second/metrics.jsonl")));
    std::string a, b;
    for (int i = 0; i < 4; i++) std::getline(whole, a);
    for (int step = 1; std::getline(whole, a); step++) {
      ASSERT_TRUE(std::getline(second, b));
      const auto x = nlohmann::json::parse(a), y = nlohmann::json::parse(b);
      EXPECT_EQ(y["training/global_step"], step);
      for (const char* metric : {"certificate", "train/loss", "val-core/jsonl/reward/mean@1", "actor/grad_norm"})
        EXPECT_EQ(x.value(metric, nlohmann::json()), y.value(metric, nlohmann::json())) << metric;
    }
  }
}

// So does a run from a run from a checkpoint: each by itself, and when it is resumed.
TEST_F(ResumeInputs, RunsFromRunsGoOn) {
  const auto steps = [](int n) { return Overrides{cat("trainer.total_training_steps=", n)}; };
  const auto from = [&](const std::string& to, const std::string& run, const std::string& step) {
    return words(
        Overrides{"train", at(run + "/config.toml"), "--out", at(to), "--from", at(run + "/checkpoints/step-" + step)} +
        steps(2));
  };
  expect_ok(pare("train", "whole", tiny_run() + steps(8)));
  expect_ok(pare("train", "first", tiny_run() + steps(3)));
  expect_ok(from("second", "first", "3"));
  fs::remove_all(at("first"));
  expect_ok(words(Overrides{"train", at("second/config.toml"), "--resume"} + steps(3)));
  expect_ok(from("third", "second", "3"));
  EXPECT_TRUE(weights("whole") == weights("third"));
}

// What --resume refuses says the line that does it.
TEST_F(ResumeInputs, TheRefusalOfAChangedKeyNamesTheLine) {
  expect_ok(pare("train", "run", tiny_run()));
  const Outcome o = words({"train", at("run/config.toml"), "--resume", "actor.optim.lr=1e-3", "rollout.n=3",
                           "data.max_response_length=10", "data.answer_key=answer"});
  const std::string line =
      cat("pare train ", at("run/config.toml"),
          " data.max_response_length=10 'data.answer_key=\"answer\"' rollout.n=3 actor.optim.lr=0.001 "
          "--from ",
          at("run/checkpoints/step-4"));
  expect_refused(o, {"other values of data.max_response_length, data.answer_key, rollout.n, actor.optim.lr,", line});
  std::vector<std::string> shell = {"/bin/sh", "-c",
                                    cat("cd ", at("."), " && ", program_path().parent_path().string(), "/", line)};
  expect_ok(run(shell));
  ASSERT_TRUE(fs::exists(at("runs"))) << "a directory of its own";
  const std::string made = fs::directory_iterator(at("runs"))->path().string();
  EXPECT_EQ(read_json_file(made + "/checkpoints/step-4/state.json")["run"]["updates"], 8);
  EXPECT_NE(read_text(made + "/config.toml").find(at("run/checkpoints/step-4")), std::string::npos);
  // Its config.toml is the run: again the same bits.
  expect_ok(words({"train", made + "/config.toml", "--out", at("again")}));
  EXPECT_TRUE(read_text(made + "/model/model.safetensors") == weights("again"));
}

// The largest change of a weight between two folders.
double largest_change(const std::string& before, const std::string& after) {
  const ModelConfig config = load_model_config(after);
  const std::vector<float> a = load_weights(before, config), b = load_weights(after, config);
  double most = 0;
  for (size_t i = 0; i < a.size(); i++) most = std::max(most, std::abs(static_cast<double>(b[i]) - a[i]));
  return most;
}

// The number of updates belongs to the moments.  After an update without a gradient they are 0 and the next one is the
// second: AdamW moves each weight by lr (1 - b1) / (1 - b1^2) / sqrt((1 - b2) / (1 - b2^2)), where a first one moves it
// by lr.
TEST_F(ResumeInputs, MomentsKeepTheirCountOfUpdates) {
  const double lr = 1e-3, b1 = 0.9, b2 = 0.999;
  const Overrides one = {"trainer.total_training_steps=1", cat("actor.optim.lr=", lr),
                         "actor.optim.betas=[0.9, 0.999]"};
  // Rewards that are never given.
  const Overrides never = {cat("data.train_files=", tiny_folder(), "never.jsonl"), "data.train_batch_size=1"};
  expect_ok(pare("train", "zero", tiny_run() + one + never));
  const std::string zero = at("zero/checkpoints/step-1");
  EXPECT_EQ(largest_change(tiny_folder() + "trained", zero), 0);
  ASSERT_EQ(state("zero/checkpoints/step-1")["run"]["updates"], 1);
  expect_ok(pare("train", "first", tiny_run() + one));
  EXPECT_NEAR(largest_change(zero, at("first/checkpoints/step-1")) / lr, 1, 1e-3);
  const Outcome o = pare("train", "second", tiny_run() + one + Overrides{"--from", zero});
  expect_ok(o);
  EXPECT_NE(o.out.find("data from their beginning"), std::string::npos) << o.out;
  EXPECT_NEAR(largest_change(zero, at("second/checkpoints/step-1")) / lr,
              (1 - b1) / (1 - b1 * b1) / std::sqrt((1 - b2) / (1 - b2 * b2)), 1e-3);
}

TEST_F(ResumeInputs, WhatCannotBeStartedFromSaysWhy) {
  expect_ok(pare("train", "run", tiny_run()));
  expect_ok(pare("train", "lora", tiny_run() + Overrides{"model.lora.rank=3"}));
  const std::string run = at("run/checkpoints/step-4"), lora = at("lora/checkpoints/step-4");
  const auto from = [&](const std::string& kind, const std::string& checkpoint, const Overrides& more = {}) {
    return pare(kind, "new", tiny_run() + Overrides{"--from", checkpoint} + more);
  };
  expect_refused(from("train", at("none")), {at("none"), "no checkpoint", "RUN/checkpoints/step-N"});
  expect_refused(from("train", at("run/model")), {at("run/model"), "no checkpoint"});
  expect_refused(from("train", run, {"--resume"}), {"--from", "--resume"});
  expect_refused(from("sft", run), {"`pare train`", "model.path=" + run});
  expect_refused(from("train", lora), {"trains adapters", "a whole model", "model.lora.rank"});
  expect_refused(from("train", run, {"model.lora.rank=3"}), {"trains a whole model", "trains adapters"});
  expect_refused(from("train", lora, kQuest), {"trains adapters", "a model and adapters of its sampler"});
  expect_refused(from("train", lora, {"model.lora.rank=4"}), {"rank 3", "rank 4"});
  expect_refused(from("train", lora, {"model.lora.rank=3", cat("model.path=", tiny_folder(), "random")}),
                 {"another base", "model.path"});
  expect_refused(from("train", run, {"model.path=", cat("model.config=", tiny_folder(), "wide.json")}),
                 {"hidden_size = 16", "24", "model.config"});
  for (const Overrides& how : {Overrides{}, {"--dry-run"}})  // before weights are made
    expect_refused(from("train", run, how + Overrides{"model.path=", "model.config=qwen2.5-7b"}),
                   {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "model.config"});
  fs::resize_file(run + "/optimizer.safetensors", 100);
  expect_refused(from("train", run), {run, "not whole", "optimizer.safetensors has 100 bytes"});
  EXPECT_FALSE(fs::exists(at("new/config.toml")));
}

// Moments may change their type: to f32 without loss.
TEST_F(ResumeInputs, MomentsOfAnotherTypeAreTaken) {
  expect_ok(pare("train", "run", tiny_run() + Overrides{"actor.optim.moments=bf16"}));
  expect_ok(pare("train", "new",
                 tiny_run() + Overrides{"trainer.total_training_steps=1", "actor.optim.lr=0", "--from",
                                        at("run/checkpoints/step-4")}));
  EXPECT_TRUE(read_text(at("new/checkpoints/step-1/model.safetensors")) == weights("run"));
}

}  // namespace
}  // namespace pare::test
