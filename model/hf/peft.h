// Adapter folders of PEFT: adapter_config.json and adapter_model.safetensors.
#pragma once
#include "model/hf/folder.h"
#include "model/lora.h"

namespace pare {

// DIR/adapter_config.json.  A setting that changes the arithmetic and is not supported (DoRA, rsLoRA, rank_pattern,
// modules_to_save, ...) is an error naming the key, as is an unknown key that is neither null, false nor empty.
LoraSpec load_adapter_config(const std::string& directory);

// The name of a parameter of an adapter in such a folder.
std::string peft_name(const Parameter& parameter);

// A and B' of an adapter folder for a model of this shape, in the order of adapter_parameters(config, spec) with the
// spec of the folder: exactly these tensors, in F32, BF16 or F16; anything else fails, naming tensors.
ParameterReader adapter_weights(const std::string& directory, const ModelConfig& config);

// Writes both files into a folder; `read` gives A and B' in the order of adapters.layout.  B is B' divided by alpha / r
// of the `alpha` given, which is that of the file: with alpha = r the same adapters, bit by bit.  `base`:
// base_model_name_or_path.
FileSums write_adapter_files(const std::string& folder, const Adapters& adapters, const ParameterReader& read,
                             double alpha, const std::string& base, DType dtype);

// `weights`, those of a model, with W + (alpha / r) B A of an adapter folder in place of W, rounded once to f32.
ParameterReader merged_weights(const ParameterReader& weights, const std::string& adapter, const ModelConfig& config);

}  // namespace pare
