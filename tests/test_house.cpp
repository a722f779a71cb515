// The rooms of src/README.md and their arrows are those of the sources.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "ops/list.h"
#include "tests/program.h"

namespace pare::test {
namespace {

namespace fs = std::filesystem;
using Arrows = std::map<std::string, std::set<std::string>>;  // of each room, those that it sees

// The lines "a < b c < d" of the page: b and c see a, d sees b and c, and whoever sees a room sees what it sees.
Arrows arrows_of_the_page() {
  Arrows sees;
  std::stringstream page(read_text("src/README.md"));
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("    ") || line.find(" < ") == std::string::npos) continue;
    std::vector<std::string> before, now;
    std::stringstream words(line + " <");
    for (std::string word; words >> word;)
      if (word == "<") {
        for (const std::string& room : now) sees[room].insert(before.begin(), before.end());
        before = std::move(now);
        now.clear();
      } else {
        now.push_back(word);
      }
  }
  for (bool more = true; more;) {
    more = false;
    for (auto& [room, seen] : sees)
      for (const std::string& s : std::set<std::string>(seen))
        for (const std::string& t : sees[s]) more = seen.insert(t).second || more;
  }
  return sees;
}

// src/ROOM/..., or ROOM/... for the rooms beside src.
std::string room_of(const fs::path& file) {
  auto part = file.begin();
  return (*part == "src" ? *++part : *part).string();
}

TEST(House, MakefilesFitTheScreen) {
  int makefiles = 0;
  for (const auto& entry : fs::recursive_directory_iterator(".")) {
    const fs::path path = entry.path().lexically_normal();
    if (path.string().starts_with("build/") || (path != "Makefile" && path.extension() != ".mk")) continue;
    makefiles++;
    std::stringstream lines(read_text(path.string()));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 120u) << path << ": " << line;
  }
  EXPECT_GE(makefiles, 8);
}

// The first comment of a file and every comment of a header begin with a noun or a verb, and no line is torn to a word.
TEST(House, CommentsAreSentences) {
  const std::regex answers("^ *(//|#|\"\"\") ?(What|How|Of|Those|That of|Nothing|Nobody) "),
      torn("^ *// [A-Za-z'-]+\\.$");
  int files = 0;
  for (const char* top : {"src", "cuda", "model", "tokenizer", "data", "tests", "tools"})
    for (const auto& entry : fs::recursive_directory_iterator(top)) {
      const std::string kind = entry.path().extension().string();
      if (!std::set<std::string>{".h", ".cuh", ".cpp", ".cu", ".py", ".sh", ".mk"}.contains(kind)) continue;
      files++;
      const bool header = kind == ".h" && std::string(top) != "tests";
      std::stringstream lines(read_text(entry.path().string()));
      bool first = true;
      for (std::string line; std::getline(lines, line);) {
        if (line.starts_with("#!")) continue;
        EXPECT_FALSE((first || header) && std::regex_search(line, answers)) << entry.path() << ": " << line;
        EXPECT_FALSE(header && std::regex_search(line, torn)) << entry.path() << ": " << line;
        first = false;
      }
    }
  EXPECT_GT(files, 500);
}

// A backtick in a message would run what it quotes; commands are substituted by $( ).
TEST(House, ScriptsQuoteNothingByBackticks) {
  const std::regex bare("(^|[^\\\\])`");
  int scripts = 0;
  for (const auto& entry : fs::recursive_directory_iterator("tools")) {
    const std::string text = entry.is_regular_file() ? read_text(entry.path().string()) : "";
    const std::string first = text.substr(0, text.find('\n'));
    if (entry.path().extension() != ".sh" && !(first.starts_with("#!") && first.ends_with("sh"))) continue;
    scripts++;
    std::stringstream lines(text);
    for (std::string line; std::getline(lines, line);)
      if (const size_t word = line.find_first_not_of(' '); word != std::string::npos && line[word] != '#') {
        EXPECT_FALSE(std::regex_search(line.substr(0, line.find(" # ")), bare)) << entry.path() << ": " << line;
      }
  }
  EXPECT_GT(scripts, 15);
}

TEST(House, ArrowsAreThoseOfThePage) {
  const Arrows sees = arrows_of_the_page();
  ASSERT_GT(sees.size(), 10u) << "src/README.md is read in the root of the repository";
  EXPECT_FALSE(sees.at("rl").contains("app"));
  EXPECT_FALSE(sees.at("cuda").contains("model"));
  const std::regex include("#include \"([a-z_]+)/[^\"]+\"");
  int includes = 0;
  std::set<std::string> rooms;
  for (const char* folder : {"src", "model", "tokenizer", "data", "cuda"})
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      const fs::path& file = entry.path();
      if (!entry.is_regular_file() || file.string().starts_with("cuda/emu") || file.extension() == ".md" ||
          file.extension() == ".toml" || file.extension() == ".json" || file.extension() == ".jsonl")
        continue;
      const std::string room = room_of(file);
      EXPECT_TRUE(sees.contains(room)) << room << " is no room of src/README.md";
      rooms.insert(room);
      const std::string text = read_text(file);
      for (auto it = std::sregex_iterator(text.begin(), text.end(), include); it != std::sregex_iterator(); ++it) {
        const std::string other = (*it)[1];
        if (other == room || !sees.contains(other)) continue;  // a system header's folder
        includes++;
        EXPECT_TRUE(sees.at(room).contains(other)) << file << " includes " << it->str();
      }
    }
  EXPECT_GT(includes, 150);
  for (const auto& [room, seen] : sees) EXPECT_TRUE(rooms.contains(room)) << "src/README.md: there is no room " << room;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The op of a line `X(op, Args)` of PARE_OPS.
std::vector<std::pair<std::string, std::string>> ops_of_the_list() {
  std::vector<std::pair<std::string, std::string>> ops;
#define X(op, Args) ops.emplace_back(#op, #Args);
  PARE_OPS(X)
#undef X
  return ops;
}

// A file with kernels begins with the order of their sums, the bytes that they move, and their limit.
TEST(House, AFileOfKernelsStatesOrderBytesAndLimit) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator("cuda")) {
    const std::string text = entry.is_regular_file() ? read_text(entry.path()) : "";
    if (!has(text, "__global__")) continue;
    files++;
    const std::string opening = text.substr(0, text.find("\n#"));
    for (const char* word : {"Order", "Bytes", "imited"})
      EXPECT_TRUE(has(opening, word)) << entry.path() << ": its first comment lacks '" << word << "'";
  }
  EXPECT_GE(files, 20);
}

// The family of an op is the header in src/ops that has its struct; every other file of the recipe in src/README.md has
// the same stem.
TEST(House, EveryOpHasItsFiles) {
  std::map<std::string, std::string> headers;
  for (const auto& entry : fs::directory_iterator("src/ops"))
    if (entry.path().extension() == ".h") headers[entry.path().stem().string()] = read_text(entry.path());
  const std::string page = read_text("src/README.md");
  for (const char* file : {"src/ops/FAMILY.h", "src/ref/FAMILY.cpp", "src/cpu/FAMILY.cpp", "src/cpu/isa/FAMILY.cpp",
                           "src/cases/FAMILY.cpp", "cuda/FAMILY.cu"})
    EXPECT_TRUE(has(page, cat("`", file, "`"))) << "src/README.md does not name " << file;
  std::set<std::string> families;
  for (const auto& line : ops_of_the_list()) {
    const std::string &op = line.first, &args = line.second;
    std::string family;
    for (const auto& [stem, text] : headers)
      if (has(text, "\nstruct " + args + " {")) family = stem;
    ASSERT_FALSE(family.empty()) << args << " is in no header of src/ops";
    families.insert(family);
    // In FAMILY.cpp, or on a GPU in any of FAMILY.cu and FAMILY_*.cu.
    const auto names = [&op, &family](const fs::path& folder, const std::string& kind, const std::string& what) {
      bool found = false;
      for (const auto& entry : fs::directory_iterator(folder)) {
        const std::string stem = entry.path().stem().string();
        if (entry.path().extension() == kind && (stem == family || (kind == ".cu" && stem.starts_with(family + "_"))))
          found = found || has(read_text(entry.path()), what);
      }
      EXPECT_TRUE(found) << op << ": no " << what << " in " << folder / (family + kind);
    };
    EXPECT_TRUE(has(headers[family], "void check(Contract&")) << op;
    const std::string function = "void " + op + "(const " + args + "&";
    names("src/ref", ".cpp", function);
    names("src/cpu", ".cpp", function);
    names("src/cases", ".cpp", cat('"', op, '"'));
    names("cuda", ".cu", function);
  }
  EXPECT_LE(families.size(), 12u);
}

// The file that `include` names in `from`, if it is one of the project.
fs::path included(const std::string& include, const fs::path& from) {
  for (const fs::path& folder : {from.parent_path(), fs::path("src"), fs::path(".")})
    if (fs::exists(folder / include)) return (folder / include).lexically_normal();
  return {};
}

// Adds to `seen` the headers that `file` includes, directly or not.
void add_headers(const fs::path& file, std::set<fs::path>& seen) {
  static const std::regex include("#include \"([^\"]+)\"");
  static std::map<fs::path, std::vector<fs::path>> direct;
  auto [it, first] = direct.try_emplace(file);
  if (first) {
    const std::string text = read_text(file);
    for (auto i = std::sregex_iterator(text.begin(), text.end(), include); i != std::sregex_iterator(); ++i)
      if (const fs::path header = included((*i)[1], file); !header.empty()) it->second.push_back(header);
  }
  for (const fs::path& header : std::vector<fs::path>(it->second))
    if (seen.insert(header).second) add_headers(header, seen);
}

// A change of an op's header recompiles the sources that call the op, not the program.
TEST(House, AFamilyConcernsTheSourcesThatCallIt) {
  std::map<std::string, int> sources;
  int all = 0;
  for (const char* folder : {"src", "model", "tokenizer", "data"})
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (entry.path().extension() != ".cpp") continue;
      all++;
      std::set<fs::path> headers;
      add_headers(entry.path(), headers);
      for (const fs::path& header : headers)
        if (header.parent_path() == "src/ops") sources[header.stem()]++;
    }
  EXPECT_GT(all, 150);
  for (const char* family : {"merge", "norm", "optimizer", "rope", "swiglu"}) {
    EXPECT_GT(sources[family], 5) << family;
    EXPECT_LE(sources[family], 9) << family;
  }
  for (const char* family : {"attention", "blocks", "data", "compression", "logits", "paged"})
    EXPECT_LE(sources[family], all / 4) << family;
  EXPECT_GT(sources["list"], all / 2);
}

// One name in namespace pare is one type: two definitions would be one to the linker (`make odr` compares members).
TEST(House, ATypeIsDefinedOnce) {
  std::map<std::string, std::set<std::string>> files;
  const std::regex type("^(?:struct|class|enum class|enum) ([A-Z]\\w*)(?: final)?(?: : [^;(]*)? \\{");
  for (const char* folder : {"src", "model", "tokenizer", "data", "tests"})
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      const fs::path& file = entry.path();
      if (file.extension() != ".cpp" && file.extension() != ".h") continue;
      std::stringstream text(read_text(file));
      std::string space;  // of the line, by the lines that open a namespace
      std::smatch match;
      for (std::string line; std::getline(text, line);) {
        if (line.starts_with("namespace") && line.ends_with('{')) space += line;
        if (line.starts_with("}  // namespace")) space = space.substr(0, space.rfind("namespace"));
        if (std::regex_search(line, match, type) && !space.ends_with("namespace {"))
          files[space + " " + match[1].str()].insert(file.string());
      }
    }
  EXPECT_GT(files.size(), 300u);
  for (const auto& [name, defined] : files) {
    std::string all;
    for (const std::string& file : defined) all += " " + file;
    EXPECT_EQ(defined.size(), 1u) << name << all;
  }
}

// Lines of the files whose path begins with one of `paths` and with none of those behind a minus.
int64_t lines_of(const std::string& paths) {
  int64_t lines = 0;
  for (const char* folder : {"src", "cuda", "model", "tokenizer", "data", "tools"})
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      const std::string file = entry.path().string(), kind = entry.path().extension().string();
      if (!entry.is_regular_file() || file.starts_with("cuda/emu/") || file.starts_with("tools/experiments/results") ||
          kind == ".md" || kind == ".json" || kind == ".jsonl" || kind == ".toml" || kind == ".txt" || kind == ".png")
        continue;
      bool counted = false;
      std::stringstream words(paths);
      for (std::string path; words >> path;)
        if (path[0] == '-' ? file.starts_with(path.substr(1)) : file.starts_with(path)) counted = path[0] != '-';
      const std::string text = counted ? read_text(file) : "";
      lines += std::count(text.begin(), text.end(), '\n');
    }
  return lines;
}

TEST(House, KeepsWithinItsBudgets) {
  const std::string page = read_text("src/README.md");
  const std::regex row(R"(\n\| [^|`]+ \| `([^`]+)` \| ([0-9]+)( an op)? \|)");
  int rows = 0;
  for (auto it = std::sregex_iterator(page.begin(), page.end(), row); it != std::sregex_iterator(); ++it, rows++) {
    const int64_t lines = lines_of((*it)[1]), ops = (*it)[3].length() ? int64_t(ops_of_the_list().size()) : 1;
    EXPECT_GT(lines, 0) << it->str();
    EXPECT_LE(lines, std::stoll((*it)[2]) * ops) << it->str() << ": say why in the commit, and move the figure";
  }
  EXPECT_GE(rows, 5);
}

// The files of a dense step, to 5 % or 10 lines, each counted once; README promises less than 9,000 lines.
TEST(House, TheReadingListIsTrue) {
  const std::string page = read_text("src/README.md");
  const size_t begin = page.find("## A dense step"), end = page.find("\n## ", begin + 1);
  ASSERT_LT(begin, end);
  const std::string list = page.substr(begin, end - begin);
  const std::regex row(R"(\n\| `([^`]+)` \| ([0-9]+) \| [^|\n]+ \|)"), sum("have ([0-9]+) lines");
  int64_t total = 0, counted = 0, rows = 0;
  std::string all;
  for (auto it = std::sregex_iterator(list.begin(), list.end(), row); it != std::sregex_iterator(); ++it, rows++) {
    const int64_t said = std::stoll((*it)[2]), lines = lines_of((*it)[1]);
    EXPECT_NEAR(lines, said, std::max<int64_t>(10, said / 20)) << it->str();
    std::stringstream names((*it)[1]);
    for (std::string name; names >> name;) EXPECT_GT(lines_of(name), 0) << name;
    total += said;
    counted += lines;
    all += (*it)[1].str() + " ";
  }
  EXPECT_GE(rows, 10);
  EXPECT_EQ(lines_of(all), counted) << "a file is in two rows";
  std::smatch said;
  ASSERT_TRUE(std::regex_search(list, said, sum));
  EXPECT_EQ(total, std::stoll(said[1]));
  EXPECT_LT(counted, 9000);
}

}  // namespace
}  // namespace pare::test
