#include <cstdio>

#include "app/commands.h"
#include "base/error.h"

int main(int argc, char** argv) {
  using pare::Exit;
  CLI::App app{"pare: reinforcement learning for language models, pared down to C++ and CUDA"};
  app.require_subcommand(1);
  pare::add_train(app);
  pare::add_sft(app);
  pare::add_generate(app);
  pare::add_plan(app);
  pare::add_compare(app);
  pare::add_logprobs(app);
  pare::add_inspect(app);
  pare::add_convert(app);
  try {
    app.parse(argc, argv);
    return static_cast<int>(Exit::ok);
  } catch (const CLI::ParseError& e) {
    const bool help = e.get_exit_code() == 0;
    app.exit(e);
    return static_cast<int>(help ? Exit::ok : Exit::usage);
  } catch (const pare::Error& e) {
    std::fprintf(stderr, "pare: %s\n", e.what());
    return static_cast<int>(e.code);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "pare: internal error: %s\n", e.what());
    return static_cast<int>(Exit::failed);
  }
}
