// pare verify: grades responses, JSON lines in, JSON lines out.
#include "data/verify.h"

#include <cstdio>
#include <iostream>
#include <memory>

#include "app/commands.h"
#include "app/console.h"
#include "base/json.h"

namespace pare {

namespace {

using Json = nlohmann::json;
constexpr size_t kBatch = 4096;  // lines graded together

struct Line {
  std::string response, gold;
  bool finished = true;
};

Line line_of(const std::string& text, const std::string& where) {
  const Json row = parse_json(text, where);
  if (!row.is_object())
    fail(where, ": ", row.type_name(), ", expected an object {\"response\": \"...\", \"gold\": \"...\"}");
  const auto found = [&](const char* key) { return row.contains(key) ? row[key].type_name() : "absent"; };
  Line line;
  if (!row.contains("response") || !row["response"].is_string())
    fail(where, ": \"response\" is ", found("response"), ", expected a string");
  if (!row.contains("gold") || !(row["gold"].is_string() || row["gold"].is_number() || row["gold"].is_object()))
    fail(where, ": \"gold\" is ", found("gold"), ", expected a string, a number or (countdown) an object");
  if (row.contains("finished") && !row["finished"].is_boolean())
    fail(where, ": \"finished\" is ", found("finished"), ", expected true or false");
  line.response = row["response"].get<std::string>();
  line.gold = row["gold"].is_string() ? row["gold"].get<std::string>() : row["gold"].dump();
  line.finished = row.value("finished", true);
  return line;
}

void print_verdict(const Verdict& v) {
  const nlohmann::ordered_json row = {{"score", v.score},
                                      {"extracted", v.found || !v.extracted.empty() ? Json(v.extracted) : Json()},
                                      {"parsed", v.found ? Json(v.parsed) : Json()}};
  print(row.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void verify(const std::string& mode) {
  const Verifier& verifier = find_verifier(mode);
  std::string text;
  int64_t number = 0;
  while (std::cin) {
    std::vector<Line> lines;
    while (lines.size() < kBatch && std::getline(std::cin, text)) {
      number++;
      if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
      lines.push_back(line_of(text, cat("line ", number)));
    }
    std::vector<Answered> batch;
    for (const Line& l : lines) batch.push_back({l.response, l.finished, l.gold});
    for (const Verdict& v : grade_all(verifier, batch)) print_verdict(v);
  }
}

}  // namespace

void add_verify(CLI::App& app) {
  CLI::App* command = app.add_subcommand("verify",
                                         "Grade responses: JSON lines {\"response\", \"gold\"} from standard "
                                         "input, {\"score\", \"extracted\", \"parsed\"} to standard output");
  auto mode = std::make_shared<std::string>();
  command->add_option("--mode", *mode, "the rule set, as for data.reward")->required();
  command->footer("A line may have \"finished\": false for a response that was cut at its limit.");
  command->callback([mode] { verify(*mode); });
}

}  // namespace pare
