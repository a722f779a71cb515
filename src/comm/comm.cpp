#include "comm/comm.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

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
  void reduce(const Piece& x, void* y, DType, int) override {
    if (x.bytes) std::memmove(y, x.data, x.bytes);
  }
  [[noreturn]] void abort(int code) override { _exit(code); }
};

// Ranks that a launcher says it started; 1 without one.
int launched() {
  const auto number = [](const char* name) {
    const char* const value = std::getenv(name);
    return value ? std::atoi(value) : 0;
  };
  const int slurm = std::getenv("PMIX_RANK") ? number("SLURM_STEP_NUM_TASKS") : 0;
  return std::max({1, number("OMPI_COMM_WORLD_SIZE"), number("PMI_SIZE"), slurm});
}

std::unique_ptr<Comm> open_world() {
  const int ranks = launched();
  if (ranks == 1) return nullptr;
  if (!make_mpi_comm)
    fail("this program was started as one of ", ranks,
         " ranks and was built without MPI: as independent runs they would fight for one folder; `make mpi` builds "
         "build/mpi/pare, which has it");
  return make_mpi_comm();
}

Comm::Piece piece(std::string_view bytes) { return {const_cast<char*>(bytes.data()), bytes.size()}; }

}  // namespace

Comm& self() {
  static Self comm;
  return comm;
}

Comm& world() {
  static const std::unique_ptr<Comm> comm = open_world();
  return comm ? *comm : self();
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

int64_t Comm::most(int64_t own) {
  const std::vector<int64_t> all = gather(own);
  return *std::max_element(all.begin(), all.end());
}

}  // namespace pare
