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
#include "run/inputs.h"

namespace pare {

void check_ranks(const Config& config, Comm& comm, bool trains) {
  const TrainerKeys& t = config.trainer;
  const int64_t ranks = comm.ranks(), shards = config.learner.shards;
  if (t.n_gpus_per_node > 0 && t.n_gpus_per_node != comm.node_ranks())
    fail("trainer.n_gpus_per_node = ", t.n_gpus_per_node, ", but ", comm.node_ranks(), " ranks were started on ",
         comm.host(), comm.ranks() == 1 ? cat("; --ranks ", t.n_gpus_per_node, " starts as many") : "");
  const int64_t nodes = comm.sum(comm.node_rank() == 0);
  if (t.nnodes > 0 && t.nnodes != nodes)
    fail("trainer.nnodes = ", t.nnodes, ", but ranks were started on ", nodes, " nodes");
  if (!trains || shards % ranks == 0) return;
  const int64_t next = (shards + ranks - 1) / ranks * ranks, eight = std::lcm(next, int64_t{8});
  fail("learner.shards = ", shards, " cannot be dealt to ", ranks, " ranks; ", next, " can",
       eight == next ? std::string() : cat(", and ", eight, " if the run is to move between 1, 2, 4 and 8 ranks"));
}

// Returns the number of cores that any of the ranks of this machine may use.
static int shared_cores(Comm& comm) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  sched_getaffinity(0, sizeof mask, &mask);
  Packed own;
  own.put(mask);
  own.put_all(comm.host());
  cpu_set_t together;
  CPU_ZERO(&together);
  for (std::string& bytes : comm.gather(own.bytes())) {
    Packed p(std::move(bytes));
    const auto other = p.take<cpu_set_t>();
    if (p.take_all<std::string>() == comm.host()) CPU_OR(&together, &together, &other);
  }
  return CPU_COUNT(&together);
}

int shared_threads(Comm& comm) { return comm.ranks() == 1 ? 0 : std::max(1, shared_cores(comm) / comm.node_ranks()); }

std::string binding_note(Comm& comm) {
  const int64_t cores = comm.ranks() == 1 ? 0 : shared_cores(comm), all = sysconf(_SC_NPROCESSORS_ONLN);
  if (cores == 0 || cores > comm.node_ranks() || 2 * cores > all) return "";
  return cat("the launcher binds the ", comm.node_ranks(), " ranks of ", comm.host(), " to ", cores, " of its ", all,
             " cores, so that each has one thread; mpirun --bind-to none and srun --cpus-per-task give them more");
}

void expect_equal(Comm& comm, const Facts& facts) {
  Packed own;
  for (const auto& [name, value] : facts) {
    own.put_all(name);
    own.put_all(value);
  }
  const std::vector<std::string> hashes = comm.gather(xxh128(own.bytes()));
  if (std::all_of(hashes.begin(), hashes.end(), [&](const std::string& h) { return h == hashes[0]; })) return;
  std::vector<Packed> all;
  for (std::string& bytes : comm.gather(own.bytes())) all.emplace_back(std::move(bytes));
  for (size_t i = 0; i < facts.size(); i++) {
    std::string name, value;
    for (size_t r = 0; r < all.size(); r++) {
      const auto n = all[r].take_all<std::string>(), v = all[r].take_all<std::string>();
      if (r == 0) {
        name = n;
        value = v;
      }
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
  Facts facts;
  for (const Input& input : read_inputs(config))
    facts.emplace_back(cat("hash of ", input.path), input.digest.empty() ? "none" : input.digest);
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
