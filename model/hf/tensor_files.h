// Tensors in one safetensors file or, above a size, in several with an index, named as Hugging Face names them:
// NAME.safetensors; or NAME-00001-of-00003.safetensors and so on, and NAME.safetensors.index.json.
#pragma once
#include <string>
#include <vector>

#include "model/hf/safetensors.h"

namespace pare {

// Bytes of the tensors of a file, unless one alone has more.
constexpr int64_t kFileBytes = int64_t{2} << 30;

struct TensorFile {
  std::string name;
  std::vector<NamedTensor> tensors;
};
// Deals tensors, ascending by name, to files of at most `most` bytes; a larger tensor has a file of its own.
std::vector<TensorFile> deal_tensors(const std::string& name, std::vector<NamedTensor> tensors, DType dtype,
                                     int64_t most = kFileBytes);
// Writes the index of several files, none for one.
FileSums write_index(const std::string& folder, const std::string& name, const std::vector<TensorFile>& files,
                     DType dtype);

// True for the name of such a file or index.
bool is_tensor_file(const std::string& file, const std::string& name);

// Opens DIR/NAME.safetensors, or the files of DIR/NAME.safetensors.index.json after checking the index against them:
// every tensor is where the index says, nowhere else, and there is no other.
std::vector<SafetensorsFile> open_tensors(const std::string& directory, const std::string& name);

}  // namespace pare
