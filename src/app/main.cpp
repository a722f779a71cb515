#include <cstdio>
#include <filesystem>
#include <new>

#include "app/commands.h"
#include "app/version.h"
#include "base/error.h"

int main(int argc, char** argv) {
  using pare::Exit;
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
  pare::add_verify(app);
  pare::add_bench(app);
  try {
    app.parse(argc, argv);
    return static_cast<int>(Exit::ok);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    const auto commands = app.get_subcommands();
    std::string what = e.what(), place = "pare";
    if (!commands.empty())
      place += " " + commands[0]->get_name();
    else if (argc > 1 && argv[1][0] != '-')
      what = pare::cat("there is no command ", argv[1]);
    std::fprintf(stderr, "pare: %s; see %s --help\n", what.c_str(), place.c_str());
    return static_cast<int>(Exit::usage);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "pare: the machine's memory does not suffice\n");
    return static_cast<int>(Exit::memory);
  } catch (const std::filesystem::filesystem_error& e) {
    std::fprintf(stderr, "pare: %s: %s\n", e.path1().c_str(), e.code().message().c_str());
    return static_cast<int>(Exit::failed);
  } catch (const pare::Error& e) {
    std::fprintf(stderr, "pare: %s\n", e.what());
    return static_cast<int>(e.code);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "pare: internal error: %s\n", e.what());
    return static_cast<int>(Exit::failed);
  }
}
