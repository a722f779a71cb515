// Plans in seconds: machine files, and what `pare plan` answers with one.
#include <nlohmann/json.hpp>

#include "bench/measure.h"
#include "ops/linear_tiles.h"
#include "run/plan.h"
#include "tests/program.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const std::string kText =
    "name = \"a box\"\n"
    "[measured]\nmemory = 2e9\nbandwidth = 1e9\nlaunch = 0.5\n"
    "[published]\nflops_f32 = 4e9\nflops_bf16 = 8_000_000_000\n"
    "[assumed]\nreserve = 5e8\nshare.other = 0.5\nshare.linear_fwd = 0.25\n";

std::string machine_file(const std::string& text) {
  const std::string path = cat(testing::TempDir(), "pare_machine_", getpid(), ".toml");
  std::ofstream(path) << text;
  return path;
}

std::string message(const std::string& text) {
  try {
    read_machine(machine_file(text));
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::usage);
    return e.what();
  }
  return "no error";
}

TEST(Machine, IsARoofPerCall) {
  const Machine m = read_machine(machine_file(kText));
  EXPECT_EQ(m.name, "a box");
  EXPECT_EQ(m.memory(), 1'500'000'000u);
  EXPECT_EQ(m.figures.at("bandwidth").source, "measured");
  EXPECT_EQ(m.figures.at("share.linear_fwd").source, "assumed");
  const Cost math{.flops = 8'000'000'000, .read = 100, .written = 0},
      memory{.flops = 4, .read = 1'000'000'000, .written = 1'000'000'000};
  EXPECT_EQ(m.seconds("linear_fwd", math, DType::f32), 0.5 + 2 / 0.25);
  EXPECT_EQ(m.seconds("linear_fwd", math, DType::bf16), 0.5 + 1 / 0.25);
  EXPECT_EQ(m.seconds("adamw", memory, DType::bf16), 0.5 + 2 / 0.5);
  EXPECT_EQ(m.seconds("adamw", {}, DType::f32), 0.5);
  const Cost sent{.flops = 4, .read = 1'000'000'000, .written = 0, .sent = 6'000'000'000};
  const Machine linked = read_machine(machine_file(kText + "link = 2e9\nnetwork = 1e9\n"));
  EXPECT_EQ(linked.seconds("all_gather", sent, DType::f32), 0.5 + 3 / 0.5);
  Cost half = sent;
  half.abroad = 3'000'000'000;
  EXPECT_EQ(linked.seconds("all_gather", half, DType::f32), 0.5 + 3 / 0.5) << "half of it beyond the machine";
  EXPECT_EQ(linked.seconds("all_gather", {.read = 1'000'000'000}, DType::f32), 0.5 + 1 / 0.5);
  EXPECT_THROW(m.seconds("all_gather", sent, DType::f32), Error) << "it has no link";
  EXPECT_EQ(linked.shared_by(2).memory(), 750'000'000u);
  EXPECT_EQ(linked.shared_by(2).seconds("linear_fwd", math, DType::f32), 0.5 + 4 / 0.25);
  const Machine again = read_machine(machine_file(to_toml(m)));
  EXPECT_EQ(to_toml(again), to_toml(m));
  EXPECT_EQ(again.figures.size(), m.figures.size());
}

TEST(Machine, WaitsForTheLongestBlock) {
  const Machine m = read_machine(machine_file(kText + "multiprocessors = 8\n"));
  EXPECT_EQ(m.multiprocessors(), 8);
  EXPECT_EQ(read_machine(machine_file(kText)).multiprocessors(), 1);
  const Cost both{.flops = 8'000'000'000, .read = 1'000'000'000};
  EXPECT_EQ(m.seconds("linear_fwd", both, DType::bf16, {.flops = 3}), 0.5 + 3 / 0.25);
  EXPECT_EQ(m.seconds("linear_fwd", both, DType::bf16, {.bytes = 5}), 0.5 + 5 / 0.25);
}

// The stretch of a call with these operands on an H100.
Stretch stretch_on_132(const std::string& op, const std::string& shape) {
  const cases::OpCase& c = cases::op_case(op);
  return size_op(DType::bf16, c, cases::Dims(c.op, c.dims, shape)).stretch(132);
}

// One tile of queries, of keys or of a page table is a block, whatever else runs at the same time.
TEST(Machine, AttentionIsDividedAsItsKernelsDo) {
  const auto keys = [](const std::string& shape) { return 1 + (stretch_on_132("attn_bwd", shape).flops - 1) * 14 / 8; };
  // List schedules of the parts in the order of their tickets, without what an item costs beside its pieces.
  EXPECT_NEAR(keys("L=16384"), 1.005, 0.005);
  EXPECT_NEAR(keys("L=4096"), 1.063, 0.03);
  EXPECT_NEAR(keys("G=1,S=8,L=1024,P=512"), 1.072, 0.03);
  EXPECT_NEAR(keys("G=1,S=8,L=512,P=256"), 1.122, 0.05);
  EXPECT_NEAR(stretch_on_132("attn_bwd", "L=4096,budget=64").flops, 12.06, 0.05) << "of 4 pages some row lists one";
  EXPECT_EQ(stretch_on_132("attn_fwd", "L=4096").flops, 1);
  EXPECT_NEAR(stretch_on_132("attn_fwd", "L=128").flops, 132 / 12.0 * 128 * 128 / 8256, 1e-9)
      << "12 blocks, each a square of pairs of which half count";
  EXPECT_NEAR(stretch_on_132("attn_fwd", "L=4096,budget=64").flops, 3.4 * (1 + .06 * 64 / 6), 1e-9);
  EXPECT_EQ(stretch_on_132("attn_paged", "B=8,L=16384").bytes, 1) << "256 blocks of a cut";
  EXPECT_NEAR(stretch_on_132("attn_paged", "B=1,L=16384").bytes, 132 / 32.0, 1e-9) << "32 blocks";
  EXPECT_EQ(stretch_on_132("attn_paged", "B=256,L=640").bytes, 1);
  EXPECT_EQ(stretch_on_132("swiglu_fwd", "N=64").flops, 1);
}

// What is in the results: the tiles of products were fewer, the others' division is that of today.
Stretch then(const std::string& op, const std::string& shape, const Json& dims) {
  const auto of = [&](const char* dim) { return dims.at(dim).get<int64_t>(); };
  const std::initializer_list<WgmmaTile> tiles = {{128, 64}, {128, 128}, {128, 256}};
  if (op == "linear_fwd" && of("M") > 64) return {.flops = tile_stretch(tiles, of("M"), of("N"), of("K"), 132)};
  if (op == "linear_bwd_input" && of("M") > 64) return {.flops = tile_stretch(tiles, of("M"), of("K"), of("N"), 132)};
  if (op == "linear_bwd_weight") return {.flops = tile_stretch({{128, 256}}, of("N"), of("K"), of("M"), 132)};
  if (op == "attn_bwd") {  // a block walked over all rows that see its keys
    const double chain = 132 * 128.0 * 2 / static_cast<double>((of("L") + 1) * of("K"));
    return {.flops = (6 + 8 * std::max(1.0, chain)) / 14};
  }
  if (op == "attn_paged" && !of("budget")) {  // a block walked over all slots of a row
    return {.bytes = std::max(1.0, 132.0 / static_cast<double>(of("B") * of("K")))};
  }
  return op.starts_with("attn_") ? stretch_on_132(op, shape) : Stretch{};
}

// data/machines/h100.toml, with the division of work that plans count, against what an H100 took.
TEST(Machine, GivesTheRowsOfAnH100) {
  const std::map<std::string, std::string> other = {
      {"attn_fwd L=4096", "tiles began in the order of heads, not longest first"},
      {"attn_fwd L=4096,kernel=2", "likewise"},
      {"kv_select E=256", "a chain of latencies"},
      {"kv_compact E=256", "likewise"},
      {"linear_fwd M=16,N=2048,K=1536", "less than a wave of one-row kernels"},
      {"linear_fwd M=16,N=1536,K=1536", "likewise"},
      {"linear_fwd M=16,N=1536,K=8960", "likewise"},
      {"linear_bwd_input M=16,N=17920,K=1536", "no step computes it, and no kernel is made for it"},
      {"rope_fwd N=16384,H=14,D=128", "half of its bytes stay in L2"},
  };
  std::ifstream in("tools/bench/results/h100.json");
  const Json results = Json::parse(in);
  const Machine m = read_machine("h100");
  int within = 0;
  std::map<std::string, std::string> unseen = other;
  for (const auto& [name, row] : results.at("rows").items()) {
    if (name.find("kernel=1") != std::string::npos || name.find("--exact=off") != std::string::npos) continue;
    const Cost cost{.flops = row.at("flops"), .read = row.at("bytes_read"), .written = row.at("bytes_written")};
    const double took = row.at("seconds").at("median");
    const double ratio = m.seconds(row.at("op"), cost, DType::bf16,
                                   then(row.at("op"), name.substr(name.find(' ') + 1), row.at("shape"))) /
                         took;
    const bool close = ratio > 0.8 && ratio < 1.25;
    EXPECT_NE(close, other.contains(name)) << name << ": " << ratio;
    within += close;
    unseen.erase(name);
  }
  EXPECT_GE(within, 35);
  EXPECT_TRUE(unseen.empty()) << unseen.begin()->first << " is no row";
}

TEST(Machine, WhatIsNoFigureIsAnError) {
  EXPECT_NE(message(kText + "bandwith = 3\n").find(":13: there is no figure bandwith; the nearest is bandwidth"),
            std::string::npos)
      << message(kText + "bandwith = 3\n");
  EXPECT_NE(message(kText + "share.linear_fw = 1\n").find("nearest is share.linear_fwd"), std::string::npos);
  EXPECT_NE(message(kText + "share.adamw = 0\n").find(":13: share.adamw: expected a number > 0"), std::string::npos);
  EXPECT_NE(message(kText + "share.adamw = -1\n").find("> 0"), std::string::npos);
  EXPECT_NE(message(kText + "share.adamw = 'fast'\n").find("expected a number"), std::string::npos);
  EXPECT_NE(message(kText + "bandwidth = 2e9\n").find("bandwidth is there twice"), std::string::npos);
  EXPECT_NE(message("memory = 3\n" + kText).find(":1: memory: expected name, or a figure below [measured]"),
            std::string::npos);
  EXPECT_NE(message("[measured]\nmemory = 3\n").find("reserve is missing"), std::string::npos);
  EXPECT_THROW(read_machine("no/such.toml"), Error);
  std::string full = kText;
  full.replace(full.find("reserve = 5e8"), 13, "reserve = 3e9");
  EXPECT_NE(message(full).find("reserve = 3e+09 leaves nothing of memory = 2e+09"), std::string::npos) << message(full);
  EXPECT_NE(message(kText + "share.adamw = inf\n").find("at most 1e18"), std::string::npos);
  EXPECT_EQ(message(kText + "share.adamw = 1e18\n"), "no error");
}

TEST(Machine, ANamePrintsAsText) {
  std::string text = kText;
  text.replace(text.find("a box"), 5, "a\\u001b[2J\\u202ebox\\n");
  EXPECT_EQ(read_machine(machine_file(text)).name, R"(a\x1b[2J\u{202e}box\n)");
}

TEST(Machine, ThoseOfTheRepositoryAreRead) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator("data/machines")) {
    files++;
    const std::string file = entry.path().string();
    EXPECT_GT(read_machine(file).memory(), 30'000'000'000u) << file;
    EXPECT_EQ(to_toml(read_machine(entry.path().stem().string())), to_toml(read_machine(file))) << "by name";
  }
  EXPECT_GE(files, 3);
}

const std::vector<std::string> kTiny = {"model.config=tiny-ssa", "data.train_batch_size=4", "rollout.n=4",
                                        "data.max_prompt_length=60", "data.max_response_length=80"};

// Of a machine on which a call takes a second and its work nothing, the seconds are the calls.
TEST(Plan, SecondsAreTakenPerCall) {
  Machine m = read_machine(machine_file(kText));
  for (const char* key : {"bandwidth", "flops_f32", "flops_bf16"}) m.figures[key].value = 1e300;
  m.figures["launch"].value = 1;
  const Plan plan = plan_step(load_config(kTiny), TrainingKind::grpo, false, {}, &m);
  for (const auto& [phase, ops] : plan.ledger.phases)
    for (const auto& [op, line] : ops) EXPECT_EQ(line.seconds, static_cast<double>(line.calls)) << phase << ' ' << op;
  EXPECT_GT(plan.ledger.seconds("rollout"), 100);
  EXPECT_EQ(plan_step(load_config(kTiny), TrainingKind::grpo, false).ledger.seconds("rollout"), 0);
}

// A response of T tokens is cut behind token L, uniform on {C .. T}: (C + T) / 2 - 1 rows of it on the mean.
TEST(Plan, RandomCutsAreTheirExpectation) {
  std::vector<std::string> cut = kTiny;
  cut.insert(cut.end(), {"nat-rpc", "actor.rpc_min_tokens=20"});
  const Ledger all = plan_lengths(load_config(kTiny), {60, 80}), rpc = plan_lengths(load_config(cut), {60, 80});
  const auto rows = [](const Ledger& l) {
    return static_cast<double>(l.phases.at("learner").at("swiglu_fwd").cost.flops);
  };
  const double whole = 60 + 4 * 79, expected = 60 + 4 * ((20 + 80) / 2.0 - 1);
  EXPECT_NEAR(rows(rpc) / rows(all), expected / whole, 0.03);
  const Ledger half = plan_lengths(load_config(kTiny), {60, 80, 0.5});
  EXPECT_NEAR(rows(half) / rows(all), 0.5, 1e-6);
  EXPECT_EQ(half.total("rollout").flops, all.total("rollout").flops);
}

class PlanAnswers : public Program {
 protected:
  const std::string tiny_ =
      "plan model.config=tiny-ssa data.train_batch_size=4 rollout.n=4 data.max_prompt_length=60"
      " data.max_response_length=80 rollout.max_num_seqs=16 rollout.max_num_batched_tokens=256"
      " actor.ppo_max_token_len=512 actor.logits_chunk=1024 model.enable_gradient_checkpointing=false";
};

TEST_F(PlanAnswers, LargestFitsAndOneMoreDoesNot) {
  for (const std::string key : {"data.max_response_length", "rollout.max_num_seqs", "actor.ppo_max_token_len"}) {
    // From one sequence on: two fit in the memory of the training beside it, and the total stays what it is.
    const Outcome o = run(tiny_ + " rollout.max_num_seqs=1 --memory 14MB --largest " + key);
    ASSERT_EQ(o.code, 0) << o.err;
    ASSERT_NE(o.out.find(key + " = "), std::string::npos) << o.out;
    const int64_t value = std::stoll(o.out.substr(o.out.find(" = ") + 3));
    const auto verdict = [&](int64_t v) {
      return run(cat(tiny_, " rollout.max_num_seqs=1 ", key, "=", v, " --memory 14MB"));
    };
    EXPECT_TRUE(verdict(value).out.starts_with("fits ")) << o.out;
    const Outcome more = verdict(value + 1);
    EXPECT_TRUE(more.code != 0 || more.out.find("\ntoo much") != std::string::npos) << o.out;
  }
  // 288 positions end before the memory does.
  const Outcome positions = run(tiny_ + " --memory 60GB --largest data.max_response_length");
  EXPECT_NE(positions.out.find("data.max_response_length = 228 takes"), std::string::npos) << positions.out;
  EXPECT_NE(positions.out.find("288 positions"), std::string::npos) << positions.out;
  // A batch is worked off in pieces: its number of prompts costs no memory.
  for (const std::string key : {"data.train_batch_size", "rollout.n"}) {
    const Outcome any = run(tiny_ + " --device cuda --memory 60MB --largest " + key);
    EXPECT_NE(any.out.find(cat("any ", key, ": from ")), std::string::npos) << any.out;
    const Outcome host = run(tiny_ + " --memory 60MB --largest " + key);  // which holds the responses
    EXPECT_NE(host.out.find(key + " = "), std::string::npos) << host.out;
    EXPECT_NE(host.out.find("what grows most is responses"), std::string::npos) << host.out;
  }
  const Outcome wrong = run(tiny_ + " --memory 60MB --largest rollout.max_num_seq");
  EXPECT_EQ(wrong.code, 2);
  EXPECT_NE(wrong.err.find("the nearest is rollout.max_num_seqs"), std::string::npos) << wrong.err;
  EXPECT_EQ(run(tiny_ + " --memory 14MB --json --largest rollout.n").code, 2);
  const Outcome none = run(tiny_ + " --memory 1MB --largest rollout.max_num_seqs");
  EXPECT_EQ(none.code, 2);
  EXPECT_NE(none.err.find("no value of rollout.max_num_seqs fits"), std::string::npos) << none.err;
}

// Its own steps, from their mean lengths: attention is quadratic in them, so nearly.
// Of ranks: memory of the fullest, books of rank 0 and of all, seconds of the slowest.
TEST_F(PlanAnswers, OfRanks) {
  const auto ranks = [&](int n) { return cat(" learner.shards=4 trainer.device=cuda trainer.n_gpus_per_node=", n); };
  const auto json = [&](const std::string& more) {
    const Outcome o = run(tiny_ + more + " --machine h200 --json");
    EXPECT_EQ(o.code, 0) << o.err;
    return Json::parse(o.code == 0 ? o.out : "{}");
  };
  const Json one = json(ranks(1)), four = json(ranks(4)), nodes = json(ranks(2) + " trainer.nnodes=2");
  EXPECT_EQ(one["ranks"], 1);
  EXPECT_EQ(four["ranks"], 4);
  // NCCL takes 0.6 GB, and 384 MiB for each of the others on the machine.
  const auto left = [](const Json& j) { return j["available"].get<int64_t>(); };
  EXPECT_EQ(left(one), 140'000'000'000);
  EXPECT_EQ(left(four), left(one) - 600'000'000 - 3 * (384 << 20));
  EXPECT_EQ(left(nodes), left(one) - 600'000'000 - (384 << 20));
  EXPECT_EQ(left(json(ranks(4) + " trainer.comm=host")), left(one));
  EXPECT_EQ(one["phases"]["learner"]["sent"], 0);
  const auto& ops = four["phases"]["learner"]["ops"];
  EXPECT_GT(ops["all_to_all"]["sent"], 0);
  EXPECT_GT(ops["all_to_all"]["seconds"], 0);
  EXPECT_EQ(four["phases"]["rollout"]["flops"].get<int64_t>() * 4, four["all_ranks"]["rollout"]["flops"]);
  EXPECT_EQ(four["all_ranks"]["rollout"]["ops"]["linear_fwd"]["flops"],
            one["phases"]["rollout"]["ops"]["linear_fwd"]["flops"]);
  EXPECT_LT(four["memory"]["arenas"]["optimizer"]["most"],
            0.3 * one["memory"]["arenas"]["optimizer"]["most"].get<double>());
  // As much is done and sent.
  const auto local = [](Json all) {
    for (auto& phase : all) {
      phase.erase("abroad");
      for (auto& op : phase["ops"]) op.erase("abroad");
    }
    return all;
  };
  EXPECT_EQ(local(nodes["all_ranks"]), local(four["all_ranks"]));
  EXPECT_EQ(four["all_ranks"]["learner"]["abroad"], 0);
  EXPECT_GT(nodes["all_ranks"]["learner"]["abroad"], 0);
  // A gradient goes to each of the others, of which two are abroad; of weights as much crosses the network on two nodes
  // of two ranks, but by NCCL not on two nodes of eight.
  const auto gather = [&](const std::string& comm) {
    const Json j =
        json(" learner.shards=16 trainer.device=cuda trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.comm=" + comm);
    return j["phases"]["learner"]["ops"]["all_gather"]["seconds"].get<double>();
  };
  EXPECT_LT(gather("nccl"), gather("host"));
  EXPECT_GT(nodes["phases"]["learner"]["seconds"], four["phases"]["learner"]["seconds"]) << "the network is slower";
  double seconds = 0;
  for (const auto& phase : four["phases"]) seconds += phase["seconds"].get<double>();
  EXPECT_NEAR(four["seconds"], seconds, 1e-9);

  const Outcome text = run(tiny_ + ranks(4) + " --machine h200");
  EXPECT_NE(text.out.find("\n  4 ranks "), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("\n  between "), std::string::npos) << text.out;
  const Outcome shards = run(tiny_ + " learner.shards=3 trainer.n_gpus_per_node=4");
  EXPECT_EQ(shards.code, 2);
  EXPECT_NE(shards.err.find("learner.shards = 3 cannot be dealt to 4 ranks; 4 can"), std::string::npos) << shards.err;
  const std::string file = machine_file(kText);
  const Outcome unlinked = run(tiny_ + ranks(2) + " --machine " + file);
  EXPECT_EQ(unlinked.code, 2);
  EXPECT_NE(unlinked.err.find("machine a box has no link"), std::string::npos) << unlinked.err;
  EXPECT_EQ(run(tiny_ + ranks(1) + " --machine " + file).code, 0);
  // Of a host they share what there is.
  const auto available = [&](int n) {
    return json(cat(" learner.shards=4 trainer.n_gpus_per_node=", n))["available"].get<double>();
  };
  EXPECT_EQ(available(4), available(1) / 4);
  // --largest, --compare.
  const Outcome largest = run(tiny_ + ranks(4) + " --memory 12MB --largest rollout.max_num_seqs");
  ASSERT_EQ(largest.code, 0) << largest.err;
  const int64_t value = std::stoll(largest.out.substr(largest.out.find(" = ") + 3));
  const auto fits = [&](int64_t n) {
    return run(tiny_ + ranks(4) + cat(" --memory 12MB rollout.max_num_seqs=", n)).out.starts_with("fits ");
  };
  EXPECT_TRUE(fits(value));
  EXPECT_FALSE(fits(value + 1));
  const Outcome compared = run(tiny_ + ranks(4) + " --memory 12MB --compare nat-rpc");
  ASSERT_EQ(compared.code, 0) << compared.err;
  EXPECT_NE(one_line(compared.out).find("bytes at most on the fullest of 4 ranks; of all ranks, FLOP of the rollout"),
            std::string::npos)
      << compared.out;
}

// What is said to fit does, alone.
TEST_F(PlanAnswers, NamesWhatWouldMakeItFit) {
  const std::string plan = tiny_ + " --device cuda --memory ";
  const auto flat = [](const std::string& text) {
    std::istringstream words(text);
    std::string all;
    for (std::string word; words >> word;) all += word + " ";
    return all;
  };
  const int64_t most = Json::parse(run(plan + "1GB --json").out)["memory"]["most"];
  const Outcome o = run(plan + cat(most - 200'000));
  const std::string text = flat(o.out), mark = "with one of these it fits: ";
  const size_t at = text.find(mark);
  ASSERT_NE(at, std::string::npos) << o.out;
  const size_t begin = at + mark.size();
  std::istringstream list(text.substr(begin, text.find(" model ", begin) - begin));
  int settings = 0;
  for (std::string setting; std::getline(list, setting, ',');) {
    settings++;
    EXPECT_TRUE(run(plan + cat(most - 200'000) + " " + setting).out.starts_with("fits ")) << setting;
  }
  EXPECT_GE(settings, 3) << o.out;
  EXPECT_NE(flat(run(plan + "100kB").out).find("none of moments"), std::string::npos);
}

TEST_F(PlanAnswers, LengthsOfARunAreItsBooks) {
  const std::string run_ = cat(testing::TempDir(), "pare_lengths_", getpid());
  const std::string config =
      "model.config=tiny-ssa model.init=fan_in data.train_batch_size=8 rollout.n=8 data.max_prompt_length=64 "
      "data.max_response_length=60";
  const Outcome train = run("train " + config + " trainer.total_training_steps=3 --force --out " + run_);
  ASSERT_EQ(train.code, 0) << train.err;
  std::ifstream file(run_ + "/metrics.jsonl");
  double rollout = 0, learner = 0;
  int steps = 0;
  for (std::string line; std::getline(file, line); steps++) {
    const Json m = Json::parse(line);
    rollout += m["flops/rollout"].get<double>();
    learner += m["flops/learner"].get<double>();
  }
  ASSERT_EQ(steps, 3);
  const Outcome o = run("plan " + config + " --json --lengths " + run_);
  ASSERT_EQ(o.code, 0) << o.err;
  const Json plan = Json::parse(o.out);
  EXPECT_NEAR(plan["phases"]["rollout"]["flops"].get<double>(), rollout / 3, 0.04 * rollout / 3);
  EXPECT_NEAR(plan["phases"]["learner"]["flops"].get<double>(), learner / 3, 0.04 * learner / 3);
  EXPECT_EQ(run("plan " + config + " --lengths 61").code, 2);
  EXPECT_EQ(run("plan " + config + " --lengths /no/such/run").code, 2);
  fs::remove_all(run_);
}

TEST_F(PlanAnswers, ComparesMethods) {
  const std::string machine = machine_file(kText);
  const Outcome o = run(tiny_ + " --compare grpo,nat-rpc --machine " + machine);
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("\nas it is"), std::string::npos);
  EXPECT_NE(o.out.find("\nnat-rpc"), std::string::npos);
  std::istringstream lines(o.out);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  const Json j =
      Json::parse(run(tiny_ + " data.max_response_length=220 --json --compare grpo,nat-rpc --machine " + machine).out);
  EXPECT_GT(j["grpo"]["phases"]["ref"]["flops"], 0);
  EXPECT_LT(j["nat-rpc"]["seconds"], j["as it is"]["seconds"]);
  EXPECT_GT(j["grpo"]["seconds"], j["as it is"]["seconds"]);
  EXPECT_EQ(j["grpo"]["available"], 1'500'000'000);
  // A preset that names weights has its method compared: the shape that was typed holds.
  const Outcome paper = run("plan dr-grpo model.config=qwen2.5-0.5b trainer.device=cuda --compare paper-dash");
  EXPECT_EQ(paper.code, 0) << paper.err;
}

}  // namespace
}  // namespace pare::test
