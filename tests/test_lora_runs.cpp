// Adapters in runs: exact rollouts, plans, checkpoints, and the folders of PEFT.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/hf/peft.h"
#include "run/checkpoint.h"
#include "run/plan.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

const Overrides kLora = {"model.lora.rank=3", "model.lora.alpha=7"};
const Overrides kFew = {"model.lora.rank=18", "model.lora.target_modules=[\"q_proj\", \"v_proj\", \"down_proj\"]"};

class LoraRun : public testing::Test {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }

  static std::string at(const std::string& name) { return tiny_folder() + name; }
  static Config config(const Overrides& more) { return load_config(tiny_run() + more); }
  // An adapter that was trained for two steps, saved as name.
  static std::string adapter(const std::string& name, const Overrides& more) {
    Session session(config(more));
    SftTraining sft(session);
    sft.step();
    sft.step();
    save_model(at(name), session);
    return at(name);
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The promise of list.h holds with adapters that are not 0, on the cpu and in bf16, under prefixes that are shared,
// micro-batches and checkpointing.
TEST_F(LoraRun, LogprobsOfTheSamplerAreTheLearners) {
  for (const Overrides& device : {Overrides{}, Overrides{"trainer.device=emu"}})
    for (const Overrides& more :
         {kLora + Overrides{"actor.ppo_max_token_len=40"},
          kFew + Overrides{"model.enable_gradient_checkpointing=true", "learner.attention=replay",
                           "rollout.kv.method=snapkv", "rollout.kv.evict.budget=6", "rollout.kv.evict.buffer=2",
                           "rollout.kv.window.size=2"}}) {
      const Config c = config(device + more);
      const Table& table = device.empty() ? table_cpu : table_emu;
      Session session(c, table, true, training_limits(c, TrainingKind::grpo, table));
      GrpoTraining trainer(session);
      const std::vector<float> base = session.model->get_parameters(), before = session.adapters->get_parameters();
      for (int i = 0; i < 2; i++) {
        const Metrics m = trainer.step();
        EXPECT_GT(m.get("exact/checked_tokens"), 0);
        EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
        EXPECT_GT(m.get("actor/grad_norm"), 0);
      }
      EXPECT_TRUE(same_bits(session.model->get_parameters(), base));
      EXPECT_FALSE(same_bits(session.adapters->get_parameters(), before));
    }
}

TEST_F(LoraRun, Learns) {
  Session session(config({"model.path=" + at("random"), "model.lora.rank=8", "data.train_batch_size=24",
                          "trainer.total_training_steps=40"}));
  SftTraining sft(session);
  const double first = sft.step().get("train/loss");
  double last = first;
  while (sft.steps() < 40) last = sft.step().get("train/loss");
  EXPECT_LT(last, 0.8 * first);
}

TEST_F(LoraRun, APlanIsTheWorstStepToTheByte) {
  const std::string folder = adapter("planned", kFew);
  for (const Overrides& more :
       {kLora, kFew + Overrides{"actor.ppo_max_token_len=40", "actor.use_kl_loss=true", "actor.kl_loss_type=exact"},
        Overrides{"model.lora.adapter_path=" + folder, "actor.use_kl_loss=true", "actor.optim.moments=bf16"},
        kLora + Overrides{"model.enable_gradient_checkpointing=true", "actor.logits_chunk=11"}}) {
    const Config c = config(more);
    const Plan plan = plan_step(c);
    Session session(c);
    GrpoTraining trainer(session);
    trainer.worst_case_step();
    SCOPED_TRACE(testing::PrintToString(more));
    const auto arenas = session.arenas();
    for (size_t i = 0; i < arenas.size(); i++) EXPECT_EQ(plan.memory[i].peak, arenas[i]->peak()) << arenas[i]->name();
    EXPECT_EQ(plan.ledger.phases, session.ledger.phases);
  }
}

// No second model: the reference is the first one without adapters.
TEST_F(LoraRun, AReferenceTakesNoMemory) {
  const auto weights = [&](const Overrides& more) { return plan_step(config(kLora + more)).most.weights; };
  EXPECT_EQ(weights({"actor.use_kl_loss=true"}), weights({}));
  Session session(config(kLora + Overrides{"actor.use_kl_loss=true"}));
  GrpoTraining trainer(session);
  EXPECT_EQ(trainer.step().get("actor/kl_loss"), 0);
  EXPECT_GT(trainer.step().get("actor/kl_loss"), 0);
}

TEST_F(LoraRun, NAndNStepsAreTwoN) {
  for (const Overrides& more : {kLora, kFew + Overrides{"actor.optim.moments=bf16", "actor.use_kl_loss=true"}}) {
    Session whole(config(more));
    GrpoTraining all(whole);
    Metrics last;
    while (all.steps() < 4) last = all.step();
    {
      Session session(config(more));
      GrpoTraining trainer(session);
      trainer.step();
      trainer.step();
      RunState state;
      state.training = trainer.state();
      save_checkpoint(at("half"), session, trainer, state);
    }
    EXPECT_EQ(checkpoint_damage(at("half")), "");
    EXPECT_TRUE(fs::exists(at("half/adapter_model.safetensors")) && !fs::exists(at("half/model.safetensors")));
    const Config c = config(more + Overrides{"actor.ppo_max_token_len=30"});
    Session session(c);
    GrpoTraining trainer(session);
    load_checkpoint(at("half"), session, trainer);
    trainer.step();
    EXPECT_EQ(trainer.step().text("certificate"), last.text("certificate"));
    EXPECT_TRUE(same_bits(session.adapters->get_parameters(), whole.adapters->get_parameters()));
    Session other(config(more + Overrides{"model.path=" + at("random")}));
    GrpoTraining stranger(other);
    EXPECT_THROW(load_checkpoint(at("half"), other, stranger), Error);
  }
}

std::vector<double> logprobs(Session& s) {
  const std::vector<Group> groups = {{{5, 6, 7}, {{{8, 9, 10, 11}}, {{4, 3}}}}};
  return Learner::logprobs(*s.model, s.activations, groups, 1, {}).logprob;
}

// model/ of a run, read back as an adapter and merged into the model.
TEST_F(LoraRun, FoldersGoRound) {
  for (const Overrides& more : {kLora, kFew, Overrides{"model.lora.rank=4", "model.lora.alpha=4"}}) {
    Session session(config(more));
    GrpoTraining trainer(session);
    trainer.step();
    trainer.step();
    save_model(at("adapter"), session);
    EXPECT_TRUE(fs::exists(at("adapter/tokenizer.ssa")));
    EXPECT_EQ(load_adapter_config(at("adapter")), session.adapters->spec);

    const Overrides path = {"model.lora.adapter_path=" + at("adapter")};
    Session again(config(path), table_cpu, false);
    const std::vector<float> a = session.adapters->get_parameters(), b = again.adapters->get_parameters();
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); i++) EXPECT_NEAR(a[i], b[i], 2e-7 * std::abs(a[i]));
    EXPECT_TRUE(session.adapters->spec.alpha != 4 || same_bits(a, b));

    const ModelConfig& c = session.model_config;
    const std::string base = session.config.model.path;
    save_hf(at("merged"), c, merged_weights(hf_weights(base, c), at("adapter"), c), DType::f32, true);
    Session merged(config({"model.path=" + at("merged")}), table_cpu, false), plain(config({}), table_cpu, false);
    const auto x = logprobs(session), y = logprobs(merged), z = logprobs(plain);
    double moved = 0;
    for (size_t i = 0; i < x.size(); i++) {
      EXPECT_NEAR(x[i], y[i], 1e-4);
      moved = std::max(moved, std::abs(x[i] - z[i]));
    }
    EXPECT_GT(moved, 1e-2);
  }
}

// The KL of a run that goes on from an adapter refers to where it began.
TEST_F(LoraRun, AnAdapterIsTrainedOn) {
  const Config c = config({"model.lora.adapter_path=" + adapter("begun", kLora), "actor.use_kl_loss=true"});
  Session session(c);
  GrpoTraining trainer(session);
  EXPECT_EQ(trainer.step().get("actor/kl_loss"), 0);
  EXPECT_GT(trainer.step().get("actor/kl_loss"), 0);
}

// What PEFT 0.21 writes beside our keys is read; what we do not compute is refused by its name.
TEST_F(LoraRun, SettingsThatChangeTheArithmeticAreErrors) {
  const std::string folder = adapter("settings", kLora);
  const std::string path = folder + "/adapter_config.json";
  std::ifstream in(path);
  const nlohmann::json good = nlohmann::json::parse(in);
  const auto with = [&](const std::string& key, const nlohmann::json& value) {
    nlohmann::json changed = good;
    changed[key] = value;
    std::ofstream(path) << changed;
    try {
      load_adapter_config(folder);
      return std::string();
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  EXPECT_EQ(with("lora_dropout", 0.1), "");
  EXPECT_EQ(with("use_dora", false), "");
  EXPECT_EQ(with("init_lora_weights", "gaussian"), "");
  EXPECT_EQ(with("rank_pattern", nlohmann::json::object()), "");
  EXPECT_EQ(with("modules_to_save", nullptr), "");
  EXPECT_EQ(with("target_modules", {"self_attn.q_proj"}), "");
  for (const auto& [key, value] : std::vector<std::pair<std::string, nlohmann::json>>{{"use_dora", true},
                                                                                      {"use_rslora", true},
                                                                                      {"fan_in_fan_out", true},
                                                                                      {"lora_bias", true},
                                                                                      {"bias", "all"},
                                                                                      {"peft_type", "IA3"},
                                                                                      {"peft_type", nullptr},
                                                                                      {"r", 2.5},
                                                                                      {"modules_to_save", {"lm_head"}},
                                                                                      {"rank_pattern", {{"q_proj", 3}}},
                                                                                      {"layers_to_transform", 1},
                                                                                      {"target_modules", "all-linear"},
                                                                                      {"target_modules", {"lm_head"}},
                                                                                      {"init_lora_weights", "pissa"},
                                                                                      {"r", 0},
                                                                                      {"lora_alpha", "1"},
                                                                                      {"a_setting_of_tomorrow", 1}})
    EXPECT_NE(with(key, value).find(key), std::string::npos) << key << ": " << with(key, value);
  // No value of any key ends in the words of the JSON library.
  for (const auto& [key, was] : good.items())
    for (const nlohmann::json& value :
         {nlohmann::json(), nlohmann::json(true), nlohmann::json(-1), nlohmann::json(1e300), nlohmann::json("x"),
          nlohmann::json::array({nullptr}), nlohmann::json::object()})
      EXPECT_EQ(with(key, value).find("json.exception"), std::string::npos) << key << " = " << value;
}

TEST_F(LoraRun, TensorsMustBeThoseOfTheModel) {
  const std::string folder = adapter("tensors", kLora);
  const auto error = [&](const std::string& of) {
    try {
      adapter_weights(folder, load_model_config(of));
      return std::string();
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  EXPECT_EQ(error(at("trained")), "");
  fs::create_directories(at("wide"));
  fs::copy_file(at("wide.json"), at("wide/config.json"), fs::copy_options::overwrite_existing);
  EXPECT_NE(error(at("wide")).find("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight is [3, 16]"),
            std::string::npos);
  try {
    load_model_config(folder);
    ADD_FAILURE() << "an adapter taken for a model";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("--adapter"), std::string::npos) << e.what();
  }
}

TEST_F(LoraRun, AModelThatIsNotSavedIsRefused) {
  const Overrides random = {"model.path=", "model.config=" + at("config.json")};
  EXPECT_THROW(Session(config(kLora + random)), Error);
  EXPECT_THROW(config(kLora + Overrides{"model.lora.adapter_path=x"}), Error);
  EXPECT_THROW(config({"model.lora.rank=2", "model.lora.target_modules=[]"}), Error);
  EXPECT_THROW(config({"model.lora.target_modules=[\"lm_head\"]"}), Error);
}

}  // namespace
}  // namespace pare::test
