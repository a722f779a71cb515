// pare eval, and what commands show on a terminal and in a file, as users get it.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "base/text.h"
#include "run/pass_at_k.h"
#include "tests/program.h"
#include "tests/tiny_run.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class TrainedModel : public Program {
 protected:
  static void SetUpTestSuite() { make_tiny_run(); }

  std::string eval(const std::string& words, int threads = 1, int longest = 12) const {
    return cat("eval --model ", tiny_folder(), "trained --tokenizer ssa --data ", tiny_folder(), "val.jsonl ",
               "--max-prompt-length 16 --max-response-length ", longest, " --threads ", threads, " ", words);
  }
  std::string train(const std::string& words) const {
    std::string all = "train";
    for (const std::string& o : tiny_run()) all += " " + o;
    return cat(all, " trainer.default_local_dir=", at("run"), " ", words);
  }
  std::vector<json> items(const std::string& name) const {
    std::vector<json> all;
    std::ifstream file(at(name));
    for (std::string line; std::getline(file, line);) all.push_back(json::parse(line));
    return all;
  }
  // The number after a name at the beginning of a line.
  static double value(const std::string& out, const std::string& name) {
    const size_t at = ("\n" + out).find("\n" + name + " ");
    EXPECT_NE(at, std::string::npos) << name << " is not in\n" << out;
    return at == std::string::npos ? NAN : std::strtod(out.c_str() + at + name.size(), nullptr);
  }
};
using Eval = TrainedModel;
using Terminal = TrainedModel;

TEST_F(Eval, GreedyIsTheSameForAnyThreadsAndSeed) {
  const std::string common = "--verifier starts_with --greedy --out ";
  const Outcome a = run(eval(common + at("a.jsonl"))), b = run(eval(common + at("b.jsonl") + " --seed 5", 2));
  ASSERT_EQ(a.code, 0) << a.err;
  ASSERT_EQ(b.code, 0) << b.err;
  EXPECT_EQ(read_text(at("a.jsonl")), read_text(at("b.jsonl")));
  EXPECT_EQ(value(a.out, "mean@1"), value(b.out, "mean@1"));
  EXPECT_FALSE(fs::exists(at("a.jsonl.part")));
}

TEST_F(Eval, TheNumbersAreThoseOfTheItems) {
  const Outcome o = run(eval("--verifier starts_with --n 8 --k 1,4,8 --seed 3 --out " + at("a.jsonl")));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.err, "");
  const Outcome two = run(eval("--verifier starts_with --n 8 --k 1,4,8 --seed 3 --out " + at("b.jsonl"), 2));
  EXPECT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(read_text(at("a.jsonl")), read_text(at("b.jsonl")));
  const std::vector<json> problems = items("a.jsonl");
  std::ifstream data(tiny_folder() + "val.jsonl");
  std::vector<double> mean, pass4, pass8, majority;
  size_t row = 0, cut = 0;
  for (std::string line; std::getline(data, line); row++) {
    ASSERT_LT(row, problems.size());
    const json& p = problems[row];
    EXPECT_EQ(p["prompt"], json::parse(line)["prompt"]);
    EXPECT_EQ(p["answer"], "a");
    ASSERT_EQ(p["responses"].size(), 8u);
    int64_t right = 0;
    for (const json& r : p["responses"]) {
      const bool starts = r["text"] == "a" || r["text"].get<std::string>().starts_with("a;");
      EXPECT_EQ(r["score"], starts ? 1 : 0) << r;
      EXPECT_EQ(r["extracted"], r["text"]);
      EXPECT_LE(r["tokens"].size(), 12u);
      right += starts;
      cut += !r["finished"].get<bool>();
    }
    EXPECT_EQ(p["mean"], static_cast<double>(right) / 8);
    mean.push_back(p["mean"]);
    pass4.push_back(pass_at_k(8, right, 4));
    pass8.push_back(pass_at_k(8, right, 8));
    majority.push_back(p["responses"][p["majority"]["response"].get<size_t>()]["score"]);
  }
  EXPECT_EQ(row, problems.size());
  EXPECT_NEAR(value(o.out, "mean@8"), estimate(mean).mean, 5e-5);
  EXPECT_NEAR(value(o.out, "pass@1"), estimate(mean).mean, 5e-5);
  EXPECT_NEAR(value(o.out, "pass@4"), estimate(pass4).mean, 5e-5);
  EXPECT_NEAR(value(o.out, "pass@8"), estimate(pass8).mean, 5e-5);
  EXPECT_NEAR(value(o.out, "maj@8"), estimate(majority).mean, 5e-5);
  EXPECT_NE(o.out.find(format("± %.4f", estimate(mean).half_width())), std::string::npos) << o.out;
  EXPECT_EQ(value(o.out, "cut off"), static_cast<double>(cut));
  EXPECT_GT(estimate(mean).mean, 0);
  EXPECT_LT(estimate(mean).mean, 1);
}

// Rows to learn from: of every problem the responses that are right and finished, as they were written.
TEST_F(Eval, KeepsWhatIsRightToLearnFrom) {
  const std::string common = "--verifier starts_with --n 8 --seed 3 --out " + at("a.jsonl");
  const Outcome o = run(eval(cat(common, " --keep ", at("right.jsonl")), 1, 3));  // 3 tokens: some are cut
  ASSERT_EQ(o.code, 0) << o.err;
  std::vector<json> expected;
  int right = 0;
  for (const json& p : items("a.jsonl"))
    for (const json& r : p["responses"]) {
      right += r["score"] == 1;
      if (r["score"] == 1 && r["finished"])
        expected.push_back({{"prompt", p["prompt"]}, {"answer", "a"}, {"completion", r["text"]}});
    }
  EXPECT_GT(expected.size(), 0u);
  EXPECT_LT(expected.size(), static_cast<size_t>(right)) << "none was cut";
  EXPECT_EQ(items("right.jsonl"), expected);
  EXPECT_NE(o.out.find(cat(expected.size(), " right responses in ", at("right.jsonl"))), std::string::npos) << o.out;
  EXPECT_EQ(run(eval(cat(common, " --force --keep ", at("right.jsonl")))).code, 0);
  EXPECT_EQ(run(eval(cat("--verifier starts_with --keep ", at("right.jsonl")))).code, 2) << "it exists";
}

// The whole chain of SFT-M, from a teacher to a student that has never seen the task, and on from there by itself.
TEST_F(Eval, SftMLearnsFromItsTeacher) {
  const auto chain = [&](const std::string& teacher, const std::string& student, const std::string& out) {
    std::vector<std::string> words = {"/usr/bin/env",
                                      "PARE=" + program_path().string(),
                                      "sh",
                                      "tools/sft_m.sh",
                                      teacher,
                                      student,
                                      tiny_folder() + "train.jsonl",
                                      "starts_with",
                                      at(out),
                                      "data.tokenizer=ssa",
                                      "data.max_prompt_length=16",
                                      "data.max_response_length=12",
                                      "rollout.val_kwargs.n=20",
                                      "actor.optim.lr=2e-2",
                                      "trainer.threads=1"};
    return run(words);
  };
  const Outcome first = chain(tiny_folder() + "trained", tiny_folder() + "random", "first");
  ASSERT_EQ(first.code, 0) << first.err << first.out;
  const auto rows = std::ssize(items("first/right.jsonl"));
  EXPECT_GT(rows, 100);
  const auto steps = items("first/run/metrics.jsonl");
  ASSERT_EQ(std::ssize(steps), (3 * rows + 31) / 32);
  EXPECT_EQ(steps.back().at("actor/lr"), 0);
  EXPECT_LT(steps.back().at("train/loss").get<double>(), 0.7 * steps.front().at("train/loss").get<double>());

  const auto score = [&](const std::string& model) {
    const Outcome o =
        run(cat("eval --model ", model, " --tokenizer ssa --data ", tiny_folder(),
                "val.jsonl --max-prompt-length 16 --max-response-length 12 --verifier starts_with --n 20"));
    return value(o.out, "mean@20");
  };
  EXPECT_GT(score(at("first/run/model")), score(tiny_folder() + "trained") + 0.2) << "right ones alone were learnt";
  EXPECT_EQ(chain(at("first/run/model"), at("first/run/model"), "second").code, 0);
  EXPECT_GT(items("second/right.jsonl").size(), items("first/right.jsonl").size());
}

// What training logs before its first step is what pare eval says of the same model.
TEST_F(Eval, AgreesWithTheValidationOfTraining) {
  const std::string keys = "rollout.val_kwargs.n=4 rollout.val_kwargs.temperature=1 trainer.seed=2 ";
  ASSERT_EQ(run(train(keys + "trainer.val_before_train=true trainer.total_training_steps=1")).code, 0);
  std::ifstream file(at("run/metrics.jsonl"));
  std::string line;
  std::getline(file, line);
  const json before = json::parse(line);
  const Outcome o = run(cat("eval ", at("run/config.toml"), " --k 4,2"));
  ASSERT_EQ(o.code, 0) << o.err;
  const auto logged = [&](const char* name) { return before.at(name).get<double>(); };
  EXPECT_NEAR(value(o.out, "mean@4"), logged("val-core/jsonl/reward/mean@4"), 5e-5);
  EXPECT_NEAR(value(o.out, "pass@4"), logged("val-core/jsonl/reward/best@4/mean"), 5e-5);
  EXPECT_NEAR(value(o.out, "pass@2"), logged("val-aux/jsonl/reward/best@2/mean"), 5e-5);
  EXPECT_NEAR(value(o.out, "maj@4"), logged("val-core/jsonl/reward/maj@4/mean"), 5e-5);
}

TEST_F(Eval, WrongInput) {
  const auto refused = [&](const std::string& words, const std::vector<std::string>& parts) {
    const Outcome o = run(words);
    EXPECT_EQ(o.code, 2) << words << "\n" << o.err;
    EXPECT_EQ(o.out, "");
    EXPECT_EQ(std::count(o.err.begin(), o.err.end(), '\n'), 1) << o.err;
    for (const std::string& part : parts)
      EXPECT_NE(o.err.find(part), std::string::npos) << words << "\n" << part << " is not in: " << o.err;
  };
  const std::string good = "--verifier exact ";
  refused("eval", {"model.path", "model.config"});
  refused(cat("eval --model ", tiny_folder(), "trained --data ", at("none.jsonl"), " --tokenizer ssa --verifier exact"),
          {at("none.jsonl")});
  refused(eval(good + "--model " + at("none")), {"--model"});  // given twice
  refused(cat("eval --verifier exact --tokenizer ssa --data ", tiny_folder(), "val.jsonl --model ", at("none")),
          {at("none")});
  refused(eval(""), {"--verifier", "starts_with"});
  refused(eval("--verifier start_with"), {"start_with", "the nearest is starts_with"});
  refused(eval(good + "--n 4 --k 1,8"), {"--k 8", "4 responses"});
  refused(eval(good + "--n 4 --k 0"), {"--k 0"});
  refused(eval(good + "--k 2,x"), {"--k"});
  refused(eval(good + "--n 0"), {"rollout.val_kwargs.n", "0"});
  refused(eval(good + "--n many"), {"rollout.val_kwargs.n", "many"});
  refused(eval(good + "--top-p 2"), {"rollout.val_kwargs.top_p", "2"});
  refused(eval(good + "--n 4 --greedy"), {"greedy", "4 times", "--temperature"});
  refused(eval(good, 1, 400), {"160 positions"});
  refused(eval(good + "data.max_prompt_lenght=4"), {"nearest is data.max_prompt_length"});
  refused(cat("eval quickstart --verifier exact --model ", tiny_folder(), "trained"), {"--verifier", "ssa"});
  refused(cat("eval data.task=jsonl data.train_files=x --model ", tiny_folder(), "trained"), {"data.train_files"});
  write("items.jsonl", "precious");
  refused(eval(good + "--out " + at("items.jsonl")), {"items.jsonl", "--force"});
  EXPECT_EQ(read_text(at("items.jsonl")), "precious");
  EXPECT_EQ(run(eval(good + "--quiet --force --out " + at("items.jsonl"))).code, 0);
  EXPECT_NE(read_text(at("items.jsonl")), "precious");
  EXPECT_EQ(run(eval(good + "--out " + at("none/items.jsonl"))).code, 1);
}

// The grader sends Ctrl-C in the middle: problems that have all their responses are results, in the files too.
TEST_F(Eval, CtrlCKeepsWhatIsFinished) {
  write("grade.sh",
        cat("#!/bin/sh\nwhile read -r line; do echo x >> ", at("graded"), "\n", "[ $(wc -l < ", at("graded"),
            ") = 9 ] && kill -INT $PPID\n", "echo '{\"score\": 1, \"extracted\": \"a\"}'; done\n"));
  fs::permissions(at("grade.sh"), fs::perms::owner_all);
  const std::string words = eval(cat("--verifier command:", at("grade.sh"), " --n 4 rollout.max_num_seqs=4 --out ",
                                     at("items.jsonl"), " --keep ", at("right.jsonl")));
  const Outcome o = run(words);
  EXPECT_EQ(o.code, 75) << o.err;
  EXPECT_NE(o.err.find("pare: interrupted: "), std::string::npos) << o.err;
  const std::vector<json> kept = items("items.jsonl");
  ASSERT_FALSE(kept.empty());
  size_t rows = 0;
  std::ifstream data(tiny_folder() + "val.jsonl");
  for (std::string line; std::getline(data, line);) rows++;
  EXPECT_LT(kept.size(), rows);
  for (const json& p : kept) EXPECT_EQ(p["responses"].size(), 4u);
  EXPECT_FALSE(items("right.jsonl").empty());
  EXPECT_EQ(value(o.out, "mean@4"), 1);
  EXPECT_NE(one_line(o.out).find(cat("over ", kept.size(), " problems")), std::string::npos) << o.out;
  EXPECT_NE(o.err.find(cat(kept.size(), " of ", rows, " problems")), std::string::npos) << o.err;
}

// ---- the terminal

const char* const kShown =
    "trainer.val_before_train=true trainer.test_freq=2 trainer.samples_freq=2 "
    "actor.ppo_max_token_len=24 data.train_batch_size=6";

TEST_F(Terminal, BarsOnATerminalOnly) {
  if (!has_terminals()) GTEST_SKIP() << "no pseudo-terminals here";
  const Outcome file = run(train(kShown));
  ASSERT_EQ(file.code, 0) << file.err;
  EXPECT_EQ(file.out.find_first_of("\r\x1b\b"), std::string::npos) << file.out;
  EXPECT_EQ(file.out.find('['), std::string::npos) << file.out;
  for (const int columns : {80, 37, 12}) {
    const Outcome o = run_on_terminal(train(cat(kShown, " --force")), columns);
    ASSERT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(o.out.find('\x1b'), std::string::npos);
    // What is overwritten never fills the last column, where a terminal might wrap.
    size_t bars = 0;
    for (size_t begin = 0; begin < o.out.size();) {
      const size_t end = std::min(o.out.find_first_of("\r\n", begin), o.out.size());
      const std::string text = o.out.substr(begin, end - begin);
      if (end < o.out.size() && o.out[end] == '\r' && o.out[end + 1] != '\n') {
        EXPECT_LT(display_width(text), static_cast<size_t>(columns)) << text;
        bars++;
      }
      begin = end + 1;
    }
    EXPECT_GT(bars, 8u);
    if (columns < 80) continue;
    // Every stage of a step, from its beginning to its end.
    for (const char* stage : {"step 1/4  evaluation [", "step 1/4  rollout [", "step 3/4  update [####", "] 24/24"})
      EXPECT_NE(o.out.find(stage), std::string::npos) << stage << "\n" << o.out;
    // Under the transient lines are the lines of the file, but for times.
    std::vector<std::string> titles = {" step  eval reward", "   best ", "machine  ", "memory   ", "done     "};
    for (const std::string& t : titles) {
      EXPECT_NE(("\n" + file.out).find("\n" + t), std::string::npos) << t << "\n" << file.out;
      EXPECT_NE(o.out.find(t), std::string::npos) << t;
    }
  }
}

TEST_F(Terminal, QuietIsQuiet) {
  if (!has_terminals()) GTEST_SKIP() << "no pseudo-terminals here";
  for (const bool terminal : {false, true}) {
    const std::string words = train(cat(kShown, " --quiet --force"));
    const Outcome o = terminal ? run_on_terminal(words, 80) : run(words);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 1) << o.out;
    EXPECT_TRUE(o.out.starts_with("done     ")) << o.out;
    EXPECT_EQ(o.err, "");
  }
  // But for warnings and errors.
  const Outcome warned = run(train("--quiet --force actor.token_subset=det"));
  EXPECT_TRUE(warned.err.starts_with("warning  actor.token_subset = det")) << warned.err;
  EXPECT_EQ(std::count(warned.err.begin(), warned.err.end(), '\n'), 1) << warned.err;
  EXPECT_EQ(std::count(warned.out.begin(), warned.out.end(), '\n'), 1) << warned.out;
  EXPECT_TRUE(run(train("--quiet --force actor.token_subset=dett")).err.starts_with("pare: "));
  // Of an evaluation the results stay.
  const Outcome eval_out = run(eval("--quiet --verifier exact --n 2"));
  EXPECT_TRUE(eval_out.out.starts_with("mean@2")) << eval_out.out;
  EXPECT_EQ(eval_out.out.find("machine"), std::string::npos);
}

TEST_F(Terminal, LinesOfARun) {
  const Outcome o = run(train(cat(kShown, " trainer.total_training_steps=23")));
  ASSERT_EQ(o.code, 0) << o.err;
  std::vector<std::string> lines;
  std::istringstream text(o.out);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  const auto count = [&](const std::string& start) {
    return std::count_if(lines.begin(), lines.end(), [&](const std::string& l) { return l.starts_with(start); });
  };
  // Every row is as wide as its titles: columns line up.
  size_t width = 0;
  int rows = 0;
  for (const std::string& l : lines) {
    if (l.starts_with(" step ")) width = l.size();
    if (width == 0 || l.size() < 6 || !std::isdigit(l[4]) || l[5] != ' ') continue;
    EXPECT_EQ(l.size(), width) << l;
    rows++;
  }
  EXPECT_LT(width, 80u);
  EXPECT_EQ(rows, 24);
  EXPECT_EQ(count("   best "), 11);
  EXPECT_EQ(count(" step "), 12) << "titles again after samples";
  EXPECT_EQ(count("note     one update per step"), 1);
  for (const char* label : {"machine  ", "model    ", "run      ", "done     "}) EXPECT_EQ(count(label), 1) << label;
  EXPECT_EQ(count("memory   "), 2);  // before and after
  // Titles come again after twenty rows.
  const Outcome plain = run(train("--force trainer.samples_freq=0 trainer.total_training_steps=21"));
  size_t titles = 0;
  for (size_t at = plain.out.find("\n step "); at != std::string::npos; at = plain.out.find("\n step ", at + 1))
    titles++;
  EXPECT_EQ(titles, 2u);
}

TEST_F(Terminal, HelpIsAPage) {
  for (const char* command : {"train", "sft"}) {
    const Outcome o = run(cat(command, " --help"));
    EXPECT_EQ(o.code, 0);
    EXPECT_LE(std::count(o.out.begin(), o.out.end(), '\n'), 60) << o.out;
    for (const KeySection& section : config_sections())
      EXPECT_NE(o.out.find(cat("\n  ", section.name, " ")), std::string::npos) << section.name;
  }
}

// Or the page says what comes first.
TEST_F(Terminal, TheFirstExampleOfHelpWorksInAnEmptyFolder) {
  int examples = 0;
  for (const char* command : {"train", "sft", "eval", "generate", "plan", "compare", "report", "logprobs", "tokenize",
                              "inspect", "convert", "merge", "verify", "bench"}) {
    const std::string help = run(cat(command, " --help")).out;
    const size_t begin = help.find("\n  pare ");
    if (begin == std::string::npos) continue;
    examples++;
    const std::string line = help.substr(begin + 8, help.find('\n', begin + 1) - begin - 8);
    const bool trains = line.starts_with("train ") || line.starts_with("sft ");
    fs::create_directories(at("empty"));
    const int code = std::system(cat("cd ", at("empty"), " && ", program_path().string(), " ", line,
                                     trains ? " --dry-run" : "", " > ", at("out"), " 2>&1 < /dev/null")
                                     .c_str());
    if (code == 0) continue;
    EXPECT_NE(help.substr(0, begin).find("first"), std::string::npos) << line << "\n" << read_text(at("out"));
  }
  EXPECT_GE(examples, 5);
  // A model that a preset would make is named with the command that makes it.
  const int code =
      std::system(cat("cd ", at("empty"), " && ", program_path().string(), " train quickstart 2> ", at("out")).c_str());
  EXPECT_EQ(WEXITSTATUS(code), 2);
  EXPECT_NE(read_text(at("out")).find("first make it: pare sft quickstart-sft"), std::string::npos);
}

// A row longer than 80 columns would break on a terminal.
TEST_F(Terminal, TablesAndTheLastLinesFitEightyColumns) {
  const Outcome o = run(train(cat(kShown, " algorithm.rpo.enable=true")));
  ASSERT_EQ(o.code, 0) << o.err;
  std::istringstream text(o.out);
  size_t rows = 0;
  for (std::string line; std::getline(text, line);) {
    const bool table = line.starts_with(" step ") || (line.size() > 5 && std::isdigit(line[4]) && line[5] == ' ');
    EXPECT_TRUE(!(table || line.starts_with("exact ")) || display_width(line) < 80) << line;
    EXPECT_TRUE(!line.starts_with("done ") || line.find("checked") == std::string::npos) << line;
    rows += table;
  }
  EXPECT_GT(rows, 4u);
  EXPECT_NE(o.out.find("saved"), std::string::npos);
}

// On a terminal an error is wrapped between words.
TEST_F(Terminal, ErrorsFitTheTerminal) {
  if (!has_terminals()) GTEST_SKIP() << "no pseudo-terminals here";
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_TRUE(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0);
  const winsize size{.ws_row = 24, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(ioctl(terminal, TIOCSWINSZ, &size), 0);
  const std::string name = ptsname(terminal);
  const int held = open(name.c_str(), O_RDWR | O_NOCTTY);
  const int code =
      std::system(cat(program_path().string(), " ", train("actor.token_subset=dett"), " 2> ", name).c_str());
  EXPECT_EQ(WEXITSTATUS(code), 2);
  std::string all(4096, '\0');
  all.resize(static_cast<size_t>(read(terminal, all.data(), all.size())));
  close(held);
  close(terminal);
  EXPECT_TRUE(all.starts_with("pare: command line: actor.token_subset")) << all;
  std::istringstream text(all);
  int lines = 0;
  for (std::string line; std::getline(text, line, '\n'); lines++)
    EXPECT_LE(display_width(line.substr(0, line.find('\r'))), 60u) << line;
  EXPECT_GT(lines, 1);
}

// A line of progress is overwritten in its place, and nothing of it stays under other output.
TEST_F(Terminal, ProgressErasesItself) {
  if (!has_terminals()) GTEST_SKIP() << "no pseudo-terminals here";
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_TRUE(terminal >= 0 && grantpt(terminal) == 0 && unlockpt(terminal) == 0);
  const int held = open(ptsname(terminal), O_RDWR | O_NOCTTY), errors = dup(STDERR_FILENO);
  dup2(held, STDERR_FILENO);
  {
    ProgressLine work("loading", 100);
    std::this_thread::sleep_for(std::chrono::milliseconds(1001));
    work.done(50, "a note");
    std::this_thread::sleep_for(std::chrono::milliseconds(101));
    work.done(60);
  }
  dup2(errors, STDERR_FILENO);
  close(errors);
  close(held);
  std::string all, some(4096, '\0');
  for (ssize_t n; (n = read(terminal, some.data(), some.size())) > 0;) all.append(some, 0, static_cast<size_t>(n));
  close(terminal);
  const std::string line(14, ' '), rest(8, ' ');  // as wide as "loading:  60 %" and ", a note"
  EXPECT_TRUE(all.starts_with("\rloading:  50 %, a note\rloading:  60 %" + rest + "\r" + line + "\rloading: stopped"))
      << all;
}

// The text of the row and not its template; its tokens in rollouts.jsonl are all visible.
TEST_F(Terminal, SamplesShowTheRow) {
  const Outcome o = run(train(kShown));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.out.find("           ^"), std::string::npos) << "BOS\n" << o.out;
  for (const json& sample : items("run/rollouts.jsonl"))
    for (const auto& piece : sample["pieces"]) EXPECT_NE(piece, "") << sample;
}

TEST_F(Terminal, KeysOfAGroup) {
  EXPECT_EQ(run("train --keys").out, config_reference());
  const std::string optim = run("sft --keys actor.optim").out;
  EXPECT_EQ(optim, config_reference("actor.optim"));
  EXPECT_NE(optim.find("- `actor.optim.lr = "), std::string::npos) << optim;
  EXPECT_EQ(optim.find("`actor.grad_clip"), std::string::npos) << optim;
  EXPECT_NE(run("train --keys actor").out.find(optim), std::string::npos);
  const Outcome unknown = run("train --keys rollout.vk");
  EXPECT_EQ(unknown.code, static_cast<int>(Exit::usage));
  EXPECT_EQ(unknown.err, "pare: there are no keys rollout.vk.*; the nearest group is rollout.kv\n");
}

// A key of the user's that has no effect is named; one of a preset is not.
TEST_F(Terminal, KeysWithoutEffectAreNamed) {
  const std::string key = "rollout.kv.streaming_llm.sinks=7 rollout.kv.method=snapkv rollout.kv.evict.budget=9";
  const std::string note = "note     rollout.kv.streaming_llm.sinks has no effect: rollout.kv.method is snapkv\n";
  const std::string format = "note     prompts are in the chat format plain\n";
  EXPECT_EQ(run(train(cat("--dry-run ", key))).err, note + format);
  EXPECT_EQ(run(cat("plan", train(key).substr(5))).err, note);
  EXPECT_EQ(run(eval(cat("--quiet --verifier exact ", key))).err, note);
  EXPECT_EQ(run(cat("generate --quiet --tokenizer ssa --prompt p0? --model ", tiny_folder(), "trained ", key)).err,
            note);
  EXPECT_EQ(
      run(train("--dry-run rollout.kv.method=snapkv kv-tova rollout.kv.evict.budget=9 rollout.kv.method=h2o")).err,
      format);
}

}  // namespace
}  // namespace pare::test
