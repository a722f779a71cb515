#include "model/hf/peft.h"

#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "base/file.h"
#include "base/json_file.h"
#include "base/thread_pool.h"

namespace pare {

using nlohmann::json;

namespace {

constexpr const char* config_name = "adapter_config.json";
constexpr const char* weights_name = "adapter_model.safetensors";

// What does not touch the arithmetic: where the adapter comes from, and how it was trained.
const std::set<std::string> harmless_keys = {
    "auto_mapping", "base_model_name_or_path", "bias",      "inference_mode", "init_lora_weights", "lora_alpha",
    "lora_dropout", "megatron_core",           "peft_type", "peft_version",   "qalora_group_size", "r",
    "revision",     "target_modules",          "task_type"};

bool is_neutral(const json& value) {
  return value.is_null() || value == false || (value.is_structured() && value.empty());
}

int projection_of(const std::string& module, const std::string& path) {
  std::string known;
  for (int p = 0; p < kProjections; p++) {
    if (module == projection_name(p) || module == projection_path(p)) return p;
    known += " " + projection_name(p);
  }
  fail(path, ": target_modules: ", json(module).dump(), " is none of", known);
}

bool is_b(size_t parameter) { return parameter % 2 == 1; }  // A and B take turns in the layout

}  // namespace

// PEFT wraps the model in two modules of its own.
std::string peft_name(const Parameter& parameter) { return "base_model.model." + parameter.name; }

LoraSpec load_adapter_config(const std::string& directory) {
  if (!std::filesystem::is_directory(directory)) fail(directory, ": no such directory; expected an adapter of PEFT");
  const std::string path = cat(directory, "/", config_name);
  const json file = read_json_file(path);
  if (!file.is_object()) fail(path, ": expected an object");
  for (const auto& [key, value] : file.items())
    if (!harmless_keys.contains(key) && !is_neutral(value))
      fail(path, ": ", key, " = ", value.dump(), " is not supported");
  if (file.contains("peft_type") && file["peft_type"] != "LORA")
    fail(path, ": peft_type = ", file["peft_type"].dump(), ", expected \"LORA\"");
  if (file.contains("bias") && !is_neutral(file["bias"]) && file["bias"] != "none")
    fail(path, ": bias = ", file["bias"].dump(), " is not supported, only \"none\"");
  // Other ways to begin (PiSSA, OLoRA, LoftQ, ...) change W too.
  if (file.contains("init_lora_weights") && !file["init_lora_weights"].is_boolean() &&
      file["init_lora_weights"] != "gaussian" && file["init_lora_weights"] != "orthogonal")
    fail(path, ": init_lora_weights = ", file["init_lora_weights"].dump(), " is not supported");
  const auto number = [&](const char* key, double low) {
    if (!file.contains(key) || !file[key].is_number() || !(file[key] >= low) || !(file[key] <= 1e6))
      fail(path, ": ", key, ": expected a number from ", low, " to 1e6");
    return file[key].get<double>();
  };
  if (const double r = number("r", 1); r != std::floor(r)) fail(path, ": r = ", r, ", expected an integer");
  LoraSpec spec{.rank = static_cast<int64_t>(number("r", 1)), .alpha = number("lora_alpha", 0), .targets = {}};
  if (!(spec.alpha > 0)) fail(path, ": lora_alpha = 0 leaves nothing of the adapter");
  if (!file.contains("target_modules") || !file["target_modules"].is_array() || file["target_modules"].empty())
    fail(path, ": target_modules: expected a list of names");
  for (const json& module : file["target_modules"])
    spec.targets[projection_of(module.is_string() ? module.get<std::string>() : module.dump(), path)] = true;
  return spec;
}

ParameterReader adapter_weights(const std::string& directory, const ModelConfig& config) {
  const LoraSpec spec = load_adapter_config(directory);
  const auto file = std::make_shared<const SafetensorsFile>(cat(directory, "/", weights_name));
  std::vector<const SafetensorsTensor*> tensors;
  for (const Parameter& p : adapter_parameters(config, spec)) {
    const SafetensorsTensor* t = file->find(peft_name(p));
    if (!t) fail(file->path(), ": missing tensor ", peft_name(p), " of an adapter of this model");
    if (t->shape != p.shape)
      fail(file->path(), ": tensor ", t->name, " is ", shape_string(t->shape), ", the model and ", config_name,
           " need ", shape_string(p.shape));
    tensors.push_back(t);
  }
  if (tensors.size() != file->tensors().size()) {
    const std::set<const SafetensorsTensor*> known(tensors.begin(), tensors.end());
    for (const SafetensorsTensor& t : file->tensors())
      if (!known.contains(&t)) fail(file->path(), ": unexpected tensor ", json(t.name).dump());
  }
  return [file, tensors, scale = spec.scale()](size_t parameter, int64_t begin, int64_t count, float* out) {
    const SafetensorsTensor& t = *tensors[parameter];
    file->read_f32(t, out, begin, count);
    for (int64_t i = 0; i < count; i++) {
      if (is_b(parameter)) out[i] = static_cast<float>(out[i] * scale);
      if (!std::isfinite(out[i]))
        fail(file->path(), ": tensor ", t.name, " holds ", out[i], " at element ", begin + i,
             "; weights must be finite");
    }
  };
}

FileSums write_adapter_files(const std::string& folder, const Adapters& adapters, const ParameterReader& read,
                             double alpha, const std::string& base, DType dtype) {
  const auto rank = static_cast<double>(adapters.spec.rank);
  std::vector<NamedTensor> tensors;
  for (const Parameter& p : adapters.layout)
    tensors.push_back({peft_name(p), p.shape,
                       [i = tensors.size(), scale = alpha / rank, &read](int64_t begin, int64_t count, float* out) {
                         read(i, begin, count, out);
                         for (int64_t e = 0; is_b(i) && e < count; e++) out[e] = static_cast<float>(out[e] / scale);
                       }});
  json modules = json::array();
  for (int p = 0; p < kProjections; p++)
    if (adapters.spec.targets[p]) modules.push_back(projection_name(p));
  json object = {{"peft_type", "LORA"},       {"task_type", "CAUSAL_LM"}, {"base_model_name_or_path", base},
                 {"r", adapters.spec.rank},   {"lora_alpha", alpha},      {"lora_dropout", 0.0},
                 {"target_modules", modules}, {"bias", "none"},           {"inference_mode", true}};
  if (alpha == std::floor(alpha)) object["lora_alpha"] = static_cast<int64_t>(alpha);
  FileSums sums;
  sums[config_name] = write_file(cat(folder, "/", config_name), object.dump(2) + "\n");
  sums[weights_name] = write_safetensors(cat(folder, "/", weights_name), std::move(tensors), dtype);
  return sums;
}

ParameterReader merged_weights(const ParameterReader& weights, const std::string& adapter, const ModelConfig& config) {
  const LoraSpec spec = load_adapter_config(adapter);
  const ParameterReader read = adapter_weights(adapter, config);
  const std::vector<Parameter> layout = adapter_parameters(config, spec);
  struct Factors {
    std::vector<float> a, b;
  };
  // Shared: a std::function is copied.
  const auto factors = std::make_shared<std::map<std::string, Factors>>();  // by the name of W
  for (size_t i = 0; i < layout.size(); i++) {
    const std::string& name = layout[i].name;
    Factors& f = (*factors)[name.substr(0, name.rfind(".lora_")) + ".weight"];
    std::vector<float>& values = is_b(i) ? f.b : f.a;
    values.resize(static_cast<size_t>(layout[i].size));
    read(i, 0, layout[i].size, values.data());
  }
  return [weights, factors, rank = spec.rank, names = parameters(config)](size_t parameter, int64_t begin,
                                                                          int64_t count, float* out) {
    weights(parameter, begin, count, out);
    const auto found = factors->find(names[parameter].name);
    if (found == factors->end()) return;
    const Factors& f = found->second;
    const int64_t columns = names[parameter].shape[1];
    parallel_for(count, 1 << 14, [&](int64_t first, int64_t last) {
      std::vector<double> sum;
      for (int64_t i = first, n = 0; i < last; i += n) {  // a part of a row
        const int64_t row = (begin + i) / columns, column = (begin + i) % columns;
        n = std::min(last - i, columns - column);
        sum.assign(out + i, out + i + n);
        for (int64_t k = 0; k < rank; k++) {
          const double b = f.b[row * rank + k];
          for (int64_t c = 0; c < n; c++) sum[c] += b * f.a[k * columns + column + c];
        }
        for (int64_t c = 0; c < n; c++) out[i + c] = static_cast<float>(sum[c]);
      }
    });
  };
}

}  // namespace pare
