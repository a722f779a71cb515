#include "data/reward_command.h"

#include <wordexp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "base/thread_pool.h"

namespace pare {

namespace {

constexpr size_t kShown = 300;  // columns of a line in a message

std::vector<std::string> words_of_shell(const std::string& command) {
  wordexp_t words;
  const int failed = wordexp(command.c_str(), &words, WRDE_NOCMD | WRDE_UNDEF);
  if (failed) {
    if (failed == WRDE_NOSPACE) wordfree(&words);
    fail(failed == WRDE_BADVAL ? "a variable in it is not set"
         : failed == WRDE_SYNTAX
             ? "a quote or a brace in it is not closed"
             : "outside quotes it has one of | & ; < > ( ) { } $( `, which only a shell understands; "
               "put it into a script, or write command:sh -c '...'");
  }
  std::vector<std::string> list(words.we_wordv, words.we_wordv + words.we_wordc);
  wordfree(&words);
  if (list.empty()) fail("no program is named after \"command:\"");
  return list;
}

Verdict verdict_of(const std::string& answer) {
  const nlohmann::json row = try_parse_json(answer);
  // The parser refuses a number that is not finite.
  if (!row.is_object() || !row.contains("score") || !row["score"].is_number())
    fail("expected one object {\"score\": NUMBER}, each key once, the number finite");
  Verdict verdict;
  verdict.score = row["score"].get<double>();
  if (std::fabs(verdict.score) > std::numeric_limits<float>::max())
    fail("expected a score of at most 3.4e38 in magnitude: rewards are f32");
  if (!row.contains("extracted") || row["extracted"].is_null()) return verdict;
  if (!row["extracted"].is_string()) fail("expected a string or null for \"extracted\"");
  verdict.extracted = verdict.parsed = row["extracted"].get<std::string>();
  verdict.found = true;
  return verdict;
}

// The end of what a program wrote to its standard error, indented; empty: nothing.
std::string errors_of(Child& child) {
  std::string errors;
  const std::string all = child.last_errors();
  for (size_t begin = 0, end; begin < all.size(); begin = end + 1) {
    end = std::min(all.find('\n', begin), all.size());
    errors += cat("    ", printable(all.substr(begin, end - begin)), "\n");
  }
  return errors;
}

}  // namespace

RewardCommand::RewardCommand(const std::string& reward, double seconds)
    : command_(reward.substr(reward.find(':') + 1)), seconds_(seconds) {
  try {
    words_ = words_of_shell(command_);
    program_ = find_program(words_[0]);
  } catch (const Error& e) {
    fail("reward \"", reward, "\": ", e.what());
  }
}

std::vector<std::string> RewardCommand::program_and_words() const {
  std::vector<std::string> all = words_;
  all[0] = program_;
  return all;
}

RewardCommand::~RewardCommand() {
  for (const auto& child : idle_) child->hang_up();
  const auto deadline = Child::Clock::now() + std::chrono::seconds(1);
  for (const auto& child : idle_) child->ended_by(deadline);
}

std::unique_ptr<Child> RewardCommand::idle_or_new() {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw Error(Exit::failed, failure_);  // the rest of a batch, after an error
  if (idle_.empty()) return start();
  std::unique_ptr<Child> child = std::move(idle_.back());
  idle_.pop_back();
  return child;
}

void RewardCommand::give_up(Child& child, const std::string& line, const std::string& what) {
  const std::string errors = errors_of(child);
  const std::lock_guard lock(mutex_);
  if (failure_.empty())
    failure_ = cat("the reward ", command_, " ", what,
                   errors.empty() ? "; it wrote nothing to its standard error, and"
                                  : cat("; its standard error ends with\n", errors, "and it"),
                   " was asked ", shortened(printable(line), kShown));
  throw Error(Exit::failed, failure_);
}

void RewardCommand::note_restart(Child& child, const std::string& what) {
  const std::string errors = errors_of(child);
  restarts_++;
  const std::lock_guard lock(mutex_);
  if (warning_.empty())
    warning_ = cat("the reward ", command_, " ", what, " and was started again",
                   errors.empty() ? "; it wrote nothing to its standard error"
                                  : "; its standard error ends with\n" + errors.substr(0, errors.size() - 1));
}

std::string RewardCommand::take_warning() {
  const std::lock_guard lock(mutex_);
  return std::exchange(warning_, "");
}

Verdict RewardCommand::grade(const std::string& line) {
  std::unique_ptr<Child> child = idle_or_new();
  for (bool again = false;; again = true) {
    std::string answer, what;
    switch (child->ask(line, seconds_, answer)) {
      case Child::Reply::line:
        try {
          Verdict verdict = verdict_of(answer);
          const std::lock_guard lock(mutex_);
          idle_.push_back(std::move(child));
          return verdict;
        } catch (const Error& e) {
          give_up(*child, line, cat("answered ", shortened(printable(answer), kShown), ", ", e.what()));
        }
      case Child::Reply::too_long:
        give_up(*child, line, cat("answered with a line of more than ", Child::kLongest, " bytes"));
      case Child::Reply::unasked:
        give_up(*child, line,
                cat("wrote more than one line for a line that it read: ", shortened(printable(answer), kShown)));
      case Child::Reply::ended:
        what = child->ended_by(Child::Clock::now() + std::chrono::seconds(1));
        if (what.empty()) what = "closed its standard output";
        break;
      case Child::Reply::late:
        what = cat("gave no answer within ", seconds_, " s (data.reward_timeout; does it flush every line?)");
    }
    if (again) give_up(*child, line, what + ", also when it was started again");
    note_restart(*child, what);
    child = start();
  }
}

std::vector<Verdict> RewardCommand::grade_all(const std::vector<std::string>& lines) {
  std::vector<Verdict> verdicts(lines.size());
  parallel_for(static_cast<int64_t>(lines.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) verdicts[static_cast<size_t>(i)] = grade(lines[static_cast<size_t>(i)]);
  });
  return verdicts;
}

}  // namespace pare
