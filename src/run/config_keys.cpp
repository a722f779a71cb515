// THE key table: the meaning of every configuration key, once (config_keys_*.cpp).  Types and defaults are those of the
// members (config.h).
#include "run/config_table.h"

namespace pare {

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all;
    using namespace config_table;
    for (const Groups& part :
         {model_keys(), data_keys(), rollout_keys(), kv_keys(), algorithm_keys(), correction_keys(), rpo_keys(),
          actor_keys(), distill_keys(), exact_keys(), trainer_keys()})
      for (const KeyGroup& group : part)
        for (const ConfigKey& key : group.keys) {
          all.push_back(key);
          all.back().when = group.when;
        }
    return all;
  }();
  return keys;
}

const std::vector<KeySection>& config_sections() {
  static const std::vector<KeySection> sections = {
      {"model", "the weights or the shape to start from"},
      {"data", "problems, tokenizer, verifier, lengths"},
      {"rollout", "sampling, and the limits of a pass"},
      {"rollout.val_kwargs", "sampling in validation and in `pare eval`"},
      {"rollout.kv", "sparse rollouts: the tokens that the sampler keeps or attends to"},
      {"reward_model", "shaping of rewards"},
      {"algorithm", "advantages and filters"},
      {"algorithm.rollout_correction", "importance weights and rejection for sparse rollouts"},
      {"algorithm.obrs", "budgeted rejection of tokens"},
      {"algorithm.rpo", "responses that continue the beginning of earlier ones"},
      {"actor", "policy loss, mini-batches, token subsets"},
      {"actor.optim", "AdamW and its learning rate"},
      {"learner", "attention of the learner, shards of an update"},
      {"distill", "adapters of a block-sparse sampler, which learn to sample as the dense policy does"},
      {"exact", "what is compared between sampler and learner"},
      {"trainer", "device, steps, validation, files of a run"},
  };
  return sections;
}

}  // namespace pare
