// The rooms of src/README.md and their arrows are those of the sources.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>

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
        before = std::move(now), now.clear();
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

TEST(House, TheMakefileIsReadInAMinute) {
  const std::string makefile = read_text("Makefile");
  EXPECT_LE(std::count(makefile.begin(), makefile.end(), '\n'), 250);
}

TEST(House, ArrowsAreThoseOfThePage) {
  const Arrows sees = arrows_of_the_page();
  ASSERT_GT(sees.size(), 10u) << "src/README.md is read in the root of the repository";
  for (const char* room : {"run", "data", "tokenizer", "app"}) EXPECT_FALSE(sees.at("rl").contains(room)) << room;
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

}  // namespace
}  // namespace pare::test
