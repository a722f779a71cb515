// `--dry-run` finds what a run would find, and leaves nothing behind.
#include "base/error.h"
#include "run/config.h"
#include "run/plan.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class DryRun : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }
  Outcome pare(const std::string& kind, const Overrides& more) {
    std::vector<std::string> arguments = {program_path().string(), kind, "--out", at("run")};
    for (const std::string& a : tiny_run() + more) arguments.push_back(a);
    return run(arguments);
  }
};

TEST_F(DryRun, PrintsTheResolvedConfigurationAndWritesNothing) {
  for (const char* kind : {"train", "sft"}) {
    const Outcome o = pare(kind, {"--dry-run"});
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.out,
              to_toml(load_config(tiny_run() + Overrides{cat("trainer.default_local_dir=", at("run")),
                                                         "trainer.experiment_name=", cat("trainer.command=", kind)})));
    EXPECT_FALSE(fs::exists(at("run")));
  }
}

TEST_F(DryRun, TheChatFormatIsStatedAtTheStart) {
  const std::string key = "data.chat_template=q:{problem}", says = "in the chat format \"q:{problem}\"";
  EXPECT_NE(pare("sft", {key, "--dry-run"}).err.find("note     prompts are " + says), std::string::npos);
  for (const char* kind : {"train", "sft"}) {
    const Outcome o = pare(kind, {key, "--force"});
    EXPECT_NE((o.out + o.err).find("prompts  " + says), std::string::npos) << o.out << o.err;
  }
}

// What a preset asks for and the data cannot give is said, beside the configuration.
TEST_F(DryRun, SaysWhatOfAPresetIsOff) {
  std::vector<std::string> arguments = {program_path().string(), "train", "quickstart"};
  for (const std::string& a :
       Overrides{cat("model.path=", tiny_folder(), "trained"), cat("data.train_files=", tiny_folder(), "train.jsonl"),
                 "data.reward=starts_with", "data.tokenizer=ssa", "--dry-run"} +
           tiny_sizes)
    arguments.push_back(a);
  const Outcome o = run(arguments);
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.err,
            "note     trainer.test_freq = 40 of the preset quickstart is off: data.val_files is empty\n"
            "note     trainer.val_before_train = true of the preset quickstart is off: data.val_files is empty\n"
            "note     prompts are in the chat format plain\n");
  EXPECT_NE(o.out.find("\ntest_freq = 0\n"), std::string::npos) << o.out;
}

// Whatever is wrong, the run says the same and ends the same.
TEST_F(DryRun, SaysWhatTheRunWouldSay) {
  fs::copy(tiny_folder() + "trained", at("cut"));
  fs::resize_file(at("cut/model.safetensors"), 5000);
  fs::copy(tiny_folder() + "trained", at("shape"));
  fs::copy_file(tiny_folder() + "wide.json", at("shape/config.json"), fs::copy_options::overwrite_existing);
  fs::copy(tiny_folder() + "trained", at("json"));
  write("json/config.json", "{");
  fs::copy(tiny_folder() + "trained", at("empty"));
  fs::remove(at("empty/model.safetensors"));
  write("bad.jsonl", "{\"prompt\": \"p?\", \"answer\": \"a\", \"completion\": \"a\"}\n{]");
  write("long.jsonl", R"({"prompt": "p?", "answer": "a", "completion": "aaaaaaaaaaaaaaaaaaaa"})");
  for (const auto& [kind, key] :
       std::vector<std::pair<std::string, std::string>>{{"train", "model.path=" + at("none")},
                                                        {"train", "model.path=" + at("cut")},
                                                        {"train", "model.path=" + at("shape")},
                                                        {"train", "model.path=" + at("json")},
                                                        {"sft", "model.path=" + at("empty")},
                                                        {"train", "data.train_files=" + at("none.jsonl")},
                                                        {"sft", "data.train_files=" + at("bad.jsonl")},
                                                        {"sft", "data.train_files=" + at("long.jsonl")},
                                                        {"train", "data.val_files=" + at("bad.jsonl")},
                                                        {"train", "data.reward="},
                                                        {"train", "data.tokenizer=" + at("none.bin")},
                                                        {"train", "data.max_prompt_length=3"},
                                                        {"train", "data.max_response_length=150"},
                                                        {"train", "rollout.kv_cache_bytes=3000"},
                                                        {"train", "rollout.n=1000000000"},
                                                        {"train", "rollout.n=1"}}) {
    const Outcome dry = pare(kind, {key, "--dry-run"}), wet = pare(kind, {key});
    EXPECT_NE(dry.code, 0) << key;
    EXPECT_EQ(dry.code, wet.code) << key;
    EXPECT_EQ(dry.err, wet.err) << key;
    EXPECT_EQ(dry.out, "");
    EXPECT_FALSE(fs::exists(at("run")));
  }
  // An existing run is one of these things.
  ASSERT_EQ(pare("train", {}).code, 0);
  EXPECT_EQ(pare("train", {"--dry-run"}).err, pare("train", {}).err);
  EXPECT_EQ(pare("train", {"--dry-run", "--force"}).code, 0);
  EXPECT_EQ(pare("train", {"--dry-run", "--resume"}).code, 0);
  EXPECT_TRUE(fs::exists(at("run/model")));
}

// All arenas of a step together, to the byte.
TEST_F(DryRun, MemoryIsThatOfAStep) {
  const Config config =
      load_config(tiny_run() + Overrides{"model.enable_gradient_checkpointing=false", "actor.logits_chunk=1024"});
  for (const TrainingKind kind : {TrainingKind::grpo, TrainingKind::sft}) {
    const size_t total = plan_step(config, kind).peak();
    check_run(config, kind, table_cpu, total);
    try {
      check_run(config, kind, table_cpu, total - 1);
      FAIL() << "a step of " << total << " bytes does not fit in one less";
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::memory);
      for (const std::string& part :
           {std::string(", 1B (1) more than the "), std::string("activations "), cat(total - 1)})
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  }
}

TEST_F(DryRun, PlansTheWorstStepOfSftToo) {
  const Config config = load_config(tiny_run());
  const Plan plan = plan_step(config, TrainingKind::sft);
  Session session(config);
  make_training(TrainingKind::sft, session)->worst_case_step();
  const auto arenas = session.arenas();
  for (size_t i = 0; i < arenas.size(); i++) EXPECT_EQ(plan.memory[i].peak, arenas[i]->peak()) << arenas[i]->name();
  EXPECT_EQ(plan.ledger.phases, session.ledger.phases);
  EXPECT_GT(plan.ledger.total("learner").flops, 0);
}

}  // namespace
}  // namespace pare::test
