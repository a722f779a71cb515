// SIGINT (Ctrl-C) and SIGTERM: the first one asks the run to stop, the second one ends the process at once.
#pragma once
#include <csignal>

namespace pare {

void catch_interrupts();
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
