#include "rl/metrics.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace pare {

template <class Value>
static void set_in(std::vector<std::pair<std::string, Value>>& list, const std::string& name, const Value& value) {
  for (auto& [n, v] : list)
    if (n == name) {
      v = value;
      return;
    }
  list.emplace_back(name, value);
}

void Metrics::set(const std::string& name, double value) { set_in(values_, name, value); }
void Metrics::set_text(const std::string& name, const std::string& text) { set_in(texts_, name, text); }

double Metrics::get(const std::string& name) const {
  for (const auto& [n, v] : values_)
    if (n == name) return v;
  return std::numeric_limits<double>::quiet_NaN();
}

std::string Metrics::text(const std::string& name) const {
  for (const auto& [n, t] : texts_)
    if (n == name) return t;
  return "";
}

void Metrics::add(const Metrics& other) {
  for (const auto& [name, value] : other.values_) set(name, value);
  for (const auto& [name, text] : other.texts_) set_text(name, text);
}

std::string Metrics::json() const {
  nlohmann::ordered_json line;
  for (const auto& [name, value] : values_) {
    // Whole numbers are written as such: counts and FLOPs stay readable and exact.
    if (!std::isfinite(value))
      line[name] = nullptr;
    else if (value == std::floor(value) && std::abs(value) < 9e15)
      line[name] = static_cast<int64_t>(value);
    else
      line[name] = value;
  }
  for (const auto& [name, text] : texts_) line[name] = text;
  return line.dump();
}

static double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
Timer::Timer(Metrics& metrics, std::string name) : metrics_(metrics), name_(std::move(name)), start_(seconds()) {}
Timer::~Timer() {
  const double before = metrics_.get(name_);
  metrics_.set(name_, (std::isnan(before) ? 0 : before) + seconds() - start_);
}

void Summary::add(double x) {
  min_ = count_ ? std::min(min_, x) : x;
  max_ = count_ ? std::max(max_, x) : x;
  sum_ += x;
  count_++;
}

static double or_nan(int64_t count, double x) { return count ? x : std::numeric_limits<double>::quiet_NaN(); }
double Summary::mean() const { return or_nan(count_, sum_ / static_cast<double>(count_)); }
double Summary::min() const { return or_nan(count_, min_); }
double Summary::max() const { return or_nan(count_, max_); }

}  // namespace pare
