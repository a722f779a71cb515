#include "app/shorthands.h"

#include "comm/processes.h"
#include "run/config.h"

namespace pare {

void Shorthands::add(const Command& command) {
  for (size_t i = 0; i < flags_.size(); i++) {
    const ConfigKey& key = config_key(flags_[i].name);
    const std::string meaning = flags_[i].meaning ? flags_[i].meaning : key.meaning;
    command.option(flags_[i].name, values_[i], cat(meaning, " (", key.name, ")"))
        .type_name(key.type == "string"             ? "TEXT"
                   : key.type == "boolean"          ? "on|off"
                   : key.type.starts_with("one of") ? "WORD"
                                                    : "NUMBER");
  }
}

std::vector<std::string> Shorthands::overrides(const Command& command) const {
  std::vector<std::string> all;
  for (size_t i = 0; i < flags_.size(); i++) {
    if (!command.given(flags_[i].name)) continue;
    const ConfigKey& key = config_key(flags_[i].name);
    std::string value = key.type == "string" ? toml_quote(values_[i]) : values_[i];
    if (key.type == "boolean") {
      if (value != "on" && value != "off") fail(flags_[i].name, ": expected on or off, found ", value);
      value = value == "on" ? "true" : "false";
    }
    all.push_back(cat(key.name, "=", value));
  }
  return all;
}

void add_ranks(const Command& command, int& ranks) {
  command.option("--ranks", ranks, "processes of this machine that share the work, without MPI; with cuda one per GPU")
      .between(1, kMostRanks)
      .type_name("N");
}

}  // namespace pare
