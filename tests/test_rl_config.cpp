#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>

#include "base/text.h"
#include "data/presets.h"
#include "run/session.h"
#include "run/unknown_key.h"
#include "tests/keys.h"

namespace pare {
namespace {

const std::string model = "model.config=tiny-ssa";

Config with(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), model);
  return load_config(arguments);
}

// The message of the usage error that `run` ends in.
template <class F>
std::string message(F run) {
  try {
    run();
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::usage);
    return e.what();
  }
  return "no error";
}
std::string load_message(const std::vector<std::string>& arguments) {
  return message([&] { with(arguments); });
}
std::string document_message(const std::string& document) {
  return message([&] {
    Config c;
    apply_toml(c, document, "f.toml");
  });
}
#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

// ---- the key table -------------------------------------------------------------------------------------------------

// Values of every type and choice, as TOML; one of them is allowed for each key and is not its default.
std::vector<std::string> some_values(const ConfigKey& key) {
  std::vector<std::string> values = {"true",        "false",          "7", "0.25",    "'some \"text\" # \\'",
                                     "[0.5, 0.25]", "[\"a\", \"b\"]", "9", "'jsonl'", "'ans'",
                                     "'k2'"};
  for (const auto& [type, open, close] : {std::tuple{"one of ", "'", "'"}, {"array of ", "['", "']"}}) {
    if (!key.type.starts_with(type)) continue;
    std::stringstream words(key.type.substr(std::strlen(type)));
    for (std::string word; std::getline(words, word, ',');)
      values.push_back(open + word.substr(word[0] == ' ') + close);
  }
  return values;
}

std::string other_value(const ConfigKey& key) {
  for (const std::string& v : some_values(key)) {
    Config c;
    try {
      apply_toml(c, key.name + " = " + v, "test");
    } catch (const Error&) {
      continue;
    }
    if (key.show(c) != key.show({})) return v;
  }
  return "";
}

TEST(ConfigKeys, EveryChangeSurvivesPrintingAndReading) {
  std::set<std::string> documents = {to_toml(Config{})};
  for (const ConfigKey& key : config_keys()) {
    const std::string value = other_value(key);
    ASSERT_NE(value, "") << key.name << ": " << key.type;
    Config changed, read;
    apply_toml(changed, key.name + " = " + value, "test");
    EXPECT_NE(changed, Config{}) << key.name;
    const std::string document = to_toml(changed);
    EXPECT_TRUE(documents.insert(document).second) << key.name << " prints like another key";
    apply_toml(read, document, "printed");
    EXPECT_EQ(read, changed) << key.name;
    EXPECT_EQ(to_toml(read), document);
  }
}

TEST(ConfigKeys, TheReferenceListsEveryKeyOnce) {
  const std::string reference = config_reference();
  std::string plain;  // wherever its lines are broken
  for (const char c : reference)
    if (c != '\n' && c != ' ') plain += c;
  for (const ConfigKey& key : config_keys()) {
    const std::string entry = "\n- `" + key.name + " = ";
    const size_t at = reference.find(entry);
    ASSERT_NE(at, std::string::npos) << key.name;
    EXPECT_EQ(reference.find(entry, at + 1), std::string::npos) << key.name;
    std::string expected;
    for (const char c : "`" + key.name + "=" + key.show({}) + "`(" + key.type + (key.unit.empty() ? "" : ",") +
                            key.unit + ";" + key.source + ")" + key.meaning)
      if (c != ' ') expected += c;
    EXPECT_NE(plain.find(expected), std::string::npos) << expected;
    EXPECT_FALSE(key.meaning.empty() || key.source.empty()) << key.name;
  }
  // In Markdown a line that starts with a sign is no text; one that starts with four blanks is code.
  std::stringstream lines(reference);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.starts_with("- `") || line.starts_with("### `")) continue;
    const std::string text = line.starts_with("  ") ? line.substr(2) : line;
    EXPECT_TRUE(std::isalnum(text[0]) || text[0] == '`' || text[0] == '(' || text[0] == '{') << line;
    EXPECT_LE(line.size(), 100u) << line;
  }
}

TEST(ConfigKeys, TheReferenceIsGroupedByCondition) {
  const std::string kv = config_reference("rollout.kv");
  EXPECT_TRUE(kv.starts_with("### `rollout.kv`: ")) << kv;
  EXPECT_HAS(kv, "\nIf `rollout.kv.method` is rkv:\n\n- `rollout.kv.rkv.lambda = ");
  EXPECT_EQ(config_reference("rollout").find(kv) == std::string::npos, false);
  EXPECT_EQ(kv.find("`actor."), std::string::npos);
  EXPECT_EQ(message([] { config_reference("rollout.kw"); }),
            "there are no keys rollout.kw.*; the nearest group is rollout.kv");
}

// ---- keys without effect -------------------------------------------------------------------------------------------

// An override for which the condition holds, or fails.
std::string override_for(const KeyCondition& when, bool holds) {
  const ConfigKey& key = config_key(when.key);
  std::vector<std::string> values = when.values;
  for (std::string& v : values)
    if (v.ends_with('*')) v.back() = 'x';
  values.push_back(key.show({}));
  for (const std::string& v : some_values(key)) values.push_back(v);
  for (const std::string& v : values) {
    const std::string text = cat(when.key, "=", v);
    try {
      if (when.holds(read_config({text})) == holds) return text;
    } catch (const Error&) {  // of another type
    }
  }
  ADD_FAILURE() << when.key << " cannot be made to " << (holds ? "hold" : "fail");
  return cat(when.key, "=", key.show({}));
}

std::vector<std::string> effects(const std::vector<std::string>& arguments) {
  std::vector<std::string> notes;
  read_config(arguments, &notes);
  std::erase_if(notes, [](const std::string& n) { return n.find("has no effect") == std::string::npos; });
  return notes;
}

TEST(KeysWithoutEffect, AreNotedWhereTheirConditionFails) {
  int conditional = 0;
  for (const ConfigKey& key : config_keys()) {
    const std::string change = cat(key.name, "=", other_value(key));
    std::vector<std::string> holding;
    for (const KeyCondition& when : key.when) holding.push_back(override_for(when, true));
    holding.push_back(change);
    for (const std::string& n : effects(holding)) EXPECT_FALSE(n.starts_with(key.name + " ")) << n;
    for (const KeyCondition& when : key.when) {
      conditional++;
      std::vector<std::string> failing = holding;
      failing.push_back(override_for(when, false));
      const std::vector<std::string> notes = effects(failing);
      const auto note = std::find_if(notes.begin(), notes.end(), [&](const std::string& n) {
        return n.starts_with(cat(key.name, " has no effect: "));
      });
      ASSERT_NE(note, notes.end()) << key.name << " without " << when.key;
    }
    // A condition is of another key that is there, and a default asks for nothing.
    for (const KeyCondition& when : key.when) EXPECT_NE(when.key, key.name);
    EXPECT_TRUE(effects({cat(key.name, "=", key.show({}))}).empty()) << key.name;
  }
  EXPECT_GT(conditional, 60);
}

TEST(KeysWithoutEffect, NameWhatTheyDependOn) {
  using Lines = std::vector<std::string>;
  EXPECT_EQ(effects({"rollout.kv.method=snapkv", "rollout.kv.rkv.lambda=0.7"}),
            Lines{"rollout.kv.rkv.lambda has no effect: rollout.kv.method is snapkv"});
  EXPECT_EQ(effects({"model.init=fan_in"}), Lines{"model.init has no effect: model.config is empty"});
  EXPECT_EQ(effects({"algorithm.obrs.top_k=20"}), Lines{"algorithm.obrs.top_k has no effect: algorithm.obrs.enable is "
                                                        "false"});
}

TEST(KeysWithoutEffect, ArePresetsOwnBusiness) {
  for (const std::string& name : preset_names("toml")) {
    EXPECT_TRUE(effects({name}).empty()) << name;
    EXPECT_TRUE(effects({"quickstart", name}).empty()) << name;
  }
  // A user's value counts until a preset replaces it.
  EXPECT_EQ(effects({"actor.rpc_min_tokens=9"}).size(), 1u);
  EXPECT_TRUE(effects({"actor.rpc_min_tokens=9", "nat-rpc", "actor.token_subset=urs"}).empty());
  // The configuration that a run has written holds every key.
  const std::string file = cat(testing::TempDir(), "pare_resolved_", getpid(), ".toml");
  std::ofstream(file) << to_toml(read_config({"quickstart-rpc", "actor.token_subset=urs"}));
  EXPECT_TRUE(effects({file}).empty());
  EXPECT_EQ(effects({file, "actor.det_fraction=0.2"}).size(), 1u);
  std::filesystem::remove(file);
}

TEST(ConfigKeys, ThePageOfPresetsHasTheReference) {
  std::ifstream file("data/presets/README.md", std::ios::binary);
  const std::string readme{std::istreambuf_iterator<char>(file), {}};
  const size_t begin = readme.find("<!-- config reference"), end = readme.find("<!-- end of config reference");
  ASSERT_NE(begin, std::string::npos);
  ASSERT_NE(end, std::string::npos);
  const size_t text = readme.find('\n', begin) + 1;
  EXPECT_TRUE(readme.substr(text, end - text) == "\n" + config_reference() + "\n")
      << "the reference of data/presets/README.md is not that of the keys: run `make readme`";
}

// A member that is in no key would never be printed: with every key at another value, no member may be at its default.
TEST(ConfigKeys, NumbersPrintWithoutLoss) {
  Config c, read;
  c.actor.optim.lr = 1.0 / 3;
  c.actor.optim.betas = {0.1, 0x1.fffffffffffffp-1};
  c.algorithm.adv_eps = 5e-324;
  c.data.train_seed = INT64_MAX;
  c.trainer.default_local_dir = "a\\b\"c\n\td'e#f ";
  c.data.train_files = {"", "x,y", "[z]"};
  apply_toml(read, to_toml(c), "printed");
  EXPECT_EQ(read, c);
}

// ---- reading -------------------------------------------------------------------------------------------------------

TEST(ConfigRead, Document) {
  Config c;
  apply_toml(c,
             "# a comment\n"
             "model.path = 'C:\\new' # literal\r\n"
             "\n"
             "[actor]\n"
             "  clip_ratio_high=0.28#tight\n"
             "policy_loss.loss_mode = \"cispo\"\n"
             "use_kl_loss = true\n"
             "[actor.optim]   # a section\n"
             "betas = [ 0.8 , # over\n"
             "          9e-1, ]\n"
             "lr = +1e-3\n"
             "[data]\n"
             "train_files = [\"a # b\" , 'c,d']\n"
             "val_files = []\n"
             "train_batch_size = 3",
             "f.toml");
  EXPECT_EQ(c.model.path, "C:\\new");
  EXPECT_EQ(c.actor.clip_ratio_high, 0.28);
  EXPECT_EQ(c.actor.policy_loss.loss_mode, PolicyLoss::cispo);
  EXPECT_TRUE(c.actor.use_kl_loss);
  EXPECT_EQ(c.actor.optim.betas, (std::vector<double>{0.8, 0.9}));
  EXPECT_EQ(c.actor.optim.lr, 1e-3);
  EXPECT_EQ(c.data.train_files, (std::vector<std::string>{"a # b", "c,d"}));
  EXPECT_EQ(c.data.train_batch_size, 3);
}

TEST(ConfigRead, Overrides) {
  const Config c = with({"actor.optim.lr=2e-5", "actor.optim.betas=[0.5,0.75]", "actor.use_kl_loss=True",
                         "actor.token_subset=rpc", "data.task=jsonl", "data.train_files=[a b.jsonl,c.jsonl]",
                         "trainer.default_local_dir=my runs/#3", "data.tokenizer=", "rollout.top_k=-1",
                         "actor.optim.lr=3e-5", "data.reward=\"exact\"", "data.variant='rep'"});
  EXPECT_EQ(c.actor.optim.lr, 3e-5);
  EXPECT_EQ(c.actor.optim.betas, (std::vector<double>{0.5, 0.75}));
  EXPECT_TRUE(c.actor.use_kl_loss);
  EXPECT_EQ(c.actor.token_subset, TokenSubset::rpc);
  EXPECT_EQ(c.data.train_files, (std::vector<std::string>{"a b.jsonl", "c.jsonl"}));
  EXPECT_EQ(c.trainer.default_local_dir, "my runs/#3");
  EXPECT_EQ(c.data.tokenizer, "");
  EXPECT_EQ(c.data.reward, "exact");
  EXPECT_EQ(c.data.variant, "rep");
  EXPECT_EQ(c.rollout.top_k, 0);
  Config one = with({"data.task=jsonl", "data.train_files=a.jsonl"});
  EXPECT_EQ(one.data.train_files, (std::vector<std::string>{"a.jsonl"}));
  EXPECT_TRUE(with({"rollout.stop=a", "rollout.stop="}).rollout.stop.empty());
  EXPECT_EQ(with({"rollout.stop=\"\""}).rollout.stop, (std::vector<std::string>{""}));
}

TEST(ConfigRead, WhatIsNotTomlNamesFileAndLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"\n[actor\n", "f.toml:2: "},
      {"[actor] x", "f.toml:1: "},
      {"rollout.n", "f.toml:1: "},
      {"rollout.n =", "f.toml:1: "},
      {"\n\nrollout.n = 4 4", "f.toml:3: "},
      {"rollout.n = eight", "f.toml:1: "},
      {"model.path = \"a\nb\"", "f.toml:1: "},
      {"model.path = 'a", "f.toml:1: "},
      {"actor.optim.betas = [0.9, 0.98", "f.toml:1: "},
      {"a..b = 3", "f.toml:1: "},
      {"rollout.n = 99999999999999999999", "f.toml:1: "},
      {"rollout.n = 9223372036854775807_0", "integer"},
      {"rollout.n = 9_223_372_036_854_775_808", "integer"},
      {"rollout.n = 0x8000000000000000", "integer"},
      {"\nmodel.path = '\xff:\\n' # i\r\n", "f.toml:2: the byte 0xff is not UTF-8"},
      {"rollout.n = 4\nrollout.temperature = 1\nrollout.n = 4\n", "f.toml:3: "},
  };
  for (const auto& [document, part] : cases) EXPECT_HAS(document_message(document), part) << "\nin: " << document;
}

// Both took minutes once, as the place of each value was counted from the beginning of the document.
TEST(ConfigRead, LargeTomlTakesLinearTime) {
  std::string document;
  for (int i = 0; i < 10'000; i++) document += cat("a.key", i, " = ", i, "\n");
  const std::vector<TomlItem> items = parse_toml(document + "b = \"" + std::string(2'000'000, 'x') + "\"", "f.toml");
  ASSERT_EQ(items.size(), 10'001u);
  for (int i = 0; i < 10'000; i++) {
    ASSERT_EQ(items[static_cast<size_t>(i)].where, cat("f.toml:", i + 1));
    ASSERT_EQ(items[static_cast<size_t>(i)].key, cat("a.key", i));
  }
  EXPECT_EQ(items.back().values[0].text.size(), 2'000'000u);
  std::string array = "a = [1";
  for (int i = 0; i < 20'000; i++) array += i % 10 ? ",9223372036854775807" : ",\n9223372036854775807";
  EXPECT_EQ(parse_toml(array + "]", "f.toml")[0].values.size(), 20'001u);
  EXPECT_HAS(document_message(std::string(1'000'000, 'k') + " = 1"), "f.toml:1: unknown key kkk");
}

// toml11 itself takes quadratic time on a line.
TEST(ConfigRead, ALineOfManyValuesIsRefused) {
  for (const char* open : {"a = [", "a = {k=1"}) {
    std::string line = open;
    for (int i = 0; i < 20'000; i++) line += *(line.end() - 1) == '1' ? cat(",k", i, "=1") : "1,";
    EXPECT_HAS(document_message("\n" + line), "f.toml:2: too many values on lines of ");
  }
}

TEST(ConfigRead, SixtyFourBitsAreEnough) {
  for (const char* most : {"9223372036854775807", "+9_223_372_036_854_775_807", "0x7fff_ffff_ffff_ffff"}) {
    Config c;
    apply_toml(c, cat("trainer.seed = ", most), "f.toml");
    EXPECT_EQ(c.trainer.seed, INT64_MAX) << most;
  }
}

// Its reader recurses: what is nested deeper than the stack must not get there.
TEST(ConfigRead, DeepTomlIsRefused) {
  const auto repeat = [](const std::string& s, int n) {
    std::string all;
    for (int i = 0; i < n; i++) all += s;
    return all;
  };
  for (const std::string& document :
       {"a = " + repeat("[", 100'000), "a = " + repeat("[ ']',", 100'000), "a = " + repeat("{a = ", 100'000),
        repeat("a.", 100'000) + "a = 1", "[" + repeat("a . ", 100'000) + "a]", "a = " + repeat("[\n#]\n", 100'000)})
    EXPECT_HAS(document_message(document), "f.toml: nested too deeply") << document.substr(0, 20);
  EXPECT_HAS(load_message({"data.train_files=" + repeat("[", 100'000) + repeat("]", 100'000)}), "nested too deeply");
  EXPECT_EQ(parse_toml("a = [" + repeat("[1],", 100) + "]", "f.toml").size(), 1u) << "many, but not deep";
  EXPECT_EQ(parse_toml(repeat("a.", 64) + "a = 0.5", "f.toml").size(), 1u) << "the dot of a value is none of its key";
  Config c;
  const std::string brackets = repeat("[", 100);
  apply_toml(c,
             cat("data.train_files = ['", brackets, "', \"\\\"", brackets, "\", '''", brackets, "\n'''] # ", brackets),
             "f.toml");
  EXPECT_EQ(c.data.train_files, (std::vector<std::string>{brackets, "\"" + brackets, brackets + "\n"}));
}

// TOML that configurations have no use for is an error of the key.
TEST(ConfigRead, OtherTomlIsRefused) {
  EXPECT_EQ(document_message("\n[[actor]]\nclip_ratio_c = 3"),
            "f.toml:2: unknown key actor; `pare train --keys actor` lists the keys of that group");
  EXPECT_HAS(document_message("actor.optim.betas = [[0.9], 0.98]"),
             "f.toml:1: actor.optim.betas: expected two numbers");
  EXPECT_HAS(document_message("data.train_files = ['a', { b = 1 }]"), "found [\"a\", a table]");
  EXPECT_HAS(document_message("model.path = 2001-02-03"), "expected string, found a date or time");
  EXPECT_HAS(document_message("rollout.n = 8.0"), "expected integer >= 1, found 8.0");
  EXPECT_HAS(document_message("rollout = { n = 4,\ttop_q = 1 }"), "f.toml:1: unknown key rollout.top_q");
}

TEST(ConfigRead, TablesInLineAreFlattened) {
  Config c;
  apply_toml(c, "actor = { clip_ratio_high = 1e-1, optim = { lr = 5 } }\n[rollout]\nval_kwargs.n = 0x10\n", "f.toml");
  EXPECT_EQ(c.actor.clip_ratio_high, 0.1);
  EXPECT_EQ(c.actor.optim.lr, 5);
  EXPECT_EQ(c.rollout.val_kwargs.n, 16);
}

TEST(ConfigRead, UnknownKeysNameTheNearest) {
  EXPECT_EQ(document_message("[actor]\nclip_ratio_hi = 1"),
            "f.toml:2: unknown key actor.clip_ratio_hi; the nearest is actor.clip_ratio_high");
  EXPECT_HAS(load_message({"lr=1"}), "the nearest is actor.optim.lr");
  EXPECT_HAS(load_message({"actor.lr=1"}), "the nearest is actor.optim.lr");
  EXPECT_HAS(load_message({"actor_rollout_ref.actor.clip_ratio_low=1"}), "the nearest is actor.clip_ratio_low");
  EXPECT_HAS(load_message({"trainer.sed=1"}), "the nearest is trainer.seed");
  EXPECT_HAS(load_message({"rollout=1"}), "unknown key rollout");
  EXPECT_HAS(load_message({"data.max_response_lenght=1"}), "the nearest is data.max_response_length");
  EXPECT_HAS(load_message({"trainr.seed=1"}), "the nearest is trainer.seed");
  EXPECT_HAS(load_message({"min_statements=1"}), "the nearest is data.min_statements") << "not data.max_statements";
  // Never a key that changes something else because its letters are near.
  for (const char* key : {"trainer.total_epoch_count", "trainer.ppo_epochs", "data.seed_offset", "trainer.n",
                          "model.top_p", "enable", "trainer.clip", "xyz", "data.beta"}) {
    const std::string what = load_message({cat(key, "=1")});
    EXPECT_EQ(what.find("nearest"), std::string::npos) << what;
    EXPECT_HAS(what, "lists the keys");
  }
}

// Keys that users of verl, TRL and OpenRLHF type.
// A run that an older program recorded can be continued: its keys may have old names, or have gone since, if their
// value means what is done today.  A configuration that a user writes has today's names.
TEST(ConfigKeys, RecordsOfBeforeAreRead) {
  const auto text = [](const std::string& reduce) {
    std::string all = to_toml(Config()) + "\n[rollout.kv.h2o]\nnormalise = false\n";
    const std::string now = "[learner]\n", shards = "\nshards = 1\n";
    all.replace(all.find(shards), shards.size(), "\nslots = 6\n");
    return all.replace(all.find(now), now.size(), cat(now, "reduce = \"", reduce, "\"\n"));
  };
  Config recorded;
  apply_recorded(recorded, text("ordered"), "state.json");
  EXPECT_EQ(recorded.learner.shards, 6);
  const std::string file = cat(testing::TempDir(), "before_", getpid(), ".toml");
  const auto read = [&](const std::string& what) {
    std::ofstream(file) << what;
    return message([&] { load_config({file, model}); });
  };
  EXPECT_EQ(read(text("ordered")), "no error");
  EXPECT_EQ(load_config({file, model}).learner.shards, 6);
  EXPECT_HAS(read(text("reduce_scatter")), "unknown key learner.reduce");
  EXPECT_HAS(read("learner.slots = 4\n"), "learner.shards");
  EXPECT_HAS(load_message({"learner.slots=4"}), "learner.shards");
  std::filesystem::remove(file);
}

TEST(ConfigRead, ForeignKeysNameWhatTakesTheirPlace) {
  const std::pair<const char*, const char*> typed[] = {
      {"learning_rate", "is actor.optim.lr here"},
      {"num_generations", "is rollout.n here"},
      {"max_completion_length", "is data.max_response_length here"},
      {"num_train_epochs", "is trainer.total_epochs here"},
      {"gradient_checkpointing", "is model.enable_gradient_checkpointing here"},
      {"beta", "actor.use_kl_loss=true"},
      {"per_device_train_batch_size", "data.train_batch_size"},
      {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "is not needed"},
      {"actor_rollout_ref.rollout.tensor_model_parallel_size", "does not exist here"},
      {"actor_rollout_ref.model.lora_rank", "is model.lora.rank here"},
      {"actor_rollout_ref.actor.optim.lr", "actor.optim.lr"},
      {"actor_rollout_ref.rollout.n", "rollout.n"},
      {"critic.optim.lr", "does not exist here"},
      {"trainer.logger", "is not needed"},
      {"data.truncation", "data.filter_overlong_prompts"},
      {"n_samples_per_prompt", "is rollout.n here"},
      {"generate_max_len", "is data.max_response_length here"},
  };
  for (const auto& [key, says] : typed) EXPECT_HAS(load_message({cat(key, "=1")}), says);
  // Every key that the table names is one.
  std::set<std::string> known;
  for (const ConfigKey& k : config_keys()) known.insert(k.name);
  const std::regex dotted("\\b(model|data|rollout|reward_model|algorithm|actor|learner|trainer)\\.[a-z_.]*[a-z_]");
  int named = 0;
  for (const auto& [key, here] : foreign_keys()) {
    EXPECT_FALSE(known.contains(key)) << key << " is a key of pare's own";
    for (auto it = std::sregex_iterator(here.begin(), here.end(), dotted); it != std::sregex_iterator(); ++it, named++)
      EXPECT_TRUE(known.contains(it->str()) || it->str() == "data.reward") << key << ": " << here;
    EXPECT_TRUE(here.find(' ') != std::string::npos || known.contains(here)) << key << ": " << here;
  }
  EXPECT_GT(named, 80);
}

TEST(ConfigRead, FlatKeysOfTheCacheNameTheNested) {
  const std::string kv = "rollout.kv.";
  for (const ConfigKey& key : config_keys()) {
    if (!key.name.starts_with(kv) || key.name == kv + "method") continue;
    const std::string member = key.name.substr(kv.size()), group = member.substr(0, member.find('.'));
    const std::string last = member.substr(group.size() + 1);
    const std::map<std::string, std::string> others = {
        {"window.size", "window"},          {"rkv.lambda", "rkv_lambda"}, {"rkv.threshold", "rkv_threshold"},
        {"pyramidkv.beta", "pyramid_beta"}, {"merge.method", "merge"},    {"merge.keys", "merge_keys"},
        {"blocks.size", "block"},           {"blocks.count", "blocks"},   {"blocks.first", "first_blocks"},
        {"blocks.last", "last_blocks"}};
    const auto other = others.find(member);
    const std::string flat = kv + (other == others.end() ? last : other->second);
    EXPECT_EQ(load_message({flat + "=1"}), "command line: unknown key " + flat + "; the nearest is " + key.name);
  }
}

TEST(ConfigRead, WrongTypesAndRanges) {
  EXPECT_EQ(document_message("rollout.n = 1.5"), "f.toml:1: rollout.n: expected integer >= 1, found 1.5");
  EXPECT_EQ(document_message("rollout.n = \"8\""), "f.toml:1: rollout.n: expected integer >= 1, found \"8\"");
  EXPECT_HAS(document_message("rollout.n = [8]"), "found [8]");
  EXPECT_HAS(document_message("model.path = 5"), "model.path: expected string, found 5");
  EXPECT_HAS(document_message("actor.use_kl_loss = 1"), "expected boolean, found 1");
  EXPECT_HAS(document_message("actor.use_kl_loss = 'true'"), "expected boolean, found \"true\"");
  EXPECT_HAS(document_message("actor.optim.betas = [0.9]"), "expected two numbers");
  EXPECT_HAS(document_message("actor.optim.betas = [0.9, 1]"), "each >= 0 and < 1");
  EXPECT_HAS(document_message("actor.optim.lr = nan"), "found nan");
  EXPECT_HAS(document_message("actor.optim.lr = inf"), "found inf");
  EXPECT_HAS(document_message("data.train_files = 3"), "expected array of strings, found 3");
  EXPECT_EQ(load_message({"rollout.top_p=0"}), "command line: rollout.top_p: expected number > 0 and <= 1, found 0");
  EXPECT_HAS(load_message({"rollout.temperature=0"}), "expected number > 0, found 0");
  EXPECT_HAS(load_message({"rollout.n="}), "expected integer >= 1, found nothing");
  EXPECT_HAS(load_message({"actor.token_subset=rcp"}), "expected one of none, urs, rpc, det, found rcp");
  EXPECT_HAS(load_message({"algorithm.kl_penalty=exact"}), "expected one of k1, k2, k3, found exact");
  EXPECT_HAS(load_message({"actor.optim.betas=[0.9,0.98"}), "expected ] at the end");
  EXPECT_HAS(load_message({"data.train_files=[a,'b']"}), "quote all strings");
  EXPECT_HAS(load_message({"data.reward='exact"}), "not complete");
  EXPECT_HAS(load_message({"data.min_statements=1"}), ">= 2 and <= 23");
}

TEST(ConfigRead, AFailedValueChangesNothing) {
  Config c;
  EXPECT_THROW(apply_toml(c, "actor.optim.betas = [0.5, 2]", "f"), Error);
  EXPECT_THROW(apply_toml(c, "rollout.n = 0", "f"), Error);
  EXPECT_EQ(c, Config{});
}

// ---- contradictions ------------------------------------------------------------------------------------------------

TEST(ConfigCheck, ContradictionsNameBothKeys) {
  using test::Keys, test::operator+;
  const Keys centred = {"rollout.kv.method=quest", "rollout.check_exact=false",
                        "algorithm.rollout_correction.score_centering=true"};
  const std::tuple<std::vector<std::string>, const char*, const char*> cases[] = {
      {{"model.path=x"}, "model.path", "model.config"},
      {{"model.config="}, "model.path", "model.config"},
      {{"data.min_statements=9"}, "data.min_statements", "data.max_statements"},
      {{"data.val_min_statements=9"}, "data.val_min_statements", "data.max_statements"},
      {{"data.task=jsonl"}, "data.task", "data.train_files"},
      {{"data.train_files=x.jsonl", "data.task=ssa"}, "data.train_files", "data.task"},
      {{"data.task=jsonl", "data.train_files=x", "trainer.test_freq=3"}, "trainer.test_freq", "data.val_files"},
      {{"data.task=jsonl", "data.train_files=x", "trainer.val_before_train=true"},
       "trainer.val_before_train",
       "data.val_files"},
      {{"rollout.top_k=5", "algorithm.rpo.enable=true", "algorithm.rpo.prefix_loss=included"},
       "rollout.top_k = 5",
       "set algorithm.rpo.prefix_loss=masked"},
      {{"rollout.n=1"}, "rollout.n", "algorithm.adv_estimator"},
      {{"rollout.max_num_batched_tokens=8"}, "rollout.max_num_seqs", "rollout.max_num_batched_tokens"},
      {{"reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=513"},
       "reward_model.overlong_buffer.len",
       "data.max_response_length"},
      {{"algorithm.oversample.keep=9"}, "algorithm.oversample.keep", "rollout.n"},
      {{"algorithm.oversample.keep=1"}, "algorithm.oversample.keep", "algorithm.adv_estimator"},
      {{"algorithm.oversample.keep=4", "algorithm.adv_estimator=rloo"},
       "algorithm.oversample.keep",
       "algorithm.adv_estimator"},
      {{"algorithm.oversample.keep=4", "algorithm.oversample.by=acceptance"},
       "algorithm.oversample.by",
       "rollout.kv.method"},
      {{"algorithm.oversample.keep=4", "algorithm.oversample.by=acceptance", "rollout.kv.method=quest",
        "algorithm.filter_groups.enable=true"},
       "algorithm.oversample.by",
       "algorithm.filter_groups.enable"},
      {{"actor.ppo_mini_batch_size=7"}, "actor.ppo_mini_batch_size", "data.train_batch_size"},
      {{"actor.ppo_mini_batch_size=128"}, "actor.ppo_mini_batch_size", "data.train_batch_size"},
      {{"actor.policy_loss.loss_mode=gspo"}, "actor.policy_loss.loss_mode", "actor.loss_agg_mode"},
      {{"actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean", "actor.token_subset=urs"},
       "actor.policy_loss.loss_mode",
       "actor.token_subset"},
      {{"actor.clip_ratio_c=0.5"}, "actor.clip_ratio_c", "more than 1"},
      {{"rollout.kv.method=quest", "rollout.check_exact=true"}, "rollout.kv.method", "rollout.check_exact"},
      {{"trainer.exact=false"}, "trainer.exact", "trainer.device"},
      {{"algorithm.rollout_correction.rollout_is_bounds=[2, 1]"}, "rollout_is_bounds", "lower bound"},
      {{"algorithm.rollout_correction.rollout_rs_threshold=[2, 1]"}, "rollout_rs_threshold", "lower bound"},
      {{"algorithm.rollout_correction.rollout_is=released"}, "rollout_correction.rollout_is", "actor.loss_agg_mode"},
      {{"algorithm.rollout_correction.rollout_is=released", "actor.loss_agg_mode=seq-mean-token-mean",
        "algorithm.rollout_correction.rollout_is_level=geometric"},
       "rollout_correction.rollout_is",
       "rollout_is_level"},
      {{"algorithm.rollout_correction.rollout_is=released", "actor.loss_agg_mode=seq-mean-token-mean",
        "algorithm.rollout_correction.rollout_rs=token"},
       "rollout_correction.rollout_is",
       "rollout_rs=none"},
      {{"algorithm.obrs.enable=true", "algorithm.rollout_correction.rollout_rs=token"},
       "algorithm.obrs.enable",
       "rollout_correction.rollout_rs"},
      {{"algorithm.obrs.enable=true", "algorithm.rollout_correction.rollout_is=tis"},
       "algorithm.obrs.enable",
       "rollout_correction.rollout_is"},
      {{"algorithm.obrs.enable=true", "algorithm.obrs.lambda=4"}, "algorithm.obrs.cap", "algorithm.obrs.lambda"},
      {{"rollout.kv.method=quest", "rollout.kv.blocks.acceptance_target=0.86", "algorithm.filter_groups.enable=true"},
       "rollout.kv.blocks.acceptance_target",
       "algorithm.filter_groups.enable"},
      {{"rollout.kv.method=quest", "rollout.check_exact=false", "algorithm.rollout_correction.acceptance=true",
        "algorithm.filter_groups.enable=true"},
       "rollout_correction.acceptance",
       "algorithm.filter_groups.enable"},
      {{"algorithm.rpo.enable=true", "rollout.kv.method=snapkv"}, "algorithm.rpo.enable", "rollout.kv.method"},
      {centred + Keys{"algorithm.filter_groups.enable=true"}, "score_centering", "algorithm.filter_groups.enable"},
      {centred + Keys{"algorithm.rollout_correction.rollout_is=paper"}, "score_centering", "rollout_is to"},
      {centred + Keys{"algorithm.rollout_correction.rollout_is=released", "actor.loss_agg_mode=seq-mean-token-mean"},
       "score_centering", "rollout_is to"},
      {centred + Keys{"algorithm.rollout_correction.rollout_is=tis",
                      "algorithm.rollout_correction.rollout_is_level=geometric"},
       "score_centering", "rollout_is_level=token"},
      {centred + Keys{"algorithm.obrs.enable=true"}, "score_centering", "algorithm.obrs.enable=false"},
      {centred + Keys{"actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean"}, "score_centering",
       "loss_mode=vanilla"},
      {centred + Keys{"actor.ppo_epochs=2"}, "score_centering", "actor.ppo_epochs=1"},
      {centred + Keys{"actor.use_kl_loss=true", "actor.kl_loss_type=exact"}, "score_centering",
       "actor.kl_loss_type=k3"},
  };
  for (const auto& [argument, name] :
       {std::pair{"actor.ppo_epochs=2", "actor.ppo_epochs"},
        {"actor.ppo_mini_batch_size=32", "actor.ppo_mini_batch_size"},
        {"algorithm.obrs.enable=true", "algorithm.obrs"},
        {"algorithm.rollout_correction.veto=1e-4", "algorithm.rollout_correction"},
        {"algorithm.rollout_correction.rollout_is=tis", "algorithm.rollout_correction"},
        {"algorithm.rollout_correction.rollout_rs=geometric", "algorithm.rollout_correction"},
        {"algorithm.rollout_correction.acceptance=true", "acceptance"},
        {"algorithm.rollout_correction.score_centering=true", "score_centering"},
        {"algorithm.use_kl_in_reward=true", "algorithm.use_kl_in_reward"},
        {"learner.attention=replay", "learner.attention"}}) {
    const std::vector<std::string> keys = {"algorithm.rpo.enable=true", "rollout.kv.method=quest", argument};
    EXPECT_NO_THROW(with(keys)) << argument;
    const std::string m = load_message({keys[0], keys[1], keys[2], "algorithm.rpo.prefix_loss=included"});
    EXPECT_HAS(m, "algorithm.rpo.prefix_loss");
    EXPECT_HAS(m, name);
    EXPECT_NO_THROW(with({"algorithm.rpo.prefix_loss=included", keys[1], argument})) << "it is off";
  }
  for (const auto& [arguments, one, other] : cases) {
    const std::string m = load_message(arguments);
    EXPECT_HAS(m, one);
    EXPECT_HAS(m, other);
  }
  EXPECT_NO_THROW(with({"rollout.top_p=0.9", "rollout.check_exact=true", "actor.entropy_coeff=0.1"}));
  EXPECT_NO_THROW(with({"rollout.min_p=0.1", "rollout.kv.method=quest", "learner.attention=replay"}));
  EXPECT_NO_THROW(with({"rollout.val_kwargs.top_p=0.7", "rollout.val_kwargs.top_k=20"}));
  EXPECT_NO_THROW(with({"actor.ppo_mini_batch_size=16"}));
  EXPECT_NO_THROW(with({"actor.clip_ratio_c=3", "actor.clip_ratio_low=10"}));
}

// Left alone it is on wherever the two are of one distribution: replay turns it on, in every preset.
TEST(ConfigCheck, LogprobsAreCheckedWhereTheyCanBeEqual) {
  const auto checks = [](const std::vector<std::string>& keys) { return checks_exact(load_config(keys)); };
  EXPECT_TRUE(checks({"quickstart"}));
  EXPECT_TRUE(checks({"quickstart", "rollout.check_exact=true"}));
  EXPECT_FALSE(checks({"quickstart", "rollout.check_exact=false"}));
  EXPECT_TRUE(checks({"quickstart", "rollout.top_k=5"}));
  EXPECT_TRUE(checks({"quickstart", "trainer.device=cuda", "trainer.exact=false"})) << "mismatches are counted";
  for (const char* run : {"quickstart-quest", "quickstart-rkv"}) {
    EXPECT_FALSE(checks({run})) << run;
    EXPECT_TRUE(checks({run, "learner.attention=replay"})) << run;
    EXPECT_TRUE(checks({run, "learner.attention=replay", "rollout.check_exact=true"})) << run;
    EXPECT_TRUE(checks({run, "replay"})) << run;
    EXPECT_FALSE(checks({run, "rollout.check_exact=false", "learner.attention=replay"})) << run << ": set by hand";
    EXPECT_TRUE(checks({run, "rollout.check_exact=false", "rollout.check_exact=auto", "learner.attention=replay"}));
  }
  // The resolved configuration keeps what was said by hand apart from what follows.
  for (const char* value : {"true", "false", "auto"}) {
    const Config c = load_config({"quickstart", cat("rollout.check_exact=", value)});
    Config again;
    apply_toml(again, to_toml(c), "run");
    EXPECT_EQ(again.rollout.check_exact, c.rollout.check_exact) << value;
  }
  EXPECT_HAS(load_message({"rollout.check_exact=maybe"}), "boolean or auto");
}

TEST(ConfigCheck, Warnings) {
  EXPECT_TRUE(config_warnings(with({"algorithm.adv_filter_threshold=0.1", "actor.token_subset=rpc"})).empty());
  const auto warning = [](const std::vector<std::string>& arguments) {
    const auto lines = config_warnings(with(arguments));
    return lines.size() == 1 ? lines[0] : cat(lines.size(), " warnings");
  };
  EXPECT_HAS(warning({"algorithm.adv_filter_threshold=0.1", "actor.use_kl_loss=true"}), "actor.use_kl_loss");
  EXPECT_HAS(warning({"algorithm.adv_filter_threshold=0.1", "actor.entropy_coeff=0.1"}), "actor.entropy_coeff");
  EXPECT_HAS(warning({"algorithm.adv_filter_threshold=0.1", "distill.enable=true", "model.lora.rank=8",
                      "rollout.kv.method=quest", "algorithm.rollout_correction.veto=1e-4"}),
             "entropy of distill.enable");
  EXPECT_HAS(warning({"actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"}), "twice");
  EXPECT_HAS(warning({"actor.use_kl_loss=true", "actor.kl_loss_type=k1"}),
             "biased as a loss: its expected gradient is 0");
  EXPECT_TRUE(config_warnings(with({"actor.kl_loss_type=k1"})).empty()) << "no KL in the loss";
  EXPECT_TRUE(
      config_warnings(with({"actor.use_kl_loss=true", "actor.kl_loss_type=k1", "actor.use_bias_correction_kl=true"}))
          .empty());
  EXPECT_HAS(warning({"actor.token_subset=det"}), "biased");
  EXPECT_HAS(warning({"learner.attention=replay"}), "changes nothing");
  EXPECT_TRUE(config_warnings(with({"learner.attention=replay", "rollout.kv.method=rkv"})).empty());
  EXPECT_HAS(warning({"algorithm.oversample.keep=4"}), "nothing corrects for the choice");
  EXPECT_TRUE(config_warnings(with({"algorithm.oversample.keep=8"})).empty()) << "all of them";
  EXPECT_HAS(warning({"trainer.device=cuda", "trainer.exact=false"}), "but for roundings");
  EXPECT_HAS(warning({"actor.token_subset=urs", "actor.token_subset_ht=false"}), "biased");
  const std::string length = "reward_model.length_reward.enable=true",
                    no_std = "algorithm.norm_adv_by_std_in_grpo=false";
  EXPECT_HAS(warning({length}), "full advantage");
  EXPECT_TRUE(config_warnings(with({length, no_std})).empty());
  EXPECT_TRUE(config_warnings(with({length, "algorithm.adv_std_floor=0.1"})).empty());
  EXPECT_TRUE(config_warnings(with({length, "algorithm.adv_estimator=rloo"})).empty());
  EXPECT_HAS(warning({length, no_std, "algorithm.adv_filter_threshold=0.1"}), "without a signal");
  EXPECT_HAS(warning({"algorithm.rpo.enable=true", "algorithm.rpo.max_cut=513"}), "data.max_response_length");
  EXPECT_TRUE(config_warnings(with({"algorithm.rpo.enable=true"})).empty());
  const std::vector<std::string> sparse = {"rollout.kv.method=quest", "rollout.check_exact=false"};
  EXPECT_HAS(warning(sparse), "nothing corrects");
  EXPECT_TRUE(
      config_warnings(with({sparse[0], sparse[1], "algorithm.rollout_correction.score_centering=true"})).empty());
  const std::string mask = "algorithm.rollout_correction.off_policy_mask_threshold=0.1";
  EXPECT_TRUE(config_warnings(with({sparse[0], sparse[1], mask})).empty());
  EXPECT_HAS(warning({mask}), "masks nothing");
  EXPECT_TRUE(config_warnings(with({mask, "actor.ppo_epochs=2"})).empty());
  EXPECT_HAS(warning({sparse[0], sparse[1], "algorithm.rollout_correction.rollout_is=paper"}), "bounds no weight");
  EXPECT_HAS(warning({sparse[0], sparse[1], "algorithm.obrs.enable=true", "algorithm.obrs.state_weight=z",
                      "algorithm.obrs.top_k=20"}),
             "from below");
  EXPECT_HAS(warning({sparse[0], sparse[1], "algorithm.rollout_correction.rollout_is=tis",
                      "actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean"}),
             "one ratio for a sequence");
  EXPECT_TRUE(config_warnings(with({sparse[0], sparse[1], "algorithm.rollout_correction.rollout_is=tis",
                                    "algorithm.rollout_correction.rollout_is_level=geometric",
                                    "actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-mean"}))
                  .empty());
}

// ---- files and presets ---------------------------------------------------------------------------------------------

std::string write_file(const std::string& name, const std::string& text) {
  const std::string path = testing::TempDir() + name;
  std::ofstream(path) << text;
  return path;
}

TEST(ConfigFiles, LaterArgumentsWinAndBasesComeFirst) {
  const std::string base = write_file("pare_base.toml", "[rollout]\nn = 4\ntemperature = 0.5\n");
  const std::string file =
      write_file("pare_file.toml", "rollout.n = 6\n" + ("base = \"" + base + "\"\n") + "trainer.seed = 3\n");
  const Config c = with({file, "trainer.seed=5", "nat-rpc"});
  EXPECT_EQ(c.rollout.n, 6);
  EXPECT_EQ(c.rollout.temperature, 0.5);
  EXPECT_EQ(c.trainer.seed, 5);
  EXPECT_EQ(c.actor.token_subset, TokenSubset::rpc);
  EXPECT_EQ(with({"trainer.seed=5", file}).trainer.seed, 3);
  EXPECT_EQ(with({write_file("pare_lr=1e-3.toml", "trainer.seed = 8")}).trainer.seed, 8);
  write_file("pare_base.toml", "base = \"" + file + "\"");
  EXPECT_HAS(load_message({file}), "circle");
  // Several bases are layers from left to right.
  write_file("pare_base.toml", "rollout.n = 4\ntrainer.seed = 7\n");
  const Config two = with({write_file("pare_two.toml", "base = [\"nat-rpc\", \"" + base + "\"]\nrollout.n = 5\n")});
  EXPECT_EQ(two.actor.token_subset, TokenSubset::rpc);
  EXPECT_EQ(two.trainer.seed, 7);
  EXPECT_EQ(two.rollout.n, 5);
  write_file("pare_file.toml", "base = [\"nat-rpc\", 3]");
  EXPECT_HAS(load_message({file}), "name of a file or preset");
  write_file("pare_file.toml", "base = 3");
  EXPECT_HAS(load_message({file}), "name of a file or preset");
  write_file("pare_file.toml", "\nrollout.n = 0\n");
  EXPECT_HAS(load_message({file}), file + ":2: rollout.n");
}

TEST(ConfigFiles, MissingFilesListThePresets) {
  const std::string m = load_message({"quickstrat"});
  EXPECT_HAS(m, "\"quickstrat\"; the nearest preset is quickstart;");
  EXPECT_HAS(m, " quickstart");
  EXPECT_HAS(m, " nat-rpc");
}

// What is said together contradicts itself; what is said later takes the place of what it excludes.
TEST(ConfigFiles, WhatALaterLayerGivesTakesThePlaceOfWhatItExcludes) {
  const Config path = load_config({"quickstart-sft", "model.path=DIR", "data.task=jsonl", "data.train_files=x"});
  EXPECT_EQ(path.model.path, "DIR");
  EXPECT_EQ(path.model.config, "");
  const Config shape = load_config({"quickstart", "model.config=tiny-ssa"});
  EXPECT_EQ(shape.model.path, "");
  EXPECT_EQ(shape.model.config, "tiny-ssa");
  EXPECT_HAS(load_message({"quickstart-sft", "model.path=DIR", "model.config=x.json"}), "both are given");
  const std::string both = write_file("pare_both.toml", "[model]\npath = 'DIR'\nconfig = 'tiny-ssa'\n");
  EXPECT_HAS(load_message({both}), "both are given");
  EXPECT_EQ(load_config({both, "model.path=OTHER"}).model.config, "");
  // Files are what is trained on, unless the same words or later ones say otherwise.
  for (const char* files : {"data.train_files=x", "data.val_files=x"}) {
    EXPECT_EQ(load_config({"grpo", "model.path=DIR", files}).data.task, "jsonl");
    EXPECT_EQ(read_config({"quickstart", files}).data.task, "jsonl");
    EXPECT_HAS(load_message({"quickstart", files, "data.task=ssa"}), "generates its data");
    EXPECT_HAS(load_message({files, "quickstart"}), "generates its data");
  }
  EXPECT_EQ(load_config({"quickstart", "data.train_files=[]"}).data.task, "ssa");
}

// A preset cannot know that there is nothing to validate on; a user who asks for it is told.
TEST(ConfigFiles, WithoutValidationFilesAPresetsValidationIsOff) {
  std::vector<std::string> notes;
  const std::vector<std::string> run = {"quickstart", "model.path=DIR", "data.train_files=x", "data.reward=exact"};
  const Config c = load_config(run, &notes);
  EXPECT_EQ(c.trainer.test_freq, 0);
  EXPECT_FALSE(c.trainer.val_before_train);
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_HAS(notes[0], "trainer.test_freq = 40 of the preset quickstart is off: data.val_files is empty");
  EXPECT_HAS(notes[1], "trainer.val_before_train = true of the preset quickstart is off");
  for (const char* asked : {"trainer.test_freq=40", "trainer.val_before_train=true"}) {
    std::vector<std::string> more = run;
    more.emplace_back(asked);
    EXPECT_HAS(load_message(more), "data.val_files is empty");
    const std::string file = write_file("pare_asked.toml", std::string(asked) + "\n");
    EXPECT_HAS(load_message({"quickstart", file, "model.path=DIR", "data.train_files=x", "data.reward=exact"}),
               "data.val_files is empty");
  }
  notes.clear();
  EXPECT_EQ(load_config({"quickstart", "model.path=DIR", "data.train_files=x", "data.val_files=y", "data.reward=exact"},
                        &notes)
                .trainer.test_freq,
            40);
  EXPECT_TRUE(notes.empty());
}

TEST(Presets, TheDirectoryOfAPresetIsThatOfThePresetAlone) {
  const auto directory = [](const std::vector<std::string>& arguments) {
    return read_config(arguments).trainer.default_local_dir;
  };
  const std::string file = write_file("pare_on.toml", "base = 'quickstart'\n"),
                    own = write_file("pare_own.toml", "trainer.default_local_dir = 'mine'\nbase = 'quickstart'\n");
  for (const auto& alone : {std::vector<std::string>{"quickstart"},
                            {"quickstart", "trainer.device=emu", "trainer.exact=false"},
                            {"trainer.device=emu", "quickstart"}})
    EXPECT_EQ(directory(alone), "runs/quickstart");
  EXPECT_EQ(directory({"quickstart-rpc"}), "runs/quickstart-rpc");
  for (const auto& laid : {std::vector<std::string>{"quickstart", "nat-urs"},
                           {"nat-urs", "quickstart"},
                           {"quickstart", "trainer.seed=2"},
                           {"quickstart", "trainer.device=emu", "trainer.seed=2"},
                           {"quickstart-quest"},
                           {file}})
    EXPECT_EQ(directory(laid), "") << testing::PrintToString(laid);
  // What a user says holds.
  EXPECT_EQ(directory({own, "trainer.seed=2"}), "mine");
  EXPECT_EQ(directory({"quickstart", "trainer.seed=2", "trainer.default_local_dir=mine"}), "mine");
  EXPECT_EQ(read_config({"gsm8k-qwen2.5-1.5b", "grpo"}).trainer.experiment_name, "gsm8k-qwen2.5-1.5b-grpo");
}

// What is in the program is what is in data/presets.
TEST(Presets, AreInTheProgram) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("data/presets")) {
    if (entry.path().extension() == ".md") continue;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}}, ending = entry.path().extension().string();
    const auto held = preset_text(entry.path().stem().string(), ending.substr(1));
    ASSERT_TRUE(held) << entry.path();
    EXPECT_TRUE(*held == text) << entry.path() << " was changed: run `make`";
    files++;
  }
  EXPECT_EQ(files, preset_names("toml").size() + preset_names("json").size() + preset_names("jsonl").size());
  EXPECT_FALSE(preset_text("quickstart", "json"));
  EXPECT_HAS(message([] {
               Session(load_config({"quickstart", "model.config=tiny-sa"}));
             }),
             "the nearest shape that has a name is tiny-ssa");
}

// A preset is a run (it has a model) or a method; methods are laid over any run and leave its data and sizes alone.
TEST(Presets, AllAreValidAloneAndOverTheQuickstart) {
  int presets = 0;
  for (const auto& entry : std::filesystem::directory_iterator("data/presets")) {
    if (entry.path().extension() != ".toml") continue;
    presets++;
    const std::string name = entry.path().stem().string();
    std::ifstream file(entry.path());
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    EXPECT_TRUE(text.starts_with("# ")) << name << " does not say what it is";
    const bool over_a_run = text.find("base = \"quickstart") != std::string::npos || name.starts_with("released-");
    if (text.find("[model]") != std::string::npos || over_a_run) {
      EXPECT_NO_THROW(load_config({name})) << name;
      continue;
    }
    const bool needs_blocks = name == "distill-sparse";
    if (!needs_blocks) {
      EXPECT_NO_THROW(with({name})) << name;
    }
    const std::string under = needs_blocks ? "quickstart-quest" : "quickstart";
    const Config run = load_config({under}), both = load_config({under, name});
    EXPECT_NE(both, run) << name;
    if (name.ends_with("-sft")) continue;  // examples an update and their rate are what such a method is
    EXPECT_EQ(both.data, run.data) << name;
    RolloutKeys rollout = both.rollout;
    if (name.starts_with("kv-")) rollout.kv = run.rollout.kv;
    EXPECT_EQ(rollout, run.rollout) << name;  // with check_exact: no preset stands in the way of replay
    EXPECT_EQ(both.actor.optim, run.actor.optim) << name;
  }
  EXPECT_GE(presets, 27);
}

TEST(Presets, Quickstart) {
  const Config c = load_config({"quickstart"});
  EXPECT_EQ(c.data.train_batch_size * c.rollout.n, 64);
  EXPECT_EQ(c.algorithm.adv_std, AdvStd::population);
  EXPECT_EQ(c.actor.optim.betas, (std::vector<double>{0.9, 0.98}));
  EXPECT_EQ(c.actor.optim.weight_decay, 0);
  EXPECT_TRUE(config_warnings(c).empty());
  Config rpc = load_config({"quickstart-rpc"});
  EXPECT_EQ(rpc.actor.token_subset, TokenSubset::rpc);
  EXPECT_EQ(rpc.actor.rpc_min_tokens, 16);
  rpc.actor.token_subset = TokenSubset::none;
  rpc.actor.rpc_min_tokens = c.actor.rpc_min_tokens;
  EXPECT_EQ(rpc.trainer.experiment_name, "quickstart-rpc");
  rpc.trainer.experiment_name = c.trainer.experiment_name;
  rpc.trainer.default_local_dir = c.trainer.default_local_dir;
  EXPECT_EQ(rpc, c);
}

TEST(Presets, ValidationHasTheStatementsOfTrainingUnlessGiven) {
  const Config sft = load_config({"quickstart-sft"}), run = load_config({"quickstart"});
  EXPECT_EQ(sft.data.min_statements, 2);
  EXPECT_EQ(sft.data.val_min_statements, run.data.min_statements);
  EXPECT_EQ(sft.data.max_statements, run.data.max_statements);
  EXPECT_EQ(run.data.val_min_statements, run.data.min_statements);
}

TEST(Presets, OverlongBufferIsAFifthUnlessGiven) {
  EXPECT_EQ(load_config({"quickstart", "dapo"}).reward_model.overlong_buffer.len, 28);
  EXPECT_EQ(load_config({"quickstart", "dapo", "reward_model.overlong_buffer.len=9"}).reward_model.overlong_buffer.len,
            9);
}

// ---- strings -------------------------------------------------------------------------------------------------------

std::string utf8(uint32_t c) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | (c >> shift & 0x3f)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xc0 | c >> 6), tail(0)};
  if (c < 0x10000) return {static_cast<char>(0xe0 | c >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xf0 | c >> 18), tail(12), tail(6), tail(0)};
}

std::vector<const ConfigKey*> text_keys() {
  std::vector<const ConfigKey*> keys;
  for (const ConfigKey& k : config_keys())
    if (k.type == "string" || k.type == "array of strings") keys.push_back(&k);
  return keys;
}

// Every key that takes a text, with every byte of ASCII, the ends of the ranges of UTF-8 and signs that parsers trip
// over: what is written reads back, as a document and as an override.
TEST(ConfigText, EveryCharacterReadsBack) {
  std::vector<std::string> texts = {"", " a ", "\r\n", "a\r\nb\r\n", "'''\"\"\"\\", "\\u0041\\", "#=[]{}.,"};
  std::string all;
  std::vector<uint32_t> signs = {0x7ff, 0x800, 0x2028, 0xd7ff, 0xe000, 0xfeff, 0xfffd, 0xffff, 0x10000, 0x10ffff};
  for (uint32_t c = 0; c < 256; c++) signs.push_back(c);
  for (const uint32_t c : signs) {
    texts.push_back("a" + utf8(c) + "b");
    texts.push_back(utf8(c));
    all += utf8(c);
  }
  texts.push_back(all);
  const std::vector<const ConfigKey*> keys = text_keys();
  ASSERT_GE(keys.size(), 12u);
  const auto set = [](Config& c, const ConfigKey& k, const std::string& text) {
    const bool list = k.type != "string";
    k.assign(c, {k.name, list, std::vector(list ? 2 : 1, TomlValue{text, TomlValue::Kind::string}), ""});
  };
  for (size_t first = 0; first <= texts.size(); first += keys.size()) {  // at last one text for all keys
    Config written, read;
    const auto text = [&](size_t k) { return texts[std::min(first + k, texts.size() - 1)]; };
    for (size_t k = 0; k < keys.size(); k++) set(written, *keys[k], first + keys.size() > texts.size() ? all : text(k));
    apply_toml(read, to_toml(written), "config.toml");
    EXPECT_TRUE(read == written) << testing::PrintToString(text(0));
    for (const ConfigKey* k : keys) EXPECT_EQ(k->show(read), k->show(written)) << k->name;
  }
  for (size_t i = 0; i < texts.size(); i++) {
    const TomlItem item = parse_toml_override(keys[i % keys.size()]->name + "=" + toml_quote(texts[i]));
    ASSERT_FALSE(item.values.empty());
    EXPECT_EQ(item.values[0].text, texts[i]);
  }
}

// Text that is not UTF-8 could not be read back.  It is refused, with the name of its key: words, strings and arrays.
TEST(ConfigText, WhatIsNotUtf8IsRefused) {
  std::vector<std::string> bad = {"\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\xf0\x9f\x98"};
  for (int c = 0x80; c < 0x100; c++) bad.push_back({static_cast<char>(c)});
  const std::vector<const ConfigKey*> keys = text_keys();
  for (size_t i = 0; i < bad.size(); i++) {
    const std::string &key = keys[i % keys.size()]->name, &b = bad[i];
    for (const std::string& value : {b, "a" + b + "b", "\"" + b + "\"", "['a', '" + b + "']"}) {
      const std::string said = message([&] { read_config({key + "=" + value}); });
      EXPECT_HAS(said, "command line: " + key + ": byte ");
      EXPECT_HAS(said, format(" is 0x%02x, which is not UTF-8", static_cast<unsigned char>(b[0])));
    }
  }
  EXPECT_HAS(message([] { read_config({"data.\xffreward=x"}); }), "byte 6 is 0xff");
  const std::string file = testing::TempDir() + "pare_\xfe.toml";
  std::ofstream(file) << "trainer.seed = 3\n";
  EXPECT_HAS(message([&] { read_config({file}); }), "byte 6 is 0xfe");
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace pare
