#include "comm/threads.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "comm/shared.h"

namespace pare {

namespace {

struct Ended {};  // thrown in a rank that waits for one that has ended

// Where ranks meet.
class Room {
 public:
  Room(int nodes, int node_ranks)
      : ranks(nodes * node_ranks), node_ranks(node_ranks), out(static_cast<size_t>(ranks)), in(out) {}

  // Until all ranks are here.
  void meet() {
    std::unique_lock lock(mutex_);
    if (closed_) throw Ended();
    const uint64_t round = round_;
    if (++here_ == ranks) {
      here_ = 0;
      round_++;
      all_here_.notify_all();
      return;
    }
    all_here_.wait(lock, [&] { return round_ != round || closed_; });
    if (round_ == round) throw Ended();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    all_here_.notify_all();
  }

  const int ranks, node_ranks;
  std::vector<std::span<const Comm::Piece>> out, in;  // [ranks]

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  int here_ = 0;
  uint64_t round_ = 0;
  bool closed_ = false;
};

class Member final : public Comm {
 public:
  Member(Room& room, int rank) : room_(room), rank_(rank) {}
  int rank() const override { return rank_; }
  int ranks() const override { return room_.ranks; }
  int node_rank() const override { return rank_ % room_.node_ranks; }
  int node_ranks() const override { return room_.node_ranks; }
  std::string host() const override { return cat("node ", rank_ / room_.node_ranks); }

  void exchange(std::span<const Piece> out, std::span<const Piece> in) override {
    const auto n = static_cast<size_t>(room_.ranks), own = static_cast<size_t>(rank_);
    expect(out.size() == n && in.size() == n, "an exchange of ", out.size(), " and ", in.size(), " pieces, of ", n,
           " ranks");
    room_.out[own] = out;
    room_.in[own] = in;
    meet();
    std::string wrong;
    for (size_t q = 0; q < n && wrong.empty(); q++) wrong = cat(differs(q, own), differs(own, q));
    for (size_t q = 0; q < n && wrong.empty(); q++) {
      const Piece from = room_.out[q][own];
      if (in[q].bytes && in[q].data != from.data)  // a piece already in its place is being read by the others
        std::memmove(in[q].data, from.data, in[q].bytes);
    }
    meet();
    calls++;
    expect(wrong.empty(), wrong);
  }
  [[noreturn]] void abort(int code) override { _exit(code); }

 private:
  void meet() {
    const auto start = std::chrono::steady_clock::now();
    room_.meet();
    waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  std::string differs(size_t from, size_t to) const {
    const size_t sent = room_.out[from][to].bytes, expected = room_.in[to][from].bytes;
    if (sent == expected) return "";
    return cat("rank ", from, " sends ", sent, " bytes to rank ", to, ", which expects ", expected);
  }

  Room& room_;
  const int rank_;
};

}  // namespace

void run_ranks(int nodes, int node_ranks, const std::function<void(Comm&)>& f) {
  if (nodes * node_ranks == 1) return f(self());
  Room room(nodes, node_ranks);
  std::vector<std::exception_ptr> errors(static_cast<size_t>(room.ranks));
  std::atomic<bool> left = false;
  const auto rank = [&](int r) {
    try {
      Member comm(room, r);
      f(comm);
    } catch (const Ended&) {
      left = true;
    } catch (...) {
      errors[static_cast<size_t>(r)] = std::current_exception();
    }
    room.close();
  };
  std::vector<std::jthread> threads;
  try {
    for (int r = 0; r < room.ranks; r++) threads.emplace_back(rank, r);
  } catch (const std::system_error& e) {
    room.close();
    throw Error(Exit::failed, cat("no threads for ", room.ranks, " ranks: ", e.what()));
  }
  threads.clear();  // ends when they do
  for (const std::exception_ptr& e : errors)
    if (e) std::rethrow_exception(e);
  expect(!left, "a rank ended while others waited for it");
}

}  // namespace pare
