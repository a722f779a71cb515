// The pages say nothing that is not there: commands, flags, keys, presets, make targets, files, tests; and what they
// say to type runs.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "run/config.h"
#include "tests/program.h"
#include "tests/tiny.h"
#include "tests/tiny_tokenizer.h"
#include "tests/weights.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;

// Blanks inside quotes do not part words.
std::vector<std::string> words(const std::string& line) {
  std::stringstream s(line);
  std::vector<std::string> all;
  for (std::string w; s >> w; all.push_back(w))
    if (std::string rest; w.starts_with('"') && (w.size() == 1 || !w.ends_with('"')) && std::getline(s, rest, '"'))
      w += rest + '"';
  return all;
}

// The pages of the repository; tests and tools keep records of what was measured at other times and places.
std::vector<std::string> pages() {
  const std::set<std::string> left_out = {"build", "runs", "tests", "tools", ".git"};
  std::vector<std::string> all;
  for (auto it = fs::recursive_directory_iterator("."); it != fs::recursive_directory_iterator(); ++it) {
    if (it.depth() == 0 && left_out.count(it->path().filename().string())) it.disable_recursion_pending();
    if (it->path().extension() == ".md") all.push_back(it->path().lexically_normal().string());
  }
  std::sort(all.begin(), all.end());
  return all;
}

class Readme : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    text_ = read_text("README.md");
    ASSERT_FALSE(text_.empty()) << "the tests run in the root of the repository";
    // Code of all pages: lines indented by four blanks, and what stands between backticks (which may run over a line
    // end).
    std::string prose;
    std::stringstream lines;
    for (const std::string& page : pages()) lines << read_text(page);
    for (std::string line; std::getline(lines, line);)
      if (line.starts_with("    "))
        code_.push_back(line.substr(4, line.find("   #") - 4));
      else
        prose += line + " ";
    const std::regex quoted("`([^`]+)`");
    for (auto it = std::sregex_iterator(prose.begin(), prose.end(), quoted); it != std::sregex_iterator(); ++it)
      code_.push_back((*it)[1]);
  }

  // The commands of one program: `pare` or `make`.
  std::vector<std::vector<std::string>> commands(const std::string& program) const {
    std::vector<std::vector<std::string>> all;
    for (const std::string& line : code_) {
      const std::vector<std::string> w = words(line);
      if (w.size() > 1 && (w[0] == program || w[0] == "build/" + program)) all.push_back({w.begin() + 1, w.end()});
    }
    return all;
  }

  // The tests named in the table of promises.
  std::set<std::string> promised_tests() const {
    const std::string promises =
        text_.substr(text_.find("## Promises"), text_.find("## Rooms") - text_.find("## Promises"));
    const std::regex test("`([A-Z][A-Za-z]+\\.[A-Z][A-Za-z]+)`");
    std::set<std::string> names;
    for (auto it = std::sregex_iterator(promises.begin(), promises.end(), test); it != std::sregex_iterator(); ++it)
      names.insert((*it)[1]);
    return names;
  }

  std::string text_;               // of README.md
  std::vector<std::string> code_;  // of all pages
};

TEST_F(Readme, CommandsFlagsPresetsAndKeysExist) {
  const std::string help = run("--help").out;
  std::set<std::string> keys;
  for (const ConfigKey& k : config_keys()) keys.insert(k.name);
  int flags = 0, presets = 0;
  for (const auto& c : commands("pare")) {
    if (c[0].starts_with("-")) continue;
    EXPECT_NE(help.find("\n  " + c[0] + " "), std::string::npos) << "pare " << c[0];
    const std::string usage = run(c[0] + " --help").out;
    const bool configured = c[0] == "train" || c[0] == "sft" || c[0] == "eval" || c[0] == "generate" || c[0] == "plan";
    for (size_t i = 1; i < c.size(); i++) {
      const std::string& w = c[i];
      if (w.starts_with("--")) {
        flags++;
        EXPECT_NE(usage.find(w), std::string::npos) << "pare " << c[0] << " " << w;
        if (i + 1 < c.size() && !c[i + 1].starts_with("-")) i++;  // its value
      } else if (const size_t equals = w.find('='); equals != std::string::npos && configured) {
        if (w.starts_with("[")) continue;
        EXPECT_TRUE(keys.count(w.substr(0, equals))) << w;
      } else if (configured && std::islower(w[0]) && w.find('/') == std::string::npos) {
        presets++;
        EXPECT_TRUE(std::filesystem::exists("data/presets/" + w + ".toml")) << w;
      }
    }
  }
  EXPECT_GT(flags, 10);
  EXPECT_GT(presets, 4);
}

// The front page is one: the rest is where its readers are.
TEST_F(Readme, IsAPage) { EXPECT_LE(std::count(text_.begin(), text_.end(), '\n'), 180); }

// What a page points to is there.
TEST(Pages, LinksLead) {
  const std::regex link("\\]\\(([^)#]+)\\)");
  size_t links = 0;
  for (const std::string& page : pages()) {
    const std::string text = read_text(page);
    for (auto it = std::sregex_iterator(text.begin(), text.end(), link); it != std::sregex_iterator(); ++it) {
      const fs::path path = fs::path(page).parent_path() / it->str(1);
      if (it->str(1).find(':') != std::string::npos) continue;  // elsewhere
      links++;
      EXPECT_TRUE(fs::exists(path)) << page << " points to " << path;
    }
  }
  EXPECT_GT(links, 15u);
}

TEST_F(Readme, MakeTargetsExist) {
  std::string makefile = "\n" + read_text("Makefile") + "\n";
  for (const char* part : {"cuda/cuda.mk", "src/comm/mpi/mpi.mk", "src/ref/ref.mk", "tests/tests.mk", "tools/runs.mk",
                           "tools/fuzz/fuzz.mk", "tools/mutants/mutants.mk"})
    makefile += read_text(part) + "\n";
  size_t targets = 0;
  for (const auto& c : commands("make"))
    for (const std::string& w : c) {
      if (w.find('=') != std::string::npos || w.find('/') != std::string::npos) continue;
      targets++;
      EXPECT_NE(makefile.find("\n" + w + ":"), std::string::npos) << "make " << w;
    }
  EXPECT_GT(targets, 6u);
}

TEST_F(Readme, FilesExist) {
  const std::regex path("^(src|model|tokenizer|data|tests|tools|cuda)/[A-Za-z0-9_./]*[a-z]$");
  size_t files = 0;
  for (const std::string& code : code_)
    if (std::regex_match(code, path) && code.find("FAMILY") == std::string::npos) {
      files++;
      EXPECT_TRUE(std::filesystem::exists(code)) << code;
    }
  EXPECT_GT(files, 20u);
}

// The tests that hold the promises; names of parametrised ones without their prefix.
TEST_F(Readme, TestsExist) {
  std::set<std::string> names;
  const auto* all = testing::UnitTest::GetInstance();
  for (int i = 0; i < all->total_test_suite_count(); i++)
    for (int j = 0; j < all->GetTestSuite(i)->total_test_count(); j++) {
      std::string suite = all->GetTestSuite(i)->name(), name = all->GetTestSuite(i)->GetTestInfo(j)->name();
      suite = suite.substr(suite.find('/') == std::string::npos ? 0 : suite.find('/') + 1);
      names.insert(suite + "." + name.substr(0, name.find('/')));
    }
  for (const std::string& name : promised_tests()) {
#ifndef PARE_EMU
    if (name.find("Emu") != std::string::npos) continue;
#endif
    EXPECT_TRUE(names.count(name)) << name;
  }
  EXPECT_GT(promised_tests().size(), 15u);
}

// A promise is held by what runs in a fresh clone, not by a test that asks for files from elsewhere and is skipped
// without them.  Every skip of such a test, or of its fixture, has one of these reasons.
TEST_F(Readme, PromisedTestsNeedNoFilesFromElsewhere) {
  const std::regex builds("kChecker|kAsan|is not built|no pseudo-terminals|this device has one kernel");
  const auto skips = [&](const std::string& code) {
    std::string found;
    for (size_t at = code.find("GTEST_SKIP"); at != std::string::npos; at = code.find("GTEST_SKIP", at + 1)) {
      const size_t line = code.rfind('\n', at) + 1;
      const std::string statement = code.substr(line, code.find(';', at) - line);
      if (!std::regex_search(statement, builds)) found += statement + "\n";
    }
    return found;
  };
  std::vector<std::string> sources;
  for (const auto& entry : std::filesystem::directory_iterator("tests"))
    if (entry.path().extension() == ".cpp" || entry.path().extension() == ".h")
      sources.push_back(read_text(entry.path()));
  // The part of a source that begins with `start` and ends with `end`; empty where there is none.
  const auto part = [](const std::string& source, const std::string& start, const std::string& end) {
    const size_t at = source.find(start);
    return at == std::string::npos ? "" : source.substr(at, source.find(end, at) - at);
  };
  const auto skips_of = [&](const std::string& name) {
    const std::string suite = name.substr(0, name.find('.')), test = name.substr(name.find('.') + 1);
    for (const std::string& source : sources)
      for (const char* kind : {"TEST(", "TEST_F(", "TEST_P("})
        if (const std::string body = part(source, cat(kind, suite, ", ", test, ")"), "\n}"); !body.empty()) {
          std::string fixture = suite;
          if (const std::string alias = part(source, "using " + suite + " = ", ";"); !alias.empty())
            fixture = alias.substr(alias.rfind(' ') + 1);
          return cat(skips(body), skips(part(source, "class " + fixture + " : ", "\n};")));
        }
    return std::string("its source was not found");
  };
#ifdef PARE_EMU
  for (const std::string& name : promised_tests()) EXPECT_EQ(skips_of(name), "") << name;
#endif
  EXPECT_NE(skips_of("Trained.GreedyTextIsExact"), "") << "what needs other files is recognised";
  EXPECT_NE(skips_of("Chat.RendersAsJinja"), "");
}

// ---- every command line runs ---------------------------------------------------------------------------------------

struct CommandLine {
  std::string where, text;  // "README.md:10"; what is to be typed
};

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + by.size()))
    text.replace(at, what.size(), by);
  return text;
}

// All command lines of pare in a page: in blocks of code (indented by four blanks, or between ```) all that start with
// the program; between backticks those that say more than the command's name, which is a mention.
std::vector<CommandLine> command_lines(const std::string& page, const std::string& text) {
  const std::regex program("^(build/([a-z]+/)?)?pare( .*|$)"), mention("^[^ ]+( [a-z]+)?$"), quoted("`([^`]+)`");
  std::vector<CommandLine> all;
  std::string prose, part;
  std::istringstream lines(text);
  bool fenced = false;
  size_t number = 0, begin = 0;
  for (std::string line; std::getline(lines, line); prose += '\n') {
    number++;
    const bool fence = line.starts_with("```"), indented = line.starts_with("    ");
    fenced = fenced != fence;
    if (fence) continue;
    if (!fenced && !indented) {
      prose += line;
      continue;
    }
    if (part.empty()) begin = number;
    part += line.substr(indented ? 4 : 0);
    if (part.ends_with('\\')) {
      part.pop_back();
      continue;
    }
    if (std::regex_match(part, program)) all.push_back({cat(page, ':', begin), part});
    part.clear();
  }
  for (auto it = std::sregex_iterator(prose.begin(), prose.end(), quoted); it != std::sregex_iterator(); ++it) {
    const std::string code = replaced(replaced((*it)[1], "\n", " "), "\\|", "|");
    const auto line = 1 + std::count(prose.begin(), prose.begin() + it->position(), '\n');
    if (std::regex_match(code, program) && !std::regex_match(code, mention))
      all.push_back({cat(page, ':', line), code});
  }
  return all;
}

TEST(CommandLines, AreFoundInAPage) {
  const std::string page =
      "Words `pare train a` and `pare plan`, `pare eval\n--n 4`; `compare x`.\n\n    build/pare sft b  # why\n"
      "    make pare\n\n```\npare train c \\\n  d=e\n```\n| `build/cuda/pare inspect FILE\\|DIR` |\n";
  std::string found;
  for (const CommandLine& c : command_lines("P", page)) found += c.where + " " + c.text + "\n";
  EXPECT_EQ(found,
            "P:4 build/pare sft b  # why\nP:8 pare train c   d=e\nP:1 pare train a\nP:1 pare eval --n 4\n"
            "P:11 build/cuda/pare inspect FILE|DIR\n");
}

// A folder in which the command lines run as they are printed: with the names that the pages give to models, data and
// runs, and the program under its names.
class CommandLinesRun : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    if (IsSkipped()) return;
    for (const char* name : {"build/pare", "build/cuda/pare", "build/emu/pare"}) {
      fs::create_directories(fs::path(at(name)).parent_path());
      fs::create_symlink(program_path(), at(name));
    }
    ModelConfig config = tiny_config("qwen3", true);
    config.vocab = 260;
    config.eos_ids = {257};
    config.max_position = 2048;
    save_weights(at("DIR"), config, tiny_parameters(config, 5), DType::f32);
    write("DIR/tokenizer.json", tokenizer_json({{" ", "a"}}, {"<|im_start|>", "<|im_end|>"}).dump());
    const std::string row = R"({"question": "What is 3 * 24?", "answer": "3 * 24 = 72\n#### 72"})"
                            "\n";
    for (const char* name :
         {"train.jsonl", "test.jsonl", "GSM8K/train.jsonl", "GSM8K/test.jsonl", "FILE.jsonl", "problems.jsonl"})
      write(name, row + row);
    write("sft.jsonl", R"({"prompt": "What is 3 * 24?", "completion": "72"})"
                       "\n");
    write("ids.jsonl", R"({"ids": [1, 2, 3]})"
                       "\n");
    // A checkpoint of llama2.c: 7 sizes (width 8, feed-forward 8, 1 layer, 2 heads, 2 key heads, 8 tokens, 4
    // positions), then its numbers.
    const int32_t sizes[] = {8, 8, 1, 2, 2, 8, 4};
    const std::vector<float> numbers(8 * 8 + 2 * 8 + 4 * 8 * 8 + 3 * 8 * 8 + 8 + 2 * 4 * 2, 0.5f);
    write("llama2c.bin", std::string(reinterpret_cast<const char*>(sizes), sizeof sizes) +
                             std::string(reinterpret_cast<const char*>(numbers.data()), 4 * numbers.size()));
    write("stdin/generate", "Hello\n");
    write("stdin/tokenize", "\"Hello\"\n");
    write("stdin/verify", R"({"response": "72", "gold": "72"})"
                          "\n");
    // What `make quickstart` leaves, and an adapter.
    for (const char* line :
         {"sft quickstart-sft --out runs/quickstart-sft", "train quickstart --out runs/quickstart",
          "train quickstart-rpc --out runs/quickstart-rpc", "train quickstart model.lora.rank=2 --out adapter"}) {
      const Outcome o = typed(cat("pare ", line, tiny_sizes), "/dev/null");
      ASSERT_EQ(o.code, 0) << line << "\n" << o.err;
    }
  }

  Outcome typed(const std::string& line, const std::string& input) {
    std::vector<std::string> shell = {"/bin/sh", "-c", cat("cd '", at(""), "' && PATH=\"$PWD/build:$PATH\"\n", line)};
    input_ = input;
    return run(shell);
  }

  const std::string tiny_sizes = " trainer.total_training_steps=1 data.train_batch_size=2 rollout.n=2 data.val_rows=8";
};

TEST_F(CommandLinesRun, AsThePagesPrintThem) {
  // Words that stand for others.
  const std::pair<const char*, const char*> stand_ins[] = {
      {"CONFIG…", "quickstart"},
      {"[key=value…]", "trainer.seed=2"},
      {"RUN…", "runs/quickstart runs/quickstart-rpc"},
      {"RUN --step N", "runs/quickstart --step 1"},
      {"--step 40", "--step 1"},
      {"FILE|DIR", "DIR"},
      {"--verifier NAME", "--verifier exact"},
      {"=right.jsonl", "=sft.jsonl"},  // a model of random weights has no right response
      {"--mode NAME", "--mode exact"},
      {"--links 67108864", "--links 4096"},
      {"--op NAME --shape SIZES", "--op swiglu_fwd --shape N=64"},
      {"--tokenizer PATH", "--tokenizer DIR"},
      {"--ids FILE", "--ids ids.jsonl"},
      {"--model DIR --adapter DIR --out DIR", "--model runs/quickstart-sft/model --adapter adapter/model --out merged"},
      {"--llama2c FILE --out DIR", "--llama2c llama2c.bin --out new"}};
  size_t runs = 0;
  for (const std::string& page : pages())
    for (const CommandLine& printed : command_lines(page, read_text(page))) {
      std::string line = printed.text;
      for (const auto& [word, stand_in] : stand_ins) line = replaced(line, word, stand_in);
      const std::vector<std::string> w = words(line);
      const std::string command = w.size() > 1 ? w[1] : "";
      // What would take long is made small, and the model has no chat template.
      if (command == "train" || command == "sft" || command == "eval") line += tiny_sizes;
      if (command == "plan") line += " data.train_batch_size=8 actor.ppo_mini_batch_size=8";
      if (command == "bench" && line.find("--links") == std::string::npos) line += " --seconds 0.01";
      if (line.find(" --chat ") != std::string::npos) line += " --chat-format qwen2.5";
      // The runs of these sizes have one step.
      if (const size_t step = line.find("/step-200"); step != std::string::npos) line.replace(step, 9, "/step-1");
      const std::string input = at("stdin/" + command);
      SCOPED_TRACE(printed.where + ": " + printed.text + "\n  as: " + line);
      const Outcome o = typed(line, fs::exists(input) ? input : "/dev/null");
      runs++;
      if (line.find("--device cuda") != std::string::npos && o.err.find("without the device cuda") != std::string::npos)
        continue;  // everything before that is right
      EXPECT_EQ(o.code, 0) << o.err;
    }
  EXPECT_GE(runs, 30u);
}

}  // namespace
}  // namespace pare::test
