// Every configuration key has a row: a run in which changing the key changes a stated number, in a stated way.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "base/json_file.h"
#include "base/thread_pool.h"
#include "run/checkpoint.h"
#include "tests/sealed_state.h"
#include "tests/tiny.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

// ---- numbers of a run ----------------------------------------------------------------------------------------------

struct Outcome {
  double number;
  std::vector<float> parameters = {};  // after the run
};
using Measure = std::function<Outcome(const Overrides&)>;

// A number of a session and its trainer after some steps.
Measure trained(const std::function<double(Session&, GrpoTraining&)>& number, int steps = 1) {
  return [=](const Overrides& o) {
    Session session(load_config(o));
    GrpoTraining trainer(session);
    for (int i = 0; i < steps; i++) trainer.step();
    return Outcome{number(session, trainer), session.model->get_parameters()};
  };
}
// A number of the metrics of step `step`.
Measure metrics(const std::function<double(const Metrics&)>& number, int step = 1) {
  return [=](const Overrides& o) {
    Session session(load_config(o));
    GrpoTraining trainer(session);
    for (int i = 1; i < step; i++) trainer.step();
    const double x = number(trainer.step());
    return Outcome{x, session.model->get_parameters()};
  };
}
Measure metric(const std::string& name, int step = 1) {
  return metrics([=](const Metrics& m) { return m.get(name); }, step);
}
Measure sft_metric(const std::string& name) {
  return [=](const Overrides& o) {
    Session session(load_config(o));
    return Outcome{SftTraining(session).step().get(name)};
  };
}
Measure peak(Arena Session::*arena) {
  return trained([=](Session& s, GrpoTraining&) { return static_cast<double>((s.*arena).peak()); });
}
Measure session_number(const std::function<double(Session&)>& number) {
  return [=](const Overrides& o) {
    Session session(load_config(o));
    return Outcome{number(session)};
  };
}
double distance(const std::vector<float>& x, const std::vector<float>& from) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); i++) sum += (x[i] - from[i]) * static_cast<double>(x[i] - from[i]);
  return std::sqrt(sum);
}
// How far the parameters are from where they started, after two steps.
Outcome movement(const Overrides& o) {
  Session session(load_config(o));
  const std::vector<float> before = session.model->get_parameters();
  GrpoTraining trainer(session);
  trainer.step();
  trainer.step();
  return {distance(session.model->get_parameters(), before)};
}
double parameter_norm(Session& s) {
  const auto p = s.model->get_parameters();
  return distance(p, std::vector<float>(p.size(), 0.0f));
}
// Names the prompts and responses of the last step.
double fingerprint(Session&, GrpoTraining& t) {
  uint64_t h = 0;
  for (const Trajectory& s : t.samples())
    for (const auto* ids : {&s.prompt, &s.tokens})
      for (const int32_t id : *ids) h = mix64(h + static_cast<uint64_t>(id));
  return static_cast<double>(h >> 11);
}
double prompt_fingerprint(const Task& task) {
  uint64_t h = 0;
  for (int64_t i = 0; i < task.size(); i++)
    for (const char c : task.problem(i).prompt) h = mix64(h + static_cast<uint64_t>(c));
  return static_cast<double>(h >> 11);
}
double different_prompts(Session&, GrpoTraining& t) {
  std::set<std::vector<int32_t>> prompts;
  for (const Trajectory& s : t.samples()) prompts.insert(s.prompt);
  return static_cast<double>(prompts.size());
}
Summary val_prompt_lengths(Session& s) {
  Summary lengths;
  for (int64_t i = 0; i < s.val->size(); i++)
    lengths.add(static_cast<double>(s.encode_prompt(s.val->problem(i)).size()));
  return lengths;
}
// Reward of the teacher's responses.
double teacher_score(Session& s) {
  Rng rng(1);
  Summary score;
  for (int64_t i = 0; i < s.train->size(); i++) {
    const Problem p = s.train->problem(i);
    score.add(s.train->reward(p, {s.train->teach(p, 1, rng), true}).score);
  }
  return score.mean();
}
double val_score(Session& s) {
  GrpoTraining trainer(s);
  return trainer.evaluate().get(cat("val-core/jsonl/reward/mean@", s.config.rollout.val_kwargs.n));
}
// A long rollout of 15 prompt tokens and 60 drawn ones, with its log-probs.
Measure rolled_out(const std::function<double(const RolloutStats&, const std::vector<float>&)>& number) {
  return [=](const Overrides& o) {
    Session session(load_config(o + Overrides{"rollout.check_exact=false"}));
    Rollout rollout(*session.model, session.rollout_limits(), session.kv, session.rollout_scratch());
    Rng rng(rng_key(7, RngStream::test, 1));
    const Request request{random_ids(rng, 15, session.model_config.vocab), {1}, 60};
    const std::vector<Completion> done = rollout.generate({request}, {.key = 5, .eos = {}});
    return Outcome{number(rollout.stats(), done[0].logprobs), done[0].logprobs};
  };
}
// 1 if the configuration or the session is refused.
Outcome refused(const Overrides& o) {
  try {
    Session session(load_config(o));
  } catch (const Error&) {
    return {1};
  }
  return {0};
}
// 1 if a step is refused.
Outcome step_fails(const Overrides& o) {
  Session session(load_config(o));
  GrpoTraining trainer(session);
  try {
    trainer.step();
  } catch (const Error&) {
    return {1};
  }
  return {0};
}
// 1 if a NaN in the last norm is found by the op that it passes first, and not only in the norm of the gradient.
Outcome nan_found_early(const Overrides& o) {
  Session session(load_config(o));
  auto p = session.model->get_parameters();
  p.back() = NAN;
  const bool check = std::exchange(session.device.check_nan, false);
  session.model->set_parameters(p);
  session.device.check_nan = check;
  GrpoTraining trainer(session);
  try {
    trainer.step();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::non_finite);
    return {std::string(e.what()).starts_with("rmsnorm_fwd: output") ? 1.0 : 0.0};
  }
  ADD_FAILURE() << "a step with a NaN parameter passed";
  return {NAN};
}
// Steps that a NaN parameter lets pass.
Outcome steps_of_nan(const Overrides& o) {
  Session session(load_config(o));
  auto p = session.model->get_parameters();
  p.back() = NAN;
  session.model->set_parameters(p);
  GrpoTraining trainer(session);
  int steps = 0;
  try {
    for (; steps < 9; steps++) trainer.step();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::non_finite) << e.what();
  }
  return {static_cast<double>(steps)};
}

// Runs the program in the folder of the tiny run.
void run_program(const Overrides& o) {
  const fs::path program = fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "pare";
  for (const char* folder : {"run", "runs", "elsewhere"}) fs::remove_all(tiny_folder() + folder);
  std::string command = "cd '" + tiny_folder() + "' && '" + program.string() + "' train";
  for (const std::string& x : Overrides{cat("trainer.default_local_dir=", tiny_folder(), "run")} + o)
    command += " '" + x + "'";
  EXPECT_EQ(std::system((command + " > log 2>&1").c_str()), 0) << command;
}

// The exit code of a run of which a token differed before it was interrupted: as its state says.
Outcome exit_after_a_mismatch(const Overrides& o) {
  run_program(o + Overrides{"trainer.total_training_steps=1"});
  const std::string state = tiny_folder() + "run/checkpoints/step-1/state.json", all = "\"mismatches\": ";
  std::ifstream in(state);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  const size_t at = text.find(all + "0");
  EXPECT_NE(at, std::string::npos) << text;
  std::ofstream(state) << sealed_again(text.replace(at, all.size() + 1, all + "1"));
  const fs::path program = fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "pare";
  std::string command = program.string() + " train --resume --out " + tiny_folder() + "run";
  for (const std::string& x : o) command += " '" + x + "'";
  return {static_cast<double>(WEXITSTATUS(std::system((command + " >/dev/null 2>&1").c_str())))};
}

// The exit code of a dry run.
Outcome dry_run_code(const Overrides& o) {
  const fs::path program = fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "pare";
  fs::remove_all(tiny_folder() + "run");
  std::string command = program.string() + " train --dry-run --out " + tiny_folder() + "run";
  for (const std::string& x : o) command += " '" + x + "'";
  return {static_cast<double>(WEXITSTATUS(std::system((command + " >/dev/null 2>&1").c_str())))};
}

// Updates that the optimizer has made at the end of a run; start/ is the checkpoint of another one, after two.
Outcome updates(const Overrides& o) {
  run_program(tiny_run() + Overrides{"trainer.total_training_steps=2"});
  fs::remove_all(tiny_folder() + "start");
  fs::rename(tiny_folder() + "run/checkpoints/step-2", tiny_folder() + "start");
  run_program(o);
  return {read_json_file(tiny_folder() + "run/checkpoints/step-4/state.json")["run"]["updates"].get<double>()};
}

// Runs the program and counts the entries of a folder whose names start with `start`.
Measure folders(const std::string& folder, const std::string& start) {
  return [=](const Overrides& o) {
    run_program(o);
    double n = 0;
    for (const auto& e : fs::directory_iterator(tiny_folder() + folder))
      n += e.path().filename().string().starts_with(start);
    return Outcome{n};
  };
}

// Runs the program and weighs the model that it leaves.
Outcome model_bytes(const Overrides& o) {
  run_program(o);
  return {static_cast<double>(fs::file_size(tiny_folder() + "run/model/model.safetensors"))};
}

// Runs the program and counts the lines of a file in its directory that hold `text`; -1: no such file.
Measure lines(const std::string& file, const std::string& text, const std::string& directory = "run") {
  return [=](const Overrides& o) {
    run_program(o);
    std::ifstream in(tiny_folder() + directory + "/" + file);
    if (!in) return Outcome{-1};
    double n = 0;
    for (std::string line; std::getline(in, line);) n += line.find(text) != std::string::npos;
    return Outcome{n};
  };
}

// ---- what must hold between the number before and after ------------------------------------------------------------

struct Relation {
  std::string text;
  std::function<bool(double before, double after)> holds;
};
const Relation rises = {"rises", [](double a, double b) { return b > a; }};
const Relation falls = {"falls", [](double a, double b) { return b < a; }};
const Relation differs = {"differs", [](double a, double b) { return std::isfinite(a) && std::isfinite(b) && a != b; }};
Relation from_to(double from, double to) {
  return {cat("goes from ", from, " to ", to), [=](double a, double b) { return a == from && b == to; }};
}
Relation times(double factor) {
  return {cat("grows by the factor ", factor),
          [=](double a, double b) { return a > 0 && std::abs(b / (a * factor) - 1) < 1e-5; }};
}

struct Row {
  Overrides base;
  Overrides change;  // the key first
  Measure number;
  Relation relation;
  bool same_bits = false;  // of the parameters
};
using Rows = std::map<std::string, Row>;

const Overrides ssa = {"data.task=ssa",    "data.train_files=[]",       "data.val_files=[]",
                       "data.reward=",     "data.max_prompt_length=64", "data.train_rows=12",
                       "data.val_rows=12", "data.min_statements=2"};
const Overrides teacher = ssa + Overrides{"data.max_response_length=80", "data.max_statements=4", "data.train_rows=200",
                                          "data.train_batch_size=32"};

Rows model_and_data_rows() {
  const Overrides random_weights = {"model.path=", cat("model.config=", tiny_folder(), "config.json"),
                                    "model.init=fan_in"};
  const auto size = session_number([](Session& s) { return static_cast<double>(s.model->size()); });
  const auto val_size = session_number([](Session& s) { return static_cast<double>(s.val->size()); });
  const auto train_set = session_number([](Session& s) { return prompt_fingerprint(*s.train); });
  const auto val_set = session_number([](Session& s) { return prompt_fingerprint(*s.val); });
  const auto shortest_val = session_number([](Session& s) { return val_prompt_lengths(s).min(); });
  // A tokenizer with control tokens, which need a larger vocabulary than ssa's.
  const Overrides chat = {"model.path=", cat("model.config=", tiny_folder(), "bytes.json"), "model.init=fan_in",
                          cat("data.tokenizer=", tiny_folder(), "tokenizer.json"), "data.max_prompt_length=140"};
  const auto prompt_tokens =
      session_number([](Session& s) { return static_cast<double>(s.encode_prompt(s.train->problem(0)).size()); });
  return {
      {"model.path", {{}, {"model.path=" + tiny_folder() + "random"}, metric("critic/score/mean"), falls}},
      {"model.config", {random_weights, {"model.config=" + tiny_folder() + "wide.json"}, size, rises}},
      {"model.init", {random_weights, {"model.init=config"}, session_number(parameter_norm), falls}},
      {"model.enable_gradient_checkpointing",
       {{}, {"model.enable_gradient_checkpointing=true"}, peak(&Session::activations), falls, true}},
      {"data.task", {{}, ssa, metric("prompt_length/mean"), rises}},
      {"data.variant", {teacher, {"data.variant=rep"}, sft_metric("tokens/loss"), rises}},
      {"data.train_files",
       {{}, {"data.train_files=" + tiny_folder() + "short.jsonl"}, metric("prompt_length/max"), falls}},
      {"data.val_files", {{}, {"data.val_files=" + tiny_folder() + "never.jsonl"}, session_number(val_score), falls}},
      {"data.train_rows", {ssa, {"data.train_rows=1"}, trained(different_prompts), from_to(4, 1)}},
      {"data.train_seed", {ssa, {"data.train_seed=5"}, train_set, differs}},
      {"data.val_rows", {ssa, {"data.val_rows=7"}, val_size, from_to(12, 7)}},
      {"data.val_seed", {ssa, {"data.val_seed=5"}, val_set, differs}},
      {"data.min_statements", {ssa, {"data.min_statements=8"}, metric("prompt_length/min"), rises}},
      {"data.max_statements", {ssa, {"data.max_statements=2"}, metric("prompt_length/max"), falls}},
      {"data.val_min_statements", {ssa, {"data.val_min_statements=8"}, shortest_val, rises}},
      {"data.noise", {teacher, {"data.noise=0"}, session_number(teacher_score), rises}},
      {"data.noise_ramp", {teacher, {"data.noise_ramp=1"}, sft_metric("train/loss"), differs}},
      {"data.tokenizer",  // puts a space in front of the prompt
       {{}, {"data.tokenizer=" + tiny_folder() + "tokenizer.bin"}, metric("prompt_length/max"), rises}},
      {"data.chat_template", {{}, {"data.chat_template=a{problem}"}, metric("prompt_length/max"), rises}},
      {"data.apply_chat_template_kwargs.enable_thinking",  // "<think>\n\n</think>\n\n" in bytes
       {chat + Overrides{"data.chat_template=qwen3"},
        {"data.apply_chat_template_kwargs.enable_thinking=false"},
        session_number([](Session& s) {
          const auto tokens = s.encode_prompt(s.train->problem(0)).size();
          return static_cast<double>(tokens) - static_cast<double>(s.train->problem(0).prompt.size());
        }),
        from_to(19, 38)}},
      {"data.apply_chat_template_kwargs.date_string",
       {chat + Overrides{"data.chat_template=llama-3"},
        {"data.apply_chat_template_kwargs.date_string=4 May 2025"},
        prompt_tokens,
        falls}},
      {"data.reward", {{}, {"data.reward=exact"}, metric("critic/score/mean"), falls}},
      {"data.reward_timeout",  // of a grader that needs a second to begin
       {{"data.reward=command:sh -c 'sleep 1; while read -r l; do echo \"{\\\"score\\\": 1}\"; done'"},
        {"data.reward_timeout=0.01"},
        step_fails,
        from_to(0, 1)}},
      {"data.prompt_key", {{}, {"data.prompt_key=completion"}, metric("prompt_length/max"), rises}},
      {"data.answer_key", {{}, {"data.answer_key=completion"}, metric("critic/score/mean"), falls}},
      {"data.system_prompt",
       {chat + Overrides{"data.chat_template=qwen3"}, {"data.system_prompt=a"}, prompt_tokens, rises}},
      {"data.filter_overlong_prompts",
       {{"data.max_prompt_length=4"}, {"data.filter_overlong_prompts=true"}, refused, from_to(1, 0)}},
      {"data.train_batch_size", {{}, {"data.train_batch_size=6"}, metric("rollout/groups"), from_to(4, 6)}},
      {"data.max_prompt_length", {{}, {"data.max_prompt_length=4"}, refused, from_to(0, 1)}},
      {"data.max_response_length", {{}, {"data.max_response_length=2"}, metric("response_length/max"), falls}},
      {"data.shuffle", {{}, {"data.shuffle=false"}, trained(fingerprint), differs}},
  };
}

Rows kv_rows() {
  const Measure resident = rolled_out([](const RolloutStats& s, auto&) { return s.resident; });
  const Measure peak_resident = rolled_out([](const RolloutStats& s, auto&) { return s.peak_resident; });
  const Measure read = rolled_out([](const RolloutStats& s, auto&) { return s.read; });
  const Measure compressions =
      rolled_out([](const RolloutStats& s, auto&) { return static_cast<double>(s.compressions); });
  const auto hash = [](const RolloutStats&, const std::vector<float>& lp) {
    uint64_t h = 0;
    for (const float x : lp) h = mix64(h + std::bit_cast<uint32_t>(x));
    return static_cast<double>(h >> 11);
  };
  const Measure logprobs = rolled_out(hash);
  const auto base = [](const std::string& method) {
    return Overrides{"data.max_response_length=60", "rollout.kv.method=" + method, "rollout.kv.evict.budget=12",
                     "rollout.kv.evict.buffer=4",   "rollout.kv.window.size=3",    "rollout.kv.evict.prompt=protect",
                     "rollout.kv.blocks.size=4",    "rollout.kv.blocks.count=5",   "rollout.kv.blocks.dense_layers=0"};
  };
  const Overrides snapkv = base("snapkv"), rkv = base("rkv"), streaming = base("streaming_llm"), quest = base("quest");
  return {
      {"rollout.kv.method", {base("dense"), {"rollout.kv.method=rkv"}, resident, falls}},
      {"rollout.kv.evict.budget",
       {snapkv, {"rollout.kv.evict.budget=20"}, peak_resident, from_to(15 + 12 + 4, 15 + 20 + 4)}},
      {"rollout.kv.evict.buffer",
       {snapkv, {"rollout.kv.evict.buffer=9"}, peak_resident, from_to(15 + 12 + 4, 15 + 12 + 9)}},
      {"rollout.kv.evict.prompt",
       {snapkv, {"rollout.kv.evict.prompt=compress"}, peak_resident, from_to(15 + 12 + 4, 12 + 4)}},
      {"rollout.kv.evict.trigger",
       {snapkv + Overrides{"rollout.kv.evict.prompt=compress"},
        {"rollout.kv.evict.trigger=prefill_once"},
        compressions,
        falls}},
      {"rollout.kv.evict.scope",
       {snapkv + Overrides{"model.path=", cat("model.config=", tiny_folder(), "kv_heads.json"), "model.init=fan_in"},
        {"rollout.kv.evict.scope=per_layer"},
        logprobs,
        differs}},
      {"rollout.kv.window.size", {snapkv, {"rollout.kv.window.size=6"}, logprobs, differs}},
      {"rollout.kv.streaming_llm.sinks", {streaming, {"rollout.kv.streaming_llm.sinks=0"}, logprobs, differs}},
      {"rollout.kv.window.gqa_aggregation",
       {snapkv, {"rollout.kv.window.gqa_aggregation=mean_prob"}, logprobs, differs}},
      {"rollout.kv.window.softmax_span",
       {snapkv, {"rollout.kv.window.softmax_span=include_window"}, logprobs, differs}},
      {"rollout.kv.window.pooling", {snapkv, {"rollout.kv.window.pooling=avg"}, logprobs, differs}},
      {"rollout.kv.window.pooling_kernel", {snapkv, {"rollout.kv.window.pooling_kernel=1"}, logprobs, differs}},
      {"rollout.kv.rkv.lambda", {rkv, {"rollout.kv.rkv.lambda=1"}, logprobs, differs}},
      {"rollout.kv.rkv.threshold", {rkv, {"rollout.kv.rkv.threshold=0.9"}, logprobs, differs}},
      {"rollout.kv.pyramidkv.beta", {base("pyramidkv"), {"rollout.kv.pyramidkv.beta=2"}, logprobs, differs}},
      {"rollout.kv.merge.method", {snapkv, {"rollout.kv.merge.method=value"}, logprobs, differs}},
      {"rollout.kv.merge.keys",
       {snapkv + Overrides{"rollout.kv.merge.method=d2o"}, {"rollout.kv.merge.keys=unrotated"}, logprobs, differs}},
      {"rollout.kv.merge.d2o_ema",
       {snapkv + Overrides{"rollout.kv.merge.method=d2o"}, {"rollout.kv.merge.d2o_ema=1"}, logprobs, differs}},
      {"rollout.kv.blocks.size", {quest, {"rollout.kv.blocks.size=16"}, read, rises}},
      {"rollout.kv.blocks.count", {quest, {"rollout.kv.blocks.count=9"}, read, rises}},
      {"rollout.kv.blocks.first", {quest, {"rollout.kv.blocks.first=3"}, logprobs, differs}},
      {"rollout.kv.blocks.last", {quest, {"rollout.kv.blocks.last=1"}, logprobs, differs}},
      {"rollout.kv.blocks.dense_layers", {quest, {"rollout.kv.blocks.dense_layers=1"}, read, rises}},
  };
}

Rows rollout_rows() {
  const auto passes = trained([](Session& s, GrpoTraining&) {
    return static_cast<double>(s.ledger.phases.at("rollout").at("embedding_fwd").calls);
  });
  const auto responses = trained([](Session&, GrpoTraining& t) { return static_cast<double>(t.samples().size()); });
  const auto val_flops = session_number([](Session& s) {
    GrpoTraining(s).evaluate();
    return static_cast<double>(s.ledger.total("val").flops);
  });
  const auto hashed = trained(
      [](Session& s, GrpoTraining&) { return static_cast<double>(s.ledger.phases.at("rollout")["hash_runs"].calls); });
  const Overrides sampled_val = {"rollout.val_kwargs.temperature=1", "rollout.val_kwargs.n=4"};
  // Among few tokens the responses of a group are all the same: no signal in any.
  const Measure zero_std = metric("filter/zero_std_fraction");
  return {
      {"rollout.n", {{}, {"rollout.n=6"}, responses, from_to(16, 24)}},
      {"rollout.temperature", {{}, {"rollout.temperature=2"}, metric("actor/entropy"), rises}},
      {"rollout.top_k", {{}, {"rollout.top_k=1"}, zero_std, rises}},
      {"rollout.top_p", {{}, {"rollout.top_p=0.01"}, zero_std, rises}},
      {"rollout.max_kept_ids",
       {{"rollout.top_p=0.9", "actor.ppo_epochs=2"},
        {"rollout.max_kept_ids=9999"},
        peak(&Session::activations),
        rises,
        true}},
      {"rollout.min_p", {{}, {"rollout.min_p=1"}, zero_std, rises}},
      {"rollout.stop_token_ids",
       {{}, {"rollout.stop_token_ids=[20,21,22,23,24,25]"}, metric("response_length/mean"), falls}},
      {"rollout.stop", {{}, {"rollout.stop=a"}, metric("response_length/mean"), falls}},
      {"rollout.max_num_seqs", {{}, {"rollout.max_num_seqs=3"}, peak(&Session::kv), falls, true}},
      {"rollout.max_num_batched_tokens",
       {ssa + Overrides{"rollout.max_num_seqs=4"}, {"rollout.max_num_batched_tokens=4"}, passes, rises, true}},
      {"rollout.kv_cache_bytes", {{}, {"rollout.kv_cache_bytes=20000"}, peak(&Session::kv), falls, true}},
      {"rollout.free_cache_engine",
       {{}, {"rollout.free_cache_engine=false"}, metric("perf/max_memory_allocated_gb"), rises, true}},
      {"rollout.check_exact", {{}, {"rollout.check_exact=false"}, metric("exact/checked_tokens"), falls, true}},
      {"exact.full", {{}, {"exact.full=true"}, hashed, rises, true}},
      {"rollout.on_mismatch", {{}, {"rollout.on_mismatch=continue"}, exit_after_a_mismatch, from_to(1, 0)}},
      {"rollout.val_kwargs.n", {{}, {"rollout.val_kwargs.n=3"}, val_flops, rises}},
      {"rollout.val_kwargs.temperature",
       {{"rollout.val_kwargs.n=4"}, {"rollout.val_kwargs.temperature=1"}, session_number(val_score), differs}},
      {"rollout.val_kwargs.top_k", {sampled_val, {"rollout.val_kwargs.top_k=1"}, session_number(val_score), differs}},
      {"rollout.val_kwargs.top_p",
       {sampled_val, {"rollout.val_kwargs.top_p=0.01"}, session_number(val_score), differs}},
      {"rollout.val_kwargs.min_p", {sampled_val, {"rollout.val_kwargs.min_p=1"}, session_number(val_score), differs}},
  };
}

// Rollouts that read 4 tokens of the context, the newest ones, in every layer.
const Overrides sparse = {"rollout.kv.method=quest",   "rollout.kv.blocks.size=4",
                          "rollout.kv.blocks.count=1", "rollout.kv.blocks.first=0",
                          "rollout.kv.blocks.last=1",  "rollout.kv.blocks.dense_layers=0",
                          "rollout.check_exact=false", "algorithm.rollout_correction.rollout_rs=none"};

Rows correction_rows() {
  const auto key = [](const char* rest) { return cat("algorithm.rollout_correction.", rest); };
  const auto corr = [](const char* name) { return metric(cat("rollout_corr/", name)); };
  const Overrides paper = sparse + Overrides{key("rollout_is=paper")}, veto = sparse + Overrides{key("veto=0.5")};
  const Overrides tis = sparse + Overrides{key("rollout_is=tis")},
                  icepop = sparse + Overrides{key("rollout_is=icepop")};
  const Overrides geometric = paper + Overrides{key("rollout_rs=geometric")};
  const Overrides obrs = sparse + Overrides{"algorithm.obrs.enable=true"};
  const Overrides z = obrs + Overrides{"algorithm.obrs.state_weight=z"};
  // One step more than an adaptation takes, and 200 tokens.
  const Overrides adapting = sparse + Overrides{"data.train_batch_size=12", "rollout.kv.blocks.acceptance_steps=1",
                                                "data.max_prompt_length=12"};
  const Measure read = metric("kv/read_tokens/mean", 2);
  const auto sparse_val = session_number([](Session& s) {
    GrpoTraining(s).evaluate();
    return static_cast<double>(s.ledger.phases.at("val").contains("kv_block_select"));
  });
  return {
      {key("veto"), {sparse, {key("veto=0.5")}, metric("tokens/trained"), falls}},
      {key("rollout_is"), {sparse, {key("rollout_is=paper")}, metric("actor/grad_norm"), differs}},
      {key("rollout_is_level"), {paper, {key("rollout_is_level=geometric")}, corr("rollout_is_max"), differs}},
      {key("rollout_is_threshold"), {tis, {key("rollout_is_threshold=1.01")}, corr("weight_max"), falls}},
      {key("rollout_is_bounds"),
       {icepop, {key("rollout_is_bounds=[0.99, 1.01]")}, corr("rollout_rs_masked_fraction"), rises}},
      {key("rollout_rs"),
       {geometric + Overrides{key("rollout_rs=none"), key("rollout_rs_threshold=[0.999, 1.001]")},
        {key("rollout_rs=geometric")},
        corr("rejection_rate"),
        rises}},
      {key("off_policy_mask_threshold"),
       {sparse + Overrides{"actor.ppo_epochs=2", "actor.optim.lr=0.01"},
        {key("off_policy_mask_threshold=1e-4")},
        metric("actor/grad_norm"),
        differs}},
      {key("rollout_rs_threshold"),
       {geometric, {key("rollout_rs_threshold=[0.999, 1.001]")}, corr("rejection_rate"), rises}},
      {key("group_statistics"), {veto, {key("group_statistics=accepted")}, metric("critic/advantages/max"), differs}},
      {key("min_accepted"), {veto, {key("min_accepted=1")}, metric("actor/skipped_updates"), from_to(0, 1)}},
      {key("score_centering"), {sparse, {key("score_centering=true")}, metric("actor/grad_norm"), differs}},
      {key("acceptance"), {sparse, {key("acceptance=true")}, peak(&Session::states), rises, true}},
      {"algorithm.obrs.enable", {sparse, {"algorithm.obrs.enable=true"}, metric("actor/grad_norm"), differs}},
      {"algorithm.obrs.lambda", {obrs, {"algorithm.obrs.lambda=3"}, corr("rollout_rs_masked_fraction"), rises}},
      {"algorithm.obrs.cap",
       {obrs + Overrides{"algorithm.obrs.cap=0"}, {"algorithm.obrs.cap=1"}, corr("weight_max"), falls}},
      {"algorithm.obrs.state_weight", {obrs, {"algorithm.obrs.state_weight=z"}, corr("weight_mean"), falls}},
      {"rollout.kv.blocks.acceptance_target", {adapting, {"rollout.kv.blocks.acceptance_target=0.86"}, read, rises}},
      {"rollout.kv.blocks.acceptance_steps",
       {adapting + Overrides{"rollout.kv.blocks.acceptance_target=0.86"},
        {"rollout.kv.blocks.acceptance_steps=2"},
        read,
        falls}},
      {"algorithm.obrs.top_k", {z, {"algorithm.obrs.top_k=1"}, corr("weight_mean"), falls}},
      {"algorithm.oversample.by",
       {sparse + Overrides{"algorithm.oversample.keep=2"},
        {"algorithm.oversample.by=acceptance"},
        trained(fingerprint),
        differs}},
      {"rollout.val_kwargs.kv", {sparse, {"rollout.val_kwargs.kv=rollout"}, sparse_val, from_to(0, 1)}},
  };
}

// How far the adapters are from where they started, after two steps.
Outcome adapter_movement(const Overrides& o) {
  Session session(load_config(o));
  const std::vector<float> before = session.adapters->get_parameters();
  GrpoTraining trainer(session);
  trainer.step();
  trainer.step();
  return {distance(session.adapters->get_parameters(), before)};
}

Rows adapter_rows() {
  const Overrides lora = {"model.lora.rank=2"}, distill = sparse + lora + Overrides{"distill.enable=true"};
  const std::string folder = tiny_folder() + "adapter";
  const Measure adapters = [=](const Overrides& o) {
    if (!fs::exists(folder)) {
      Session session(load_config(tiny_run() + lora));
      save_model(folder, session);
    }
    Session session(load_config(o));
    return Outcome{session.adapters ? 1.0 : 0.0, session.model->get_parameters()};
  };
  return {
      {"model.lora.rank", {{}, lora, peak(&Session::gradients), falls}},
      {"model.lora.alpha", {lora, {"model.lora.alpha=64"}, metric("actor/grad_norm", 2), differs}},
      {"model.lora.target_modules",
       {lora, {"model.lora.target_modules=['q_proj', 'o_proj']"}, peak(&Session::gradients), falls}},
      {"model.lora.adapter_path", {{}, {"model.lora.adapter_path=" + folder}, adapters, from_to(0, 1), true}},
      {"distill.enable", {sparse + lora, {"distill.enable=true"}, peak(&Session::optimizer), rises}},
      {"distill.order", {distill, {"distill.order=after"}, adapter_movement, differs}},
      {"distill.kl_type", {distill, {"distill.kl_type=exact_forward"}, metric("distill/kl"), differs}},
      {"distill.lambda", {distill, {"distill.lambda=5"}, metric("distill/grad_norm"), rises}},
      {"distill.lr_scale_factor", {distill, {"distill.lr_scale_factor=1"}, metric("distill/lr"), times(0.2)}},
      {"distill.grad_clip", {distill, {"distill.grad_clip=1e-8"}, adapter_movement, falls}},
  };
}

// What is subtracted from the scores.
double shaping(const Metrics& m) { return m.get("critic/score/mean") - m.get("critic/rewards/mean"); }

Rows algorithm_rows() {
  const Overrides overlong = {"reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=6"};
  const Overrides kl = {"algorithm.use_kl_in_reward=true"};  // the policy is the reference in step 1
  const Overrides dynamic = {"algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=5",
                             "data.train_files=" + tiny_folder() + "never.jsonl"};
  const Measure largest = metric("critic/advantages/max");
  return {
      {"reward_model.overlong_buffer.enable",
       {{"reward_model.overlong_buffer.len=12"},
        {"reward_model.overlong_buffer.enable=true"},
        metrics(shaping),
        rises}},
      {"reward_model.overlong_buffer.len",
       {overlong, {"reward_model.overlong_buffer.len=12"}, metrics(shaping), rises}},
      {"reward_model.overlong_buffer.penalty_factor",
       {overlong, {"reward_model.overlong_buffer.penalty_factor=3"}, metrics(shaping), times(3)}},
      {"algorithm.adv_estimator",
       {{"algorithm.norm_adv_by_std_in_grpo=false"}, {"algorithm.adv_estimator=rloo"}, largest, times(4.0 / 3)}},
      {"algorithm.oversample.keep",
       {{},
        {"algorithm.oversample.keep=3"},
        trained([](Session&, GrpoTraining& t) { return static_cast<double>(t.samples().size()); }),
        from_to(16, 12)}},
      {"algorithm.norm_adv_by_std_in_grpo", {{}, {"algorithm.norm_adv_by_std_in_grpo=false"}, largest, falls}},
      {"algorithm.adv_std",
       {{"algorithm.adv_eps=0"}, {"algorithm.adv_std=population"}, largest, times(std::sqrt(4.0 / 3))}},
      {"algorithm.adv_eps", {{}, {"algorithm.adv_eps=1"}, largest, falls}},
      {"algorithm.adv_filter_threshold", {{}, {"algorithm.adv_filter_threshold=0.8"}, metric("tokens/trained"), falls}},
      {"algorithm.mask_truncated_completions",
       {{"data.max_response_length=3"},
        {"algorithm.mask_truncated_completions=true"},
        metric("tokens/trained"),
        falls}},
      {"algorithm.use_kl_in_reward", {{}, kl, metrics(shaping, 2), differs}},
      {"algorithm.kl_penalty", {kl, {"algorithm.kl_penalty=k3"}, metrics(shaping, 2), differs}},
      {"algorithm.kl_ctrl.kl_coef",
       {kl + Overrides{"algorithm.kl_penalty=k2"}, {"algorithm.kl_ctrl.kl_coef=0.01"}, metrics(shaping, 2), times(10)}},
      {"algorithm.filter_groups.enable",
       {{"rollout.n=2"}, {"algorithm.filter_groups.enable=true"}, metric("rollout/gen_batches"), rises}},
      {"algorithm.filter_groups.metric",
       {dynamic + overlong + Overrides{"reward_model.overlong_buffer.len=12"},
        {"algorithm.filter_groups.metric=reward"},
        metric("rollout/gen_batches"),
        falls}},
      {"algorithm.filter_groups.max_num_gen_batches",
       {dynamic, {"algorithm.filter_groups.max_num_gen_batches=2"}, metric("rollout/gen_batches"), from_to(5, 2)}},
  };
}

// Whether a run refuses to begin.
Outcome refuses_to_begin(const Overrides& o) {
  Session session(load_config(o));
  try {
    GrpoTraining trainer(session);
  } catch (const Error&) {
    return {1};
  }
  return {0};
}

// Whether entries have the scores of responses that replaced the first ones.
double scored_entries(const Metrics& m) { return std::isnan(m.get("rpo/cache_score")) ? 0 : 1; }

Rows rpo_rows() {
  const Overrides rpo = {"algorithm.rpo.enable=true"}, two = rpo + Overrides{"algorithm.rpo.max_cut=2"};
  const Overrides whole = rpo + Overrides{"algorithm.rpo.cut=length"};
  const Overrides length = {"reward_model.length_reward.enable=true"};
  const std::string file = cat("algorithm.rpo.cache_file=", tiny_folder(), "cache.jsonl");
  const std::string part = cat("algorithm.rpo.cache_file=", tiny_folder(), "part.jsonl");
  return {
      {"algorithm.rpo.enable",
       {{"algorithm.rpo.max_cut=2"}, {"algorithm.rpo.enable=true"}, metric("tokens/generated"), falls}},
      {"algorithm.rpo.cut", {two, {"algorithm.rpo.cut=length"}, metric("rpo/cut"), rises}},
      {"algorithm.rpo.max_cut", {rpo, {"algorithm.rpo.max_cut=1"}, metric("rpo/cut"), falls}},
      {"algorithm.rpo.suffix_cap", {whole, {"algorithm.rpo.suffix_cap=removed"}, metric("rpo/suffix_tokens"), falls}},
      {"algorithm.rpo.update", {rpo, {"algorithm.rpo.update=false"}, metrics(scored_entries), from_to(1, 0)}},
      {"algorithm.rpo.epsilon", {rpo, {"algorithm.rpo.epsilon=1"}, metric("rpo/argmax_rate"), rises}},
      {"algorithm.rpo.prefix_loss", {two, {"algorithm.rpo.prefix_loss=included"}, metric("tokens/loss"), rises}},
      {"algorithm.rpo.cache_file", {rpo, {file}, metric("rpo/hit_rate"), from_to(0, 1)}},
      {"algorithm.rpo.missing",
       {rpo + Overrides{part}, {"algorithm.rpo.missing=lazy"}, refuses_to_begin, from_to(1, 0)}},
      {"reward_model.length_reward.enable", {{}, {"reward_model.length_reward.enable=true"}, metrics(shaping), rises}},
      {"reward_model.length_reward.alpha",
       {length, {"reward_model.length_reward.alpha=1"}, metric("critic/rewards/max"), rises}},
      {"reward_model.length_reward.reference",
       {length + Overrides{"reward_model.length_reward.alpha=1"},
        {"reward_model.length_reward.reference=correct"},
        metric("critic/rewards/mean"),
        differs}},
      {"algorithm.adv_std_floor", {{}, {"algorithm.adv_std_floor=3"}, metric("critic/advantages/max"), falls}},
  };
}

Rows loss_rows() {
  const Overrides off_policy = {"actor.ppo_epochs=4", "actor.clip_ratio_low=10", "actor.clip_ratio_high=10"};
  const Overrides kl = {"actor.use_kl_loss=true", "actor.kl_loss_coef=0.01"};
  const Overrides slow = {"actor.optim.lr=2e-3", "trainer.total_training_steps=8"};
  const Overrides sums = {"actor.loss_agg_mode=seq-mean-token-sum-norm"};
  const Measure gradient = metric("actor/grad_norm"), clipped = metric("actor/pg_clipfrac"),
                kept = metric("ht/kept_fraction");
  const auto subset = [](const char* name) { return Overrides{cat("actor.token_subset=", name)}; };
  const Overrides evicting = {"rollout.kv.method=tova", "rollout.kv.evict.budget=3", "rollout.kv.evict.buffer=1",
                              "rollout.check_exact=false"};
  return {
      {"actor.policy_loss.loss_mode",
       {off_policy, {"actor.policy_loss.loss_mode=cispo"}, metric("actor/pg_loss"), differs}},
      {"actor.clip_ratio_low", {off_policy, {"actor.clip_ratio_low=0.01"}, clipped, rises}},
      {"actor.clip_ratio_high", {off_policy, {"actor.clip_ratio_high=0.01"}, clipped, rises}},
      {"actor.clip_ratio_c", {off_policy, {"actor.clip_ratio_c=1.01"}, metric("actor/pg_clipfrac_lower"), rises}},
      {"actor.loss_agg_mode", {{}, {"actor.loss_agg_mode=seq-mean-token-mean"}, gradient, differs}},
      {"actor.loss_scale_factor", {sums, {"actor.loss_scale_factor=3"}, gradient, times(4)}},
      {"actor.loss_denominator",
       {sums + Overrides{"algorithm.adv_filter_threshold=0.8"}, {"actor.loss_denominator=kept"}, gradient, rises}},
      {"actor.use_kl_loss", {{}, {"actor.use_kl_loss=true"}, metric("actor/kl_loss", 2), rises}},
      {"actor.kl_loss_coef", {kl + slow, {"actor.kl_loss_coef=10"}, metric("actor/kl_loss", 8), falls}},
      {"actor.use_bias_correction_kl",
       {kl + Overrides{"actor.kl_loss_coef=10"},
        {"actor.use_bias_correction_kl=true"},
        metric("actor/grad_norm", 2),
        differs}},
      {"actor.kl_loss_type", {kl, {"actor.kl_loss_type=exact"}, metric("actor/kl_loss", 2), differs}},
      {"actor.entropy_coeff", {slow, {"actor.entropy_coeff=1"}, metric("actor/entropy", 8), rises}},
      {"actor.ppo_epochs", {{}, {"actor.ppo_epochs=3"}, metric("actor/updates"), from_to(1, 3)}},
      {"actor.ppo_mini_batch_size", {{}, {"actor.ppo_mini_batch_size=2"}, metric("actor/updates"), from_to(1, 2)}},
      {"actor.ppo_max_token_len", {{}, {"actor.ppo_max_token_len=64"}, peak(&Session::activations), falls, true}},
      {"actor.logits_chunk",
       {{"model.path=", cat("model.config=", tiny_folder(), "bytes.json"), "model.init=fan_in"},
        {"actor.logits_chunk=16"},
        peak(&Session::activations),
        falls,
        true}},
      {"actor.grad_clip", {{}, {"actor.grad_clip=1e-8"}, movement, falls}},
      {"learner.attention", {evicting, {"learner.attention=replay"}, metric("flops/learner"), falls}},
      {"learner.shards", {{}, {"learner.shards=3"}, peak(&Session::gradients), rises}},
      {"actor.token_subset", {{}, {"actor.token_subset=urs"}, metric("tokens/loss"), falls}},
      {"actor.urs_probability", {subset("urs"), {"actor.urs_probability=1"}, kept, rises}},
      {"actor.rpc_min_tokens",
       {subset("rpc") + Overrides{"actor.rpc_min_tokens=1"},
        {"actor.rpc_min_tokens=9"},
        metric("tokens/trained"),
        rises}},
      {"actor.det_fraction", {subset("det"), {"actor.det_fraction=0.1"}, metric("tokens/trained"), falls}},
      {"actor.token_subset_ht",
       {subset("urs"), {"actor.token_subset_ht=false"}, metric("ht/weight_max"), from_to(2, 1)}},
  };
}

// Two ranks of one machine and one device, of which this process is both.
class Mirror : public Comm {
 public:
  int rank() const override { return 0; }
  int ranks() const override { return 2; }
  int node_rank() const override { return 0; }
  int node_ranks() const override { return 2; }
  std::string host() const override { return "here"; }
  void exchange(std::span<const Piece> out, std::span<const Piece> in) override {
    for (const Piece& p : in) std::memcpy(p.data, out[0].data, p.bytes);
  }
  [[noreturn]] void abort(int) override { std::abort(); }
};

Rows optimizer_and_trainer_rows() {
  const Overrides linear = {"actor.optim.lr_scheduler_type=linear"};
  const Measure second_rate = metric("actor/lr", 2), last_rate = metric("actor/lr", 4);
  const Measure norm = trained([](Session& s, GrpoTraining&) { return parameter_norm(s); });
  const Measure optimizer_bytes =
      trained([](Session& s, GrpoTraining&) { return static_cast<double>(s.optimizer.entries()[0].bytes); });
  // Where the kernels lie is not part of every build: what type they would compute with.
  const Measure element_bytes = [](const Overrides& o) {
    return Outcome{.number = static_cast<double>(dtype_size(act_type(load_config(o))))};
  };
#ifdef PARE_EMU
  const Measure shares_a_device = [](const Overrides& o) {
    Mirror comm;
    try {
      table_emu.open(comm, load_config(o).trainer.comm);
    } catch (const Error&) {
      return Outcome{.number = 0};
    }
    return Outcome{.number = 1};
  };
#endif
  const Measure thread_count = trained([](Session&, GrpoTraining&) { return static_cast<double>(threads()); });
  const Measure steps = lines("metrics.jsonl", "training/global_step"),
                steps_elsewhere = lines("metrics.jsonl", "training/global_step", "elsewhere"),
                validations = lines("metrics.jsonl", "val-core/jsonl/reward/mean@1"),
                responses = lines("rollouts.jsonl", "\"advantage\"");
  return {
      {"actor.optim.lr", {{}, {"actor.optim.lr=2e-2"}, movement, rises}},
      {"actor.optim.betas", {{}, {"actor.optim.betas=[0, 0.999]"}, movement, differs}},
      {"actor.optim.eps", {{}, {"actor.optim.eps=1"}, movement, falls}},
      {"actor.optim.weight_decay", {{}, {"actor.optim.weight_decay=10"}, norm, falls}},
      {"actor.optim.moments", {{}, {"actor.optim.moments=bf16"}, optimizer_bytes, falls}},
      {"actor.optim.lr_warmup_steps", {{}, {"actor.optim.lr_warmup_steps=4"}, second_rate, times(0.5)}},
      {"actor.optim.lr_scheduler_type", {{}, linear, second_rate, times(0.5)}},
      {"actor.optim.min_lr_ratio", {linear, {"actor.optim.min_lr_ratio=0.25"}, last_rate, from_to(0, 0.0025)}},
      {"actor.optim.decay_fraction", {linear, {"actor.optim.decay_fraction=0.5"}, second_rate, times(2)}},
      {"trainer.total_epochs",  // over the steps of a layer below
       {{tiny_folder() + "empty.toml"}, {"trainer.total_epochs=1"}, steps, from_to(4, 6)}},
      {"trainer.total_training_steps", {{}, {"trainer.total_training_steps=2"}, steps, from_to(4, 2)}},
      {"trainer.seed", {{"data.shuffle=false"}, {"trainer.seed=2"}, trained(fingerprint), differs}},
      {"trainer.device", {{}, {"trainer.device=emu"}, element_bytes, from_to(4, 2)}},
      // What is computed with is not part of every build either: what the run makes of it.
      {"trainer.exact",
       {{"trainer.device=emu", "model.dtype=f32"},
        {"trainer.exact=false"},
        metrics([](const Metrics& m) { return std::isfinite(m.get("rollout_corr/kl")) ? 1.0 : 0.0; }),
        from_to(0, 1)}},
      {"model.dtype", {{"trainer.device=emu"}, {"model.dtype=f32"}, element_bytes, from_to(2, 4)}},
      {"trainer.balance_batch",
       {{"learner.shards=5", "data.train_batch_size=12"},
        {"trainer.balance_batch=false"},
        metric("global_seqlen/balanced_max"),
        rises}},
      {"trainer.n_gpus_per_node", {{}, {"trainer.n_gpus_per_node=2"}, refused, from_to(0, 1)}},
      {"trainer.nnodes", {{}, {"trainer.nnodes=2"}, refused, from_to(0, 1)}},
      {"trainer.nccl_timeout",
       {{},
        {"trainer.nccl_timeout=7"},
        session_number([](Session& s) { return s.device.comm.timeout.load(); }),
        from_to(600, 7)}},
#ifdef PARE_EMU
      {"trainer.comm", {{"trainer.comm=nccl"}, {"trainer.comm=host"}, shares_a_device, from_to(0, 1)}},
#endif
      {"trainer.threads", {{}, {"trainer.threads=2"}, thread_count, from_to(1, 2), true}},
      {"trainer.test_freq", {{}, {"trainer.test_freq=3"}, validations, from_to(0, 2)}},  // in steps 3 and 4, the last
      {"trainer.val_before_train", {{}, {"trainer.val_before_train=true"}, validations, from_to(0, 1)}},
      {"trainer.check_nan", {{}, {"trainer.check_nan=true"}, nan_found_early, from_to(0, 1)}},
      {"trainer.skip_nonfinite", {{}, {"trainer.skip_nonfinite=3"}, steps_of_nan, from_to(0, 3)}},
      {"trainer.default_local_dir",
       {{}, {cat("trainer.default_local_dir=", tiny_folder(), "elsewhere")}, steps_elsewhere, from_to(-1, 4)}},
      {"trainer.samples_freq", {{}, {"trainer.samples_freq=2"}, responses, from_to(0, 32)}},
      {"trainer.samples_per_step",
       {{"trainer.samples_freq=2"}, {"trainer.samples_per_step=5"}, responses, from_to(32, 10)}},
      {"trainer.command", {{"trainer.command=train"}, {"trainer.command=sft"}, dry_run_code, from_to(0, 2)}},
      {"trainer.from_checkpoint",
       {{}, {cat("trainer.from_checkpoint=", tiny_folder(), "start")}, updates, from_to(4, 6)}},
      {"trainer.experiment_name",
       {{"trainer.default_local_dir="}, {"trainer.experiment_name=abc"}, folders("runs", "abc-"), from_to(0, 1)}},
      {"trainer.save_freq", {{}, {"trainer.save_freq=1"}, folders("run/checkpoints", "step-"), from_to(1, 2)}},
      {"trainer.max_actor_ckpt_to_keep",
       {{"trainer.save_freq=1"},
        {"trainer.max_actor_ckpt_to_keep=3"},
        folders("run/checkpoints", "step-"),
        from_to(2, 3)}},
      {"trainer.save_model", {{}, {"trainer.save_model=false"}, folders("run", "model"), from_to(1, 0)}},
      {"trainer.max_file_bytes", {{}, {"trainer.max_file_bytes=2000"}, folders("run/model", "model-0000"), rises}},
      {"trainer.save_dtype", {{}, {"trainer.save_dtype=f16"}, model_bytes, falls}},
  };
}

const Rows& rows() {
  static const Rows all = [] {
    Rows r;
    for (const Rows& part : {model_and_data_rows(), rollout_rows(), kv_rows(), correction_rows(), adapter_rows(),
                             algorithm_rows(), rpo_rows(), loss_rows(), optimizer_and_trainer_rows()})
      r.insert(part.begin(), part.end());
    return r;
  }();
  return all;
}

class EveryKey : public testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() {
    fs::remove_all(tiny_folder());
    set_threads(0);
  }
};

TEST_P(EveryKey, ChangesItsNumber) {
  const auto found = rows().find(GetParam());
  ASSERT_NE(found, rows().end()) << "no row says what the key changes";
  const Row& row = found->second;
  ASSERT_TRUE(row.change[0].starts_with(GetParam() + "=")) << row.change[0];
  const Overrides base = tiny_run() + row.base;
  const Outcome before = row.number(base), after = row.number(base + row.change);
  EXPECT_TRUE(row.relation.holds(before.number, after.number))
      << "the number " << row.relation.text << ": found " << before.number << " and " << after.number;
  if (!row.same_bits) return;
  ASSERT_FALSE(before.parameters.empty());
  EXPECT_EQ(std::memcmp(before.parameters.data(), after.parameters.data(), before.parameters.size() * sizeof(float)), 0)
      << "the key must change no result";
}

// Where the condition of a key fails, the change of its row changes nothing: neither the row's number nor a parameter.
class ConditionalKey : public EveryKey {};

// Arguments for which the condition fails, in the order in which they are tried.
std::vector<Overrides> failing(const KeyCondition& when) {
  if (when.key == "data.task") return {when.values[0] == "jsonl" ? ssa : tiny_jsonl()};
  if (when.key == "model.config") return {{"model.config=", cat("model.path=", tiny_folder(), "trained")}};
  const ConfigKey& key = config_key(when.key);
  std::vector<std::string> values = {key.show({}), "true", "false", "0", "1"};
  const std::string one_of = "one of ";
  if (key.type.starts_with(one_of)) {
    std::stringstream words(key.type.substr(one_of.size()));
    for (std::string word; std::getline(words, word, ',');) values.push_back(word.substr(word[0] == ' '));
  }
  if (key.type == "string") values = {when.key == "data.reward" ? "exact" : "plain", ""};
  if (key.type == "array of strings") values = {"['0:5', '9:8']"};
  std::vector<Overrides> all;
  for (const std::string& v : values) {
    Config c;
    try {
      apply_toml(c, cat(when.key, " = ", key.type == "string" || key.type.starts_with(one_of) ? toml_quote(v) : v), "");
    } catch (const Error&) {
      continue;
    }
    if (!when.holds(c)) all.push_back({cat(when.key, "=", v)});
  }
  return all;
}

bool same(const Outcome& a, const Outcome& b) {
  const bool numbers = a.number == b.number || (std::isnan(a.number) && std::isnan(b.number));
  return numbers && a.parameters.size() == b.parameters.size() &&
         std::memcmp(a.parameters.data(), b.parameters.data(), a.parameters.size() * sizeof(float)) == 0;
}

// The message of the error with which a configuration is refused; empty: none.
std::string refusal(const Overrides& o) {
  try {
    load_config(o);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST_P(ConditionalKey, HasNoEffectWithoutItsCondition) {
  const Row& row = rows().at(GetParam());
  for (const KeyCondition& when : config_key(GetParam()).when) {
    std::string refused;
    for (const Overrides& fails : failing(when)) {
      const Overrides base = tiny_run() + row.base + fails;
      // What is refused has no silent effect either; but it is refused for the condition's sake.
      refused = refusal(base) + refusal(base + row.change);
      if (!refused.empty()) continue;
      EXPECT_FALSE(when.holds(load_config(base + row.change)));
      const Outcome before = row.number(base), after = row.number(base + row.change);
      EXPECT_TRUE(same(before, after)) << fails[0] << ": " << before.number << " and " << after.number;
      break;
    }
    EXPECT_TRUE(refused.empty() || refused.find(when.key) != std::string::npos) << when.key << ": " << refused;
  }
}

std::vector<std::string> conditional_names() {
  std::vector<std::string> list;
  for (const ConfigKey& key : config_keys())
    if (!key.when.empty()) list.push_back(key.name);
  return list;
}

INSTANTIATE_TEST_SUITE_P(Config, ConditionalKey, testing::ValuesIn(conditional_names()), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
});

std::vector<std::string> names() {
  std::vector<std::string> list;
  for (const ConfigKey& key : config_keys()) list.push_back(key.name);
  return list;
}

INSTANTIATE_TEST_SUITE_P(Config, EveryKey, testing::ValuesIn(names()), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
});

TEST(KeyRows, BelongToKeys) {
  const auto keys = names();
  for (const auto& [name, row] : rows())
    EXPECT_NE(std::find(keys.begin(), keys.end(), name), keys.end()) << name << " is no key";
}

}  // namespace
}  // namespace pare::test
