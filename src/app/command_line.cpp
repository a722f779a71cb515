#include "app/command_line.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <iomanip>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "app/version.h"
#include "base/error.h"
#include "base/text.h"

namespace pare {

Option Option::required() const { return Option(option_->required()); }
Option Option::needs(const Option& other) const { return Option(option_->needs(other.option_)); }
Option Option::excludes(const Option& other) const { return Option(option_->excludes(other.option_)); }
Option Option::between(double low, double high) const {
  const auto check = [low, high](const std::string& text) -> std::string {
    char* end = nullptr;
    const double x = std::strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0' && x >= low && x <= high) return "";
    std::ostringstream what;  // 1000000000 rather than 1e+09
    what << std::setprecision(15) << "expected a number from " << low << " to " << high << ", found ";
    return what.str() + (text.empty() ? "nothing" : text);
  };
  return Option(option_->check(CLI::Validator(check, "")));
}
Option Option::list() const { return Option(option_->delimiter(',')->allow_extra_args(false)); }
Option Option::repeatable() const { return Option(option_->allow_extra_args(false)); }
Option Option::value_optional() const { return Option(option_->expected(0, 1)); }
Option Option::type_name(const std::string& name) const { return Option(option_->type_name(name)); }

Command Command::command(const std::string& name, const std::string& what) const {
  return Command(app_->add_subcommand(name, what));
}
template <class T>
Option Command::option(const std::string& name, T& value, const std::string& what) const {
  return Option(app_->add_option(name, value, what));
}
template Option Command::option(const std::string&, std::string&, const std::string&) const;
template Option Command::option(const std::string&, std::optional<std::string>&, const std::string&) const;
template Option Command::option(const std::string&, int&, const std::string&) const;
template Option Command::option(const std::string&, int64_t&, const std::string&) const;
template Option Command::option(const std::string&, double&, const std::string&) const;
template Option Command::option(const std::string&, std::vector<std::string>&, const std::string&) const;
template Option Command::option(const std::string&, std::vector<int64_t>&, const std::string&) const;
Option Command::flag(const std::string& name, bool& value, const std::string& what) const {
  return Option(app_->add_flag(name, value, what));
}
bool Command::given(const std::string& option) const { return app_->count(option) > 0; }
void Command::footer(const std::string& text) const { app_->footer(text); }
void Command::action(const std::function<void()>& run) const { app_->callback(run); }

void run_command_line(int argc, char** argv, std::initializer_list<void (*)(const Command& program)> commands) {
  for (int i = 1; i < argc; i++)
    if (const std::string text = argv[i]; utf8_bytes(text) < text.size())
      fail("argument ", i, ", ", shortened(printable(text), 60),
           ": bytes that are not UTF-8; pare takes names of files and texts in UTF-8 only");
  CLI::App app{"pare: reinforcement learning for language models, pared down to C++ and CUDA"};
  app.require_subcommand(1);
  app.set_version_flag("--version", version, "commit, compiler, instruction set, devices");
  for (const auto& add : commands) add(Command(&app));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return static_cast<void>(app.exit(e));  // --help, --version
    const auto given = app.get_subcommands();
    std::string what = e.what(), place = "pare";
    if (!given.empty())
      place += " " + given[0]->get_name();
    else if (argc > 1 && argv[1][0] != '-')
      what = cat("there is no command ", argv[1]);
    fail(what, "; see ", place, " --help");
  }
}

}  // namespace pare
