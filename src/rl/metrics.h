// The numbers of one step, in the order in which they were set, under verl's names where verl has one.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace pare {

class Metrics {
 public:
  void set(const std::string& name, double value);
  double get(const std::string& name) const;  // NaN if absent
  const std::vector<std::pair<std::string, double>>& all() const { return values_; }
  std::string json() const;  // one line; what is not finite becomes null

 private:
  std::vector<std::pair<std::string, double>> values_;
};

// Mean, minimum and maximum of what was added; NaN without any.
class Summary {
 public:
  void add(double x);
  double mean() const, min() const, max() const;
  double sum() const { return sum_; }
  int64_t count() const { return count_; }

 private:
  double sum_ = 0, min_ = 0, max_ = 0;
  int64_t count_ = 0;
};

}  // namespace pare
