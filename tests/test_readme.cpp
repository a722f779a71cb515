// The README says nothing that is not there: commands, flags, keys, presets, make targets, files, tests.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include "rl/config.h"
#include "tests/program.h"

namespace pare::test {
namespace {

// Blanks inside quotes do not part words.
std::vector<std::string> words(const std::string& line) {
  std::stringstream s(line);
  std::vector<std::string> all;
  for (std::string w; s >> w; all.push_back(w))
    if (std::string rest; w.starts_with('"') && (w.size() == 1 || !w.ends_with('"')) && std::getline(s, rest, '"'))
      w += rest + '"';
  return all;
}

class Readme : public Program {
 protected:
  void SetUp() override {
    Program::SetUp();
    text_ = read_text("README.md");
    ASSERT_FALSE(text_.empty()) << "the tests run in the root of the repository";
    // Code: lines indented by four blanks, and what stands between backticks (which may run over a line end).
    std::string prose;
    std::stringstream lines(text_);
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

  std::string text_;
  std::vector<std::string> code_;
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

TEST_F(Readme, MakeTargetsExist) {
  const std::string makefile = "\n" + read_text("Makefile");
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
    if (std::regex_match(code, path)) {
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
  const std::string promises =
      text_.substr(text_.find("## Promises"), text_.find("## Tests") - text_.find("## Promises"));
  const std::regex test("`([A-Z][A-Za-z]+\\.[A-Z][A-Za-z]+)`");
  size_t found = 0;
  for (auto it = std::sregex_iterator(promises.begin(), promises.end(), test); it != std::sregex_iterator(); ++it) {
    found++;
#ifndef PARE_EMU
    if (it->str(1).find("Emu") != std::string::npos) continue;
#endif
    EXPECT_TRUE(names.count((*it)[1])) << (*it)[1];
  }
  EXPECT_GT(found, 15u);
}

}  // namespace
}  // namespace pare::test
