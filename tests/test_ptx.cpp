// Results of the PTX wrappers of cuda/ptx.cuh and ptx90.cuh against stored ones, byte by byte: the same on the device
// and emulated.
//
// tests/golden/ptx_sm80.json and ptx_sm90.json hold the results, and under "made_by" who computed them: the name of a
// GPU, or "model", which is the emulator and so only as right as its reading of the manuals.  The inputs are functions
// of a seed.  PARE_WRITE_GOLDENS=1 stores what this build computes: on a GPU, build/cuda/pare_cuda_tests writes the
// file of its architecture with its name; emulated, build/tests/pare_tests writes both.
#if defined(PARE_EMU) || defined(PARE_CUDA_TESTS)

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/rng.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "kernels.h"
#include "ptx_kernels.h"
#ifdef PARE_CUDA_TESTS
#include <cuda_runtime.h>

#include "cuda/runtime/watchdog.h"
#else
#include "cuda/emu/include/cuda_runtime.h"
#endif

namespace pare::test {
namespace {

using nlohmann::json;

// ---- who computes

// f() on each architecture that this build has; f takes compute capability times ten, 80 or 90.
template <class F>
void on_architectures(F f) {
#ifdef PARE_CUDA_TESTS
  cudaDeviceProp p;
  ASSERT_EQ(cudaGetDeviceProperties(&p, 0), cudaSuccess);
  if (p.major != 8 && (p.major != 9 || p.minor != 0))
    GTEST_SKIP() << "nothing is stored for compute capability " << p.major << "." << p.minor;
  f(p.major * 10);
#else
  for (int arch : {80, 90}) {
    cuemu::settings().arch = arch;
    f(arch);
  }
  cuemu::settings().arch = 90;
#endif
}
std::string maker() {
#ifdef PARE_CUDA_TESTS
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  return p.name;
#else
  return "model";
#endif
}
std::string golden_path(int arch) { return cat("tests/golden/ptx_sm", arch, ".json"); }
json read_golden(int arch) {
  std::ifstream file(golden_path(arch));
  EXPECT_TRUE(file) << golden_path(arch);
  return json::parse(file);
}

// ---- operands

template <class T>
class Memory {
 public:
  explicit Memory(const std::vector<T>& values) : values_(values.begin(), values.end()) {
    const Tensor t = make_tensor(values_.data(), DType::u8, {static_cast<int64_t>(sizeof(T) * values_.size())});
    memory_.emplace(t);
    KernelMemory::wrote(t.data, t.bytes());
  }
  T* data() { return values_.data(); }
  // Waits for the kernels.
  std::vector<T> values() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
    return {values_.begin(), values_.end()};
  }

 private:
  KernelVector<T> values_;
  std::optional<KernelMemory> memory_;
};

Rng numbers(uint64_t uid) { return Rng(rng_key(1, RngStream::test, 1), uid); }

template <class T>
std::vector<T> random_bits(uint64_t uid, size_t n) {
  Rng r = numbers(uid);
  std::vector<T> v(n);
  for (T& x : v) x = static_cast<T>(r.next());
  return v;
}

// Exponent fields of bf16 and float; the other bits are random.
struct Range {
  uint32_t low, high;
};
uint32_t draw(Rng& r, Range fields) {
  const uint32_t field = fields.low + r.below(fields.high - fields.low + 1);
  return (r.next() & 0x807fffffu) | field << 23;
}
struct Factors {
  const char* name;
  Range a, b, d;
};
constexpr Factors kFactors[] = {{"mma near 1", {122, 129}, {122, 129}, {120, 132}},
                                {"mma wide range", {96, 158}, {96, 158}, {80, 170}},
                                {"mma denormal", {0, 2}, {100, 140}, {0, 20}},
                                {"mma denormal results", {40, 66}, {40, 66}, {0, 1}},
                                {"mma infinity and NaN", {200, 255}, {1, 255}, {1, 255}}};

// ---- what there is to store

struct Result {
  std::string name;
  std::string bytes;
};
template <class T>
Result result(const std::string& name, const Memory<T>& m) {
  const std::vector<T> v = m.values();
  return {name, {reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T)}};
}

std::vector<int32_t> up_to(int32_t n) {
  std::vector<int32_t> v;
  for (int32_t i = 0; i <= n; i++) v.push_back(i);
  return v;
}
std::vector<int32_t> scattered_rows() {
  std::vector<int32_t> v;
  for (int32_t i = 0; i < 32; i++) v.push_back((i * 11 + 5) % 32);
  return v;
}

// ---- compute capability 9.0

struct Box {
  const char* name;
  int x, y, z;
};
// Copies from a matrix of 100 columns and 20 rows, and from 3 panels of 11 rows: within it, and over its edges.  (Rows
// of a box begin at multiples of 16 bytes; elsewhere a device reports an illegal instruction.)
constexpr int64_t kColumns = 100, kRows = 20, kStride = 104, kPanelRows = 11, kPanels = 3;
constexpr Box kBoxes[] = {
    {"tensor copy", 8, 2, 0}, {"tensor copy over the end", 72, 9, 0}, {"tensor copy over the start", -8, -5, 0}};
constexpr Box kPanelBoxes[] = {{"tensor copy of panels", 0, 1, 1},
                               {"tensor copy of panels over the end", 8, 7, 2},
                               {"tensor copy of panels over the start", -8, -3, -1}};

std::vector<uint16_t> random_factors(Rng& r, Range range, size_t n) {
  std::vector<uint16_t> v(n);
  for (uint16_t& x : v) x = static_cast<uint16_t>(draw(r, range) >> 16);
  return v;
}

// A product of a warpgroup: how b lies in shared memory, and where a is.
struct GroupShape {
  const char* name;
  int columns;
  bool mn_major, rows;      // rows: of 128 bytes, if MN-major with a from registers
  bool mn_major_a = false;  // from shared memory
};
constexpr GroupShape kGroupShapes[] = {{"128 columns", 128, false, false},
                                       {"128 columns, MN-major", 128, true, false},
                                       {"256 columns", 256, false, false},
                                       {"256 columns, MN-major", 256, true, false},
                                       {"64 columns, rows of 128 bytes", 64, false, true},
                                       {"64 columns, MN-major, from registers", 64, true, true},
                                       {"128 columns, MN-major, from registers", 128, true, true},
                                       {"128 columns, both MN-major", 128, true, true, true},
                                       {"256 columns, both MN-major", 256, true, true, true}};

// Its operands as matrices, and the registers before and after.
struct GroupProduct {
  GroupShape shape;
  std::vector<uint16_t> a, b;  // [64][64], [64][columns]
  std::vector<float> d, after;
  GroupProduct(const Factors& f, const GroupShape& shape) : shape(shape) {
    Rng r = numbers(20 + static_cast<uint64_t>(&f - kFactors));
    a = random_factors(r, f.a, 64 * 64);
    b = random_factors(r, f.b, 64 * static_cast<size_t>(shape.columns));
    for (int i = 0; i < 64 * shape.columns; i++) d.push_back(std::bit_cast<float>(draw(r, f.d)));
    run();
  }
  void run() {
    const int columns = shape.columns;
    const auto place = [&](int k, int n) {
      if (shape.rows) return shape.mn_major ? k * columns + n : n * 64 + k;
      return shape.mn_major ? (n / 16 * 64 + k) * 16 + n % 16 : (k / 16 * columns + n) * 16 + k % 16;
    };
    std::vector<uint16_t> packed(b.size());
    for (int k = 0; k < 64; k++)
      for (int n = 0; n < columns; n++) packed[place(k, n)] = b[k * columns + n];
    std::vector<uint16_t> across(a.size());
    for (int i = 0; i < 64 * 64; i++) across[i % 64 * 64 + i / 64] = a[i];
    Memory<uint16_t> left(shape.mn_major_a ? across : a), right(packed);
    Memory<float> sum(d);
    if (shape.mn_major_a)
      ptx::multiply_gradients(sum.data(), left.data(), right.data(), columns);
    else if (!shape.rows)
      ptx::multiply_group(sum.data(), left.data(), right.data(), columns, shape.mn_major);
    else if (shape.mn_major)
      ptx::multiply_values(sum.data(), left.data(), right.data(), columns);
    else
      ptx::multiply_scores(sum.data(), left.data(), right.data());
    after = sum.values();
  }
};

void add_results_of_90(std::vector<Result>& all) {
  Memory<uint16_t> matrix(random_bits<uint16_t>(10, kStride * kRows)),
      panels(random_bits<uint16_t>(11, 16 * kPanelRows * kPanels));
  for (const Box& b : kBoxes) {
    Memory<unsigned char> out(std::vector<unsigned char>(2048));
    ptx::copy_box(out.data(), matrix.data(), kColumns, kRows, kStride, b.x, b.y);
    all.push_back(result(b.name, out));
  }
  for (const Box& b : kPanelBoxes) {
    Memory<unsigned char> out(std::vector<unsigned char>(512));
    ptx::copy_panels(out.data(), panels.data(), kPanelRows, kPanels, b.x, b.y, b.z);
    all.push_back(result(b.name, out));
  }
  for (const Factors& f : kFactors)
    for (const GroupShape& shape : kGroupShapes) {
      const GroupProduct p(f, shape);
      std::string some;  // elements of every row and every column
      for (int r = 0; r < 64; r++)
        for (int c = r % 32; c < shape.columns; c += 32)
          some.append(reinterpret_cast<const char*>(&p.after[r * shape.columns + c]), 4);
      all.push_back({cat("wg", f.name, ", ", shape.name), some});
    }
}

std::vector<Result> results(int arch) {
  std::vector<Result> all;
  Memory<unsigned char> bytes(random_bits<unsigned char>(1, 32 * 16)), to_16(std::vector<unsigned char>(17 * 16)),
      to_8(std::vector<unsigned char>(9 * 8));
  Memory<int32_t> lengths(up_to(16)), rows(scattered_rows());
  ptx::copy_16(to_16.data(), bytes.data(), lengths.data(), 17);
  ptx::copy_8(to_8.data(), bytes.data(), lengths.data(), 9);
  all.push_back(result("cp.async 16", to_16));
  all.push_back(result("cp.async 8", to_8));
  Memory<uint32_t> words(random_bits<uint32_t>(2, 256)), copied(std::vector<uint32_t>(256));
  ptx::copy_groups(copied.data(), words.data());
  all.push_back(result("cp.async groups", copied));
  for (bool transposed : {false, true}) {
    Memory<uint16_t> matrices(random_bits<uint16_t>(3, 256));
    Memory<uint32_t> loaded(std::vector<uint32_t>(128));
    ptx::load_matrices(loaded.data(), matrices.data(), rows.data(), transposed);
    all.push_back(result(transposed ? "ldmatrix.trans" : "ldmatrix", loaded));
  }
  for (const Factors& f : kFactors) {
    constexpr int kProducts = 4;
    Rng r = numbers(4 + static_cast<uint64_t>(&f - kFactors));
    std::vector<uint16_t> a, b;
    std::vector<float> d;
    for (int i = 0; i < kProducts * 256; i++) a.push_back(static_cast<uint16_t>(draw(r, f.a) >> 16));
    for (int i = 0; i < kProducts * 128; i++) b.push_back(static_cast<uint16_t>(draw(r, f.b) >> 16));
    for (int i = 0; i < kProducts * 128; i++) d.push_back(std::bit_cast<float>(draw(r, f.d)));
    Memory<uint16_t> left(a), right(b);
    Memory<float> sum(d);
    ptx::multiply(sum.data(), left.data(), right.data(), kProducts);
    all.push_back(result(f.name, sum));
  }
  if (arch == 90) add_results_of_90(all);
  return all;
}

std::string hex(const std::string& bytes) {
  std::string s;
  for (char c : bytes)
    for (int shift : {4, 0}) s += "0123456789abcdef"[static_cast<unsigned char>(c) >> shift & 15];
  return s;
}

// ---- tests

TEST(Ptx, ResultsAreTheStoredOnes) {
  on_architectures([](int arch) {
    if (std::getenv("PARE_WRITE_GOLDENS")) {
      json file{{"made_by", maker()}};
      for (const Result& r : results(arch)) file["results"][r.name] = hex(r.bytes);
      write_file(golden_path(arch), file.dump(1) + "\n");
    }
    const json golden = read_golden(arch);
    in_all_orders([&] {
      const std::vector<Result> all = results(arch);
      EXPECT_EQ(golden["results"].size(), all.size());
      for (const Result& r : all) {
        const std::string is = hex(r.bytes), should = golden["results"].value(r.name, "");
        size_t first = 0;
        while (first < is.size() && first < should.size() && is[first] == should[first]) first++;
        EXPECT_TRUE(is == should) << r.name << ": byte " << first / 2 << " of " << is.size() / 2 << " is not that of "
                                  << golden_path(arch) << ", made by " << golden["made_by"];
      }
    });
  });
}

TEST(Ptx, StoredResultsTellTheArchitecturesApart) {
  const json old = read_golden(80)["results"], now = read_golden(90)["results"];
  for (const auto& [name, bytes] : old.items()) EXPECT_EQ(bytes != now[name], name.starts_with("mma")) << name;
}

// A wait that nothing will end does not last for ever: on a device a watchdog ends it.
TEST(Ptx, ALostArrivalIsReported) {
  if (!ptx::waits_for_mbarriers()) GTEST_SKIP() << "this device has no kernels that wait for mbarriers";
#ifdef PARE_CUDA_TESTS
  EXPECT_EXIT(
      {
        ptx::lose_arrival();
        cudaDeviceSynchronize();
        std::fputs(cuda::lost_arrival_report().c_str(), stderr);
        std::exit(1);
      },
      testing::ExitedWithCode(1),
      "watchdog: thread [0-9]+ of block \\(1, 0, 0\\) waits for ever for the mbarrier at byte [0-9]+ of shared memory, "
      "parity 0");
#else
  ptx::lose_arrival();
  const cudaError_t e = cudaDeviceSynchronize();
  const std::string report = cudaGetErrorString(e);
  cudaGetLastError();
  for (const char* part : {"no thread of block (1,0,0) can go on", "threads 0-31 wait in mbarrier.try_wait",
                           "ptx90_kernels.cu:", "for the mbarrier at byte 8: 1 more arrivals and 0 more bytes"})
    EXPECT_NE(report.find(part), std::string::npos) << report;
#endif
}

// (No instruction of PTX.)  The exponential of attention, for what it is defined for: every 4001st float.
TEST(Ptx, Exp2IsAccurate) {
  std::vector<float> in = {0, -0.f, -149, -149.5f, -150, -151, -1e30f, -INFINITY, NAN};
  for (uint64_t bits = 0; bits < std::bit_cast<uint32_t>(63.f); bits += 4001)
    in.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  for (uint64_t bits = 0; bits <= std::bit_cast<uint32_t>(INFINITY); bits += 4001)
    in.push_back(-std::bit_cast<float>(static_cast<uint32_t>(bits)));
  Memory<float> x(in);
  ptx::exp2_in_place(x.data(), static_cast<int>(in.size()));
  const std::vector<float> out = x.values();
  EXPECT_EQ(out[0], 1);
  EXPECT_EQ(out[1], 1);
  EXPECT_EQ(out[2], 0x1p-149f);
  for (int i : {4, 5, 6, 7}) EXPECT_EQ(std::bit_cast<uint32_t>(out[i]), 0u) << in[i];
  EXPECT_TRUE(std::isnan(out[8]));
  double most = 0;
  for (size_t i = 0; i < in.size(); i++) {
    if (std::isnan(in[i])) continue;
    const double exact = std::exp2(static_cast<double>(in[i]));
    const double ulp = std::ldexp(1.0, std::max(exact > 0 ? std::ilogb(exact) : -150, -126) - 23);
    most = std::max(most, std::abs(out[i] - exact) / ulp);
  }
  EXPECT_LE(most, 1.02);
  EXPECT_GE(most, 0.9) << "the worst places have not been tried";
}

// (No instruction of PTX, either.)  The exponential of softmaxes over logits, below 0: every 4001st float.
TEST(Ptx, ExpAtMost1HasTheBitsOfTheCpu) {
  std::vector<float> in = {0, -0.f, -103.9f, -104, -105, -INFINITY, NAN};
  for (uint64_t bits = 0; bits <= std::bit_cast<uint32_t>(INFINITY); bits += 4001)
    in.push_back(-std::bit_cast<float>(static_cast<uint32_t>(bits)));
  std::vector<float> expected(in.size());
  cpu_kernels().exp_at_most_1(expected.data(), in.data(), static_cast<int64_t>(in.size()));
  Memory<float> x(in);
  ptx::exp_at_most_1_in_place(x.data(), static_cast<int>(in.size()));
  const std::vector<float> out = x.values();
  size_t different = 0;
  for (size_t i = 0; i < in.size(); i++)
    different += std::isnan(in[i]) ? !std::isnan(out[i])
                                   : std::bit_cast<uint32_t>(out[i]) != std::bit_cast<uint32_t>(expected[i]);
  EXPECT_EQ(different, 0u) << "of " << in.size();
}

// The copies and loads as the PTX manual describes them.
TEST(Ptx, DataMoveAsDescribed) {
  const auto bytes = random_bits<unsigned char>(1, 32 * 16);
  const auto words = random_bits<uint32_t>(2, 256);
  const auto elements = random_bits<uint16_t>(3, 256);
  std::string copied[2];
  for (int width : {16, 8})
    for (int i = 0; i <= width; i++)
      for (int b = 0; b < width; b++) copied[width == 8] += b < i ? static_cast<char>(bytes[i * width + b]) : '\0';
  std::string loaded[2];
  const auto rows = scattered_rows();
  for (bool transposed : {false, true})
    for (int lane = 0; lane < 32; lane++)
      for (int m = 0; m < 4; m++)
        for (int e = 0; e < 2; e++) {
          const int i = lane / 4, j = lane % 4 * 2 + e;
          const uint16_t x = elements[rows[m * 8 + (transposed ? j : i)] * 8 + (transposed ? i : j)];
          loaded[transposed].append(reinterpret_cast<const char*>(&x), 2);
        }
  const std::vector<Result> all = results(80);
  EXPECT_EQ(all[0].bytes, copied[0]);
  EXPECT_EQ(all[1].bytes, copied[1]);
  EXPECT_EQ(all[2].bytes, std::string(reinterpret_cast<const char*>(words.data()), 1024));
  EXPECT_EQ(all[3].bytes, loaded[0]);
  EXPECT_EQ(all[4].bytes, loaded[1]);
}

// The element at byte `at` of shared memory in rows of `width` bytes, whose 16-byte chunks change places within
// `width` bytes by the address's bits from 7 on.
size_t unswizzled(size_t at, size_t width) { return at ^ (at >> 7 & (width / 16 - 1)) << 4; }

TEST(Ptx, TensorCopiesAreAsDescribed) {
  on_architectures([](int arch) {
    if (arch < 90) return;
    std::vector<Result> all;
    add_results_of_90(all);
    const auto matrix = random_bits<uint16_t>(10, kStride * kRows),
               panels = random_bits<uint16_t>(11, 16 * kPanelRows * kPanels);
    const auto is = [&](size_t i, size_t at) {
      uint16_t x;
      std::memcpy(&x, all[i].bytes.data() + at, 2);
      return x;
    };
    for (size_t i = 0; i < 3; i++)
      for (size_t at = 0; at < 2048; at += 2) {
        const size_t from = unswizzled(at, 128);
        const int64_t x = kBoxes[i].x + static_cast<int64_t>(from % 128 / 2),
                      y = kBoxes[i].y + static_cast<int64_t>(from / 128);
        const bool inside = x >= 0 && x < kColumns && y >= 0 && y < kRows;
        ASSERT_EQ(is(i, at), inside ? matrix[y * kStride + x] : 0) << kBoxes[i].name << ", byte " << at;
      }
    for (size_t i = 0; i < 3; i++)
      for (size_t at = 0; at < 512; at += 2) {
        const size_t from = unswizzled(at, 32);
        const int64_t x = kPanelBoxes[i].x + static_cast<int64_t>(from % 32 / 2),
                      y = kPanelBoxes[i].y + static_cast<int64_t>(from / 32 % 8),
                      z = kPanelBoxes[i].z + static_cast<int64_t>(from / 256);
        const bool inside = x >= 0 && x < 16 && y >= 0 && y < kPanelRows && z >= 0 && z < kPanels;
        ASSERT_EQ(is(3 + i, at), inside ? panels[(z * kPanelRows + y) * 16 + x] : 0)
            << kPanelBoxes[i].name << ", byte " << at;
      }
  });
}

// A product of a warpgroup has the bits of as many mma.sync, k ascending.
TEST(Ptx, WarpgroupsMultiplyLikeWarps) {
  on_architectures([](int arch) {
    if (arch < 90) return;
    for (const Factors& f : kFactors)
      for (const GroupShape& shape : kGroupShapes) {
        const GroupProduct p(f, shape);
        const int columns = shape.columns, across = columns / 8, tiles = 4 * across;  // of 16 x 8
        std::vector<float> d(tiles * 128);
        const auto element = [&](int tile, int e) {
          return (tile / across * 16 + e / 8) * columns + tile % across * 8 + e % 8;
        };
        for (int i = 0; i < tiles * 128; i++) d[i] = p.d[element(i / 128, i % 128)];
        Memory<float> sum(d);
        for (int k = 0; k < 64; k += 16) {
          std::vector<uint16_t> a(tiles * 256), b(tiles * 128);
          for (int t = 0; t < tiles; t++) {
            for (int e = 0; e < 256; e++) a[t * 256 + e] = p.a[(t / across * 16 + e / 16) * 64 + k + e % 16];
            for (int e = 0; e < 128; e++) b[t * 128 + e] = p.b[(k + e % 16) * columns + t % across * 8 + e / 16];
          }
          Memory<uint16_t> left(a), right(b);
          ptx::multiply(sum.data(), left.data(), right.data(), tiles);
          sum.values();  // waits: the operands go
        }
        const std::vector<float> after = sum.values();
        for (int i = 0; i < tiles * 128; i++)
          ASSERT_EQ(std::bit_cast<uint32_t>(after[i]), std::bit_cast<uint32_t>(p.after[element(i / 128, i % 128)]))
              << f.name << ", " << shape.name << ", tile " << i / 128 << ", element " << i % 128;
      }
  });
}

}  // namespace
}  // namespace pare::test

#endif
