#include "app/run_directory.h"

#include <filesystem>

#include "model/hf.h"

namespace pare {

namespace fs = std::filesystem;

RunDirectory::RunDirectory(const std::string& path, const Config& config, bool force) : path_(path) {
  const fs::path dir(path);
  std::error_code error;
  if (path.empty()) fail("trainer.default_local_dir is empty; expected a directory to write to");
  for (const char* name : {"metrics.jsonl", "model"})
    if (fs::exists(dir / name, error) && !force)
      fail(path, " holds a run already (", name,
           "); choose another trainer.default_local_dir, or --force to replace it");
  fs::create_directories(dir, error);
  if (error) fail(path, ": cannot be created: ", error.message());
  std::ofstream(dir / "config.toml") << to_toml(config);
  metrics_.open(dir / "metrics.jsonl");
  if (!metrics_) fail(path, ": metrics.jsonl cannot be written");
}

void RunDirectory::log(const Metrics& metrics) { metrics_ << metrics.json() << std::endl; }

void RunDirectory::save_model(const Session& session) const {
  save_hf((fs::path(path_) / "model").string(), session.model_config, session.model->get_parameters(), DType::f32, true,
          [&](const std::string& folder) {
            const std::string source = session.config.model.path;
            const fs::path file = fs::path(source) / "tokenizer.bin";
            if (!source.empty() && fs::exists(file)) fs::copy_file(file, fs::path(folder) / "tokenizer.bin");
          });
}

}  // namespace pare
