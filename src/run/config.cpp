#include "run/config.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "base/hub_cache.h"
#include "base/nearest.h"
#include "base/text.h"
#include "data/presets.h"
#include "run/unknown_key.h"

namespace pare {
namespace {

std::string last_part(const std::string& key) { return key.substr(key.rfind('.') + 1); }

// Resolved configurations of older programs state keys that have gone.  True for a value under which they did what this
// program does.
bool retired(const Config& config, const TomlItem& item) {
  static const std::map<std::string, std::string> gone = {{"algorithm.rollout_correction.too_few", "skip"},
                                                          {"learner.reduce", "ordered"},
                                                          {"reward_model.length_reward.form", "correct_only"},
                                                          {"rollout.allow_truncated_sampling", "false"},
                                                          {"rollout.kv.blocks.schedule", ""},
                                                          {"rollout.kv.h2o.normalise", "false"},
                                                          {"rollout.kv.streaming_llm.rope", "absolute"}};
  const std::string value = item.values.empty() ? "" : item.values[0].text;
  const auto it = gone.find(item.key);
  if (it != gone.end()) return value == it->second;
  // Their methods have gone, so that only the names of these are refused.
  if (item.key == "rollout.kv.evict.protect_first" || item.key == "rollout.kv.merge.cam_targets") return true;
  return item.key == "data.val_max_statements" && (value == "0" || value == cat(config.data.max_statements));
}

// True for the resolved configuration of a run, by this program or an older one: a user's has far fewer keys.
bool is_resolved(const std::vector<TomlItem>& items) { return items.size() > config_keys().size() / 2; }

// Renames keys of an older program, which wrote this.
void rename_old(std::vector<TomlItem>& items) {
  for (TomlItem& item : items)
    if (item.key == "learner.slots") item.key = "learner.shards";
}

void apply(Config& config, const TomlItem& item) {
  if (retired(config, item)) return;
  for (const ConfigKey& k : config_keys()) {
    if (k.name != item.key) continue;
    try {
      return k.assign(config, item);
    } catch (const Error& e) {
      fail(item.where, ": ", k.name, ": ", e.what());
    }
  }
  fail(item.where, ": unknown key ", item.key, about_unknown_key(item.key));
}

// The state of reading: the configuration so far, and who gave its values.
struct Reading {
  Config config;
  // Keys whose value a preset gave, and which one; what a user's file or override gave is not here.
  std::map<std::string, std::string> presets;
  std::set<std::string> typed;  // keys whose value a user wrote
};

// A file, or the overrides between two files: what is said at once.  `preset`: whose words these are; empty: a user's.
// What it gives takes the place of what an earlier layer gave instead of it.
void apply_layer(Reading& reading, const std::vector<TomlItem>& layer, const std::string& preset) {
  std::set<std::string> said, given;  // given: and not as empty
  for (const TomlItem& item : layer) {
    apply(reading.config, item);
    said.insert(item.key);
    if (!item.values.empty() && !item.values[0].text.empty()) given.insert(item.key);
    if (preset.empty()) {
      reading.presets.erase(item.key);
      reading.typed.insert(item.key);
    } else {
      reading.presets[item.key] = preset;
      reading.typed.erase(item.key);
    }
  }
  if (is_resolved(layer)) reading.typed.clear();
  ModelKeys& model = reading.config.model;
  if (given.count("model.path") && !given.count("model.config")) model.config.clear();
  if (given.count("model.config") && !given.count("model.path")) model.path.clear();
  TrainerKeys& trainer = reading.config.trainer;
  const bool steps = said.count("trainer.total_training_steps");
  if (said.count("trainer.total_epochs") && trainer.total_epochs > 0 && !steps) trainer.total_training_steps = 0;
  if (steps && !said.count("trainer.total_epochs")) trainer.total_epochs = 0;
  if ((given.count("data.train_files") || given.count("data.val_files")) && !said.count("data.task"))
    reading.config.data.task = "jsonl";
}

[[noreturn]] void fail_unknown(const std::string& name) {
  std::error_code ignored;
  if (std::filesystem::is_directory(name, ignored)) {
    const std::string own = (std::filesystem::path(name) / "config.toml").string();
    const bool run = std::filesystem::exists(own, ignored);
    fail(name, ": a folder, expected a configuration file", run ? cat(" such as ", own) : "");
  }
  if (name.find('/') != std::string::npos || name.ends_with(".toml")) fail(name, ": no such file");
  const std::vector<std::string> presets = preset_names("toml");
  std::string known;
  for (const std::string& p : presets)
    if (!p.starts_with("paper-") && !p.starts_with("released-")) known += " " + p;
  fail("expected a preset, a configuration file or group.key=value, found ", toml_quote(name),
       "; the nearest preset is ", nearest(name, presets), "; presets:", known,
       ", and the papers' paper-* and released-*");
}

// Applies a preset or a file, after its bases.
void apply_configuration(Reading& reading, const std::string& name, int depth) {
  const std::optional<std::string_view> preset = preset_text(name, "toml");
  std::error_code ignored;  // such as of a name that is too long
  if (!preset && !std::filesystem::is_regular_file(name, ignored)) fail_unknown(name);
  if (depth > 8) fail(name, ": base: the files include one another in a circle");
  std::stringstream text;
  if (preset) {
    text << *preset;
  } else {
    std::ifstream file(name, std::ios::binary);
    text << file.rdbuf();
    if (!file) fail(name, ": cannot be read");
  }
  std::vector<TomlItem> items = parse_toml(text.str(), preset ? "preset " + name : name);
  for (const TomlItem& item : items)
    if (item.key == "base") {
      for (const TomlValue& value : item.values) {
        if (value.kind != TomlValue::Kind::string)
          fail(item.where, ": base: expected the name of a file or preset in quotes, or an array of names");
        apply_configuration(reading, value.text, depth + 1);
      }
    }
  std::erase_if(items, [](const TomlItem& item) { return item.key == "base"; });
  if (is_resolved(items)) rename_old(items);
  apply_layer(reading, items, preset ? name : "");
}

// What a preset says for itself alone: the directory of its run, and when to validate on files that are not there.
void drop_what_does_not_hold(Reading& reading, bool alone, const std::string& last, std::vector<std::string>* notes) {
  Config& c = reading.config;
  const auto preset_of = [&](const char* key) {
    const auto it = reading.presets.find(key);
    return it == reading.presets.end() ? "" : it->second;
  };
  const std::string directory = preset_of("trainer.default_local_dir");
  if (!directory.empty() && !(alone && directory == last)) c.trainer.default_local_dir.clear();
  if (c.data.task != "jsonl" || !c.data.val_files.empty()) return;
  const Config defaults;
  for (const char* key : {"trainer.test_freq", "trainer.val_before_train"}) {
    const std::string preset = preset_of(key), value = config_key(key).show(c), off = config_key(key).show(defaults);
    if (preset.empty() || value == off) continue;
    if (notes) notes->push_back(cat(key, " = ", value, " of the preset ", preset, " is off: data.val_files is empty"));
    apply_toml(c, cat(key, " = ", off), "");
  }
}

// Returns a value as conditions spell it: without quotes.
std::string plain(const std::string& toml) { return toml.starts_with('"') ? toml.substr(1, toml.size() - 2) : toml; }

std::string readable(const std::string& value) { return value.empty() ? "empty" : value; }

void note_keys_without_effect(const Reading& reading, std::vector<std::string>& notes) {
  const Config& c = reading.config;
  if (reading.typed.count("trainer.total_epochs") && c.trainer.total_epochs > 0 && c.trainer.total_training_steps > 0)
    notes.push_back(
        cat("trainer.total_epochs has no effect: trainer.total_training_steps is ", c.trainer.total_training_steps));
  for (const ConfigKey& k : config_keys()) {
    if (!reading.typed.count(k.name) || k.show(c) == k.show({})) continue;
    const auto unmet = std::find_if(k.when.begin(), k.when.end(), [&](const KeyCondition& w) { return !w.holds(c); });
    if (unmet != k.when.end())
      notes.push_back(
          cat(k.name, " has no effect: ", unmet->key, " is ", readable(plain(config_key(unmet->key).show(c)))));
  }
}

}  // namespace

bool KeyCondition::holds(const Config& config) const {
  const std::string value = plain(config_key(key).show(config));
  const bool found = std::any_of(values.begin(), values.end(), [&](const std::string& v) {
    return v.ends_with('*') ? value.starts_with(v.substr(0, v.size() - 1)) : value == v;
  });
  return found != negated;
}

void apply_toml(Config& config, const std::string& document, const std::string& where) {
  for (const TomlItem& item : parse_toml(document, where)) apply(config, item);
}

void apply_recorded(Config& config, const std::string& document, const std::string& where) {
  std::vector<TomlItem> items = parse_toml(document, where);
  rename_old(items);
  for (const TomlItem& item : items) apply(config, item);
}

Config read_config(const std::vector<std::string>& files_and_overrides, std::vector<std::string>* notes) {
  Reading reading;
  std::string name, last;
  int configurations = 0;
  bool alone = true;  // one configuration, with nothing laid over it but a device
  std::vector<TomlItem> overrides;
  const auto lay_overrides = [&] {
    apply_layer(reading, overrides, "");
    overrides.clear();
  };
  for (const std::string& argument : files_and_overrides) {
    if (argument.starts_with('=')) fail("expected group.key=value, found ", toml_quote(argument));
    std::error_code ignored;
    if (argument.find('=') == std::string::npos || std::filesystem::is_regular_file(argument, ignored)) {
      lay_overrides();
      apply_configuration(reading, argument, 0);
      last = argument;
      name += (name.empty() ? "" : "-") +
              (preset_text(argument, "toml") ? argument : std::filesystem::path(argument).stem().string());
      alone = alone && ++configurations == 1;
    } else {
      overrides.push_back(parse_toml_override(argument));
      alone = alone && (overrides.back().key == "trainer.device" || overrides.back().key == "trainer.exact");
    }
  }
  lay_overrides();
  drop_what_does_not_hold(reading, alone, last, notes);
  Config& config = reading.config;
  for (int64_t* top_k : {&config.rollout.top_k, &config.rollout.val_kwargs.top_k})
    *top_k = std::max<int64_t>(*top_k, 0);
  for (std::string* path : {&config.model.path, &config.data.tokenizer}) {
    const std::string given = std::exchange(*path, in_hub_cache(*path));
    if (notes && given != *path) notes->push_back(cat(given, " is ", *path, ", from the cache of the Hub"));
  }
  check_utf8(name, "the names of the configuration files, which name the run");
  if (config.trainer.experiment_name.empty()) config.trainer.experiment_name = name;
  DataKeys& data = config.data;
  if (data.val_min_statements == 0) data.val_min_statements = data.min_statements;
  OverlongKeys& overlong = config.reward_model.overlong_buffer;
  if (overlong.enable && overlong.len == 0) overlong.len = std::max<int64_t>(config.data.max_response_length / 5, 1);
  if (notes) note_keys_without_effect(reading, *notes);
  return config;
}

Config load_config(const std::vector<std::string>& files_and_overrides, std::vector<std::string>* notes) {
  const Config config = read_config(files_and_overrides, notes);
  check_config(config);
  return config;
}

std::string to_toml(const Config& config) {
  std::vector<std::string> sections;
  for (const ConfigKey& k : config_keys()) {
    const std::string section = k.name.substr(0, k.name.rfind('.'));
    if (std::find(sections.begin(), sections.end(), section) == sections.end()) sections.push_back(section);
  }
  std::string s;
  for (const std::string& section : sections) {
    s += cat(s.empty() ? "" : "\n", "[", section, "]\n");
    for (const ConfigKey& k : config_keys())
      if (k.name.substr(0, k.name.rfind('.')) == section) s += cat(last_part(k.name), " = ", k.show(config), "\n");
  }
  return s;
}

const ConfigKey& config_key(const std::string& name) {
  for (const ConfigKey& k : config_keys())
    if (k.name == name || std::find(k.flags.begin(), k.flags.end(), name) != k.flags.end()) return k;
  throw std::logic_error(cat("there is no key ", name));
}

namespace {

bool below(const std::string& key, const std::string& group) { return key == group || key.starts_with(group + "."); }

const KeySection& section_of(const ConfigKey& key) {
  const KeySection* best = nullptr;
  for (const KeySection& s : config_sections())
    if (below(key.name, s.name) && (!best || s.name.size() > best->name.size())) best = &s;
  expect(best != nullptr, key.name, " has no section");
  return *best;
}

std::string condition_text(const std::vector<KeyCondition>& when) {
  std::string s;
  for (const KeyCondition& w : when) {
    s += cat(s.empty() ? "If `" : " and `", w.key, w.negated ? "` is not " : "` is ");
    for (size_t i = 0; i < w.values.size(); i++)
      s += cat(i == 0 ? "" : i + 1 < w.values.size() ? ", " : " or ", readable(w.values[i]));
  }
  return s + ":";
}

// Returns the lines of the keys that matter under one condition, below its own.
std::string reference_part(const std::vector<const ConfigKey*>& keys) {
  constexpr size_t kWidth = 100;
  const Config defaults;
  const std::vector<KeyCondition>& when = keys[0]->when;
  std::string s = when.empty() ? "\n" : cat("\n", wrapped(condition_text(when), kWidth, ""), "\n");
  for (const ConfigKey* k : keys)
    s += cat("- `", k->name, " = ", k->show(defaults), "` (", k->type, k->unit.empty() ? "" : ", ", k->unit, "; ",
             k->source, ")\n", wrapped(k->meaning, kWidth, "  "));
  return s;
}

}  // namespace

std::string config_reference(const std::string& group) {
  std::string s;
  for (const KeySection& section : config_sections()) {
    std::vector<std::vector<const ConfigKey*>> parts(1);  // those without a condition first
    for (const ConfigKey& k : config_keys()) {
      if (&section_of(k) != &section || !(group.empty() || below(k.name, group))) continue;
      auto part = k.when.empty() ? parts.begin() : std::find_if(parts.begin() + 1, parts.end(), [&](const auto& p) {
        return p[0]->when == k.when;
      });
      if (part == parts.end()) part = parts.insert(part, std::vector<const ConfigKey*>());
      part->push_back(&k);
    }
    if (parts.size() == 1 && parts[0].empty()) continue;
    s += cat(s.empty() ? "" : "\n", "### `", section.name, "`: ", section.what, "\n");
    for (const auto& part : parts)
      if (!part.empty()) s += reference_part(part);
  }
  if (s.empty()) {
    std::set<std::string> groups;
    for (const ConfigKey& k : config_keys())
      for (size_t dot = k.name.find('.'); dot != std::string::npos; dot = k.name.find('.', dot + 1))
        groups.insert(k.name.substr(0, dot));
    fail("there are no keys ", group, ".*; the nearest group is ", nearest(group, {groups.begin(), groups.end()}));
  }
  return s;
}

}  // namespace pare
