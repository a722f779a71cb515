#include "base/rng.h"

#include <cmath>

namespace pare {

double Rng::normal() {
  const double u = 1 - uniform(), v = uniform();
  return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586476925 * v);
}

}  // namespace pare
