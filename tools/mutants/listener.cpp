// In the test program: writes a line for each test to PARE_MUTANT_TESTS: name, P or F, milliseconds and the numbers of
// the mutants that it reached.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "tools/mutants/mutant.h"

namespace pare::mutant {
namespace {

class Listener : public testing::EmptyTestEventListener {
  size_t size_ = std::filesystem::file_size(std::getenv("PARE_MUTANT_REACHED"));

  void OnTestStart(const testing::TestInfo&) override { std::fill(reached, reached + size_, 0); }
  void OnTestEnd(const testing::TestInfo& test) override {
    std::FILE* out = std::fopen(std::getenv("PARE_MUTANT_TESTS"), "a");
    if (!out) return;
    std::fprintf(out, "%s.%s %c %d", test.test_suite_name(), test.name(), test.result()->Failed() ? 'F' : 'P',
                 static_cast<int>(test.result()->elapsed_time()));
    for (size_t n = 0; n < size_; n++)
      if (reached[n]) std::fprintf(out, " %zu", n);
    std::fprintf(out, "\n");
    std::fclose(out);
  }
};

const bool listening = [] {
  if (std::getenv("PARE_MUTANT_TESTS")) testing::UnitTest::GetInstance()->listeners().Append(new Listener);
  return true;
}();

}  // namespace
}  // namespace pare::mutant
