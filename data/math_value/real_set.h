// Sets of real numbers: unions of intervals.
#pragma once
#include "data/math_value/answer.h"

namespace pare::math_value {

// A tuple (low, high) whose ends are constants or infinite.
Answer interval_of(Answer low, Answer high, bool strict_low, bool strict_high);

// The union of intervals and sets of numbers in its one form: ascending intervals with a gap between any two; [a, a] is
// the number a.  Nothing if there is no interval, something else, or an order that is unknown.
std::optional<std::vector<Answer>> united(const std::vector<Answer>& parts, Effort& effort);

// Returns intervals without a set of numbers; nothing as above.
std::optional<std::vector<Answer>> without_points(std::vector<Answer> intervals, const Answer& points, Effort& effort);

}  // namespace pare::math_value
