#include "app/run_directory.h"

#include <filesystem>
#include <nlohmann/json.hpp>

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
  fs::remove(dir / "rollouts.jsonl", error);
  metrics_.open(dir / "metrics.jsonl");
  if (!metrics_) fail(path, ": metrics.jsonl cannot be written");
}

void RunDirectory::log(const Metrics& metrics) { metrics_ << metrics.json() << std::endl; }

void RunDirectory::log_samples(const Trainer& trainer) {
  std::ofstream file(fs::path(path_) / "rollouts.jsonl", std::ios::app);
  for (const SampleText& t : trainer.texts()) {
    nlohmann::ordered_json line = {{"step", trainer.steps()},  {"prompt", t.prompt},       {"response", t.response},
                                   {"extracted", t.extracted}, {"answer", t.answer},       {"score", t.score},
                                   {"reward", t.reward},       {"advantage", t.advantage}, {"tokens", t.tokens},
                                   {"finished", t.finished}};
    // A response cut inside a character is not UTF-8.
    file << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  }
}

void RunDirectory::save_model(const Session& session) const {
  save_hf((fs::path(path_) / "model").string(), session.model_config, session.model->get_parameters(), DType::f32, true,
          [&](const std::string& folder) {
            const fs::path source = session.config.model.path;
            for (const char* name : {"tokenizer.bin", "vocab_pieces.json", "tokenizer.json", "tokenizer_config.json",
                                     "chat_template.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"})
              if (!source.empty() && fs::exists(source / name)) fs::copy_file(source / name, fs::path(folder) / name);
          });
}

}  // namespace pare
