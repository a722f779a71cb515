#include "bench/measure.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>

#include "base/thread_pool.h"
#include "cpu/cpu.h"

namespace pare {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds of one call: the best of many, since the machine is shared.
template <class F>
double best_of(F f, double budget = 0.08) {
  f();
  double best = 1e9;
  int calls = 1;
  for (const double start = now(); now() - start < budget;) {
    const double t = now();
    for (int i = 0; i < calls; i++) f();
    const double each = (now() - t) / calls;
    best = std::min(best, each);
    calls = std::clamp(static_cast<int>(1e-3 / each), 1, 1000);
  }
  return best;
}

// ---- what the machine can do

std::atomic<float> sink;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void fma_avx512(int64_t n) {
  __m512 a[24], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
  for (int i = 0; i < 24; i++) a[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t k = 0; k < n; k++)
#pragma GCC unroll 24
    for (int i = 0; i < 24; i++) a[i] = _mm512_fmadd_ps(a[i], x, y);
  __m512 sum = a[0];
  for (int i = 1; i < 24; i++) sum = _mm512_add_ps(sum, a[i]);
  float lanes[16];
  _mm512_storeu_ps(lanes, sum);
  sink = lanes[0];
}
__attribute__((target("avx2,fma"))) void fma_avx2(int64_t n) {
  __m256 a[12], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
  for (int i = 0; i < 12; i++) a[i] = _mm256_set1_ps(static_cast<float>(i));
  for (int64_t k = 0; k < n; k++)
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) a[i] = _mm256_fmadd_ps(a[i], x, y);
  __m256 sum = a[0];
  for (int i = 1; i < 12; i++) sum = _mm256_add_ps(sum, a[i]);
  float lanes[8];
  _mm256_storeu_ps(lanes, sum);
  sink = lanes[0];
}
#elif defined(__aarch64__)
void fma_neon(int64_t n) {
  float32x4_t a[24], x = vdupq_n_f32(0.999f), y = vdupq_n_f32(1e-3f);
#pragma GCC unroll 24
  for (int i = 0; i < 24; i++) a[i] = vdupq_n_f32(static_cast<float>(i));
  for (int64_t k = 0; k < n; k++)
#pragma GCC unroll 24
    for (int i = 0; i < 24; i++) a[i] = vfmaq_f32(a[i], x, y);
#pragma GCC unroll 24
  for (int i = 1; i < 24; i++) a[0] = vaddq_f32(a[0], a[i]);
  sink = vgetq_lane_f32(a[0], 0);
}
#endif

}  // namespace

double peak_flops_one_core() {
  constexpr int64_t n = 20000;
#if defined(__x86_64__)
  if (!std::strcmp(cpu_isa(), "avx512")) return 24 * 16 * 2 * n / best_of([] { fma_avx512(n); }, 0.3);
  return 12 * 8 * 2 * n / best_of([] { fma_avx2(n); }, 0.3);
#elif defined(__aarch64__)
  return 24 * 4 * 2 * n / best_of([] { fma_neon(n); }, 0.3);
#else
  float a[16][4];
  for (auto& v : a)
    for (float& x : v) x = 1;
  const double t = best_of([&] {
    for (int64_t k = 0; k < n; k++)
      for (auto& v : a)
        for (float& x : v) x = __builtin_fmaf(x, 0.999f, 1e-3f);
    float sum = 0;
    for (auto& v : a)
      for (float x : v) sum += x;
    sink = sum;
  });
  return 16 * 4 * 2 * n / t;
#endif
}

namespace {

float sum_of(const float* x, int64_t blocks_of_64) {
#if defined(__x86_64__)
  __m256 acc[8] = {};
  for (int64_t i = 0; i < blocks_of_64; i++)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) acc[j] = _mm256_add_ps(acc[j], _mm256_loadu_ps(x + i * 64 + j * 8));
  for (int j = 1; j < 8; j++) acc[0] = _mm256_add_ps(acc[0], acc[j]);
  return _mm256_cvtss_f32(acc[0]);
#else
  float lanes[64] = {}, sum = 0;
  for (int64_t i = 0; i < blocks_of_64; i++)
    for (int j = 0; j < 64; j++) lanes[j] += x[i * 64 + j];
  for (float l : lanes) sum += l;
  return sum;
#endif
}

// Bytes a second, on all threads.
double read_rate(const float* x, int64_t floats) {
  const int64_t blocks = floats / 64, grain = std::max<int64_t>(blocks / threads(), 1024);
  const double t = best_of([&] {
    parallel_for(blocks, grain, [&](int64_t begin, int64_t end) { sink = sum_of(x + begin * 64, end - begin); });
  });
  return static_cast<double>(floats) * 4 / t;
}
// Bytes read plus bytes written.
double copy_rate(float* to, const float* from, int64_t floats) {
  const int64_t grain = std::max<int64_t>(floats / threads(), 1024);
  const double t = best_of([&] {
    parallel_for(floats, grain, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin) * sizeof(float));
    });
  });
  return static_cast<double>(floats) * 8 / t;
}

int64_t last_cache_bytes() {
  int64_t most = 0;
  for (const char* index : {"2", "3", "4"}) {
    std::ifstream in(cat("/sys/devices/system/cpu/cpu0/cache/index", index, "/size"));
    int64_t kilobytes = 0;
    if (in >> kilobytes) most = std::max(most, kilobytes * 1024);
  }
  return most ? most : int64_t{32} << 20;
}

}  // namespace

double read_bandwidth(int64_t bytes) {
  const std::vector<float> memory(static_cast<size_t>(bytes) / sizeof(float), 1.0f);
  return read_rate(memory.data(), static_cast<int64_t>(memory.size()));
}

Ceilings measure_ceilings(const Table& table) {
  if (table.probe) return {table.probe->flops(), table.probe->bytes()};
  if (&table != &table_cpu) return {{0, "not a device whose speed means anything"}, {0, "likewise"}};
  std::vector<float> memory(size_t{64} << 20, 1.0f);
  const int64_t half = static_cast<int64_t>(memory.size()) / 2;
  const double read = read_rate(memory.data(), 2 * half), copy = copy_rate(memory.data() + half, memory.data(), half);
  return {{peak_flops_one_core() * threads(), cat("fused multiply-adds, ", cpu_isa(), ", threads: ", threads())},
          {std::max(read, copy), copy > read ? "copy of 128 MB" : "reading 256 MB"}};
}

// ---- ops

namespace {

// Of the copies in turn.  Where the table has graphs, the calls of a sample are one launch, as those of a pass are in a
// run: else a short kernel would be timed by the host that launches it.
Timing time_of(const Table& table, Device& device, const std::vector<OpCall>& copies, double budget) {
  size_t next = 0;
  const auto queue = [&](int64_t calls) {
    device.together([&] {
      for (int64_t i = 0; i < calls; i++) copies[next++ % copies.size()].run();
    });
  };
  const auto seconds = [&](int64_t calls) {
    if (table.probe) {
      queue(calls);  // keeps the device busy while the host queues what is timed
      return table.probe->seconds([&] { queue(calls); });
    }
    const double start = now();
    queue(calls);
    device.wait();
    return now() - start;
  };
  // Warm: the first call of a kernel loads it, the first use of memory brings it, clocks rise under load.
  const double start = now();
  double once = seconds(1);
  while (now() - start < 0.1 * budget) once = std::min(once, seconds(1));
  Timing t;
  t.calls = std::clamp<int64_t>(static_cast<int64_t>(1e-3 / std::max(once, 1e-9)), 1, 10000);
  // All copies equally often: then every sample is the same graph with the same parameters.
  const auto n = static_cast<int64_t>(copies.size());
  if (table.graphs) t.calls = (t.calls + n - 1) / n * n;
  next = 0;
  std::vector<double> samples;
  while (samples.size() < 30 && (samples.size() < 3 || now() - start < budget))
    samples.push_back(seconds(t.calls) / static_cast<double>(t.calls));
  std::sort(samples.begin(), samples.end());
  t.samples = static_cast<int64_t>(samples.size());
  t.least = samples.front();
  t.most = samples.back();
  t.median = samples[samples.size() / 2];
  return t;
}

}  // namespace

double Measured::bound(const Ceilings& c, const Stretch& s) const {
  if (c.flops.per_second <= 0 || c.bytes.per_second <= 0) return 0;
  return std::max(s.flops * static_cast<double>(cost.flops) / c.flops.per_second,
                  s.bytes * bytes() / c.bytes.per_second);
}

Sized size_op(DType act, const cases::OpCase& op, const cases::Dims& dims) {
  Device device(table_null);
  Arena arena("operands", no_memory);
  DeviceOperands operands(device, act, arena);
  const OpCall call = make_call(device, op, operands, dims);
  return {call.cost, call.stretch, static_cast<int64_t>(arena.used())};
}

Measured measure_op(const Table& table, DType act, const cases::OpCase& op, const cases::Dims& dims,
                    const MeasureOptions& o) {
  const Sized sized = size_op(act, op, dims);
  Measured m{.op = op.op, .shape = dims.str(), .act = act, .cost = sized.cost, .stretch = sized.stretch, .time = {}};
  m.operand_bytes = sized.operand_bytes;
  m.copies = 1;
  if (o.rotate && (table.probe || &table == &table_cpu)) {  // of the others the speed means nothing
    const int64_t cache = table.probe ? table.probe->cache_bytes() : last_cache_bytes();
    m.copies = std::clamp<int64_t>(2 * cache / std::max<int64_t>(m.operand_bytes, 1) + 1, 1, 4096);
  }
  const size_t all = static_cast<size_t>(m.copies * m.operand_bytes), free = table.memory->free();
  if (all > free) fail(m.op, " ", m.shape, ": the operands are ", all, " bytes, and ", free, " are free");
  Device device(table);
  Arena arena("operands", *table.memory, all);
  DeviceOperands operands(device, act, arena);
  std::vector<OpCall> copies;
  try {
    for (int64_t i = 0; i < m.copies; i++) copies.push_back(make_call(device, op, operands, dims));
    m.time = time_of(table, device, copies, o.seconds);
  } catch (const std::logic_error& e) {  // the op's own checks of its arguments
    fail(m.op, " ", m.shape, ": ", e.what());
  }
  return m;
}

nlohmann::ordered_json to_json(const Rate& rate) {
  nlohmann::ordered_json j{{"per_second", nullptr}, {"how", rate.how}};
  if (rate.per_second > 0) j["per_second"] = rate.per_second;
  return j;
}

nlohmann::ordered_json to_json(const Measured& m, const cases::Dims& dims, const Ceilings& c) {
  nlohmann::ordered_json shape = nlohmann::ordered_json::object();
  for (const auto& [name, value] : dims.all()) shape[name] = value;
  const double t = m.time.median, flops = static_cast<double>(m.cost.flops), bound = m.bound(c);
  nlohmann::ordered_json j{{"op", m.op},
                           {"shape", shape},
                           {"act", dtype_name(m.act)},
                           {"seconds", {{"median", t}, {"least", m.time.least}, {"most", m.time.most}}},
                           {"samples", m.time.samples},
                           {"calls_per_sample", m.time.calls},
                           {"copies", m.copies},
                           {"operand_bytes", m.operand_bytes},
                           {"flops", m.cost.flops},
                           {"bytes_read", m.cost.read},
                           {"bytes_written", m.cost.written},
                           {"flops_per_second", flops / t},
                           {"bytes_per_second", m.bytes() / t},
                           {"flops_share", nullptr},
                           {"bytes_share", nullptr},
                           {"bound_seconds", nullptr},
                           {"bound_share", nullptr}};
  if (c.flops.per_second > 0) j["flops_share"] = flops / t / c.flops.per_second;
  if (c.bytes.per_second > 0) j["bytes_share"] = m.bytes() / t / c.bytes.per_second;
  if (bound > 0) {
    j["bound_seconds"] = bound;
    j["bound_share"] = bound / t;
  }
  return j;
}

}  // namespace pare
