// Reading and writing safetensors files: 8 bytes N (little endian), a JSON header of N bytes, the tensors' bytes.
#pragma once
#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/tensor.h"

namespace pare {

struct SafetensorsTensor {
  std::string name, dtype;  // dtype as in the file: F32, BF16, I64, ...
  std::vector<int64_t> shape;
  uint64_t begin = 0, bytes = 0;  // begin counts from the end of the header
  int64_t size() const;           // elements
};

// An open file whose header has been checked whole: sizes agree with shapes, and the tensors fill the file without gap
// or overlap.  The values are read when asked for.  Anything else fails, naming the file, before memory is taken for
// it.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }  // in the order of their bytes
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const SafetensorsTensor* find(const std::string& name) const;  // nullptr if absent

  // out: tensor.size() floats.  F32, BF16 and F16, exactly; other types fail.
  void read_f32(const SafetensorsTensor& tensor, float* out);

 private:
  std::string path_;
  std::ifstream in_;
  uint64_t data_ = 0;  // where the tensors' bytes begin
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::unordered_map<std::string, size_t> index_;
};

struct NamedTensor {
  std::string name;
  std::vector<int64_t> shape;
  const float* data;
};
// Writes F32 or BF16 (rounded to nearest even), tensors sorted by name.  The file appears whole or not at all: it is
// written beside `path` and renamed, replacing what was there.
void write_safetensors(const std::string& path, std::vector<NamedTensor> tensors, DType dtype);

std::string shape_string(const std::vector<int64_t>& shape);  // "[97, 48]"

}  // namespace pare
