// The whole program on the device `emu`: the CUDA kernels on memory that the host cannot touch, work that runs as late
// as allowed, and arenas of the planned sizes.
#include <deque>
#include <filesystem>

#include "base/half.h"
#include "cuda/emu/include/cuda_runtime.h"
#include "model/hf/folder.h"
#include "ops/norm.h"
#include "ops/rope.h"
#include "run/checkpoint.h"
#include "run/sft_training.h"
#include "tests/generator.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

// 2 prompts x 2 samples of at most 24 tokens.
Config small_run(const std::string& type, const std::string& dtype, const std::vector<std::string>& more = {}) {
  std::vector<std::string> all = {
      "data.train_batch_size=2", "data.max_response_length=24",       "rollout.n=2",
      "rollout.max_num_seqs=3",  "rollout.max_num_batched_tokens=50", "data.min_statements=2",
      "data.max_statements=2",   "actor.ppo_max_token_len=90",        "trainer.device=emu",
      "model.dtype=" + dtype};
  all.insert(all.end(), more.begin(), more.end());
  return tiny_run(type, all);
}

// The moments and parameters, and what a step said of itself.
struct Outcome {
  Metrics metrics;
  std::vector<float> parameters, m, v;
  Outcome(const Metrics& step, const Model& model, const Learner& learner)
      : metrics(step), parameters(model.get_parameters()), m(parameters.size()), v(parameters.size()) {
    learner.get_moment(Moment::m, 0, model.size(), m.data());
    learner.get_moment(Moment::v, 0, model.size(), v.data());
  }
};

Outcome sft_step(const Config& config, const Table& table) {
  Session session(config, table, true, training_limits(config, TrainingKind::sft, table));
  SftTraining sft(session);
  const Metrics metrics = sft.step();
  return {metrics, *session.model, sft.learner()};
}

void expect_same_outcome(const Outcome& a, const Outcome& b) {
  for (const auto& [name, value] : a.metrics.all())
    if (!name.starts_with("timing_s/") && !name.starts_with("memory/") && !name.starts_with("perf/")) {
      EXPECT_TRUE(value == b.metrics.get(name) || (std::isnan(value) && std::isnan(b.metrics.get(name))))
          << name << ": " << value << ", " << b.metrics.get(name);
    }
  EXPECT_EQ(a.metrics.text("certificate"), b.metrics.text("certificate"));
  EXPECT_TRUE(same_bits(a.parameters, b.parameters));
  EXPECT_TRUE(same_bits(a.m, b.m));
  EXPECT_TRUE(same_bits(a.v, b.v));
}

// ---- f32: the bits of the cpu

// The kernels of RMSNorm add up in an order of their own (norm.cu), all others in that of list.h.  With the norms of
// the cpu, on copies of what lies on the device, every bit of a run is that of the cpu.
class OnTheHost {
 public:
  explicit OnTheHost(Stream stream) : stream_(stream) {}
  ~OnTheHost() {
    for (Copy& c : copies_) table_emu.upload({c.device, c.host.data()}, stream_);
    char nothing;
    table_emu.download({&nothing, make_tensor(nullptr, DType::u8, {0})}, stream_);
  }
  Tensor operator()(const Tensor& t) {
    int64_t span = 1;
    for (int i = 0; i < t.rank; i++) span += (t.shape[i] - 1) * t.stride[i];
    const Tensor bytes = make_tensor(t.data, DType::u8, {span * static_cast<int64_t>(dtype_size(t.dtype))});
    Tensor here = t;
    for (Copy& c : copies_)
      if (c.device.data == t.data) {
        here.data = c.host.data();
        return here;
      }
    Copy& c = copies_.emplace_back(Copy{bytes, std::vector<char>(bytes.bytes())});
    table_emu.download({c.host.data(), bytes}, stream_);
    here.data = c.host.data();
    return here;
  }

 private:
  struct Copy {
    Tensor device;
    std::vector<char> host;
  };
  const Stream stream_;
  std::deque<Copy> copies_;
};
extern const Table emu_with_norms_of_cpu;
const Table emu_with_norms_of_cpu = [] {
  Table t = table_emu;
  t.rmsnorm_fwd = [](const RmsnormFwd& a, Stream s) {
    OnTheHost host(s);
    table_cpu.rmsnorm_fwd({host(a.y), host(a.rstd), host(a.x), host(a.w), a.eps}, s);
  };
  t.rmsnorm_bwd = [](const RmsnormBwd& a, Stream s) {
    OnTheHost host(s);
    table_cpu.rmsnorm_bwd(
        {host(a.dx), host(a.dw), host(a.dy), host(a.x), host(a.w), host(a.rstd), a.accumulate, host(a.parts)}, s);
  };
  t.qk_norm_rope_fwd = [](const QkNormRopeFwd& a, Stream s) {
    OnTheHost host(s);
    table_cpu.qk_norm_rope_fwd({host(a.y), host(a.rstd), host(a.x), host(a.q_norm), host(a.k_norm), host(a.table),
                                host(a.pos), a.q_heads, a.eps},
                               s);
  };
  t.embedding_fwd = [](const EmbeddingFwd& a, Stream s) {
    table_emu.embedding_fwd({a.y, a.table, a.ids}, s);
    if (a.norm.y) emu_with_norms_of_cpu.rmsnorm_fwd({a.norm.y, a.norm.rstd, a.y, a.norm.w, a.norm.eps}, s);
  };
  t.kv_write = [](const KvWrite& a, Stream s) {
    KvWrite write = a;
    if (a.rotation.norm_rope.y) {
      if (a.product.y) table_emu.linear_fwd(std::exchange(write.product, {}), s);
      emu_with_norms_of_cpu.qk_norm_rope_fwd(a.rotation.norm_rope, s);
      write.rotation = {};
    }
    table_emu.kv_write(write, s);
  };
  t.qk_norm_rope_bwd = [](const QkNormRopeBwd& a, Stream s) {
    OnTheHost host(s);
    table_cpu.qk_norm_rope_bwd({host(a.dx), host(a.dq_norm), host(a.dk_norm), host(a.parts), host(a.dy), host(a.x),
                                host(a.q_norm), host(a.k_norm), host(a.rstd), host(a.table), host(a.pos), a.q_heads},
                               s);
  };
  return t;
}();

TEST(EmuDevice, RolloutHasTheBitsOfTheCpu) {
  for (const bool tied : {false, true}) {
    const RolloutLimits limits{.max_sequences = 4, .max_batched_tokens = 21, .max_context = 60};
    const std::vector<Request> requests = {
        {{3, 5, 7, 11, 13, 2, 9}, {1, 2, 3}, 20}, {{1}, {4}, 30}, {{8, 8, 6}, {5, 6}, 9}};
    const ModelConfig c = tiny_config(tied ? "qwen2" : "qwen3", tied);
    Generator cpu(table_cpu, c, limits), emu(emu_with_norms_of_cpu, c, limits);
    expect_same(cpu.rollout.generate(requests, mixed_sampling()), emu.rollout.generate(requests, mixed_sampling()),
                c.model_type);
  }
}

// The host waits once for eight passes; what it uploads for them waits for nothing.
TEST(EmuDevice, TheHostWaitsOnceForThePassesThatAreQueued) {
  const std::vector<Request> requests = {
      {{3, 5, 7, 11, 13, 2, 9}, {1, 2, 3}, 40}, {{1}, {4}, 30}, {{8, 8, 6}, {5, 6}, 9}};
  for (const KvMethod method : {KvMethod::dense, KvMethod::h2o, KvMethod::rkv, KvMethod::quest}) {
    KvSpec spec;
    spec.method = method;
    spec.evict.budget = 10;
    spec.evict.buffer = 5;
    spec.window.size = 3;
    spec.window.pooling_kernel = 3;
    spec.blocks.size = 4;
    spec.blocks.count = 3;
    spec.blocks.first = 1;
    spec.blocks.last = 1;
    spec.blocks.dense_layers = 1;
    const auto run = [&](int lookahead, RolloutStats& stats, int64_t& passes, int64_t& waits) {
      Generator g(table_emu, tiny_config("qwen3", false),
                  {.max_sequences = 4, .max_batched_tokens = 21, .max_context = 60, .kv = spec, .lookahead = lookahead},
                  DType::bf16);
      g.device.wait();
      const uint64_t before = cuemu::host_waits();
      const auto completions = g.rollout.generate(requests, mixed_sampling());
      waits = static_cast<int64_t>(cuemu::host_waits() - before);
      passes = g.ledger.phases["main"]["sample"].calls;
      stats = g.rollout.stats();
      return completions;
    };
    RolloutStats one, eight;
    int64_t passes = 0, waits = 0;
    const auto expected = run(1, one, passes, waits);
    EXPECT_GT(passes, 20);
    EXPECT_EQ(waits, passes);
    expect_same(run(8, eight, passes, waits), expected, cat("method ", static_cast<int>(method)));
    EXPECT_EQ(waits, (passes + 7) / 8);
    EXPECT_GT(eight.discarded_tokens, 0);
    EXPECT_EQ(one.compressions, eight.compressions);
  }
}

#if __has_builtin(__builtin_clear_padding)
constexpr bool kClearsPadding = true;
#else
constexpr bool kClearsPadding = false;
#endif

// In steady decoding a pass is one launch and one upload, beside those of page tables that grew; of the graph only what
// depends on the place of the pass among those that are queued is set anew.
TEST(EmuDevice, ADecodePassIsOneLaunchAndOneUpload) {
  for (const auto& [family, dtype] :
       {std::pair{"qwen3", DType::f32}, {"qwen3", DType::bf16}, {"qwen2", DType::f32}, {"qwen2", DType::bf16}}) {
    ModelConfig config = tiny_config(family, false);
    // Rows begin at multiples of 16 bytes, gates end with a panel, and halves of heads are tiles: products make SwiGLU,
    // norms and, without QK-norm, rotations and the write of keys; the LM head makes sums of tiles.
    config.hidden = config.vocab = 40;
    config.head_dim = config.qk_norm ? 8 : 64;
    config.ffn = 48;
    // Each of the two layers has four products, the write of keys and attention, in f32 two norms and SwiGLU, too.
    // Outside of them there are the embedding, with the first norm, the LM head and the draws.
    const uint64_t kernels_of_layer = dtype == DType::f32 ? 9 : config.qk_norm ? 6 : 5;
    SCOPED_TRACE(cat(family, ", ", dtype_name(dtype)));
    Generator g(table_emu, config, {.max_sequences = 4, .max_batched_tokens = 21, .max_context = 100, .lookahead = 8},
                dtype);
    cuemu::Calls before = cuemu::calls();
    int64_t rounds = 0, steady = 0;
    const auto kernels = [&] { return static_cast<uint64_t>(g.ledger.phases["main"]["linear_fwd"].calls); };
    uint64_t linears = 0;
    g.rollout.generate({{{3, 5, 7}, {1, 2, 3, 4}, 81}}, {.key = 1, .eos = {}}, [&](const RolloutStats& stats) {
      const cuemu::Calls& now = cuemu::calls();
      if (rounds > 1) {  // neither the prompt nor the first graphs
        const uint64_t passes = stats.decoded_tokens == 4 * 81 ? 1 : 8, read = 1;
        EXPECT_EQ(now.graph_launches - before.graph_launches, passes);
        EXPECT_EQ(now.graph_nodes - before.graph_nodes, passes * (2 * kernels_of_layer + 3));
        EXPECT_EQ(now.launches, before.launches);
        EXPECT_EQ(now.graphs_made, before.graphs_made);
        if (kClearsPadding) {
          EXPECT_EQ(now.nodes_set - before.nodes_set, 2 * passes);  // where tokens are read and drawn to
        }
        EXPECT_EQ(kernels() - linears, 7 * passes);  // the fourth of a layer is called by the write of keys
        steady += now.copies - before.copies == passes + read;
      }
      rounds++;
      before = now;
      linears = kernels();
    });
    EXPECT_EQ(rounds, 11);
    EXPECT_EQ(steady, 5);  // pages of 16 slots: in every other round they grow
  }
}

// Where sequences end, graphs are set to the new number of rows, not made anew.
TEST(EmuDevice, FewGraphsServeAllNumbersOfRows) {
  std::vector<Request> requests;
  for (int i = 0; i < 5; i++) requests.push_back({{3, 5, 7}, {static_cast<uint64_t>(i)}, 5 + 7 * i});
  const auto run = [&](bool graphs, int64_t& passes) {
    Generator g(table_emu, tiny_config("qwen3", false),
                {.max_sequences = 5, .max_batched_tokens = 20, .max_context = 40, .lookahead = 4}, DType::f32);
    g.device.graphs = graphs;
    auto all = g.rollout.generate(requests, {.key = 1, .eos = {}});
    passes = g.rollout.stats().graph_passes;
    return all;
  };
  const cuemu::Calls before = cuemu::calls();
  int64_t passes = 0, none = 0;
  const auto with = run(true, passes);
  EXPECT_GT(passes, 25);
  EXPECT_LE(cuemu::calls().graphs_made - before.graphs_made, 4u);
  EXPECT_EQ(cuemu::calls().graph_launches - before.graph_launches, static_cast<uint64_t>(passes));
  expect_same(with, run(false, none), "graphs");
}

TEST(EmuDevice, WithoutMemoryForAGraphKernelsAreLaunchedOneByOne) {
  Device device(table_emu);
  Arena arena("a", *table_emu.memory, 256);
  const Tensor x = arena.alloc("x", DType::f32, {3}), y = arena.alloc("y", DType::f32, {3});
  const std::vector<float> values = {1, 2, 3};
  device.upload({x, values.data()});
  device.upload({y, values.data()});
  const size_t before = cuemu::settings().device_memory;
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  cuemu::settings().device_memory = before - free;
  for (int i = 0; i < 2; i++) {
    EXPECT_FALSE(device.together([&] { device.accumulate({y, x}); }));
    cuemu::settings().device_memory = before;  // it does not try again
  }
  std::vector<float> back(3);
  device.download({back.data(), y});
  EXPECT_EQ(back, (std::vector<float>{3, 6, 9}));
}

TEST(EmuDevice, LogprobsHaveTheBitsOfTheCpu) {
  for (const char* type : {"qwen2", "qwen3", "llama"}) {
    const ModelConfig c = tiny_config(type, false);
    auto groups = random_groups(c, 3);
    groups.resize(4);
    const auto logprobs = [&](const Table& table) {
      World w(table, c);
      w.model.set_parameters(tiny_parameters(c, 5));
      const TokenOuts out = Learner::logprobs(w.model, w.activations, groups, 0.7, {.max_rows = 50});
      std::vector<double> all = out.logprob;
      all.insert(all.end(), out.entropy.begin(), out.entropy.end());
      return all;
    };
    const auto cpu = logprobs(table_cpu), emu = logprobs(emu_with_norms_of_cpu);
    ASSERT_EQ(cpu.size(), emu.size());
    EXPECT_EQ(0, std::memcmp(cpu.data(), emu.data(), cpu.size() * sizeof(double))) << type;
  }
}

// With a vocabulary of many parts, d hidden of the LM head is added in turn, chunk after chunk.
TEST(EmuDevice, TheGradientOfTheHeadsInputIsAddedInTurn) {
  static bool in_turn;
  static int64_t calls = 0;
  Table table = table_emu;
  table.linear_bwd_input = [](const LinearBwdInput& a, Stream stream) {
    if (in_turn && a.parts.sums) {
      asked_tile = kTurnTiles.begin()[1];  // the model of the time wants longer parts
      calls++;
    }
    table_emu.linear_bwd_input(a, stream);
    asked_tile.reset();
  };
  ModelConfig c = tiny_config("qwen2", false);
  c.vocab = 2'100;
  const auto groups = random_groups(c, 3);
  std::vector<double> gradients[2];
  for (const bool turns : {false, true}) {
    in_turn = turns;
    World w(table, c, DType::bf16);
    w.model.set_parameters(tiny_parameters(c, 5));
    Learner learner(w.model, w.gradients, w.optimizer, w.activations, {.logits_chunk = 40});
    TokenTerms terms(static_cast<size_t>(loss_row_offsets(groups).back()));
    for (double& weight : terms.weight) weight = 0.1;
    learner.accumulate(groups, terms, {.policy = PolicyLoss::nll});
    gradients[turns] = learner.gradients();
    EXPECT_EQ(calls > 1, turns);
  }
  EXPECT_EQ(gradients[0], gradients[1]);
}

TEST(EmuDevice, SftStepHasTheBitsOfTheCpu) {
  for (const char* type : {"qwen2", "qwen3", "llama"}) {
    SCOPED_TRACE(type);
    const Config config = small_run(type, "f32", {"data.max_response_length=50"});
    expect_same_outcome(sft_step(config, table_cpu), sft_step(config, emu_with_norms_of_cpu));
  }
}

TEST(EmuDevice, GrpoStepHasTheBitsOfTheCpu) {
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{},
        {"algorithm.rpo.enable=true", "algorithm.rpo.cut=length"},
        {"rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.02", "actor.entropy_coeff=0.01"},
        {"learner.attention=replay", "rollout.kv.method=quest", "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=2",
         "rollout.kv.blocks.first=0", "rollout.kv.blocks.dense_layers=0"},
        {"learner.attention=replay", "rollout.kv.method=rkv", "rollout.kv.evict.budget=5", "rollout.kv.evict.buffer=3",
         "rollout.kv.window.size=2"}}) {
    SCOPED_TRACE(testing::PrintToString(keys));
    const Config config = small_run("qwen3", "f32", keys);
    const auto run = [&](const Table& table) {
      TrainingRun r(config, digits, table);
      const Metrics metrics = r.step();
      const Outcome o(metrics, *r.session.model, r.trainer->learner());
      EXPECT_GT(o.metrics.get("exact/checked_tokens"), 0);
      EXPECT_EQ(o.metrics.get("exact/mismatch_tokens"), 0);
      EXPECT_GT(o.metrics.get("actor/grad_norm"), 0);
      return std::pair(o, r.trainer->samples());
    };
    const auto [cpu, cpu_samples] = run(table_cpu);
    const auto [emu, emu_samples] = run(emu_with_norms_of_cpu);
    expect_same_outcome(cpu, emu);
    ASSERT_EQ(cpu_samples.size(), emu_samples.size());
    for (size_t i = 0; i < cpu_samples.size(); i++) {
      EXPECT_EQ(cpu_samples[i].prefix, emu_samples[i].prefix) << i;
      EXPECT_EQ(cpu_samples[i].tokens, emu_samples[i].tokens) << i;
      EXPECT_TRUE(same_bits(cpu_samples[i].logprob, emu_samples[i].logprob)) << i;
    }
  }
}

// ---- bf16

// Log-probs of the samples by a model in f32 on the cpu.
std::vector<std::vector<float>> on_the_cpu(const Config& config, const std::vector<float>& parameters,
                                           const std::vector<Trajectory>& samples) {
  Session session(config, table_cpu);  // act_type is that of the configuration
  session.model->set_parameters(parameters);
  std::vector<Group> groups;
  for (const Trajectory& s : samples) groups.push_back({s.prompt, {{s.tokens}}});
  const TokenOuts out = Learner::logprobs(*session.model, session.activations, groups, config.rollout.temperature,
                                          session.learner_options());
  std::vector<std::vector<float>> logprobs;
  for (size_t i = 0; i < samples.size(); i++) {
    const auto logprob = out.of(out.logprob, i);
    logprobs.emplace_back(logprob.begin(), logprob.end());
  }
  return logprobs;
}

const std::vector<std::string> kLonger = {"data.max_response_length=50"};

// A step of next-token training against that of the cpu.
void expect_near(const Outcome& emu, double part) {
  const Outcome cpu = sft_step(small_run("qwen3", "f32", kLonger), table_cpu);
  for (const char* name : {"train/loss", "actor/entropy", "actor/grad_norm"})
    EXPECT_NEAR(emu.metrics.get(name), cpu.metrics.get(name), part * cpu.metrics.get(name)) << name;
}

// The order of sums in RMSNorm: roundings of f32, a hundred of them.
TEST(EmuDevice, F32StepsAreTheCpusButForRoundings) {
  expect_near(sft_step(small_run("qwen3", "f32", kLonger), table_emu), 1e-5);
}

TEST(EmuDevice, Bf16StepsAreNearTheCpu) {
  const Config f32 = small_run("qwen3", "f32"), bf16 = small_run("qwen3", "bf16");
  expect_near(sft_step(small_run("qwen3", "bf16", kLonger), table_emu), 0.01);

  TrainingRun run(bf16, digits, table_emu);
  const std::vector<float> before = run.parameters();
  const Metrics m = run.step();
  EXPECT_GT(m.get("exact/checked_tokens"), 0);
  EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
  const auto logprobs = on_the_cpu(f32, before, run.trainer->samples());
  for (size_t i = 0; i < logprobs.size(); i++)
    for (size_t t = 0; t < logprobs[i].size(); t++)
      EXPECT_NEAR(run.trainer->samples()[i].logprob[t], logprobs[i][t], 0.06) << "sample " << i << ", token " << t;
}

TEST(EmuDevice, TruncatedBf16StepsAreExact) {
  TrainingRun run(small_run("qwen3", "bf16", {"rollout.top_k=20", "rollout.top_p=0.8", "rollout.min_p=0.02"}), digits,
                  table_emu);
  for (int step = 0; step < 2; step++) {
    const Metrics m = run.step();
    EXPECT_GT(m.get("exact/checked_tokens"), 0);
    EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
  }
}

// The weights that the optimizer changes are f32, and a checkpoint holds them: a resumed run has the same bits.
TEST(EmuDevice, Bf16ResumesToTheSameBits) {
  const Config config = small_run("qwen2", "bf16", {"actor.optim.lr=1e-4"});
  const std::string folder = cat(testing::TempDir(), "pare_emu_checkpoint_", getpid());
  TrainingRun whole(config, digits, table_emu);
  const std::vector<float> initial = whole.parameters();
  whole.step();
  const std::vector<float> once = whole.parameters();
  int64_t moved = 0, between = 0;  // between two bf16 numbers
  for (size_t i = 0; i < once.size(); i++) {
    moved += once[i] != initial[i];
    between += bf16_to_f32(f32_to_bf16(once[i])) != once[i];
  }
  EXPECT_GT(moved, static_cast<int64_t>(once.size()) / 2);
  EXPECT_GT(between, static_cast<int64_t>(once.size()) / 2);
  RunState state;
  state.training = whole.trainer->state();
  save_checkpoint(folder, whole.session, *whole.trainer, state);
  whole.step();

  TrainingRun resumed(config, digits, table_emu);
  load_checkpoint(folder, resumed.session, *resumed.trainer);
  EXPECT_TRUE(same_bits(resumed.parameters(), once));
  resumed.step();
  EXPECT_TRUE(same_bits(resumed.parameters(), whole.parameters()));
  EXPECT_FALSE(same_bits(once, whole.parameters()));
  fs::remove_all(folder);
}

// ---- linear layers by cuBLASLt

const std::vector<std::string> kFast = {"trainer.exact=false"};

// Weights go in and come out whatever their order in memory; a checkpoint holds their rows.
TEST(EmuDevice, FastTablesKeepParameters) {
  for (const DType act : {DType::f32, DType::bf16}) {
    const ModelConfig c = tiny_config("qwen2", false);
    World exact(table_emu, c, act), fast(table_emu_fast, c, act);
    exact.model.set_parameters(tiny_parameters(c, 5));
    fast.model.set_parameters(tiny_parameters(c, 5));
    EXPECT_TRUE(same_bits(exact.model.get_parameters(), fast.model.get_parameters()));
  }
}

TEST(EmuDevice, FastStepsAreNearTheCpu) {
  for (const auto& [dtype, part] : {std::pair("f32", 1e-5), {"bf16", 0.01}}) {
    std::vector<std::string> more = kLonger;
    more.insert(more.end(), kFast.begin(), kFast.end());
    const Config config = small_run("qwen3", dtype, more);
    const Outcome fast = sft_step(config, table_emu_fast);
    expect_near(fast, part);
    EXPECT_FALSE(same_bits(fast.parameters, sft_step(config, table_emu).parameters)) << dtype;
    expect_same_outcome(fast, sft_step(config, table_emu_fast));  // but the same in every run
  }
}

// The sampler's log-probs are the learner's but for roundings, which is counted and ends nothing; so ratios to them are
// measured too.
TEST(EmuDevice, FastRolloutsAreNearTheLearner) {
  for (const char* dtype : {"f32", "bf16"}) {
    SCOPED_TRACE(dtype);
    // Tokens enough that some rounding to bf16 falls the other way.
    const Config config =
        small_run("qwen3", dtype, {"trainer.exact=false", "rollout.n=8", "data.max_response_length=50"});
    TrainingRun run(config, digits, table_emu_fast);
    const std::vector<float> before = run.parameters();
    const Metrics m = run.step();
    EXPECT_GT(m.get("exact/checked_tokens"), 100);
    EXPECT_GT(m.get("exact/mismatch_tokens"), 0);
    EXPECT_GT(m.get("actor/grad_norm"), 0);
    const bool f32 = dtype == std::string("f32");
    EXPECT_LT(std::abs(m.get("rollout_corr/kl")), f32 ? 1e-5 : 0.05);
    const auto logprobs = on_the_cpu(small_run("qwen3", "f32", kLonger), before, run.trainer->samples());
    for (size_t i = 0; i < logprobs.size(); i++)
      for (size_t t = 0; t < logprobs[i].size(); t++)
        EXPECT_NEAR(run.trainer->samples()[i].logprob[t], logprobs[i][t], f32 ? 1e-4 : 0.06) << i << ", " << t;
  }
}

// What the sampler says is no longer what a ratio is to: the old log-probs are the learner's own.
TEST(EmuDevice, FastStepsOfSeveralUpdatesAskTheLearnerForTheOldLogprobs) {
  for (const char* exact : {"true", "false"}) {
    TrainingRun run(small_run("qwen3", "f32", {cat("trainer.exact=", exact), "actor.ppo_epochs=2"}));
    run.step();
    EXPECT_EQ(run.session.ledger.phases.contains("old_log_prob"), exact == std::string("false"));
  }
}

// The library's kernels are in no graph: what lies between them is launched in order, one by one.
TEST(EmuDevice, FastPassesAreNoGraphs) {
  const auto run = [](bool graphs, uint64_t& launched) {
    Generator g(table_emu_fast, tiny_config("qwen3", false),
                {.max_sequences = 4, .max_batched_tokens = 21, .max_context = 60, .lookahead = 8}, DType::bf16);
    g.device.graphs = graphs;
    const uint64_t before = cuemu::calls().graph_launches;
    auto all = g.rollout.generate({{{3, 5, 7}, {1, 2, 3}, 20}, {{1}, {4}, 30}}, mixed_sampling());
    EXPECT_EQ(g.rollout.stats().graph_passes, 0);
    launched = cuemu::calls().graph_launches - before;
    return all;
  };
  uint64_t gathered = 0, plain = 0;
  expect_same(run(true, gathered), run(false, plain), "graphs");
  EXPECT_EQ(gathered, 0u);
  EXPECT_EQ(plain, 0u);
}

// Steps of one kind are not continued with the other: a bit of them would differ.
TEST(EmuDevice, FastRunsResumeToTheSameBitsAndExactOnesNot) {
  const Config config = small_run("qwen2", "bf16", kFast);
  const std::string folder = cat(testing::TempDir(), "pare_emu_fast_checkpoint_", getpid());
  TrainingRun whole(config, digits, table_emu_fast);
  whole.step();
  RunState state;
  state.training = whole.trainer->state();
  save_checkpoint(folder, whole.session, *whole.trainer, state);
  whole.step();

  TrainingRun resumed(config, digits, table_emu_fast);
  load_checkpoint(folder, resumed.session, *resumed.trainer);
  resumed.step();
  EXPECT_TRUE(same_bits(resumed.parameters(), whole.parameters()));

  TrainingRun exact(small_run("qwen2", "bf16"), digits, table_emu);
  try {
    load_checkpoint(folder, exact.session, *exact.trainer);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::usage);
    EXPECT_NE(std::string(e.what()).find("trainer.exact"), std::string::npos) << e.what();
  }
  fs::remove_all(folder);
}

// ---- memory

TEST(EmuDevice, TakesThePlannedBytesAndNoMore) {
  for (const Table* table : {&table_emu, &table_emu_fast}) {
    SCOPED_TRACE(table->name);
    const Config config = small_run("qwen3", "bf16", table == &table_emu ? std::vector<std::string>{} : kFast);
    const size_t before = table->memory->free();
    const Plan plan = plan_step(config);
    const ArenaLimits limits = training_limits(config, TrainingKind::grpo, *table);
    Session session(config, *table, true, limits);
    EXPECT_EQ(before - table->memory->free(), limits.total());
    GrpoTraining trainer(session);
    trainer.worst_case_step();
    for (size_t i = 0; i < plan.memory.size(); i++) {
      const Arena& arena = *session.arenas()[i];
      EXPECT_EQ(plan.memory[i].peak, arena.peak()) << arena.name();
      // Those of other lengths may be larger.
      if (arena.name() == "activations" || arena.name() == "scratch") {
        EXPECT_LE(arena.peak(), arena.limit());
      } else {
        EXPECT_EQ(arena.peak(), arena.limit()) << arena.name();
      }
    }
    EXPECT_EQ(plan.ledger.phases, session.ledger.phases);
  }
}

// Passes in graphs, several ahead, and steps of the optimizer, by turns on the same memory.
TEST(EmuDevice, SharedMemoryChangesNoBit) {
  const auto steps = [](const char* shares) {
    TrainingRun run(small_run("qwen3", "bf16", {cat("rollout.free_cache_engine=", shares)}), digits, table_emu);
    std::vector<Outcome> all;
    for (int i = 0; i < 2; i++) {
      const Metrics m = run.step();
      EXPECT_GT(m.get("perf/graph_share"), 0);
      all.emplace_back(m, *run.session.model, run.trainer->learner());
    }
    return all;
  };
  const auto apart = steps("false"), together = steps("true");
  for (int i = 0; i < 2; i++) expect_same_outcome(apart[i], together[i]);
}

TEST(EmuDevice, WhatDoesNotFitIsRefusedBeforeTheStart) {
  const Config config =
      small_run("qwen3", "bf16", {"model.enable_gradient_checkpointing=false", "actor.logits_chunk=1024"});
  const size_t needed = training_limits(config, TrainingKind::grpo, table_null).total(),
               before = cuemu::settings().device_memory;
  const size_t left = size_t{512} << 20;  // to CUDA
  cuemu::settings().device_memory = needed + left;
  training_limits(config, TrainingKind::grpo, table_emu);
  cuemu::settings().device_memory = needed + left - 1;
  try {
    training_limits(config, TrainingKind::grpo, table_emu);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::memory);
    for (const std::string& part :
         {std::string(", 1B (1) more than the "), std::string("activations "), cat("(", needed - 1, ") free")})
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
  EXPECT_THROW(Arena("more", *table_emu.memory, needed + left), Error);
  cuemu::settings().device_memory = before;
}

// Work runs when somebody waits for it; an upload has what its source held when it was called.
TEST(EmuDevice, UploadsOwnWhatTheyRead) {
  Device device(table_emu);
  Arena arena("a", *table_emu.memory, 256);
  const Tensor t = arena.alloc("t", DType::i32, {3});
  std::vector<int32_t> host = {1, 2, 3}, back(3);
  device.upload({t, host.data()});
  host = {4, 5, 6};
  device.download({back.data(), t});
  EXPECT_EQ(back, (std::vector<int32_t>{1, 2, 3}));
  device.upload({t, host.data()});  // and nobody waits
}

// What does not fit beside what is under way is uploaded in pieces.
TEST(EmuDevice, UploadsOfAnySize) {
  Device device(table_emu);
  Arena arena("a", *table_emu.memory, 2 * Device::kStaging);
  std::vector<int32_t> host(Device::kStaging / 4 + 1001), back(host.size());
  for (size_t i = 0; i < host.size(); i++) host[i] = static_cast<int32_t>(i * 2654435761u);
  const Tensor small = arena.alloc("small", DType::i32, {3});
  const Tensor large = arena.alloc("large", DType::i32, {std::ssize(host)});
  device.upload({small, host.data()});
  device.upload({large, host.data()});
  device.download({back.data(), large});
  EXPECT_EQ(back, host);
}

TEST(EmuDevice, NanCheckReadsTheDevice) {
  for (const DType act : {DType::f32, DType::bf16}) {
    const ModelConfig c = tiny_config("qwen3", true);
    World w(table_emu, c, act);
    std::vector<float> parameters = tiny_parameters(c, 5);
    parameters[parameters.size() - 1] = NAN;  // of the last norm
    w.model.set_parameters(parameters);
    w.device.check_nan = true;
    try {
      Learner::logprobs(w.model, w.activations, {{{1, 2}, {{{3}, {}}}}}, 1, {});
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::non_finite);
      EXPECT_NE(std::string(e.what()).find("rmsnorm_fwd: output 0 "), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace pare::test
