#include "kv/policies/query_window.h"

#include <algorithm>

#include "ops/inputs.h"

namespace pare {

QueryWindow::QueryWindow(const ModelConfig& config, KvCache& cache, Arena& kv, int64_t window)
    : cache_(cache),
      heads_(config.heads),
      window_(window),
      sequences_(cache.max_sequences()),
      ring_(kv.alloc("kv.queries", cache.k_pages.dtype, {config.layers * sequences_ * window, config.q_width()})),
      fork_index_(kv.alloc("kv.query_forks", DType::i32, {config.layers * window, 2})) {}

void QueryWindow::begin(const std::vector<PagedRun>& runs, Inputs& inputs) {
  std::vector<int32_t> pairs;
  for (const PagedRun& run : runs)
    for (int32_t i = std::max<int32_t>(0, run.rows - static_cast<int32_t>(window_)); i < run.rows; i++) {
      pairs.push_back(run.row + i);
      pairs.push_back(first_row(0, run.sequence) + (run.tokens - run.rows + i) % static_cast<int32_t>(window_));
    }
  index_ = inputs.add("kv.query_index", {std::ssize(pairs) / 2, 2}, pairs.data());
}

void QueryWindow::store(const KvPass& pass) {
  cache_.device().copy_rows({.y = layer_rows(pass.layer), .x = pass.q, .index = index_});
}

void QueryWindow::fork(int parent, int child) {
  std::vector<int32_t> pairs;
  for (int layer = 0; layer < cache_.layers(); layer++)
    for (int32_t i = 0; i < window_; i++) {
      pairs.push_back(first_row(layer, parent) + i);
      pairs.push_back(first_row(layer, child) + i);
    }
  cache_.device().upload({.dst = fork_index_, .src = pairs.data()});
  cache_.device().copy_rows({.y = ring_, .x = ring_, .index = fork_index_});
}

}  // namespace pare
