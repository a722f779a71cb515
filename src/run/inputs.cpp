#include "run/inputs.h"

#include <algorithm>
#include <filesystem>

#include "base/file.h"
#include "base/foreign_file.h"
#include "data/presets.h"
#include "data/reward_command.h"
#include "tokenizer/tokenizer.h"

namespace pare {

namespace fs = std::filesystem;

namespace {

std::string digest_of(const std::string& path) {
  std::error_code none;
  return fs::is_regular_file(path, none) ? read_sum(path).xxh128 : "";
}

// Returns the digest of a file, or of the part of the program that has this name.
std::string digest_of(const std::string& path, const char* ending) {
  const auto preset = preset_text(path, ending);
  return preset ? xxh128(*preset) : digest_of(path);
}

// A folder's tokenizer is the first of several files; those beside it say how it is used.
void add_tokenizer(const Config& c, std::vector<Input>& inputs) {
  const std::string spec = tokenizer_spec(c), key = c.data.tokenizer.empty() ? "model.path" : "data.tokenizer";
  if (spec == "ssa") return inputs.push_back({"tokenizer", key, "tokenizer", spec, xxh128(ssa_tokenizer_file())});
  std::error_code none;
  const bool folder = fs::is_directory(spec, none);
  const std::string found = folder ? tokenizer_file(spec) : spec;
  const std::string file = found.empty() ? (fs::path(spec) / "tokenizer.json").string() : found;
  inputs.push_back({"tokenizer", key, "tokenizer", file, digest_of(file)});
  const bool chat = c.data.task == "jsonl" && (c.data.chat_template == "auto" || c.data.chat_template == "chatml");
  const auto beside = [&](const char* name, const char* feeds) {
    const std::string path = (fs::path(file).parent_path() / name).string();
    inputs.push_back({cat("tokenizer/", name), key, feeds, path, digest_of(path), false});
  };
  beside("tokenizer_config.json", chat ? "special tokens and chat template" : "special tokens");
  beside("special_tokens_map.json", "special tokens");
  if (!chat) return;
  beside("chat_template.jinja", "chat template");
  beside("additional_chat_templates/default.jinja", "chat template");
}

}  // namespace

std::vector<Input> read_inputs(const Config& c) {
  std::vector<Input> inputs;
  const auto add = [&](const std::string& name, const char* key, const char* feeds, const std::string& path) {
    inputs.push_back({name, key, feeds, path, digest_of(path)});
  };
  const auto in = [&](const std::string& folder, const char* key, const char* file, const char* feeds) {
    add(cat(key, "/", file), key, feeds, (fs::path(folder) / file).string());
  };
  if (c.model.path.empty()) {
    inputs.push_back({"model.path/config.json", "model.config", "shape and arithmetic of the model", c.model.config,
                      digest_of(c.model.config, "json")});
  } else {
    in(c.model.path, "model.path", "config.json", "shape, arithmetic and EOS of the model");
    in(c.model.path, "model.path", "generation_config.json", "EOS of the model");
    inputs.back().needed = false;
  }
  if (const std::string& adapter = c.model.lora.adapter_path; !adapter.empty())
    in(adapter, "model.lora.adapter_path", "adapter_config.json", "rank, alpha and layers of the adapters");
  add_tokenizer(c, inputs);
  const auto rows = [&](const char* key, const char* feeds, const std::vector<std::string>& files) {
    for (size_t i = 0; i < files.size(); i++)
      inputs.push_back({cat(key, "[", i, "]"), key, feeds, files[i], digest_of(files[i], "jsonl")});
  };
  rows("data.train_files", "training problems", c.data.train_files);
  rows("data.val_files", "validation problems", c.data.val_files);
  if (RewardCommand::is_one(c.data.reward)) {
    const auto words = RewardCommand(c.data.reward, c.data.reward_timeout).program_and_words();
    for (size_t i = 0; i < words.size(); i++) {
      add(cat("data.reward[", i, "]"), "data.reward", i == 0 ? "the program that grades" : "a file of the grader",
          words[i]);
      inputs.back().needed = i == 0;
    }
  }
  if (c.algorithm.rpo.enable && !c.algorithm.rpo.cache_file.empty())
    add("algorithm.rpo.cache_file", "algorithm.rpo.cache_file", "the first prefixes of RPO",
        c.algorithm.rpo.cache_file);
  return inputs;
}

std::vector<InputChange> input_changes(const std::vector<Input>& before, const std::vector<Input>& now) {
  const auto find = [](const std::vector<Input>& inputs, const std::string& name) {
    return std::find_if(inputs.begin(), inputs.end(), [&](const Input& i) { return i.name == name; });
  };
  std::vector<InputChange> changes;
  for (const Input& input : now) {
    const auto old = find(before, input.name);
    const std::string digest = old == before.end() ? "" : old->digest;
    if (digest != input.digest) changes.push_back({input, digest});
  }
  for (const Input& old : before)  // the configuration names fewer files
    if (find(now, old.name) == now.end())
      changes.push_back({{old.name, old.name, "read before", old.path, "", false}, old.digest});
  return changes;
}

bool same_path(const std::string& a, const std::string& b) {
  std::error_code none;
  return a == b || fs::weakly_canonical(fs::absolute(a), none) == fs::weakly_canonical(fs::absolute(b), none);
}

void refuse_changes(const std::vector<InputChange>& changes, const std::vector<std::string>& accepted,
                    const std::string& since) {
  std::string list, options;
  size_t refused = 0;
  for (const auto& [input, before] : changes) {
    if (std::any_of(accepted.begin(), accepted.end(),
                    [&path = input.path](const auto& a) { return same_path(a, path); }))
      continue;
    refused++;
    list += cat(list.empty() ? "" : ", ", input.path, " (", input.key, ": ", input.feeds, ") ",
                input.digest.empty() ? cat("is gone (moved? ", input.key, "=PATH)")
                : before.empty()     ? "is new"
                                     : "has changed");
    if (const std::string option = cat(" --accept-changed ", shell_word(input.path));
        !(input.needed && input.digest.empty()) && options.find(option) == options.npos)
      options += option;
  }
  if (refused > 0)
    fail(list, " since ", since, " was written; restore ", refused == 1 ? "it" : "them",
         options.empty() ? "" : ", or go on with", options);
}

}  // namespace pare
