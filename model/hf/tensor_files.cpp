#include "model/hf/tensor_files.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>

#include "base/foreign_file.h"
#include "base/json_file.h"
#include "base/text.h"

namespace pare {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* kEnding = ".safetensors";
constexpr const char* kIndexEnding = ".index.json";

int64_t bytes_of(const NamedTensor& t, DType dtype) {
  auto bytes = static_cast<int64_t>(dtype_size(dtype));
  for (const int64_t n : t.shape) bytes *= n;
  return bytes;
}

// Returns the name of the file of each tensor, by the tensor's.
std::map<std::string, std::string> read_index(const std::string& path) {
  const json index = read_json_file(path);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    fail(path, ": expected an object with a \"weight_map\"");
  std::map<std::string, std::string> map;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name == "." || name == ".." || name.find_first_of(std::string("/\\\0", 3)) != std::string::npos)
      fail(path, ": tensor ", json(tensor).dump(), " is in ", file.dump(), ", expected the name of a file beside it");
    map[tensor] = name;
  }
  if (map.empty()) fail(path, ": the \"weight_map\" is empty");
  return map;
}

}  // namespace

std::vector<TensorFile> deal_tensors(const std::string& name, std::vector<NamedTensor> tensors, DType dtype,
                                     int64_t most) {
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  std::vector<TensorFile> files(1);
  int64_t bytes = 0;
  for (NamedTensor& t : tensors) {
    const int64_t more = bytes_of(t, dtype);
    if (!files.back().tensors.empty() && bytes + more > most) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += more;
    files.back().tensors.push_back(std::move(t));
  }
  for (size_t i = 0; i < files.size(); i++)
    files[i].name =
        files.size() == 1 ? name + kEnding : format("%s-%05zu-of-%05zu%s", name.c_str(), i + 1, files.size(), kEnding);
  return files;
}

FileSums write_index(const std::string& folder, const std::string& name, const std::vector<TensorFile>& files,
                     DType dtype) {
  if (files.size() == 1) return {};
  json map;
  int64_t bytes = 0;
  for (const TensorFile& file : files)
    for (const NamedTensor& t : file.tensors) {
      map[t.name] = file.name;
      bytes += bytes_of(t, dtype);
    }
  const json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}};
  const std::string file = name + kEnding + kIndexEnding;
  return {{file, write_file(cat(folder, "/", file), index.dump(2) + "\n")}};
}

bool is_tensor_file(const std::string& file, const std::string& name) {
  if (file == name + kEnding || file == name + kEnding + kIndexEnding) return true;
  unsigned i = 0, n = 0;
  return std::sscanf(file.c_str() + std::min(file.size(), name.size()), "-%5u-of-%5u", &i, &n) == 2 &&
         file == format("%s-%05u-of-%05u%s", name.c_str(), i, n, kEnding);
}

std::vector<SafetensorsFile> open_tensors(const std::string& directory, const std::string& name) {
  if (!fs::is_directory(directory)) fail(directory, ": no such directory; expected a Hugging Face model");
  const std::string single_name = name + kEnding, index_name = single_name + kIndexEnding;
  const std::string single = directory + "/" + single_name, index = directory + "/" + index_name;
  std::vector<SafetensorsFile> files;
  if (fs::exists(single)) {
    files.emplace_back(single);
    return files;
  }
  if (!fs::exists(index)) {
    std::string shard;
    for (const auto& entry : fs::directory_iterator(directory)) {
      const std::string file = entry.path().string();
      if (const std::string foreign = entry.is_regular_file() ? foreign_model_file(file) : ""; !foreign.empty())
        fail(file, ": ", foreign);
      if (file.ends_with(".safetensors")) shard = entry.path().filename().string();
    }
    fail(directory, ": neither ", single_name, " nor ", index_name, " is there",
         shard.empty() ? "" : cat(", only ", shard, "; fetch the index too, or give a single file that name"));
  }
  const std::map<std::string, std::string> map = read_index(index);
  std::map<std::string, size_t> opened;
  for (const auto& [tensor, file] : map) {
    if (opened.emplace(file, files.size()).second) files.emplace_back(directory + "/" + file);
    if (!files[opened[file]].find(tensor))
      fail(index, ": tensor ", json(tensor).dump(), " should be in ", file, ", but is not");
  }
  for (const SafetensorsFile& file : files) {
    const std::string own = fs::path(file.path()).filename();
    for (const SafetensorsTensor& t : file.tensors()) {
      const auto entry = map.find(t.name);
      if (entry == map.end()) fail(file.path(), ": tensor ", json(t.name).dump(), " is not in the index");
      if (entry->second != own)
        fail(file.path(), ": tensor ", json(t.name).dump(), " is also in ", entry->second, ", where the index puts it");
    }
  }
  return files;
}

}  // namespace pare
