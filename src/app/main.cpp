#include <cstdio>
#include <filesystem>
#include <new>

#include "app/commands.h"
#include "app/console.h"
#include "app/version.h"
#include "base/error.h"

namespace {

int report(pare::Exit code, const std::string& what) {
  std::fprintf(stderr, "pare: %s\n", pare::printable_lines(what).c_str());
  return static_cast<int>(code);
}

int run(CLI::App& app, int argc, char** argv) {
  using pare::Exit;
  try {
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
      if (e.get_exit_code() != 0) throw;
      app.exit(e);  // --help, --version
    }
    pare::finish_output();
    return static_cast<int>(Exit::ok);
  } catch (const CLI::ParseError& e) {
    const auto commands = app.get_subcommands();
    std::string what = e.what(), place = "pare";
    if (!commands.empty())
      place += " " + commands[0]->get_name();
    else if (argc > 1 && argv[1][0] != '-')
      what = pare::cat("there is no command ", argv[1]);
    return report(Exit::usage, pare::cat(what, "; see ", place, " --help"));
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
  CLI::App app{"pare: reinforcement learning for language models, pared down to C++ and CUDA"};
  app.require_subcommand(1);
  app.set_version_flag("--version", pare::version, "commit, compiler, instruction set, devices");
  pare::add_train(app);
  pare::add_sft(app);
  pare::add_eval(app);
  pare::add_generate(app);
  pare::add_plan(app);
  pare::add_compare(app);
  pare::add_report(app);
  pare::add_logprobs(app);
  pare::add_tokenize(app);
  pare::add_inspect(app);
  pare::add_convert(app);
  pare::add_merge(app);
  pare::add_verify(app);
  pare::add_bench(app);
  return run(app, argc, argv);
}
