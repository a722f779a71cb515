#include "data/jsonl.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>

#include "base/error.h"
#include "base/json.h"
#include "data/presets.h"
#include "data/text.h"

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

// What is in the program, or a file.
std::unique_ptr<std::istream> open_rows(const std::string& path) {
  if (const auto text = preset_text(path, "jsonl")) return std::make_unique<std::istringstream>(std::string(*text));
  std::error_code ignored;
  auto file = std::make_unique<std::ifstream>(path, std::ios::binary);
  if (!*file || std::filesystem::is_directory(path, ignored))
    fail("data ", path, ": cannot be read; expected a file of JSON lines");
  return file;
}

// Keys of a row: the one asked for, or else the usual ones.
struct Keys {
  std::string prompt, answer;
};

const std::initializer_list<const char*> kPrompts = {"prompt", "problem", "question", "prompt_ids", "ids"};

// Of these keys the one that the row has; nothing: none.
const char* key_in(const Json& row, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (row.contains(key)) return key;
  return nullptr;
}

void set_prompt(const Json& row, const std::string& wanted, const std::string& where, Problem& problem) {
  if (!wanted.empty() && !row.contains(wanted)) fail(where, ": no \"", wanted, "\" (data.prompt_key), expected a text");
  if (wanted.empty() &&
      std::count_if(kPrompts.begin(), kPrompts.end(), [&](const char* k) { return row.contains(k); }) != 1)
    fail(where,
         ": expected exactly one of \"prompt\", \"problem\", \"question\", \"prompt_ids\" and \"ids\"; data.prompt_key "
         "names another, or one of several");
  const std::string key = wanted.empty() ? key_in(row, kPrompts) : wanted;
  if (key == "prompt_ids" || key == "ids") {
    problem.prompt_ids = ids_of(row, key.c_str(), where);
  } else {
    problem.prompt = text_of(row, key.c_str(), where);
    if (problem.prompt.empty()) fail(where, ": \"", key, "\" is empty");
  }
}

// A countdown row as the gold of the verifier.
std::string countdown_gold(const Json& row, const std::string& where) {
  const char* numbers = key_in(row, {"nums", "numbers"});
  const auto is_integer = [](const Json& x) { return x.is_number_integer(); };
  if (!numbers || !row[numbers].is_array() || row[numbers].empty() ||
      !std::all_of(row[numbers].begin(), row[numbers].end(), is_integer))
    fail(where, ": \"nums\" (or \"numbers\") is ", numbers ? row[numbers].dump().substr(0, 100) : "absent",
         ", expected an array of integers");
  if (!row.contains("target") || !is_integer(row["target"]))
    fail(where, ": \"target\" is ", row.contains("target") ? row["target"].dump().substr(0, 100) : "absent",
         ", expected an integer");
  return Json{{"target", row["target"]}, {"numbers", row[numbers]}}.dump();
}

std::string countdown_prompt(const std::string& gold) {
  const Json puzzle = Json::parse(gold);
  return cat("User: Make ", puzzle["target"].dump(), " out of the numbers ", puzzle["numbers"].dump(),
             ". Use each of them exactly once, with +, -, *, / and parentheses. Think first, between <think> and "
             "</think>; then write the equation on one line, for example <answer> (1 + 2) / 3 </answer>.\n"
             "Assistant: <think>");
}

// What a mathematical answer is: see the header.  `worked`: the text is a solution that has the answer in it.
std::string math_gold(std::string_view text, bool worked, const std::string& key, const std::string& where) {
  const std::string_view mark = "####";
  std::string_view gold = text;
  std::string plain;
  if (const size_t at = text.rfind(mark); at != std::string_view::npos) {
    plain = replace_all(text.substr(at + mark.size()), ",", "");
    gold = plain;
  } else if (!last_braced(text, "\\boxed", gold) && worked) {
    fail(where, ": \"", key, "\" has no answer in it, expected \"#### answer\" or \\boxed{answer}");
  }
  gold = trim(gold);
  if (gold.size() > 2 && gold.front() == '$' && gold.find('$', 1) == gold.size() - 1)
    gold = trim(gold.substr(1, gold.size() - 2));
  return is_integer(gold) ? without_leading_zeros(gold) : std::string(gold);
}

std::string answer_text(const Json& value, bool math, const std::string& key, const std::string& where) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number()) {
    std::string number = value.dump();
    if (math && number.ends_with(".0")) number.resize(number.size() - 2);
    return number;
  }
  if (!math || !value.is_array() || value.empty())
    fail(where, ": \"", key, "\" is of type ", value.type_name(), ", expected a string or a number");
  std::string all;
  for (const Json& element : value) {
    if (element.is_array()) fail(where, ": \"", key, "\" is an array of arrays, expected strings or numbers in it");
    all += (all.empty() ? "" : ", ") + math_gold(answer_text(element, math, key, where), false, key, where);
  }
  return all;
}

void set_answer(const Json& row, const std::string& wanted, const Verifier* verifier, const std::string& where,
                Problem& problem) {
  const bool math = verifier && verifier->gold_kind == Verifier::Gold::math;
  const char* usual = verifier ? key_in(row, {"answer", "solution"}) : key_in(row, {"answer"});
  if (!wanted.empty() && !row.contains(wanted) && verifier) fail(where, ": no \"", wanted, "\" (data.answer_key)");
  if (wanted.empty() ? !usual : !row.contains(wanted)) {
    if (!verifier) return;
    fail(where, ": no \"answer\" and no \"solution\", which the reward ", verifier->name, " compares with");
  }
  const std::string key = wanted.empty() ? usual : wanted;
  const std::string text = answer_text(row[key], math, key, where);
  problem.answer = math ? math_gold(text, key == "solution", key, where) : text;
  if (verifier && !verifier->accepts_empty_gold && trim(*problem.answer).empty())
    fail(where, ": \"", key, "\" has an empty answer, with which the reward ", verifier->name, " cannot compare");
}

// The answer of a row that a command grades is left to the command: there may be none, or one of any type.
void set_told(const Json& row, const std::string& line, const std::string& wanted, const std::string& where,
              Problem& problem) {
  if (!wanted.empty() && !row.contains(wanted)) fail(where, ": no \"", wanted, "\" (data.answer_key)");
  const char* usual = key_in(row, {"answer", "solution"});
  const Json gold = wanted.empty() ? (usual ? row[usual] : Json()) : row[wanted];
  if (!gold.is_null()) problem.answer = gold.is_string() ? gold.get<std::string>() : gold.dump();
  const Json said = {{{"role", "user"}, {"content", problem.prompt}}};
  problem.told = problem.prompt_ids.empty()
                     ? cat("\"prompt\": ", Json(problem.prompt).dump(), ", \"messages\": ", said.dump())
                     : cat("\"prompt_ids\": ", Json(problem.prompt_ids).dump());
  const size_t begin = line.find('{'), end = line.rfind('}') + 1;  // without a byte order mark and white space
  problem.told += cat(", \"gold\": ", gold.dump(), ", \"row\": ", line.substr(begin, end - begin));
  // White space in JSON, and for some readers the end of a line.
  std::replace(problem.told.begin(), problem.told.end(), '\r', ' ');
}

Problem problem_of(const std::string& line, const std::string& where, const Verifier* verifier, const Keys& keys,
                   bool command) {
  const Json row = parse_json(line, where);
  if (!row.is_object()) fail(where, ": is of type ", row.type_name(), ", expected an object {\"prompt\": ...}");
  Problem problem;
  problem.where = where;
  const bool countdown = verifier && verifier->gold_kind == Verifier::Gold::countdown;
  const bool prompted = !countdown || !keys.prompt.empty() || key_in(row, kPrompts);
  if (prompted) set_prompt(row, keys.prompt, where, problem);
  if (countdown)
    problem.answer = countdown_gold(row, where);
  else if (command)
    set_told(row, line, keys.answer, where, problem);
  else
    set_answer(row, keys.answer, verifier, where, problem);
  if (!prompted) problem.prompt = countdown_prompt(*problem.answer);
  if (row.contains("completion")) problem.completion = text_of(row, "completion", where);
  if (!verifier && !command && !problem.completion)
    fail(where, ": no \"completion\" to learn from, and no reward was chosen");
  return problem;
}

}  // namespace

JsonlTask::JsonlTask(const std::vector<std::string>& paths, const std::string& reward, std::string prompt_key,
                     std::string answer_key, std::shared_ptr<RewardCommand> command)
    : prompt_key_(std::move(prompt_key)), answer_key_(std::move(answer_key)), command_(std::move(command)) {
  if (!command_ && !reward.empty()) verifier_ = &find_verifier(reward);
  for (const std::string& path : paths) read(path);
}

void JsonlTask::read(const std::string& path) {
  const size_t before = problems_.size();
  const std::unique_ptr<std::istream> rows = open_rows(path);
  std::string line;
  for (int64_t number = 1; std::getline(*rows, line); number++) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    problems_.push_back(
        problem_of(line, cat(path, ":", number), verifier_, {prompt_key_, answer_key_}, command_ != nullptr));
  }
  if (rows->bad()) fail("data ", path, ": reading stopped after ", problems_.size() - before, " rows");
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
  Verdict verdict;
  if (command_) {
    verdict = command_->grade(cat(
        "{", problem.told, ", \"response\": ", Json(response.text).dump(-1, ' ', false, Json::error_handler_t::replace),
        ", \"finished\": ", response.finished ? "true" : "false", ", \"tokens\": ", response.tokens, "}"));
  } else {
    expect(verifier_ && problem.answer, problem.where, ": no reward was chosen for this data");
    const std::string text = std::string(verifier_->lead).append(response.text);
    verdict = verifier_->grade(text, response.finished, *problem.answer);
  }
  Reward reward;
  reward.score = verdict.score;
  reward.components = {{command_ ? "command" : verifier_->name, verdict.score}};
  reward.extracted = std::move(verdict.extracted);
  reward.parsed = verdict.found;
  return reward;
}

std::vector<size_t> JsonlTask::first_equal(std::span<const std::string> answers) const {
  return verifier_ && verifier_->first_equal ? verifier_->first_equal(answers) : Task::first_equal(answers);
}

}  // namespace pare
