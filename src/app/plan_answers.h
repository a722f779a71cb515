// Answers of `pare plan` besides the plan itself.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run/fit.h"
#include "run/plan.h"

namespace pare {

double step_seconds(const Plan& plan);  // of all phases
double generated_tokens(const Config& config, const StepLengths& lengths);

// `memory`: bytes there are; 0: not known.
nlohmann::ordered_json plan_json(const Config& config, const Plan& plan, const StepLengths& lengths, size_t memory,
                                 const Machine* machine);

// Plans with greater and greater values of `key` for the largest that fits `memory`, which is `where`, and says what
// stops the next one.
void show_largest(const std::vector<std::string>& arguments, const std::string& key, size_t memory,
                  const std::string& where);

// Settings that make a step fit `memory` (what_fits), more ranks included; `config` does not fit.
std::vector<std::string> settings_that_fit(const Config& config, size_t memory);

// The configuration alone and with each of the presets laid over it, under the overrides.
void show_comparison(const std::vector<std::string>& arguments, const std::string& presets, const StepLengths& lengths,
                     size_t memory, const Machine* machine, bool json);

}  // namespace pare
