#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pare {

namespace {

thread_local bool inside = false;  // in a parallel region: nested calls run inline

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Workers join a job while it is open.  The caller waits only for those that joined, so a worker that is asleep or not
// scheduled delays nobody.  `state_` packs into one word the number of the job, whether it is open, and its workers.
// After a job workers spin for tens of microseconds, since ops follow closely, then sleep.
class Pool {
 public:
  explicit Pool(int n) {
    for (int i = 1; i < n; i++) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    stop_ = true;
    state_.fetch_add(kJob);
    { std::lock_guard lock(mutex_); }
    wake_.notify_all();
    for (auto& t : workers_) t.join();
  }
  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(int64_t n, int64_t chunk, RangeFn fn, void* context) {
    // No worker is in a job and none can join one, so these belong to the caller alone.
    fn_ = fn;
    context_ = context;
    n_ = n;
    chunk_ = chunk;
    next_.store(0, std::memory_order_relaxed);
    state_.fetch_add(kJob + kOpen);
    if (sleeping_.load() > 0) {
      { std::lock_guard lock(mutex_); }
      wake_.notify_all();
    }
    drain();
    uint64_t state = state_.fetch_sub(kOpen) - kOpen;
    for (int spins = 0; state & kWorkers; state = state_.load(std::memory_order_acquire))
      if (spins++ < kSpins)
        relax();
      else
        std::this_thread::yield();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  static constexpr int kSpins = 2000;
  static constexpr uint64_t kWorkers = 0xffff, kOpen = 0x10000, kJob = 0x20000;

  void drain() {
    inside = true;
    for (int64_t i; (i = next_.fetch_add(chunk_, std::memory_order_relaxed)) < n_;) try {
        fn_(context_, i, std::min(i + chunk_, n_));
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
    inside = false;
  }

  void work() {
    for (uint64_t seen = 0;;) {
      uint64_t state = state_.load(std::memory_order_acquire);
      for (int spins = 0; state / kJob == seen && spins < kSpins; spins++) {
        relax();
        state = state_.load(std::memory_order_acquire);
      }
      if (state / kJob == seen) {
        std::unique_lock lock(mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return (state = state_.load()) / kJob != seen; });
        sleeping_.fetch_sub(1);
      }
      if (stop_) return;
      seen = state / kJob;
      // Join, unless the job has been closed meanwhile; others may join or leave at the same time.
      while (state & kOpen && state / kJob == seen && !state_.compare_exchange_weak(state, state + 1)) {
      }
      if (!(state & kOpen) || state / kJob != seen) continue;
      drain();
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> workers_;
  std::atomic<uint64_t> state_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::exception_ptr error_;
  RangeFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t n_ = 0, chunk_ = 1;
};

thread_local std::unique_ptr<Pool> pool;

}  // namespace

void set_threads(int n) {
  expect(!inside, "set_threads inside parallel_for");
  pool.reset();
  pool = std::make_unique<Pool>(n > 0 ? n : std::max(1u, std::thread::hardware_concurrency()));
}

int threads() {
  if (!pool) set_threads(0);
  return pool->size();
}

void parallel_ranges(int64_t n, int64_t grain, RangeFn fn, void* context) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (inside || n <= grain || threads() == 1) return fn(context, 0, n);
  // A few ranges per thread, so that uneven ones level out.
  const int64_t pieces = std::min<int64_t>((n + grain - 1) / grain, threads() * 4);
  pool->run(n, (n + pieces - 1) / pieces, fn, context);
}

}  // namespace pare
