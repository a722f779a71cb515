// A hash of a step's generation, in 64 bits: equal certificates mean equal log-probs, bit for bit.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rl/metrics.h"

namespace pare {

// A hash over (uid, position, bits of the log-prob) of every token, sequences sorted by uid: the order in which they
// are added does not matter.
class Certificate {
 public:
  void add(uint64_t uid, std::span<const float> logprobs);
  std::string text() const;  // 16 hexadecimal digits
  // Sets `certificate`, and `arithmetic`: that of the program, without which certificates do not compare.
  void write(Metrics& metrics) const;

 private:
  std::vector<std::pair<uint64_t, uint64_t>> sequences_;  // uid, hash of its tokens
};

std::string hex16(uint64_t x);

}  // namespace pare
