// The known name nearest to a misspelled one, for error messages.
#pragma once
#include <string>
#include <vector>

namespace pare {

// Insertions, deletions and replacements of bytes that turn a into b (Levenshtein).
size_t edit_distance(const std::string& a, const std::string& b);

// The candidate with the least edit distance from `name`, the first of several.  There must be one.
const std::string& nearest(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace pare
