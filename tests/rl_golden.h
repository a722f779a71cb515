// The golden file of the stages of src/rl, and samples for their tests.
#pragma once
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "rl/types.h"

namespace pare {

inline nlohmann::json rl_golden(const char* part) {
  std::ifstream file("tests/golden/rl_losses.json");
  EXPECT_TRUE(file) << "run the tests in the root of the repository";
  return nlohmann::json::parse(file).at(part);
}

inline Trajectory trajectory(int group, size_t length, double score = 0) {
  Trajectory t;
  t.group = group;
  t.prompt = {1};
  t.tokens.assign(length, 3);
  t.logprob.assign(length, -1.f);
  t.score = t.reward = score;
  return t;
}

}  // namespace pare
