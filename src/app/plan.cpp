// pare plan: memory and FLOPs of a training step on any machine, before it runs.
#include "run/plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "app/commands.h"
#include "app/device.h"
#include "app/plan_answers.h"
#include "app/shorthands.h"
#include "app/show.h"
#include "base/foreign_file.h"
#include "data/presets.h"

namespace pare {

namespace {

struct Options {
  Shorthands shorthands{{{"--device", "device to plan for, which need not be present"}, {"--exact"}}};
  std::vector<std::string> config;
  std::string memory, machine, lengths = "worst", largest, compare;
  bool json = false;
};

constexpr size_t kWidth = 80;

void paragraph(const std::string& label, const std::string& text) {
  const std::string blanks(9, ' ');
  std::printf("%s%s", pad_right(label, blanks.size()).c_str(),
              wrapped(printable(text), kWidth, blanks).substr(blanks.size()).c_str());
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
  paragraph("model", model_text(plan.model, lora_spec(c.model.lora)));
  paragraph("step", cat(c.data.train_batch_size, " prompts x ", c.rollout.n, " responses, at most ",
                        c.data.max_prompt_length, " + ", c.data.max_response_length, " tokens; ",
                        dtype_name(act_type(c)), " on ", device.substr(1, device.size() - 2)));
  if (const RankCount count = rank_count(c.trainer); count.all() > 1)
    paragraph("ranks", cat(count.all(), count.nodes > 1 ? cat(" on ", count.nodes, " nodes") : "",
                           "; memory is that of the fullest, work that of rank 0 and of all"));
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
  if (plan.responses) row("responses", plan.responses, plan.responses);
  row("total", plan.peak() + plan.responses, plan.needed());
  if (!plan.most.shared) return;
  std::printf("\n");
  paragraph("shared", "kv and scratch lie in the memory of gradients and activations; the total has the larger pair");
}

// Exact figures; the part of an op in the FLOPs of its phase.  Of several ranks, those of rank 0, and the sums of all.
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
    if (plan.ranks == 1) continue;
    const Cost sum = plan.all_ranks.total(phase);
    row("  sent to others", "", "", "", cat(all.sent), "");
    if (all.abroad > 0) row("  beyond the machine", "", "", "", cat(all.abroad), "");
    row(cat("  ", plan.ranks, " ranks"), "", cat(sum.flops), "", cat(sum.read + sum.written), "");
    row("", "", human(static_cast<double>(sum.flops)) + "FLOP", "", bytes(static_cast<size_t>(sum.read + sum.written)),
        "");
    row("  sent by all", "", "", "", cat(sum.sent), "");
  }
  std::printf("\nrows>: the fewest rows of a call of a linear layer\n");
}

// Bytes of each device that NCCL takes: at its start, and to receive and send on 32 channels for each other rank of the
// machine, as measured on 8 H100 (NVIDIA/nccl issue 1685: 3.3 GB).
size_t nccl_bytes(const TrainerKeys& t) {
  const RankCount n = rank_count(t);
  if (t.device != DeviceKind::cuda || t.comm == DeviceComm::host || n.all() == 1) return 0;
  return 600'000'000 + size_t{32 * (12 << 20)} * static_cast<size_t>(n.node_ranks - 1);
}

// What there is for the arenas of a run: what the options say, else this machine's.
Room find_room(const Options& o, const Config& c, const std::optional<Machine>& machine) {
  if (!o.memory.empty()) return {parse_bytes(o.memory), "of --memory"};
  if (machine) {
    const size_t all = machine->memory(), nccl = std::min(all, nccl_bytes(c.trainer));
    return {all - nccl, cat("of ", machine->name, nccl > 0 ? cat(" beside ", bytes(nccl), " of NCCL") : "")};
  }
  try {
    const Table& table = open_table(c.trainer);
    Room room = room_on(table);
    const int ranks = rank_count(c.trainer).node_ranks;
    if (c.trainer.device == DeviceKind::cpu && ranks > 1) {
      room.bytes /= static_cast<size_t>(ranks);
      room.where += cat(", shared by ", ranks, " ranks");
    }
    return room;
  } catch (const Error& e) {
    return {0, e.what()};
  }
}

bool fits(const Plan& plan, const Room& room) { return room.bytes == 0 || plan.needed() <= room.bytes; }

void show_verdict(const Config& config, const Plan& plan, const Room& room) {
  const size_t most = plan.needed();
  if (room.bytes == 0)
    return paragraph("takes",
                     cat(bytes(most), " (", most, ") at most; --memory 80GB says whether that fits: ", room.where));
  if (fits(plan, room))
    return paragraph("fits", cat("any step takes at most ", bytes(most), " of the ", room.size(), ": ",
                                 bytes(room.bytes - most), " (", room.bytes - most, ") are left"));
  const std::vector<std::string> settings = settings_that_fit(config, room.bytes);
  paragraph("too much", excess_text("a step can take", most, room, settings) +
                            (settings.empty() ? "; none of moments in bf16, recomputation, smaller batches and up to "
                                                "eight times the ranks makes it fit"
                                              : ""));
}

std::string duration(double seconds) {
  return seconds < 1e-3   ? format("%.3g us", seconds * 1e6)
         : seconds < 1    ? format("%.3g ms", seconds * 1e3)
         : seconds < 6e3  ? format("%.4g s", seconds)
         : seconds < 36e4 ? format("%.3g h", seconds / 3600)
                          : format("%.3g days", seconds / 86400);
}

// The share of an op in the seconds of its phase, the greatest first.
std::string shares(const std::map<std::string, Ledger::Line>& ops) {
  std::vector<std::pair<double, std::string>> list;
  double all = 0;
  for (const auto& [op, line] : ops) {
    list.push_back({line.seconds, op});
    all += line.seconds;
  }
  std::sort(list.rbegin(), list.rend());
  std::string s;
  for (size_t i = 0; i < std::min<size_t>(list.size(), 3); i++) {
    const std::string share = cat(i ? ", " : "", list[i].second, format(" %.0f %%", 100 * list[i].first / all));
    if (s.size() + share.size() > kWidth - 28) break;
    s += share;
  }
  return s;
}

std::string key_names(const Machine& machine, const std::string& source) {
  std::string s;
  for (const auto& [key, figure] : machine.figures)
    if (figure.source == source) s += (s.empty() ? "" : ", ") + key;
  return s.empty() ? "nothing" : s;
}

void show_time(const Config& c, const Plan& plan, const Machine& machine, double tokens, const std::string& at) {
  std::printf("\n");
  paragraph("time", cat("on ", machine.name, ", ", at, ", of the device alone: without grading and files"));
  const double step = step_seconds(plan);
  for (const auto& [phase, ops] : plan.ledger.phases)
    std::printf("  %-12s %10s   %s\n", phase.c_str(), duration(plan.seconds.at(phase)).c_str(), shares(ops).c_str());
  if (plan.ranks > 1) {
    double sending = 0;
    for (const auto& [phase, ops] : plan.ledger.phases)
      for (const auto& [op, line] : ops) sending += line.cost.sent > 0 ? line.seconds : 0;
    std::printf("  %-12s %10s   %.2g %% of the step: ops that send\n", "between", duration(sending).c_str(),
                100 * sending / step);
  }
  std::printf("  %-12s %10s   %s tokens/s%s\n", "step", duration(step).c_str(), human(tokens / step).c_str(),
              plan.ranks > 1 ? cat(", ", human(tokens / step / plan.ranks), " a rank").c_str() : "");
  if (c.trainer.total_training_steps > 0)  // of epochs without the data nobody knows them
    std::printf("  %-12s %10s   %lld steps\n", "run",
                duration(step * static_cast<double>(c.trainer.total_training_steps)).c_str(),
                static_cast<long long>(c.trainer.total_training_steps));
  paragraph("", cat("measured: ", key_names(machine, "measured"), "; published: ", key_names(machine, "published"),
                    "; assumed: ", key_names(machine, "assumed")));
}

// --lengths: a number of tokens of a response, after prompts of the greatest length, or the directory of a run.
StepLengths lengths_of(const std::string& text, const Config& c) {
  int64_t response = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), response);
  const bool number = error == std::errc() && end == text.data() + text.size();
  if (number && (response < 1 || response > c.data.max_response_length))
    fail("--lengths ", text, ": expected 1 to data.max_response_length = ", c.data.max_response_length);
  if (number) return {c.data.max_prompt_length, response};
  if (!std::filesystem::is_directory(text))
    fail("--lengths ", text, ": expected worst, a number of tokens, or the directory of a run");
  StepLengths lengths = read_lengths(text);
  lengths.response = std::min(lengths.response, c.data.max_response_length);
  lengths.prompt = std::min(lengths.prompt, c.data.max_prompt_length);
  return lengths;
}

void run(const Options& o, const Command& command) {
  std::vector<std::string> arguments = o.config;
  for (const std::string& override : o.shorthands.overrides(command)) arguments.push_back(override);
  std::vector<std::string> notes;
  Config config = load_config(arguments, &notes);
  if (config.trainer.command == RunCommand::sft) {
    std::string line;
    for (const std::string& argument : o.config) line += " " + shell_word(argument);
    fail(
        "the configuration is that of a run of `pare sft`, and a plan is of `pare train`; the memory of a step: pare "
        "sft",
        line, " --dry-run");
  }
  std::optional<Machine> machine;
  if (!o.machine.empty()) machine = read_machine(o.machine);
  if (machine && config.trainer.device == DeviceKind::cpu) {  // all ranks of a node compute on it
    const int ranks = rank_count(config.trainer).node_ranks;
    machine = machine->shared_by(ranks);
    if (ranks > 1) machine->name += cat(", shared by ", ranks, " ranks");
  }
  const bool worst = o.lengths == "worst";
  const StepLengths lengths = worst ? StepLengths{config.data.max_prompt_length, config.data.max_response_length}
                                    : lengths_of(o.lengths, config);
  if (!config.model.path.empty() && !std::filesystem::exists(config.model.path)) {
    std::string shapes;
    for (const std::string& name : preset_names("json")) shapes += (shapes.empty() ? "" : ", ") + name;
    fail("model.path: there is no ", config.model.path,
         "; a plan needs the shape only: set model.config to a config.json or to one of ", shapes);
  }
  const Room room = find_room(o, config, machine);
  if (!o.largest.empty() && (!o.compare.empty() || o.json || !worst))
    fail("--largest asks what fits: leave --compare, --lengths and --json out");
  if (!o.largest.empty()) return show_largest(arguments, o.largest, room.bytes, room.where);
  if (!o.compare.empty())
    return show_comparison(arguments, o.compare, lengths, room.bytes, machine ? &*machine : nullptr, o.json);
  const std::vector<std::string> missing = missing_files(config);
  if (missing.empty()) resolve_steps(config, TrainingKind::grpo);
  if (room.bytes > 0) config = fit_memory(config, [&](const Config& c) { return plan_fits(c, room.bytes); });
  const Plan plan = plan_ranks(config, missing.empty(), worst ? nullptr : &lengths, machine ? &*machine : nullptr);
  const auto end = [&] {
    if (!fits(plan, room)) throw Error(Exit::memory, cat("the plan does not fit the ", room.size()));
  };
  if (o.json) {
    std::printf("%s\n", plan_json(config, plan, lengths, room.bytes, machine ? &*machine : nullptr).dump(2).c_str());
    return end();
  }
  print_notes(notes);
  show_verdict(config, plan, room);
  if (const std::string text = fitted_text(config, room); !text.empty() && fits(plan, room))
    paragraph("learner", text.substr(sizeof "the learner"));
  show_step(config, plan, missing);
  show_memory_table(plan);
  show_work(plan);
  if (!worst)
    std::printf("work at %lld + %lld tokens, %.0f %% of the responses dropped before the learner\n",
                static_cast<long long>(lengths.prompt), static_cast<long long>(lengths.response),
                100 * lengths.dropped);
  if (machine)
    show_time(config, plan, *machine, generated_tokens(config, lengths),
              cat("at ", lengths.prompt, " + ", lengths.response, " tokens"));
  end();
}

}  // namespace

void add_plan(const Command& program) {
  auto o = std::make_shared<Options>();
  const Command c = program.command("plan", "memory and FLOPs of a training step, before it runs");
  c.option("config", o->config, "presets or TOML files, then overrides group.key=value").required();
  c.option("--memory", o->memory, "memory of the machine to plan for, as 141GB; default: that of this machine");
  c.option("--machine", o->machine, "one of data/machines, as h200, or a file: its memory, and seconds");
  c.option("--lengths", o->lengths,
           "of the work: worst (default), tokens of a response, or the directory of a run whose means are taken");
  c.option("--largest", o->largest, "the largest value of this key that fits, such as data.max_response_length");
  c.option("--compare", o->compare,
           "presets, such as grpo,nat-rpc, laid over the run one by one: what each saves and costs");
  c.flag("--json", o->json, "prints JSON");
  o->shorthands.add(c);
  c.footer(
      "With the name of a shape, a plan needs neither weights, tokenizer, data nor the device:\n"
      "  pare plan grpo model.config=qwen2.5-1.5b --device cuda --machine h200");
  c.action([o, c] { run(*o, c); });
}

}  // namespace pare
