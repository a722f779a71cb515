// How far apart two names are, for messages that suggest one.
#pragma once
#include <string>

namespace pare {

// Insertions, deletions and replacements that turn a into b (Levenshtein).
size_t edit_distance(const std::string& a, const std::string& b);

}  // namespace pare
