// Which tile of the wgmma kernels a product takes (linear_wgmma.cuh), by a model of its time.  The bits are the same.
//
// A tile of 128 rows and n columns goes through k in stages of 64.  A stage takes the longest of three: the tensor
// cores (128 x n x 64 products at 2048 a clock), the way of its operands into the multiprocessor, and their way out of
// L2, which all busy multiprocessors share.  The two rates are fitted to 15 products on an H100, which the model gives
// within 8 % (root of the mean square); a tile's beginning and end, which nothing overlaps, to the same products at two
// depths.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace pare {

constexpr double kBytesIntoSm = 51, kBytesOutOfL2 = 4950;  // a clock
constexpr double kTileEnds = 52;                           // clocks for each column of a tile

// Clocks of a product of `rows` x `columns` results over `depth` values of k by tiles of n columns, on so many
// multiprocessors.
inline double tile_clocks(int64_t rows, int64_t columns, int64_t depth, int n, int multiprocessors) {
  const auto parts = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
  const int64_t tiles = parts(rows, 128) * parts(columns, n), waves = parts(tiles, multiprocessors);
  const auto busy = static_cast<double>(std::min<int64_t>(tiles, multiprocessors));
  const double bytes = (128.0 + n) * 128;
  const double stage = std::max({n * 4.0, bytes / kBytesIntoSm, bytes * busy / kBytesOutOfL2});
  return static_cast<double>(waves) * (stage * static_cast<double>(parts(depth, 64)) + kTileEnds * n);
}

// Columns of the tiles that there are: of results that are sums of chunks, of others, and of gradients of weights.
constexpr std::initializer_list<int> kNarrowTiles = {64, 128, 192}, kWideTiles = {128, 144, 256},
                                     kGradientTiles = {128, 192};

// The one of `widths` with the fewest clocks.
inline int best_tile(std::initializer_list<int> widths, int64_t rows, int64_t columns, int64_t depth,
                     int multiprocessors) {
  return *std::min_element(widths.begin(), widths.end(), [&](int a, int b) {
    return tile_clocks(rows, columns, depth, a, multiprocessors) <
           tile_clocks(rows, columns, depth, b, multiprocessors);
  });
}

}  // namespace pare
