#include "run/ranks.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "base/file.h"
#include "data/reward_command.h"

namespace pare {

void check_ranks(const Config& config, Comm& comm, bool trains) {
  const TrainerKeys& t = config.trainer;
  const int64_t ranks = comm.ranks(), slots = config.learner.slots;
  if (t.n_gpus_per_node > 0 && t.n_gpus_per_node != comm.node_ranks())
    fail("trainer.n_gpus_per_node = ", t.n_gpus_per_node, ", but ", comm.node_ranks(), " ranks were started on ",
         comm.host());
  const int64_t nodes = comm.sum(comm.node_rank() == 0);
  if (t.nnodes > 0 && t.nnodes != nodes)
    fail("trainer.nnodes = ", t.nnodes, ", but ranks were started on ", nodes, " nodes");
  if (!trains || slots % ranks == 0) return;
  const int64_t next = (slots + ranks - 1) / ranks * ranks, eight = std::lcm(next, int64_t{8});
  fail("learner.slots = ", slots, " cannot be dealt to ", ranks, " ranks; ", next, " can",
       eight == next ? std::string() : cat(", and ", eight, " if the run is to move between 1, 2, 4 and 8 ranks"));
}

int shared_threads(Comm& comm) {
  if (comm.ranks() == 1) return 0;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  sched_getaffinity(0, sizeof mask, &mask);
  Packed own;
  own.put(mask), own.put_all(comm.host());
  cpu_set_t together;
  CPU_ZERO(&together);
  for (std::string& bytes : comm.gather(own.bytes())) {
    Packed p(std::move(bytes));
    const auto other = p.take<cpu_set_t>();
    if (p.take_all<std::string>() == comm.host()) CPU_OR(&together, &together, &other);
  }
  return std::max(1, CPU_COUNT(&together) / comm.node_ranks());
}

void expect_equal(Comm& comm, const Facts& facts) {
  Packed own;
  for (const auto& [name, value] : facts) own.put_all(name), own.put_all(value);
  const std::vector<std::string> hashes = comm.gather(xxh128(own.bytes()));
  if (std::all_of(hashes.begin(), hashes.end(), [&](const std::string& h) { return h == hashes[0]; })) return;
  std::vector<Packed> all;
  for (std::string& bytes : comm.gather(own.bytes())) all.emplace_back(std::move(bytes));
  for (size_t i = 0; i < facts.size(); i++) {
    std::string name, value;
    for (size_t r = 0; r < all.size(); r++) {
      const auto n = all[r].take_all<std::string>(), v = all[r].take_all<std::string>();
      if (r == 0) name = n, value = v;
      if (n != name) throw Error(Exit::failed, cat("rank 0 has ", name, " where rank ", r, " has ", n));
      if (v != value)
        throw Error(Exit::failed, cat(name, " is ", value, " on rank 0 and ", v, " on rank ", r,
                                      "; all ranks of a run must agree on it"));
    }
  }
  throw Error(Exit::failed, "rank 0 has not as many values as the others");
}

Facts facts_of(const Config& config) {
  Facts facts;
  for (const ConfigKey& key : config_keys()) facts.emplace_back(key.name, key.show(config));
  return facts;
}

Facts facts_of(const Metrics& metrics) {
  Facts facts;
  for (const auto& [name, value] : metrics.all()) {
    if (name.starts_with("timing_s/") || name.starts_with("perf/") || name == "comm/seconds") continue;
    char text[64];
    facts.emplace_back(name, std::string(text, std::to_chars(text, text + sizeof text, value).ptr));
  }
  facts.emplace_back("certificate", metrics.text("certificate"));
  return facts;
}

Facts facts_of_files(const Config& config) {
  namespace fs = std::filesystem;
  std::vector<fs::path> files = {fs::path(config.model.path) / "config.json",
                                 fs::path(config.model.path) / "generation_config.json",
                                 fs::path(config.model.lora.adapter_path) / "adapter_config.json", config.model.config,
                                 config.algorithm.rpo.cache_file};
  const fs::path tokenizer = tokenizer_spec(config);
  const fs::path beside = fs::is_directory(tokenizer) ? tokenizer : tokenizer.parent_path();
  files.push_back(tokenizer);
  for (const char* name :
       {"tokenizer.ssa", "tokenizer.bin", "tokenizer.json", "vocab_pieces.json", "tokenizer_config.json",
        "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/default.jinja"})
    files.push_back(beside / name);
  files.insert(files.end(), config.data.train_files.begin(), config.data.train_files.end());
  files.insert(files.end(), config.data.val_files.begin(), config.data.val_files.end());
  if (const std::string& reward = config.data.reward; RewardCommand::is_one(reward))
    for (const std::string& word : RewardCommand(reward, config.data.reward_timeout).program_and_words())
      files.emplace_back(word);
  Facts facts;
  for (const fs::path& file : files)
    facts.emplace_back(cat("hash of ", file.string()),
                       fs::is_regular_file(file) ? read_sum(file.string()).xxh128 : "none");
  return facts;
}

void check_shared_folder(Comm& comm, const std::string& folder) {
  if (comm.ranks() == 1) return;
  const std::string file = cat(folder, "/.ranks");
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  const std::string mark = comm.broadcast(cat(comm.host(), ' ', getpid(), ' ', now));
  if (comm.first()) write_file(file, mark);
  comm.broadcast("");  // it is there
  std::ifstream in(file, std::ios::binary);
  const bool seen = std::string(std::istreambuf_iterator<char>(in), {}) == mark;
  const std::vector<int64_t> all = comm.gather(seen);
  const std::vector<std::string> places =
      comm.gather(cat(std::filesystem::absolute(folder).string(), " on ", comm.host()));
  if (comm.first()) std::filesystem::remove(file);
  for (size_t r = 0; r < all.size(); r++)
    if (!all[r])
      fail("rank ", r, " cannot read in ", places[r], " what rank 0 wrote to ", places[0],
           "; set --out to a folder on a disk that all nodes share");
}

}  // namespace pare
