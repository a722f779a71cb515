#include "comm/watch.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/progress.h"
#include "base/text.h"

namespace pare {

Pulse pulse_of(const Comm& comm, bool waits) {
  const std::string activity = Activity::current();
  Pulse p{comm.calls + Activity::begun(), comm.step, comm.timeout, {}, waits, !activity.empty(), false};
  std::snprintf(p.doing, sizeof p.doing, "%s", activity.empty() ? comm.doing.load() : activity.c_str());
  return p;
}

// PARE_SILENCE: for tests.
double silence_limit() {
  const char* const limit = std::getenv("PARE_SILENCE");
  return limit ? std::atof(limit) : 60;
}

double pulse_period(double timeout) { return std::min(silence_limit() / 12, timeout / 4); }

double seconds_since(WatchClock::time_point t) { return std::chrono::duration<double>(WatchClock::now() - t).count(); }

Watch::Watch(int ranks, int own, std::function<std::string(int rank)> name)
    : own_(own), name_(std::move(name)), ranks_(static_cast<size_t>(ranks)) {}

void Watch::hear(int rank, const Pulse& pulse) {
  Rank& r = ranks_[static_cast<size_t>(rank)];
  r.heard = WatchClock::now();
  if (pulse.calls != r.pulse.calls) r.moved = r.heard;
  r.pulse = pulse;
}

std::string Watch::judge() {
  if (seconds_since(judged_) > silence_ / 2)  // this process itself stood still, as all do in a suspended job
    for (Rank& r : ranks_) r.heard = r.moved = WatchClock::now();
  judged_ = WatchClock::now();
  const auto silent = [&](const Rank& r, double later) {
    return !r.ended && seconds_since(r.heard) > silence_ + later;
  };
  const auto speaker = std::find_if(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return !silent(r, 0); });
  const bool speaks = own_ < 0 || speaker - ranks_.begin() == own_;
  const double later = speaks ? 0 : 2;
  for (size_t r = 0; r < ranks_.size(); r++)
    if (silent(ranks_[r], later))
      return describe(static_cast<int>(r),
                      cat("has not been heard of for ", static_cast<int>(seconds_since(ranks_[r].heard)), " s"));
  const bool moves = std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) {
    return !r.ended && std::chrono::duration<double>(r.heard - r.moved).count() <= r.pulse.timeout + later;
  });
  return moves ? "" : stands_still(speaks);
}

std::string Watch::stands_still(bool speaks) {
  // A slow grader or disk is no standstill, but it is told.
  for (size_t r = 0; r < ranks_.size(); r++) {
    if (ranks_[r].ended || !ranks_[r].pulse.busy) continue;
    if (speaks)
      std::fprintf(stderr, "pare: the ranks have waited %d s for %s: it is at %s\n",
                   static_cast<int>(seconds_since(ranks_[r].moved)), name_(static_cast<int>(r)).c_str(),
                   printable(ranks_[r].pulse.doing).c_str());
    for (Rank& other : ranks_) other.moved = WatchClock::now();
    return "";
  }
  // A rank that stands still stops all of them before long: it is the one that does not wait.
  const auto waits = [](const Rank& r) { return r.ended || r.pulse.waits; };
  auto it = std::find_if_not(ranks_.begin(), ranks_.end(), waits);
  if (it == ranks_.end()) it = std::find_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return !r.ended; });
  if (it == ranks_.end()) return "";
  return describe(static_cast<int>(it - ranks_.begin()),
                  cat("has made no progress for ", static_cast<int>(seconds_since(it->moved)), " s"));
}

std::string Watch::describe(int rank, const std::string& what) const {
  const auto state = [&](size_t r) {
    const Pulse& p = ranks_[r].pulse;
    return cat(" in step ", p.step, ", at ", p.doing[0] ? printable(p.doing) : "its start");
  };
  const auto lost = static_cast<size_t>(rank);
  size_t witness = own_ >= 0 ? static_cast<size_t>(own_) : 0;
  while (own_ < 0 && witness < ranks_.size() && (witness == lost || ranks_[witness].ended)) witness++;
  return cat(name_(rank), " ", what, ": it was", state(lost),
             witness < ranks_.size() ? cat("; rank ", witness, " is", state(witness)) : "");
}

}  // namespace pare
