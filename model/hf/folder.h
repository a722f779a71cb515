// Hugging Face model folders: config.json and the weights in one safetensors file or in shards with an index.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "model/hf/config.h"
#include "model/hf/safetensors.h"

namespace pare {

// DIR/model.safetensors, or the shards of DIR/model.safetensors.index.json after checking the index against them: every
// tensor is where the index says, nowhere else, and there is no other.
std::vector<SafetensorsFile> open_weights(const std::string& directory);

struct WeightSource {
  size_t file;                      // in `files`
  const SafetensorsTensor* tensor;  // of that file
};
// Where each of parameters(config), in their order, is found.  Fails, naming tensors, if one is missing, has another
// shape or a type that is not F32, BF16 or F16, or if there are tensors this model does not have.  Rotary tables are
// ignored, and so is an lm_head beside tied embeddings (which real files hold) if it has their values, else it fails.
std::vector<WeightSource> match_weights(const std::vector<SafetensorsFile>& files, const ModelConfig& config);

// The type of the weights of a model folder, f32 where they have several: that in which they can be saved again.
DType hf_dtype(const std::string& directory, const ModelConfig& config);

// The weights of a model folder, which is checked at once; the values are read when they are asked for.  NaN and
// infinities fail then, naming the tensor.
ParameterReader hf_weights(const std::string& directory, const ModelConfig& config);

// Writes config.json and model.safetensors (f32; bf16 or f16, rounded to nearest even) into a folder.
FileSums write_hf_files(const std::string& folder, const ModelConfig& config, const ParameterReader& weights,
                        DType dtype);

// A folder that `fill` writes, which appears whole or not at all.  An existing `directory` is an error unless
// `overwrite`, and then only the folder of a model or an adapter (its config in it, no
// folders but of adapters) is replaced.
void save_folder(const std::string& directory, bool overwrite,
                 const std::function<void(const std::string& folder)>& fill);
// Such a folder with these files, and with what `more` adds (the tokenizer).
void save_hf(const std::string& directory, const ModelConfig& config, const ParameterReader& weights, DType dtype,
             bool overwrite = false, const std::function<void(const std::string& folder)>& more = {});

// Copies the files of a tokenizer, that of a model folder or one that is named itself, and what says how it is used
// (chat template, names of tokens) into the folder `to`, where they are found.
FileSums copy_tokenizer(const std::string& from, const std::string& to);

}  // namespace pare
