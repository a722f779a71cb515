// Next-token training as a run: held-out loss, epochs, rows that do not fit, shards.
#include <cmath>
#include <regex>

#include "base/text.h"
#include "run/sft_training.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class Sft : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }

  // Rows of data.train_files and data.val_files alone, no verifier.
  Overrides held_out(const Overrides& more = {}) const {
    return tiny_run() + Overrides{"data.reward=", "trainer.test_freq=2", "trainer.val_before_train=true"} + more;
  }
  static double loss(const Overrides& o) {
    Session session(load_config(o));
    return SftTraining(session).evaluate().get("val/loss");
  }
  static std::string message(const Overrides& o, TrainingKind kind = TrainingKind::sft) {
    try {
      Config config = load_config(o);
      resolve_steps(config, kind);
      Session session(config);
      make_training(kind, session);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
};

// Against the log-probs of whole sequences, one at a time: every token after the first is a loss row there.
TEST_F(Sft, HeldOutLossIsTheMeanOverTheTokensOfCompletions) {
  Session session(load_config(held_out()));
  ASSERT_GT(session.val->size(), 4) << "more than a batch";
  Rng rng(1);
  double sum = 0;
  int64_t tokens = 0;
  for (int64_t row = 0; row < session.val->size(); row++) {
    const Problem p = session.val->problem(row);
    const std::vector<int32_t> prompt = session.encode_prompt(p);
    std::vector<int32_t> rest(prompt.begin() + 1, prompt.end());
    const std::vector<int32_t> completion = session.encode_completion(p, session.val->teach(p, 0, rng));
    rest.insert(rest.end(), completion.begin(), completion.end());
    EXPECT_EQ(completion.back(), session.eos[0]);
    const TokenOuts out =
        Learner::logprobs(*session.model, session.activations, {{{prompt[0]}, {{rest}}}}, 1, session.learner_options());
    for (size_t i = prompt.size() - 1; i < out.logprob.size(); i++) {
      sum -= out.logprob[i];
      tokens++;
    }
  }
  const double expected = sum / static_cast<double>(tokens);
  EXPECT_GT(expected, 0.1);
  EXPECT_EQ(loss(held_out()), expected);
  for (const Overrides& other : {Overrides{"data.train_batch_size=3"},
                                 {"data.train_batch_size=24"},
                                 {"actor.ppo_max_token_len=40"},
                                 {"learner.shards=3"},
                                 {"actor.logits_chunk=16"}})
    EXPECT_EQ(loss(held_out(other)), expected) << other[0];
}

TEST_F(Sft, HeldOutLossIsLoggedAndChoosesTheBest) {
  std::vector<std::string> words = {program_path().string(), "sft", "--out", at("run")};
  for (const std::string& o : held_out({"actor.optim.lr=1e-3"})) words.push_back(o);
  const Outcome o = run(words);
  ASSERT_EQ(o.code, 0) << o.err;
  std::vector<double> losses;
  std::istringstream lines(read_text(at("run/metrics.jsonl")));
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(json.contains("val/loss"), json["training/global_step"].get<int>() % 2 == 0) << line;
    EXPECT_EQ(line.find("val-core"), std::string::npos) << line;
    if (json.contains("val/loss")) losses.push_back(json["val/loss"]);
  }
  ASSERT_EQ(losses.size(), 3u);
  EXPECT_EQ(losses[0], loss(held_out()));
  EXPECT_NE(o.out.find("held-out loss of"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find(format("%.3f", losses[2])), std::string::npos) << o.out;
  // The last checkpoint knows the best: the least loss.
  const auto state = nlohmann::json::parse(read_text(at("run/checkpoints/step-4/state.json")));
  EXPECT_NE(state.dump().find(cat("\"best_score\":", nlohmann::json(-std::min(losses[1], losses[2])).dump())),
            std::string::npos)
      << state.dump();
  EXPECT_NE(message(held_out(), TrainingKind::grpo).find("data.reward is empty"), std::string::npos);
}

// Loss and entropy are those of the model before the step, over the tokens of completions.
TEST_F(Sft, AStepLogsItsLossAndItsEntropy) {
  Session session(load_config(held_out({"data.train_batch_size=24"})));
  std::vector<Group> groups;
  Rng rng(1);
  for (int64_t row = 0; row < 24; row++) {
    const Problem p = session.train->problem(row);
    groups.push_back({session.encode_prompt(p), {{session.encode_completion(p, session.train->teach(p, 0, rng))}}});
  }
  SftTraining sft(session);
  const TokenOuts out = Learner::logprobs(*session.model, session.activations, groups, 1, session.learner_options());
  double loss = 0, entropy = 0;
  for (size_t r = 0; r < out.logprob.size(); r++) {
    loss -= out.logprob[r];
    entropy += out.entropy[r];
  }
  const auto tokens = static_cast<double>(out.logprob.size());
  TokenTerms terms(out.logprob.size());
  std::fill(terms.weight.begin(), terms.weight.end(), 1 / tokens);
  sft.learner().accumulate(groups, terms, {.policy = PolicyLoss::nll});
  double squares = 0;
  for (const double g : sft.learner().gradients()) squares += g * g;
  sft.learner().drop_gradients();
  const Metrics m = sft.step();
  EXPECT_EQ(m.get("tokens/loss"), tokens);
  EXPECT_NEAR(m.get("actor/grad_norm"), std::sqrt(squares), 1e-5);
  EXPECT_NEAR(m.get("train/loss"), loss / tokens, 1e-6);
  EXPECT_NEAR(m.get("actor/entropy"), entropy / tokens, 1e-6);
  EXPECT_GT(entropy / tokens, 0.1);
  sft.evaluate();
  EXPECT_EQ(session.kv.peak(), 0u) << "a held-out loss samples nothing";
}

TEST_F(Sft, EveryShardHasWorkWithoutBalancing) {
  for (const char* balance : {"true", "false"}) {
    Session session(
        load_config(held_out({"learner.shards=2", cat("trainer.balance_batch=", balance), "data.train_batch_size=5"})));
    SftTraining sft(session);
    const Metrics m = sft.step();
    EXPECT_EQ(m.get("shards/idle"), 0) << balance;
    EXPECT_EQ(m.get("shards/groups"), 2.5) << balance;
  }
}

int64_t steps(const Overrides& o, TrainingKind kind) {
  Config config = load_config(o);
  resolve_steps(config, kind);
  return config.trainer.total_training_steps;
}

TEST_F(Sft, EpochsAreStepsAsVerlCountsThem) {
  Overrides all = held_out();
  std::erase_if(all, [](const std::string& o) { return o.starts_with("trainer.total_training_steps"); });
  for (const TrainingKind kind : {TrainingKind::sft, TrainingKind::grpo}) {
    const Overrides run = all + Overrides{"data.reward=starts_with", "trainer.total_epochs=3"};
    EXPECT_EQ(steps(run, kind), 3 * 6) << "24 rows, batches of 4";
    EXPECT_EQ(steps(run + Overrides{"data.train_batch_size=5"}, kind), 3 * 4);
    EXPECT_EQ(steps(run + Overrides{"trainer.total_training_steps=7"}, kind), 7) << "given together the steps count";
  }
  const Overrides epochs = all + Overrides{"trainer.total_epochs=3"};
  EXPECT_NE(message(epochs + Overrides{"data.train_batch_size=25"}).find("less than a batch"), std::string::npos);
  // Rows that are left out are none of the epoch's.
  EXPECT_EQ(
      steps(epochs + Overrides{"data.max_response_length=4", "data.filter_overlong_prompts=true"}, TrainingKind::sft),
      3 * (12 / 4));
  std::vector<std::string> notes;
  load_config(epochs + Overrides{"trainer.total_training_steps=7"}, &notes);
  EXPECT_EQ(notes, std::vector<std::string>{"trainer.total_epochs has no effect: trainer.total_training_steps is 7"});
}

// The steps are part of the resolved configuration, so that a resumed run has the same.
TEST_F(Sft, EpochsAreResolvedIntoTheConfiguration) {
  Overrides all = held_out();
  std::erase_if(all, [](const std::string& o) { return o.starts_with("trainer.total_training_steps"); });
  std::vector<std::string> words = {program_path().string(), "sft", "--out", at("run"), "trainer.total_epochs=1"};
  for (const std::string& o : all) words.push_back(o);
  const Outcome o = run(words);
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("6 steps (1 epoch)"), std::string::npos) << o.out;
  const std::string config = read_text(at("run/config.toml"));
  EXPECT_NE(config.find("\ntotal_training_steps = 6\n"), std::string::npos);
  EXPECT_NE(config.find("\ntotal_epochs = 1\n"), std::string::npos);
  std::vector<std::string> notes;
  EXPECT_EQ(load_config({at("run/config.toml")}, &notes).trainer.total_training_steps, 6);
  EXPECT_TRUE(notes.empty()) << notes[0];
  // One more: the epochs replace the steps of the layer below.
  const Outcome more = run(cat("sft ", at("run/config.toml"), " --resume trainer.total_epochs=2"));
  ASSERT_EQ(more.code, 0) << more.err;
  EXPECT_NE(read_text(at("run/config.toml")).find("\ntotal_training_steps = 12\n"), std::string::npos);
  EXPECT_EQ(load_config({at("run/config.toml"), "trainer.total_training_steps=9"}).trainer.total_epochs, 0);
}

TEST_F(Sft, RowsThatDoNotFitAreErrorsOrLeftOut) {
  // Completions of 5, 4, 2, 9, 7 and 2 tokens, EOS included, four rows each.
  const Overrides tight = held_out({"data.max_response_length=4"});
  const std::string what = message(tight);
  EXPECT_NE(what.find("train.jsonl:1: the completion has 5 tokens, data.max_response_length is 4 (12 of 24 training "
                      "rows are too long); raise it, or leave such rows out with data.filter_overlong_prompts=true"),
            std::string::npos)
      << what;
  const Overrides filtered = tight + Overrides{"data.filter_overlong_prompts=true"};
  Session session(load_config(filtered));
  SftTraining sft(session);
  EXPECT_EQ(session.train->size(), 12);
  EXPECT_EQ(session.left_out, 12);
  Rng rng(1);
  for (int64_t row = 0; row < session.val->size(); row++) {
    const Problem p = session.val->problem(row);
    EXPECT_LE(session.encode_completion(p, session.val->teach(p, 0, rng)).size(), 4u) << "validation " << row;
  }
  ASSERT_FALSE(session.notes.empty());
  EXPECT_TRUE(
      session.notes[0].starts_with("data.filter_overlong_prompts leaves out 12 of 24 training rows; the first:"))
      << session.notes[0];
  EXPECT_NE(message(held_out({"data.max_response_length=1", "data.filter_overlong_prompts=true"}))
                .find("leaves out all 24 training rows"),
            std::string::npos);

  // Prompts, in training and validation, of GRPO too.
  const Overrides prompts = tiny_run() + Overrides{"data.max_prompt_length=4"};
  const std::string long_prompt = message(prompts, TrainingKind::grpo);
  EXPECT_NE(long_prompt.find("data.max_prompt_length is 4 (12 of 24 training rows are too long)"), std::string::npos)
      << long_prompt;
  std::vector<std::string> words = {program_path().string(), "train", "--dry-run", "data.filter_overlong_prompts=true"};
  for (const std::string& o : prompts) words.push_back(o);
  const Outcome o = run(words);
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.err.find("leaves out 12 of 24 training rows"), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("validation rows"), std::string::npos) << o.err;
  const std::string cached =
      message(prompts + Overrides{"data.filter_overlong_prompts=true", "algorithm.rpo.enable=true",
                                  cat("algorithm.rpo.cache_file=", tiny_folder(), "cache.jsonl")},
              TrainingKind::grpo);
  EXPECT_NE(cached.find("algorithm.rpo.cache_file"), std::string::npos) << cached;
}

// Problems that the program makes are no rows that could be left out.
TEST_F(Sft, APromptOfTheTaskSsaThatDoesNotFitIsAnError) {
  for (const char* filter : {"false", "true"}) {
    const Overrides keys = {"model.config=tiny-ssa", "data.max_prompt_length=5", "data.max_response_length=64",
                            cat("data.filter_overlong_prompts=", filter)};
    for (const TrainingKind kind : {TrainingKind::sft, TrainingKind::grpo}) {
      const std::string text = message(keys, kind);
      EXPECT_TRUE(std::regex_match(text, std::regex("the prompt has [0-9]+ tokens, data.max_prompt_length is 5")))
          << text;
    }
  }
}

// Turns are rendered in the model's format; what is learnt is what the format writes after the prompt.
TEST_F(Sft, ConversationsAreRenderedInTheModelsFormat) {
  const std::string rows =
      write("rows.jsonl",
            R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
)" + std::string(R"({"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})"));
  std::string one_line = read_text(rows);
  one_line.erase(one_line.find('\n'), 1);
  write("rows.jsonl", one_line + "\n");
  const auto texts = [&](const Overrides& more) {
    Session session(
        load_config(Overrides{cat("model.config=", tiny_folder(), "bytes.json"), "model.init=fan_in", "data.task=jsonl",
                              cat("data.train_files=", rows), cat("data.tokenizer=", tiny_folder(), "tokenizer.json"),
                              "data.max_prompt_length=120", "data.max_response_length=40", "data.train_batch_size=1"} +
                    more));
    const Problem p = session.train->problem(0);
    const std::vector<int32_t> prompt = session.encode_prompt(p), completion = session.encode_completion(p, "");
    EXPECT_EQ(completion.back(), session.eos[0]);
    return session.tokenizer->decode(prompt) + "|" +
           session.tokenizer->decode(std::vector<int32_t>(completion.begin(), completion.end() - 1));
  };
  const std::string turns =
      "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n";
  EXPECT_EQ(texts({"data.chat_template=qwen2.5", "data.system_prompt=S"}),
            "<|im_start|>system\nS<|im_end|>\n" + turns + "<|im_start|>assistant\n|d");
}

}  // namespace
}  // namespace pare::test
