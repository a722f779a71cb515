// Pieces of work that are launched together: what is called in them runs, whole and in order.
#include <gtest/gtest.h>

#include "base/arena.h"
#include "kernel_table.h"
#include "ops/device.h"

namespace pare::test {
namespace {

class Together : public testing::Test {
 protected:
  Tensor vector(const std::vector<float>& values) {
    const Tensor t = arena.alloc("vector", DType::f32, {std::ssize(values)});
    device.upload({t, values.data()});
    return t;
  }
  std::vector<float> read(const Tensor& t) {
    std::vector<float> host(t.size());
    device.download({host.data(), t});
    return host;
  }
  Device device{table_kernels};
  Arena arena{"a", *table_kernels.memory, 1 << 20};
};

TEST_F(Together, RunsWhenItReturns) {
  const Tensor x = vector({1, 2, 3}), y = vector({10, 20, 30}), z = vector({0, 0, 0});
  for (int i = 0; i < 3; i++) {
    EXPECT_TRUE(device.together([&] {
      device.accumulate({y, x});
      device.accumulate({z, y});
    }));
  }
  EXPECT_EQ(read(y), (std::vector<float>{13, 26, 39}));
  EXPECT_EQ(read(z), (std::vector<float>{36, 72, 108}));
  EXPECT_TRUE(device.together([] {}));
}

// The same kernels with other addresses and sizes, and more kinds of work than graphs are kept of.
TEST_F(Together, ServesWhateverDiffers) {
  for (int round = 0; round < 2; round++)
    for (int kind = 1; kind < 12; kind++) {
      const ArenaScope scope(arena);
      const Tensor x = vector(std::vector<float>(100 * kind + round, 1)), y = vector(std::vector<float>(x.size(), 0));
      EXPECT_TRUE(device.together([&] {
        for (int i = 0; i < kind; i++) device.accumulate({y, x});
      }));
      EXPECT_EQ(read(y), std::vector<float>(x.size(), static_cast<float>(kind)));
    }
}

// What must not overtake a kernel does not.
TEST_F(Together, KeepsTheOrderOfUploadsDownloadsAndZeros) {
  const Tensor x = vector({1, 2, 3}), y = vector({0, 0, 0});
  const std::vector<float> other = {5, 6, 7};
  EXPECT_TRUE(device.together([&] {
    device.upload({x, other.data()});  // before the first kernel
    device.accumulate({y, x});
  }));
  EXPECT_EQ(read(y), other);
  EXPECT_FALSE(device.together([&] {
    device.accumulate({y, x});
    device.upload({x, std::vector<float>{1, 1, 1}.data()});
    device.accumulate({y, x});
  }));
  EXPECT_EQ(read(y), (std::vector<float>{11, 13, 15}));
  EXPECT_FALSE(device.together([&] {
    device.accumulate({y, x});
    device.zero({x});
    device.accumulate({y, x});
  }));
  EXPECT_EQ(read(y), (std::vector<float>{12, 14, 16}));
  std::vector<float> between;
  EXPECT_FALSE(device.together([&] {
    device.accumulate({x, y});
    between = read(x);
    device.accumulate({x, y});
  }));
  EXPECT_EQ(between, (std::vector<float>{12, 14, 16}));
  EXPECT_EQ(read(x), (std::vector<float>{24, 28, 32}));
}

TEST_F(Together, NothingRunsOfWhatThrows) {
  const Tensor x = vector({1, 2, 3}), y = vector({0, 0, 0});
  EXPECT_THROW(device.together([&] {
    device.accumulate({y, x});
    device.accumulate({y, x.rows(0, 2)});
  }),
               std::logic_error);
  EXPECT_EQ(read(y), (std::vector<float>{0, 0, 0}));
  EXPECT_THROW(device.together([&] { device.together([] {}); }), std::logic_error);
  EXPECT_TRUE(device.together([&] { device.accumulate({y, x}); }));
  EXPECT_EQ(read(y), read(x));
}

}  // namespace
}  // namespace pare::test
