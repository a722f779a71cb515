#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "comm/shared.h"

namespace pare {

// Null where it is not linked: the Makefile gives it to build/mpi/pare.
[[gnu::weak]] std::unique_ptr<Comm> make_mpi_comm();

namespace {

class Self : public Comm {
 public:
  int rank() const override { return 0; }
  int ranks() const override { return 1; }
  int node_rank() const override { return 0; }
  int node_ranks() const override { return 1; }
  std::string host() const override {
    char name[256] = {};
    gethostname(name, sizeof name - 1);
    return name;
  }
  void exchange(std::span<const Piece> out, std::span<const Piece> in) override {
    expect(out.size() == 1 && in.size() == 1, "an exchange of ", out.size(), " and ", in.size(),
           " pieces, of one rank");
    expect(out[0].bytes == in[0].bytes, "rank 0 sends ", out[0].bytes, " bytes to rank 0, which expects ", in[0].bytes);
    if (in[0].bytes) std::memmove(in[0].data, out[0].data, in[0].bytes);
  }
  [[noreturn]] void abort(int code) override { _exit(code); }
};

// Ranks that another launcher says it started; 1 without one.
struct Launched {
  int ranks = 1;
  const char* by = "";
};
Launched launched() {
  const bool pmix = std::getenv("PMIX_RANK");
  Launched most;
  for (const auto& [name, by] : {std::pair{"OMPI_COMM_WORLD_SIZE", "mpirun of Open MPI"},
                                 {"PMI_SIZE", "mpirun of MPICH, or srun"},
                                 {pmix ? "SLURM_STEP_NUM_TASKS" : "", "srun"}}) {
    const char* const value = std::getenv(name);
    if (const int ranks = value ? std::atoi(value) : 0; ranks > most.ranks) most = {ranks, by};
  }
  return most;
}

std::unique_ptr<Comm> open_world() {
  const Launched other = launched();
  if (other.ranks == 1) return nullptr;
  if (!make_mpi_comm)
    fail(
        other.by, " started this program as one of ", other.ranks,
        " ranks, and it was built without MPI: as independent runs they would fight for one folder.  Start it once, by "
        "--ranks ",
        other.ranks, ", for ranks of one machine; `make mpi` builds build/mpi/pare, which has MPI");
  return make_mpi_comm();
}

std::unique_ptr<Comm>& opened() {
  static std::unique_ptr<Comm> comm = open_world();
  return comm;
}

Comm::Piece piece(std::string_view bytes) { return {const_cast<char*>(bytes.data()), bytes.size()}; }

}  // namespace

Comm& self() {
  static Self comm;
  return comm;
}

Comm& world() { return opened() ? *opened() : self(); }

void set_world(std::unique_ptr<Comm> comm) { opened() = std::move(comm); }

void check_not_launched(int ranks) {
  if (const Launched other = launched(); other.ranks > 1)
    fail("--ranks ", ranks, ", but ", other.by, " has started ", other.ranks,
         " ranks already; leave out one of the two");
}

std::vector<Sizes> sizes_of(std::span<const Comm::Piece> out, std::span<const Comm::Piece> in) {
  std::vector<Sizes> sizes;
  for (size_t q = 0; q < out.size(); q++) sizes.push_back({out[q].bytes, in[q].bytes});
  return sizes;
}

void expect_sizes(int rank, std::span<const Sizes> own, std::span<const Sizes> others) {
  for (size_t q = 0; q < own.size(); q++) {
    expect(others[q].sent == own[q].expected, "rank ", q, " sends ", others[q].sent, " bytes to rank ", rank,
           ", which expects ", own[q].expected);
    expect(others[q].expected == own[q].sent, "rank ", rank, " sends ", own[q].sent, " bytes to rank ", q,
           ", which expects ", others[q].expected);
  }
}

void meet_at_end(Comm& comm) {
  comm.doing = "ending";
  const std::vector<Comm::Piece> nothing(static_cast<size_t>(comm.ranks()));
  try {
    comm.exchange(nothing, nothing);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "pare: rank %d ends, and other ranks do not: %s\n", comm.rank(), e.what());
    comm.abort(static_cast<int>(Exit::failed));
  }
}

std::vector<int64_t> Comm::gather(int64_t own) {
  std::vector<int64_t> all(static_cast<size_t>(ranks()));
  std::vector<Piece> in;
  for (int64_t& n : all) in.push_back({&n, sizeof n});
  exchange(std::vector<Piece>(all.size(), {&own, sizeof own}), in);
  return all;
}

std::vector<std::string> Comm::gather(std::string_view own) {
  std::vector<std::string> all;
  std::vector<Piece> in;
  for (const int64_t n : gather(static_cast<int64_t>(own.size()))) all.emplace_back(static_cast<size_t>(n), '\0');
  for (std::string& bytes : all) in.push_back(piece(bytes));
  exchange(std::vector<Piece>(all.size(), piece(own)), in);
  return all;
}

std::string Comm::broadcast(std::string_view bytes, int root) {
  return std::move(gather(rank() == root ? bytes : std::string_view())[static_cast<size_t>(root)]);
}

int64_t Comm::sum(int64_t own) {
  int64_t sum = 0;
  for (const int64_t n : gather(own)) sum += n;
  return sum;
}

const std::vector<int>& Comm::machines() {
  if (!machines_.empty()) return machines_;
  const std::vector<std::string> hosts = gather(host());
  for (const std::string& host : hosts)
    machines_.push_back(static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin()));
  return machines_;
}

int64_t Comm::most(int64_t own) {
  const std::vector<int64_t> all = gather(own);
  return *std::max_element(all.begin(), all.end());
}

}  // namespace pare
