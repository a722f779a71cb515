#include "model/hf/folder.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "base/file.h"
#include "base/json_file.h"
#include "base/thread_pool.h"
#include "model/hf/files.h"
#include "model/hf/tensor_files.h"

namespace pare {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

// Returns the first names of a list that may be long.
std::string some(const std::vector<std::string>& names) {
  std::string s;
  for (size_t i = 0; i < names.size() && i < 4; i++) s += cat(i ? ", " : "", names[i]);
  if (names.size() > 4) s += cat(" and ", names.size() - 4, " more");
  return s;
}

bool is_rotary_table(const std::string& name) { return name.ends_with(".rotary_emb.inv_freq"); }

bool is_redundant_head(const SafetensorsTensor& t, const ModelConfig& config) {
  return config.tied && t.name == "lm_head.weight" && t.shape == std::vector<int64_t>{config.vocab, config.hidden};
}

// transformers 4 would take the embedding alone, 5 both as they are.
void check_same_head(const std::vector<SafetensorsFile>& files, const WeightSource& head,
                     const WeightSource& embedding) {
  constexpr int64_t piece = 1 << 18;
  std::vector<float> a(piece), b(piece);
  const int64_t size = head.tensor->size();
  for (int64_t begin = 0, n = 0; begin < size; begin += n) {
    n = std::min(piece, size - begin);
    files[head.file].read_f32(*head.tensor, a.data(), begin, n);
    files[embedding.file].read_f32(*embedding.tensor, b.data(), begin, n);
    for (int64_t i = 0; i < n; i++)
      if (a[i] != b[i] && std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]))
        fail(files[head.file].path(), ": lm_head.weight is ", a[i], " at element ", begin + i,
             ", model.embed_tokens.weight is ", b[i],
             "; with tie_word_embeddings: true in config.json they must be equal: set it to false, or remove "
             "lm_head.weight from the file");
  }
}

void check_replaceable(const std::string& directory, bool overwrite) {
  if (!fs::exists(directory)) return;
  if (!overwrite) fail(directory, ": already exists and is not overwritten; choose another folder");
  if (!fs::exists(directory + "/config.json") && !fs::exists(directory + "/adapter_config.json"))
    fail(directory, ": is not a model folder, so it is not overwritten");
  for (const auto& entry : fs::directory_iterator(directory))
    if (entry.is_directory() && entry.path().filename() != "additional_chat_templates" &&
        !fs::exists(entry.path() / "adapter_config.json"))
      fail(directory, ": holds the folder ", entry.path().filename(), ", so it is not overwritten");
}

}  // namespace

std::vector<SafetensorsFile> open_weights(const std::string& directory) { return open_tensors(directory, "model"); }

std::vector<WeightSource> match_weights(const std::vector<SafetensorsFile>& files, const ModelConfig& config) {
  expect(!files.empty(), "weights of a model without files");
  const std::string where = files.size() == 1 ? files[0].path() : fs::path(files[0].path()).parent_path().string();
  std::map<std::string, WeightSource> found;
  for (size_t f = 0; f < files.size(); f++)
    for (const SafetensorsTensor& t : files[f].tensors()) found[t.name] = {f, &t};
  std::vector<WeightSource> sources;
  std::vector<std::string> missing, unexpected;
  for (const Parameter& p : parameters(config)) {
    const auto it = found.find(p.name);
    if (it == found.end()) {
      missing.push_back(p.name);
      continue;
    }
    const SafetensorsTensor& t = *it->second.tensor;
    if (t.shape != p.shape)
      fail(where, ": tensor ", p.name, " is ", shape_string(t.shape), ", config.json needs ", shape_string(p.shape));
    if (t.dtype != "F32" && t.dtype != "BF16" && t.dtype != "F16")
      fail(where, ": tensor ", p.name, " is ", t.dtype, ", expected F32, BF16 or F16");
    sources.push_back(it->second);
    found.erase(it);
  }
  if (!missing.empty())
    fail(where, ": missing tensor", missing.size() > 1 ? "s " : " ", some(missing), " of a ", config.model_type,
         " model with ", config.tied ? "tied" : "untied", " embeddings");
  std::optional<WeightSource> head;
  for (const auto& [name, source] : found)
    if (is_redundant_head(*source.tensor, config))
      head = source;
    else if (!is_rotary_table(name))
      unexpected.push_back(json(name).dump());
  if (!unexpected.empty())
    fail(where, ": unexpected tensor", unexpected.size() > 1 ? "s " : " ", some(unexpected), " in a ",
         config.model_type, " model");
  if (head) check_same_head(files, *head, sources[0]);
  return sources;
}

ParameterReader hf_weights(const std::string& directory, const ModelConfig& config) {
  // Shared: a std::function is copied.
  const auto files = std::make_shared<const std::vector<SafetensorsFile>>(open_weights(directory));
  return [files, sources = match_weights(*files, config)](size_t parameter, int64_t begin, int64_t count, float* out) {
    const SafetensorsFile& file = (*files)[sources[parameter].file];
    const SafetensorsTensor& tensor = *sources[parameter].tensor;
    parallel_for(count, 1 << 14, [&](int64_t b, int64_t e) {
      file.read_f32(tensor, out + b, begin + b, e - b);
      bool finite = true;
      for (int64_t i = b; i < e; i++) finite &= (std::bit_cast<uint32_t>(out[i]) & 0x7f800000u) != 0x7f800000u;
      for (int64_t i = b; i < e && !finite; i++)
        if (!std::isfinite(out[i]))
          fail(file.path(), ": tensor ", tensor.name, " holds ", out[i], " at element ", begin + i,
               "; weights must be finite");
    });
  };
}

DType hf_dtype(const std::string& directory, const ModelConfig& config) {
  const std::vector<SafetensorsFile> files = open_weights(directory);
  const std::vector<WeightSource> sources = match_weights(files, config);
  const std::string& first = sources[0].tensor->dtype;
  for (const WeightSource& s : sources)
    if (s.tensor->dtype != first) return DType::f32;
  return first == "BF16" ? DType::bf16 : first == "F16" ? DType::f16 : DType::f32;
}

std::vector<NamedTensor> hf_tensors(const ModelConfig& config, const ParameterReader& weights) {
  std::vector<NamedTensor> tensors;
  for (const Parameter& p : parameters(config))
    tensors.push_back({p.name, p.shape, [weights, i = tensors.size()](int64_t begin, int64_t count, float* out) {
                         weights(i, begin, count, out);
                       }});
  return tensors;
}

FileSums write_hf_config(const std::string& folder, const ModelConfig& config, DType dtype) {
  json object = to_json(config);
  object["torch_dtype"] = dtype == DType::f32 ? "float32" : dtype == DType::bf16 ? "bfloat16" : "float16";
  return {{"config.json", write_file(folder + "/config.json", object.dump(2) + "\n")}};
}

void save_folder(const std::string& directory, bool overwrite,
                 const std::function<void(const std::string& folder)>& fill) {
  check_replaceable(directory, overwrite);
  write_folder(directory, fill);
}

void save_hf(const std::string& directory, const ModelConfig& config, const ParameterReader& weights, DType dtype,
             bool overwrite, const std::function<void(const std::string& folder)>& more) {
  save_folder(directory, overwrite, [&](const std::string& folder) {
    write_hf_config(folder, config, dtype);
    const std::vector<TensorFile> files = deal_tensors("model", hf_tensors(config, weights), dtype);
    for (const TensorFile& file : files) write_safetensors(cat(folder, "/", file.name), file.tensors, dtype);
    write_index(folder, "model", files, dtype);
    if (more) more(folder);
  });
}

// Returns the files of the folder for which a name of folder_files() stands.
static std::vector<std::string> files_named(const fs::path& folder, const std::string& name) {
  const size_t star = name.find('*'), slash = name.find('/');
  std::error_code ignored;
  if (star == std::string::npos)
    return fs::exists(folder / name, ignored) ? std::vector{name} : std::vector<std::string>();
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder / name.substr(0, slash), ignored))
    if (const std::string path = cat(name.substr(0, slash), "/", entry.path().filename().string());
        path.size() >= name.size() - 1 && path.starts_with(name.substr(0, star)) &&
        path.ends_with(name.substr(star + 1)))
      found.push_back(path);
  return found;
}

static FileSums copy_files(const fs::path& from, const std::string& to, FolderFile::Part part,
                           const std::set<std::string>& besides = {}) {
  FileSums sums;
  for (const FolderFile& file : folder_files())
    if (file.part == part && file.saved == FolderFile::Saved::copied && !besides.contains(file.name))
      for (const std::string& name : files_named(from, file.name)) {
        fs::create_directories((fs::path(to) / name).parent_path());
        sums[name] = copy_file((from / name).string(), cat(to, "/", name));
      }
  return sums;
}

FileSums copy_tokenizer(const std::string& from, const std::string& to) {
  using enum FolderFile::Part;
  if (fs::is_directory(from)) return copy_files(from, to, tokenizer);
  const fs::path file(from);
  // Another tokenizer may lie beside the file.
  FileSums sums = copy_files(file.parent_path(), to, tokenizer,
                             {"tokenizer.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
                              "tokenizer.bin", "vocab_pieces.json", "tokenizer.ssa"});
  const std::string kind = file.extension() == ".json" || file.extension() == ".ssa" ? file.extension() : ".bin";
  const std::string name = (file.filename() == "vocab_pieces.json" ? "vocab_pieces" : "tokenizer") + kind;
  sums[name] = copy_file(from, cat(to, "/", name));
  return sums;
}

FileSums copy_generation_config(const std::string& model, const std::string& to) {
  return copy_files(model, to, FolderFile::Part::model);
}

}  // namespace pare
