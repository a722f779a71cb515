#include "run/fit.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <sstream>

#include "base/memory_limits.h"
#include "base/text.h"

namespace pare {

namespace {

std::string bytes(size_t n) { return human(static_cast<double>(n)) + "B"; }

// Arenas begin and end at large pages of the host, and one is mapped before its ends are unmapped.
constexpr size_t kSlack = size_t{20} << 20;

Config with(Config config, const std::vector<std::string>& settings) {
  for (const std::string& s : settings) {
    std::istringstream words(s);
    for (std::string word; words >> word;) {
      const size_t value = word.find('=') + 1;
      const bool text = std::isalpha(word[value]) && word.compare(value, 4, "true") != 0;
      apply_toml(config, text ? word.substr(0, value) + toml_quote(word.substr(value)) : word, "a setting");
    }
  }
  check_config(config);
  return config;
}

}  // namespace

std::string Room::size() const { return cat(pare::bytes(bytes), " (", bytes, ") ", where); }

Room room_on(const Table& table) {
  if (table.memory != &host_memory) return {table.memory->free(), "free on this device"};
  const size_t left = process_memory_left(), machine = machine_memory();
  if (left >= machine) return {machine, "of this machine"};
  return {left - std::min(left - 1, kSlack), "that ulimit leaves"};
}

int64_t largest_that_fits(int64_t value, const std::function<bool(int64_t)>& fits) {
  int64_t bad = value, good = value / 2;
  while (good > 0 && !fits(good)) {
    bad = good;
    good /= 2;
  }
  while (good > 0 && bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

Config fit_memory(Config config, const std::function<bool(const Config&)>& fits) {
  const bool recomputes = !config.model.enable_gradient_checkpointing, chunks = config.actor.logits_chunk == 0;
  if (!recomputes && !chunks) return config;
  std::vector<Fitted> choices = {Fitted()};  // none takes more than the one before
  const int64_t most = read_model_config(config.model).layers - 1;
  while (recomputes && choices.back().recompute < most) choices.push_back({.recompute = choices.back().recompute + 1});
  while (chunks && choices.back().logits_chunk > 256) {
    choices.push_back(choices.back());
    choices.back().logits_chunk /= 2;
  }
  const auto fitting = [&](const Fitted& choice) {
    config.fitted = choice;
    return fits(config);
  };
  if (fits && fitting(choices[0])) return config;
  auto first = choices.begin() + 1, last = choices.end() - 1;  // what precedes `first` does not fit
  while (fits && first < last) {
    const auto middle = first + (last - first) / 2;
    fitting(*middle) ? last = middle : first = middle + 1;
  }
  config.fitted = *last;
  return config;
}

std::string fitted_text(const Config& config, const Room& room) {
  const auto& [blocks, rows] = config.fitted;
  std::string text;
  if (blocks > 0) text = cat(" recomputes ", blocks, " of ", read_model_config(config.model).layers, " blocks");
  if (rows < Fitted().logits_chunk) text += cat(blocks ? " and" : "", " computes ", rows, " rows of logits at a time");
  if (!text.empty()) return cat("the learner", text, " to fit the ", room.size());
  if (config.model.enable_gradient_checkpointing) return "";
  return cat("the learner recomputes no block: ", room.bytes ? "all activations fit" : "the memory is unknown");
}

std::vector<std::string> what_fits(const Config& config, const std::vector<std::string>& sizes,
                                   const std::vector<std::vector<std::string>>& choices,
                                   const std::function<bool(const Config&)>& fits) {
  const auto good = [&](const std::vector<std::string>& settings) {
    try {
      return fits(with(config, settings));
    } catch (const Error&) {
      return false;
    }
  };
  const auto now = [&](const std::string& key) -> int64_t { return std::atoll(config_key(key).show(config).c_str()); };
  std::vector<std::string> all;
  for (const auto& choice : choices)
    if (const auto first = std::find_if(choice.begin(), choice.end(), [&](auto& s) { return good({s}); });
        first != choice.end())
      all.push_back(*first);
  for (const std::string& key : sizes)
    if (const int64_t n = largest_that_fits(now(key), [&](int64_t v) { return good({cat(key, "=", v)}); }); n > 0)
      all.push_back(cat(key, "=", n));
  if (!all.empty()) return all;
  // Together: the first of each choice, the second, and so on, then smaller and smaller sizes besides.
  for (size_t i = 0; i < 24; i++) {
    std::vector<std::string> settings;
    for (const auto& choice : choices) settings.push_back(choice[std::min(i, choice.size() - 1)]);
    for (const std::string& key : sizes)
      if (i >= 4 && now(key) > 1) settings.push_back(cat(key, "=", std::max<int64_t>(1, now(key) >> (i - 3))));
    if (settings.empty() || !good(settings)) continue;
    std::string& text = all.emplace_back();
    for (const std::string& s : settings) text += (text.empty() ? "" : " ") + s;
    break;
  }
  return all;
}

std::string excess_text(const std::string& what, size_t needed, const Room& room,
                        const std::vector<std::string>& fits) {
  std::string text = cat(what, " ", bytes(needed), ", ", bytes(needed - room.bytes), " (", needed - room.bytes,
                         ") more than the ", room.size(), fits.empty() ? "" : "; with one of these it fits: ");
  for (const std::string& setting : fits) text += (&setting == fits.data() ? "" : ", ") + setting;
  return text;
}

void does_not_fit(const std::string& what, const ArenaLimits& l, const Room& room,
                  const std::vector<std::string>& fits) {
  std::string parts;
  for (const auto& [name, n] : {std::pair{"weights", l.weights},
                                {"gradients", l.gradients},
                                {"optimizer", l.optimizer},
                                {"kv", l.kv},
                                {"activations", l.activations},
                                {"scratch", l.scratch},
                                {"states", l.states}})
    if (n > 0) parts += cat(parts.empty() ? "" : ", ", name, " ", bytes(n));
  throw Error(Exit::memory, cat("does not fit: ", excess_text(what, l.total(), room, fits), " (", parts,
                                l.shared ? "; kv and scratch share the memory of gradients and activations" : "", ")"));
}

}  // namespace pare
