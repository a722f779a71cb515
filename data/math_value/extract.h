// Finds the answer in a response.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace pare::math_value {

// The final answer of a finished response, as text.  Looked for behind </think> only, and not at all in a thought that
// does not end; in this order:
//   the last \boxed{} that holds something, with the boxes before it that are joined to it by "and" or a comma; none if
//   it stays open.  The word \boxed, an empty box and \boxed{...} are no boxes
//   what follows "####", or is in the last <answer></answer>
//   what follows the last "answer is" or "Answer:", to the end of the sentence
//   the only formula of the last sentence, or its only number
// A text that has none of these, or more than one formula where one is expected, has no answer: which of several values
// was meant is not guessed.
std::optional<std::string> extract(std::string_view response);

// Returns the contents of the boxes of a gold answer, or all of it if it has none.
std::string boxed_gold(std::string_view gold);

}  // namespace pare::math_value
