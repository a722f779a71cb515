// Bytes a second that a rank sends, of each op between ranks: a line of JSON for each op and size, by rank 0.
//
//   mpirun -n 8 build/mpi-cuda/links 1048576,1073741824 trainer.device=cuda [key=value...]
//
// The sizes are bytes of a tensor of f32, of which each rank has its part or sends a part to each.  What arrives is
// checked too.  Seconds are those of the slowest rank, from the call to the end of what it queued.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "app/device.h"
#include "base/half.h"
#include "base/text.h"
#include "ops/data.h"
#include "ops/device.h"

namespace pare {
namespace {

// Of a call: the median of five samples, the same on all ranks.
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
  sample(1);  // it loads kernels
  const int64_t calls = std::clamp<int64_t>(static_cast<int64_t>(0.1 / sample(1)), 1, 1000);
  std::vector<double> samples(5);
  for (double& s : samples) s = sample(calls);
  std::sort(samples.begin(), samples.end());
  return samples[2];
}

void measure(Device& device, int64_t bytes) {
  Comm& comm = device.comm;
  const int64_t n = comm.ranks(), own = comm.rank(), part = bytes / 4 / n, size = n * part;
  if (part < 1) fail(bytes, " bytes are no number for each of ", n, " ranks");
  Arena arena("links", device.memory(), static_cast<size_t>(10 * size + 4 * part + 4 * 256));
  const Tensor x = arena.alloc("x", DType::f32, {size}), y = arena.alloc("y", DType::f32, {size}),
               narrow = arena.alloc("narrow", DType::bf16, {size}), sum = arena.alloc("sum", DType::f32, {part});
  std::vector<int64_t> counts(static_cast<size_t>(n), part), first(counts.size());
  for (int64_t q = 0; q < n; q++) first[static_cast<size_t>(q)] = q * part;

  // Part q of x is `value(q)`.
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
  const auto row = [&](const char* op, DType type, const std::function<void()>& call) {
    Ledger ledger;
    device.ledger = &ledger;
    call();
    device.ledger = nullptr;
    const auto sent = static_cast<double>(ledger.phases["main"][op].cost.sent);
    const double seconds = seconds_of(device, call);
    if (!comm.first()) return;
    const nlohmann::ordered_json line = {{"op", op},
                                         {"type", dtype_name(type)},
                                         {"way", comm.link ? comm.link->name() : "MPI"},
                                         {"ranks", n},
                                         {"bytes", bytes},
                                         {"sent", sent},
                                         {"seconds", seconds},
                                         {"bytes_per_second", sent / seconds}};
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  };

  fill([&](int64_t q) { return 1 + own + n * q; });
  row("all_to_all", DType::f32, [&] { device.all_to_all({y, x, first, counts, counts, &comm}); });
  for (int64_t q = 0; q < n; q++)
    for (const int64_t at : {q * part, (q + 1) * part - 1}) expect_value("all_to_all", y, at, 1 + q + n * own);

  // Weights, as they are read.
  std::vector<uint16_t> weights(static_cast<size_t>(size), f32_to_bf16(static_cast<float>(1 + own)));
  device.upload({narrow, weights.data()});
  row("all_gather", DType::bf16, [&] { device.all_gather({narrow, counts, &comm}); });
  for (int64_t q = 0; q < n; q++)
    for (const int64_t at : {q * part, (q + 1) * part - 1}) expect_value("all_gather", narrow, at, 1 + q);

  // Terms whose sums bf16 holds.
  fill([&](int64_t q) { return own == 0 ? 1 + q : 1; });
  for (const Tensor& rounded : {Tensor(), narrow}) {
    device.zero({sum});
    row("reduce_scatter", rounded ? DType::bf16 : DType::f32, [&] {
      device.reduce_scatter({sum, x, first, counts, &comm, rounded});
    });
    for (const int64_t at : {int64_t{0}, part - 1}) expect_value("reduce_scatter", sum, at, own + n);
  }
}

int run(int argc, char** argv) {
  if (argc < 2) fail("usage: links BYTES[,BYTES...] [key=value...]");
  const Config config = read_config({argv + 2, argv + argc});
  Device device(open_table(config.trainer));
  std::string sizes = argv[1];
  for (size_t end; !sizes.empty(); sizes = end == std::string::npos ? "" : sizes.substr(end + 1)) {
    end = sizes.find(',');
    const std::string size = sizes.substr(0, end);
    char* rest = nullptr;
    const long long bytes = std::strtoll(size.c_str(), &rest, 10);
    if (*rest || bytes < 1) fail("links ", size, ": expected a number of bytes");
    measure(device, bytes);
  }
  return static_cast<int>(Exit::ok);
}

}  // namespace
}  // namespace pare

int main(int argc, char** argv) {
  pare::Comm* comm = &pare::self();
  const auto report = [&](pare::Exit code, const char* what) {
    std::fprintf(stderr, "links: rank %d: %s\n", comm->rank(), what);
    if (comm->ranks() > 1) comm->abort(static_cast<int>(code));
    return static_cast<int>(code);
  };
  try {
    comm = &pare::world();
    const int code = pare::run(argc, argv);
    comm->link.reset();  // while its device is there
    return code;
  } catch (const pare::Error& e) {
    return report(e.code, e.what());
  } catch (const std::exception& e) {
    return report(pare::Exit::failed, e.what());
  }
}
