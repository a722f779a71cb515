// The options of a command.  CLI11 parses them, and is included in command_line.cpp alone: a file takes seconds more
// with it.
#pragma once
#include <functional>
#include <initializer_list>
#include <string>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace pare {

class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
  Option required() const;
  Option needs(const Option& other) const;
  Option excludes(const Option& other) const;
  Option between(double low, double high) const;  // for numbers
  Option list() const;                            // one value, its parts separated by commas
  Option repeatable() const;                      // one value each time it is given
  Option value_optional() const;
  Option type_name(const std::string& name) const;  // in the page of --help

 private:
  CLI::Option* option_;
};

class Command {
 public:
  explicit Command(CLI::App* app) : app_(app) {}
  Command command(const std::string& name, const std::string& what) const;
  // `value` lives as long as the command.  T: a std::string (in an optional, too), an int, int64_t or double, or a
  // vector of strings or int64_t.
  template <class T>
  Option option(const std::string& name, T& value, const std::string& what) const;
  Option flag(const std::string& name, bool& value, const std::string& what) const;
  bool given(const std::string& option) const;
  void footer(const std::string& text) const;  // of the page of --help
  void action(const std::function<void()>& run) const;

 private:
  CLI::App* app_;
};

// Runs the command of a command line; each of `commands` adds one.  Prints what --help and --version ask for.  A line
// that is wrong throws an Error that names the page to read.
void run_command_line(int argc, char** argv, std::initializer_list<void (*)(const Command& program)> commands);

}  // namespace pare
