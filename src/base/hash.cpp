#include "base/hash.h"

// Compiled here, for the program's instruction set: the library's own build lacks AVX2 and is slower.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstdio>

namespace pare {

struct Hasher::State {
  XXH3_state_t xxh;
};

Hasher::Hasher() : state_(new State) { XXH3_128bits_reset(&state_->xxh); }
Hasher::~Hasher() = default;

void Hasher::add(const void* data, size_t bytes) { XXH3_128bits_update(&state_->xxh, data, bytes); }

std::string Hasher::digits() const {
  const XXH128_hash_t h = XXH3_128bits_digest(&state_->xxh);
  std::array<char, 33> text;
  std::snprintf(text.data(), text.size(), "%016llx%016llx", static_cast<unsigned long long>(h.high64),
                static_cast<unsigned long long>(h.low64));
  return text.data();
}

std::string xxh128(std::string_view bytes) {
  Hasher hasher;
  hasher.add(bytes.data(), bytes.size());
  return hasher.digits();
}

}  // namespace pare
