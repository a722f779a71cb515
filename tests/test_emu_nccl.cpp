// The emulator's NCCL, by processes that are its ranks: what it moves, and that each mistake shows.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/emu/include/cuda_runtime.h"
#include "cuda/emu/include/cuemu.h"
#include "cuda/runtime/nccl.h"

namespace pare::test {
namespace {

// A rank in its process.
class NcclRank {
 public:
  NcclRank(int rank, int ranks, const ncclUniqueId& id, int device) : rank(rank), ranks(ranks) {
    cudaSetDevice(device);
    said(ncclCommInitRank(&comm, ranks, id, rank));
  }
  // Device memory with these values.
  float* put(const std::vector<float>& x) {
    void* p = nullptr;
    cudaMalloc(&p, x.size() * sizeof(float));
    cudaMemcpy(p, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice);
    return static_cast<float*>(p);
  }
  std::vector<float> get(const void* p, size_t n) {
    std::vector<float> x(n);
    if (const cudaError_t e = cudaMemcpy(x.data(), p, n * sizeof(float), cudaMemcpyDeviceToHost))
      report += cudaGetErrorString(e);
    return x;
  }
  // The fault of a call.
  void said(ncclResult_t r) {
    if (r) report += ncclGetLastError(comm);
  }
  void destroy() { said(ncclCommDestroy(std::exchange(comm, nullptr))); }
  void send(const void* p, size_t n, int to) { said(ncclSend(p, n, ncclFloat32, to, comm, nullptr)); }
  void receive(void* p, size_t n, int from) { said(ncclRecv(p, n, ncclFloat32, from, comm, nullptr)); }
  void broadcast(void* x, size_t n, int root, ncclDataType_t type = ncclFloat32) {
    said(ncclBroadcast(x, x, n, type, root, comm, nullptr));
  }

  const int rank, ranks;
  ncclComm_t comm = nullptr;
  std::string report;
};

// What the ranks report when each has run f; on devices of their own, or all on one.
std::vector<std::string> reports(int ranks, const std::function<void(NcclRank&)>& f, bool one_device = false) {
  ncclUniqueId id;
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  std::vector<int> pipes;
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; r++) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      NcclRank rank(r, ranks, id, one_device ? 0 : r);
      if (rank.comm) f(rank);
      if (rank.comm) rank.destroy();
      const bool written = write(ends[1], rank.report.data(), rank.report.size()) == std::ssize(rank.report);
      _exit(written ? 0 : 1);
    }
    close(ends[1]);
    pipes.push_back(ends[0]);
    children.push_back(child);
  }
  std::vector<std::string> all;
  for (int r = 0; r < ranks; r++) {
    std::string& text = all.emplace_back();
    char part[4096];
    for (ssize_t n; (n = read(pipes[static_cast<size_t>(r)], part, sizeof part)) > 0;)
      text.append(part, static_cast<size_t>(n));
    close(pipes[static_cast<size_t>(r)]);
    int status = 0;
    EXPECT_EQ(waitpid(children[static_cast<size_t>(r)], &status, 0), children[static_cast<size_t>(r)]);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << ": " << status;
  }
  return all;
}
void expect_none(const std::vector<std::string>& reports) {
  for (size_t r = 0; r < reports.size(); r++) EXPECT_EQ(reports[r], "") << "rank " << r;
}

// More than a socket holds, to all at once.
TEST(EmuNccl, SendsToAll) {
  const auto word = [](int from, int to) { return static_cast<float>(10 * from + to + 1); };
  expect_none(reports(3, [&](NcclRank& r) {
    const size_t n = 100003;
    float *out[3], *in[3];
    for (int q = 0; q < 3; q++) {
      out[q] = r.put(std::vector<float>(n, word(r.rank, q)));
      in[q] = r.put(std::vector<float>(n, -1));
    }
    r.said(ncclGroupStart());
    for (int q = 0; q < 3; q++)
      if (q != r.rank) {
        r.send(out[q], n - static_cast<size_t>(q), q);
        r.receive(in[q], n - static_cast<size_t>(r.rank), q);
      }
    r.said(ncclGroupEnd());
    for (int q = 0; q < 3; q++) {
      const std::vector<float> x = r.get(in[q], n);
      const size_t received = q == r.rank ? 0 : n - static_cast<size_t>(r.rank);
      for (size_t i = 0; i < n; i++)
        if (x[i] != (i < received ? word(q, r.rank) : -1)) r.report += "another word from rank " + std::to_string(q);
    }
  }));
}

// Broadcasts from each rank in turn, in place, in one group; parts differ in size.
TEST(EmuNccl, Broadcasts) {
  expect_none(reports(3, [&](NcclRank& r) {
    float* const all = r.put(std::vector<float>(6, static_cast<float>(r.rank)));
    const size_t first[] = {0, 1, 3, 6};
    r.said(ncclGroupStart());
    for (int root = 0; root < 3; root++) r.broadcast(all + first[root], first[root + 1] - first[root], root);
    r.said(ncclGroupEnd());
    if (r.get(all, 6) != std::vector<float>{0, 1, 1, 2, 2, 2}) r.report += "other words";
  }));
}

TEST(Emu, NcclMismatchShows) {
  const auto expect = [](int ranks, const std::vector<std::string>& expected,
                         const std::function<void(NcclRank&, float*)>& f) {
    const std::vector<std::string> all = reports(ranks, [&](NcclRank& r) {
      float* const memory = r.put(std::vector<float>(16, 1));
      f(r, memory);
      r.get(memory, 1);
      ncclResult_t state = ncclSuccess;
      ncclCommGetAsyncError(r.comm, &state);
      if (state && r.report.find("NCCL: group ") == std::string::npos) r.report += ncclGetLastError(r.comm);
    });
    for (size_t i = 0; i < all.size(); i++)
      EXPECT_NE(all[i].find(expected[i]), std::string::npos) << all[i] << "\nexpected " << expected[i];
  };
  const std::string first = "NCCL: group 1 of rank ";
  const auto pair = [](NcclRank& r, const auto& zero, const auto& one) { r.rank == 0 ? zero() : one(); };

  const std::string memory = " of f32[4]: memory that is not the device's";
  expect(1, {"ncclBroadcast" + memory}, [](NcclRank& r, float*) {
    float host[4] = {};
    r.broadcast(host, 4, 0);
  });
  expect(2, {"ncclSend" + memory, "ncclRecv" + memory}, [&](NcclRank& r, float* p) {
    float host[4] = {};
    pair(
        r, [&] { r.send(host, 4, 1); }, [&] { r.receive(p + 13, 4, 0); });  // behind its end
  });
  expect(2,
         {first + "0: it sends f32[3] to rank 1, which receives f32[4]",
          first + "1: it receives f32[4] from rank 0, which sends f32[3]"},
         [&](NcclRank& r, float* p) {
           pair(
               r, [&] { r.send(p, 3, 1); }, [&] { r.receive(p, 4, 0); });
         });
  expect(2, {first + "0: it sends f32[3] to rank 1, which receives i8[3]", first + "1: it receives i8[3] from rank 0"},
         [&](NcclRank& r, float* p) {
           pair(
               r, [&] { r.send(p, 3, 1); }, [&] { r.said(ncclRecv(p, 3, ncclInt8, 0, r.comm, nullptr)); });
         });
  expect(2,
         {first + "0: it broadcasts f32[3] of rank 0 where rank 1 broadcasts bf16[3] of rank 0",
          first + "1: it broadcasts bf16[3] of rank 0 where rank 0 broadcasts f32[3] of rank 0"},
         [&](NcclRank& r, float* p) { r.broadcast(p, 3, 0, r.rank == 0 ? ncclFloat32 : ncclBfloat16); });
  expect(2,
         {first + "0: it sends f32[3] to rank 1, which receives nothing more",
          first + "1: it receives nothing more from rank 0, which sends f32[3]"},
         [&](NcclRank& r, float* p) {
           pair(
               r, [&] { r.send(p, 3, 1); }, [&] { r.broadcast(p, 3, 0); });
         });
  expect(2,
         {first + "0: it broadcasts f32[3] of rank 0 where rank 1 broadcasts f32[3] of rank 1",
          first + "1: it broadcasts f32[3] of rank 1 where rank 0 broadcasts f32[3] of rank 0"},
         [&](NcclRank& r, float* p) { r.broadcast(p, 3, r.rank); });
  // In another order.
  expect(3,
         {first + "0: it broadcasts f32[3] of rank 0 where rank 2 broadcasts f32[3] of rank 1",
          first + "1: it broadcasts f32[3] of rank 0 where rank 2 broadcasts f32[3] of rank 1",
          first + "2: it broadcasts f32[3] of rank 1 where rank 0 broadcasts f32[3] of rank 0"},
         [&](NcclRank& r, float* p) {
           for (const int root : r.rank == 2 ? std::vector{1, 0} : std::vector{0, 1}) r.broadcast(p, 3, root);
         });
  // Sends outside of a group, each of which waits for a receive that comes behind the other.
  const std::string deadlock =
      ", which receives nothing more: each waits for the other to receive, a send and its receive belong in one group";
  expect(2, {first + "0: it sends f32[3] to rank 1" + deadlock, first + "1: it sends f32[3] to rank 0" + deadlock},
         [&](NcclRank& r, float* p) {
           r.send(p, 3, 1 - r.rank);
           r.receive(p + 8, 3, 1 - r.rank);
         });
  // No rank sends: from the beginning, and later.
  expect(2, {"ncclGroupEnd: rank 1 has left", ""}, [&](NcclRank& r, float* p) {
    if (r.rank == 0) r.receive(p, 3, 1);
  });
  expect(2, {"NCCL: group 2 of rank 0: rank 1 has left, which is expected to send f32[3]", ""},
         [&](NcclRank& r, float* p) {
           pair(
               r,
               [&] {
                 r.receive(p, 2, 1);
                 r.receive(p, 3, 1);
               },
               [&] { r.send(p, 2, 0); });
         });
  // What is right before a mistake arrives, and nothing after it.
  expect(2, {"NCCL: group 2 of rank 0: ", "NCCL: group 2 of rank 1: "}, [&](NcclRank& r, float* p) {
    pair(
        r,
        [&] {
          r.send(p, 3, 1);
          r.send(p, 2, 1);
          r.send(p, 1, 1);
        },
        [&] {
          r.receive(p, 3, 0);
          r.receive(p, 1, 0);
          r.receive(p, 1, 0);
        });
  });
  // Another stream within a group, ranks that there are not, and one device.
  expect(1, {"ncclSend: there is no rank 1"}, [](NcclRank& r, float* p) { r.send(p, 1, 1); });
  expect(1, {"ncclGroupEnd without ncclGroupStart"}, [](NcclRank& r, float*) { r.said(ncclGroupEnd()); });
  expect(1, {"ncclBroadcast: another stream than before in its group"}, [](NcclRank& r, float* p) {
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    ncclGroupStart();
    r.broadcast(p, 1, 0);
    r.said(ncclBroadcast(p, p, 1, ncclFloat32, 0, r.comm, stream));
    ncclGroupEnd();
  });
  for (const std::string& report : reports(
           2, [](NcclRank&) {}, true))
    EXPECT_EQ(report, "ncclCommInitRank: ranks 0 and 1 are on device 0, or count other ranks");
}

// Work that is queued when its communicator is given up does nothing.
TEST(EmuNccl, WhatIsAbortedWaitsForNobody) {
  expect_none(reports(2, [](NcclRank& r) {
    float* const p = r.put({1});
    r.rank == 0 ? r.receive(p, 1, 1) : r.send(p, 1, 0);
    r.get(p, 1);
    if (r.rank == 0) r.receive(p, 1, 1);
    ncclCommAbort(r.comm);
    r.comm = nullptr;
    if (r.get(p, 1)[0] != 1) r.report += "it was received";
  }));
}

// Neither rank returns from it before the other has called it.
TEST(EmuNccl, DestroyIsACollective) {
  auto* const late = static_cast<std::atomic<bool>*>(
      mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  expect_none(reports(2, [&](NcclRank& r) {
    if (r.rank == 1) {
      usleep(100'000);
      late->store(true);
    }
    r.destroy();
    if (!late->load()) r.report += "it did not wait";
  }));
  munmap(late, sizeof *late);
  // A rank that is in a group all the same.
  const std::vector<std::string> all = reports(2, [](NcclRank& r) {
    float* const p = r.put({1});
    if (r.rank == 0) {
      r.receive(p, 1, 1);
      r.get(p, 1);
    }
  });
  EXPECT_EQ(all[1], "ncclCommDestroy: rank 0 does not call it");
}

// Memory is taken as the ranks connect, for each peer and for broadcasts; all of it is returned.
TEST(EmuNccl, TakesMemoryWhenRanksFirstMeet) {
  const auto free_now = [] {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return free;
  };
  expect_none(reports(3, [&](NcclRank& r) {
    const size_t begun = free_now();
    float* const x = r.put({1});
    const auto pair = [&](int a, int b) {
      if (r.rank == a) r.send(x, 1, b);
      if (r.rank == b) r.receive(x, 1, a);
    };
    std::vector<size_t> free = {free_now()};
    for (int i = 0; i < 2; i++) {
      pair(0, 1);
      free.push_back(free_now());
      pair(1, 2);
      free.push_back(free_now());
      r.broadcast(x, 1, 0);
      free.push_back(free_now());
    }
    const size_t peer = 3 << 19, rings = 5 << 18;
    for (size_t i = 1; i < free.size(); i++) {
      const size_t expected = i == 1 ? (r.rank < 2 ? peer : 0) : i == 2 ? (r.rank > 0 ? peer : 0) : i == 3 ? rings : 0;
      if (free[i - 1] - free[i] != expected) r.report += "call " + std::to_string(i) + " took another number of bytes";
    }
    cudaFree(x);
    r.destroy();
    if (free_now() != begun + (4 << 20)) r.report += "it keeps some";
  }));
}

// As of a program that fills the device before its ranks first talk.
TEST(Emu, NcclWithoutMemoryShows) {
  const std::vector<std::string> all = reports(2, [](NcclRank& r) {
    float* const x = r.put({1});
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    cuemu::settings().device_memory -= free - 1000;
    r.said(ncclGroupStart());
    r.rank == 0 ? r.send(x, 1, 1) : r.receive(x, 1, 0);
    r.said(ncclGroupEnd());
    ncclCommAbort(std::exchange(r.comm, nullptr));
  });
  for (const std::string& report : all) EXPECT_EQ(report, "connecting the ranks: 1572864 bytes of the device");
}

// The host of rank 0 waits in its first group for that of rank 1, and in its second for nobody.
TEST(EmuNccl, HostsMeetInTheirFirstGroup) {
  auto* const late = static_cast<std::atomic<int>*>(
      mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  expect_none(reports(2, [&](NcclRank& r) {
    float* const x = r.put({1});
    for (int i = 1; i <= 2; i++) {
      if (r.rank == 1) {
        usleep(100'000);
        late->store(i);
      }
      r.rank == 0 ? r.send(x, 1, 1) : r.receive(x, 1, 0);
      if (r.rank == 0 && late->load() != 1) r.report += "it returned at another time";
    }
  }));
  munmap(late, sizeof *late);
}

// The host of rank 1 waits for rank 0 in another way, here until its end, before it is in the group.
TEST(Emu, NcclHostThatDoesNotComeShows) {
  setenv("CUEMU_NCCL_PATIENCE", "1", 1);
  const std::vector<std::string> all = reports(2, [](NcclRank& r) {
    float* const x = r.put({1});
    if (r.rank == 1) sleep(2);
    r.rank == 0 ? r.send(x, 1, 1) : r.receive(x, 1, 0);
    ncclCommAbort(std::exchange(r.comm, nullptr));
  });
  unsetenv("CUEMU_NCCL_PATIENCE");
  EXPECT_EQ(all[0], "ncclGroupEnd: rank 1 is in no group with this one, for which NCCL waits as they connect");
}

// Long pieces that NCCL would move byte by byte, another current device, and a group that is never closed.
TEST(Emu, NcclMisuseShows) {
  std::vector<std::string> all = reports(1, [](NcclRank& r) {
    float* const x = r.put(std::vector<float>(16'400));
    r.broadcast(x + 1, 16'383, 0);
    r.broadcast(x + 4, 16'384, 0);
    r.broadcast(x + 1, 16'384, 0);
  });
  EXPECT_EQ(all[0],
            "ncclBroadcast of f32[16384]: it begins at no multiple of 16 bytes, and NCCL moves it byte by byte");
  all = reports(1, [](NcclRank& r) {
    float* const x = r.put({1});
    cudaSetDevice(3);
    r.broadcast(x, 1, 0);
  });
  EXPECT_EQ(all[0], "ncclBroadcast: the device is 3, the communicator's is 0");
  all = reports(1, [](NcclRank& r) {
    ncclGroupStart();
    r.said(ncclCommDestroy(r.comm));
    ncclGroupEnd();
  });
  EXPECT_EQ(all[0], "ncclCommDestroy: a group is open");
  EXPECT_EXIT((ncclGroupStart(), std::exit(0)), testing::ExitedWithCode(1),
              "the program ends within a group of NCCL calls");
}

// Rank 1 waits for rank 0, which has given up and lives.
TEST(EmuNccl, AnAbortIsNotNoticed) {
  expect_none(reports(2, [](NcclRank& r) {
    float* const x = r.put({1});
    r.rank == 0 ? r.send(x, 1, 1) : r.receive(x, 1, 0);
    r.get(x, 1);
    if (r.rank == 0) {
      ncclCommAbort(std::exchange(r.comm, nullptr));
      usleep(400'000);
      return;
    }
    r.receive(x, 1, 0);
    std::thread([&] {
      usleep(200'000);
      ncclResult_t state = ncclSuccess;
      ncclCommGetAsyncError(r.comm, &state);
      _exit(state == ncclSuccess ? 0 : 1);
    }).detach();
    r.get(x, 1);
    r.report += "it received something";
  }));
}

}  // namespace
}  // namespace pare::test
