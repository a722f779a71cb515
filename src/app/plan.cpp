// pare plan: memory and FLOPs of a training step on any machine, before it runs.
#include "run/plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "app/commands.h"
#include "app/device.h"
#include "app/shorthands.h"
#include "app/show.h"
#include "data/presets.h"

namespace pare {

namespace {

struct Options {
  Shorthands shorthands{
      {{"--device", "trainer.device", "device to plan for, which need not be present"}, {"--exact", "trainer.exact"}}};
  std::vector<std::string> config;
  std::string memory;
};

constexpr size_t kWidth = 80;

void paragraph(const std::string& label, const std::string& text) {
  const std::string blanks(9, ' ');
  std::printf("%s%s", pad_right(label, blanks.size()).c_str(),
              wrapped(text, kWidth, blanks).substr(blanks.size()).c_str());
}

std::string bytes(size_t n) { return human(static_cast<double>(n)) + "B"; }

// "141GB", "80 GiB", "6000000": a number of bytes, above 0.
size_t parse_bytes(const std::string& text) {
  static const std::vector<std::pair<std::string, double>> units = {{"", 1},
                                                                    {"B", 1},
                                                                    {"kB", 1e3},
                                                                    {"KB", 1e3},
                                                                    {"MB", 1e6},
                                                                    {"GB", 1e9},
                                                                    {"TB", 1e12},
                                                                    {"KiB", 1024.},
                                                                    {"MiB", 1048576.},
                                                                    {"GiB", 1073741824.},
                                                                    {"TiB", 1099511627776.}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(end, text.data() + text.size() - end);
  unit.erase(0, unit.find_first_not_of(' '));
  const auto u = std::find_if(units.begin(), units.end(), [&](const auto& x) { return x.first == unit; });
  const double n = error == std::errc() && u != units.end() ? number * u->second : 0;
  if (!(n >= 1 && n < 9e18)) fail("--memory ", text, ": expected a size as 141GB, 80GiB or 24000000000");
  return static_cast<size_t>(n);
}

// What a run would read and a plan can do without; those that are not here.
std::vector<std::string> missing_files(const Config& c) {
  std::vector<std::string> wanted, missing;
  const std::string tokenizer = tokenizer_spec(c);
  const bool folder = std::filesystem::is_directory(tokenizer);
  if (tokenizer.empty() || (folder && tokenizer_file(tokenizer).empty())) missing.push_back("a tokenizer");
  if (!tokenizer.empty() && tokenizer != "ssa") wanted.push_back(tokenizer);
  if (c.data.task == "jsonl") {
    wanted.insert(wanted.end(), c.data.train_files.begin(), c.data.train_files.end());
    wanted.insert(wanted.end(), c.data.val_files.begin(), c.data.val_files.end());
    if (c.data.train_files.empty()) missing.push_back("data.train_files");
  }
  for (const std::string& path : wanted)
    if (!std::filesystem::exists(path)) missing.push_back(path);
  return missing;
}

void show_step(const Config& c, const Plan& plan, const std::vector<std::string>& missing) {
  const std::string device = config_key("trainer.device").show(c);  // in quotes
  paragraph("model", model_text(plan.model));
  paragraph("step", cat(c.data.train_batch_size, " prompts x ", c.rollout.n, " responses, at most ",
                        c.data.max_prompt_length, " + ", c.data.max_response_length, " tokens; ",
                        dtype_name(act_type(c)), " on ", device.substr(1, device.size() - 2)));
  if (missing.empty()) return;
  std::string list;
  for (const std::string& m : missing) list += (list.empty() ? "" : ", ") + m;
  paragraph("", cat("planned without tokenizer and data (missing: ", list, "), by the lengths of the keys"));
}

void show_memory_table(const Plan& plan) {
  const auto row = [](const std::string& name, size_t peak, size_t most) {
    std::printf("  %-12s %19zu %9s %20zu %9s\n", name.c_str(), peak, bytes(peak).c_str(), most, bytes(most).c_str());
  };
  std::printf("\nmemory, bytes %30s %30s\n", "longest sequences", "any lengths, at most");
  for (const Plan::Memory& m : plan.memory) row(m.arena, m.peak, m.most);
  row("total", plan.peak(), plan.most.total());
}

// Exact figures; the part of an op in the FLOPs of its phase.
void show_work(const Plan& plan) {
  const auto row = [](const std::string& name, const std::string& calls, const std::string& flops,
                      const std::string& part, const std::string& moved, const std::string& rows) {
    const std::string line = format("%-20s %8s %19s %5s %18s %5s", name.c_str(), calls.c_str(), flops.c_str(),
                                    part.c_str(), moved.c_str(), rows.c_str());
    std::printf("%s\n", line.substr(0, line.find_last_not_of(' ') + 1).c_str());
  };
  for (const auto& [phase, ops] : plan.ledger.phases) {
    const Cost all = plan.ledger.total(phase);
    const auto flops = static_cast<double>(all.flops);
    std::printf("\n");
    row(phase, "calls", "FLOP", "%", "bytes moved", "rows>");
    for (const auto& [op, line] : ops)
      row("  " + op, cat(line.calls), cat(line.cost.flops),
          format("%.1f", 100 * static_cast<double>(line.cost.flops) / std::max(1.0, flops)),
          cat(line.cost.read + line.cost.written), line.min_rows ? cat(line.min_rows) : "");
    row("  all", "", cat(all.flops), "", cat(all.read + all.written), "");
    row("", "", human(flops) + "FLOP", "", bytes(static_cast<size_t>(all.read + all.written)), "");
  }
  std::printf("\nrows>: the fewest rows of a call of a linear layer\n");
}

// What there is for the arenas of a run, and where; 0 where nobody knows.
size_t memory_here(const Config& c, std::string& where) {
  try {
    const Table& table = open_table(c.trainer);
    const bool host = c.trainer.device == DeviceKind::cpu;
    where = host ? "of this machine" : "free on this device";
    return host ? machine_memory() : table.memory->free();
  } catch (const Error& e) {
    where = e.what();
    return 0;
  }
}

void show_verdict(const Config& c, const Plan& plan, const std::string& given) {
  std::string where = "of --memory";
  const size_t memory = given.empty() ? memory_here(c, where) : parse_bytes(given), most = plan.most.total();
  std::printf("\n");
  if (memory == 0)
    return paragraph("takes", cat(bytes(most), " (", most, ") at most; --memory 80GB says whether that fits: ", where));
  const auto difference = [](size_t more, size_t less) { return cat(bytes(more - less), " (", more - less, ")"); };
  const std::string of = cat(bytes(memory), " (", memory, ") ", where);
  if (most <= memory)
    return paragraph("fits", cat("any step takes at most ", bytes(most), " of the ", of, ": ", difference(memory, most),
                                 " are left"));
  paragraph("too much", cat("a step can take ", bytes(most), ", ", difference(most, memory), " more than the ", of,
                            plan.peak() <= memory ? "; one of the longest sequences would fit, but shorter ones fill "
                                                    "micro-batches better: lower actor.ppo_max_token_len"
                                                  : "; lower rollout.max_num_seqs, actor.ppo_max_token_len or "
                                                    "data.train_batch_size"));
}

void run(const Options& o, const CLI::App& command) {
  std::vector<std::string> arguments = o.config;
  for (const std::string& override : o.shorthands.overrides(command)) arguments.push_back(override);
  std::vector<std::string> notes;
  const Config config = load_config(arguments, &notes);
  if (!o.memory.empty()) parse_bytes(o.memory);
  if (!config.model.path.empty() && !std::filesystem::exists(config.model.path)) {
    std::string shapes;
    for (const std::string& name : preset_names("json")) shapes += (shapes.empty() ? "" : ", ") + name;
    fail("model.path: there is no ", config.model.path,
         "; a plan needs the shape only: set model.config to a config.json or to one of ", shapes);
  }
  print_notes(notes);
  const std::vector<std::string> missing = missing_files(config);
  const Plan plan = plan_step(config, TrainingKind::grpo, missing.empty());
  show_step(config, plan, missing);
  show_memory_table(plan);
  show_work(plan);
  show_verdict(config, plan, o.memory);
}

}  // namespace

void add_plan(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand("plan", "memory and FLOPs of a training step, before it runs");
  c->add_option("config", o->config, "presets or TOML files, then overrides group.key=value")->required();
  c->add_option("--memory", o->memory, "memory of the machine to plan for, as 141GB; default: that of this machine");
  o->shorthands.add(*c);
  c->footer(
      "With the name of a shape, a plan needs neither weights, tokenizer, data nor the device:\n"
      "  pare plan grpo model.config=qwen2.5-7b --device cuda --memory 141GB");
  c->callback([o, c] { run(*o, *c); });
}

}  // namespace pare
