// The files of data/presets, which are in the program, so that it finds them wherever it runs: runs and methods
// (NAME.toml), shapes of models (NAME.json), problems (NAME.jsonl); machines, data/machines/NAME.toml (NAME.machine);
// and the page data/formats.md.  A name that is one of theirs means the one in the program, whatever files lie around;
// anything else is a path, and ./NAME is always one.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pare {

// The text of NAME.ENDING, if there is one.
std::optional<std::string_view> preset_text(const std::string& name, std::string_view ending);
// All names with that ending, in alphabetical order.
std::vector<std::string> preset_names(std::string_view ending);

}  // namespace pare
