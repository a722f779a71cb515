// Child processes that answer requests line by line: one line to standard input, one from standard output.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace pare {

// Returns the file that a shell would run for the first word of a command.  Throws Error(usage), with the reason, if
// there is none.
std::string find_program(const std::string& word);

// The program runs in its own session, out of reach of Ctrl-C in the terminal.  It inherits the working directory and
// the environment of this process, with a variable PARE_CHILD added, but none of its open files.  The destructor kills
// it and all of its descendants, also those in sessions of their own unless they dropped that variable; so does the end
// of this process, even by SIGKILL.
class Child {
 public:
  using Clock = std::chrono::steady_clock;

  // `program`: a path; `words`: its arguments, argv[0] first.  Throws Error(failed) if it cannot be started.
  Child(const std::string& program, const std::vector<std::string>& words);
  ~Child();  // kills it at once
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  enum class Reply {
    line,
    ended,  // the program closed its standard output; a program that exits does so too
    late,
    too_long,  // more than kLongest bytes without a line end
    unasked    // more than one line, or a line before the request; `answer` holds all of it
  };
  static constexpr size_t kLongest = 1 << 20;
  // Sends a line, given without its line end, and waits for the program's answer.  After any reply but `line` the child
  // must not be asked again.
  Reply ask(const std::string& line, double seconds, std::string& answer);

  void hang_up();  // closes the program's standard input, upon which most programs exit
  // Waits for the program to exit and returns how it did: "exited with code 1".  Empty: it is still running.
  std::string ended_by(Clock::time_point deadline);
  // The last lines it has written to standard error so far.
  std::string last_errors();

 private:
  bool read_output();  // false: end of file
  void read_errors();
  void end_guard();  // it ends the descendants of the program first

  pid_t guard_ = -1, program_ = -1;
  int in_ = -1, out_ = -1, err_ = -1, alive_ = -1;
  std::string answers_, errors_, end_;
};

}  // namespace pare
