// The keys that decide the bits of a run: which part two runs, which an audit compares.
#include "run/config.h"

namespace pare {

std::vector<std::pair<std::string, std::string>> keys_of_bits(const Config& c) {
  std::vector<std::pair<std::string, std::string>> keys;
  for (const ConfigKey& k : config_keys())
    if (k.decides == KeyDecides::bits && (!k.parts || k.parts(c, c))) keys.emplace_back(k.name, k.show(c));
  return keys;
}

std::vector<std::string> keys_that_part(const Config& run, const Config& resumed, bool by_content) {
  std::vector<std::string> keys;
  for (const ConfigKey& k : config_keys()) {
    if (k.show(run) == k.show(resumed) || (by_content && k.decides == KeyDecides::file)) continue;
    if (k.parts ? k.parts(run, resumed) : k.decides != KeyDecides::nothing) keys.push_back(k.name);
  }
  return keys;
}

}  // namespace pare
