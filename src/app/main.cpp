#include <chrono>
#include <cstdio>
#include <filesystem>
#include <new>
#include <thread>

#include "app/commands.h"
#include "app/console.h"
#include "app/interrupt.h"
#include "base/error.h"
#include "comm/comm.h"

namespace {

// A rank that fails ends all of them.  What all find is said by rank 0, before the others come to it.
int report(pare::Comm& comm, pare::Exit code, const std::string& what) {
  if (!comm.first()) std::this_thread::sleep_for(std::chrono::seconds(1));
  const std::string who = comm.ranks() > 1 ? pare::cat("rank ", comm.rank(), ": ") : "";
  std::fprintf(stderr, "pare: %s%s\n", who.c_str(), pare::printable_lines(what).c_str());
  if (comm.ranks() > 1) comm.abort(static_cast<int>(code));
  return static_cast<int>(code);
}

int run(int argc, char** argv) {
  using pare::Exit;
  pare::Comm* comm = &pare::self();
  const auto report = [&](Exit code, const std::string& what) { return ::report(*comm, code, what); };
  const std::string command = argc > 1 ? argv[1] : "";
  const bool trains = command == "train" || command == "sft";
  if (trains) pare::catch_usr1();
  try {
    comm = &pare::world();
    if (comm->ranks() > 1 && !trains && command != "eval")
      pare::fail("pare ", command, " takes one rank, ", comm->ranks(), " were started");
    using namespace pare;
    run_command_line(argc, argv,
                     {add_train, add_sft, add_eval, add_generate, add_plan, add_compare, add_report, add_logprobs,
                      add_tokenize, add_inspect, add_convert, add_merge, add_verify, add_bench, add_help});
    pare::finish_output();
    comm->link.reset();  // while its device is there
    return static_cast<int>(Exit::ok);
  } catch (const std::bad_alloc&) {
    return report(Exit::memory, "the machine's memory does not suffice");
  } catch (const std::filesystem::filesystem_error& e) {
    return report(Exit::failed, pare::cat(e.path1().string(), ": ", e.code().message()));
  } catch (const pare::Error& e) {
    return report(e.code, e.what());
  } catch (const std::exception& e) {
    return report(Exit::failed, pare::cat("internal error: ", e.what()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  pare::open_standard_streams();
  return run(argc, argv);
}
