// Reading and writing safetensors files: 8 bytes N (little endian), a JSON header of N bytes, the tensors' bytes.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/file.h"
#include "base/tensor.h"
#include "model/config.h"

namespace pare {

struct SafetensorsTensor {
  std::string name, dtype;  // dtype as in the file: F32, BF16, I64, ...
  std::vector<int64_t> shape;
  uint64_t begin = 0, bytes = 0;  // begin counts from the end of the header
  int64_t size() const;           // elements
};

// An open file with a valid header: sizes agree with shapes, and the tensors fill the file without gaps or overlaps.
// Anything else throws, naming the file, before memory is allocated for it.  Values are mapped on demand, one window at
// a time, and take no memory; reading throws if the file was truncated in the meantime.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }  // in the order of their bytes
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const SafetensorsTensor* find(const std::string& name) const;  // nullptr if absent

  // Elements [begin, begin + count) of a tensor; count -1: all from `begin` on.  Converts F32, BF16 and F16 exactly and
  // throws for other types.  Thread-safe.
  void read_f32(const SafetensorsTensor& tensor, float* out, int64_t begin = 0, int64_t count = -1) const;

 private:
  template <class F>
  void for_windows(uint64_t at, uint64_t bytes, F f) const;
  std::string path_;
  std::shared_ptr<const int> file_;  // its descriptor
  uint64_t data_ = 0;                // where the tensors' bytes begin
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::unordered_map<std::string, size_t> index_;
};

// Reads from an array, which must outlive the reader.
TensorReader values_at(const float* data);

struct NamedTensor {
  std::string name;
  std::vector<int64_t> shape;
  TensorReader read;
};
// Writes F32, or BF16 or F16 (rounded to nearest even), tensors sorted by name, a piece at a time.  The file appears
// whole or not at all: it is written beside `path` and renamed, replacing what was there.  Throws Error(Exit::failed),
// naming the value, if a finite one would become infinite.
FileSum write_safetensors(const std::string& path, std::vector<NamedTensor> tensors, DType dtype);

std::string shape_string(const std::vector<int64_t>& shape);  // "[97, 48]"

}  // namespace pare
