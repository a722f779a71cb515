#include "data/jsonl.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "base/error.h"
#include "base/foreign_file.h"
#include "base/json.h"
#include "data/presets.h"
#include "data/text.h"

namespace pare {
namespace {

using Json = nlohmann::json;

std::vector<int32_t> ids_of(const Json& value, const std::string& key, const std::string& where) {
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
  if (!*file || std::filesystem::is_directory(path, ignored)) {
    const std::string foreign = foreign_rows(path);
    fail("data ", path, ": ", foreign.empty() ? "cannot be read; expected a file of JSON lines" : foreign);
  }
  return file;
}

constexpr const char* verl_answer = "reward_model.ground_truth";
const std::initializer_list<const char*> kPrompts = {"prompt",        "problem",    "question", "messages",
                                                     "conversations", "prompt_ids", "ids"};

// Tables have a null in each column that a row lacks.
bool has(const Json& row, const char* key) { return row.contains(key) && !row[key].is_null(); }

// The first of these keys that the row has; null: it has none.
const char* key_in(const Json& row, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (has(row, key)) return key;
  return nullptr;
}

// The value of a key, or of a path through objects ("reward_model.ground_truth"); null: there is none.
const Json* find(const Json& row, const std::string& path) {
  if (const auto it = row.find(path); it != row.end()) return &*it;
  const Json* value = &row;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const auto it = value->is_object() ? value->find(path.substr(begin, end - begin)) : value->end();
    if (!value->is_object() || it == value->end()) return nullptr;
    value = &*it;
    begin = end + 1;
  }
  return value;
}

// ShareGPT's {"from", "value"} as {"role", "content"}; another list as it is.
Json from_sharegpt(const Json& list) {
  static const std::map<std::string, const char*> roles = {{"system", "system"},     {"human", "user"},
                                                           {"user", "user"},         {"gpt", "assistant"},
                                                           {"chatgpt", "assistant"}, {"assistant", "assistant"}};
  if (!list[0].is_object() || !list[0].contains("from")) return list;
  Json messages = Json::array();
  for (const Json& turn : list) {
    const Json from = turn.is_object() ? turn.value("from", Json()) : Json();
    const auto role = from.is_string() ? roles.find(from.get<std::string>()) : roles.end();
    Json message = turn;
    if (role == roles.end() || !message.contains("value") || !message["value"].is_string())
      fail("turn ", messages.size() + 1, " is ", turn.dump().substr(0, 100),
           ", expected {\"from\": \"human\", \"gpt\" or \"system\", \"value\": TEXT}");
    message["role"] = role->second;
    message["content"] = turn["value"];
    message.erase("from");
    message.erase("value");
    messages.push_back(std::move(message));
  }
  return messages;
}

std::vector<Message> read_messages(const Json& value, const std::string& key, const std::string& where) {
  try {
    if (value.empty()) fail("is empty");
    return messages_of(from_sharegpt(value));
  } catch (const Error& e) {
    fail(where, ": \"", key, "\": ", e.what());
  }
}

// The last turn of an assistant is what the row teaches.
void set_messages(std::vector<Message> messages, const std::string& key, const std::string& where, Problem& problem) {
  if (messages.back().role == "assistant") {
    problem.reply = std::move(messages.back());
    messages.pop_back();
  }
  if (messages.empty() || messages.back().role == "assistant" || messages.back().role == "system")
    fail(where, ": \"", key, "\" has no turn of the user before the response");
  problem.messages = std::move(messages);
}

void set_prompt(const Json& row, const std::string& wanted, const std::string& where, Problem& problem) {
  if (wanted.empty() &&
      std::count_if(kPrompts.begin(), kPrompts.end(), [&](const char* k) { return has(row, k); }) != 1)
    fail(where,
         ": expected exactly one of \"prompt\", \"problem\", \"question\", \"messages\", \"conversations\", "
         "\"prompt_ids\" and \"ids\"; data.prompt_key names another, or one of several");
  const std::string key = wanted.empty() ? key_in(row, kPrompts) : wanted;
  const Json* value = find(row, key);
  if (!value) fail(where, ": no \"", key, "\" (data.prompt_key), expected a text or messages");
  if (key == "prompt_ids" || key == "ids") {
    problem.prompt_ids = ids_of(*value, key, where);
  } else if (value->is_array() && !value->empty() && value->front().is_object()) {
    set_messages(read_messages(*value, key, where), key, where, problem);
    try {
      refuse_unrendered(row);
    } catch (const Error& e) {
      fail(where, ": ", e.what());
    }
  } else {
    if (!value->is_string())
      fail(where, ": \"", key, "\" is of type ", value->type_name(),
           ", expected a string or a list of {\"role\", \"content\"}");
    problem.prompt = value->get<std::string>();
    if (problem.prompt.empty()) fail(where, ": \"", key, "\" is empty");
  }
}

void add_system(const std::string& text, const std::string& where, Problem& problem) {
  if (text.empty()) return;
  if (!problem.prompt_ids.empty()) fail(where, ": data.system_prompt has no place in a prompt of token ids");
  std::vector<Message> messages = conversation(problem);
  if (messages[0].role != "system") messages.insert(messages.begin(), {"system", text});
  problem.messages = std::move(messages);
}

// A text, or TRL's list of messages that ends with the assistant's.
void set_completion(const Json& row, const std::string& where, Problem& problem) {
  const auto it = row.find("completion");
  if (it == row.end() || it->is_null()) return;
  if (problem.reply)
    fail(where, ": the prompt ends with a turn of the assistant, and there is a \"completion\"; remove one of them");
  if (it->is_string()) {
    problem.completion = it->get<std::string>();
    return;
  }
  if (!it->is_array())
    fail(where, ": \"completion\" is of type ", it->type_name(), ", expected a string or a list of messages");
  std::vector<Message> turns = read_messages(*it, "completion", where);
  if (turns.back().role != "assistant") fail(where, ": \"completion\" does not end with a turn of the assistant");
  problem.reply = std::move(turns.back());
  turns.pop_back();
  if (turns.empty()) return;
  if (!problem.prompt_ids.empty()) fail(where, ": a \"completion\" of several messages needs a prompt of messages");
  if (problem.messages.empty()) problem.messages = {{"user", std::exchange(problem.prompt, "")}};
  problem.messages.insert(problem.messages.end(), turns.begin(), turns.end());
}

// A countdown row as the gold of the verifier; numbers and target may stand where verl has the answer, or at the answer
// key that is `wanted`.
std::string countdown_gold(const Json& whole, const std::string& wanted, const std::string& where) {
  const Json* inner = find(whole, wanted.empty() ? verl_answer : wanted);
  if (!wanted.empty() && !inner) fail(where, ": no \"", wanted, "\" (data.answer_key)");
  const Json& row = inner && inner->is_object() ? *inner : whole;
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

// Mathematical answers: data/formats.md.  `worked`: the text is a solution that has the answer in it.
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

// The answer of a row and its key; null: there is none.
struct Answer {
  std::string key;
  const Json* value;
};
Answer find_answer(const Json& row, const std::string& wanted, const std::string& where) {
  if (!wanted.empty()) {
    const Json* value = find(row, wanted);
    if (!value) fail(where, ": no \"", wanted, "\" (data.answer_key)");
    return {wanted, value};
  }
  for (const char* key : {verl_answer, "answer", "solution"})
    if (const Json* value = find(row, key); value && !value->is_null()) return {key, value};
  return {"", nullptr};
}

void set_answer(const Json& row, const std::string& wanted, const Verifier& verifier, const std::string& where,
                Problem& problem) {
  const bool math = verifier.gold_kind == Verifier::Gold::math;
  const auto [key, value] = find_answer(row, wanted, where);
  if (!value)
    fail(where, ": no \"answer\" and no \"solution\", which the reward ", verifier.name,
         " compares with; data.answer_key names another, such as reward_model.ground_truth");
  const std::string text = answer_text(*value, math, key, where);
  problem.answer = math ? math_gold(text, key == "solution", key, where) : text;
  if (!verifier.accepts_empty_gold && trim(*problem.answer).empty())
    fail(where, ": \"", key, "\" has an empty answer, with which the reward ", verifier.name, " cannot compare");
}

// The answer of a row that a command grades is left to the command: there may be none, or one of any type.
void set_told(const Json& row, const std::string& line, const std::string& wanted, const std::string& where,
              Problem& problem) {
  const Json* value = find_answer(row, wanted, where).value;
  const Json gold = value ? *value : Json();
  if (!gold.is_null()) problem.answer = gold.is_string() ? gold.get<std::string>() : gold.dump();
  if (!problem.prompt.empty()) problem.told = cat("\"prompt\": ", Json(problem.prompt).dump(), ", ");
  problem.told += problem.prompt_ids.empty() ? cat("\"messages\": ", to_json(conversation(problem)).dump())
                                             : cat("\"prompt_ids\": ", Json(problem.prompt_ids).dump());
  const size_t begin = line.find('{'), end = line.rfind('}') + 1;  // without a byte order mark and white space
  problem.told += cat(", \"gold\": ", gold.dump(), ", \"row\": ", line.substr(begin, end - begin));
  // White space in JSON, and for some readers the end of a line.
  std::replace(problem.told.begin(), problem.told.end(), '\r', ' ');
}

Json row_of(const std::string& line, const std::string& where) {
  Json row = parse_json(line, where);
  if (!row.is_object()) fail(where, ": is of type ", row.type_name(), ", expected an object {\"prompt\": ...}");
  return row;
}

Problem problem_of(const std::string& line, const std::string& where, const Verifier* verifier, const RowKeys& keys,
                   bool command) {
  const Json row = row_of(line, where);
  Problem problem;
  problem.where = where;
  const bool countdown = verifier && verifier->gold_kind == Verifier::Gold::countdown;
  const bool prompted = !countdown || !keys.prompt.empty() || key_in(row, kPrompts);
  if (prompted) set_prompt(row, keys.prompt, where, problem);
  set_completion(row, where, problem);
  if (countdown) problem.answer = countdown_gold(row, keys.answer, where);
  if (!prompted) problem.prompt = countdown_prompt(*problem.answer);
  add_system(keys.system, where, problem);
  if (command)
    set_told(row, line, keys.answer, where, problem);
  else if (verifier && !countdown)
    set_answer(row, keys.answer, *verifier, where, problem);
  if (!verifier && !command && !problem.completion && !problem.reply)
    fail(where, ": no \"completion\" and no turn of an assistant to learn from, and no reward was chosen");
  return problem;
}

}  // namespace

Problem read_prompt(const std::string& line, const RowKeys& keys, const std::string& where) {
  Problem problem;
  problem.where = where;
  const Json row = row_of(line, where);
  set_prompt(row, keys.prompt, where, problem);
  add_system(keys.system, where, problem);
  if (const auto most = row.find("max_tokens"); most != row.end()) {
    if (!most->is_number_integer() || *most < 1 || *most > INT32_MAX)
      fail(where, ": max_tokens is ", most->dump().substr(0, 100), ", expected a positive integer");
    problem.max_tokens = *most;
  }
  return problem;
}

JsonlTask::JsonlTask(const std::vector<std::string>& paths, const std::string& reward, RowKeys keys,
                     std::shared_ptr<RewardCommand> command)
    : keys_(std::move(keys)), command_(std::move(command)) {
  if (!command_ && !reward.empty()) verifier_ = &find_verifier(reward);
  for (const std::string& path : paths) read(path);
}

void JsonlTask::read(const std::string& path) {
  const size_t before = problems_.size();
  const std::unique_ptr<std::istream> rows = open_rows(path);
  std::string line;
  for (int64_t number = 1; std::getline(*rows, line); number++) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      problems_.push_back(problem_of(line, cat(path, ":", number), verifier_, keys_, command_ != nullptr));
    } catch (const Error& e) {
      const std::string foreign = problems_.size() == before ? foreign_rows(path) : "";
      if (foreign.empty()) throw;
      fail("data ", path, ": ", foreign);
    }
  }
  if (rows->bad()) fail("data ", path, ": reading stopped after ", problems_.size() - before, " rows");
  std::error_code ignored;
  if (problems_.size() == before)
    fail("data ", path, ": has no rows",
         std::filesystem::is_other(path, ignored)
             ? "; it is no file, and data are read more than once: write it into one"
             : "");
}

Problem JsonlTask::problem(int64_t index) const {
  expect(index >= 0 && index < size(), "row ", index, " of ", size());
  return problems_[static_cast<size_t>(index)];
}

void JsonlTask::keep(const std::vector<int64_t>& rows) {
  std::vector<Problem> kept;
  for (const int64_t row : rows) kept.push_back(std::move(problems_.at(static_cast<size_t>(row))));
  problems_ = std::move(kept);
}

std::string JsonlTask::teach(const Problem& problem, double, Rng&) const {
  if (!problem.completion && !problem.reply)
    fail(problem.where, ": no \"completion\" and no turn of an assistant to learn from");
  return problem.reply ? problem.reply->content : *problem.completion;
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
