// XXH128 (Yann Collet's xxHash) of a stream of bytes.  Misses accidental damage with probability 2^-128 and is faster
// than any disk.  `xxh128sum FILE` prints the same digits.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace pare {

class Hasher {
 public:
  Hasher();
  ~Hasher();
  void add(const void* data, size_t bytes);
  std::string digits() const;  // of all that was added: 32 hexadecimal digits

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

std::string xxh128(std::string_view bytes);

}  // namespace pare
