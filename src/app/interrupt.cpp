#include "app/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>

#include "base/error.h"

namespace pare {

namespace {

std::atomic<bool> asked = false;
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler must not wait");

void on_signal(int) {
  if (asked.exchange(true)) _exit(static_cast<int>(Exit::interrupted));
}

}  // namespace

void catch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

bool interrupted() { return asked; }

}  // namespace pare
