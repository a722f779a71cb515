// The numbers of one step, in the order in which they were set, under verl's names where verl has one.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pare {

class Metrics {
 public:
  void set(const std::string& name, double value);
  double get(const std::string& name) const;  // NaN if absent
  const std::vector<std::pair<std::string, double>>& all() const { return values_; }
  void add(const Metrics& other);  // sets all of the other's
  // Values that are not numbers, such as the certificate of a step.
  void set_text(const std::string& name, const std::string& text);
  std::string text(const std::string& name) const;  // empty if absent
  std::string json() const;                         // one line; what is not finite becomes null; texts come last

 private:
  std::vector<std::pair<std::string, double>> values_;
  std::vector<std::pair<std::string, std::string>> texts_;
};

// Adds the seconds of a scope to a metric.
class Timer {
 public:
  Timer(Metrics& metrics, std::string name);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  Metrics& metrics_;
  const std::string name_;
  const double start_;
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
