// Reads and writes the config.json of Qwen2, Qwen3, Llama and Mistral models.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "model/config.h"

namespace pare {

// `where` names the file in errors.  Throws, naming the key, if a key changes the arithmetic in an unsupported way, or
// is neither supported nor known to be harmless.  Reads the spellings of transformers 4 and 5.
ModelConfig parse_model_config(const nlohmann::json& json, const std::string& where);
// Reads DIR/config.json.  EOS ids in DIR/generation_config.json, if any, replace those of config.json.
ModelConfig load_model_config(const std::string& directory);
// A config.json that transformers 4 and 5 load (without the weights' dtype, which save_hf adds).
nlohmann::json to_json(const ModelConfig& config);

}  // namespace pare
