// Parsed answers (a value, several, an interval, a relation, a matrix, words) and their equality.
#pragma once
#include "data/math_value/expression.h"

namespace pare::math_value {

struct Answer {
  enum class Kind {
    text,        // words, and what is not understood: equal to the same text
    value,       // a number or an expression of variables
    infinity,    // positive, or with `negative`
    list,        // several values without order; a union
    set,         // \{...\}
    tuple,       // (1, 2), [0, 1), a ratio 7:32; intervals are tuples
    matrix,      // items row by row
    equation,    // 2x + y = 1
    inequality,  // x + y < 1; a line in one variable is read as an interval: -2x > -2
    numeral      // 1101_2
  };
  Kind kind = Kind::text;
  std::string text;                   // the tokens
  std::string name;                   // "x" of "x = 7" and of "x \in [0, 1]"
  std::string unit;                   // of a value, a tuple or a set, in one spelling
  Samples value;                      // of a value
  std::optional<Samples> difference;  // left minus right (inequality: the larger side minus the smaller one)
  std::vector<Answer> items;          // of list, set, tuple, matrix
  size_t columns = 0;                 // of a matrix
  char open = 0, close = 0;           // brackets of a tuple; a ratio has none
  bool negative = false;              // infinity
  char relation = 0;                  // inequality: '<', 'l' (less or equal), '!' (not equal)
};

// A longer answer is text.
constexpr size_t kAnswerBytes = 2000;

// Reads an answer; always gives one, at worst its text.
Answer read_answer(std::string_view s);

// No part of it is just text.
bool understood(const Answer& a);

// `gold` and `answer` say the same.  Values must be equal exactly, or as far as 256 bits tell where they are
// irrational; an answer may leave out the name or the unit or add one, but not have another.  In a set, and among
// points, it does not matter how often one is there.
bool same(const Answer& gold, const Answer& answer);

// The same for texts, with the readings that a text can have.  An answer "1,5" is also 1.5, and "100,200" also two
// numbers; for the gold "1,5" an answer 1.5 is right as well, but none that is written in another way.
bool same_text(std::string_view gold, std::string_view answer);

std::string describe(const Answer& answer);

}  // namespace pare::math_value
