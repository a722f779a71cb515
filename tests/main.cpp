// Runs all tests and ends with one plain line of counts.
#include <gtest/gtest.h>

#include <cstdio>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const testing::UnitTest& t = *testing::UnitTest::GetInstance();
  std::printf("%d passed, %d failed, %d skipped\n", t.successful_test_count(), t.failed_test_count(),
              t.skipped_test_count());
  return result;
}
