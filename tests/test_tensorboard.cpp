// The TensorBoard event file: its checksums, its bytes, and what TensorBoard itself reads in it.
#include <cmath>
#include <cstdlib>

#include "base/error.h"
#include "run/tensorboard.h"
#include "tests/program.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

class Tensorboard : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  const fs::path folder_ = fs::path(testing::TempDir()) / cat("pare_tensorboard_", getpid());
  const std::string file_ = (folder_ / "events.out.tfevents.test").string();
};

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes)
    for (const int digit : {(c >> 4) & 15, c & 15}) text += "0123456789abcdef"[digit];
  return text;
}

Metrics metrics(std::initializer_list<std::pair<const char*, double>> values) {
  Metrics m;
  for (const auto& [name, value] : values) m.set(name, value);
  return m;
}

TEST_F(Tensorboard, ChecksumsOfTheStandard) {  // RFC 3720, appendix B.4
  std::string up, down;
  for (int i = 0; i < 32; i++) {
    up += static_cast<char>(i);
    down += static_cast<char>(31 - i);
  }
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
  EXPECT_EQ(crc32c(up), 0x46DD794Eu);
  EXPECT_EQ(crc32c(down), 0x113FDB5Cu);
}

// The bytes that TensorBoard 2.21's own RecordWriter makes of these events.
TEST_F(Tensorboard, BytesAreThoseOfTensorboardsWriter) {
  const std::string version = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c";
  const std::string first =
      "2500000000000000eabc36f30900001040fc54d9412a1a0a180a116372697469632f73636f72652f6d65616e150000003ff2521886";
  const std::string second =
      "3200000000000000241956ec0900006040fc54d94110ac022a240a180a116372697469632f73636f72652f6d65616e15000040bf0a080a01"
      "61156f12833ab1a8531b";
  EXPECT_EQ(hex(tensorboard_header(1.5)), version);
  const Metrics m = metrics({{"critic/score/mean", 0.5}, {"missing", NAN}, {"endless", INFINITY}});
  EXPECT_EQ(hex(tensorboard_event(0, 1700000000.25, m)), first);
  EXPECT_EQ(hex(tensorboard_event(300, 1700000001.5, metrics({{"critic/score/mean", -0.75}, {"a", 1e-3}}))), second);
}

TEST_F(Tensorboard, ItsOwnReaderReadsTheScalars) {
  if (std::system("python3 -c 'import tensorboard' 2>/dev/null") != 0)
    GTEST_SKIP() << "Python without the package tensorboard: the event file is not read back";
  std::string file = tensorboard_header(1700000000);
  for (int step = 0; step < 3; step++)
    file +=
        tensorboard_event(step, 1700000000 + step, metrics({{"critic/score/mean", 0.25 * step}, {"actor/lr", 1e-6}}));
  file += tensorboard_event(1 << 20, 1700000003, metrics({{"critic/score/mean", -1.5}}));
  file += tensorboard_event(1 << 21, 1700000004, metrics({{"critic/score/mean", 7}})).substr(0, 30);  // killed
  std::ofstream(file_, std::ios::binary) << file;
  std::ofstream(folder_ / "read.py") << R"(import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
for tag in sorted(events.Tags()["scalars"]):
    for e in events.Scalars(tag):
        print(tag, e.step, e.wall_time, e.value)
)";
  const std::string out = (folder_ / "out").string();
  const std::string command = cat("python3 ", folder_.string(), "/read.py ", file_, " >", out, " 2>", out, ".err");
  ASSERT_EQ(std::system(command.c_str()), 0) << read_text(out + ".err");
  EXPECT_EQ(read_text(out),
            "actor/lr 0 1700000000.0 9.999999974752427e-07\n"
            "actor/lr 1 1700000001.0 9.999999974752427e-07\n"
            "actor/lr 2 1700000002.0 9.999999974752427e-07\n"
            "critic/score/mean 0 1700000000.0 0.0\n"
            "critic/score/mean 1 1700000001.0 0.25\n"
            "critic/score/mean 2 1700000002.0 0.5\n"
            "critic/score/mean 1048576 1700000003.0 -1.5\n");
  EXPECT_EQ(read_text(out + ".err").find("rror"), std::string::npos) << read_text(out + ".err");
}

}  // namespace
}  // namespace pare::test
