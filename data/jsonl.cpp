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

// Keys of a row: the one asked for, or else the usual ones.
struct Keys {
  std::string prompt, answer;
};

constexpr const char* verl_answer = "reward_model.ground_truth";
const std::initializer_list<const char*> kPrompts = {"prompt",        "problem",    "question", "messages",
                                                     "conversations", "prompt_ids", "ids"};

// Of these keys the one that the row has; nothing: none.
const char* key_in(const Json& row, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (row.contains(key)) return key;
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
    value = &*it, begin = end + 1;
  }
  return value;
}

// ShareGPT's {"from", "value"} as {"role", "content"}.
Json from_sharegpt(const Json& list, const std::string& key, const std::string& where) {
  static const std::map<std::string, const char*> roles = {{"system", "system"},     {"human", "user"},
                                                           {"user", "user"},         {"gpt", "assistant"},
                                                           {"chatgpt", "assistant"}, {"assistant", "assistant"}};
  Json messages = Json::array();
  for (const Json& turn : list) {
    const auto from = turn.is_object() ? turn.find("from") : turn.end();
    if (!turn.is_object() || from == turn.end()) return list;
    const auto role = from->is_string() ? roles.find(from->get<std::string>()) : roles.end();
    if (role == roles.end() || turn.size() > 2 || !turn.contains("value"))
      fail(where, ": turn ", messages.size() + 1, " of \"", key, "\" is ", turn.dump().substr(0, 100),
           ", expected {\"from\": \"human\", \"gpt\" or \"system\", \"value\": TEXT}");
    messages.push_back({{"role", role->second}, {"content", turn["value"]}});
  }
  return messages;
}

std::vector<Message> conversation(const Json& value, const std::string& key, const std::string& where) {
  try {
    return messages_of(from_sharegpt(value, key, where));
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
      std::count_if(kPrompts.begin(), kPrompts.end(), [&](const char* k) { return row.contains(k); }) != 1)
    fail(where,
         ": expected exactly one of \"prompt\", \"problem\", \"question\", \"messages\", \"conversations\", "
         "\"prompt_ids\" and \"ids\"; data.prompt_key names another, or one of several");
  const std::string key = wanted.empty() ? key_in(row, kPrompts) : wanted;
  const Json* value = find(row, key);
  if (!value) fail(where, ": no \"", key, "\" (data.prompt_key), expected a text or messages");
  if (key == "prompt_ids" || key == "ids") {
    problem.prompt_ids = ids_of(*value, key, where);
  } else if (value->is_array() && !value->empty() && value->front().is_object()) {
    set_messages(conversation(*value, key, where), key, where, problem);
  } else {
    if (!value->is_string())
      fail(where, ": \"", key, "\" is of type ", value->type_name(),
           ", expected a string or a list of {\"role\", \"content\"}");
    problem.prompt = value->get<std::string>();
    if (problem.prompt.empty()) fail(where, ": \"", key, "\" is empty");
  }
  // Part of what a template renders, which only its own text could say.
  for (const char* rendered : {"tools", "chat_template_kwargs"})
    if (const auto it = row.find(rendered);
        it != row.end() && !problem.messages.empty() && !it->is_null() && !it->empty())
      fail(where, ": \"", rendered,
           "\" would change the prompt, and is not rendered; remove it from the row, or write the rendered prompt with "
           "data.chat_template=plain");
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
  std::vector<Message> turns = conversation(*it, "completion", where);
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
    if (const Json* value = find(row, key)) return {key, value};
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
  std::vector<Message> said = problem.messages;
  if (said.empty()) said = {{"user", problem.prompt}};
  Json messages = Json::array();
  for (const Message& m : said) {
    messages.push_back({{"role", m.role}, {"content", m.content}});
    if (m.reasoning_content) messages.back()["reasoning_content"] = *m.reasoning_content;
  }
  if (!problem.prompt_ids.empty())
    problem.told = cat("\"prompt_ids\": ", Json(problem.prompt_ids).dump());
  else if (!problem.messages.empty())
    problem.told = cat("\"messages\": ", messages.dump());
  else
    problem.told = cat("\"prompt\": ", Json(problem.prompt).dump(), ", \"messages\": ", messages.dump());
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
  set_completion(row, where, problem);
  if (countdown)
    problem.answer = countdown_gold(row, keys.answer, where);
  else if (command)
    set_told(row, line, keys.answer, where, problem);
  else if (verifier)
    set_answer(row, keys.answer, *verifier, where, problem);
  if (!prompted) problem.prompt = countdown_prompt(*problem.answer);
  if (!verifier && !command && !problem.completion && !problem.reply)
    fail(where, ": no \"completion\" and no turn of an assistant to learn from, and no reward was chosen");
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
    try {
      problems_.push_back(
          problem_of(line, cat(path, ":", number), verifier_, {prompt_key_, answer_key_}, command_ != nullptr));
    } catch (const Error& e) {
      const std::string foreign = problems_.size() == before ? foreign_rows(path) : "";
      if (foreign.empty()) throw;
      fail("data ", path, ": ", foreign);
    }
  }
  if (rows->bad()) fail("data ", path, ": reading stopped after ", problems_.size() - before, " rows");
  if (problems_.size() == before) fail("data ", path, ": has no rows");
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
