#include "run/machine.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/nearest.h"
#include "base/text.h"
#include "base/toml.h"
#include "data/presets.h"
#include "ops/list.h"

namespace pare {

namespace {

const std::vector<std::string> kSources = {"measured", "published", "assumed"};
const std::vector<std::string> kFigures = {"memory",    "reserve", "flops_f32",  "flops_bf16",
                                           "bandwidth", "launch",  "share.other"};
const std::vector<std::string> kOfRanks = {"link", "network"};

const std::vector<std::string>& known_keys() {
  static const std::vector<std::string> keys = [] {
    std::vector<std::string> all = kFigures;
    all.insert(all.end(), kOfRanks.begin(), kOfRanks.end());
    all.push_back("multiprocessors");
#define X(op, Args) all.push_back("share." #op);
    PARE_OPS(X)
#undef X
    return all;
  }();
  return keys;
}

// 141e9; TOML's own 1_000 too.
double number(const TomlItem& item) {
  std::string text = item.array ? "" : item.values[0].text;
  std::erase(text, '_');
  double x = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  if (item.array || item.values[0].kind != TomlValue::Kind::word || error != std::errc() ||
      end != text.data() + text.size())
    fail(item.where, ": ", item.key, ": expected a number");
  return x;
}

}  // namespace

double Machine::figure(const std::string& key) const {
  const auto it = figures.find(key);
  if (it == figures.end())
    fail("machine ", name, " has no ", key,
         std::find(kOfRanks.begin(), kOfRanks.end(), key) == kOfRanks.end()
             ? ""
             : ", the bytes/s that a rank sends to others; give its file one, below [assumed] if nobody measured it");
  return it->second.value;
}

static double math_seconds(const Machine& m, const Cost& c, DType act) {
  return static_cast<double>(c.flops) / m.figure(act == DType::bf16 ? "flops_bf16" : "flops_f32");
}
static double memory_seconds(const Machine& m, const Cost& c) {
  return static_cast<double>(c.read + c.written) / m.figure("bandwidth");
}
static double sent_seconds(const Machine& m, const Cost& c) {
  const auto near = static_cast<double>(c.sent - c.abroad), far = static_cast<double>(c.abroad);
  return std::max(near > 0 ? near / m.figure("link") : 0, far > 0 ? far / m.figure("network") : 0);
}

int Machine::multiprocessors() const {
  const auto it = figures.find("multiprocessors");
  return it == figures.end() ? 1 : static_cast<int>(it->second.value);
}

double Machine::seconds(const std::string& op, const Cost& c, DType act, const Stretch& stretch) const {
  const auto it = figures.find("share." + op);
  const double share = it == figures.end() ? figure("share.other") : it->second.value;
  return figure("launch") + std::max({stretch.flops * math_seconds(*this, c, act),
                                      stretch.bytes * memory_seconds(*this, c), sent_seconds(*this, c)}) /
                                share;
}

bool Machine::bound_by_memory(const Cost& c, DType act) const {
  return memory_seconds(*this, c) > math_seconds(*this, c, act);
}

Machine Machine::shared_by(int n) const {
  Machine part = *this;
  for (const char* key : {"memory", "reserve", "flops_f32", "flops_bf16", "bandwidth", "link"})
    if (const auto it = part.figures.find(key); it != part.figures.end()) it->second.value /= n;
  return part;
}

Machine read_machine(const std::string& file) {
  std::stringstream text;
  if (const auto known = preset_text(file, "machine")) {
    text << *known;
  } else if (std::ifstream in(file, std::ios::binary); !(text << in.rdbuf())) {
    std::string names;
    for (const std::string& name : preset_names("machine")) names += " " + name;
    fail(file, ": cannot be read, and is none of the machines that have a name:", names);
  }
  Machine m{.name = printable(file), .figures = {}};
  for (const TomlItem& item : parse_toml(text.str(), file)) {
    if (item.key == "name") {
      if (item.array || item.values[0].kind != TomlValue::Kind::string) fail(item.where, ": name: expected a string");
      m.name = printable(item.values[0].text);
      continue;
    }
    const size_t dot = item.key.find('.');
    const std::string source = item.key.substr(0, dot), key = dot == std::string::npos ? "" : item.key.substr(dot + 1);
    if (std::find(kSources.begin(), kSources.end(), source) == kSources.end() || key.empty())
      fail(item.where, ": ", item.key, ": expected name, or a figure below [measured], [published] or [assumed]");
    if (std::find(known_keys().begin(), known_keys().end(), key) == known_keys().end())
      fail(item.where, ": there is no figure ", key, "; the nearest is ", nearest(key, known_keys()));
    const double x = number(item);
    const bool zero = key == "reserve" || key == "launch";
    if (!(zero ? x >= 0 : x > 0) || x > 1e18)
      fail(item.where, ": ", key, ": expected a number ", zero ? ">= 0" : "> 0", ", at most 1e18");
    if (!m.figures.insert({key, {x, source}}).second) fail(item.where, ": ", key, " is there twice");
  }
  for (const std::string& key : kFigures)
    if (!m.figures.contains(key)) fail(file, ": ", key, " is missing");
  if (!(m.figure("reserve") < m.figure("memory")))
    fail(file, ": reserve = ", m.figure("reserve"), " leaves nothing of memory = ", m.figure("memory"));
  return m;
}

std::string to_toml(const Machine& m) {
  std::ostringstream s;
  s << "name = " << toml_quote(m.name) << '\n';
  for (const std::string& source : kSources) {
    bool first = true;
    for (const auto& [key, figure] : m.figures) {
      if (figure.source != source) continue;
      if (first) s << "\n[" << source << "]\n";
      first = false;
      s << key << " = " << figure.value << '\n';
    }
  }
  return s.str();
}

}  // namespace pare
