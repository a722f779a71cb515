// The emulator itself: kernels with one mistake each must be caught, correct ones must give the right values in every
// order of threads, and the host API must behave.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <span>
#include <string>
#include <vector>

#include "base/half.h"
#include "emu_kernels.h"
#include "kernel_call.h"
#include "ops/linear.h"
#include "ops/list.h"

namespace pare::test::emu {
namespace {

#ifdef CUEMU_ASAN
constexpr bool kAsan = true;
#else
constexpr bool kAsan = false;
#endif

// ---- running them

// Device memory that is given back.
struct Floats {
  float* p = nullptr;
  explicit Floats(size_t n) { EXPECT_EQ(cudaMalloc(&p, n * sizeof(float)), cudaSuccess); }
  ~Floats() { cudaFree(p); }
};

// Memory of the host that kernels may use, and that is written.
struct Lent {
  void* p;
  Lent(void* p, size_t bytes) : p(p) {
    cuemu::device_memory(p, bytes);
    cuemu::host_wrote(p, bytes);
  }
  ~Lent() { cuemu::forget_device_memory(p); }
};

// The emulated compute capability while it lives.
struct Arch {
  const int before = cuemu::settings().arch;
  explicit Arch(int arch) { cuemu::settings().arch = arch; }
  ~Arch() { cuemu::settings().arch = before; }
};

struct Run {
  cudaError_t error;
  std::string report;
  std::vector<float> out;
};

Run run(Kernel* kernel, unsigned blocks = 1, unsigned threads = kN, const float* from = nullptr,
        size_t smem = kN * sizeof(float), unsigned cluster = 1, bool early = false) {
  std::vector<float> host(4 * kN);
  for (size_t i = 0; i < host.size(); i++) host[i] = static_cast<float>(i);
  Floats in(host.size()), out(8 * kN);
  EXPECT_EQ(cudaMemcpy(in.p, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemset(out.p + kZeros, 0, kN * sizeof(float)), cudaSuccess);
  cudaLaunchConfig_t c{};
  c.gridDim = cluster > 1 ? dim3(1, blocks) : dim3(blocks);
  c.blockDim = threads;
  c.dynamicSmemBytes = smem;
  cudaLaunchAttribute attributes[2] = {{cudaLaunchAttributeClusterDimension, {{1, cluster, 1}}},
                                       {cudaLaunchAttributeProgrammaticStreamSerialization, {}}};
  attributes[1].val.programmaticStreamSerializationAllowed = early;
  c.attrs = attributes;
  c.numAttrs = 2;
  Run r{cudaLaunchKernelEx(&c, kernel, out.p, from ? from : in.p), "", std::vector<float>(8 * kN)};
  if (!r.error) r.error = cudaDeviceSynchronize();
  if (r.error) r.report = cudaGetErrorString(r.error);
  cudaGetLastError();
  EXPECT_EQ(cudaMemcpy(r.out.data(), out.p, r.out.size() * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
  return r;
}

template <class F>
void expect_values(Kernel* kernel, F value, unsigned blocks = 1) {
  in_all_orders([&] {
    const Run r = run(kernel, blocks);
    ASSERT_EQ(r.error, cudaSuccess) << r.report;
    for (int i = 0; i < kN; i++) ASSERT_EQ(r.out[i], value(i)) << "thread " << i;
  });
}

// The launch fails in every order, and says why and where.
void expect_report(Kernel* kernel, const std::string& text) {
  in_all_orders([&] {
    const Run r = run(kernel);
    EXPECT_EQ(r.error, cudaErrorLaunchFailure);
    EXPECT_NE(r.report.find(text), std::string::npos) << r.report;
    EXPECT_NE(r.report.find("emu_kernels.cu:"), std::string::npos) << r.report;
  });
}

// Reads of what was never written give NaN.
void expect_nan(Kernel* kernel) {
  in_all_orders([&] {
    const Run r = run(kernel);
    EXPECT_EQ(r.error, cudaSuccess) << r.report;
    EXPECT_TRUE(std::any_of(r.out.begin(), r.out.begin() + kN, [](float x) { return std::isnan(x); }));
  });
}

// A missing barrier: some order shows a value that the correct kernel does not give.
void expect_order_matters(Kernel* wrong, Kernel* right) {
  const Run good = run(right);
  int differ = 0;
  in_all_orders([&] { differ += run(wrong).out != good.out; });
  EXPECT_GT(differ, 0);
}

// ---- tests

TEST(Emu, CorrectKernelsInEveryOrder) {
  expect_values(reverse<true>, [](int i) { return static_cast<float>(kN - 1 - i); });
  expect_values(rotate<true>, [](int) { return 6.f; });
  expect_values(copied<false>, [](int i) { return static_cast<float>(i); });
  expect_values(swap_pairs<true>, [](int i) { return static_cast<float>(i ^ 1); });
  expect_values(shuffle_half_warps, [](int i) { return static_cast<float>(i + (i ^ (i % 32 < 16 ? 1 : 2))); });
  expect_values(warp_functions, [](int) { return static_cast<float>(kN * (kN - 1) / 2); });
  expect_values(async_copies<0, true>, [](int i) { return 2.f * static_cast<float>(i); });
  expect_values(
      last_block<true>, [](int) { return 4.f; }, 4);
  expect_values(ring<true>, [](int i) { return i < 32 ? 0.f : static_cast<float>(6 * (i - 32) + 15); });
}

TEST(Emu, MissingSynchronisationShows) {
  if (cuemu::kChecker) GTEST_SKIP() << "reported in the check build";
  expect_order_matters(rotate<false>, rotate<true>);
  expect_order_matters(ring<false>, ring<true>);
  expect_nan(reverse<false>);
  if (!kAsan) expect_nan(swap_pairs<false>);  // static shared memory is not filled with NaN there
}

TEST(Emu, UninitialisedMemoryIsNan) {
  if (cuemu::kChecker) GTEST_SKIP() << "reported in the check build";
  expect_nan(uninit_dynamic);
  expect_nan(uninit_global);
  expect_nan(copied<true>);
  if (!kAsan) expect_nan(uninit_shared);
}

TEST(Emu, WrongCollectivesAreReported) {
  expect_report(barrier_skipped, "threads 0-39 wait in __syncthreads");
  expect_report(barrier_skipped, "threads 40-127 have returned");
  expect_report(barrier_two_places, "divergent barrier");
  expect_report(barrier_counts, "bar.sync");
  expect_report(barrier_unmet, "was waited for");
  expect_report(shuffle_divergent, "divergent barrier or wrong mask");
  expect_report(shuffle_self_out, "leaves itself out");
  expect_report(shuffle_from_outside, "which is not in mask 0000ffff");
  EXPECT_NE(run(swap_pairs<true>, 1, 48).report.find("lanes that do not exist"), std::string::npos);
}

TEST(Emu, ReturnedLanesInMask) {  // who notices depends on the order; that somebody does, not
  in_all_orders([] { EXPECT_EQ(run(shuffle_returned).error, cudaErrorLaunchFailure); });
}

TEST(Emu, AsynchronousCopies) {
  expect_report(async_at_exit, "never waited for");
  if (cuemu::kChecker) return;  // see CheckerFindsWhatIsSeeded
  if (kAsan) {
    EXPECT_DEATH(run(async_copies<-1, true>), "use-after-poison");
    EXPECT_DEATH(run(async_copies<1, true>), "use-after-poison");
  } else {
    expect_nan(async_copies<-1, true>);
    expect_nan(async_copies<1, true>);
  }
}

// ---- compute capability 9.0
struct Nine {
  const char* name;
  Kernel* kernel;
};
#define X(bug) {#bug, copy_ring<CopyBug::bug>},
const Nine kCopies[] = {EMU_COPY_BUGS(X)};
#undef X
#define X(bug) {#bug, group_product<false, true, ProductBug::bug>},
const Nine kProducts[] = {EMU_PRODUCT_BUGS(X)};
#undef X
Run run_nine(Kernel* kernel) {
  const Arch nine(90);
  return run(kernel, 1, kN, nullptr, 12 * 1024 + 512);
}

TEST(Emu, WarpgroupsTakeRegistersThatOthersGiveUp) {
  for (const auto& [kernel, report] :
       {std::pair<Kernel*, const char*>{move_registers<RegisterBug::none>, ""},
        {move_registers<RegisterBug::too_many>, "wait in setmaxnreg.inc"},
        {move_registers<RegisterBug::nobody_gives>, "wait in setmaxnreg.inc"},
        {move_registers<RegisterBug::one_warp_keeps>, "of a warpgroup have another number"},
        {move_registers<RegisterBug::gives_more>, "from 168 to 176 registers"},
        {move_registers<RegisterBug::one_lane>, "setmaxnreg.dec"}})
    in_all_orders([&, kernel = kernel, report = report] {
      const Arch nine(90);
      const auto r = run(kernel, 1, 384);
      EXPECT_EQ(r.error == cudaSuccess, *report == 0) << r.report;
      EXPECT_NE(r.report.find(report), std::string::npos) << r.report;
      for (int i = 0; r.error == cudaSuccess && i < 384; i++) ASSERT_EQ(r.out[i], i);
    });
}

TEST(Emu, TensorCopiesAndProductsInEveryOrder) {
  in_all_orders([] {
    const auto copied = run_nine(copy_ring<CopyBug::none>);
    ASSERT_EQ(copied.error, cudaSuccess) << copied.report;
    for (int c = 0; c < 96; c++)
      ASSERT_EQ(copied.out[32 + c], c < 32 ? 2 * 768 + 4 * (2 * c + 96) : 768 + 4 * c) << "thread " << c;
    const auto alone = run_nine(copy_alone<Source::written>);
    ASSERT_EQ(alone.error, cudaSuccess) << alone.report;
    ASSERT_EQ(alone.out[0], 95 * 96 / 2);
    for (Kernel* kernel : {group_product<false, true, ProductBug::none>, group_product<false, false, ProductBug::none>,
                           group_product<true, true, ProductBug::none>, group_product<true, false, ProductBug::none>,
                           left_in_registers<LeftBug::none>, fresh_sums<FreshBug::none>}) {
      const auto r = run_nine(kernel);
      ASSERT_EQ(r.error, cudaSuccess) << r.report;
      for (int i = 0; i < kN; i++) ASSERT_EQ(r.out[i], 0) << "wrong results of thread " << i;
    }
  });
}

// ---- clusters
Run run_pair(Kernel* kernel) {
  const Arch nine(90);
  return run(kernel, 2, kN, nullptr, 2048, 2);
}

TEST(Emu, ClustersInEveryOrder) {
  in_all_orders([] {
    const auto r = run_pair(cluster_ring<ClusterBug::none>);
    ASSERT_EQ(r.error, cudaSuccess) << r.report;
    for (int block = 0; block < 2; block++)
      for (int c = 0; c < 96; c++) {
        float sum = 0;
        for (int step = 0; step < 4; step++)
          for (int f = c; f < 192; f += 96) sum += static_cast<float>(step * 128 + (f < 64 ? block * 64 + f : f - 64));
        ASSERT_EQ(r.out[block * kN + 32 + c], sum) << "thread " << c << " of block " << block;
      }
  });
}

TEST(Emu, WrongUseOfClustersShows) {
  if (kAsan) GTEST_SKIP() << "AddressSanitizer ends the program at the first access to the target of a copy";
  struct Bug {
    Kernel* kernel;
    const char *report, *of_checker;  // "": other values, or a report, in some order
  };
  const auto good = run_pair(cluster_ring<ClusterBug::none>);
  for (const Bug& b : {
           Bug{cluster_ring<ClusterBug::no_first_barrier>, "",
               "not an initialised mbarrier|without a fence.mbarrier_init and a barrier"},
           {cluster_ring<ClusterBug::no_init_fence>, nullptr, "without a fence.mbarrier_init and a barrier"},
           {cluster_ring<ClusterBug::no_last_barrier>, "",
            "which has returned|has returned without knowing that thread"},
           {cluster_ring<ClusterBug::no_last_wait>, "ended without a wait for the barrier of the cluster", nullptr},
           {cluster_ring<ClusterBug::arrives_twice>, "has not waited for the barrier before", nullptr},
           {cluster_ring<ClusterBug::releases_own>, "96 more arrivals and 0 more bytes", nullptr},
           {cluster_ring<ClusterBug::awaits_own>, "", "race: |before the copy was waited for"},
           {cluster_ring<ClusterBug::copies_to_own>, "0 more arrivals and 256 more bytes", nullptr},
           {cluster_ring<ClusterBug::copies_to_three>, "TMA: a copy to blocks 0007 of a cluster that has 2", nullptr},
           {cluster_ring<ClusterBug::expects_in_one>, "for an mbarrier that expects ",
            "for an mbarrier that expects |before the copy was waited for|uninitialised: read of "},
           {cluster_ring<ClusterBug::returns_early>,
            "TMA: the memory of block .0,1,0., which has returned|ended before its copies landed|0 more arrivals and "
            "256 more bytes",
            nullptr},
       }) {
    const char* const text = cuemu::kChecker && b.of_checker ? b.of_checker : b.report;
    if (!text) continue;
    int noticed = 0;
    in_all_orders([&] {
      const auto r = run_pair(b.kernel);
      noticed += r.error != cudaSuccess || r.out != good.out;
      EXPECT_TRUE(std::regex_search(r.report, std::regex(text))) << text << ": " << r.report;
    });
    EXPECT_GT(noticed, 0) << text;
  }
}

TEST(Emu, ClustersReadEachOthersSharedMemory) {
  if (kAsan) GTEST_SKIP() << "AddressSanitizer ends the program behind the end of shared memory";
  const Arch nine(90);
  for (const auto& [kernel, report, of_checker] :  // of_checker: in some order
       {std::tuple<Kernel*, const char*, const char*>{cluster_shared<SharedBug::none>, "", ""},
        {cluster_shared<SharedBug::no_first_barrier>, "", "race: |uninitialised: read of another block"},
        {cluster_shared<SharedBug::no_last_barrier>, "which has returned",
         "which has returned|of a block that has returned"},
        {cluster_shared<SharedBug::third_block>, "mapa: block 2 of a cluster that has 2", ""},
        {cluster_shared<SharedBug::behind_the_end>, "", "out of bounds: "}}) {
    const std::string text = cuemu::kChecker && *of_checker ? of_checker : report;
    int noticed = 0;
    in_all_orders([&, kernel = kernel] {
      const auto r = run(kernel, 2, kN, nullptr, kN * sizeof(float), 2);
      EXPECT_TRUE(std::regex_search(r.report, std::regex(text.empty() ? "^$" : "^$|" + text))) << r.report;
      noticed += r.error != cudaSuccess;
      if (kernel != cluster_shared<SharedBug::none>) return;
      ASSERT_EQ(r.error, cudaSuccess) << r.report;
      for (int i = 0; i < 2 * kN; i++) ASSERT_EQ(r.out[i], (i < kN ? 2 : 1) * kN - 1 - i % kN) << i;
    });
    EXPECT_EQ(noticed > 0, !text.empty()) << text;
  }
}

TEST(Emu, ClustersLeavePartsInDeviceMemory) {
  const Arch nine(90);
  const auto wrong = [](Kernel* kernel) {
    const auto r = run(kernel, 4, kN, nullptr, 512, 2);
    EXPECT_TRUE(std::regex_search(r.report, std::regex("^$|race: |uninitialised: "))) << r.report;
    return r.error != cudaSuccess || std::any_of(r.out.begin(), r.out.begin() + kN, [](float x) { return x != 10; });
  };
  int no_barrier = 0, no_fence = 0, no_block_barrier = 0;
  in_all_orders([&] {
    EXPECT_FALSE(wrong(cluster_parts<PartsBug::none>));
    no_barrier += wrong(cluster_parts<PartsBug::no_barrier>);
    no_fence += wrong(cluster_parts<PartsBug::no_fence>);
    no_block_barrier += wrong(cluster_parts<PartsBug::no_block_barrier>);
  });
  EXPECT_GT(no_barrier, 0);
  EXPECT_GT(no_block_barrier, 0);
  EXPECT_EQ(no_fence > 0, cuemu::kChecker);
}

// A grid is made of whole clusters, of at most eight blocks; earlier devices have none.
TEST(Emu, ClustersThatNoDeviceHas) {
  const auto launch = [](int arch, unsigned blocks, unsigned cluster, unsigned threads = kN) {
    const Arch other(arch);
    return run(reverse<true>, blocks, threads, nullptr, 512, cluster).error;
  };
  for (const auto& [arch, blocks, cluster] : {std::tuple{90, 3, 2}, {90, 16, 16}, {89, 2, 2}, {80, 2, 2}})
    EXPECT_EQ(launch(arch, static_cast<unsigned>(blocks), static_cast<unsigned>(cluster)),
              cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(90, 2, 2, 100), cudaErrorInvalidConfiguration);  // that have parts of warps are not emulated
}

// ---- kernels that may begin before the one before has ended

TEST(Emu, AnEarlyKernelWaitsBeforeItTouchesMemory) {
  struct Case {
    Kernel* kernel;
    const char *report, *of_checker;  // null: none
  };
  for (const Case& c : {Case{early<EarlyBug::none>, nullptr, nullptr},
                        {early<EarlyBug::reads>, nullptr, "early launch: read of device memory"},
                        {early<EarlyBug::writes>, nullptr, "early launch: write of device memory"},
                        {early<EarlyBug::copies>, "early launch: cp.async before", "early launch: cp.async before"},
                        {early<EarlyBug::one_returns>, "the thread has returned without waiting",
                         "the thread has returned without waiting"}})
    for (const bool is_early : {true, false}) {
      const char* const text = !is_early ? nullptr : cuemu::kChecker ? c.of_checker : c.report;
      in_all_orders([&] {
        const auto r = run(c.kernel, 1, kN, nullptr, kN * sizeof(float), 1, is_early);
        EXPECT_EQ(r.error, text ? cudaErrorLaunchFailure : cudaSuccess) << r.report;
        EXPECT_NE(r.report.find(text ? text : ""), std::string::npos) << r.report;
      });
    }
  const Arch eight(89);
  EXPECT_NE(run(early<EarlyBug::none>).report.find("compute capability 9.0"), std::string::npos);
}

// The 28 rows of 64 bf16 that store_boxes fills, as bits.
std::vector<uint16_t> stored(const Run& r) {
  std::vector<uint16_t> bits(28 * 64);
  std::memcpy(bits.data(), r.out.data(), bits.size() * 2);
  return bits;
}

TEST(Emu, TensorStoresInEveryOrder) {
  in_all_orders([] {
    const auto r = run_nine(store_boxes<StoreBug::none>);
    ASSERT_EQ(r.error, cudaSuccess) << r.report;
    const auto bits = stored(r);
    for (size_t i = 0; i < bits.size(); i++) ASSERT_EQ(bits[i], f32_to_bf16(static_cast<float>(i))) << "element " << i;
    EXPECT_EQ(r.out[kZeros], 0);  // behind the tensor
  });
}

TEST(Emu, WrongUseOfTensorStoresShows) {
  const auto report = [](Kernel* kernel, const char* text) {
    in_all_orders([&] {
      const auto r = run_nine(kernel);
      EXPECT_NE(r.report.find(text), std::string::npos) << r.report;
    });
  };
  report(store_boxes<StoreBug::no_commit>,
         cuemu::kChecker ? "TMA: write of dynamic shared memory, byte " : "that may yet have to read shared memory");
  report(store_boxes<StoreBug::no_last_wait>, "a tensor store that may yet have to read shared memory");
  report(store_boxes<StoreBug::divergent>, "stmatrix");
  report(store_boxes<StoreBug::misaligned>, "stmatrix: address");
  if (cuemu::kChecker) {
    report(store_boxes<StoreBug::no_read_wait>, "TMA: write of dynamic shared memory, byte ");
    report(store_boxes<StoreBug::waits_for_one>, "TMA: write of dynamic shared memory, byte ");
    report(store_boxes<StoreBug::no_proxy_fence>, "async proxy: dynamic shared memory, byte ");
    report(store_boxes<StoreBug::no_barrier>, "race: ");
    report(store_boxes<StoreBug::reads_target>, "TMA: read of ");
    return;
  }
  const auto good = stored(run_nine(store_boxes<StoreBug::none>));
  in_all_orders([&] {
    EXPECT_NE(stored(run_nine(store_boxes<StoreBug::no_read_wait>)), good);
    EXPECT_NE(stored(run_nine(store_boxes<StoreBug::waits_for_one>)), good);
    EXPECT_TRUE(std::isnan(run_nine(store_boxes<StoreBug::reads_target>).out[kZeros]));
  });
}

TEST(Emu, TensorCopiesAddToMemory) {
  in_all_orders([] {
    const auto r = run_nine(add_box<AddBug::none>);
    ASSERT_EQ(r.error, cudaSuccess) << r.report;
    for (int i = 0; i < kN; i++) ASSERT_EQ(r.out[kZeros + i], i);  // subnormal: a zero
    for (Kernel* kernel : {add_box<AddBug::twice>, add_box<AddBug::reads_target>, add_box<AddBug::no_proxy_fence>}) {
      const auto wrong = run_nine(kernel);
      const bool twice = kernel == add_box<AddBug::twice>;
      if (cuemu::kChecker) {
        EXPECT_EQ(wrong.error, cudaErrorLaunchFailure);
      } else if (kernel != add_box<AddBug::no_proxy_fence>) {
        EXPECT_TRUE(std::isnan(wrong.out[twice ? kZeros + 5 : 5]));
      }
    }
  });
}

// Reports of any build, in every order; "" where the values are wrong.
TEST(Emu, WrongUseOfTensorCopiesAndProductsShows) {
  struct Bug {
    Kernel* kernel;
    const char* report;
  };
  const Bug bugs[] = {
      {copy_ring<CopyBug::no_init>, ""},
      {copy_ring<CopyBug::few_bytes>, "TMA: a copy of 512 bytes for an mbarrier that expects 256 more"},
      {copy_ring<CopyBug::many_bytes>, "for the mbarrier at byte 2048: 0 more arrivals and 512 more bytes"},
      {copy_ring<CopyBug::within_16_bytes>, "TMA: a box begins at element 4 of a row, within 16 bytes"},
      {copy_ring<CopyBug::no_full_wait>, ""},
      {copy_ring<CopyBug::wrong_parity>, ""},
      {copy_ring<CopyBug::not_awaited>, ""},
      {group_product<false, true, ProductBug::no_fence>, "registers were written without a wgmma.fence"},
      {group_product<false, true, ProductBug::no_fence_again>, "registers were written without a wgmma.fence"},
      {group_product<false, true, ProductBug::no_wait>, "wgmma products that it never waited for"},
      {group_product<false, true, ProductBug::waits_for_one>, ""},
      {group_product<false, true, ProductBug::wrong_stride>, ""},
      {group_product<false, true, ProductBug::different_matrices>, "the warps of a warpgroup name different matrices"},
      {left_in_registers<LeftBug::no_fence>, "a factor in registers without a wgmma.fence"},
      {left_in_registers<LeftBug::overwritten>, "the registers of a factor were written before the wait"},
      {fresh_sums<FreshBug::no_fence>, "sums begin afresh without a wgmma.fence"},
      {fresh_sums<FreshBug::adds>, ""},
#ifndef __clang__  // whose precompiled headers forbid it to fill variables
      {fresh_sums<FreshBug::never_begun>, "adds to registers that nothing was written to"},
#endif
  };
  if (kAsan) GTEST_SKIP() << "AddressSanitizer ends the program at the first access to the target of a copy";
  const auto copied = run_nine(copy_ring<CopyBug::none>),
             multiplied = run_nine(group_product<false, true, ProductBug::none>);
  for (const Bug& b : bugs)
    in_all_orders([&] {
      const auto r = run_nine(b.kernel);
      const auto name = std::string("bug ") + std::to_string(&b - bugs) + ": " + r.report;
      if (*b.report) {
        EXPECT_NE(r.report.find(b.report), std::string::npos) << name;
        EXPECT_NE(r.report.find("emu_hopper.cu:"), std::string::npos) << name;
      } else if (r.error == cudaSuccess) {
        const auto& good = &b < bugs + 6 ? copied : multiplied;
        EXPECT_FALSE(std::equal(r.out.begin(), r.out.begin() + kN, good.out.begin())) << name;
      }
    });
}

TEST(Emu, CheckerKnowsTensorCopiesAndProducts) {
  if (!cuemu::kChecker) GTEST_SKIP() << "in the check build only";
  for (const auto& list : {std::span<const Nine>(kCopies), std::span<const Nine>(kProducts)})
    for (const Nine& x : list.subspan(1)) {
      const std::string name = x.name;
      if (name == "waits_for_one" || name == "wrong_stride") continue;  // seen in the values
      in_all_orders([&] { EXPECT_EQ(run_nine(x.kernel).error, cudaErrorLaunchFailure) << name; });
    }
  const auto report = [](Kernel* kernel, const char* text) {
    in_all_orders([&] {
      const auto r = run_nine(kernel);
      EXPECT_NE(r.report.find(text), std::string::npos) << r.report;
    });
  };
  report(copy_ring<CopyBug::no_proxy_fence>, "async proxy: the mbarrier was written without a fence.proxy.async");
  EXPECT_EQ(run_nine(copy_alone<Source::unwritten>).report, "");
  report(copy_alone<Source::unwritten_used>, "uninitialised: read of dynamic shared memory, byte 0 ");
  report(copy_ring<CopyBug::no_full_wait>, "of dynamic shared memory, byte ");
  report(copy_ring<CopyBug::early_arrival>, "race: ");
  report(group_product<false, true, ProductBug::no_proxy_fence>, "async proxy: dynamic shared memory, byte ");
  report(group_product<false, true, ProductBug::overwritten>, "race: ");
}

TEST(Emu, OtherArchitecturesHaveNoTensorCopies) {
  for (const int arch : {80, 89, 100, 120}) {
    const Arch other(arch);
    for (Kernel* kernel : {copy_ring<CopyBug::none>, group_product<false, true, ProductBug::none>})
      EXPECT_NE(run(kernel, 1, kN, nullptr, 12 * 1024).report.find("needs the code of compute capability 9.0a"),
                std::string::npos);
  }
}

// More than 16 KiB has to be asked for, and a device has so much and no more.
TEST(Emu, SharedMemoryIsLimited) {
  Kernel* const kernel = reverse<true>;
  const void* const name = cuemu::symbol(kernel);
  const auto ask = [&](int bytes) {
    return cudaFuncSetAttribute(name, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  const auto launch = [&](size_t bytes) { return run(kernel, 1, kN, nullptr, bytes).error; };
  EXPECT_EQ(launch(16 * 1024), cudaSuccess);
  EXPECT_EQ(launch(16 * 1024 + 4), cudaErrorInvalidConfiguration);
  for (const auto& [arch, most] :
       {std::pair{80, 163}, {86, 99}, {89, 99}, {90, 227}, {100, 227}, {120, 99}, {75, 64}}) {
    const Arch device(arch);
    EXPECT_EQ(ask(most * 1024 + 1), cudaErrorInvalidValue) << arch;
    ASSERT_EQ(ask(most * 1024), cudaSuccess) << arch;
    EXPECT_EQ(launch(most * 1024), cudaSuccess) << arch;
    EXPECT_EQ(launch(most * 1024 + 4), cudaErrorInvalidConfiguration) << arch;
  }
  ASSERT_EQ(ask(50 * 1024), cudaSuccess);  // also less than before
  EXPECT_EQ(launch(60 * 1024), cudaErrorInvalidConfiguration);
  ASSERT_EQ(ask(16 * 1024), cudaSuccess);
}

TEST(Emu, ArchitecturesAreReadStrictly) {
  for (const int arch : {75, 80, 86, 89, 90, 100, 120}) EXPECT_EQ(cuemu::read_arch(std::to_string(arch).c_str()), arch);
  for (const char* text : {"", "70", "1000", "90a", "sm_90"})
    EXPECT_EXIT(cuemu::read_arch(text), testing::ExitedWithCode(1), "CUEMU_ARCH=.*80, 86, 89, 90, 100 and 120");
}

TEST(Emu, AddressSanitizerGuardsEveryMemory) {
  if (!kAsan) GTEST_SKIP() << "in the asan build only";
  EXPECT_DEATH(run(oob_static), "buffer-overflow|out of bounds");
  EXPECT_DEATH(run(oob_dynamic), "heap-buffer-overflow");
  EXPECT_DEATH(run(oob_global), "heap-buffer-overflow");
  EXPECT_DEATH(run(misaligned), "misaligned address");
  EXPECT_DEATH(run(oob_local), "out of bounds");
  Floats device(1);
  EXPECT_DEATH(std::printf("%f", static_cast<double>(*device.p)), "use-after-poison");
}

TEST(Emu, TheHostCannotTouchDeviceMemory) {
  if (kAsan) GTEST_SKIP() << "AddressSanitizer says it in its own words";
  Floats device(3);
  const char* message = "the host touched byte 8 of an allocation of 12 bytes of device memory";
  EXPECT_DEATH(std::printf("%f", static_cast<double>(device.p[2])), message);
  EXPECT_DEATH(device.p[2] = 1, message);
  ASSERT_EQ(cudaMemset(device.p, 0, 12), cudaSuccess);  // nor after work has run
  EXPECT_DEATH(device.p[2] = 1, message);
}

TEST(Emu, DeviceMemoryIsLimited) {
  size_t before = 0, free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
  const size_t limit = cuemu::settings().device_memory;
  EXPECT_EQ(total, limit);
  cuemu::settings().device_memory = total - before + 100;
  {
    const Floats some(10);
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    EXPECT_EQ(free, 60u);
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, 61), cudaErrorMemoryAllocation);
    ASSERT_EQ(cudaMalloc(&p, 60), cudaSuccess);
    EXPECT_EQ(cudaFree(p), cudaSuccess);
  }
  cuemu::settings().device_memory = limit;
}

// What the access checker says of each seeded bug, in every order of threads.
TEST(Emu, CheckerFindsWhatIsSeeded) {
  if (!cuemu::kChecker) GTEST_SKIP() << "in the check build only";
  const std::vector<float> host(kN);
  struct Bug {
    Kernel* kernel;
    const char* report;
    unsigned blocks = 1;
    const float* in = nullptr;
  };
  const Bug bugs[] = {
      {oob_static, ""},  // into the next variable; then an element is read that nobody wrote
      {oob_dynamic, "0 bytes past dynamic shared memory of 512"},
      {oob_global, "0 bytes past device memory of 2048"},
      {reads_memory, "out of bounds", 1, host.data()},
      {uninit_shared, "uninitialised: read of shared variable 's', byte "},
      {uninit_dynamic, "uninitialised: read of dynamic shared memory, byte "},
      {uninit_global, "uninitialised: read of device memory, byte "},
      {copied<true>, "uninitialised: read of device memory, byte "},
      {reverse<false>, ""},  // by order: an uninitialised read or a race
      {rotate<false>, "race: "},
      {swap_pairs<false>, ""},
      {ring<false>, ""},
      {async_copies<-1, true>, "cp.async: read of shared variable 's'"},
      {async_copies<1, true>, "cp.async: read of shared variable 's'"},
      {async_no_barrier, ""},
      {async_at_exit, "never waited for"},
      {add_plain, "of another block at emu_kernels.cu:", 2},
      {last_block<false>, "race: a read and a write of 4 bytes at device memory", 4},
  };
  in_all_orders([&] {
    for (const Bug& b : bugs) {
      const auto r = run(b.kernel, b.blocks, kN, b.in);
      EXPECT_EQ(r.error, cudaErrorLaunchFailure) << "bug " << &b - bugs << ": " << b.report;
      EXPECT_NE(r.report.find(b.report), std::string::npos) << r.report;
      EXPECT_NE(r.report.find("emu_kernels.cu:"), std::string::npos) << r.report;
    }
  });
}

TEST(Emu, AtomicsOfSeveralBlocks) {
  in_all_orders([&] {
    const auto r = run(add_atomic, 3);
    ASSERT_EQ(r.error, cudaSuccess) << r.report;
    for (int i = 0; i < kN; i++) ASSERT_EQ(r.out[kZeros + i], 3.f);
  });
}

// The profile's line of a kind of access in the last launch.
cuemu::ProfileLine profile_of(Kernel* kernel, bool write, bool shared) {
  cuemu::settings().profile = true;
  EXPECT_EQ(run(kernel).error, cudaSuccess);
  cuemu::settings().profile = false;
  cuemu::ProfileLine sum;
  for (const cuemu::ProfileLine& l : cuemu::profile_lines())
    if (l.write == write && l.shared == shared) {
      sum.requests += l.requests;
      sum.bytes += l.bytes;
      sum.used += l.used;
      sum.ideal += l.ideal;
    }
  return sum;
}
TEST(Emu, AccessProfile) {
  if (!cuemu::kChecker) GTEST_SKIP() << "in the check build only";
  const cuemu::ProfileLine whole = profile_of(every_other<1>, false, false),
                           half = profile_of(every_other<2>, false, false);
  EXPECT_EQ(whole.requests, 4u);  // of a warp each
  EXPECT_EQ(whole.bytes, kN * sizeof(float));
  EXPECT_EQ(whole.used, 16u);  // sectors of 32 bytes
  EXPECT_EQ(whole.ideal, 16u);
  EXPECT_EQ(half.bytes, kN * sizeof(float));
  EXPECT_EQ(half.used, 32u);
  EXPECT_EQ(half.ideal, 16u);
  const cuemu::ProfileLine conflicts = profile_of(transpose_32<32>, false, true),
                           none = profile_of(transpose_32<33>, false, true);
  EXPECT_EQ(conflicts.used, 4u * 32);  // 32 lanes read one bank
  EXPECT_EQ(none.used, 4u);
  EXPECT_EQ(none.ideal, 4u);
}

// Of the kernels themselves: linear layers in bf16 by mma.sync move shared memory without bank conflicts.
TEST(Emu, LinearHasNoBankConflicts) {
  if (!cuemu::kChecker) GTEST_SKIP() << "in the check build only";
  const int64_t n = 128;
  Floats x(n * n / 2), w(n * n / 2), y(n * n);
  for (const Floats* t : {&x, &w}) ASSERT_EQ(cudaMemset(t->p, 0, n * n * 2), cudaSuccess);
  ASSERT_EQ(cudaMemset(y.p, 0, n * n * 4), cudaSuccess);
  const Weight weight{make_tensor(w.p, DType::bf16, {n / 16, n, 16}), n};
  kernel::ask_for(TensorKernel::mma);
  enum Which { forward, input, weights };
  for (const auto& [rows, which] :
       {std::pair{n, forward}, {n, input}, {n, weights}, {n / 8, forward}, {n / 8, input}}) {
    const Tensor in = make_tensor(x.p, DType::bf16, {rows, n}), out = make_tensor(y.p, DType::bf16, {rows, n});
    cuemu::settings().profile = true;
    if (which == forward) table_emu.linear_fwd({out, in, weight, {}, {}}, {});
    if (which == input) table_emu.linear_bwd_input({out, in, weight, false}, {});
    if (which == weights) table_emu.linear_bwd_weight({make_tensor(y.p, DType::f32, {n, n}), {}, in, in}, {});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    cuemu::settings().profile = false;
    uint64_t used = 0;
    for (const cuemu::ProfileLine& l : cuemu::profile_lines()) {
      if (!l.shared) continue;
      EXPECT_EQ(l.used, l.ideal) << l.place;
      used += l.used;
    }
    EXPECT_GT(used, 0u);
  }
  kernel::ask_for(TensorKernel::choose);
}

// Work is queued and runs when the host waits for it: what is not waited for has not happened.
TEST(Emu, StreamsRunAsLateAsAllowed) {
  cudaStream_t first, second;
  cudaEvent_t done;
  ASSERT_EQ(cudaStreamCreate(&first), cudaSuccess);
  ASSERT_EQ(cudaStreamCreate(&second), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&done), cudaSuccess);
  Floats device(1), other(1);
  float host = 1, back = -1;
  const auto up = [&](float* to, cudaStream_t s) { return cudaMemcpyAsync(to, &host, 4, cudaMemcpyHostToDevice, s); };
  const auto down = [&](const float* from, cudaStream_t s) {
    return cudaMemcpyAsync(&back, from, 4, cudaMemcpyDeviceToHost, s);
  };
  ASSERT_EQ(up(device.p, first), cudaSuccess);
  host = 2;  // before the copy has read it
  ASSERT_EQ(down(device.p, first), cudaSuccess);
  EXPECT_EQ(back, -1);
  ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(back, -1);
  ASSERT_EQ(cudaStreamSynchronize(first), cudaSuccess);
  EXPECT_EQ(back, 2);
  // Another stream does not see it, unless it waits for an event.
  host = 3;
  ASSERT_EQ(up(device.p, first), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(done, first), cudaSuccess);
  ASSERT_EQ(up(other.p, first), cudaSuccess);
  ASSERT_EQ(down(device.p, second), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(back, 2);
  ASSERT_EQ(cudaStreamWaitEvent(second, done), cudaSuccess);
  ASSERT_EQ(down(device.p, second), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(back, 3);
  // The default stream waits for every stream, and every stream for it.
  host = 4;
  ASSERT_EQ(cudaMemcpy(&back, other.p, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(back, 4);
  ASSERT_EQ(cudaMemsetAsync(device.p, 0, 4), cudaSuccess);
  ASSERT_EQ(down(device.p, second), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(back, 0);
  EXPECT_EQ(cudaEventDestroy(done), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(first), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(second), cudaSuccess);
}

TEST(Emu, WaitsOfTheHostAreCounted) {
  Floats device(1);
  void* locked = nullptr;
  float host = 1;
  ASSERT_EQ(cudaMallocHost(&locked, 4), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  uint64_t before = cuemu::host_waits();
  const auto count = [&] {
    const uint64_t n = cuemu::host_waits() - before;
    before += n;
    return n;
  };
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(count(), 0u) << "nothing was queued";
  ASSERT_EQ(cudaMemcpyAsync(device.p, locked, 4, cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(device.p, 0, 4), cudaSuccess);
  EXPECT_EQ(count(), 0u) << "queued";
  ASSERT_EQ(cudaMemcpyAsync(device.p, &host, 4, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(count(), 1u) << "memory that is not page-locked";
  ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  EXPECT_EQ(count(), 1u);
  ASSERT_EQ(cudaFreeHost(locked), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(locked), cudaErrorInvalidValue);
}

// An error of a kernel shows at the next wait.
TEST(Emu, LaunchesAreAsynchronous) {
  Floats out(8 * kN);
  cudaLaunchConfig_t c{};
  c.blockDim = kN;
  EXPECT_EQ(cudaLaunchKernelEx(&c, barrier_skipped, out.p, static_cast<const float*>(out.p)), cudaSuccess);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
}

TEST(Emu, AnErrorSticksUntilItIsRead) {
  Floats out(kN);
  cudaLaunchConfig_t c{};
  c.gridDim = 1;
  c.blockDim = 2000;
  EXPECT_EQ(cudaLaunchKernelEx(&c, rotate<true>, out.p, static_cast<const float*>(out.p)),
            cudaErrorInvalidConfiguration);
  c.blockDim = kN;
  EXPECT_EQ(cudaLaunchKernelEx(&c, rotate<true>, out.p, static_cast<const float*>(out.p)),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaLaunchKernelEx(&c, rotate<true>, out.p, static_cast<const float*>(out.p)), cudaSuccess);
}

TEST(Emu, CopiesCheckDirectionAndBounds) {
  std::vector<float> host(8, 3.f);
  Floats device(8);
  EXPECT_EQ(cudaMemcpy(host.data(), device.p, 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.p, host.data(), 32, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.p + 1, host.data(), 32, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(device.p + 1, 0, 32), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.p, host.data(), 32, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemset(device.p, 0, 16), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(host.data(), device.p, 32, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(host, (std::vector<float>{0, 0, 0, 0, 3, 3, 3, 3}));
}

thread_local int host_variable = 42;
TEST(Emu, HostThreadLocalsSurviveALaunch) {
  EXPECT_EQ(run(rotate<true>).error, cudaSuccess);
  EXPECT_EQ(host_variable, 42);
}

TEST(Emu, Bf16RoundsToNearestEven) {
  EXPECT_EQ(__float2bfloat16(1.f + 0x1p-8f).x, 0x3f80);             // tie: to even, down
  EXPECT_EQ(__float2bfloat16(1.f + 3 * 0x1p-8f).x, 0x3f82);         // tie: to even, up
  EXPECT_EQ(__float2bfloat16(1.f + 0x1p-8f + 0x1p-20f).x, 0x3f81);  // past the tie
  EXPECT_EQ(__float2bfloat16(3.4e38f).x, 0x7f80);                   // rounds to infinity
  EXPECT_EQ(__float2bfloat16(NAN).x, 0x7fff);
  EXPECT_EQ(__bfloat162float({0xc2c8}), -100.f);
  EXPECT_EQ(__bfloat162float(__ushort_as_bfloat16(0xc2c8)), -100.f);
}

TEST(Emu, MatrixProduct) {
  std::vector<__nv_bfloat16> a(256), b(128);
  std::vector<float> out(128);
  for (int i = 0; i < 256; i++) a[i] = __float2bfloat16(static_cast<float>(i * 7 % 23 - 11));  // small integers: exact
  for (int i = 0; i < 128; i++) b[i] = __float2bfloat16(static_cast<float>(i * 5 % 19 - 9));
  cudaLaunchConfig_t c{};
  c.blockDim = 32;
  const Lent lend(a.data(), a.size() * 2), lend_b(b.data(), b.size() * 2), lend_out(out.data(), out.size() * 4);
  ASSERT_EQ(cudaLaunchKernelEx(&c, one_mma, out.data(), a.data(), b.data()), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 8; j++) {
      float sum = 0;
      for (int k = 0; k < 16; k++) sum += __bfloat162float(a[i * 16 + k]) * __bfloat162float(b[k * 8 + j]);
      EXPECT_EQ(out[i * 8 + j], sum) << i << ", " << j;
    }
}

}  // namespace
}  // namespace pare::test::emu
