// state.json of a checkpoint, changed as if it had been written so.
#pragma once
#include <string>

#include "base/error.h"
#include "base/hash.h"

namespace pare::test {

// `text` with the hash on its second line that belongs to what follows it (run/checkpoint.cpp).
inline std::string sealed_again(const std::string& text) {
  const std::string rest = text.substr(text.find('\n', text.find('\n') + 1) + 1);
  return cat("{\n  \"xxh128\": \"", xxh128(rest), "\",\n", rest);
}

}  // namespace pare::test
