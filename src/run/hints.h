// What puzzles users of other stacks in the first steps of a run, said once, where it applies.
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

  // What the metrics of a training step call for and was not said before, each a sentence or two.
  std::vector<std::string> after(const Metrics& step);

 private:
  const Config config_;
  std::set<int> said_;
};

}  // namespace pare
