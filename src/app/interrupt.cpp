#include "app/interrupt.h"

#include <unistd.h>

#include <atomic>

#include "base/error.h"

namespace pare {

namespace {

std::atomic<bool> asked = false;
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler must not wait");

void on_signal(int) {
  if (asked.exchange(true)) _exit(static_cast<int>(Exit::interrupted));
}

struct sigaction handler() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  return action;
}

}  // namespace

void catch_interrupts() {
  const struct sigaction action = handler();
  for (const int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
}

bool interrupted() { return asked; }

InterruptScope::InterruptScope() {
  asked = false;
  const struct sigaction action = handler();
  sigaction(SIGINT, &action, &before_);
}

InterruptScope::~InterruptScope() { sigaction(SIGINT, &before_, nullptr); }

}  // namespace pare
