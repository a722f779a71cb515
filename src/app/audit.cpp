// pare audit: steps of a run, computed again and compared with what the run recorded.
#include "run/audit.h"

#include <cstdio>

#include "app/commands.h"
#include "app/console.h"
#include "app/device.h"
#include "app/shorthands.h"
#include "base/json.h"
#include "base/progress.h"
#include "comm/processes.h"
#include "run/plan.h"
#include "run/run_directory.h"

namespace pare {

namespace {

struct Options {
  Shorthands shorthands{{{"--device"}}};
  std::vector<std::string> arguments;  // the run, then overrides
  int64_t step = 0;
  int ranks = 1;
  bool all = false;
};

void run_audit(const Options& o, const Command& command, const std::string& folder) {
  std::vector<std::string> overrides(o.arguments.begin() + 1, o.arguments.end());
  for (const std::string& override : o.shorthands.overrides(command)) overrides.push_back(override);
  for (const std::string& override : overrides)
    if (override.find('=') == override.npos) fail(override, ": expected key=value; one run is audited at a time");
  ProgressLine::quiet = true;
  Console console(false, !world().first());
  const Audit audit(folder, overrides);
  audit.compare_files(o.all ? audit.last() : o.step, o.all);
  if (o.all) {
    audit.compare_checkpoints();
    console.result(cat(folder, ": steps ", audit.first(), " to ", audit.last(), " hold together: ", audit.chain()));
    return;
  }
  const Table& table = open_table(audit.config().trainer);
  const Plan plan = plan_run(audit.config(), audit.kind(), table);
  Session session(plan.config, table, true, plan.most);
  check_equal_ranks(session, table);
  const auto training = make_training(audit.kind(), session);
  audit.recompute(o.step, session, *training, [&](const std::string& line) { console.result(line); });
}

void run(const Options& o, const Command& command) {
  if (o.arguments.empty()) fail("the run's directory is missing");
  if (o.all == (o.step > 0)) fail("which steps? --step N computes one again, --all compares what is recorded of all");
  const std::string of_config = folder_of_config(o.arguments[0]);  // that of RUN/config.toml
  const std::string folder = of_config.empty() ? o.arguments[0] : of_config;
  try {
    run_audit(o, command, folder);
  } catch (const nlohmann::json::exception& e) {  // hashes hold, and yet
    throw Error(Exit::failed, cat(folder, "/certificates.jsonl is not what a run writes: ", json_error(e)));
  }
}

}  // namespace

void add_audit(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("audit", "a step of a run, computed again and compared bit by bit");
  c.option("run", o->arguments,
           "directory of `pare train` or `pare sft`, then overrides group.key=value that change no bit");
  c.option("--step", o->step, "computes this step again, from the last whole checkpoint before it or from the start");
  c.flag(
      "--all", o->all,
      "compares configuration, inputs, metrics, responses and checkpoints of all steps with what is recorded of them, "
      "and computes nothing");
  o->shorthands.add(c);
  add_ranks(c, o->ranks);
  c.footer(R"(Examples:
  pare audit runs/quickstart --step 40
  pare audit runs/quickstart --step 40 trainer.threads=1
  pare audit runs/quickstart --all
)");
  c.action([o, c] {
    start_ranks(o->ranks);
    run(*o, c);
  });
}

}  // namespace pare
