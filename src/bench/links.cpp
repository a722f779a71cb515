#include "bench/links.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/arena.h"
#include "base/half.h"
#include "base/text.h"
#include "ops/data.h"

namespace pare {

namespace {

// From the call to the end of the work that it queued.
double seconds_of(Device& device, const std::function<void()>& call) {
  Comm& comm = device.comm;
  const auto sample = [&](int64_t calls) {
    comm.sum(0);  // all begin together
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; i++) call();
    device.wait();
    const std::chrono::nanoseconds own = std::chrono::steady_clock::now() - start;
    return static_cast<double>(comm.most(own.count())) * 1e-9 / static_cast<double>(calls);
  };
  sample(1);  // loads kernels
  const int64_t calls = std::clamp<int64_t>(static_cast<int64_t>(0.1 / sample(1)), 1, 1000);
  std::vector<double> samples(5);
  for (double& s : samples) s = sample(calls);
  std::sort(samples.begin(), samples.end());
  return samples[2];
}

}  // namespace

void measure_links(Device& device, int64_t bytes, const std::function<void(const LinkRate&)>& row) {
  Comm& comm = device.comm;
  const int64_t n = comm.ranks(), own = comm.rank(), part = bytes / 4 / n, size = n * part;
  if (part < 1) fail("--links ", bytes, ": so few bytes cannot be shared by ", n, " ranks");
  Arena arena("links", device.memory(), static_cast<size_t>(10 * size + 3 * 256));
  const Tensor x = arena.alloc("x", DType::f32, {size}), y = arena.alloc("y", DType::f32, {size}),
               narrow = arena.alloc("narrow", DType::bf16, {size});
  std::vector<int64_t> counts(static_cast<size_t>(n), part), first(counts.size());
  for (int64_t q = 0; q < n; q++) first[static_cast<size_t>(q)] = q * part;

  // Every element of part q of x becomes value(q).
  const auto fill = [&](auto value) {
    std::vector<float> host(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; i++) host[static_cast<size_t>(i)] = static_cast<float>(value(i / part));
    device.upload({x, host.data()});
    device.wait();
  };
  const auto expect_value = [&](const char* op, const Tensor& t, int64_t at, int64_t value) {
    float f = 0;
    uint16_t h = 0;
    const bool wide = t.dtype == DType::f32;
    device.download({wide ? static_cast<void*>(&f) : &h, t.rows(at, 1)});
    if (!wide) f = bf16_to_f32(h);
    if (f != static_cast<float>(value))
      throw Error(Exit::failed, cat(op, ": element ", at, " of ", t.str(), " is ", f, ", not ", value));
  };
  const auto measure = [&](const char* op, DType type, const std::function<void()>& call) {
    Ledger ledger;
    device.ledger = &ledger;
    call();
    device.ledger = nullptr;
    row({op, type, comm.link ? comm.link->name() : "the host", n, bytes,
         static_cast<int64_t>(ledger.phases["main"][op].cost.sent), seconds_of(device, call)});
  };

  fill([&](int64_t q) { return 1 + own + n * q; });
  measure("all_to_all", DType::f32, [&] { device.all_to_all({y, x, first, counts, counts, &comm}); });
  for (int64_t q = 0; q < n; q++)
    for (const int64_t at : {q * part, (q + 1) * part - 1}) expect_value("all_to_all", y, at, 1 + q + n * own);

  // Weights, as they are gathered after an update.
  std::vector<uint16_t> weights(static_cast<size_t>(size), f32_to_bf16(static_cast<float>(1 + own)));
  device.upload({narrow, weights.data()});
  measure("all_gather", DType::bf16, [&] { device.all_gather({narrow, counts, &comm}); });
  for (int64_t q = 0; q < n; q++)
    for (const int64_t at : {q * part, (q + 1) * part - 1}) expect_value("all_gather", narrow, at, 1 + q);
}

}  // namespace pare
