// pare verify: grades responses, JSON lines in, JSON lines out.
#include "data/verify/verify.h"

#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>

#include "app/commands.h"
#include "app/console.h"
#include "base/json.h"
#include "data/reward_command.h"
#include "run/config.h"

namespace pare {

namespace {

using Json = nlohmann::json;
constexpr size_t kBatch = 4096;  // lines graded together

struct Line {
  std::string response, gold;
  bool finished = true;
};

Json row_of(const std::string& text, const std::string& where) {
  Json row = parse_json(text, where);
  if (!row.is_object())
    fail(where, ": ", row.type_name(), ", expected an object {\"response\": \"...\", \"gold\": \"...\"}");
  const auto found = [&](const char* key) { return row.contains(key) ? row[key].type_name() : "absent"; };
  if (!row.contains("response") || !row["response"].is_string())
    fail(where, ": \"response\" is ", found("response"), ", expected a string");
  if (row.contains("finished") && !row["finished"].is_boolean())
    fail(where, ": \"finished\" is ", found("finished"), ", expected true or false");
  row.emplace("finished", true);
  return row;
}

Line line_of(const Json& row, const std::string& where) {
  const Json gold = row.value("gold", Json());
  if (!gold.is_string() && !gold.is_number() && !gold.is_object())
    fail(where, ": \"gold\" is ", row.contains("gold") ? gold.type_name() : "absent",
         ", expected a string, a number or (countdown) an object");
  return {row["response"].get<std::string>(), gold.is_string() ? gold.get<std::string>() : gold.dump(),
          row["finished"].get<bool>()};
}

void print_verdict(const Verdict& v) {
  const nlohmann::ordered_json row = {{"score", v.score},
                                      {"extracted", v.found || !v.extracted.empty() ? Json(v.extracted) : Json()},
                                      {"parsed", v.found ? Json(v.parsed) : Json()}};
  print(row.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void verify(const std::string& mode, double timeout) {
  std::optional<RewardCommand> command;
  if (RewardCommand::is_one(mode)) command.emplace(mode, timeout);
  const Verifier* verifier = command ? nullptr : &find_verifier(mode);
  // Lines that have come already are graded together; one that comes alone is answered before the next.
  std::ios::sync_with_stdio(false);
  const auto waiting = [] { return std::cin.rdbuf()->in_avail() > 0; };
  std::string text;
  int64_t number = 0;
  while (std::cin) {
    std::vector<Line> lines;
    std::vector<std::string> told;
    for (size_t read = 0; read < kBatch && (read == 0 || waiting()) && std::getline(std::cin, text); number++) {
      if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
      const std::string where = cat("line ", number + 1);
      const Json row = row_of(text, where);
      if (command)
        told.push_back(row.dump());
      else
        lines.push_back(line_of(row, where));
      read++;
    }
    std::vector<Answered> batch;
    for (const Line& l : lines) batch.push_back({l.response, l.finished, l.gold});
    for (const Verdict& v : command ? command->grade_all(told) : grade_all(*verifier, batch)) print_verdict(v);
    std::fflush(stdout);
  }
}

}  // namespace

void add_verify(const Command& program) {
  const Command command = program.command("verify",
                                          "grades of responses: JSON lines {\"response\", \"gold\"} from standard "
                                          "input, {\"score\", \"extracted\", \"parsed\"} to standard output");
  auto mode = std::make_shared<std::string>();
  command.option("--mode", *mode, "verifier, or command:PROGRAM, as in data.reward").required();
  auto timeout = std::make_shared<double>(Config().data.reward_timeout);
  command.option("--timeout", *timeout, cat("time limit of a command for one answer, in seconds; default: ", *timeout))
      .between(1e-3, 1e6);
  command.footer(
      "\"finished\": false marks a response that was cut at its limit.  A command receives every line as it is.");
  command.action([mode, timeout] { verify(*mode, *timeout); });
}

}  // namespace pare
