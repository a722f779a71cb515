// A device: a table of ops with the decorators that watch every call.  All code above the tables calls ops through it.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/cost.h"
#include "ops/list.h"

namespace pare {

// Profile of the ops that ran: per phase ("rollout", "learner", ...) and op, the number of calls, their cost and, where
// timed, seconds.
struct Ledger {
  struct Line {
    int64_t calls = 0;
    Cost cost;
    double seconds = 0;
    int64_t min_rows = 0;                // linear ops: the smallest number of rows of a call
    void scale(double factor);           // of what adds up
    bool operator==(const Line&) const;  // seconds aside
  };
  std::map<std::string, std::map<std::string, Line>> phases;

  Cost total(const std::string& phase) const;
  double seconds(const std::string& phase) const;
  void add(const Ledger& other);
  void clear() { phases.clear(); }
};

class Device {
 public:
  explicit Device(const Table& table, Stream stream = {}, Comm& comm = world())
      : comm(comm), table_(table), stream_(stream) {}
  ~Device();  // waits, if uploads may be under way
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Decorators; all off at first.  Where the table has ranges for a profiler, every call is one.
  Ledger* ledger = nullptr;  // counts every call
  bool timed = false;        // the ledger takes seconds too (synchronous tables only)
  // Gives the ledger's seconds if calls are not timed.
  std::function<double(const char* op, const Cost&, const std::function<Stretch(int)>& stretch)> estimate;
  bool check_nan = false;  // throws Error(Exit::non_finite) naming op, output and element when an output is not finite
  std::string phase = "main";  // heading of the ledger's lines
  bool graphs = true;          // together() launches graphs, where the table has them

  Comm& comm;  // between the ranks whose devices work together
  const char* name() const { return table_.name; }
  bool planning() const { return &table_ == &table_null; }
  const Table& table() const { return table_; }
  const Memory& memory() const { return *table_.memory; }
  // Throws Error(Exit::usage): attention with such heads cannot be computed.
  void expect_head_dim(DType act, int64_t d) const {
    if (table_.expect_head_dim) table_.expect_head_dim(act, d);
  }

  // Until all that was called is done.
  void wait();

  // Runs `calls`, which calls ops.  Where the table has graphs, their kernels are launched when it returns, all at
  // once; the decorators see every call as ever.  For sequences of ops that come again and again: the first of a kind
  // takes longer.  Returns whether it was one launch: it is not if an upload, a download or a zero follows the first
  // kernel, or under check_nan, which reads every output.
  bool together(const std::function<void()>& calls);

  // The host memory that an upload reads may be changed as soon as the call returns.  An upload waits only where more
  // than kStaging bytes would be under way.
  static constexpr size_t kStaging = 64 << 20;

#define X(op, Args) \
  void op(const Args& a) { call(#op, table_.op, a); }
  PARE_OPS(X)
#undef X

 private:
  template <class Args>
  void call(const char* op, void (*fn)(const Args&, Stream), const Args& a);

  template <class Args>
  void check_outputs(const char* op, const Args& a);
  void stage(const Upload& a);

  const Table& table_;
  Stream stream_;
  std::unique_ptr<Graphs> graphs_;  // from the first together() on
  char* staging_ = nullptr;         // kStaging bytes of Table::staging, from the first upload on
  size_t staged_ = 0;               // of them, those that uploads may not have read yet
};

// Names a scope for a profiler of the device; nothing where the table has none.  Phases, layers and ops do so.
class Range {
 public:
  Range(const Device& device, const char* name) : end_(device.table().range_end) {
    if (end_) device.table().range_begin(name);
  }
  Range(const Device& device, const char* what, int64_t number);  // "layer 3"
  ~Range() {
    if (end_) end_();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  void (*const end_)();
};

// Sets the device's phase for a scope.
class Phase {
 public:
  Phase(Device& device, std::string name)
      : device_(device), before_(std::exchange(device.phase, std::move(name))), range_(device, device.phase.c_str()) {}
  ~Phase() { device_.phase = std::move(before_); }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  Device& device_;
  std::string before_;
  const Range range_;
};

}  // namespace pare
