#include "model/parts.h"

#include <algorithm>
#include <numeric>

namespace pare {

std::vector<int64_t> part_cuts(const std::vector<ParameterBlock>& blocks, int ranks) {
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
    p.offset = first;
    p.weight.count = (last - first) / b.weight.inputs();
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

// Every rank asks a question and sends each other rank its elements of that one's; returns false if all have finished.
bool PartReader::round(const Question& own, float* out) {
  const auto ranks = static_cast<size_t>(comm_.ranks());
  std::vector<Question> asked(ranks);
  std::vector<Comm::Piece> sent(ranks, {const_cast<Question*>(&own), sizeof own}), received;
  for (Question& q : asked) received.push_back({&q, sizeof q});
  comm_.exchange(sent, received);
  std::vector<std::vector<float>> parts(ranks);
  sent.assign(ranks, {});
  received.assign(ranks, {});
  const auto overlap = [&](const Question& q, size_t rank) {
    const std::vector<int64_t>& cuts = arrays_[q.array].cuts;
    const int64_t begin = std::max(q.begin, cuts[rank]);
    return std::pair{begin, std::max<int64_t>(0, std::min(q.begin + q.count, cuts[rank + 1]) - begin)};
  };
  bool any = false;
  for (size_t r = 0; r < ranks; r++) {
    any = any || asked[r].count > 0;
    if (const auto [begin, n] = overlap(asked[r], static_cast<size_t>(comm_.rank())); n > 0) {
      parts[r].resize(static_cast<size_t>(n));
      arrays_[asked[r].array].own(begin, n, parts[r].data());
      sent[r] = {parts[r].data(), parts[r].size() * sizeof(float)};
    }
    if (const auto [begin, n] = overlap(own, r); n > 0)
      received[r] = {out + (begin - own.begin), static_cast<size_t>(n) * sizeof(float)};
  }
  if (any) comm_.exchange(sent, received);
  return any;
}

void PartReader::read(size_t array, int64_t begin, int64_t count, float* out) {
  if (comm_.ranks() == 1)
    arrays_[array].own(begin, count, out);
  else if (count > 0)
    round({array, begin, count}, out);
}

void PartReader::finish() {
  while (comm_.ranks() > 1 && round({0, 0, 0}, nullptr)) {
  }
}

std::vector<int> deal(const std::vector<int64_t>& costs, int64_t shards) {
  const auto largest = [&](const std::vector<int>& shard_of) {
    std::vector<int64_t> load(static_cast<size_t>(shards));
    for (size_t i = 0; i < costs.size(); i++) load[static_cast<size_t>(shard_of[i])] += costs[i];
    return *std::max_element(load.begin(), load.end());
  };
  std::vector<int> in_turn(costs.size()), by_cost(costs.size());
  for (size_t i = 0; i < costs.size(); i++) in_turn[i] = static_cast<int>(static_cast<int64_t>(i) % shards);
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
  std::vector<int64_t> load(static_cast<size_t>(shards));
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += costs[i];
    by_cost[i] = static_cast<int>(least - load.begin());
  }
  return largest(by_cost) <= largest(in_turn) ? by_cost : in_turn;
}

}  // namespace pare
