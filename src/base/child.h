// Child processes that answer requests line by line: one line to standard input, one from standard output.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace pare {

// The file that a shell would start for the first word of a command; an Error(usage) says why there is none.
std::string find_program(const std::string& word);

// The program runs in a process group of its own, so that a Ctrl-C in the terminal does not reach it, with the working
// directory and the environment of this process and none of its other files.  The whole group is gone when the Child
// is, and also when this process ends in any other way, by SIGKILL for one.
class Child {
 public:
  using Clock = std::chrono::steady_clock;

  // `program`: a path; `words`: its arguments, argv[0] first.  An Error(failed) where it cannot be started.
  Child(const std::string& program, const std::vector<std::string>& words);
  ~Child();  // at once, whatever the program does
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  enum class Reply {
    line,
    ended,  // the program closed its standard output, as it does at its end
    late,
    too_long,  // more than kLongest bytes without a line end
    unasked    // more than one line, or before it was asked: all that came is the answer
  };
  static constexpr size_t kLongest = 1 << 20;
  // Sends the line, which has no line end in it, and waits for that of the program.  After any reply but a line there
  // is nothing left to ask.
  Reply ask(const std::string& line, double seconds, std::string& answer);

  void hang_up();  // no line comes any more: most programs end by that
  // Waits for the end of the program, which is then known: "exited with code 1".  Empty: it still runs.
  std::string ended_by(Clock::time_point deadline);
  // The last lines that it wrote to its standard error, so far.
  std::string last_errors();

 private:
  bool read_output();  // false: its end
  void read_errors();

  pid_t guard_ = -1, program_ = -1;  // the guard leads the process group
  int in_ = -1, out_ = -1, err_ = -1, alive_ = -1;
  std::string answers_, errors_, end_;
};

}  // namespace pare
