// The keys that decide the bits of a run: which part two runs, which an audit compares.
#include "ops/linear.h"
#include "run/config.h"

namespace pare {

namespace {

// True if each step depends on the number of steps.
bool steps_matter(const Config& c) {
  return c.actor.optim.lr_scheduler_type != LrSchedule::constant || c.data.noise_ramp > 0;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> keys_of_bits(const Config& c) {
  std::vector<std::pair<std::string, std::string>> keys;
  for (const ConfigKey& k : config_keys()) {
    const bool rows = k.name == "actor.ppo_max_token_len" && act_type(c) == DType::bf16;
    if (k.decides != KeyDecides::bits && !rows) continue;
    if (k.name == "trainer.total_training_steps" && !steps_matter(c)) continue;
    keys.emplace_back(k.name, k.show(c));
  }
  return keys;
}

std::vector<std::string> keys_that_part(const Config& run, const Config& resumed, bool by_content) {
  // In bf16 the sum of a weight's gradient depends on the rows of each call (list.h).
  const auto rows_matter = [&](const std::string& name) {
    if (act_type(run) != DType::bf16) return false;
    const bool whole = run.actor.logits_chunk % kLinearPart == 0 && resumed.actor.logits_chunk % kLinearPart == 0;
    return name == "actor.ppo_max_token_len" || (name == "actor.logits_chunk" && !whole);
  };
  std::vector<std::string> keys;
  for (const ConfigKey& k : config_keys()) {
    if (k.show(run) == k.show(resumed) || (by_content && k.decides == KeyDecides::file)) continue;
    if (k.decides == KeyDecides::nothing && !rows_matter(k.name)) continue;
    if (k.name == "trainer.total_training_steps" && !steps_matter(run)) continue;
    keys.push_back(k.name);
  }
  return keys;
}

}  // namespace pare
