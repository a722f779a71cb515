#include "run/certificate.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>

#include "base/error.h"
#include "base/rng.h"
#include "ops/list.h"

namespace pare {

void Certificate::add(uint64_t uid, std::span<const float> logprobs) {
  uint64_t h = uid;
  for (uint64_t t = 0; t < logprobs.size(); t++) h = mix64(h ^ (t << 32 | std::bit_cast<uint32_t>(logprobs[t])));
  sequences_.emplace_back(uid, h);
}

std::string Certificate::text() const {
  auto sorted = sequences_;
  std::sort(sorted.begin(), sorted.end());
  uint64_t h = sorted.size();
  for (const auto& [uid, tokens] : sorted) h = mix64(mix64(h ^ uid) ^ tokens);
  return hex16(h);
}

void Certificate::write(Metrics& metrics) const {
  metrics.set_text("certificate", text());
  metrics.set_text("arithmetic", cat(kArithmetic));
}

std::string hex16(uint64_t x) {
  std::array<char, 17> text;
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(x));
  return text.data();
}

}  // namespace pare
