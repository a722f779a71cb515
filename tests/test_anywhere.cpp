// The program is one file that works in any directory, and says what it is.
#include <regex>

#include "base/error.h"
#include "data/jsonl.h"
#include "tests/program.h"
#include "tests/tiny.h"
#include "tests/tiny_tokenizer.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class Anywhere : public Program {
 protected:
  Outcome shell(const std::string& line) {
    std::vector<std::string> arguments = {"/bin/sh", "-c", line};
    return run(arguments);
  }
  // In a directory where there is nothing of the repository.
  Outcome pare(const std::string& words) {
    return shell(cat("cd '", at(""), "' && '", program_path().string(), "' ", words));
  }
};

TEST_F(Anywhere, PresetsShapesAndProblemsAreInTheProgram) {
  const std::string small =
      " data.train_batch_size=2 data.val_rows=8 trainer.total_training_steps=1 trainer.save_freq=0";
  Outcome o = pare("sft quickstart-sft --out runs/quickstart-sft" + small);
  EXPECT_EQ(o.code, 0) << o.err;
  o = pare("train quickstart nat-urs rollout.n=2" + small);
  EXPECT_EQ(o.code, 0) << o.err;
  // A directory of its own each, also within one second.
  EXPECT_EQ(pare("train quickstart nat-urs rollout.n=2" + small).code, 0);
  int runs = 0;
  for (const auto& entry : fs::directory_iterator(at("runs")))
    runs += entry.path().filename().string().starts_with("quickstart-nat-urs-2");
  EXPECT_EQ(runs, 2);
  ModelConfig config = tiny_config("qwen3", true);
  config.vocab = 260;
  config.eos_ids = {257};
  config.max_position = 512;
  save_weights(at("model"), config, tiny_parameters(config, 5), DType::f32);
  write("model/tokenizer.json", tokenizer_json({{" ", "a"}}, {"<|im_start|>", "<|im_end|>"}).dump());
  o = pare(
      "train stories model.path=model data.max_prompt_length=400 rollout.n=2 trainer.test_freq=0 "
      "trainer.val_before_train=false" +
      small);
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(JsonlTask({"stories"}, "contains").size(), JsonlTask({"data/presets/stories.jsonl"}, "contains").size());
}

// A name that the program has means its own; a path means a file.
TEST_F(Anywhere, NoFileTakesThePlaceOfWhatIsInTheProgram) {
  const Outcome alone = pare("sft quickstart-sft --dry-run");
  EXPECT_EQ(alone.code, 0) << alone.err;
  for (const char* name : {"quickstart-sft", "data/presets/quickstart-sft.toml", "tiny-ssa", "tiny-ssa.json",
                           "data/presets/tiny-ssa.json"})
    write(name, "something else");
  fs::create_directories(at("stories"));
  EXPECT_EQ(pare("sft quickstart-sft --dry-run").out, alone.out);
  for (const char* file : {"./quickstart-sft", "data/presets/quickstart-sft.toml"}) {
    const Outcome o = pare(cat("sft ", file, " --dry-run"));
    EXPECT_EQ(o.code, static_cast<int>(Exit::usage));
    EXPECT_NE(o.err.find(cat(file, ":1")), std::string::npos) << o.err;
  }
  const Outcome shape = pare("sft quickstart-sft model.config=./tiny-ssa --dry-run");
  EXPECT_NE(shape.err.find("./tiny-ssa"), std::string::npos) << shape.err;
}

TEST_F(Anywhere, IsInstalled) {
  const Outcome make =
      shell(cat("make -s install PROGRAM='", program_path().string(), "' DESTDIR='", at("tree"), "' PREFIX=/opt/pare"));
  ASSERT_EQ(make.code, 0) << make.err;
  const Outcome o = shell(cat("cd / && PATH='", at("tree/opt/pare/bin"), "' && pare --version"));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_TRUE(std::regex_match(o.out, std::regex("pare         (unknown|[0-9a-f]{12}(-dirty)?)\n"
                                                 "compiler     (g|clang)\\+\\+ [0-9]+\\.[^\n]*\n"
                                                 "instructions (avx512|avx2|neon|generic)\n"
                                                 "devices      cpu( cuda)?( emu)?\n")))
      << o.out;
}

}  // namespace
}  // namespace pare::test
