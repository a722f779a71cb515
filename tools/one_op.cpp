// `make one-op`: rmsnorm_fwd as `ref` defines it, by the tables `cpu` and `emu`, and a kernel with a planted race.
// Built with the emulator's checker it shows the race alone.
#include "one_op.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/arena.h"
#include "base/error.h"
#include "cpu/cpu.h"
#include "cuda/emu/include/cuda_runtime.h"
#include "ops/data.h"
#include "ops/device.h"
#include "ops/norm.h"

namespace pare {
namespace {

constexpr int kRows = 3, kColumns = 500;
constexpr int kRaced = 50;  // of the row that a block computes
constexpr float kEps = 1e-6f;

// Values that are no multiples of a power of two, so that sums are rounded.
template <class T>
std::vector<T> row_values(int first, int count) {
  std::vector<T> x;
  for (int i = first; i < first + count; i++) x.push_back(static_cast<T>(static_cast<float>(i % 11 - 5) / 7));
  return x;
}

#ifndef CUEMU_CHECK

template <class T>
struct Normed {
  std::vector<T> y, rstd;
};

template <class T>
Normed<T> rmsnorm(const Table& table) {
  const DType type = sizeof(T) == 8 ? DType::f64 : DType::f32;
  Device device(table);
  Arena arena("one op", *table.memory, 1 << 16);
  const Tensor x = arena.alloc("x", type, {kRows, kColumns}), w = arena.alloc("w", type, {kColumns});
  const Tensor y = arena.alloc("y", type, {kRows, kColumns}), rstd = arena.alloc("rstd", type, {kRows});
  const std::vector<T> from_x = row_values<T>(0, kRows * kColumns), from_w = row_values<T>(6, kColumns);
  device.upload({x, from_x.data()});
  device.upload({w, from_w.data()});
  device.rmsnorm_fwd({.y = y, .rstd = rstd, .x = x, .w = w, .eps = kEps});
  Normed<T> n{std::vector<T>(kRows * kColumns), std::vector<T>(kRows)};
  device.download({n.y.data(), y});
  device.download({n.rstd.data(), rstd});
  return n;
}

template <class T>
void print_normed(const char* table, const Normed<T>& n) {
  std::printf("  %-10s rstd", table);
  for (const T r : n.rstd) std::printf(" %.9f", static_cast<double>(r));
  std::printf("   y[0]");
  for (int c = 0; c < 3; c++) std::printf(" %.9f", static_cast<double>(n.y[c]));
  std::printf("\n");
}

int same_bits(const Normed<float>& a, const Normed<float>& b) {
  int same = 0;
  for (size_t i = 0; i < a.y.size(); i++) same += std::memcmp(&a.y[i], &b.y[i], sizeof(float)) == 0;
  return same;
}

void print_tables() {
  const Normed<double> ref = rmsnorm<double>(table_ref);
  const Normed<float> cpu = rmsnorm<float>(table_cpu);
  std::printf("rmsnorm_fwd of %d rows of %d values\n", kRows, kColumns);
  print_normed("ref, f64", ref);
  print_normed("cpu, f32", cpu);
  double largest = 0;
  for (size_t i = 0; i < cpu.y.size(); i++) largest = std::max(largest, std::abs(cpu.y[i] - ref.y[i]));
  std::printf("  cpu from ref: %.1e at most\n", largest);
  int sets = 0, same = 0;
  for (const char* isa : {"avx2", "avx512", "neon", "generic"}) try {
      set_cpu_isa(isa);
      sets++;
      same += same_bits(cpu, rmsnorm<float>(table_cpu)) == kRows * kColumns;
    } catch (const Error&) {  // not of this machine
    }
  set_cpu_isa(nullptr);
  std::printf("  instruction sets of this machine that give other bits than cpu: %d\n", sets - same);
  const Normed<float> emu = rmsnorm<float>(table_emu);
  print_normed("cuda, f32", emu);
  std::printf("  cpu and cuda, which add in orders of their own: the same bits in %d of %d values\n",
              same_bits(cpu, emu), kRows * kColumns);
}

#endif

void print_race(const char* name, void (*kernel)(float*, const float*, int, float)) {
  struct Schedule {
    const char* name;
    cuemu::Order order;
    uint64_t seed;
  };
  for (const Schedule& s : {Schedule{"forward", cuemu::Order::forward, 0},
                            {"reverse", cuemu::Order::reverse, 0},
                            {"random:2", cuemu::Order::random, 2},
                            {"random:4", cuemu::Order::random, 4},
                            {"random:5", cuemu::Order::random, 5}}) {
    cuemu::settings().order = s.order;
    cuemu::settings().seed = s.seed;
    float *x = nullptr, *rstd = nullptr, host = 0;
    cudaMalloc(&x, kRaced * sizeof(float));
    cudaMalloc(&rstd, sizeof(float));
    cudaMemcpy(x, row_values<float>(0, kRaced).data(), kRaced * sizeof(float), cudaMemcpyHostToDevice);
    cudaLaunchConfig_t c{};
    c.gridDim = 1;
    c.blockDim = kRowThreads;
    cudaError_t error = cudaLaunchKernelEx(&c, kernel, rstd, static_cast<const float*>(x), kRaced, kEps);
    if (!error) error = cudaDeviceSynchronize();
    cudaMemcpy(&host, rstd, sizeof(float), cudaMemcpyDeviceToHost);
    if (error)
      std::printf("  %-15s  %-8s  %s\n", name, s.name, cudaGetErrorString(error));
    else
      std::printf("  %-15s  %-8s  rstd %.9f\n", name, s.name, static_cast<double>(host));
    cudaGetLastError();
    cudaFree(x);
    cudaFree(rstd);
  }
}

}  // namespace
}  // namespace pare

int main() {
#ifdef CUEMU_CHECK
  std::printf("rstd of a row by a block, with the access checker\n");
#else
  pare::print_tables();
  std::printf("\nrstd of a row by a block, in five orders of its threads\n");
#endif
  pare::print_race("right", pare::row_rstd<true>);
  pare::print_race("barrier missing", pare::row_rstd<false>);
}
