// `pare plan`: shapes by name, what it prints, and what fits.
#include <map>

#include "base/json_file.h"
#include "base/text.h"
#include "data/presets.h"
#include "model/hf/config.h"
#include "run/session.h"
#include "tests/program.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

// As published: parameters, and bytes of keys and values per token in bf16.
const std::map<std::string, std::pair<int64_t, int64_t>> kPublished = {
    {"qwen2.5-0.5b", {494'032'768, 12'288}},
    {"qwen2.5-1.5b", {1'543'714'304, 28'672}},
    {"qwen2.5-3b", {3'085'938'688, 36'864}},
    {"qwen2.5-7b", {7'615'616'512, 57'344}},
    {"deepseek-r1-distill-qwen-1.5b", {1'777'088'000, 28'672}},
    {"deepseek-r1-distill-qwen-7b", {7'615'616'512, 57'344}},
    {"qwen3-0.6b", {596'049'920, 114'688}},
    {"qwen3-1.7b", {1'720'574'976, 114'688}},
    {"qwen3-4b", {4'022'468'096, 147'456}},
    {"qwen3-8b", {8'190'735'360, 147'456}},
    {"llama-3.2-1b", {1'235'814'400, 32'768}},
    {"llama-3.2-3b", {3'212'749'824, 114'688}},
    {"llama-3.1-8b", {8'030'261'248, 131'072}},
    {"tiny-ssa", {126'400, 512}},
};

TEST(Shapes, AreThePublishedOnes) {
  const std::vector<std::string> names = preset_names("json");
  EXPECT_EQ(names.size(), kPublished.size());
  for (const std::string& name : names) {
    ASSERT_TRUE(kPublished.contains(name)) << name;
    const ModelConfig c = read_shape(name);
    const Parameter last = parameters(c).back();
    EXPECT_EQ(last.offset + last.size, kPublished.at(name).first) << name;
    EXPECT_EQ(2 * 2 * c.layers * c.kv_width(), kPublished.at(name).second) << name;
    EXPECT_EQ(c.rope_scaling.has_value(), name.starts_with("llama")) << name;
    EXPECT_EQ(c.rope_theta, name == "tiny-ssa" || name.starts_with("deepseek") ? 1e4
                            : name.starts_with("llama")                        ? 5e5
                                                                               : 1e6)
        << name;
    EXPECT_FALSE(c.eos_ids.empty()) << name;
  }
}

TEST(Shapes, AreFilesOrNames) {
  EXPECT_EQ(read_shape("data/presets/qwen3-8b.json").layers, 36);
  try {
    read_shape("qwen2.5-7B-instruct");
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("a name is qwen2.5-7b"), std::string::npos) << e.what();
  }
  EXPECT_THROW(read_shape("no/such/config.json"), Error);
}

class PlanCommand : public Program {
 protected:
  // Small enough to be planned at once.
  // Lines that were wrapped as one.
  static std::string flat(const std::string& text) {
    std::istringstream words(text);
    std::string all;
    for (std::string word; words >> word;) all += " " + word;
    return all;
  }
  const std::string small_ = " data.train_batch_size=2 rollout.n=2 data.max_response_length=16";
};

// No weights, no tokenizer, no data, no device.
TEST_F(PlanCommand, PlansForMachinesThatAreNotHere) {
  const Outcome o = run("plan gsm8k-qwen2.5-1.5b model.config=qwen2.5-7b --device cuda --memory 141GB" + small_);
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("7.62G parameters"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("bf16 on cuda"), std::string::npos) << o.out;
  EXPECT_NE(flat(o.out).find("gsm8k/train.jsonl"), std::string::npos) << "what is missing\n" << o.out;
  EXPECT_TRUE(o.out.starts_with("fits ")) << o.out;
  const Outcome none = run("plan gsm8k-qwen2.5-1.5b" + small_);
  EXPECT_EQ(none.code, 2);
  EXPECT_NE(none.err.find("model.config"), std::string::npos) << none.err;
  EXPECT_NE(none.err.find("qwen2.5-1.5b"), std::string::npos) << none.err;
}

std::string after(const std::string& text, const std::string& mark) {
  const size_t at = text.find(mark);
  return at == std::string::npos ? "" : text.substr(at + mark.size());
}

// The configuration of an SFT run has a rehearsal of its own; its keys can be planned for GRPO all the same.
TEST_F(PlanCommand, NamesTheRehearsalOfSft) {
  const std::string keys = "model.config=tiny-ssa data.max_prompt_length=64" + small_;
  const Outcome o = run("plan trainer.command=sft " + keys);
  EXPECT_EQ(o.code, 2);
  EXPECT_NE(flat(o.err).find("pare sft trainer.command=sft model.config=tiny-ssa data.max_prompt_length=64" + small_ +
                             " --dry-run"),
            std::string::npos)
      << o.err;
  EXPECT_EQ(run("plan trainer.command=sft trainer.command=train " + keys).code, 0);
}

// The total of the second column is what is compared, to the byte.
TEST_F(PlanCommand, SaysByHowMuchItFits) {
  const std::string plan = "plan model.config=qwen3-0.6b --device cuda" + small_;
  const auto exact = [&](const std::string& out, const std::string& mark) {
    return std::stoull(after(after(out, mark), "("));
  };
  const Outcome fits = run(plan + " --memory 80GB"), tight = run(plan + " --memory 4GB");
  ASSERT_EQ(fits.code, 0) << fits.err;
  const std::string total = after(fits.out, "\n  total");
  size_t peak = 0, most = 0;
  std::istringstream row(total);
  std::string skipped;
  row >> peak >> skipped >> most;
  EXPECT_GT(peak, size_t{596'049'920} * 16);
  EXPECT_GE(most, peak);
  EXPECT_EQ(exact(flat(fits.out), "--memory:"), 80'000'000'000 - most) << fits.out;
  EXPECT_EQ(exact(flat(tight.out), "a step can"), most - 4'000'000'000) << tight.out;
  EXPECT_EQ(run(plan + " --memory " + std::to_string(most)).out.find("too much"), std::string::npos);
  EXPECT_NE(run(plan + " --memory " + std::to_string(most - 1)).out.find("too much"), std::string::npos);
  for (const char* size : {"80 apples", "GB", "-3GB", "0", "1e40", "nan", "0x10GB"}) {
    std::vector<std::string> arguments = {program_path().string(), "plan", "model.config=tiny-ssa",
                                          "data.max_response_length=16", "data.max_prompt_length=64"};
    arguments.push_back(std::string("--memory=") + size);
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, 2) << size;
    EXPECT_NE(o.err.find("141GB"), std::string::npos) << o.err;
  }
  const std::string tiny = "plan model.config=tiny-ssa data.max_prompt_length=64" + small_;
  EXPECT_NE(flat(run(tiny).out).find("of this machine"), std::string::npos);
  EXPECT_NE(flat(run(tiny + " --device cuda").out).find("--memory 80GB says whether"), std::string::npos);
}

// The verdict comes first and is the exit code, in JSON too; each setting that it names fits.
TEST_F(PlanCommand, WhatDoesNotFitEndsWithThree) {
  const std::string plan = "plan quickstart model.path= model.config=tiny-ssa";
  EXPECT_TRUE(run(plan + " --memory 24MB").out.starts_with("fits "));
  const std::string tight = plan + " --memory 22MB";
  const Outcome o = run(tight);
  EXPECT_EQ(o.code, 3);
  EXPECT_TRUE(o.out.starts_with("too much ")) << o.out;
  EXPECT_NE(o.err.find("does not fit the 22.0MB (22000000) of --memory"), std::string::npos) << o.err;
  EXPECT_EQ(run(tight + " --json").code, 3);
  const std::string text = flat(o.out), list = after(text, "with one of these it fits: ");
  std::istringstream settings(list.substr(0, list.find(" model ")));
  int named = 0;
  for (std::string setting; settings >> setting; named++) {
    if (setting.back() == ',') setting.pop_back();
    EXPECT_EQ(run(tight + " " + setting).code, 0) << setting;
    // The largest value: one more does not fit.
    const size_t equals = setting.find('=');
    const int64_t n = std::atoll(setting.c_str() + equals + 1);
    EXPECT_EQ(run(cat(tight, " ", setting.substr(0, equals + 1), n + 1)).code, 3) << setting;
  }
  EXPECT_GE(named, 2) << o.out;
}

// Under a limit of the shell every command ends with 3 and says what it needs and what there is.
TEST_F(PlanCommand, CommandsUnderALimitSayWhatDoesNotFit) {
#if !defined(__SANITIZE_ADDRESS__)
  const std::string model = at("model");
  write("ids.jsonl", "{\"ids\": [1, 2, 3, 4]}\n");
  write("rows.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n");
  const std::string big =
      " data.max_prompt_length=64 data.max_response_length=140 rollout.max_num_seqs=4000 "
      "rollout.max_num_batched_tokens=20000 actor.ppo_max_token_len=40000";
  for (const std::string& words :
       {"train grpo model.config=tiny-ssa" + big, "sft quickstart-sft actor.ppo_max_token_len=400000" + big,
        "eval grpo model.config=tiny-ssa" + big}) {
    const int code = std::system(cat("cd ", root_.string(), " && ulimit -v 700000 && ", program_path().string(), " ",
                                     words, " trainer.threads=1 > ", at("out"), " 2> ", at("err"))
                                     .c_str());
    const std::string err = read_text(at("err"));
    EXPECT_EQ(WEXITSTATUS(code), 3) << words << err << read_text(at("out"));
    EXPECT_NE(err.find("does not fit: "), std::string::npos) << err;
    EXPECT_NE(err.find("fits: "), std::string::npos) << err;
    EXPECT_EQ(err.find("arena"), std::string::npos) << err;
  }
#endif
}

TEST_F(PlanCommand, FitsEightyColumns) {
  for (const char* method : {"grpo", "sparse-rl rollout.kv.method=rkv rollout.check_exact=false", "nat-rpc",
                             "grpo trainer.n_gpus_per_node=2 trainer.nnodes=2 learner.shards=4 --machine h200"}) {
    const Outcome o = run(std::string("plan ") + method +
                          " model.config=llama-3.1-8b --device cuda --memory 141GB data.train_batch_size=64"
                          " rollout.n=16 data.max_prompt_length=100 data.max_response_length=40");
    ASSERT_TRUE(o.code == 0 || o.code == 3) << o.err;
    std::istringstream lines(o.out + o.err);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(display_width(line), 80u) << line;
  }
}

}  // namespace
}  // namespace pare::test
