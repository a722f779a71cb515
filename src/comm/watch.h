// The end of a job of processes in which a rank is silent or no rank makes progress.
#pragma once
#include <chrono>
#include <functional>

#include "comm/comm.h"

namespace pare {

// Sent by each rank every few seconds: how far it is.
struct Pulse {
  uint64_t calls;
  int64_t step;
  double timeout;  // Comm::timeout
  char doing[128];
  bool waits;  // for others
  bool busy;   // an Activity of the host goes on
  bool last;   // nothing follows
};
Pulse pulse_of(const Comm& comm, bool waits);

double silence_limit();               // seconds after which a silent rank is lost
double pulse_period(double timeout);  // seconds between two pulses of a rank

using WatchClock = std::chrono::steady_clock;
double seconds_since(WatchClock::time_point t);

class Watch {
 public:
  // `own`: the rank that watches, -1 if it is no rank.  `name`: "rank 1 on n1".
  Watch(int ranks, int own, std::function<std::string(int rank)> name);
  void hear(int rank, const Pulse& pulse);
  void has_ended(int rank) { ranks_[static_cast<size_t>(rank)].ended = true; }

  // To be called several times a second.  Returns why the job must end: a rank is silent, or every rank has said for
  // `timeout` that it makes no progress; empty: it goes on.  On a busy machine a pulse comes late and tells of the
  // past. The lowest rank that is heard of speaks, others 2 s later.  Prints for whom the ranks wait if its host works.
  std::string judge();
  // "rank 1 on n1 has ...: it was in step 3, at rollout; rank 0 is in step 3, at rollout"
  std::string describe(int rank, const std::string& what) const;

 private:
  struct Rank {
    Pulse pulse{};
    WatchClock::time_point heard = WatchClock::now(), moved = heard;  // heard of, and of its progress
    bool ended = false;
  };
  std::string stands_still(bool speaks);

  const int own_;
  const double silence_ = silence_limit();
  const std::function<std::string(int)> name_;
  std::vector<Rank> ranks_;
  WatchClock::time_point judged_ = WatchClock::now();
};

}  // namespace pare
