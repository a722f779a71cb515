// pare inspect: the tensors of a safetensors file, or of a model folder checked against its config.json.
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>

#include "app/commands.h"
#include "base/hub_cache.h"
#include "base/text.h"
#include "model/hf/folder.h"

namespace pare {

namespace {

void print_files(const std::vector<SafetensorsFile>& files) {
  struct Sum {
    size_t tensors = 0;
    uint64_t elements = 0, bytes = 0;
  };
  std::map<std::string, Sum> sums;
  for (const SafetensorsFile& file : files) {
    std::printf("%s\n", printable(file.path()).c_str());
    for (const auto& [key, value] : file.metadata())
      std::printf("  metadata %s = %s\n", printable(key).c_str(), printable(value).c_str());
    for (const SafetensorsTensor& t : file.tensors()) {
      std::printf("  %-60s %-5s %-16s %12llu bytes\n", printable(t.name).c_str(), printable(t.dtype).c_str(),
                  shape_string(t.shape).c_str(), static_cast<unsigned long long>(t.bytes));
      for (const std::string& key : {t.dtype, std::string("total")}) {
        Sum& sum = sums[key];
        sum.tensors++;
        sum.elements += static_cast<uint64_t>(t.size());
        sum.bytes += t.bytes;
      }
    }
  }
  sums["total"];  // printed for a file without tensors too
  for (const auto& [key, sum] : sums)
    std::printf("%s: %zu tensors, %llu parameters, %llu bytes\n", printable(key).c_str(), sum.tensors,
                static_cast<unsigned long long>(sum.elements), static_cast<unsigned long long>(sum.bytes));
}

void inspect(const std::string& given) {
  const std::string path = in_hub_cache(given);
  if (!std::filesystem::is_directory(path) && how_to_download(path).empty()) {
    std::vector<SafetensorsFile> files;
    files.emplace_back(path);
    print_files(files);
    return;
  }
  const ModelConfig config = load_model_config(path);
  const std::vector<SafetensorsFile> files = open_weights(path);
  match_weights(files, config);
  print_files(files);
  const std::vector<Parameter> layout = parameters(config);
  std::printf(
      "model: %s, %lld layers, width %lld, %lld heads (%lld kv) of %lld, ffn %lld, vocabulary %lld%s, "
      "%lld parameters\n",
      config.model_type.c_str(), static_cast<long long>(config.layers), static_cast<long long>(config.hidden),
      static_cast<long long>(config.heads), static_cast<long long>(config.kv_heads),
      static_cast<long long>(config.head_dim), static_cast<long long>(config.ffn), static_cast<long long>(config.vocab),
      config.tied ? " (tied)" : "", static_cast<long long>(layout.back().offset + layout.back().size));
}

}  // namespace

void add_inspect(const Command& program) {
  const Command command = program.command("inspect", "tensors of a safetensors file or a model folder");
  auto path = std::make_shared<std::string>();
  command.option("path", *path, "FILE.safetensors or a Hugging Face model folder").required();
  command.action([path] { inspect(*path); });
}

}  // namespace pare
