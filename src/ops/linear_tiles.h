// Chooses the tile of a product by wgmma (cuda/linear_wgmma.cuh), by a model of its time, which plans use too.  The
// bits do not depend on the tile.
//
// A tile goes through k in stages of 64.  A stage takes the longest of three: the tensor cores (rows x columns x 64
// products at 2048 a clock), the way of its operands into the multiprocessor, and their way out of L2, which all busy
// multiprocessors share.  The two rates are fitted to 15 products on an H100, which the model gives within 8 % (root of
// the mean square); a tile's beginning and end, which nothing overlaps, to the same products at two depths.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace pare {

constexpr double kBytesIntoSm = 51, kBytesOutOfL2 = 4950;  // a clock
constexpr double kTileEnds = 52;                           // clocks for each column of a tile

struct WgmmaTile {
  int rows, columns;
  bool operator==(const WgmmaTile&) const = default;
};
// The tiles for results whose k is one part (linear_part), for those with several, and for gradients of weights.
constexpr std::initializer_list<WgmmaTile> kOnePartTiles = {{64, 64},   {128, 64},  {128, 128},
                                                            {128, 144}, {128, 192}, {128, 256}},
                                           kPartsTiles = {{64, 64}, {128, 64}, {128, 128}, {128, 192}},
                                           kGradientTiles = {{128, 128}, {128, 192}, {128, 256}};

// Clocks of a product of `rows` x `columns` results over `depth` values of k, on so many multiprocessors.
inline double tile_clocks(int64_t rows, int64_t columns, int64_t depth, WgmmaTile t, int multiprocessors) {
  const auto parts = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
  const int64_t tiles = parts(rows, t.rows) * parts(columns, t.columns), waves = parts(tiles, multiprocessors);
  const auto busy = static_cast<double>(std::min<int64_t>(tiles, multiprocessors));
  const double bytes = (t.rows + t.columns) * 128.0, products = t.rows * t.columns / 32.0;
  const double stage = std::max({products, bytes / kBytesIntoSm, bytes * busy / kBytesOutOfL2});
  return static_cast<double>(waves) * (stage * static_cast<double>(parts(depth, 64)) + kTileEnds * t.columns);
}

// The one of `tiles` with the fewest clocks.
inline WgmmaTile best_tile(std::initializer_list<WgmmaTile> tiles, int64_t rows, int64_t columns, int64_t depth,
                           int multiprocessors) {
  const auto clocks = [&](WgmmaTile t) { return tile_clocks(rows, columns, depth, t, multiprocessors); };
  return *std::min_element(tiles.begin(), tiles.end(), [&](WgmmaTile a, WgmmaTile b) { return clocks(a) < clocks(b); });
}

// The least clocks, over those of tensor cores that are all busy.
inline double tile_stretch(std::initializer_list<WgmmaTile> tiles, int64_t rows, int64_t columns, int64_t depth,
                           int multiprocessors) {
  const double busy = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth) / 2048;
  const double clocks =
      tile_clocks(rows, columns, depth, best_tile(tiles, rows, columns, depth, multiprocessors), multiprocessors);
  return busy > 0 ? clocks * multiprocessors / busy : 1;
}

}  // namespace pare
