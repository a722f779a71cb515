// pare bench: one op alone, or what the CPU reaches.
#include <cstdio>
#include <fstream>

#include "app/commands.h"
#include "app/device.h"
#include "app/shorthands.h"
#include "base/text.h"
#include "base/thread_pool.h"
#include "bench/links.h"
#include "bench/machine.h"
#include "bench/measure.h"
#include "bench/suite.h"
#include "comm/processes.h"

namespace pare {

namespace {

struct Options {
  Shorthands keys{{{"--device"}, {"--exact"}, {"--dtype"}, {"--threads"}, {"--comm"}}};
  std::string op;
  std::vector<std::string> shapes;
  bool json = false;
  std::string machine, predict;
  double seconds = 1;
  std::vector<int64_t> links;
  int ranks = 1;
};

std::string percent(double share) { return share > 0 ? format("%.1f %%", 100 * share) : "-"; }
std::string micro(double seconds) { return format("%.1f", seconds * 1e6); }
std::string giga(double x) { return format("%.1f", x * 1e-9); }
std::string rate(const char* what, const Rate& r, const char* unit) {
  return r.per_second > 0 ? cat(what, " ", giga(r.per_second), " G", unit, "/s (", r.how, ")")
                          : cat(what, " not measured: ", r.how);
}

std::vector<cases::Dims> shapes_of(const Options& o, const cases::OpCase& op) {
  std::vector<cases::Dims> shapes;
  for (const std::string& shape : o.shapes) shapes.emplace_back(op.op, op.dims, shape);
  if (shapes.empty()) shapes.emplace_back(op.op, op.dims, "");
  return shapes;
}

// Prints the time of calls on a machine that is not here.
void predict(const Options& o, DType act) {
  const Machine machine = read_machine(o.predict);
  const cases::OpCase& op = cases::op_case(o.op);
  auto report = nlohmann::ordered_json::array();
  for (const cases::Dims& dims : shapes_of(o, op)) {
    const Sized call = size_op(act, op, dims);
    const int n = machine.multiprocessors();
    const Stretch stretch = n > 1 ? call.stretch(n) : Stretch{};
    const double t = machine.seconds(op.op, call.cost, act, stretch), longest = std::max(stretch.flops, stretch.bytes);
    if (o.json)
      report.push_back({{"op", op.op}, {"shape", dims.str()}, {"seconds", t}, {"stretch", longest}});
    else
      std::printf("%s %s %s\n  time    %12s us       predicted for %s; its longest part takes %.2f times an even one\n",
                  op.op, dims.str().c_str(), dtype_name(act), micro(t).c_str(), machine.name.c_str(), longest);
  }
  if (o.json) std::printf("%s\n", report.dump(2).c_str());
}

// Rank 0 prints.
void bench_links(const Options& o, const Table& table) {
  Device device(table, {}, world());
  for (const int64_t bytes : o.links)
    measure_links(device, bytes, [&](const LinkRate& r) {
      if (!world().first()) return;
      const double sent = static_cast<double>(r.sent) / r.seconds;
      if (o.json)
        std::printf("%s\n", nlohmann::ordered_json{{"op", r.op},
                                                   {"type", dtype_name(r.type)},
                                                   {"way", r.way},
                                                   {"memory", world().link ? world().link->memory() : 0},
                                                   {"ranks", r.ranks},
                                                   {"bytes", r.bytes},
                                                   {"sent", r.sent},
                                                   {"seconds", r.seconds},
                                                   {"bytes_per_second", sent}}
                                .dump()
                                .c_str());
      else
        std::printf("%-14s %-4s %12lld B  %10s us  %8s GB/s sent by a rank, by %s\n", r.op.c_str(), dtype_name(r.type),
                    static_cast<long long>(r.bytes), micro(r.seconds).c_str(), giga(sent).c_str(), r.way.c_str());
      std::fflush(stdout);
    });
}

void run(const Options& o, const Command& command) {
  const Config config = read_config(o.keys.overrides(command));
  if (!o.links.empty()) {
    if (!o.op.empty() || !o.machine.empty() || !o.predict.empty() || !o.shapes.empty() || command.given("--seconds"))
      fail("--links measures the ops between ranks: leave --op, --shape, --machine, --predict and --seconds out");
    if (world().ranks() == 1) fail("--links needs several ranks: --ranks 2, or mpirun");
    return bench_links(o, open_table(config.trainer));
  }
  if (world().ranks() > 1) fail("pare bench takes several ranks with --links alone");
  if (!o.predict.empty()) {
    if (o.op.empty() || !o.machine.empty()) fail("--predict needs --op, and nothing is measured: leave --machine out");
    return predict(o, act_type(config));
  }
  const Table& table = open_table(config.trainer);
  set_threads(static_cast<int>(config.trainer.threads));
  if (!o.machine.empty()) {
    if (!o.op.empty() || o.json || !o.shapes.empty())
      fail("--machine measures every op: leave --op, --shape and --json out");
    const std::string name = table.describe ? table.describe() : cat("cpu, threads: ", threads());
    const std::string text =
        to_toml(measure_machine(table, name, act_type(config), command.given("--seconds") ? o.seconds : 0.3));
    std::ofstream(o.machine) << "# Written by `pare bench --machine`.\n" << text;
    if (std::ifstream file(o.machine); !file) fail(o.machine, ": cannot be written");
    std::printf("%s", text.c_str());
    return;
  }
  if (o.op.empty()) {
    if (&table != &table_cpu || o.json || !o.shapes.empty() || command.given("--seconds"))
      fail("--device, --shape, --json and --seconds need --op");
    return bench_suite();
  }
  const cases::OpCase& op = cases::op_case(o.op);
  const Ceilings ceilings = measure_ceilings(table);
  nlohmann::ordered_json report{{"device", table.describe ? table.describe() : cat("cpu, threads: ", threads())},
                                {"ceilings", {{"flops", to_json(ceilings.flops)}, {"bytes", to_json(ceilings.bytes)}}},
                                {"rows", nlohmann::ordered_json::array()}};
  if (!o.json)
    std::printf("%s\n%s\n%s\n\n", report["device"].get<std::string>().c_str(),
                rate("products", ceilings.flops, "FLOP").c_str(), rate("memory", ceilings.bytes, "B").c_str());
  for (const cases::Dims& dims : shapes_of(o, op)) {
    const Measured m = measure_op(table, act_type(config), op, dims, {.seconds = o.seconds});
    if (o.json) {
      report["rows"].push_back(to_json(m, dims, ceilings));
      continue;
    }
    const double t = m.time.median, flops = static_cast<double>(m.cost.flops), bound = m.bound(ceilings);
    const auto share = [t](double amount, const Rate& r) { return r.per_second > 0 ? amount / t / r.per_second : 0; };
    std::printf("%s %s %s\n", m.op.c_str(), m.shape.c_str(), dtype_name(m.act));
    std::printf("  time    %12s us       %s to %s; samples %lld, calls in each %lld, copies of the operands %lld\n",
                micro(t).c_str(), micro(m.time.least).c_str(), micro(m.time.most).c_str(),
                static_cast<long long>(m.time.samples), static_cast<long long>(m.time.calls),
                static_cast<long long>(m.copies));
    std::printf("  memory  %12s GB/s     %9s   %sB\n", giga(m.bytes() / t).c_str(),
                percent(share(m.bytes(), ceilings.bytes)).c_str(), human(m.bytes()).c_str());
    std::printf("  math    %12s GFLOP/s  %9s   %sFLOP\n", giga(flops / t).c_str(),
                percent(share(flops, ceilings.flops)).c_str(), human(flops).c_str());
    if (bound > 0) std::printf("  bound   %12s us       %9s\n", micro(bound).c_str(), percent(bound / t).c_str());
    std::fflush(stdout);
  }
  if (o.json) std::printf("%s\n", report.dump(2).c_str());
}

}  // namespace

void add_bench(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("bench", "speed of an op, or of everything on the cpu");
  c.option("--op", o->op, "name of an op, from src/ops/list.h");
  c.option("--shape", o->shapes, "sizes, such as M=64,K=1536, the others as in Qwen2.5-1.5B; repeatable");
  c.flag("--json", o->json, "prints JSON");
  c.option("--machine", o->machine, "measures every op and writes this file, for `pare plan --machine`");
  c.option("--predict", o->predict, "a machine file: prints the time that plans count for a call, and runs none");
  c.option("--seconds", o->seconds, "time of an op, but for three samples at least (default 1, with --machine 0.3)")
      .between(1e-3, 3600);
  c.option("--links", o->links, "sizes of a tensor in bytes: measures the ops between ranks; rank 0 prints")
      .list()
      .between(1, 1e12)
      .type_name("BYTES,...");
  add_ranks(c, o->ranks);
  o->keys.add(c);
  c.action([o, c] {
    if (o->ranks > 1 && o->links.empty()) fail("pare bench takes --ranks with --links alone");
    start_ranks(o->ranks);
    run(*o, c);
  });
}

}  // namespace pare
