// Pieces of work that are launched together: what is called in them runs, whole and in order.
#include <gtest/gtest.h>

#include "base/arena.h"
#include "kernels.h"
#include "ops/attention.h"
#include "ops/data.h"
#include "ops/device.h"
#include "ops/paged.h"

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
  for (const int kind : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 2})
    for (int round = 0; round < 3; round++) {
      const ArenaScope scope(arena);
      if (round == 2) vector({0});
      const Tensor x = vector(std::vector<float>(100 * kind + round % 2, 1)),
                   y = vector(std::vector<float>(x.size(), 0));
      EXPECT_TRUE(device.together([&] {
        for (int i = 0; i < kind; i++) device.accumulate({y, x});
      }));
      EXPECT_EQ(read(y), std::vector<float>(x.size(), static_cast<float>(kind)));
    }
}

// A copy of pages has as many blocks as pairs, and no parameter that says so.
TEST_F(Together, ServesGridsThatDiffer) {
  std::vector<float> pages(4 * 16);
  for (size_t i = 0; i < pages.size(); i++) pages[i] = static_cast<float>(i / 16);
  const Tensor pairs = arena.alloc("pairs", DType::i32, {2, 2});
  const std::vector<int32_t> copies = {0, 2, 1, 3};
  device.upload({pairs, copies.data()});
  for (const int64_t n : {1, 2}) {
    Tensor k = vector(pages), v = vector(pages);
    k = make_tensor(k.data, DType::f32, {4, 1, 1, 16});
    v = make_tensor(v.data, DType::f32, {4, 1, 16, 1});
    EXPECT_TRUE(device.together([&] { device.kv_copy_pages({k, v, pairs.rows(0, n)}); }));
    const std::vector<float> copied = read(k.flat());
    EXPECT_EQ(copied[2 * 16], 0);
    EXPECT_EQ(copied[3 * 16], n == 2 ? 1 : 3);
    arena.rewind(arena.mark() - 2 * pages.size() * sizeof(float));  // the same addresses
  }
}

// The same parameters, but another kernel.
TEST_F(Together, TellsKernelsApart) {
  const Tensor index = arena.alloc("index", DType::i32, {2, 2});
  const std::vector<int32_t> swapped = {1, 0, 0, 1};
  device.upload({index, swapped.data()});
  const Tensor x = vector({1, 2, 3, 4, 5, 6}), y = vector(std::vector<float>(6));
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto swap = [&] {
      device.zero({y});
      device.together([&] {
        device.copy_rows({make_tensor(y.data, dtype, {2, 3}), make_tensor(x.data, dtype, {2, 3}), index});
      });
      return read(y);
    };
    device.graphs = false;
    const std::vector<float> expected = swap();
    device.graphs = true;
    EXPECT_EQ(swap(), expected) << dtype_name(dtype);
  }
}

// One kernel with more shared memory and then with less, both more than a launch gets without asking.
TEST_F(Together, ServesSharedMemoryOfSeveralSizes) {
  const std::vector<int32_t> segment = {0, 4, 0, 0};
  const Tensor segments = arena.alloc("segments", DType::i32, {1, 4});
  device.upload({segments, segment.data()});
  const auto attend = [&](int64_t d) {
    std::vector<float> values(static_cast<size_t>(4 * d));
    for (size_t i = 0; i < values.size(); i++) values[i] = static_cast<float>(i % 7) - 3;
    const auto heads = [&] {
      const Tensor t = vector(values);
      return make_tensor(t.data, DType::f32, {4, 1, d});
    };
    const Tensor o = heads(), q = heads(), k = heads(), v = heads();
    return AttnFwd{o, arena.alloc("lse", DType::f32, {4, 1}), q, k, v, k.rows(0, 0), v.rows(0, 0), segments, 10, 0.1f};
  };
  const AttnFwd wide = attend(172), narrow = attend(144);
  device.graphs = false;
  device.attn_fwd(wide);
  device.attn_fwd(narrow);
  const std::vector<float> a = read(wide.o.flat()), b = read(narrow.o.flat());
  device.graphs = true;
  for (const auto& order : {std::array{&wide, &narrow}, std::array{&narrow, &wide}}) {
    device.zero({wide.o});
    device.zero({narrow.o});
    device.wait();
    EXPECT_TRUE(device.together([&] {
      device.attn_fwd(*order[0]);
      device.attn_fwd(*order[1]);
    }));
    EXPECT_EQ(read(wide.o.flat()), a);
    EXPECT_EQ(read(narrow.o.flat()), b);
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

// What tools/nsys.sh and ncu.sh ask for.
TEST_F(Together, TheEnvironmentCanTurnGraphsOff) {
  const Tensor x = vector({1, 2, 3}), y = vector({0, 0, 0});
  setenv("PARE_GRAPHS", "0", 1);
  EXPECT_FALSE(device.together([&] { device.accumulate({y, x}); }));
  unsetenv("PARE_GRAPHS");
  EXPECT_EQ(read(y), read(x));
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
