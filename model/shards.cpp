#include "model/shards.h"

#include <algorithm>
#include <numeric>

namespace pare {

std::vector<int64_t> shard_cuts(const std::vector<ParameterBlock>& blocks, int ranks) {
  const int64_t all = blocks.back().offset + blocks.back().size();
  std::vector<int64_t> cuts = {0};
  auto b = blocks.begin();
  for (int r = 1; r < ranks; r++) {
    const int64_t target = all / ranks * r + all % ranks * r / ranks;
    while (target > b->offset + b->size()) b++;
    const int64_t runs = (target - b->offset + b->run() / 2) / b->run();
    cuts.push_back(std::min(b->offset + runs * b->run(), b->offset + b->size()));
  }
  cuts.push_back(all);
  return cuts;
}

std::vector<ParameterBlock> blocks_between(const std::vector<ParameterBlock>& blocks, int64_t begin, int64_t end) {
  std::vector<ParameterBlock> part;
  for (const ParameterBlock& b : blocks) {
    const int64_t first = std::max(begin, b.offset), last = std::min(end, b.offset + b.size());
    if (first >= last) continue;
    part.push_back(b);
    if (b.vector) continue;
    ParameterBlock& p = part.back();
    p.offset = first, p.weight.count = (last - first) / b.weight.inputs();
    p.weight.packed = b.weight.packed.rows((first - b.offset) / b.run(), weight_panels(p.weight.count));
    p.place = place_of({b}, first, 0);
  }
  return part;
}

int64_t place_of(const std::vector<ParameterBlock>& blocks, int64_t cut, int64_t bytes) {
  for (const ParameterBlock& b : blocks)
    if (cut < b.offset + b.size()) {
      const auto size = static_cast<int64_t>(dtype_size(b.vector ? b.vector.dtype : b.weight.packed.dtype));
      return b.place + (cut - b.offset) * size;
    }
  return bytes;
}

void ShardReader::ask(Question& q) {
  const auto ranks = static_cast<size_t>(comm_.ranks());
  std::vector<Comm::Piece> out(ranks), in(ranks);
  if (comm_.first()) std::fill(out.begin(), out.end(), Comm::Piece{&q, sizeof q});
  in[0] = {&q, sizeof q};
  comm_.exchange(out, in);
}

// Each rank's elements to rank 0.
void ShardReader::move(const Question& q, float* out) {
  const auto ranks = static_cast<size_t>(comm_.ranks());
  std::vector<Comm::Piece> sent(ranks), received(ranks);
  std::vector<float> own;
  const Array& array = arrays_[q.array];
  for (size_t r = 0; r < ranks; r++) {
    const int64_t begin = std::max(q.begin, array.cuts[r]), n = std::min(q.begin + q.count, array.cuts[r + 1]) - begin;
    if (n <= 0) continue;
    if (static_cast<int>(r) == comm_.rank()) {
      own.resize(static_cast<size_t>(n));
      array.own(begin, n, own.data());
      sent[0] = {own.data(), own.size() * sizeof(float)};
    }
    if (comm_.first()) received[r] = {out + (begin - q.begin), static_cast<size_t>(n) * sizeof(float)};
  }
  comm_.exchange(sent, received);
}

void ShardReader::read(size_t array, int64_t begin, int64_t count, float* out) {
  if (comm_.ranks() == 1) return arrays_[array].own(begin, count, out);
  Question q{array, begin, count};
  ask(q);
  move(q, out);
}

void ShardReader::done() {
  Question q{0, 0, -1};
  if (comm_.ranks() > 1) ask(q);
}

void ShardReader::answer() {
  Question q{};
  for (ask(q); q.count >= 0; ask(q)) move(q, nullptr);
}

std::vector<int> deal(const std::vector<int64_t>& costs, int64_t slots) {
  const auto largest = [&](const std::vector<int>& slot_of) {
    std::vector<int64_t> load(static_cast<size_t>(slots));
    for (size_t i = 0; i < costs.size(); i++) load[static_cast<size_t>(slot_of[i])] += costs[i];
    return *std::max_element(load.begin(), load.end());
  };
  std::vector<int> in_turn(costs.size()), by_cost(costs.size());
  for (size_t i = 0; i < costs.size(); i++) in_turn[i] = static_cast<int>(static_cast<int64_t>(i) % slots);
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<int64_t> load(static_cast<size_t>(slots));
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += costs[i], by_cost[i] = static_cast<int>(least - load.begin());
  }
  return largest(by_cost) <= largest(in_turn) ? by_cost : in_turn;
}

}  // namespace pare
