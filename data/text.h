// Text as other projects' graders see it: characters instead of bytes, Unicode white space.
#pragma once
#include <string>
#include <string_view>

namespace pare {

// Bytes of the UTF-8 character at `at`; a byte that begins none counts as one.
size_t character_size(std::string_view s, size_t at);
size_t character_count(std::string_view s);
// The last n characters.
std::string_view last_characters(std::string_view s, size_t n);

// Bytes of the white space character (of Python's str.isspace) at `at`; 0: it is none.
size_t space_size(std::string_view s, size_t at);
std::string_view trim(std::string_view s);  // that white space removed from both ends

std::string replace_all(std::string_view s, std::string_view from, std::string_view to);
// Converts ASCII letters to lower case; other characters are unchanged.
char lower(char c);
std::string lower(std::string_view s);

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }
constexpr bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// An integer as digits, with a minus or without: "-12", "007".
bool is_integer(std::string_view s);
// Without the zeros in front: "-007" -> "-7", "000" -> "0".
std::string without_leading_zeros(std::string_view integer);

// The content of the last `command` with braces, such as \boxed{...}; not found, or not closed: false.
bool last_braced(std::string_view s, std::string_view command, std::string_view& content);

}  // namespace pare
