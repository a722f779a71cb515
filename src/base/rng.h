// Counter-based random numbers: every draw is a function of (seed, stream, step, sequence, position, index), so the
// same sequence comes out whatever the batch, the order or the number of threads. Philox4x32-10: Salmon et al.,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once
#include <array>
#include <cstdint>

#include "base/host_device.h"

namespace pare {

// Purpose of a draw.  Never renumber: a saved run continues with the same draws.  9 was another purpose's.
enum class RngStream : uint32_t {
  init = 1,
  data = 2,
  sample = 3,
  token_plan = 4,
  shuffle = 5,
  eval = 6,
  task = 7,
  test = 8,
  obrs = 10,
  moments = 11,
  rpo_cut = 12,
  rpo_update = 13,
  lora = 14
};

// A 64-bit finaliser (Steele et al., SplitMix, 2014).
PARE_HOST_DEVICE constexpr uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The Philox key of one stream of one step.
constexpr uint64_t rng_key(uint64_t seed, RngStream stream, uint64_t step) {
  return mix64(mix64(seed ^ 0x70617265u) + (static_cast<uint64_t>(stream) << 56) + step);
}

// Names a sequence in the counter: its row of the data set in this epoch, the draw of that row, the sample.
constexpr uint64_t sequence_uid(uint64_t epoch, uint64_t row, uint64_t draw, uint64_t sample) {
  return mix64(mix64(mix64(epoch) + row) + (draw << 32) + sample);
}

constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> ctr, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = 0xD2511F53ull * ctr[0], p1 = 0xCD9E8D57ull * ctr[2];
    ctr = {static_cast<uint32_t>(p1 >> 32) ^ ctr[1] ^ k0, static_cast<uint32_t>(p1),
           static_cast<uint32_t>(p0 >> 32) ^ ctr[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return ctr;
}

// Word `index` of the draws at `position` of sequence `uid`.
constexpr uint32_t rng_word(uint64_t key, uint64_t uid, uint32_t position, uint32_t index) {
  return philox({index / 4, position, static_cast<uint32_t>(uid), static_cast<uint32_t>(uid >> 32)}, key)[index % 4];
}

// Uniform in (0, 1): 23 bits and a half (which 24 bits would round away), never 0 and never 1.
constexpr float uniform_open(uint32_t word) { return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f; }

// A sequence of draws from one (key, uid), for host code such as task generators.
class Rng {
 public:
  explicit Rng(uint64_t key, uint64_t uid = 0, uint64_t first = 0) : key_(key), uid_(uid), n_(first) {}
  uint32_t next() {
    const uint64_t i = n_++;
    return rng_word(key_, uid_, static_cast<uint32_t>(i >> 32), static_cast<uint32_t>(i));
  }
  double uniform() {  // [0, 1), 53 bits
    const uint64_t hi = next(), lo = next();
    return static_cast<double>(((hi << 32) | lo) >> 11) * 0x1p-53;
  }
  // Uniform over {0 .. n-1}, without bias (rejection).
  uint32_t below(uint32_t n) {
    const uint32_t limit = UINT32_MAX - (UINT32_MAX % n + 1) % n;
    uint32_t w = next();
    while (w > limit) w = next();
    return w % n;
  }
  double normal();  // standard normal (Box-Muller, one of the pair): 4 words

 private:
  uint64_t key_, uid_, n_;
};

}  // namespace pare
