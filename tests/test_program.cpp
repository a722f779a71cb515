// Errors as users see them: one line, the exit code of base/error.h, and nothing half-written.
#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_file.h"
#include "tests/program.h"
#include "tests/tiny.h"
#include "tests/weights.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class WrongInput : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    if (IsSkipped()) return;
    ModelConfig config = tiny_config("qwen3", false);
    config.vocab = 61;  // the tokenizer `ssa` has 48
    config.eos_ids = {2};
    config_ = config;
    save_weights(model_, config, tiny_parameters(config, 5), DType::f32);
    write("rows.jsonl", R"({"prompt": "a4b9;dc-b?d>", "answer": "d3", "completion": "d3"})"
                        "\n");
  }

  // One line that says `parts`, the exit code, nothing on stdout, and no output directory.
  void expect_error(const std::string& words, Exit code, const std::vector<std::string>& parts) {
    const Outcome o = run(words);
    EXPECT_EQ(o.code, static_cast<int>(code)) << words;
    EXPECT_TRUE(o.err.starts_with("pare: ")) << words << "\n" << o.err;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << words << "\n" << o.err;
    EXPECT_LT(o.err.size(), 700u) << o.err;
    for (const char* internal : {"internal error", "[json.", "std::"})
      EXPECT_EQ(o.err.find(internal), std::string::npos) << words << "\n" << o.err;
    for (const std::string& part : parts)
      EXPECT_NE(o.err.find(part), std::string::npos) << words << "\n" << part << " is not in: " << o.err;
    EXPECT_EQ(o.out, "") << words;
    EXPECT_FALSE(fs::exists(run_)) << words;
    fs::remove_all(run_);
  }
  // A run that would take a second, with `words` added.
  std::string command(const std::string& name, const std::string& words) const {
    const bool generated = words.find("data.task=jsonl") == std::string::npos;
    return cat("  ", name, " model.path=", model_, " data.tokenizer=ssa data.max_prompt_length=64 ",
               "data.max_response_length=40 data.train_batch_size=2 rollout.n=3 ",
               generated ? "data.min_statements=2 data.max_statements=3 data.train_rows=8 data.val_rows=4 " : "",
               "trainer.threads=1 trainer.total_training_steps=2 actor.optim.lr=1e-3 trainer.default_local_dir=", run_,
               " ", words);
  }
  std::string train(const std::string& words) const { return command("train", words); }
  std::string sft(const std::string& words) const { return command("sft", words); }
  std::string jsonl(const std::string& file = "rows.jsonl") const {
    return cat("data.task=jsonl data.reward=exact data.train_files=", at(file), " ");
  }
  // A copy of the model with a change.
  std::string changed_model(const std::string& name, const std::function<void(std::vector<float>&)>& change) {
    std::vector<float> weights = tiny_parameters(config_, 5);
    change(weights);
    save_weights(at(name), config_, weights, DType::f32);
    return at(name);
  }

  ModelConfig config_;
  const std::string base_ =
      (fs::path(testing::TempDir()) /
       (std::string("pare_program_") + testing::UnitTest::GetInstance()->current_test_info()->name()))
          .string();
  const std::string model_ = base_ + "/model", run_ = base_ + "/run";
};

TEST_F(WrongInput, TheRunsThatTheOtherTestsSpoilAreGood) {
  for (const std::string& words : {train(""), sft(""), train(jsonl()), sft(jsonl())}) {
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 0) << words << "\n" << o.err;
    EXPECT_EQ(o.err, "");
    EXPECT_EQ(load_weights(run_ + "/model", load_model_config(run_ + "/model")).size(),
              tiny_parameters(config_, 5).size());
    for (const char* name : {"config.toml", "metrics.jsonl", "events.out.tfevents.pare"})
      EXPECT_TRUE(fs::exists(fs::path(run_) / name)) << name;
    fs::remove_all(run_);
  }
}

TEST_F(WrongInput, CommandLine) {
  expect_error("", Exit::usage, {"--help"});
  expect_error("trian", Exit::usage, {"trian", "--help"});
  expect_error("--verbose", Exit::usage, {"--help"});
  expect_error("train", Exit::usage, {"preset"});
  expect_error("logprobs --ids x", Exit::usage, {"--model", "pare logprobs --help"});
  expect_error("logprobs --model x --ids y --nosuch", Exit::usage, {"--nosuch", "pare logprobs --help"});
  for (const char* value : {"0", "-3", "many", "1e300", "nan", "2000000000000"})
    expect_error(cat("logprobs --model x --ids y --max-rows ", value), Exit::usage,
                 {"--max-rows: expected a number from 1 to 1000000000, found ", value});
  for (const char* help : {"--help", "train --help"}) {
    const Outcome o = run(help);
    EXPECT_EQ(o.code, 0);
    EXPECT_EQ(o.err, "");
    EXPECT_NE(o.out.find("train"), std::string::npos);
  }
}

TEST_F(WrongInput, Configuration) {
  expect_error(train("nosuch"), Exit::usage, {"\"nosuch\"", "presets:", "quickstart"});
  expect_error(train("quickstrat"), Exit::usage, {"nearest preset is quickstart"});
  expect_error(train(at("none.toml")), Exit::usage, {at("none.toml"), "no such file"});
  expect_error(train(model_), Exit::usage, {model_, "folder"});
  expect_error(train("trainer.sed=2"), Exit::usage, {"trainer.sed", "nearest is trainer.seed"});
  expect_error(train("lr=2"), Exit::usage, {"nearest is actor.optim.lr"});
  expect_error(train("=2"), Exit::usage, {"group.key=value"});
  expect_error(train("rollout.n=2.5"), Exit::usage, {"rollout.n", "2.5"});
  expect_error(train("actor.optim.lr=nan"), Exit::usage, {"actor.optim.lr", "nan"});
  expect_error(train("trainer.threads=1000000"), Exit::usage, {"trainer.threads"});
  expect_error(train("data.val_min_statements=24"), Exit::usage, {"data.val_min_statements", ">= 0 and <= 23"});
  expect_error(train("rollout.max_num_seqs=5000000000"), Exit::usage, {"rollout.max_num_seqs"});
  expect_error(train(write("bad.toml", "[data]\nrows = 3\n")), Exit::usage, {"bad.toml:2", "data.rows"});
  expect_error(train(write("bad.toml", "[data\nshuffle = true\n")), Exit::usage, {"bad.toml:1"});
  expect_error(train(write("loop.toml", cat("base = \"", at("loop.toml"), "\"\n"))), Exit::usage, {"circle"});
  // contradictions name both sides
  expect_error(train("rollout.top_k=5 algorithm.rpo.enable=true algorithm.rpo.prefix_loss=included"), Exit::usage,
               {"rollout.top_k", "algorithm.rpo.prefix_loss"});
  expect_error(train("rollout.min_p=1.5"), Exit::usage, {"rollout.min_p", ">= 0 and <= 1"});
  expect_error(train("model.config=x.json"), Exit::usage, {"model.path", "model.config"});
  expect_error(train("model.path="), Exit::usage, {"model.path", "model.config"});
  expect_error(train("rollout.n=1"), Exit::usage, {"rollout.n = 1", "adv_estimator"});
  expect_error(train("actor.ppo_mini_batch_size=3"), Exit::usage, {"ppo_mini_batch_size", "train_batch_size = 2"});
  expect_error(train("data.task=ssa data.train_files=x"), Exit::usage, {"data.train_files", "data.task"});
  expect_error(train(jsonl() + "trainer.test_freq=1"), Exit::usage, {"trainer.test_freq", "data.val_files"});
  expect_error(sft(jsonl() + "data.reward= trainer.test_freq=1"), Exit::usage, {"trainer.test_freq", "data.val_files"});
  expect_error(train(jsonl() + "data.reward="), Exit::usage, {"data.reward"});
  expect_error(train(jsonl() + "data.reward=exakt"), Exit::usage, {"exakt", "exact"});
  expect_error("plan " + train("trainer.sed=2").substr(8), Exit::usage, {"nearest is trainer.seed"});
}

// A device that is not there is an error, never another device.
TEST_F(WrongInput, Devices) {
  for (const char* device : {"emu", "cuda"}) {
    const std::vector<std::string> parts = {cat("without the device ", device), cat("`make ", device, "`")};
    expect_error(train(cat("--device ", device)), Exit::usage, parts);
    expect_error(sft(cat("trainer.device=", device, " --dry-run")), Exit::usage, parts);
    expect_error(cat("eval --model ", model_, " data.tokenizer=ssa --device ", device), Exit::usage, parts);
    expect_error(cat("generate --tokenizer ssa --prompt a1; --model ", model_, " --device ", device), Exit::usage,
                 parts);
    expect_error(
        cat("logprobs --model ", model_, " --ids ", write("ids.jsonl", "{\"ids\": [1, 2]}"), " --device ", device),
        Exit::usage, parts);
  }
  // --exact=off is of a device; of which table, its name decides before anything is opened.
  for (const std::string& command :
       {train("--exact=off"), sft("trainer.exact=false --dry-run"), "plan " + train("trainer.exact=false").substr(8),
        cat("eval --model ", model_, " data.tokenizer=ssa --exact=off"),
        cat("generate --tokenizer ssa --prompt a1; --exact=off --model ", model_),
        cat("logprobs --exact=off --model ", model_, " --ids ", write("ids.jsonl", "{\"ids\": [1, 2]}")),
        std::string("bench --exact=off --op linear_fwd")})
    expect_error(command, Exit::usage, {"trainer.exact = false (--exact=off)", "trainer.device=cuda"});
  expect_error(train("--device emu --exact=off"), Exit::usage, {"without the device emu"});
  expect_error(train("--exact=maybe"), Exit::usage, {"--exact", "on or off", "maybe"});
  expect_error(train("trainer.exact=off"), Exit::usage, {"trainer.exact", "off"});
  expect_error(train("--device gpu"), Exit::usage, {"trainer.device", "found gpu", "cpu, cuda, emu"});
  expect_error(cat("generate --model ", model_, " --device gpu"), Exit::usage, {"trainer.device", "gpu"});
  expect_error(train("model.dtype=bf16"), Exit::usage, {"bf16", "model.dtype=f32", "trainer.device"});
  expect_error(cat("generate --tokenizer ssa --prompt a1; --model ", model_, " --dtype bf16"), Exit::usage,
               {"bf16", "f32"});
}

TEST_F(WrongInput, Models) {
  expect_error(train("model.path=" + at("none")), Exit::usage, {at("none")});
  expect_error(train("model.path=" + at("rows.jsonl")), Exit::usage, {at("rows.jsonl")});
  expect_error(train("model.path= model.config=" + at("none.json")), Exit::usage, {at("none.json")});
  expect_error("inspect " + at("none"), Exit::usage, {at("none")});
  expect_error("inspect " + at("."), Exit::usage, {"config.json"});
  const auto reject = [&](const std::string& folder, Exit code, const std::vector<std::string>& parts) {
    expect_error(train("model.path=" + folder), code, parts);
    expect_error(cat("logprobs --model ", folder, " --ids ", write("ids.jsonl", R"({"ids": [1, 2, 3]})")), code, parts);
    expect_error(cat("generate --tokenizer ssa --prompt a1; --model ", folder), code, parts);
  };
  // weights that are not numbers
  for (const float x : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const std::string folder = changed_model("nan", [&](auto& w) { w[w.size() - 1] = x; });
    reject(folder, Exit::usage, {"lm_head.weight", "model.safetensors"});
    fs::remove_all(folder);
  }
  // a truncated file
  const std::string cut = changed_model("cut", [](auto&) {});
  fs::resize_file(cut + "/model.safetensors", fs::file_size(cut + "/model.safetensors") / 2);
  reject(cut, Exit::usage, {"model.safetensors"});
  expect_error("inspect " + cut, Exit::usage, {"model.safetensors"});
  fs::resize_file(cut + "/model.safetensors", 0);
  reject(cut, Exit::usage, {"model.safetensors"});
  fs::remove(cut + "/model.safetensors");
  reject(cut, Exit::usage, {"model.safetensors"});
  // a config that this program would compute wrongly, does not fit the weights, or is none
  const std::string odd = changed_model("odd", [](auto&) {});
  json document = read_json_file(odd + "/config.json");
  const auto with = [&](const char* key, const json& value) {
    json changed = document;
    changed[key] = value;
    write("odd/config.json", changed.dump());
    return odd;
  };
  reject(with("hidden_act", "gelu"), Exit::usage, {"hidden_act", "gelu"});
  reject(with("model_type", "mamba"), Exit::usage, {"mamba"});
  reject(with("num_hidden_layers", 3), Exit::usage, {"model.layers.2."});
  reject(with("vocab_size", 60), Exit::usage, {"[60"});
  reject(with("num_hidden_layers", 1000000000), Exit::usage, {"config.json"});
  write("odd/config.json", "{\"model_type\": ");
  reject(odd, Exit::usage, {"config.json"});
  // a vocabulary smaller than the tokenizer's
  expect_error(train("model.path=tests/golden/qwen2 data.tokenizer=" + at("none")), Exit::usage, {at("none")});
  expect_error(train("model.path=tests/golden/qwen2 data.tokenizer="  // the task's own: 48 tokens fit
                     " data.max_response_length=200"),
               Exit::usage, {"264", "256 positions"});
}

TEST_F(WrongInput, Data) {
  expect_error(train(jsonl("none.jsonl")), Exit::usage, {at("none.jsonl")});
  expect_error(train(jsonl(".")), Exit::usage, {base_});
  const auto reject = [&](const std::string& text, const std::vector<std::string>& parts) {
    write("bad.jsonl", text);
    expect_error(train(jsonl("bad.jsonl")), Exit::usage, parts);
    expect_error(sft(jsonl("bad.jsonl")), Exit::usage, parts);
    expect_error(train(jsonl() + "data.val_files=" + at("bad.jsonl")), Exit::usage, parts);
  };
  const std::string good = read_text(at("rows.jsonl"));
  reject("", {"bad.jsonl", "no rows"});
  reject("\n \n", {"bad.jsonl", "no rows"});
  reject(good + "{\n", {"bad.jsonl:2"});
  reject(good + good + "[1]\n", {"bad.jsonl:3"});
  reject(good + R"({"prompt": "", "answer": "x", "completion": "d3"})", {"bad.jsonl:2", "empty"});
  reject(good + R"({"prompt": "Hello", "answer": "x", "completion": "d3"})", {"bad.jsonl:2", "'H'"});
  reject(good + R"({"prompt_ids": [1, 61], "answer": "x", "completion": "d3"})", {"bad.jsonl:2", "61"});
  reject(good + R"({"prompt_ids": [1, -1], "answer": "x", "completion": "d3"})", {"bad.jsonl:2", "-1"});
  // longer than it may be: found before the first step, wherever the row comes
  const std::string longest(70, 'a');
  reject(good + R"({"prompt": ")" + longest + R"(", "answer": "x", "completion": "d3"})",
         {"bad.jsonl:2", "71 tokens", "data.max_prompt_length is 64"});
  expect_error(train("data.max_prompt_length=20"), Exit::usage, {"data.max_prompt_length is 20"});
  expect_error(train("data.max_prompt_length=140"), Exit::usage, {"180", "160 positions"});
  write("bad.jsonl", good + R"({"prompt": "a", "answer": "x", "completion": ")" + longest + "\"}");
  expect_error(sft(jsonl("bad.jsonl")), Exit::usage, {"bad.jsonl:2", "71 tokens", "data.max_response_length is 40"});
  write("bad.jsonl", good + R"({"prompt": "a", "answer": "x", "completion": "D"})");
  expect_error(sft(jsonl("bad.jsonl")), Exit::usage, {"bad.jsonl:2", "'D'"});
  write("bad.jsonl", good + R"({"prompt": "a", "answer": "x"})");
  expect_error(sft(jsonl("bad.jsonl")), Exit::usage, {"bad.jsonl:2", "completion"});
}

TEST_F(WrongInput, TokenIds) {
  const auto reject = [&](const std::string& text, const std::vector<std::string>& parts) {
    expect_error(cat("logprobs --model ", model_, " --ids ", write("ids.jsonl", text), " --grads ", run_), Exit::usage,
                 parts);
  };
  expect_error(cat("logprobs --model ", model_, " --ids ", at("none")), Exit::usage, {at("none")});
  expect_error(cat("logprobs --model ", model_, " --ids ", at(".")), Exit::usage, {base_});
  reject("", {"ids.jsonl", "no sequences"});
  reject("{\"ids\": [1, 2]}\n{\"ids\": [1, 2}\n", {"ids.jsonl:2"});
  reject("{\"ids\": [1, 2.5]}\n", {"ids.jsonl:1"});
  reject("{\"ids\": [1, -2]}\n", {"ids.jsonl:1"});
  reject("{\"ids\": [1, 18446744073709551615]}\n", {"ids.jsonl:1"});
  reject("[1, 2]\n", {"ids.jsonl:1"});
  reject("\n{\"ids\": [1]}\n", {"ids.jsonl:2", "at least 2"});
  reject("{\"ids\": [1, 2]}\n{\"ids\": [3, 61]}\n", {"ids.jsonl:2", "61"});
  reject(json{{"ids", std::vector<int>(162, 1)}}.dump(), {"ids.jsonl:1", "162", "160 positions"});
  const std::string good = write("ids.jsonl", "{\"ids\": [1, 2]}\n");
  expect_error(cat("logprobs --model ", model_, " --ids ", good, " --grads ", at("none/grads.safetensors")),
               Exit::failed, {at("none/grads.safetensors")});
}

TEST_F(WrongInput, OutputDirectories) {
  // A run is never replaced unasked, whatever is left of it.
  ASSERT_EQ(run(train("")).code, 0);
  write("run/metrics.jsonl", "precious");
  const auto refused = [&](const std::string& words, const std::string& what) {
    const Outcome o = run(words);
    EXPECT_EQ(o.code, static_cast<int>(Exit::usage)) << o.err;
    EXPECT_NE(o.err.find(what), std::string::npos) << o.err;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
  };
  refused(train(""), "--force");
  refused(sft(""), "--force");
  EXPECT_EQ(read_text(run_ + "/metrics.jsonl"), "precious");
  // Nor by a run that then turns out to be wrong.
  refused(train("--force data.max_prompt_length=20"), "data.max_prompt_length");
  EXPECT_EQ(read_text(run_ + "/metrics.jsonl"), "precious");
  EXPECT_EQ(run(train("--force")).code, 0);
  EXPECT_NE(read_text(run_ + "/metrics.jsonl"), "precious");
  fs::remove(run_ + "/metrics.jsonl");
  refused(train(""), "--force");  // the model of a run
  fs::remove_all(run_);

  for (const std::string& path : {at("rows.jsonl"), at("rows.jsonl/run"), std::string("/proc/none/run")})
    expect_error(train("trainer.default_local_dir=" + path), Exit::usage, {path});
  expect_error(train("--resume trainer.default_local_dir="), Exit::usage, {"--resume", "trainer.default_local_dir"});
  expect_error("compare " + at("none"), Exit::usage, {at("none")});
  expect_error("compare " + model_, Exit::usage, {"metrics.jsonl"});
  fs::create_directories(run_);
  const std::string step = "{\"training/global_step\": 1, \"critic/score/mean\": 1}\n";
  write("run/metrics.jsonl", step + "half a li\n" + step);
  refused("compare " + run_, "metrics.jsonl:2");
  write("run/metrics.jsonl", step + "half a li");  // a run that was killed in the middle of a line
  EXPECT_EQ(run("compare " + run_).code, 0);
}

TEST_F(WrongInput, Checkpoints) {
  expect_error(cat("convert --llama2c ", at("none"), " --out ", run_), Exit::usage, {at("none")});
  expect_error(cat("convert --llama2c ", at("rows.jsonl"), " --out ", run_), Exit::usage, {"rows.jsonl"});
  expect_error(cat("convert --llama2c ", model_, "/model.safetensors --out ", run_), Exit::usage, {"llama2.c"});
  const std::string checkpoint = "../shared/data/tiny_models/stories260k/checkpoint_legacy.bin";
  if (!fs::exists(checkpoint)) GTEST_SKIP() << checkpoint << " is not on this machine";
  expect_error(cat("convert --llama2c ", checkpoint, " --out ", model_), Exit::usage, {model_, "exists"});
  expect_error(cat("convert --llama2c ", checkpoint, " --tokenizer ", at("rows.jsonl"), " --out ", run_), Exit::usage,
               {"rows.jsonl"});
  expect_error(cat("convert --llama2c ", checkpoint, " --out /proc/none/model"), Exit::failed, {"/proc/none/model"});
}

TEST_F(WrongInput, TooLittleMemory) {
  for (const char* bytes : {"1", "30000"})
    expect_error(train(cat("rollout.kv_cache_bytes=", bytes)), Exit::memory, {"rollout.kv_cache_bytes", bytes});
  // As `pare plan` says it: how much, of how much, and what fits.
  expect_error(train("rollout.max_num_seqs=90000000 rollout.max_num_batched_tokens=90000000"), Exit::memory,
               {"does not fit: ", "of this machine"});
  expect_error(train("rollout.max_num_seqs=900000 rollout.max_num_batched_tokens=900000"), Exit::memory,
               {"does not fit: ", "of this machine", "with one of these it fits: ", "rollout.max_num_seqs="});
  expect_error(train("rollout.kv_cache_bytes=90000000000000"), Exit::memory,
               {"does not fit: ", "of this machine", "rollout.kv_cache_bytes="});
  expect_error(train("rollout.n=1000000000"), Exit::memory, {"rollout.n"});
  expect_error(train("data.train_batch_size=1000000000000"), Exit::memory, {"data.train_batch_size"});
}

TEST_F(WrongInput, NumbersThatExplode) {
  // The run has begun, so its directory stays; there is no model that never was.
  const Outcome o = run(sft("actor.optim.lr=1e30 trainer.total_training_steps=9"));
  EXPECT_EQ(o.code, static_cast<int>(Exit::non_finite)) << o.err;
  EXPECT_TRUE(o.err.starts_with("pare: ")) << o.err;
  EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
  EXPECT_FALSE(fs::exists(run_ + "/model"));
}

TEST_F(WrongInput, ArgumentsThatAreNotUtf8) {
  for (const std::string& words : {"report " + run_ + " --out " + run_ + "/\xff.html", std::string("plan \xc3"),
                                   std::string("train quickstart trainer.seed=\xff --out x"),
                                   std::string("train quickstart --out \x80"), std::string("\xfe\xff")})
    expect_error(words, Exit::usage, {"bytes that are not UTF-8", "argument "});
}

TEST_F(WrongInput, LongArgumentsAreShortInMessages) {
  const std::string value(100'000, 'x');
  for (const std::string& words :
       {"plan " + value, "plan quickstart trainer.seed=" + value, "plan quickstart " + value + "=1", value,
        "plan quickstart rollout.n=[" + std::string(50'000, ',') + "]"}) {
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 2) << o.err.substr(0, 300);
    EXPECT_TRUE(o.err.starts_with("pare: ")) << o.err.substr(0, 300);
    EXPECT_LT(o.err.size(), 6000u);
    EXPECT_EQ(o.err.find("internal"), std::string::npos);
  }
}

// A signal reaches the program or nothing: with the number 0 it would reach the tests.
TEST_F(WrongInput, SignalsAreForAProgramThatRuns) {
  send(SIGKILL);
  EXPECT_EQ(run("--version").code, 0);
  send(SIGKILL);
  EXPECT_EQ(child_, 0);
}

// Every verdict of the corpus, as a user gets it.
TEST_F(WrongInput, SafetensorsCorpus) {
  const fs::path corpus = "../shared/data/safetensors_corpus";
  if (!fs::exists(corpus)) GTEST_SKIP() << corpus << " is not on this machine";
  for (const json& entry : read_json_file(corpus / "manifest.json")) {
    const std::string file = corpus / entry["file"].get<std::string>();
    if (entry["expect"] == "error") {
      expect_error("inspect " + file, Exit::usage, {file});
      continue;
    }
    const Outcome o = run("inspect " + file);
    if (entry["expect"] == "either" && o.code != 0) continue;
    EXPECT_EQ(o.code, 0) << file << "\n" << o.err;
    EXPECT_EQ(o.err, "");
    if (!entry.contains("tensors")) continue;
    for (const auto& [name, tensor] : entry["tensors"].items()) {
      EXPECT_NE(o.out.find(name), std::string::npos) << o.out;
      EXPECT_NE(o.out.find(tensor[0].get<std::string>()), std::string::npos) << o.out;
      EXPECT_NE(o.out.find(shape_string(tensor[1])), std::string::npos) << o.out;
    }
  }
}

}  // namespace
}  // namespace pare::test
