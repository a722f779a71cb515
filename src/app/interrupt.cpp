#include "app/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <cstring>

#include "base/error.h"

namespace pare {

namespace {

std::atomic<bool> asked = false, told = false;  // told: by a person, or by one who will kill next
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler must not wait");

std::atomic<const char*> words = nullptr;
std::atomic<int> only_sender = 0;

void on_signal(int signal, siginfo_t* info, void*) {
  const bool ends = signal == SIGINT || signal == SIGTERM;
  if (const int sender = only_sender; ends && sender != 0) {
    if (info->si_code != SI_QUEUE || info->si_pid != sender) return;
    if (info->si_value.sival_int > 1) _exit(static_cast<int>(Exit::interrupted));
    asked = true;
    return;
  }
  if (const char* const last = words; last && ends) {
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, last, std::strlen(last));
    _exit(static_cast<int>(Exit::interrupted));
  }
  // A shell and the system may each send SIGHUP when a terminal closes, and SIGTERM beside it.
  if (signal != SIGHUP && signal != SIGPIPE && signal != SIGUSR1 && told.exchange(true))
    _exit(static_cast<int>(Exit::interrupted));
  if (signal == SIGPIPE && info->si_pid == getpid()) return;  // a write of our own, of which the writer learns
  asked = true;
}

struct sigaction handler() {
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  return action;
}

}  // namespace

void catch_interrupts(const char* last_words, int sender) {
  words = last_words;
  only_sender = sender;
  const struct sigaction action = handler();
  for (const int signal : {SIGINT, SIGTERM, SIGPIPE, SIGUSR1}) sigaction(signal, &action, nullptr);
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

void catch_usr1() {
  const struct sigaction action = handler();
  sigaction(SIGUSR1, &action, nullptr);
}

void ask_to_stop() { asked = true; }
bool interrupted() { return asked; }

InterruptScope::InterruptScope() {
  asked = told = false;
  const struct sigaction action = handler();
  sigaction(SIGINT, &action, &before_);
}

InterruptScope::~InterruptScope() { sigaction(SIGINT, &before_, nullptr); }

}  // namespace pare
