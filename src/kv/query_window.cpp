#include "kv/query_window.h"

#include <algorithm>

namespace pare {

QueryWindow::QueryWindow(const ModelConfig& config, KvCache& cache, Arena& kv, int64_t window)
    : cache_(cache),
      heads_(config.heads),
      window_(window),
      sequences_(cache.max_sequences()),
      ring_(kv.alloc("kv.queries", cache.k_pages.dtype, {config.layers * sequences_ * window, config.q_width()})),
      forks_(sequences_ * config.layers * window * 2),
      fork_index_(kv.alloc("kv.query_forks", DType::i32, {sequences_, config.layers * window, 2})) {}

void QueryWindow::begin(const std::vector<PagedRun>& runs, Arena& scratch) {
  host_.clear();
  for (const PagedRun& run : runs)
    for (int32_t i = std::max<int32_t>(0, run.rows - static_cast<int32_t>(window_)); i < run.rows; i++) {
      host_.push_back(run.row + i);
      host_.push_back(first_row(0, run.sequence) + (run.tokens - run.rows + i) % static_cast<int32_t>(window_));
    }
  index_ = scratch.alloc("kv.query_index", DType::i32, {static_cast<int64_t>(host_.size()) / 2, 2});
  cache_.device().upload({.dst = index_, .src = host_.data()});
}

void QueryWindow::store(const KvPass& pass) {
  cache_.device().copy_rows({.y = layer_rows(pass.layer), .x = pass.q, .index = index_});
}

void QueryWindow::fork(int parent, int child) {
  const int64_t n = cache_.layers() * window_;
  int32_t* const pairs = forks_.data() + child * n * 2;
  for (int layer = 0; layer < cache_.layers(); layer++)
    for (int64_t i = 0; i < window_; i++) {
      const int64_t at = 2 * (layer * window_ + i);
      pairs[at] = first_row(layer, parent) + static_cast<int32_t>(i);
      pairs[at + 1] = first_row(layer, child) + static_cast<int32_t>(i);
    }
  Tensor index = fork_index_.rows(child, 1);
  index.rank = 2, index.shape = {n, 2}, index.stride = {2, 1};
  cache_.device().upload({.dst = index, .src = pairs});
  cache_.device().copy_rows({.y = ring_, .x = ring_, .index = index});
}

}  // namespace pare
