// A run's folder holds what anyone needs to compute a step again and to see that it has the same bits; and whatever is
// changed in it afterwards is named as what it is.
#include <nlohmann/json.hpp>
#include <regex>

#include "base/hash.h"
#include "base/thread_pool.h"
#include "cpu/cpu.h"
#include "ops/list.h"
#include "run/certificate.h"
#include "run/record.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

std::vector<ordered_json> lines_of(const std::string& path) {
  std::vector<ordered_json> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(ordered_json::parse(line));
  return lines;
}
std::string text_of(const std::vector<ordered_json>& lines) {
  std::string text;
  for (const ordered_json& line : lines) text += line.dump() + "\n";
  return text;
}

class Audits : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }

  void train(const std::string& dir, const Overrides& keys, const std::string& kind = "train") {
    Overrides all = Overrides{program_path().string(), kind, "--out", at(dir)} + tiny_run() +
                    Overrides{"trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=0"} + keys;
    const Outcome o = run(all);
    ASSERT_EQ(o.code, 0) << o.err;
  }
  Outcome audit(const std::string& dir, const std::string& words) { return run(cat("audit ", at(dir), " ", words)); }

  void expect_same(const std::string& dir, const std::string& words, const Overrides& parts) {
    const Outcome o = audit(dir, words);
    EXPECT_EQ(o.code, 0) << words << ": " << o.err;
    for (const std::string& part : parts) EXPECT_NE(o.out.find(part), std::string::npos) << part << "\nin " << o.out;
  }
  void expect_named(const Outcome& o, const Overrides& parts, int code = 1) {
    EXPECT_EQ(o.code, code) << o.out << o.err;
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    for (const std::string& part : parts) EXPECT_NE(o.err.find(part), std::string::npos) << part << "\nin " << o.err;
  }

  // One bit of the file, at the first place behind `after`, is another one.
  void flip(const std::string& file, const std::string& after, size_t behind = 0) {
    std::string text = read_text(at(file));
    const size_t found = text.find(after);
    ASSERT_NE(found, std::string::npos) << after;
    text[found + after.size() + behind] ^= 1;
    write(file, text);
  }
  // Likewise, at so many bytes before its end.
  void flip_before_end(const std::string& file, size_t bytes) {
    std::string text = read_text(at(file));
    text[text.size() - bytes] ^= 1;
    write(file, text);
  }
  // certificates.jsonl with line `i` changed and every hash from there on computed anew, as by someone who knows how.
  void forge(const std::string& dir, size_t i, const std::function<void(ordered_json&)>& change) {
    auto lines = lines_of(at(dir + "/certificates.jsonl")), metrics = lines_of(at(dir + "/metrics.jsonl"));
    change(lines[i]);
    for (size_t k = i; k < lines.size(); k++) {
      if (k > 0) lines[k]["previous"] = lines[k - 1]["chain"];
      lines[k].erase("chain");
      std::string text = lines[k].dump();
      text.pop_back();
      lines[k]["chain"] = xxh128(text);
      if (k > 0) metrics[k - 1]["chain"] = lines[k]["chain"];
    }
    write(dir + "/certificates.jsonl", text_of(lines));
    write(dir + "/metrics.jsonl", text_of(metrics));
  }
};

// Computed in another way, from a checkpoint and from the start.
TEST_F(Audits, EveryKindOfRunHasTheSameBits) {
  const Overrides replay = {"rollout.kv.method=rkv", "rollout.kv.window.size=2", "rollout.kv.evict.budget=6",
                            "rollout.kv.evict.buffer=4", "learner.attention=replay"};
  struct Case {
    std::string kind;
    Overrides keys;
    std::string counts = "16 responses, ";
  };
  for (const Case& c : std::vector<Case>{
           {"train", {}},
           {"train", {"trainer.test_freq=1", "actor.ppo_mini_batch_size=2", "trainer.samples_freq=1"}},
           {"train", {"model.lora.rank=3", "model.lora.alpha=7", "actor.use_kl_loss=true", "learner.shards=2"}},
           {"train", replay},
           {"train", {"algorithm.rpo.enable=true", "algorithm.rpo.max_cut=5", "trainer.samples_freq=1"}},
           {"train", {"algorithm.filter_groups.enable=true", "rollout.n=2", "trainer.samples_freq=1"}, ""},
           {"train",
            {"model.lora.rank=3", "distill.enable=true", "rollout.kv.method=quest", "rollout.kv.blocks.size=4",
             "rollout.kv.blocks.count=3", "rollout.kv.blocks.dense_layers=0"}},
           {"train", {"actor.optim.moments=bf16", "exact.full=true"}},
           {"sft", {"trainer.test_freq=2"}, "4 completions, "}}) {
    SCOPED_TRACE(c.kind + testing::PrintToString(c.keys));
    fs::remove_all(at("run"));
    ASSERT_NO_FATAL_FAILURE(train("run", c.keys, c.kind));
    const auto before = read_text(at("run/certificates.jsonl"));
    expect_same("run", "--step 1 trainer.threads=2 actor.ppo_max_token_len=50 rollout.max_num_seqs=5",
                {"from     the start\n", "step 1: " + c.counts, "tokens, weights: the same bits\n"});
    expect_same("run", "--step 4 rollout.max_num_batched_tokens=20 rollout.free_cache_engine=false",
                {"from     checkpoints/step-2\n", "step 3: " + c.counts, "step 4: " + c.counts});
    expect_same("run", "--all", {"steps 1 to 4 hold together: "});
    EXPECT_EQ(read_text(at("run/certificates.jsonl")), before) << "an audit writes nothing";
  }
}

// One hash for a run, however it was computed: the chain of its last step.
TEST_F(Audits, TheChainIsOfTheBitsAlone) {
  const auto chain = [&](const std::string& dir) { return lines_of(at(dir + "/metrics.jsonl")).back().at("chain"); };
  train("run", {});
  train("ways", {"trainer.threads=3", "rollout.max_num_seqs=3", "actor.ppo_max_token_len=40", "trainer.save_freq=1",
                 "model.enable_gradient_checkpointing=true", "trainer.samples_freq=1"});
  EXPECT_EQ(chain("run"), chain("ways"));
  const std::string data = write("moved.jsonl", read_text(tiny_folder() + "train.jsonl"));
  train("moved", {"data.train_files=" + data});
  EXPECT_EQ(chain("run"), chain("moved")) << "files are compared by content";
  train("other", {"actor.optim.lr=2e-2"});
  EXPECT_NE(chain("run"), chain("other"));

  // Resumed twice, with more steps than at first.
  train("parts", {"trainer.total_training_steps=1"});
  train("parts", {"--resume", "trainer.total_training_steps=3", "trainer.threads=2"});
  train("parts", {"--resume"});
  EXPECT_EQ(read_text(at("parts/certificates.jsonl")), read_text(at("run/certificates.jsonl")));
  expect_same("parts", "--step 3", {"from     checkpoints/step-2", "step 3: 16 responses"});
}

TEST_F(Audits, AnotherInstructionSetHasTheSameBits) {
  train("run", {});
  const std::string own = cpu_isa();
  for (const char* isa : {"avx2", "avx512", "neon", "generic"}) {
    try {
      set_cpu_isa(isa);
    } catch (const Error&) {
      continue;  // not here
    }
    set_cpu_isa(own.c_str());
    std::vector<std::string> words = {
        "/usr/bin/env", cat("PARE_ISA=", isa), program_path().string(), "audit", at("run"), "--step", "2"};
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 0) << isa << ": " << o.err;
  }
}

// As a fault of a disk, or a hand that does not know of the hashes.
TEST_F(Audits, OneFlippedBitIsNamed) {
  const std::string data = write("rows.jsonl", read_text(tiny_folder() + "train.jsonl"));
  const std::string model = at("start");
  fs::copy(tiny_folder() + "trained", model);
  train("run", {"data.train_files=" + data, "model.path=" + model, "trainer.samples_freq=1"});
  const auto changed = [&](const std::function<void()>& change, const Overrides& parts, bool all = true, int step = 3) {
    fs::remove_all(at("copy"));
    fs::copy(at("run"), at("copy"), fs::copy_options::recursive);
    change();
    expect_named(audit("copy", cat("--step ", step)), parts);
    if (all) expect_named(audit("copy", "--all"), parts);
  };
  changed([&] { flip_before_end("copy/checkpoints/step-2/model.safetensors", 40); },
          {"checkpoints/step-2 is not whole: model.safetensors is damaged"});
  changed([&] { flip("copy/checkpoints/step-2/state.json", "\"updates\": "); },
          {"checkpoints/step-2 is not whole: ", "state.json is damaged"});
  changed([&] { flip("copy/config.toml", "train_batch_size = "); },
          {"config.toml was edited: data.train_batch_size is 5, the run had 4"});
  changed([&] { flip("copy/certificates.jsonl", "\"responses\":[\""); }, {"certificates.jsonl:2 was changed"});
  changed([&] { flip("copy/metrics.jsonl", "\"critic/score/max\":"); },
          {"metrics.jsonl, step 1: critic/score/max is ", ", certificates.jsonl has "});
  changed([&] { flip("copy/metrics.jsonl", "\"chain\":\""); }, {"metrics.jsonl, step 1: chain is "});
  changed([&] { flip("copy/rollouts.jsonl", "\"logprobs\":[", 5); },
          {"rollouts.jsonl, step 1, response ", ": its tokens or log-probs are not those of certificates.jsonl"});
  changed([&] { flip("copy/rollouts.jsonl", "\"score\":"); }, {"rollouts.jsonl, step 1, response ", ": score is "});
  changed(
      [&] {
        auto lines = lines_of(at("copy/rollouts.jsonl"));
        lines[0]["advantage"] = lines[0]["advantage"].get<double>() + 0.25;
        write("copy/rollouts.jsonl", text_of(lines));
      },
      {"step 1, advantages: response ", ": rollouts.jsonl has "}, false, 1);
  changed(
      [&] {
        auto lines = lines_of(at("copy/certificates.jsonl"));
        lines.erase(lines.begin() + 2);
        write("copy/certificates.jsonl", text_of(lines));
      },
      {"certificates.jsonl:3 (step 3) does not continue the line before it (step 1)"});
  fs::remove_all(at("copy"));
  fs::copy(at("run"), at("copy"), fs::copy_options::recursive);
  fs::remove(at("copy/metrics.jsonl"));
  expect_named(audit("copy", "--all"), {"metrics.jsonl has no line of step 1"});
  changed([&] { flip("rows.jsonl", "\"answer\": \""); },
          {data + " (data.train_files: training problems) has changed since step "});
  write("rows.jsonl", read_text(tiny_folder() + "train.jsonl"));
  flip_before_end("start/model.safetensors", 40);
  expect_named(audit("run", "--step 1"), {model, "the weights are not those that the run started from"});
  expect_same("run", "--step 3", {"step 3: 16 responses"});  // a later step does not read them
}

// By someone who computes the hashes anew: then the step itself says what it is not.
TEST_F(Audits, AForgedStepIsNamedByStageAndToken) {
  train("run", {"trainer.samples_freq=2"});
  const auto forged = [&](size_t line, const std::function<void(ordered_json&)>& change, const Overrides& parts) {
    fs::remove_all(at("copy"));
    fs::copy(at("run"), at("copy"), fs::copy_options::recursive);
    forge("copy", line, change);
    expect_named(audit("copy", "--step 3"), parts);
  };
  const auto hash = [](const char* name) { return [=](ordered_json& line) { line[name] = "0123456789abcdef"; }; };
  forged(3, hash("prompts"), {"step 3, prompts: recorded 0123456789abcdef, recomputed "});
  forged(3, [](ordered_json& line) { line["responses"][5] = "0123456789abcdef"; },
         {"step 3, responses: response 5 (group 1, member 1, ", "recorded only as a hash, 0123456789abcdef"});
  forged(3, [](ordered_json& line) { line["scores"][6] = 0.25; },
         {"step 3, scores: response 6 (group 1, member 2, ", "): recorded 0.25, recomputed "});
  forged(3, hash("advantages"), {"step 3, advantages: recorded 0123456789abcdef"});
  forged(3, hash("weights"), {"step 3, weights after the step: recorded 0123456789abcdef"});
  forged(2, hash("weights"), {"step 2, weights after the step: recorded 0123456789abcdef"});

  forged(3, [](ordered_json& line) { line.erase("metrics"); }, {"certificates.jsonl is not what a run writes: "});

  // A metric and a token, each changed wherever they are written.
  fs::remove_all(at("copy"));
  fs::copy(at("run"), at("copy"), fs::copy_options::recursive);
  auto metrics = lines_of(at("copy/metrics.jsonl"));
  metrics[2]["actor/grad_norm"] = 0.5;
  write("copy/metrics.jsonl", text_of(metrics));
  forge("copy", 3, [](ordered_json& line) { line["metrics"]["actor/grad_norm"] = 0.5; });
  expect_named(audit("copy", "--step 3"), {"step 3, update: actor/grad_norm: recorded 0.5, recomputed "});

  fs::remove_all(at("copy"));
  fs::copy(at("run"), at("copy"), fs::copy_options::recursive);
  auto rollouts = lines_of(at("copy/rollouts.jsonl"));
  size_t at_response = 0;
  while (rollouts[at_response]["ids"].size() < 3) at_response++;
  ordered_json& line = rollouts[at_response];
  const int id = line["ids"][2];
  line["ids"][2] = id + 1;
  write("copy/rollouts.jsonl", text_of(rollouts));
  forge("copy", 2, [&](ordered_json& record) {
    record["responses"][at_response] =
        hex16(response_hash(std::stoull(line["uid"].get<std::string>(), nullptr, 16),
                            line["ids"].get<std::vector<int32_t>>(), line["logprobs"].get<std::vector<float>>()));
  });
  expect_named(audit("copy", "--step 2"),
               {cat("step 2, responses: response ", at_response, " (group "),
                cat("token 2: recorded ", id + 1, " (log-prob "), cat(", recomputed ", id, " (log-prob ")});
}

TEST_F(Audits, WhatCannotBeAuditedIsSaid) {
  train("run", {});
  expect_named(run("audit"), {"the run's directory is missing"}, 2);
  expect_named(audit("nothing", "--step 1"), {at("nothing") + " holds no run"}, 2);
  expect_same("run/config.toml", "--step 1", {"step 1: 16 responses"});
  expect_named(audit("run", ""), {"--step N", "--all"}, 2);
  expect_named(audit("run", "--step 2 --all"), {"--step N", "--all"}, 2);
  expect_named(audit("run", "--step 5"), {"has no record of step 5: certificates.jsonl has steps 1 to 4"}, 2);
  expect_named(audit("run", "--step 2 other"), {"other: expected key=value"}, 2);
  expect_named(audit("run", "--step 2 rollout.n=8"), {"rollout.n = 8 changes the bits of the run"}, 2);
  expect_named(audit("run", "--step 2 model.dtype=bf16"), {"bf16"}, 2);
  expect_named(audit("run", "--step 2 --device emu"), {"was computed in f32", "computes in bf16"}, 2);
  forge("run", 0, [](ordered_json& line) { line["arithmetic"] = 77; });
  expect_named(audit("run", "--step 2"), {cat("arithmetic 77, this program has arithmetic ", kArithmetic)}, 2);
  fs::remove(at("run/certificates.jsonl"));
  expect_named(audit("run", "--step 2"), {"certificates.jsonl is not there"}, 2);

  // A run of an older program, or one that lost the file, has a record from the step at which it goes on.
  train("run", {"--resume", "trainer.total_training_steps=6"});
  expect_named(audit("run", "--step 3"), {"has no record of step 3: certificates.jsonl has steps 5 to 6"}, 2);
  expect_same("run", "--step 6", {"from     checkpoints/step-4", "step 6: 16 responses"});
  expect_same("run", "--all", {"steps 5 to 6 hold together: "});
  auto lines = lines_of(at("run/certificates.jsonl"));
  lines.pop_back();
  write("run/certificates.jsonl", text_of(lines));
  train("run", {"--resume", "trainer.total_training_steps=8"});
  expect_same("run", "--all", {"steps 7 to 8 hold together: "});
}

// Data that were accepted as they had become are those of the steps after it.
TEST_F(Audits, AcceptedChangesArePartOfTheRecord) {
  const std::string data = write("rows.jsonl", read_text(tiny_folder() + "train.jsonl")), first = read_text(data);
  const Overrides keys = {"data.train_files=" + data};
  train("run", keys + Overrides{"trainer.total_training_steps=2"});
  flip("rows.jsonl", "\"answer\": \"");
  train("run", keys + Overrides{"--resume", "--accept-changed", data});
  expect_same("run", "--step 4", {"from     checkpoints/step-2", "step 4: 16 responses"});
  expect_same("run", "--all", {"steps 1 to 4 hold together: "});
  expect_named(audit("run", "--step 2"), {data, "has changed since step 2 was computed"});
  fs::remove_all(at("run/checkpoints/step-2"));
  expect_named(audit("run", "--step 3"), {"files that the run reads were changed (--accept-changed) after step 2"}, 2);
  write("rows.jsonl", first);
  expect_same("run", "--step 2", {"from     the start", "step 2: 16 responses"});
}

// A new run from a checkpoint is computed from that checkpoint.
TEST_F(Audits, ARunFromACheckpoint) {
  train("first", {"trainer.total_training_steps=2"});
  train("second", {"--from", at("first/checkpoints/step-2"), "actor.optim.lr=2e-2"});
  expect_same("second", "--step 1", {"from     the start", "step 1: 16 responses"});
  fs::remove_all(at("first"));
  expect_named(audit("second", "--step 1"), {"no checkpoint", at("first/checkpoints/step-2")}, 2);
  expect_same("second", "--step 3", {"from     checkpoints/step-2"});
}

// The table of the page, by its command; `make mpi-test` and `make arm-check` hold the rows of ranks and aarch64.
TEST_F(Audits, TheTableOfOneHash) {
  const std::string page = read_text("src/app/README.md");
  const size_t begin = page.find("    build/pare train quickstart model.path="), end = page.find("--out runs/hash");
  ASSERT_TRUE(begin != page.npos && end != page.npos);
  const std::string command =
      std::regex_replace(page.substr(begin + 15, end - begin - 15), std::regex("[\\\\\\s]+"), " ");
  const auto row = [&](const std::string& beginning) {
    const size_t at = page.find(beginning);
    EXPECT_NE(at, page.npos) << beginning;
    return page.substr(at, page.find('\n', at) - at);
  };
  const auto certificate = [&](const std::string& keys) {
    const Outcome o = run(cat(command, keys, " --force --out ", at("hash")));
    EXPECT_EQ(o.code, 0) << o.err;
    return cat("| `", lines_of(at("hash/metrics.jsonl")).back().at("certificate").get<std::string>(), "` |");
  };
  for (const char* keys :
       {"trainer.threads=1", "trainer.threads=4", "rollout.max_num_seqs=3", "actor.ppo_max_token_len=200",
        "exact.full=true", "model.enable_gradient_checkpointing=true"})
    EXPECT_TRUE(row("| CPU | 1 thread").ends_with(certificate(keys))) << keys;
  EXPECT_TRUE(row("| CPU, `learner.shards=4` |").ends_with(certificate("learner.shards=4")));
  const std::string golden = nlohmann::json::parse(read_text("tests/golden/steps.json")).at("9.0").at("f32");
  EXPECT_TRUE(row("| CUDA, `--device emu` |").ends_with(cat("| `", golden, "` |")));
}

// ---- the hash of weights

TEST(WeightsHash, IsOfValuesAndPlacesAlone) {
  const Config config = load_config({"quickstart-sft", "trainer.threads=1", "data.train_batch_size=2"});
  Session session(config);
  const std::vector<float> weights = session.model->get_parameters();
  uint64_t sum = 0;
  for (size_t i = 0; i < weights.size(); i++) sum += mix64(i << 32 ^ std::bit_cast<uint32_t>(weights[i]));
  EXPECT_EQ(weights_hash(session), sum);
  EXPECT_EQ(sum, session.initial_weights);
  set_threads(3);
  EXPECT_EQ(weights_hash(session), sum);
  set_threads(0);
  std::vector<float> changed = weights;
  changed[1234] = std::nextafter(changed[1234], 1.0f);
  session.model->set_parameters(changed);
  EXPECT_NE(weights_hash(session), sum);
  changed = weights;
  ASSERT_NE(changed[10], changed[11]);
  std::swap(changed[10], changed[11]);
  session.model->set_parameters(changed);
  EXPECT_NE(weights_hash(session), sum);
}

}  // namespace
}  // namespace pare::test
