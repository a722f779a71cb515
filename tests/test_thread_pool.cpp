#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "base/thread_pool.h"

namespace pare {

namespace {

struct ThreadPool : testing::Test {
  ~ThreadPool() override { set_threads(0); }
};

// Ranges are disjoint and cover everything, nested loops too.
TEST_F(ThreadPool, CoversEveryIndexOnce) {
  for (int n : {1, 2, 5}) {
    set_threads(n);
    EXPECT_EQ(threads(), n);
    for (int64_t size : {0, 1, 2, 7, 64, 1001})
      for (int64_t grain : {0, 1, 3, 100}) {
        std::vector<int> hits(static_cast<size_t>(size));
        parallel_for(size, grain, [&](int64_t begin, int64_t end) {
          ASSERT_LT(begin, end);
          parallel_for(end - begin, 1, [&](int64_t b, int64_t e) {
            for (int64_t i = begin + b; i < begin + e; i++) hits[static_cast<size_t>(i)]++;
          });
        });
        for (int h : hits) ASSERT_EQ(h, 1) << size << " in ranges of " << grain << " on " << n;
      }
  }
}

// Jobs that follow one another at once: a late worker of one must never run a range of the next.
TEST_F(ThreadPool, ManySmallJobsInARow) {
  set_threads(4);
  int64_t total = 0;
  for (int64_t job = 0; job < 20000; job++) {
    int64_t parts[3] = {};
    parallel_for(3, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) parts[i] = job + i;
    });
    total += parts[0] + parts[1] + parts[2] - 3 * job;
  }
  EXPECT_EQ(total, 20000 * 3);
}

TEST_F(ThreadPool, ExceptionsReachTheCaller) {
  for (int n : {1, 3}) {
    set_threads(n);
    EXPECT_THROW(parallel_for(50, 1,
                              [](int64_t begin, int64_t end) {
                                if (begin <= 31 && 31 < end) throw std::runtime_error("31");
                              }),
                 std::runtime_error);
    int64_t sum = 0;
    parallel_for(1, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
    EXPECT_EQ(sum, 1) << "the pool works on";
  }
}

}  // namespace

}  // namespace pare
