// Runs all tests and ends with one plain line of counts.
#include <gtest/gtest.h>

#include <cstdio>
#ifdef PARE_CUDA_TESTS
#include "ops/ops.h"
#endif

int main(int argc, char** argv) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";  // the thread pool runs
  testing::InitGoogleTest(&argc, argv);
#ifdef PARE_CUDA_TESTS
  try {
    std::printf("on %s\n", pare::table_cuda.open().c_str());
  } catch (const pare::Error& e) {
    std::fprintf(stderr, "no test was run: %s\n", e.what());
    return 1;
  }
#endif
  const int result = RUN_ALL_TESTS();
  const testing::UnitTest& t = *testing::UnitTest::GetInstance();
  std::printf("%d passed, %d failed, %d skipped\n", t.successful_test_count(), t.failed_test_count(),
              t.skipped_test_count());
  return result;
}
