// The update of a learner on several ranks: gradients of shards to the ranks that keep their elements.
#include <numeric>

#include "model/learner.h"
#include "ops/data.h"

namespace pare {

// Calls f(first, counts, piece) for pieces of the parts of all ranks, as many for each: elements [first[r], first[r] +
// counts[r]) of the flat gradient are rank r's, and elements from `piece` on of its part.  A piece of all ranks has at
// most options_.piece elements, and begins at a multiple of 16 bytes for any number of ranks: NCCL copies others byte
// by byte.
template <class F>
void Learner::for_pieces(F f) {
  const std::vector<int64_t>& cuts = trained_.cuts;
  const auto ranks = static_cast<int64_t>(model_.device.comm.ranks());
  int64_t longest = 0;
  for (int64_t r = 0; r < ranks; r++) longest = std::max(longest, cuts[r + 1] - cuts[r]);
  const int64_t most = options_.piece / ranks / 1024 * 1024;
  std::vector<int64_t> first(static_cast<size_t>(ranks)), counts(static_cast<size_t>(ranks));
  for (int64_t at = 0; at < longest; at += most) {
    for (int64_t r = 0; r < ranks; r++) {
      first[r] = std::min(cuts[r] + at, cuts[r + 1]);
      counts[r] = std::min(most, cuts[r + 1] - first[r]);
    }
    f(first, counts, at);
  }
}

// Each rank gets its elements of the gradients of this round's shards, and adds them in the order of shards.
void Learner::add_shards_of_ranks(int64_t round) {
  Device& device = model_.device;
  const auto ranks = static_cast<int64_t>(device.comm.ranks());
  for_pieces([&](const std::vector<int64_t>& first, const std::vector<int64_t>& counts, int64_t at) {
    const ArenaScope scope(activations_);
    const int64_t n = counts[static_cast<size_t>(device.comm.rank())];
    const Tensor shards = activations_.alloc("gradients of shards", model_.stat, {ranks * n});
    device.all_to_all({.y = shards,
                       .x = flat_,
                       .first = first,
                       .sent = counts,
                       .received = std::vector<int64_t>(static_cast<size_t>(ranks), n),
                       .comm = &device.comm});
    for (int64_t r = 0; r < ranks && n > 0; r++) add(round * ranks + r, shards.rows(r * n, n), at);
  });
}

// The same sums with an eighth of the bytes between machines.  Rank j of a machine adds the shards of the machine, for
// the elements that the ranks j of all machines keep.  Then these ranks exchange one sum for each block of shards.
//
//     machine 0: shards 0 .. 7                machine 1: shards 8 .. 15
//     rank j: 0 .. 7 of elements j            rank 8 + j: 8 .. 15 of elements j            within the machine
//             0 .. 7 of elements 8 + j                    8 .. 15 of elements 8 + j
//     rank j: both sums of elements j         rank 8 + j: both sums of elements 8 + j      between machines
void Learner::add_shards_by_machine() {
  Device& device = model_.device;
  const auto ranks = static_cast<size_t>(device.comm.ranks()), near = static_cast<size_t>(device.comm.node_ranks());
  const size_t own = static_cast<size_t>(device.comm.rank()), begin = own / near * near;
  const auto blocks = static_cast<int64_t>(near) / kShardBlock;
  const auto all_to_all = [&](const char* name, const Tensor& x, const std::vector<int64_t>& first,
                              const std::vector<int64_t>& sent, const std::vector<int64_t>& received) {
    const int64_t all = std::accumulate(received.begin(), received.end(), int64_t{0});
    const Tensor y = activations_.alloc(name, model_.stat, {all});
    device.all_to_all({y, x, first, sent, received, &device.comm});
    return y;
  };
  for_pieces([&](const std::vector<int64_t>& first, const std::vector<int64_t>& counts, int64_t at) {
    const ArenaScope scope(activations_);
    std::vector<int64_t> place(ranks), sent(ranks), received(ranks);  // of the sums
    int64_t all = 0;
    for (size_t q = own % near; q < ranks; q += near) {
      place[q] = all;
      sent[q] = blocks * counts[q];
      received[q] = blocks * counts[own];
      all += sent[q];
    }
    const Tensor sums = activations_.alloc("sums of blocks", model_.stat, {all});
    device.zero({sums});
    for (size_t q = own % near; q < ranks; q += near) {
      const ArenaScope of_machine(activations_);
      std::vector<int64_t> to(ranks), out(ranks), in(ranks);
      for (size_t i = 0; i < near; i++) {
        to[begin + i] = first[q - own % near + i];
        out[begin + i] = counts[q - own % near + i];
        in[begin + i] = counts[q];
      }
      const Tensor shards = all_to_all("gradients of shards", flat_, to, out, in);
      for (int64_t s = 0, n = counts[q]; n > 0 && s < shards.size() / n; s++)
        device.accumulate({.y = sums.rows(place[q] + s / kShardBlock * n, n), .x = shards.rows(s * n, n)});
    }
    const Tensor of_all = all_to_all("sums of all blocks", sums, place, sent, received);
    for (int64_t b = 0, n = counts[own]; n > 0 && b < of_all.size() / n; b++)
      device.accumulate({.y = sum_.rows(at, n), .x = of_all.rows(b * n, n)});
  });
}

}  // namespace pare
