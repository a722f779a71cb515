// Started by mpirun: the ranks of the test against a rank that is alone, in the same process.
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <numeric>
#include <string_view>

#include "comm/comm.h"
#include "cuda/emu/include/cuemu.h"
#include "ops/data.h"
#include "run/ranks.h"
#include "tests/runs.h"

// In place of MPI's: a rank that is asked to by PARE_TEST_FREEZE stops there (StruckRank of programs.cpp).
extern "C" {
int PMPI_Init_thread(int*, char***, int, int*);
int PMPI_Finalize();
static void freeze(std::string_view place) {
  const char* const asked = std::getenv("PARE_TEST_FREEZE");
  if (asked && asked == place) std::raise(SIGSTOP);
}
int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  freeze("before MPI_Init");
  const int code = PMPI_Init_thread(argc, argv, required, provided);
  freeze("after MPI_Init");
  return code;
}
int MPI_Finalize() {
  freeze("before MPI_Finalize");
  return PMPI_Finalize();
}
}

namespace pare::test {
namespace {

// ---- host memory

std::string text_of(int rank, size_t bytes) {
  std::string s(bytes, '\0');
  for (size_t i = 0; i < bytes; i++) s[i] = static_cast<char>(31 * rank + 7 * static_cast<int>(i) + 1);
  return s;
}

TEST(Comm, GathersWhatRanksGive) {
  Comm& comm = world();
  ASSERT_GT(comm.ranks(), 1) << "run this by mpirun";
  EXPECT_EQ(comm.node_ranks(), comm.ranks()) << "of one machine";
  EXPECT_EQ(comm.node_rank(), comm.rank());
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{1001}}) {
    const auto own = [&](int r) { return text_of(r, bytes * static_cast<size_t>(r % 3)); };  // rank 0: nothing
    const std::vector<std::string> all = comm.gather(own(comm.rank()));
    ASSERT_EQ(std::ssize(all), comm.ranks());
    for (int r = 0; r < comm.ranks(); r++) EXPECT_EQ(all[static_cast<size_t>(r)], own(r)) << r;
    EXPECT_EQ(comm.broadcast(text_of(comm.rank(), bytes), 1), text_of(1, bytes));
  }
  EXPECT_EQ(comm.sum(comm.rank() + 1), comm.ranks() * (comm.ranks() + 1) / 2);
  EXPECT_EQ(comm.most(-comm.rank()), 0);
}

// MPI counts in int.  The pages of what is sent are never touched, so they take no memory.
TEST(Comm, SendsMoreThanTwoGigabytesAtOnce) {
  Comm& comm = world();
  if (comm.ranks() != 2) GTEST_SKIP() << "of two ranks alone";
  const size_t bytes = (size_t{1} << 31) + 12345;
  std::vector<Comm::Piece> out(2), in(2);
  char* const memory = static_cast<char*>(std::calloc(bytes, 1));
  ASSERT_NE(memory, nullptr);
  (comm.first() ? out[1] : in[0]) = {memory, bytes};
  if (comm.first()) {
    memory[0] = 1;
    memory[(size_t{1} << 31) - 1] = 2;
    memory[bytes - 1] = 3;
  }
  comm.exchange(out, in);
  EXPECT_EQ(memory[0], 1);
  EXPECT_EQ(memory[(size_t{1} << 31) - 1], 2);
  EXPECT_EQ(memory[size_t{1} << 31], 0);
  EXPECT_EQ(memory[bytes - 1], 3);
  std::free(memory);
}

// Both sides learn of it, before anything is sent.
TEST(Comm, OtherCountsAreErrors) {
  Comm& comm = world();
  char x[4] = {}, y[4] = {};
  std::vector<Comm::Piece> out(static_cast<size_t>(comm.ranks())), in(out.size());
  if (comm.rank() == 0) out[1] = {x, 3};
  if (comm.rank() == 1) in[0] = {y, 4};
  try {
    comm.exchange(out, in);
    EXPECT_GT(comm.rank(), 1) << "3 bytes for 4";
  } catch (const std::logic_error& e) {
    EXPECT_LE(comm.rank(), 1);
    EXPECT_STREQ(e.what(), "rank 0 sends 3 bytes to rank 1, which expects 4");
  }
  in.pop_back();
  EXPECT_THROW(comm.exchange(out, in), std::logic_error);
  EXPECT_EQ(comm.sum(1), comm.ranks()) << "and it goes on";
}

// ---- ops

// Sets how bytes of the emulated device travel.
constexpr DeviceComm kWays[] = {DeviceComm::nccl, DeviceComm::host};
void travel(DeviceComm by, const Table& table = table_emu) {
  table.open(world(), by);
  EXPECT_EQ(world().link->name(), by == DeviceComm::nccl ? "NCCL 2.21.5" : "the host's memory");
}

// Counts that differ, some of them 0; on every table the same.
TEST(Comm, OpsMoveWhatTheySay) {
  Comm& comm = world();
  const int n = comm.ranks(), own = comm.rank();
  const auto sent = [](int from, int to) { return int64_t{3} * ((from + 2 * to) % 3) + (from == to); };
  using Way = std::pair<const Table*, DeviceComm>;
  for (const auto& [table, by] :
       {Way{&table_ref, {}}, {&table_cpu, {}}, {&table_emu, DeviceComm::nccl}, {&table_emu, DeviceComm::host}}) {
    if (table->open) travel(by);
    Device device(*table, {}, comm);
    Arena arena("test", device.memory(), 1 << 20);
    const auto on_device = [&](const std::vector<float>& x) {
      const Tensor t = arena.alloc("x", DType::f32, {std::ssize(x)});
      device.upload({t, x.data()});
      return t;
    };
    const auto on_host = [&](const Tensor& t) {
      std::vector<float> x(static_cast<size_t>(t.size()));
      device.download({x.data(), t});
      return x;
    };
    // Rank r sends 100 r + 10 q + i to rank q.
    std::vector<float> x = {-1};
    std::vector<int64_t> first, counts, received;
    std::vector<float> expected;
    for (int q = 0; q < n; q++) {
      first.push_back(std::ssize(x));
      counts.push_back(sent(own, q));
      received.push_back(sent(q, own));
      for (int64_t i = 0; i < sent(own, q); i++) x.push_back(static_cast<float>(100 * own + 10 * q + i));
      for (int64_t i = 0; i < sent(q, own); i++) expected.push_back(static_cast<float>(100 * q + 10 * own + i));
    }
    Ledger ledger;
    device.ledger = &ledger;
    const Tensor y = arena.alloc("y", DType::f32, {std::ssize(expected)});
    device.all_to_all({y, on_device(x), first, counts, received, &comm});
    EXPECT_EQ(on_host(y), expected) << table->name;
    EXPECT_EQ(ledger.phases["main"]["all_to_all"].cost.sent,
              4 * (std::accumulate(counts.begin(), counts.end(), int64_t{0}) - sent(own, own)));

    std::vector<float> part, all;
    std::vector<int64_t> sizes;
    for (int q = 0; q < n; q++) {
      sizes.push_back(5 * ((q + 1) % 3));
      for (int64_t i = 0; i < sizes.back(); i++) {
        all.push_back(static_cast<float>(10 * q + i));
        part.push_back(q == own ? all.back() : -1);
      }
    }
    const Tensor gathered = on_device(part);
    device.all_gather({gathered, sizes, &comm});
    EXPECT_EQ(on_host(gathered), all) << table->name;
  }
}

// More than the page-locked memory takes at a time, to one rank alone.
TEST(Comm, LongTensorsOfADevice) {
  Comm& comm = world();
  const int n = comm.ranks(), own = comm.rank(), next = (own + 1) % n, before = (own + n - 1) % n;
  const int64_t size = (17 << 18) + 5;  // of numbers in f32: more than 16 MiB
  const auto value = [](int rank, int64_t i) { return static_cast<float>(rank + i % 8191); };
  for (const DeviceComm by : kWays) {
    travel(by);
    Device device(table_emu, {}, comm);
    Arena arena("test", device.memory(), static_cast<size_t>(3 * 4 * size + 4096));
    std::vector<float> x(static_cast<size_t>(size)), y(x.size());
    for (int64_t i = 0; i < size; i++) x[static_cast<size_t>(i)] = value(own, i);
    const Tensor from = arena.alloc("x", DType::f32, {size}), to = arena.alloc("y", DType::f32, {size});
    device.upload({from, x.data()});
    std::vector<int64_t> none(static_cast<size_t>(n)), sent = none, received = none;
    sent[static_cast<size_t>(next)] = size;
    received[static_cast<size_t>(before)] = size;
    device.all_to_all({to, from, none, sent, received, &comm});
    device.download({y.data(), to});
    for (int64_t i = 0; i < size; i++) ASSERT_EQ(y[static_cast<size_t>(i)], value(before, i)) << i;
  }
}

// A mistake in the calls shows on all ranks that have to do with it, and the next communicator is as good as new.
TEST(Comm, OtherCallsOfARankShow) {
  Comm& comm = world();
  travel(DeviceComm::nccl);
  {
    Device device(table_emu, {}, comm);
    Arena arena("test", device.memory(), 4096);
    const Tensor x = arena.alloc("x", DType::f32, {64});
    device.zero({x});
    std::vector<int64_t> counts(static_cast<size_t>(comm.ranks()), 4);
    counts[0] += comm.rank() == 1;  // of what rank 0 has, it thinks
    device.all_gather({x.rows(0, std::accumulate(counts.begin(), counts.end(), int64_t{0})), counts, &comm});
    try {
      float y = 0;
      device.download({&y, x.rows(0, 1)});
      EXPECT_GT(comm.rank(), 1) << "NCCL would hang";
    } catch (const Error& e) {
      const std::string what = e.what();
      EXPECT_NE(what.find("NCCL: group "), std::string::npos) << what;
      if (comm.rank() == 1) {
        EXPECT_NE(what.find("it receives i8[20] from rank 0, which sends i8[16]"), std::string::npos) << what;
      }
    }
    // Whoever waits on the host hears of it too.
    if (comm.rank() < 2) {
      EXPECT_THROW(comm.link->check(), Error);
    }
  }
  comm.link.reset();
  EXPECT_EQ(comm.sum(1), comm.ranks());
  travel(DeviceComm::nccl);
}

// trainer.comm, by the devices there are.
TEST(Comm, DevicesAreSharedByTheHostAlone) {
  const auto before = cuemu::settings();
  const int n = world().ranks();
  const auto name = [](DeviceComm by) -> std::string {
    try {
      table_emu.open(world(), by);
      return world().link->name();
    } catch (const Error& e) {
      EXPECT_EQ(e.code, Exit::usage);
      return e.what();
    }
  };
  const std::string nccl = "NCCL 2.21.5", host = "the host's memory";
  EXPECT_EQ(name(DeviceComm::any), nccl);
  cuemu::settings().devices = 1;
  EXPECT_EQ(name(DeviceComm::any), host);
  EXPECT_EQ(name(DeviceComm::host), host);
  const std::string
      device = "the CUDA kernels, emulated on the CPU",
      end =
          "; NCCL needs one for each rank: start fewer, or set trainer.comm=host, by which ranks share (to "
          "test NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment lets it share, too)";
  EXPECT_EQ(name(DeviceComm::nccl),
            cat("ranks 0 and 1 have one device between them; ", world().host(), " has 1 device: 0 ", device, end));
  cuemu::settings().devices = 2;
  const std::string two = n == 2 ? nccl
                                 : cat("ranks 0 and 2 have one device between them; ", world().host(),
                                       " has 2 devices: 0 ", device, ", 1 ", device, end);
  EXPECT_EQ(name(DeviceComm::any), two);
  EXPECT_EQ(name(DeviceComm::nccl), two);
  EXPECT_EQ(name(DeviceComm::host), host);
  cuemu::settings() = before;
  travel(DeviceComm::nccl);
}

TEST(Ranks, FactsThatDifferAreNamed) {
  Comm& comm = world();
  Metrics m;
  m.set("same", 1);
  m.set("timing_s/step", comm.rank());
  expect_equal(comm, facts_of(m));
  m.set("loss", comm.rank() == 1 ? 0.5 : 0.25);
  try {
    expect_equal(comm, facts_of(m));
    ADD_FAILURE() << "a planted difference";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "loss is 0.25 on rank 0 and 0.5 on rank 1; all ranks of a run must agree on it");
  }
}

TEST(Ranks, ShardsThatCannotBeDealt) {
  Config c = tiny_run("qwen3", {cat("learner.shards=", world().ranks() + 1)});
  EXPECT_THROW(check_ranks(c, world(), true), Error);
  check_ranks(c, world(), false);
  c.learner.shards = world().ranks();
  check_ranks(c, world(), true);
  c.trainer.n_gpus_per_node = world().ranks();
  c.trainer.nnodes = 1;
  check_ranks(c, world(), true);
  c.trainer.nnodes = 2;
  EXPECT_THROW(check_ranks(c, world(), true), Error);
}

// ---- runs

using Keys = std::vector<std::string>;
Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// What depends on how the work is spread: times, memory, the schedule of a rollout.
bool of_the_ranks(const std::string& metric) {
  return metric.starts_with("timing_s/") || metric.starts_with("memory/") || metric.starts_with("perf/") ||
         metric.starts_with("comm/") || metric == "tokens/discarded";
}

// The emulator fills the memory that it gives: two runs on each of four ranks must not take the machine.
const ArenaLimits kSmall = ArenaLimits::each(16 << 20);

struct RankRun {
  RankRun(TrainingKind kind, const Config& config, const Table& table, Comm& comm, Rewarded::Score score)
      : session(config, table, true, kSmall, true, comm) {
    if (kind == TrainingKind::grpo)
      session.train = std::make_unique<Rewarded>(std::move(session.train), std::move(score));
    training = make_training(kind, session);
  }
  std::vector<const Learner*> learners() const {
    std::vector<const Learner*> all = {&training->learner()};
    if (training->student()) all.push_back(training->student());
    return all;
  }
  // Elements [begin, end) of what a learner trains: master or parameters, and moments.
  static std::vector<float> state(const Learner& learner, int64_t begin, int64_t end) {
    const Parameters& trained = learner.trained();
    std::vector<float> all(static_cast<size_t>(3 * (end - begin)));
    for (int i = 0; i < 2; i++)
      learner.get_moment(i ? Moment::m : Moment::v, begin, end - begin, all.data() + i * (end - begin));
    float* out = all.data() + 2 * (end - begin);
    for (size_t p = 0; p < trained.layout.size(); p++) {
      const int64_t first = std::max(begin, trained.layout[p].offset),
                    last = std::min(end, trained.layout[p].offset + trained.layout[p].size);
      if (first >= last) continue;
      trained.reader()(p, first - trained.layout[p].offset, last - first, out);
      out += last - first;
    }
    return all;
  }
  static std::vector<float> rounded(const Parameters& trained) {
    std::vector<float> all(static_cast<size_t>(trained.size()));
    for (size_t p = 0; p < trained.layout.size(); p++)
      trained.rounded()(p, 0, trained.layout[p].size, all.data() + trained.layout[p].offset);
    return all;
  }

  Session session;
  std::unique_ptr<Training> training;
};

void expect_same_metrics(const Metrics& ranks, const Metrics& alone, const std::string& what) {
  ASSERT_EQ(ranks.all().size(), alone.all().size()) << what;
  for (size_t i = 0; i < alone.all().size(); i++) {
    const auto& [name, value] = alone.all()[i];
    EXPECT_EQ(ranks.all()[i].first, name) << what;
    if (of_the_ranks(name) || (name == "flops/rollout" && alone.get("tokens/discarded") > 0)) continue;
    const double other = ranks.all()[i].second;
    EXPECT_TRUE(other == value || (std::isnan(other) && std::isnan(value)))
        << what << ": " << name << " is " << other << ", alone " << value;
  }
  EXPECT_EQ(ranks.text("certificate"), alone.text("certificate")) << what;
}

void expect_same_run(TrainingKind kind, const Keys& keys, const Table& table, const std::string& type = "qwen3",
                     int steps = 2, const Rewarded::Score& score = digits) {
  const Config config = tiny_run(type, keys);
  std::string what = cat(type, " on ", table.name);
  for (const std::string& k : keys) what += " " + k;
  RankRun ranks(kind, config, table, world(), score), alone(kind, config, table, self(), score);
  for (int i = 0; i < steps; i++) {
    const Metrics m = ranks.training->step(), expected = alone.training->step();
    expect_equal(world(), facts_of(m));
    expect_same_metrics(m, expected, what);
  }
  if (ranks.session.val) expect_same_metrics(ranks.training->evaluate(), alone.training->evaluate(), what);
  for (size_t i = 0; i < ranks.learners().size(); i++) {
    const Learner &one = *ranks.learners()[i], &other = *alone.learners()[i];
    const int64_t begin = one.trained().own_begin(), end = one.trained().own_end();
    EXPECT_TRUE(same_bits(RankRun::rounded(one.trained()), RankRun::rounded(other.trained()))) << what;
    EXPECT_TRUE(same_bits(RankRun::state(one, begin, end), RankRun::state(other, begin, end))) << what;
    EXPECT_GT(other.steps(), 0) << what;
  }
}

Keys shards(int64_t n) { return {cat("learner.shards=", n), "trainer.val_before_train=true"}; }
const std::string kCorrection = "algorithm.rollout_correction.";
const Keys kRkv = {"rollout.kv.method=rkv", "rollout.kv.evict.budget=4", "rollout.kv.evict.buffer=2",
                   "rollout.kv.evict.prompt=protect", "rollout.kv.window.size=2"};

// 12 shards go into 1, 2, 3 and 4 ranks; 6 groups of them, so that half the shards are empty.
TEST(Ranks, TheNumberOfRanksChangesNoBit) {
  const Keys twelve = shards(12);
  expect_same_run(TrainingKind::grpo, twelve, table_cpu, "qwen3");
  expect_same_run(TrainingKind::grpo, twelve + Keys{"actor.use_kl_loss=true"}, table_cpu, "llama");
  expect_same_run(TrainingKind::grpo, shards(world().ranks()), table_cpu, "qwen2", 3);
  expect_same_run(TrainingKind::grpo, shards(2 * world().ranks()) + Keys{"trainer.balance_batch=false"}, table_cpu);
  expect_same_run(TrainingKind::grpo, shards(world().ranks()) + Keys{"data.train_batch_size=1"}, table_cpu, "llama");
  expect_same_run(TrainingKind::sft, twelve, table_cpu, "llama", 3);
  expect_same_run(TrainingKind::sft, twelve + Keys{"actor.optim.moments=bf16"}, table_cpu);
}

TEST(Ranks, NorDoesItWithTheMethods) {
  const Keys twelve = shards(12);
  const auto same = [&](const Keys& keys, const Rewarded::Score& score = digits) {
    expect_same_run(TrainingKind::grpo, twelve + keys, table_cpu, "qwen3", 2, score);
  };
  same({"algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3"}, early_digit);
  same({"actor.token_subset=rpc", "actor.rpc_min_tokens=5", "actor.ppo_mini_batch_size=2", "actor.ppo_epochs=2"});
  same({"actor.token_subset=urs", "algorithm.adv_filter_threshold=0.5"});
  same({"actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean", "actor.ppo_mini_batch_size=3"});
  same(kRkv + Keys{kCorrection + "rollout_is=tis", kCorrection + "acceptance=true", "rollout.check_exact=false"});
  same(kRkv + Keys{"learner.attention=replay", "actor.ppo_epochs=2"});
  same({"algorithm.use_kl_in_reward=true", "model.enable_gradient_checkpointing=true"});
  same({"algorithm.rpo.enable=true", "algorithm.rpo.cut=length", "data.train_rows=6"});
  const Keys quest = {"rollout.kv.method=quest",     "rollout.kv.blocks.size=4", "rollout.kv.blocks.count=3",
                      "rollout.kv.blocks.first=0",   "rollout.kv.blocks.last=1", "rollout.kv.blocks.dense_layers=0",
                      kCorrection + "rollout_is=tis"};
  same(quest + Keys{"algorithm.oversample.keep=3", "algorithm.oversample.by=acceptance"});
  same(quest + Keys{"rollout.kv.blocks.acceptance_target=0.99", "rollout.kv.blocks.acceptance_steps=1"});
  // Adapters of the sampler, in fewer panels than there may be ranks, learn beside the model.
  const Keys distill =
      quest + Keys{"distill.enable=true", "model.lora.rank=3", "model.lora.target_modules=[\"q_proj\"]"};
  same(distill + Keys{"rollout.kv.blocks.acceptance_target=0.99", "rollout.kv.blocks.acceptance_steps=1"});
  same(distill + Keys{"distill.kl_type=exact_reverse", "actor.ppo_mini_batch_size=3", "actor.token_subset=rpc"});
}

// Weights in bf16 beside masters, kernels of CUDA.
const Keys kSmallRun = {"data.train_batch_size=4",   "rollout.n=2",        "data.max_response_length=12",
                        "rollout.max_num_seqs=4",    "trainer.device=emu", "data.val_rows=2",
                        "actor.ppo_max_token_len=90"};
TEST(Ranks, NorDoesItOnADeviceByNccl) {
  travel(DeviceComm::nccl);
  expect_same_run(TrainingKind::grpo, shards(12) + kSmallRun, table_emu, "qwen3", 1);
  expect_same_run(TrainingKind::grpo,
                  shards(12) + kSmallRun + Keys{"actor.use_kl_loss=true", "actor.optim.moments=bf16"}, table_emu,
                  "llama", 1);
  // Ranks without work wait on the host, while others need what their devices have to send.
  expect_same_run(TrainingKind::grpo, shards(world().ranks()) + kSmallRun + Keys{"data.train_batch_size=1"}, table_emu,
                  "qwen3", 2);
}
TEST(Ranks, NorDoesItOnADeviceByTheHost) {
  travel(DeviceComm::host);
  expect_same_run(TrainingKind::grpo, shards(12) + kSmallRun, table_emu, "qwen3", 1);
}

// Parts of the optimizer are what they should be, and no rank holds more.
TEST(Ranks, HoldTheirPartOfTheOptimizer) {
  const Config config = tiny_run("llama", shards(12));
  Session session(config, table_cpu, true, kSmall, true, world());
  const auto training = make_training(TrainingKind::grpo, session);
  const int64_t own = session.model->own(), all = session.model->size(), n = world().ranks();
  EXPECT_EQ(world().sum(own), all);
  EXPECT_LE(own, all / n + kPanel * session.model_config.ffn);
  EXPECT_LE(static_cast<int64_t>(session.optimizer.used()), 2 * 4 * own + 3 * 64);
  EXPECT_LE(static_cast<int64_t>(session.gradients.used()), 4 * (all + 2 * own) + 3 * 64) << "two sums: 12 shards";
}

}  // namespace
}  // namespace pare::test
