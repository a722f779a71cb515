// Properties that the CUDA program reads when it opens a device, on the devices that the emulator stands in for; and
// the choice between mma.sync and wgmma.
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "cuda/emu/include/cuda_runtime.h"
#include "ops/attention.h"
#include "ops/linear_tiles.h"
#include "run/plan.h"
#include "tests/generator.h"
#include "tests/kernel_call.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// Opens the device `arch` with PARE_WGMMA in the environment ("": without) and the code of `code`.
class Opened {
 public:
  explicit Opened(int arch, const std::string& wgmma = "", int code = 90) {
    cuemu::settings().arch = arch;
    cuemu::settings().code = code;
    wgmma.empty() ? unsetenv("PARE_WGMMA") : setenv("PARE_WGMMA", wgmma.c_str(), 1);
    try {
      table_emu.open(self(), DeviceComm::any);
      name = table_emu.describe();
    } catch (const Error& e) {
      error = e.what();
      EXPECT_EQ(e.code, Exit::usage) << error;
    }
  }
  ~Opened() {
    cuemu::settings() = before_;
    set_ ? setenv("PARE_WGMMA", kept_.c_str(), 1) : unsetenv("PARE_WGMMA");
    table_emu.open(self(), DeviceComm::any);
  }
  std::string name, error;

 private:
  const cuemu::Settings before_ = cuemu::settings();
  const char* const set_ = std::getenv("PARE_WGMMA");
  const std::string kept_ = set_ ? set_ : "";
};

TEST(EmuMachine, SaysWhatItIs) {
  const std::string name = "the CUDA kernels, emulated on the CPU, compute capability ";
  EXPECT_EQ(Opened(90).name, name + "9.0, by wgmma");
  EXPECT_EQ(Opened(90, "1").name, name + "9.0, by wgmma");
  EXPECT_EQ(Opened(90, "0").name, name + "9.0, by mma.sync");
  for (const auto& [arch, version] : {std::pair{80, "8.0"}, {86, "8.6"}, {89, "8.9"}, {100, "10.0"}, {120, "12.0"}}) {
    EXPECT_EQ(Opened(arch).name, name + version);
    EXPECT_EQ(Opened(arch, "0").name, name + version);
  }
  EXPECT_EQ(Opened(90, "", 80).name, name + "9.0");
}

TEST(EmuMachine, WhatItLacksIsOneLine) {
  const auto expect_error = [](const Opened& o, const std::string& text) { EXPECT_EQ(o.error, text) << o.name; };
  const std::string name = "the CUDA kernels, emulated on the CPU, compute capability ";
  expect_error(Opened(75), name + "7.5: 8.0 at least is needed, for bfloat16; run with --device cpu");
  for (const char* wrong : {"2", "yes", "01", " 1"})
    expect_error(Opened(90, wrong), cat("PARE_WGMMA=", wrong, ": 1 to compute with wgmma, 0 to compute with mma.sync"));
  setenv("PARE_EARLY", "on", 1);
  const Opened not_early(90);
  unsetenv("PARE_EARLY");
  expect_error(not_early, "PARE_EARLY=on: 1 to launch kernels early, 0 to launch each when the one before has ended");
  expect_error(Opened(80, "1"), "PARE_WGMMA=1: " + name + "8.0: wgmma is of compute capability 9.0");
  expect_error(Opened(120, "1"), "PARE_WGMMA=1: " + name + "12.0: wgmma is of compute capability 9.0");
  expect_error(Opened(90, "1", 80),
               "PARE_WGMMA=1: this program was built without the code of 9.0a; make cuda ARCH=90a");
}

// What a session with such heads is refused with; "" if it is not.
std::string refusal(DType act, int64_t d) {
  ModelConfig c = tiny_config("qwen3", false);
  c.head_dim = d;
  Device device(table_emu);
  Arena weights("weights", *table_emu.memory, size_t{1} << 22);
  try {
    const Model model(c, device, weights, act, false);
    return "";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::usage);
    return e.what();
  }
}

TEST(EmuMachine, HeadsThatDoNotFitAreRefusedWhenTheSessionOpens) {
  for (const int arch : {80, 86, 89, 90, 100, 120}) {
    const Opened device(arch);
    const bool small = arch == 86 || arch == 89 || arch == 120;
    for (const DType act : {DType::f32, DType::bf16})
      for (const int64_t d : {64, 128}) EXPECT_EQ(refusal(act, d), "") << arch;
    EXPECT_EQ(refusal(DType::bf16, 256).empty(), !small) << arch;
    EXPECT_EQ(refusal(DType::f32, 256).empty(), !small) << arch;
    EXPECT_NE(refusal(DType::bf16, 258).find("heads of 258 channels, but the kernels are written for 256 at most"),
              std::string::npos)
        << arch;
  }
  const Opened device(89);
  EXPECT_EQ(refusal(DType::bf16, 256), device.name +
                                           ": heads of 256 channels in bf16 need 163840 bytes of shared memory for a "
                                           "block, which has 101376; run with --device cpu");
}

// The model of `small`, whose rows begin at multiples of 16 bytes; wgmma takes products of more than 64 rows.
Config run_of_heads(int64_t d, const std::vector<std::string>& more = {}) {
  ModelConfig c = tiny_config("qwen3", true);
  c.hidden = 64;
  c.heads = 4;
  c.head_dim = d;
  c.ffn = 96;
  c.vocab = 48;
  c.bos_id = 1;
  c.eos_ids = {2};
  c.pad_id = 0;
  const std::string path = cat(testing::TempDir(), "pare_heads_", getpid(), ".json");
  std::ofstream(path) << to_json(c);
  std::vector<std::string> all = {"data.train_batch_size=2",
                                  "data.max_response_length=24",
                                  "rollout.n=2",
                                  "rollout.max_num_seqs=3",
                                  "rollout.max_num_batched_tokens=90",
                                  "data.min_statements=2",
                                  "data.max_statements=2",
                                  "actor.ppo_max_token_len=150",
                                  "trainer.device=emu",
                                  "model.dtype=bf16",
                                  "model.config=" + path};
  all.insert(all.end(), more.begin(), more.end());
  return tiny_run("qwen3", all);
}

struct Step {
  std::string certificate;
  std::vector<float> parameters;
  uint64_t tensor_copies, cold_copies;
};
Step grpo_step(const Config& config) {
  const cuemu::Calls before = cuemu::calls();
  TrainingRun run(config, digits, table_emu);
  const Metrics m = run.step();
  EXPECT_GT(m.get("exact/checked_tokens"), 0);
  EXPECT_EQ(m.get("exact/mismatch_tokens"), 0);
  const cuemu::Calls& now = cuemu::calls();
  return {m.text("certificate"), run.parameters(), now.tensor_copies - before.tensor_copies,
          now.cold_copies - before.cold_copies};
}

// Products with a weight and their gradients, two tiles one after another or, where clusters compute them, by two
// clusters of three rows of tiles and two columns: the second block of the last has no rows.
TEST(EmuMachine, EveryTileHasTheBitsOfMmaSync) {
  const auto bits = [](const char* wgmma, auto product) {
    const Opened device(90, wgmma);
    const uint64_t before = cuemu::calls().tensor_copies;
    kernel::Call t(table_kernels, DType::bf16);
    product(t);
    const std::string result = t["result"].bits();
    EXPECT_EQ(cuemu::calls().tensor_copies > before, *wgmma == '1');
    return result;
  };
  const auto expect_same = [&](auto product) {
    const std::string right = bits("0", product);
    const auto expect_right = [&] { EXPECT_EQ(bits("1", product), right); };
    asked_tile->cluster == 1 ? expect_right() : in_all_orders(expect_right);
  };
  // Calls f(rows, columns) for each of the tiles, with results that are `less` smaller than whole tiles.
  const auto for_tiles = [&](const char* kind, std::initializer_list<WgmmaTile> tiles, int less, auto f) {
    for (const WgmmaTile& tile : tiles) {
      SCOPED_TRACE(cat(kind, ", ", tile.rows, " x ", tile.columns, ", clusters of ", tile.cluster));
      asked_tile = tile;
      cuemu::settings().multiprocessors = tile.cluster;
      const bool alone = tile.cluster == 1;
      f(int64_t{tile.rows} * (alone ? 2 : 3) - less, int64_t{tile.columns} * (alone ? 1 : 2) - 8);
    }
  };
  for (const auto& [tiles, k] : {std::pair{kOnePartTiles, 40}, {kPartsTiles, 2088}})
    for_tiles(k > 2048 ? "parts" : "one part", tiles, 1, [&, k = int64_t{k}](int64_t n, int64_t most_columns) {
      // An odd number of columns cannot be stored by boxes.
      for (const int64_t columns : {most_columns, most_columns - 5}) {
        if (columns % 2 && *asked_tile != WgmmaTile{128, 192, 2}) continue;
        EXPECT_EQ(linear_part(columns, k) < k, k > 2048);
        expect_same([&](kernel::Call& t) {
          const Tensor y = t.act_out("result", {n, columns}), x = t.act("x", {n, k});
          t.table.linear_fwd({y, x, t.weight("w", columns, k), t.act("bias", {columns}), t.act("r", {n, columns})}, {});
        });
        expect_same([&](kernel::Call& t) {
          const Tensor dx = t.act("result", {n, columns}), dy = t.act("dy", {n, k});
          t.table.linear_bwd_input({dx, dy, t.weight("w", k, columns), true}, {});
        });
      }
    });
  for_tiles("parts apart", kOnePartTiles, 1, [&](int64_t n, int64_t columns) {
    if (asked_tile->cluster > 1) return;
    n = std::min<int64_t>(n, 129);
    expect_same([&](kernel::Call& t) {
      const Tensor y = t.act_out("result", {n, columns}), x = t.act("x", {n, 2056}), r = t.act("r", {n, columns});
      t.table.linear_fwd({y, x, t.weight("w", columns, 2056), {}, r, t.parts(n, columns, 2056)}, {});
    });
  });
  for_tiles("gates and ups", kGatedTiles, 1, [&](int64_t n, int64_t columns) {
    columns = (columns + 8) / 32 * 32 - 32;  // behind the last gates of the last tile come ups
    expect_same([&](kernel::Call& t) {
      LinearFwd a{t.act_out("y", {n, columns}), t.act("x", {n, 72}), t.weight("w", columns, 72), {}, {}};
      a.swiglu = t.act_out("result", {n, columns / 2});
      t.table.linear_fwd(a, {});
    });
  });
  for (const bool only : {false, true})
    for_tiles(only ? "head, no logits" : "head", kHeadTiles, 1, [&](int64_t n, int64_t columns) {
      if (only) columns += asked_tile->columns - 128;  // the last tile is nearly full, or no more than half
      expect_same([&](kernel::Call& t) {
        const Tensor sums = t.stat_out("result", {n, vocab_tiles(columns) + 1, 3}),
                     target = t.index("target", {n}, std::vector<int32_t>(n, static_cast<int32_t>(columns - 1)));
        LinearFwd a{t.act_out("y", {n, columns}), t.act("x", {n, 72}), t.weight("w", columns, 72), {}, {}};
        a.vocab_sums = {sums, target, 0.7f, only};
        t.table.linear_fwd(a, {});
      });
    });
  for_tiles("dw", kGradientTiles, 8, [&](int64_t n, int64_t most_columns) {
    // Rows of dw that do not begin at multiples of 16 bytes cannot be added to by boxes.
    for (const int64_t columns : {most_columns, most_columns - 6}) {
      if (columns % 4 && *asked_tile != WgmmaTile{128, 192, 2}) continue;
      for (const double scale : {1., 0x1p-64})  // of both: with subnormal numbers in dw and among the sums
        expect_same([&](kernel::Call& t) {
          const Tensor dy = t.inout("dy", {75, n}, cases::scaled(scale)),
                       x = t.inout("x", {75, (columns + 7) / 8 * 8}, cases::scaled(scale)).columns(0, columns);
          const Tensor dw = t.stat_inout("result", {n, columns}, cases::scaled(scale * scale));
          t.table.linear_bwd_weight({dw, {}, dy, x}, {});
          int64_t zeros = 0;
          for (const double v : t["result"].values()) {
            EXPECT_FALSE(v != 0 && std::fabs(v) < FLT_MIN);
            zeros += v == 0;
          }
          EXPECT_EQ(zeros > 0, scale < 1);
        });
    }
  });
  asked_tile.reset();
  cuemu::settings().multiprocessors = cuemu::Settings().multiprocessors;
  const Opened device(90);
}

TEST(EmuMachine, AGrpoStepHasTheSameBitsWithEitherKernel) {
  const Config config = run_of_heads(16);
  const auto step_with = [&](const char* wgmma) {
    const Opened device(90, wgmma);
    return grpo_step(config);
  };
  const Step mma = step_with("0"), wgmma = step_with("1");
  EXPECT_EQ(mma.tensor_copies, 0u);
  EXPECT_GT(wgmma.tensor_copies, 100u);
  EXPECT_EQ(wgmma.cold_copies, 0u);  // every kernel has prefetched its maps
  EXPECT_EQ(mma.certificate, wgmma.certificate);
  EXPECT_TRUE(same_bits(mma.parameters, wgmma.parameters));
}

// Every kernel of a step, with the largest heads that fit a device of little shared memory.
TEST(EmuMachine, AGrpoStepFitsASmallDevice) {
  const Opened device(89);
  EXPECT_EQ(grpo_step(run_of_heads(128, {"data.max_response_length=12"})).tensor_copies, 0u);
}

// On 9.0 without the code of 9.0a, mma.sync computes.
TEST(EmuMachine, WithoutItsCodeThereIsNoWgmma) {
  const Opened device(90, "", 80);
  EXPECT_EQ(grpo_step(run_of_heads(16)).tensor_copies, 0u);
}

// A launch that a block's shared memory does not hold says so; what is no multiple of a head's channels is not asked
// about when the session opens.
TEST(EmuMachine, ALaunchThatDoesNotFitNamesTheLimit) {
  const Opened opened(86);
  Device device(table_emu);
  Arena arena("a", *table_emu.memory, 1 << 20);
  const auto act = [&](int64_t heads) { return arena.alloc("x", DType::bf16, {4, heads, 256}); };
  const Tensor q = act(2), k = act(1), v = act(1);
  const std::vector<int32_t> segment = {0, 4, 0, 0};
  const Tensor segments = arena.alloc("segments", DType::i32, {1, 4}), lse = arena.alloc("lse", DType::f32, {4, 2});
  device.upload({segments, segment.data()});
  try {
    device.attn_fwd({act(2), lse, q, k, v, k.rows(0, 0), v.rows(0, 0), segments, 10, 1.f});
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.what(), opened.name + ": attn_fwd needs 131072 bytes of shared memory for a block, which has 101376");
  }
  device.wait();
}

// What CUDA needs for itself as a run goes on is not offered.
TEST(EmuMachine, SomeMemoryIsLeft) {
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  const cuemu::Settings before = cuemu::settings();
  cuemu::settings().device_memory = total - free + (size_t{513} << 20);
  EXPECT_EQ(table_emu.memory->free(), size_t{1} << 20);
  cuemu::settings().device_memory = total - free + 100;
  EXPECT_EQ(table_emu.memory->free(), 0u);
  cuemu::settings() = before;
}

}  // namespace
}  // namespace pare::test
