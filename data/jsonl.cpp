#include "data/jsonl.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace pare {
namespace {

using Json = nlohmann::json;

std::string text_of(const Json& row, const char* key, const std::string& where) {
  const Json& value = row.at(key);
  if (!value.is_string()) fail(where, ": \"", key, "\" is of type ", value.type_name(), ", expected a string");
  return value.get<std::string>();
}

std::vector<int32_t> ids_of(const Json& row, const char* key, const std::string& where) {
  const Json& value = row.at(key);
  if (!value.is_array() || value.empty())
    fail(where, ": \"", key, "\" is ", value.is_array() ? "empty" : value.type_name(), ", expected an array of ids");
  std::vector<int32_t> ids;
  for (const Json& id : value) {
    // Also true of unsigned numbers that do not fit into the signed type: they are compared as unsigned.
    if (!id.is_number_integer() || id < 0 || id > INT32_MAX)
      fail(where, ": element ", ids.size(), " of \"", key, "\" is ", id.dump(), ", expected a token id");
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

Problem problem_of(const std::string& line, const std::string& where, const TextReward* reward) {
  Json row;
  try {
    row = Json::parse(line);
  } catch (const Json::exception& e) {
    const std::string what = e.what();  // "[json.exception.parse_error.101] parse error at ..."
    fail(where, ": not JSON: ", what.substr(what.find(']') + 2, 200));
  }
  if (!row.is_object()) fail(where, ": is of type ", row.type_name(), ", expected an object {\"prompt\": ...}");
  Problem problem;
  problem.where = where;
  const char* ids = row.contains("prompt_ids") ? "prompt_ids" : "ids";
  if (row.contains("prompt") + row.contains("prompt_ids") + row.contains("ids") != 1)
    fail(where, ": expected exactly one of \"prompt\", \"prompt_ids\" and \"ids\"");
  if (row.contains("prompt")) {
    problem.prompt = text_of(row, "prompt", where);
    if (problem.prompt.empty()) fail(where, ": \"prompt\" is empty");
  } else {
    problem.prompt_ids = ids_of(row, ids, where);
  }
  if (row.contains("completion")) problem.completion = text_of(row, "completion", where);
  if (row.contains("answer"))
    problem.answer = row["answer"].is_number() ? row["answer"].dump() : text_of(row, "answer", where);
  if (reward) {
    if (!problem.answer) fail(where, ": no \"answer\", which the reward ", reward->name, " compares with");
    const bool blank = problem.answer->find_first_not_of(" \t\r\n\v\f") == std::string::npos;
    if (blank && !reward->accepts_empty_answer)
      fail(where, ": \"answer\" is empty, so the reward ", reward->name, " would hold for every response");
  } else if (!problem.completion) {
    fail(where, ": no \"completion\" to learn from, and no reward was chosen");
  }
  return problem;
}

}  // namespace

JsonlTask::JsonlTask(const std::vector<std::string>& paths, const std::string& reward) {
  if (!reward.empty()) reward_ = &find_text_reward(reward);
  for (const std::string& path : paths) read(path);
}

void JsonlTask::read(const std::string& path) {
  const size_t before = problems_.size();
  std::error_code ignored;
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path, ignored))
    fail("data ", path, ": cannot be read; expected a file of JSON lines");
  std::string line;
  for (int64_t number = 1; std::getline(in, line); number++) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    problems_.push_back(problem_of(line, cat(path, ":", number), reward_));
  }
  if (in.bad()) fail("data ", path, ": reading stopped after ", problems_.size() - before, " rows");
  if (problems_.size() == before) fail("data ", path, ": has no rows");
}

Problem JsonlTask::problem(int64_t index) const {
  expect(index >= 0 && index < size(), "row ", index, " of ", size());
  return problems_[static_cast<size_t>(index)];
}

std::string JsonlTask::teach(const Problem& problem, double, Rng&) const {
  if (!problem.completion) fail(problem.where, ": no \"completion\" to learn from");
  return *problem.completion;
}

Reward JsonlTask::reward(const Problem& problem, const Response& response) const {
  expect(reward_ && problem.answer, problem.where, ": no reward was chosen for this data");
  return score_text(*reward_, *problem.answer, response);
}

}  // namespace pare
