#include "base/nearest.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace pare {

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); i++) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); j++) {
      const size_t replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

const std::string& nearest(const std::string& name, const std::vector<std::string>& candidates) {
  expect(!candidates.empty(), "nearest: no candidates for ", name);
  const std::string begin = name.substr(0, 200);  // of a name that is no mistyped one
  return *std::min_element(candidates.begin(), candidates.end(), [&](const std::string& a, const std::string& b) {
    return edit_distance(begin, a) < edit_distance(begin, b);
  });
}

}  // namespace pare
