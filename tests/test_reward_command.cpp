// A reward that a program of the user's gives (data/reward_command.h), and what such programs do that they should not.
#include <fcntl.h>
#include <sys/stat.h>

#include <csignal>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/json_file.h"
#include "base/thread_pool.h"
#include "data/jsonl.h"
#include "data/reward_command.h"
#include "run/plan.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Json = nlohmann::ordered_json;

// Gone, or dead and not yet collected by whoever inherited it.
bool runs(const std::string& pid) {
  const std::string stat = read_text("/proc/" + pid + "/stat");
  const size_t name = stat.rfind(')');
  return name != std::string::npos && stat.substr(name + 2, 1) != "Z";
}
void expect_gone(const std::string& pids) {
  std::stringstream list(pids);
  int count = 0;
  for (std::string pid; list >> pid; count++) {
    for (int i = 0; i < 1000 && runs(pid); i++) std::this_thread::sleep_for(10ms);
    EXPECT_FALSE(runs(pid)) << pid;
  }
  EXPECT_GT(count, 0);
}

bool has_python() { return std::system("python3 -c 'import json' >/dev/null 2>&1") == 0; }

class RewardCommands : public Program {
 protected:
  void TearDown() override {
    set_threads(0);
    Program::TearDown();
  }

  // A shell script that can be started; $dir is the directory of the test.
  std::string script(const std::string& text, const std::string& name = "grade.sh") const {
    write(name, cat("#!/bin/sh\ndir='", root_.string(), "'\n", text, "\n"));
    EXPECT_EQ(chmod(at(name).c_str(), 0755), 0);
    return "command:" + at(name);
  }
  // What the command has to say of `line`.
  static Verdict grade(const std::string& reward, const std::string& line = R"({"x": 1})", double seconds = 60) {
    RewardCommand command(reward, seconds);
    return command.grade(line);
  }
  static std::string failure(const std::string& reward, double seconds = 60, const std::string& line = R"({"x": 1})",
                             Exit code = Exit::failed) {
    try {
      grade(reward, line, seconds);
    } catch (const Error& e) {
      EXPECT_EQ(e.code, code) << e.what();
      return e.what();
    }
    ADD_FAILURE() << reward << " did not fail";
    return "";
  }
  // The number of times that a script was started that notes its pid in `started`.
  int starts() const {
    const std::string text = read_text(at("started"));
    return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  }
};

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (part) << " is not in: " << (text)

const char* const kNoteStart = "echo $$ >> \"$dir/started\"\n";
// Answers with the number at the end of the line: {"n": 17}.
const char* const kEcho =
    "while read -r line; do n=${line##* }; echo \"{\\\"score\\\": ${n%\\}}, \\\"extracted\\\": \\\"<$n>\\\"}\"; done";

// As is one of a process that ends meanwhile: runs() reads those.
TEST(ReadText, AFileThatFailsIsEmpty) { EXPECT_EQ(read_text("/proc/self/mem"), ""); }

TEST_F(RewardCommands, AnswersAreInOrderOnAnyNumberOfThreads) {
  std::vector<std::string> lines;
  for (int i = 0; i < 300; i++) lines.push_back(cat("{\"n\": ", i, "}"));
  for (const int threads : {1, 4}) {
    set_threads(threads);
    fs::remove(at("started"));
    RewardCommand command(script(kNoteStart + std::string(kEcho)), 60);
    EXPECT_EQ(starts(), 0) << "started before it was needed";
    for (int batch = 0; batch < 2; batch++) {
      const std::vector<Verdict> verdicts = command.grade_all(lines);
      for (int i = 0; i < 300; i++) {
        EXPECT_EQ(verdicts[i].score, i);
        EXPECT_EQ(verdicts[i].extracted, cat("<", i, "}>"));
        EXPECT_TRUE(verdicts[i].found);
      }
    }
    EXPECT_GE(starts(), 1);
    EXPECT_LE(starts(), threads) << "one process for a thread";
  }
}

TEST_F(RewardCommands, ScoresAreNumbersAndTheRestIsOptional) {
  const auto answer = [&](const std::string& json) {
    return grade(script("while read -r line; do cat <<'END'\n" + json + "\nEND\ndone"));
  };
  EXPECT_EQ(answer(R"({"score": -2.5e-3})").score, -2.5e-3);
  EXPECT_EQ(answer(R"({"score": -3.4e38})").score, -3.4e38) << "an f32";
  EXPECT_FALSE(answer(R"({"score": 1})").found);
  EXPECT_FALSE(answer(R"({"score": 1, "extracted": null})").found);
  EXPECT_TRUE(answer(R"({"score": 1, "extracted": ""})").found);
  EXPECT_EQ(answer(R"( {"comment": [1, 2], "extracted": "é", "score": 0}  )").extracted, "é");
}

// ---- programs that do what they should not

TEST_F(RewardCommands, NonsenseIsAnErrorThatShowsIt) {
  for (const char* answer :
       {"hello", "1", "[1]", "{}", "null", "", R"({"score": NaN})", R"({"score": Infinity})", R"({"score": 1e999})",
        R"({"score": 1e308})", R"({"score": -3.5e38})", R"({"score": "1"})", R"({"score": true})", R"({"score": null})",
        R"({"score": 1)", R"({"scores": 1})", R"({"score": 1, "extracted": 72})", R"({"score": 1} {"score": 1})"}) {
    const std::string text =
        failure(script(cat("echo 'my words' >&2\nread -r line\ncat <<'END'\n", answer, "\nEND\nread -r line")));
    EXPECT_SAYS(text, std::string("answered ") + answer);
    EXPECT_SAYS(text, "expected");
    EXPECT_SAYS(text, "\n    my words\n");
    EXPECT_SAYS(text, R"({"x": 1})");
  }
  const std::string binary = failure(script("read -r line; printf '\\033[31m\\377\\n'; read -r line"));
  EXPECT_SAYS(binary, R"(\x1b[31m\xff)");
}

TEST_F(RewardCommands, MoreThanOneLineIsAnError) {
  EXPECT_SAYS(failure(script("read -r line; printf '{\"score\": 1}\\n{\"score\": 1}\\n'; read -r line")),
              "more than one line");
  EXPECT_SAYS(failure(script("echo welcome; sleep 1000")), "welcome");
  // The second one comes when nothing was asked.
  RewardCommand late(script("while read -r line; do echo '{\"score\": 1}'; sleep .1; echo '{\"score\": 2}'; "
                            "touch \"$dir/written\"; done"),
                     60);
  EXPECT_EQ(late.grade("{}").score, 1);
  while (!fs::exists(at("written"))) std::this_thread::sleep_for(1ms);
  EXPECT_THROW(late.grade("{}"), Error);
}

TEST_F(RewardCommands, AHugeAnswerIsAnError) {
  EXPECT_SAYS(failure(script("read -r line; cat /dev/zero")), "bytes");
  const std::string shown = failure(script("read -r line; head -c 100000 /dev/zero | tr '\\0' x; echo; read -r line"));
  EXPECT_LT(shown.size(), 1000u) << "the whole answer is in the message";
}

TEST_F(RewardCommands, ACrashIsMendedOnce) {
  // Ends in the middle of the first request that it ever gets, and in that of every process with n = 7.
  const std::string reward = script(std::string(kNoteStart) +
                                    "while read -r line; do\n"
                                    "  [ -e \"$dir/crashed\" ] || { touch \"$dir/crashed\"; echo dying >&2; exit 9; }\n"
                                    "  case $line in *7}) echo \"cannot do $line\" >&2; kill -SEGV $$;; esac\n"
                                    "  echo '{\"score\": 5}'\ndone");
  RewardCommand command(reward, 60);
  EXPECT_EQ(command.grade(R"({"n": 1})").score, 5);
  EXPECT_EQ(starts(), 2);
  EXPECT_EQ(command.restarts(), 1);
  EXPECT_SAYS(command.take_warning(),
              "exited with code 9 and was started again; its standard error ends with\n    dying");
  EXPECT_EQ(command.take_warning(), "") << "said once";
  EXPECT_EQ(command.grade(R"({"n": 2})").score, 5);
  EXPECT_EQ(starts(), 2);
  try {
    command.grade(R"({"n": 7})");
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code, Exit::failed);
    EXPECT_SAYS(std::string(e.what()), "signal 11");
    EXPECT_SAYS(std::string(e.what()), "also when it was started again");
    EXPECT_SAYS(std::string(e.what()), "\n    cannot do {\"n\": 7}\n");
  }
  EXPECT_EQ(starts(), 3) << "asked again once";
  // Nothing is asked any more.
  EXPECT_THROW(command.grade(R"({"n": 1})"), Error);
  EXPECT_EQ(starts(), 3);
  expect_gone(read_text(at("started")));
}

TEST_F(RewardCommands, EndsOfAllKinds) {
  EXPECT_SAYS(failure(script("exit 3")), "exited with code 3");
  EXPECT_SAYS(failure(script("exit 0")), "exited with code 0");
  EXPECT_SAYS(failure(script("exit 0")), "nothing to its standard error");
  EXPECT_SAYS(failure(script("read -r line; printf '{\"score\": 1}'")), "exited with code 0");  // without a line end
  EXPECT_SAYS(failure(script("exec >&-; sleep 1000")), "closed its standard output");
  EXPECT_SAYS(failure(script("kill -KILL $$")), "signal 9");
  // More than a pipe holds, to somebody who reads nothing.
  EXPECT_SAYS(failure(script("exec <&-; echo unread >&2; exit 4"), 60, std::string(1 << 20, ' ') + "{}"), "code 4");
  // One that answers a line and ends is started for every line.
  const std::string once = script("read -r line; echo '{\"score\": 3}'");
  RewardCommand command(once, 60);
  for (int i = 0; i < 3; i++) EXPECT_EQ(command.grade("{}").score, 3);
}

TEST_F(RewardCommands, OneThatHangsIsLateTwice) {
  const std::string reward = script(std::string(kNoteStart) +
                                    "trap '' TERM INT HUP\n"  // and is not impressed
                                    "sleep 1000 & echo $! >> \"$dir/children\"\n"
                                    "echo waiting >&2\nread -r line\nwhile :; do sleep 1000; done");
  const std::string text = failure(reward, 0.3);
  EXPECT_SAYS(text, "no answer within 0.3 s (data.reward_timeout");
  EXPECT_SAYS(text, "\n    waiting\n");
  EXPECT_EQ(starts(), 2);
  expect_gone(read_text(at("started")));
  expect_gone(read_text(at("children")));
}

TEST_F(RewardCommands, SlowAnswersArriveInPieces) {
  EXPECT_EQ(grade(script("read -r line; for part in '{\"sc' 'ore\": ' '4}' '\n'; do printf %s \"$part\"; sleep .05; "
                         "done; read -r line"))
                .score,
            4);
}

TEST_F(RewardCommands, NothingWaitsForAFullPipe) {
  // Megabytes to standard error before a line is read, after it is answered, and while more than a pipe holds is sent.
  const std::string noise = "head -c 3000000 /dev/zero | tr '\\0' e >&2\n";
  RewardCommand command(script(noise + "while read -r line; do echo \"{\\\"score\\\": ${#line}}\"; " + noise + "done"),
                        60);
  for (const size_t size : {2, 1 << 20, 2}) {
    std::string line(size, ' ');
    line.front() = '{';
    line.back() = '}';
    // `read` takes white space off the ends only.
    EXPECT_EQ(command.grade(line).score, static_cast<double>(size));
  }
  // The end of it is shown, not all of it.
  const std::string text = failure(script(noise + "echo >&2; echo last >&2; exit 1"));
  EXPECT_SAYS(text, "    last\n");
  EXPECT_LT(text.size(), 5000u);
}

// ---- what is started

TEST_F(RewardCommands, TheProgramIsLookedForBeforeItIsNeeded) {
  const auto refused = [&](const std::string& reward) {
    const std::string text = failure(reward, 60, "{}", Exit::usage);
    EXPECT_SAYS(text, cat("reward \"", reward, "\": "));
    return text;
  };
  write("plain.sh", "#!/bin/sh\n");
  EXPECT_SAYS(refused("command:" + at("plain.sh")), "chmod +x " + at("plain.sh"));
  EXPECT_SAYS(refused("command:" + at("none.sh")), "no such file");
  EXPECT_SAYS(refused("command:" + root_.string()), "not a program");
  EXPECT_SAYS(refused("command:pare-has-no-such-program"), "PATH");
  EXPECT_SAYS(refused("command:Makefile"), "./Makefile");
  EXPECT_SAYS(refused("command:"), "no program is named");
  EXPECT_SAYS(refused("command:  "), "no program is named");
  EXPECT_SAYS(refused("command:sh -c 'exit"), "not closed");
  EXPECT_SAYS(refused("command:cat | cat"), "script");
  EXPECT_SAYS(refused("command:sh $PARE_HAS_NO_SUCH_VARIABLE"), "not set");
  EXPECT_SAYS(refused("command:echo $(touch " + at("touched") + ")"), "script");
  EXPECT_FALSE(fs::exists(at("touched")));
  // What only the system finds out.
  write("bare.sh", "echo '{\"score\": 1}'\n");
  write("lost.sh", "#!/no/such/interpreter\n");
  for (const char* name : {"bare.sh", "lost.sh"}) EXPECT_EQ(chmod(at(name).c_str(), 0755), 0);
  EXPECT_SAYS(failure("command:" + at("bare.sh")), "#!/usr/bin/env python3");
  EXPECT_SAYS(failure("command:" + at("lost.sh")), "interpreter");
}

TEST_F(RewardCommands, WordsAreThoseOfAShell) {
  script("for a; do echo \"<$a>\" >&2; done; pwd >&2; exit 1", "my grade.sh");
  ASSERT_EQ(setenv("PARE_TEST_WORD", "x  y", 1), 0);
  const std::string text = failure(cat("command:'", at("my grade.sh"), "' --strict 'a  b' \"$PARE_TEST_WORD\" c\\ d"));
  EXPECT_SAYS(text, "    <--strict>\n    <a  b>\n    <x  y>\n    <c d>\n    " + fs::current_path().string() + "\n");
}

// Of this process it has standard streams, no file, no blocked and no ignored signal.
TEST_F(RewardCommands, InheritsNothingItShouldNot) {
  const int held = open(write("held", "").c_str(), O_RDWR);
  sigset_t blocked, before;
  sigfillset(&blocked);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  const auto handler = std::signal(SIGPIPE, SIG_IGN);
  const std::string text = failure(
      script("for f in /proc/$$/fd/*; do readlink $f >&2; done; "
             // No program: a shell blocks signals while it starts one.
             "while read -r line; do case $line in Sig*) echo \"$line\" >&2; esac; done < /proc/$$/status; exit 1"));
  std::signal(SIGPIPE, handler);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  close(held);
  EXPECT_EQ(text.find(at("held")), std::string::npos) << text;
  EXPECT_SAYS(text, R"(SigBlk:\t0000000000000000)");
  EXPECT_EQ(text.find("1000\n    ", text.find("SigIgn")), std::string::npos) << text;
}

TEST_F(RewardCommands, AtTheEndItMayCleanUp) {
  {
    RewardCommand command(script(std::string(kNoteStart) + kEcho + "\ntouch \"$dir/cleaned\""), 60);
    command.grade(R"({"n": 1})");
  }
  EXPECT_TRUE(fs::exists(at("cleaned")));
  // One that stays is not waited for, nor are those that it leaves behind.
  {
    RewardCommand command(
        script(std::string(kNoteStart) +
               "sleep 1000 & echo $! >> \"$dir/started\"; trap '' TERM\nread -r line; echo '{\"score\": 1}'; "
               "while :; do sleep 1000; done"),
        60);
    command.grade("{}");
  }
  expect_gone(read_text(at("started")));
}

// ---- what it is told

TEST_F(RewardCommands, GetsWhatIsKnownOfTheProblem) {
  const std::string rows = write(
      "rows.jsonl",
      "\xEF\xBB\xBF{\"prompt\": \"2 \\\"+\\\" 2\", \"answer\": \"4\",\r \"tests\": [1.50, {\"a\": null}], \"id\": "
      "123456789012345678901234567890} \r\n"
      "{\"ids\": [1, 2], \"solution\": {\"x\": [1]}}\n{\"question\": \"free\"}\n");
  const auto command = std::make_shared<RewardCommand>(
      script("while read -r line; do printf '%s\\n' \"$line\" >> \"$dir/told\"; echo '{\"score\": 1}'; done"), 60);
  const JsonlTask task({rows}, "command:x", {}, command);
  ASSERT_EQ(task.size(), 3);
  EXPECT_EQ(task.problem(0).answer, "4");
  EXPECT_EQ(task.problem(1).answer, R"({"x":[1]})");
  EXPECT_FALSE(task.problem(2).answer);
  const Reward reward = task.reward(task.problem(0), {"a\nb\xC3", true, 7});
  EXPECT_EQ(reward.score, 1);
  EXPECT_EQ(reward.components.at(0).first, "command");
  task.reward(task.problem(1), {"", false, 0});
  task.reward(task.problem(2), {"\r\xE2\x80\xA8", false, 1});
  const std::string told = read_text(at("told"));
  EXPECT_EQ(told,
            "{\"prompt\": \"2 \\\"+\\\" 2\", \"messages\": [{\"role\":\"user\",\"content\":\"2 \\\"+\\\" "
            "2\"}], \"gold\": \"4\", \"row\": {\"prompt\": \"2 \\\"+\\\" 2\", \"answer\": "
            "\"4\",  \"tests\": [1.50, {\"a\": null}], \"id\": 123456789012345678901234567890}, \"response\": "
            "\"a\\nb\xEF\xBF\xBD\", \"finished\": true, \"tokens\": 7}\n"
            "{\"prompt_ids\": [1,2], \"gold\": {\"x\":[1]}, \"row\": {\"ids\": [1, 2], \"solution\": {\"x\": [1]}}, "
            "\"response\": \"\", \"finished\": false, \"tokens\": 0}\n"
            "{\"prompt\": \"free\", \"messages\": [{\"role\":\"user\",\"content\":\"free\"}], \"gold\": null, \"row\": "
            "{\"question\": \"free\"}, \"response\": "
            "\"\\r\xE2\x80\xA8\", \"finished\": false, \"tokens\": 1}\n");
  EXPECT_THROW(JsonlTask({rows}, "command:x", RowKeys{"", "expected", ""}, command), Error)
      << "a key that the rows have not got";
}

// The example in data/README.md, and what it makes of responses.
TEST_F(RewardCommands, TheExampleOfThePage) {
  if (!has_python()) GTEST_SKIP() << "no python3";
  const std::string readme = read_text("data/README.md"), first = "    #!/usr/bin/env python3\n";
  std::stringstream lines(readme.substr(std::min(readme.find(first), readme.size())));
  std::string text;
  int count = 0;
  for (std::string line; std::getline(lines, line) && line.starts_with("    "); count++) text += line.substr(4) + "\n";
  ASSERT_GT(count, 5) << "no example in data/README.md";
  EXPECT_LE(count, 10);
  write("grade.py", text);
  ASSERT_EQ(chmod(at("grade.py").c_str(), 0755), 0);
  RewardCommand command("command:" + at("grade.py"), 60);
  const std::string line = R"({"prompt": "7 * 8?", "gold": "56", "row": {}, "tokens": 5, )";
  EXPECT_EQ(command.grade(line + R"("response": "So\n#### 56", "finished": true})").score, 1);
  EXPECT_EQ(command.grade(line + R"("response": "#### 57", "finished": true})").score, 0);
  EXPECT_EQ(command.grade(line + R"("response": "#### 56", "finished": false})").score, 0);
  const Verdict none = command.grade(line + R"("response": "56 \u00e9", "finished": true})");
  EXPECT_EQ(none.score, 0);
  EXPECT_FALSE(none.found);
  EXPECT_EQ(command.grade(line + R"("response": "#### 56", "finished": true})").extracted, "56");
}

// ---- the commands

class RewardCommandRuns : public RewardCommands {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }
  static void TearDownTestSuite() { fs::remove_all(tiny_folder()); }

  Outcome pare(const std::string& kind, const Overrides& more) {
    std::vector<std::string> arguments = {program_path().string(), kind};
    for (const std::string& a : tiny_run() + more) arguments.push_back(a);
    return run(arguments);
  }
  // `pare verify` as a grader: a program that keeps the protocol and is there wherever the tests are.
  static std::string itself(const std::string& mode) {
    return cat("data.reward=command:", program_path().string(), " verify --mode ", mode);
  }
  static std::vector<std::string> certificates(const std::string& path) {
    std::vector<std::string> list;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
      const Json step = Json::parse(line);
      list.push_back(cat(step.value("certificate", ""), " ", step.value("critic/score/mean", -1.0), " ",
                         step.value("val-core/jsonl/reward/mean@1", -1.0)));
    }
    return list;
  }
};

TEST_F(RewardCommandRuns, ARunHasTheBitsOfTheSameRewardBuiltIn) {
  const Overrides keys = {"trainer.threads=3", "trainer.test_freq=2", "data.reward_timeout=30"};
  EXPECT_EQ(pare("train", keys + Overrides{"--out", at("own")}).code, 0);
  const Outcome o = pare("train", keys + Overrides{itself("starts_with"), "--out", at("command")});
  ASSERT_EQ(o.code, 0) << o.err;
  const std::vector<std::string> own = certificates(at("own/metrics.jsonl"));
  EXPECT_EQ(own.size(), 4u);
  EXPECT_EQ(certificates(at("command/metrics.jsonl")), own);
  EXPECT_TRUE(read_text(at("own/model/model.safetensors")) == read_text(at("command/model/model.safetensors")));
  // And resumed, with another limit.
  EXPECT_EQ(
      pare("train", keys + Overrides{itself("starts_with"), "--out", at("parts"), "trainer.total_training_steps=2"})
          .code,
      0);
  const Outcome resumed = pare(
      "train", keys + Overrides{itself("starts_with"), "--out", at("parts"), "data.reward_timeout=31", "--resume"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(certificates(at("parts/metrics.jsonl")), own);
  const Outcome other = pare("train", keys + Overrides{itself("contains"), "--out", at("parts"), "--resume"});
  EXPECT_EQ(other.code, 2);
  EXPECT_SAYS(other.err, "data.reward");
}

// A traceback on standard error, and the number in the metrics of the step; the run goes on.
TEST_F(RewardCommandRuns, ACrashIsAWarningWithItsTracebackAndAMetric) {
  const std::string reward = script(
      "while read -r line; do\n"
      "  [ -e \"$dir/crashed\" ] || { touch \"$dir/crashed\"; printf 'Traceback:\\n  KeyError: 7\\n' >&2; exit 1; }\n"
      "  echo '{\"score\": 1}'\ndone");
  const Outcome o = pare("train", {"data.reward=" + reward, "--quiet", "--out", at("run")});
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_SAYS(one_line(o.err), "exited with code 1 and was started again; its standard error ends with");
  EXPECT_SAYS(o.err, "\n    Traceback:\n      KeyError: 7\n");
  std::vector<double> restarts;
  std::ifstream in(at("run/metrics.jsonl"));
  for (std::string line; std::getline(in, line);)
    if (const Json step = Json::parse(line); step["training/global_step"] > 0)
      restarts.push_back(step["reward/restarts"]);
  EXPECT_EQ(restarts, (std::vector<double>{1, 0, 0, 0}));
}

TEST_F(RewardCommandRuns, ScoresBelowZeroAreShownAsTheyAre) {
  const std::string reward = script("while read -r line; do echo '{\"score\": -0.25}'; done");
  const Outcome o = pare(
      "train", {"data.reward=" + reward, "trainer.test_freq=1", "trainer.total_training_steps=1", "--out", at("run")});
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_SAYS(o.out, "\n    1 -0.250 -0.250 ");
}

TEST_F(RewardCommandRuns, EvalAndVerifyTakeTheSameCommand) {
  const auto eval = [&](const std::string& verifier, const std::string& out) {
    std::vector<std::string> arguments = {program_path().string(),
                                          "eval",
                                          "--model",
                                          tiny_folder() + "trained",
                                          "--tokenizer",
                                          "ssa",
                                          "--data",
                                          tiny_folder() + "val.jsonl",
                                          "--max-prompt-length",
                                          "16",
                                          "--n",
                                          "3",
                                          "--max-response-length",
                                          "12",
                                          "--threads",
                                          "2",
                                          "--verifier",
                                          verifier,
                                          "--out",
                                          at(out)};
    return run(arguments);
  };
  const Outcome own = eval("starts_with", "own.jsonl"),
                command = eval(itself("starts_with").substr(std::string("data.reward=").size()), "command.jsonl");
  ASSERT_EQ(own.code, 0) << own.err;
  ASSERT_EQ(command.code, 0) << command.err;
  std::string expected = read_text(at("own.jsonl"));
  for (size_t i; (i = expected.find("{\"starts_with\":")) != std::string::npos;)
    expected.replace(i, 15, "{\"command\":");
  EXPECT_EQ(read_text(at("command.jsonl")), expected);

  input_ = write("graded.jsonl",
                 "{\"response\": \"x\", \"more\": {\"b\": 1}}\n\n"
                 "{\"gold\": [], \"response\": \"y\", \"finished\": false}\n");
  const std::string grader = script(
      "while read -r line; do printf '%s\\n' \"$line\" >> \"$dir/told\"; echo '{\"score\": .5, \"extracted\": \"e\"}'"
      "| sed s/:\\ ./:\\ 0./; done");
  std::vector<std::string> arguments = {program_path().string(), "verify", "--mode", grader};
  const Outcome verified = run(arguments);
  EXPECT_EQ(verified.code, 0) << verified.err;
  EXPECT_EQ(
      verified.out,
      "{\"score\":0.5,\"extracted\":\"e\",\"parsed\":\"e\"}\n{\"score\":0.5,\"extracted\":\"e\",\"parsed\":\"e\"}\n");
  std::vector<std::string> told;
  std::ifstream in(at("told"));
  for (std::string line; std::getline(in, line);) told.push_back(line);
  std::sort(told.begin(), told.end());
  EXPECT_EQ(told, (std::vector<std::string>{R"({"finished":false,"gold":[],"response":"y"})",
                                            R"({"finished":true,"more":{"b":1},"response":"x"})"}));
  arguments = {program_path().string(), "verify", "--timeout", "0.2", "--mode", "command:sleep 1000"};
  const Outcome late = run(arguments);
  EXPECT_EQ(late.code, 1);
  EXPECT_SAYS(late.err, "0.2 s");
}

TEST_F(RewardCommandRuns, DryRunAndPlanStartNothing) {
  const std::string grader = "data.reward=" + script(std::string(kNoteStart) + kEcho);
  for (const Overrides& how :
       {Overrides{"train", "--dry-run", "--out", at("run")}, {"sft", "--dry-run", "--out", at("run")}, {"plan"}}) {
    const Overrides rest(how.begin() + 1, how.end());
    EXPECT_EQ(pare(how[0], rest + Overrides{grader}).code, 0) << how[0];
    const Outcome o = pare(how[0], rest + Overrides{"data.reward=command:" + at("none.sh")});
    EXPECT_EQ(o.code, 2) << how[0];
    EXPECT_SAYS(o.err, "none.sh: no such file");
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
  }
  EXPECT_EQ(starts(), 0);
  EXPECT_FALSE(fs::exists(at("run")));
}

TEST_F(RewardCommandRuns, AFailureEndsTheRunAndSaysHowToGoOn) {
  const std::string grader = "data.reward=" + script("echo 'no such module' >&2; exit 1");
  const Outcome o = pare("train", {grader, "--out", at("run"), "trainer.threads=2"});
  EXPECT_EQ(o.code, 1);
  EXPECT_SAYS(o.err, "exited with code 1");
  EXPECT_SAYS(o.err, "\n    no such module\n");
  EXPECT_SAYS(o.err, "\"prompt\": ");
  EXPECT_SAYS(o.err, "--resume");
}

// Ctrl-C twice, and SIGKILL: nobody is there to end the graders.
TEST_F(RewardCommandRuns, NoGraderOutlivesTheRun) {
  const std::string grader = "data.reward=" + script(
                                                  "setsid sleep 1000 & echo $! >> \"$dir/started\"\n"
                                                  "(setsid sh -c 'sleep 1000 & echo $! >> \"$0/started\"' \"$dir\" &)\n"
                                                  "set -m\nsleep 1000 & echo $! $$ >> \"$dir/started\"\n"
                                                  "set +m\ntrap '' INT TERM\n"
                                                  "while :; do sleep 1000; done");
  for (const bool interrupt : {true, false}) {
    fs::remove(at("started"));
    std::atomic<bool> over = false;
    std::thread sender([&] {
      while (starts() == 0 || child_ == 0) std::this_thread::sleep_for(1ms);
      // Two signals that come together are one.
      for (; !over; std::this_thread::sleep_for(50ms)) send(interrupt ? SIGINT : SIGKILL);
    });
    const Outcome o = pare("train", {grader, "--out", at("run"), "--force"});
    over = true;
    sender.join();
    EXPECT_EQ(o.code, interrupt ? 75 : 128 + SIGKILL) << o.err;
    expect_gone(read_text(at("started")));
  }
}

}  // namespace
}  // namespace pare::test
