#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "app/commands.h"
#include "app/console.h"
#include "app/interrupt.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm.h"
#include "comm/shared.h"

namespace {

// A rank that fails ends all of them.  What all find is said by rank 0, before the others come to it.
int report(pare::Comm& comm, pare::Exit code, const std::string& what) {
  const bool agreed = code == pare::Exit::interrupted;  // by all ranks
  if (!comm.first()) std::this_thread::sleep_for(std::chrono::seconds(1));
  const std::string who = comm.ranks() > 1 ? pare::cat("rank ", comm.rank(), ": ") : "";
  constexpr size_t most = 4000;  // a message may repeat a value of megabytes; what is wrong with it stands at the end
  const std::string shown =
      what.size() > most ? what.substr(0, most / 2) + " ... " + what.substr(what.size() - most / 2) : what;
  std::string text = pare::cat("pare: ", who, pare::printable_lines(shown));
  if (isatty(STDERR_FILENO) && text.find('\n') == std::string::npos) {  // of several lines, some are no sentences
    const std::string blanks(6, ' ');
    text =
        pare::wrapped(text, std::min<size_t>(pare::Console::columns(STDERR_FILENO), 120), blanks).substr(blanks.size());
    text.pop_back();
  }
  std::fflush(stdout);  // the error comes last
  if (!agreed || comm.first()) std::fprintf(stderr, "%s\n", text.c_str());
  if (agreed) comm.link.reset();  // while its device is there
  if (comm.ranks() > 1) comm.abort(static_cast<int>(code));
  return static_cast<int>(code);
}

// Before any of them exchanges something else.
void check_command(pare::Comm& comm, const std::string& command) {
  const std::vector<std::string> all = comm.gather(command);
  for (size_t r = 1; r < all.size(); r++)
    if (all[r] != all[0])
      pare::fail("rank 0 was started as pare ", all[0], " and rank ", r, " as pare ", all[r],
                 "; all ranks of a job run the same command");
}

int run(int argc, char** argv) {
  using pare::Exit;
  bool opened = false;
  const auto report = [&](Exit code, const std::string& what) {  // --ranks makes another world on the way
    return ::report(opened ? pare::world() : pare::self(), code, what);
  };
  const std::string command = argc > 1 ? argv[1] : "";
  const bool trains = command == "train" || command == "sft";
  if (trains) pare::catch_usr1();
  try {
    pare::Comm& comm = pare::world();
    opened = true;
    if (comm.ranks() > 1 && !trains && command != "eval" && command != "audit" && command != "bench")
      pare::fail("pare ", command, " takes one rank, ", comm.ranks(), " were started");
    check_command(comm, command);
    using namespace pare;
    run_command_line(
        argc, argv,
        {add_train, add_sft, add_eval, add_generate, add_plan, add_compare, add_audit, add_report, add_logprobs,
         add_tokenize, add_inspect, add_convert, add_merge, add_verify, add_bench, add_help});
    pare::finish_output();
    world().link.reset();  // while its device is there
    if (world().hangs) {
      set_world(nullptr);
      _exit(static_cast<int>(Exit::ok));
    }
    return static_cast<int>(Exit::ok);
  } catch (const std::bad_alloc&) {
    return report(Exit::memory,
                  pare::cat("does not fit: memory ran out, of which there are ",
                            pare::human(static_cast<double>(pare::machine_memory())),
                            "B (ulimit, control groups); pare plan says what a step takes and what fits"));
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
