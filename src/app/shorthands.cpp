#include "app/shorthands.h"

#include "rl/config.h"

namespace pare {

void Shorthands::add(CLI::App& command) {
  for (size_t i = 0; i < flags_.size(); i++) {
    const ConfigKey& key = config_key(flags_[i].key);
    const std::string meaning = flags_[i].meaning ? flags_[i].meaning : key.meaning;
    command.add_option(flags_[i].name, values_[i], cat(meaning, " (", key.name, ")"))
        ->type_name(key.type == "string" ? "TEXT" : "NUMBER");
  }
}

std::vector<std::string> Shorthands::overrides(const CLI::App& command) const {
  std::vector<std::string> all;
  for (size_t i = 0; i < flags_.size(); i++) {
    if (command.count(flags_[i].name) == 0) continue;
    const std::string key = flags_[i].key;
    all.push_back(cat(key, "=", config_key(key).type == "string" ? toml_quote(values_[i]) : values_[i]));
    if (key == "model.path") all.push_back("model.config=");
  }
  return all;
}

}  // namespace pare
