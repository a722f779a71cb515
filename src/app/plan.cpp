// pare plan: memory and FLOPs of a training step, before it runs.
#include "rl/plan.h"

#include <algorithm>
#include <cstdio>

#include "app/commands.h"
#include "app/console.h"

namespace pare {

static void run(const std::vector<std::string>& arguments) {
  const Plan plan = plan_step(load_config(arguments));
  std::printf("memory of a step, bytes (prompts and responses of greatest length)\n");
  size_t total = 0;
  for (const auto& m : plan.memory) {
    std::printf("  %-12s %15zu  %8sB\n", m.arena.c_str(), m.peak, human(static_cast<double>(m.peak)).c_str());
    total += m.peak;
  }
  std::printf("  %-12s %15zu  %8sB\n\n", "total", total, human(static_cast<double>(total)).c_str());
  std::printf("%-14s %-18s %9s %18s %18s %9s\n", "phase", "op", "calls", "FLOP", "bytes", "min rows");
  for (const auto& [phase, ops] : plan.ledger.phases) {
    for (const auto& [op, line] : ops)
      std::printf("%-14s %-18s %9lld %18lld %18lld %9s\n", phase.c_str(), op.c_str(),
                  static_cast<long long>(line.calls), static_cast<long long>(line.cost.flops),
                  static_cast<long long>(line.cost.read + line.cost.written),
                  line.min_rows ? cat(line.min_rows).c_str() : "");
    const Cost c = plan.ledger.total(phase);
    std::printf("%-14s %-18s %9s %18lld %18lld\n", phase.c_str(), "all", "", static_cast<long long>(c.flops),
                static_cast<long long>(c.read + c.written));
  }
}

void add_plan(CLI::App& app) {
  auto arguments = std::make_shared<std::vector<std::string>>();
  CLI::App* c = app.add_subcommand("plan", "memory and FLOPs of a training step, before it runs");
  c->add_option("config", *arguments, "presets or TOML files, then overrides group.key=value")->required();
  c->callback([arguments] { run(*arguments); });
}

}  // namespace pare
