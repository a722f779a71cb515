#include "run/resumed_logs.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "run/tensorboard.h"

namespace pare {

namespace fs = std::filesystem;

namespace {

// Returns the step of a line, or -1 if the line is none of the log.
int64_t step_of(const std::string& line, const std::string& key) {
  const nlohmann::json json = try_parse_json(line);
  if (!json.contains(key) || !json[key].is_number_integer()) return -1;
  return json[key].get<int64_t>();
}

// Calls visit(line, step) for whole lines, until it returns false.
template <class F>
void for_lines(const std::string& path, const std::string& key, F visit) {
  std::ifstream in(path, std::ios::binary);
  for (std::string line; std::getline(in, line) && !in.eof();)
    if (!visit(line, step_of(line, key))) return;
}

uint64_t size_of(const std::string& path) {
  std::error_code none;
  const uint64_t size = fs::file_size(path, none);
  return none ? 0 : size;
}

std::string difference(const std::string& path, uint64_t bytes) {
  std::error_code none;
  if (!fs::exists(path, none)) return cat(path, " is missing");
  if (const uint64_t size = size_of(path); size < bytes)
    return cat(path, " has ", size, " bytes, ", bytes, " when the checkpoint was written");
  return cat(path, " was changed since the checkpoint was written");
}

}  // namespace

ResumedLog resume_lines(const std::string& path, const std::string& step_key, uint64_t bytes, int64_t last) {
  const auto belongs = [&](int64_t step) { return step >= 0 && step <= last; };
  uint64_t whole = 0;
  for_lines(path, step_key, [&](const std::string& line, int64_t step) {
    if (whole >= bytes || !belongs(step)) return false;
    whole += line.size() + 1;
    return true;
  });
  if (whole == bytes && size_of(path) >= bytes) return {bytes, ""};

  std::string note = difference(path, bytes);
  std::set<int64_t> steps;
  FileWriter kept(path);
  for_lines(path, step_key, [&](const std::string& line, int64_t step) {
    if (!belongs(step)) return true;
    steps.insert(step);
    kept.write((line + "\n").data(), line.size() + 1);
    return true;
  });
  note += steps.empty() ? "; no step in it is left" : cat("; it goes on with the lines of ", steps.size(), " steps");
  return {kept.finish().bytes, note};
}

ResumedLog resume_events(const std::string& path, uint64_t bytes) {
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  text.resize(std::min<uint64_t>(text.size(), bytes));
  const uint64_t whole = tensorboard_whole(text);
  if (whole == bytes) return {bytes, ""};
  return {whole,
          cat(difference(path, bytes), whole == 0 ? "; its curves begin at the next step"
                                                  : cat("; its curves go on after the first ", whole, " bytes"))};
}

}  // namespace pare
