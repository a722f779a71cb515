// Parameters as one buffer, which tests compare and change.
#pragma once
#include "model/hf/folder.h"

namespace pare::test {

inline std::vector<float> all_parameters(const ModelConfig& config, const ParameterReader& read) {
  const std::vector<Parameter> layout = parameters(config);
  std::vector<float> values(static_cast<size_t>(layout.back().offset + layout.back().size));
  for (size_t i = 0; i < layout.size(); i++) read(i, 0, layout[i].size, values.data() + layout[i].offset);
  return values;
}

inline std::vector<float> load_weights(const std::string& directory, const ModelConfig& config) {
  return all_parameters(config, hf_weights(directory, config));
}

inline void save_weights(const std::string& directory, const ModelConfig& config, const std::vector<float>& weights,
                         DType dtype, bool overwrite = false,
                         const std::function<void(const std::string& folder)>& more = {}) {
  save_hf(directory, config, flat_parameters(config, weights.data()), dtype, overwrite, more);
}

}  // namespace pare::test
