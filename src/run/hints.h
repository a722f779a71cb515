// Hints on the first steps of a run that surprise users of other stacks, each printed once if it applies.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "rl/metrics.h"
#include "run/config.h"

namespace pare {

class Hints {
 public:
  explicit Hints(const Config& config) : config_(config) {}

  // Returns the hints that the metrics of a training step call for and that are new, a sentence or two each.
  std::vector<std::string> after(const Metrics& step);

 private:
  const Config config_;
  std::set<int> said_;
};

}  // namespace pare
