// Overrides of a configuration, `group.key=value`, and lists of them that are added.
#pragma once
#include <string>
#include <vector>

namespace pare::test {

using Keys = std::vector<std::string>;

inline Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace pare::test
