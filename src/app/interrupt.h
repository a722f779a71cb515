// Signals that stop a run without losing a finished step: SIGINT (Ctrl-C) and SIGTERM, of which a second one ends the
// process at once, SIGUSR1, which a scheduler sends before its limit and mpirun passes on, and SIGHUP, when the
// terminal closes (unless ignored from the start, as under nohup).
#pragma once
#include <csignal>

namespace pare {

// From now on writing into a closed pipe is an error of the write and no longer the end of the process: whoever writes
// standard output calls ask_to_stop() then.  A SIGPIPE that another process sends asks, too.
// With `last_words` SIGINT and SIGTERM leave no time, as under mpirun, which kills next: the process writes them to
// standard error and ends with Exit::interrupted.  With `sender` SIGINT and SIGTERM count if that process queues them
// (sigqueue), and their value says how many it has received: from 2 on the process ends at once.  A terminal or a
// scheduler sends them to all processes of a job; the launcher then passes its own on, again and again.
void catch_interrupts(const char* last_words = nullptr, int sender = 0);
// While a run loads, and before catch_interrupts(): of these signals SIGUSR1 alone asks, the others do what they did.
void catch_usr1();
void ask_to_stop();
bool interrupted();

// While it lives, SIGINT asks what is under way to stop, as above; before and after, it is what it was.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  struct sigaction before_ = {};
};

}  // namespace pare
