// Certificates name the log-probs of a step, however it was computed, and `pare compare` finds where two runs part.
#include <cmath>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "base/thread_pool.h"
#include "run/certificate.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

TEST(Certificate, DependsOnSequencesAndNotOnTheirOrder) {
  const std::vector<float> x = {-0.25f, -1.5f, -3}, y = {-0.5f}, none;
  const auto of = [](const std::vector<std::pair<uint64_t, std::vector<float>>>& sequences) {
    Certificate c;
    for (const auto& [uid, logprobs] : sequences) c.add(uid, logprobs);
    return c.text();
  };
  const std::string base = of({{7, x}, {9, y}, {11, none}});
  EXPECT_EQ(base.size(), 16u);
  EXPECT_EQ(base.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(base, of({{11, none}, {9, y}, {7, x}}));
  std::vector<float> changed = x;
  changed[1] = std::nextafter(changed[1], 0.0f);
  for (const auto& other :
       {of({{7, changed}, {9, y}, {11, none}}), of({{8, x}, {9, y}, {11, none}}), of({{7, y}, {9, x}, {11, none}}),
        of({{7, x}, {9, y}}), of({{7, {x[1], x[0], x[2]}}, {9, y}}), of({{7, x}, {9, {0.5f}}, {11, none}})})
    EXPECT_NE(base, other);
  EXPECT_EQ(hex16(0x1fULL), "000000000000001f");
}

class Certificates : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() {
    std::filesystem::remove_all(tiny_folder());
    set_threads(0);
  }
  static std::string of(const Overrides& keys, bool sft = false, int steps = 3) {
    Session session(load_config(tiny_run() + keys));
    const auto training = make_training(sft ? TrainingKind::sft : TrainingKind::grpo, session);
    std::string text;
    for (int i = 0; i < steps; i++) text += training->step().text("certificate") + " ";
    return text;
  }
};

TEST_F(Certificates, AreTheSameForEveryWayToComputeAStep) {
  for (const bool sft : {false, true}) {
    const std::string base = of({}, sft);
    for (const Overrides& keys : {Overrides{"rollout.max_num_seqs=3"},
                                  {"rollout.max_num_batched_tokens=17"},
                                  {"rollout.kv_cache_bytes=30000"},
                                  {"trainer.threads=3"},
                                  {"actor.ppo_max_token_len=20"},
                                  {"actor.logits_chunk=5"},
                                  {"model.enable_gradient_checkpointing=true"}})
      EXPECT_EQ(of(keys, sft), base) << keys[0];
    EXPECT_NE(of({"trainer.seed=2"}, sft), base);
  }
  // The first step of another learning rate is the same, the second is not.
  const Overrides other = {"actor.optim.lr=2e-2"};
  EXPECT_EQ(of(other, false, 1), of({}, false, 1));
  EXPECT_NE(of(other, false, 2), of({}, false, 2));
  // Responses that dynamic sampling throws away count.
  EXPECT_NE(of({"rollout.n=2", "algorithm.filter_groups.enable=true"}, false, 1), of({"rollout.n=2"}, false, 1));
}

TEST_F(Certificates, CompareSaysWhereRunsPart) {
  const auto train = [&](const std::string& name, const Overrides& keys, const char* kind = "train") {
    std::vector<std::string> arguments = {program_path().string(), kind, "--out", at(name)};
    for (const std::string& a : tiny_run() + Overrides{"trainer.samples_freq=1"} + keys) arguments.push_back(a);
    const Outcome o = run(arguments);
    EXPECT_EQ(o.code, 0) << o.err;
  };
  const auto expect_last = [&](const std::string& runs, const std::vector<std::string>& parts) {
    const Outcome o = run("compare " + runs);
    EXPECT_EQ(o.code, 0) << o.err;
    std::istringstream lines(o.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u + at("").size()) << line;  // a path
    const std::string end =
        std::regex_replace(o.out.substr(std::min(o.out.size(), o.out.rfind("\n\n"))), std::regex("\n *"), " ");
    for (const std::string& part : parts) EXPECT_NE(end.find(part), std::string::npos) << part << "\nnot in " << end;
  };
  train("a", {});
  train("same", {"rollout.max_num_seqs=3"});
  train("faster", {"actor.optim.lr=2e-2"});
  train("quiet", {"actor.optim.lr=2e-2", "trainer.samples_freq=3"});
  train("seed", {"trainer.seed=2", "data.train_rows=3"});
  train("sft", {}, "sft");
  train("sft2", {"actor.optim.lr=2e-2"}, "sft");
  expect_last(cat(at("a"), " ", at("same"), "/"), {"a and same have the same log-probs, bit for bit, in all 4 steps"});
  expect_last(cat(at("a"), " ", at("same"), " ", at("faster")),
              {"in all 4 steps", "a and faster part at step 2: certificates "});
  expect_last(cat(at("a"), " ", at("quiet")), {"part at step 2", at("quiet"), "trainer.samples_freq=1"});
  expect_last(cat(at("a"), " ", at("seed")), {"part at step 1"});
  expect_last(cat(at("sft"), " ", at("sft2")), {"sft and sft2 part at step 2"});

  // The token: the first one, in the order of the file, at which anything differs.
  std::ifstream x(at("a/rollouts.jsonl")), y(at("faster/rollouts.jsonl"));
  std::string expected;
  for (std::string s, t; expected.empty() && std::getline(x, s) && std::getline(y, t);) {
    const auto a = nlohmann::json::parse(s), b = nlohmann::json::parse(t);
    ASSERT_EQ(a["uid"], b["uid"]);
    ASSERT_EQ(a["ids"].size(), a["logprobs"].size());
    ASSERT_EQ(a["ids"].size(), a["pieces"].size());
    for (size_t i = 0; expected.empty() && i < std::min(a["ids"].size(), b["ids"].size()); i++)
      if (a["logprobs"][i] != b["logprobs"][i] || a["ids"][i] != b["ids"][i]) {
        EXPECT_EQ(a["step"], 2);
        expected = cat("response ", a["uid"].get<std::string>(), " (group ", a["group"], ", member ", a["member"],
                       "), token ", i, ": ", a["pieces"][i], " (id ", a["ids"][i], ", log-prob ", a["logprobs"][i],
                       ") and ", b["pieces"][i], " (id ", b["ids"][i]);
      }
  }
  ASSERT_FALSE(expected.empty());
  expect_last(cat(at("a"), " ", at("faster")), {expected});

  // The same run in another arithmetic, by a program that records it and by one that does not.
  const std::string text = read_text(at("faster/metrics.jsonl")), member = cat(",\"arithmetic\":\"", kArithmetic, '"');
  for (const auto& [other, number] : {std::pair{",\"arithmetic\":\"77\"", 77}, {"", 1}}) {
    write("faster/metrics.jsonl", std::regex_replace(text, std::regex(member), other));
    expect_last(cat(at("a"), " ", at("faster")),
                {"part at step 2", cat("computed with arithmetic ", kArithmetic, " and ", number, ","), expected});
  }
}

// What is written of a response is all there is to know about it.
TEST_F(Certificates, RolloutsHoldTheBitsOfTheCertificate) {
  std::vector<std::string> arguments = {program_path().string(), "train", "--out", at("run")};
  const Overrides shaped = {"trainer.samples_freq=1", "reward_model.overlong_buffer.enable=true",
                            "algorithm.use_kl_in_reward=true", "data.max_response_length=6"};
  for (const std::string& a : tiny_run() + shaped) arguments.push_back(a);
  ASSERT_EQ(run(arguments).code, 0);
  std::vector<Certificate> certificates(4);
  std::ifstream in(at("run/rollouts.jsonl"));
  int64_t lines = 0, cut = 0;
  for (std::string line; std::getline(in, line); lines++) {
    const auto j = nlohmann::ordered_json::parse(line);
    std::string keys;
    for (const auto& [key, value] : j.items()) keys += key + " ";
    EXPECT_EQ(keys,
              "step uid group member prompt response prompt_ids ids pieces logprobs score overlong kl_penalty reward "
              "advantage extracted answer finish ");
    certificates[j["step"].get<size_t>() - 1].add(std::stoull(j["uid"].get<std::string>(), nullptr, 16),
                                                  j["logprobs"].get<std::vector<float>>());
    std::string text;
    for (const auto& piece : j["pieces"]) text += piece.get<std::string>();
    EXPECT_EQ(text, j["response"]);
    EXPECT_EQ(j["reward"].get<double>(),
              j["score"].get<double>() + j["overlong"].get<double>() - 1e-3 * j["kl_penalty"].get<double>());
    EXPECT_EQ(j["finish"], j["ids"].back() == 2 ? "eos" : "length");
    cut += j["finish"] == "length";
  }
  EXPECT_EQ(lines, 64);
  EXPECT_GT(cut, 0);
  std::ifstream metrics(at("run/metrics.jsonl"));
  std::string line;
  for (const Certificate& c : certificates) {
    ASSERT_TRUE(std::getline(metrics, line));
    EXPECT_EQ(nlohmann::json::parse(line)["certificate"], c.text());
  }
}

}  // namespace
}  // namespace pare::test
