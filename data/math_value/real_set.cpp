#include "data/math_value/real_set.h"

#include <algorithm>

namespace pare::math_value {
namespace {

using A = Answer::Kind;

// The order of two ends; nothing if it is unknown.
std::optional<int> compare(const Answer& x, const Answer& y, Effort& effort) {
  const auto side = [](const Answer& e) { return e.kind == A::infinity ? (e.negative ? -1 : 1) : 0; };
  if (side(x) != 0 || side(y) != 0) return side(x) - side(y);
  if (!effort.spend(1) || !x.value[0] || !y.value[0]) return {};
  const MaybeNumber d = subtract(*x.value[0], *y.value[0]);
  return d ? sign(*d) : std::nullopt;
}

bool is_end(const Answer& a) { return a.kind == A::infinity || (a.kind == A::value && a.value.constant); }
bool is_interval(const Answer& a) {
  return a.kind == A::tuple && a.items.size() == 2 && (a.close == ')' || a.close == ']') && is_end(a.items[0]) &&
         is_end(a.items[1]);
}
bool are_numbers(const Answer& a) { return a.kind == A::set && std::all_of(a.items.begin(), a.items.end(), is_end); }

}  // namespace

Answer interval_of(Answer low, Answer high, bool strict_low, bool strict_high) {
  Answer a;
  a.kind = A::tuple;
  a.open = strict_low ? '(' : '[';
  a.close = strict_high ? ')' : ']';
  a.items = {std::move(low), std::move(high)};
  return a;
}

std::optional<std::vector<Answer>> united(const std::vector<Answer>& parts, Effort& effort) {
  std::vector<Answer> all;
  for (const Answer& part : parts) {
    if (part.name != parts[0].name || !part.unit.empty()) return {};
    if (is_interval(part))
      all.push_back(part);
    else if (are_numbers(part))
      for (const Answer& x : part.items) all.push_back(interval_of(x, x, false, false));
    else
      return {};
  }
  if (std::none_of(parts.begin(), parts.end(), is_interval)) return {};
  std::vector<Answer> apart;
  while (!all.empty()) {
    size_t first = 0;
    for (size_t i = 1; i < all.size(); i++) {
      const std::optional<int> c = compare(all[i].items[0], all[first].items[0], effort);
      if (!c) return {};
      if (*c < 0 || (*c == 0 && all[i].open == '[')) first = i;
    }
    Answer next = std::move(all[first]);
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(first));
    if (!apart.empty()) {
      Answer& last = apart.back();
      const std::optional<int> gap = compare(next.items[0], last.items[1], effort);
      const std::optional<int> further = compare(next.items[1], last.items[1], effort);
      if (!gap || !further) return {};
      if (*gap < 0 || (*gap == 0 && (next.open == '[' || last.close == ']'))) {
        if (*further > 0) {
          last.items[1] = next.items[1];
          last.close = next.close;
        }
        if (*further == 0 && next.close == ']') last.close = ']';
        continue;
      }
    }
    apart.push_back(std::move(next));
  }
  return apart;
}

std::optional<std::vector<Answer>> without_points(std::vector<Answer> intervals, const Answer& points, Effort& effort) {
  if (!are_numbers(points) || !std::all_of(intervals.begin(), intervals.end(), is_interval)) return {};
  for (const Answer& x : points.items) {
    std::vector<Answer> rest;
    for (const Answer& piece : intervals) {
      const std::optional<int> low = compare(piece.items[0], x, effort), high = compare(x, piece.items[1], effort);
      if (!low || !high) return {};
      if (*low > 0 || *high > 0) {
        rest.push_back(piece);
        continue;
      }
      if (*low < 0) rest.push_back(interval_of(piece.items[0], x, piece.open == '(', true));
      if (*high < 0) rest.push_back(interval_of(x, piece.items[1], true, piece.close == ')'));
    }
    intervals = std::move(rest);
  }
  return intervals;
}

}  // namespace pare::math_value
