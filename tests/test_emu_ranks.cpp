// Ranks on emulated devices, by the emulator's NCCL: a process each, with sockets as of `--ranks`.
#include <sys/wait.h>
#include <unistd.h>

#include "comm/processes.h"
#include "cuda/emu/include/cuda_runtime.h"
#include "model/learner.h"
#include "ops/data.h"
#include "tests/runs.h"

namespace pare::test {
namespace {

// Calls f in a process for each rank, whose device is open; a failed expectation of one is a failure here.
void run_on_devices(int ranks, const std::function<void(Comm&)>& f) {
  const std::vector<std::vector<int>> sockets = connect_sockets(ranks);
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; r++) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    {
      const std::unique_ptr<Comm> comm = make_socket_comm(r, sockets[static_cast<size_t>(r)], -1);
      try {
        table_emu.open(*comm, DeviceComm::nccl);
        f(*comm);
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
      }
      if (testing::Test::HasFailure()) {
        std::fflush(stdout);
        _exit(1);
      }
      comm->link.reset();
    }
    _exit(0);
  }
  for (const std::vector<int>& ends : sockets)
    for (const int socket : ends)
      if (socket >= 0) close(socket);
  for (size_t r = 0; r < children.size(); r++) {
    int status = 0;
    ASSERT_EQ(waitpid(children[r], &status, 0), children[r]);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << ": " << status;
  }
}

// NCCL takes all its memory as the ranks connect: none is left for the first op, when pare has filled the device.  On
// two machines, where weights are broadcast, and on one.
TEST(EmuRanks, NcclTakesNoMemoryAfterItHasConnected) {
  const auto take_nothing = [](Comm& comm) {
    const auto free_now = [] {
      size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      return static_cast<int64_t>(free);
    };
    const int64_t rings = comm.node_ranks() == comm.ranks() ? 0 : 5 << 18;
    EXPECT_EQ(comm.link->memory(), (4 << 20) + 3 * (3 << 19) + rings);
    Device device(table_emu, {}, comm);
    Arena arena("test", device.memory(), 1 << 20);
    const Tensor x = arena.alloc("x", DType::f32, {16}), y = arena.alloc("y", DType::f32, {16});
    const int64_t before = free_now();
    const std::vector<int64_t> first = {0, 4, 8, 12}, four = {4, 4, 4, 4};
    device.zero({x});
    device.all_to_all({y, x, first, four, four, &comm});
    std::vector<float> values(16, static_cast<float>(1 + comm.rank()));
    device.upload({y, values.data()});
    device.all_gather({y, four, &comm});
    device.download({values.data(), y});
    for (size_t i = 0; i < 16; i++) EXPECT_EQ(values[i], static_cast<float>(1 + i / 4)) << i;
    device.wait();
    EXPECT_EQ(free_now(), before);
  };
  run_on_devices(4, take_nothing);
  setenv("PARE_NODE_RANKS", "2", 1);
  run_on_devices(4, take_nothing);
  unsetenv("PARE_NODE_RANKS");
}

// Parts of a gradient in several long pieces on three ranks, none of which NCCL would move byte by byte.
TEST(EmuRanks, LongGradientsTravelInAlignedPieces) {
  ModelConfig c = tiny_config("qwen3", true);
  c.layers = 1;
  c.hidden = 64;
  c.ffn = 1'000;
  run_on_devices(3, [&](Comm& comm) {
    Device device(table_emu, {}, comm);
    constexpr size_t bytes = 16 << 20;
    Arena weights("weights", device.memory(), bytes), gradients("gradients", device.memory(), bytes),
        optimizer("optimizer", device.memory(), bytes), activations("activations", device.memory(), bytes);
    Model model(c, device, weights, DType::f32, true);
    Learner learner(model, gradients, optimizer, activations, {.shards = 3, .balance = false, .piece = 60'003});
    ASSERT_GT(learner.trained().own(), 3 * 20'000) << "several pieces";
    std::vector<Group> groups;
    for (int32_t g = 0; g < 3; g++) {
      groups.push_back({{1, g + 3}, {{{g + 4, 2 * g + 5}}}});
      groups.back().shard = g;
    }
    TokenTerms terms(static_cast<size_t>(loss_row_offsets(groups).back()));
    for (double& w : terms.weight) w = 0.1;
    learner.accumulate(groups, terms, {.policy = PolicyLoss::nll});
    EXPECT_EQ(std::ssize(learner.gradients()), learner.trained().own());
  });
}

}  // namespace
}  // namespace pare::test
