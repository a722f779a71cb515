// A reward that a program of the user's gives: data.reward = "command:PROGRAM ARGUMENTS...".
//
// It is started once for each thread that grades, when the first response is there.  It answers each line of its
// standard input, an object, with one line on its standard output before it gets the next (data/formats.md).
//
// Which process gets a response depends on threads and time, and a resumed run asks again: for a run that can be
// reproduced the answer is a function of the line.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/child.h"
#include "data/verify/verify.h"

namespace pare {

class RewardCommand {
 public:
  static bool is_one(const std::string& reward) { return reward.starts_with("command:"); }

  // Splits the command into words as a shell does (quotes, $VARIABLES, ~, patterns; no pipes) and finds its program,
  // but starts nothing.  `seconds`: the most that an answer may take, the start of the program included.
  RewardCommand(const std::string& reward, double seconds);
  ~RewardCommand();  // the programs have a second to end by themselves

  // The program, and the words of the command after it: scripts and data, where they are files.
  std::vector<std::string> program_and_words() const;

  // The verdict on a line (JSON without a line end); from any number of threads.  A program that ends or is late is
  // started again, once, and asked again.  An Error(failed) shows the end of its standard error.
  Verdict grade(const std::string& line);
  // Restarts of programs so far.
  int64_t restarts() const { return restarts_; }
  // The first reason for it since the last call, with the end of the program's standard error; empty: none.
  std::string take_warning();
  // One verdict for each, in order, on all threads.
  std::vector<Verdict> grade_all(const std::vector<std::string>& lines);

 private:
  std::unique_ptr<Child> start() const { return std::make_unique<Child>(program_, words_); }
  std::unique_ptr<Child> idle_or_new();
  void note_restart(Child& child, const std::string& what);
  [[noreturn]] void give_up(Child& child, const std::string& line, const std::string& what);

  const std::string command_;
  const double seconds_;
  std::vector<std::string> words_;
  std::string program_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Child>> idle_;  // no more than were asked at the same time
  std::string failure_, warning_;             // of the first that gave up; take_warning()
  std::atomic<int64_t> restarts_ = 0;
};

}  // namespace pare
