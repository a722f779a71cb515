// cuda/ONE_OP.md has what `make one-op` prints: one program with the emulator, one with its access checker.
#include <gtest/gtest.h>

#include "tests/program.h"

namespace pare::test {
namespace {

TEST(CudaOneOp, ThePageHasWhatIsPrinted) {
  const std::filesystem::path build = program_path().parent_path();
  const std::string printed = printed_block(build / "one_op");
  if (printed.empty())
    GTEST_SKIP() << build / "one_op"
                 << " is not built: run `make one-op`";
  const bool checks = build.filename() == "check";
  EXPECT_EQ(generated_block("cuda/ONE_OP.md", checks ? "checked race" : "one op"), printed) << "run `make readme`";
}

}  // namespace
}  // namespace pare::test
