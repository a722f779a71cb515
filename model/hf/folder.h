// Hugging Face model folders: config.json and the weights (tensor_files.h).
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "model/hf/config.h"
#include "model/hf/safetensors.h"

namespace pare {

// The weights of a model folder (open_tensors).
std::vector<SafetensorsFile> open_weights(const std::string& directory);

struct WeightSource {
  size_t file;                      // in `files`
  const SafetensorsTensor* tensor;  // of that file
};
// Returns the place of each of parameters(config), in order.  Throws, naming tensors, if one is missing, has another
// shape or a type other than F32, BF16 and F16, or does not belong to this model.  Ignores rotary tables, and the
// lm_head that real files hold beside tied embeddings; the latter must have the same values.
std::vector<WeightSource> match_weights(const std::vector<SafetensorsFile>& files, const ModelConfig& config);

// The type of the weights of a model folder, f32 if they have several: the type to save them in again.
DType hf_dtype(const std::string& directory, const ModelConfig& config);

// The weights of a model folder.  The folder is checked at once, values are read on demand; NaN and infinities then
// throw, naming the tensor.
ParameterReader hf_weights(const std::string& directory, const ModelConfig& config);

// The weights of a model folder, to be written as "model" (deal_tensors).
std::vector<NamedTensor> hf_tensors(const ModelConfig& config, const ParameterReader& weights);
// Writes config.json, which names the type of the weights: f32, bf16 or f16.
FileSums write_hf_config(const std::string& folder, const ModelConfig& config, DType dtype);

// Writes a folder by `fill`; it appears whole or not at all.  Throws if `directory` exists, unless `overwrite` is set
// and it is the folder of a model or an adapter (with its config, and no folders but of adapters).
void save_folder(const std::string& directory, bool overwrite,
                 const std::function<void(const std::string& folder)>& fill);
// Such a folder with these files and those that `more` adds (the tokenizer).
void save_hf(const std::string& directory, const ModelConfig& config, const ParameterReader& weights, DType dtype,
             bool overwrite = false, const std::function<void(const std::string& folder)>& more = {});

// Copies the files of a tokenizer (a model folder's, or a file and those beside it that say how it is used) that exist
// into the folder `to`: those of folder_files().
FileSums copy_tokenizer(const std::string& from, const std::string& to);
// Copies generation_config.json of a model, if it has one.
FileSums copy_generation_config(const std::string& model, const std::string& to);

}  // namespace pare
