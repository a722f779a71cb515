// Chooses the tile of a product by wgmma (cuda/linear_wgmma.cuh), by a model of its time, which plans use too.  The
// bits do not depend on the tile.
//
// A tile goes through k in stages of 64.  A stage takes the longest of three: the tensor cores (rows x columns x 64
// products at 2048 a clock), the way of its operands into the multiprocessor, and their way out of L2, which all busy
// multiprocessors share.  A cluster of two blocks, on neighbouring tiles of the same columns, reads the operand of the
// columns from L2 once for both.  The two rates are fitted to 15 products on an H100, which the model gives within 8 %
// (root of the mean square); a tile's beginning and end, which nothing overlaps, to the same products at two depths.
// Where the parts of k are apart, each is a tile, whose block waits for the others of its cluster and reads a share of
// the sums of all of them; where they are added in turn, it reads and writes the sums of the parts before.  Neither is
// measured yet, nor are tiles of 32 columns, of 256 rows and of clusters.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>

namespace pare {

constexpr double kBytesIntoSm = 51, kBytesOutOfL2 = 4950;  // a clock
constexpr double kTileEnds = 52;                           // clocks for each column of a tile of 128 rows or fewer
constexpr double kArrival = 1000, kPartLatency = 500;      // clocks; to see that all parts are there, to read sums
constexpr int kNeighbours = 16;                            // multiprocessors that can hold a cluster of any size

struct WgmmaTile {
  int rows, columns, cluster = 1;  // cluster: the number of blocks, one above another
  bool operator==(const WgmmaTile&) const = default;
};
// linear.cu compiles a kernel for each.  The first of the fastest is taken: a cluster that takes no less time takes
// fewer bytes.
//
// The tiles for results whose k is one part (linear_part), or whose parts are apart; for such results of few rows that
// are normed; for queries, keys and values that are rotated and written (KvWrite); for logits whose tiles are summed up
// (VocabSums); for gates and ups, half of the columns each; for several parts in one tile; for parts that are added
// in turn; and for gradients.
constexpr std::initializer_list<WgmmaTile> kOnePartTiles = {{128, 192, 2}, {128, 256, 2}, {256, 192, 2}, {64, 32},
                                                            {64, 64},      {128, 64},     {128, 128},    {128, 144},
                                                            {128, 192},    {128, 256},    {256, 144},    {256, 192}},
                                           kNormedTiles = {{64, 32}, {64, 64}},
                                           kRotatedTiles = {{64, 32}, {64, 64}, {128, 64}},
                                           kHeadTiles = {{128, 256, 2}, {64, 128}, {128, 128}, {128, 256}},
                                           kGatedTiles = {{128, 192, 2}, {128, 256, 2}, {64, 64},   {128, 64},
                                                          {128, 96},     {128, 160},    {128, 192}, {128, 256},
                                                          {256, 160},    {256, 192}},
                                           kPartsTiles = {{128, 192, 2}, {128, 64}, {128, 128}, {128, 192}},
                                           kTurnTiles = {{128, 256, 2}, {128, 256}},
                                           kGradientTiles = {{128, 192, 2}, {128, 256, 2}, {256, 192, 2}, {128, 128},
                                                             {128, 192},    {128, 256},    {256, 192}};

// Parts of k that have tiles of their own (1: there are none): blocks of a cluster, or added in turn.
struct PartsApart {
  int64_t count = 1;
  bool in_turn = false;
};
// Clocks of a product of `rows` x `columns` results over `depth` values of k, on so many multiprocessors.  Infinity:
// clusters are not for a product of one wave, whose blocks would begin later, nor for parts that are a cluster.
inline double tile_clocks(int64_t rows, int64_t columns, int64_t depth, WgmmaTile t, int multiprocessors,
                          PartsApart apart = {}) {
  const auto parts = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
  const int64_t neighbours = std::max(1, multiprocessors / kNeighbours);
  const bool meet = apart.count > 1 && !apart.in_turn;
  const int64_t at_once = meet ? neighbours * (kNeighbours / apart.count * apart.count) : multiprocessors / t.cluster;
  const int64_t of_part = parts(rows, t.rows * t.cluster) * parts(columns, t.columns), tiles = of_part * apart.count;
  if (t.cluster > 1 && (meet || tiles <= at_once || at_once == 0)) return std::numeric_limits<double>::infinity();
  const int64_t waves = parts(tiles, at_once);
  const auto busy = static_cast<double>(std::min(tiles, at_once) * t.cluster);
  const auto there = static_cast<double>(std::min<int64_t>(rows, t.rows));  // others are not read
  const double into_sm = (there + t.columns) * 128, out_of_l2 = (there + t.columns / t.cluster) * 128,
               products = t.rows * t.columns / 32.0;
  const double stage = std::max({products, into_sm / kBytesIntoSm, out_of_l2 * busy / kBytesOutOfL2});
  const double ends = kTileEnds * t.columns * std::max(1.0, t.rows / 128.0);
  const double share = there * t.columns * 4 / kBytesIntoSm * (apart.in_turn ? 2 : 1),
               sums = apart.count > 1 ? share + kPartLatency + kArrival : 0;
  // Parts in turn that begin together wait for each other once, and end one after another from then on.
  const int64_t waits = apart.in_turn ? (std::min(tiles, at_once) - 1) / of_part : 0;
  return static_cast<double>(waves) *
             (stage * static_cast<double>(parts(parts(depth, apart.count), 64)) + ends + sums) +
         static_cast<double>(waits) * sums;
}

inline std::optional<WgmmaTile> asked_tile;  // of a test: taken in any case

// The one of `tiles` with the fewest clocks.
inline WgmmaTile best_tile(std::initializer_list<WgmmaTile> tiles, int64_t rows, int64_t columns, int64_t depth,
                           int multiprocessors, PartsApart apart = {}) {
  if (asked_tile) return *asked_tile;
  const auto clocks = [&](WgmmaTile t) { return tile_clocks(rows, columns, depth, t, multiprocessors, apart); };
  return *std::min_element(tiles.begin(), tiles.end(), [&](WgmmaTile a, WgmmaTile b) { return clocks(a) < clocks(b); });
}

// The least clocks, over those of tensor cores that are all busy.
inline double tile_stretch(std::initializer_list<WgmmaTile> tiles, int64_t rows, int64_t columns, int64_t depth,
                           int multiprocessors, PartsApart apart = {}) {
  const double busy = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth) / 2048;
  const WgmmaTile best = best_tile(tiles, rows, columns, depth, multiprocessors, apart);
  return busy > 0 ? tile_clocks(rows, columns, depth, best, multiprocessors, apart) * multiprocessors / busy : 1;
}

}  // namespace pare
