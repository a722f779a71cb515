#include "ops/device.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/half.h"
#include "base/text.h"
#include "ops/families.h"

namespace pare {

namespace {

float widened(float x) { return x; }
double widened(double x) { return x; }
float widened(uint16_t x) { return bf16_to_f32(x); }

// Of the last dimension of t, whose memory, from its first element to its last, is at `host`.
template <class T>
void check_row(const char* op, int output, const Tensor& t, int64_t row, const void* host) {
  const int64_t last = t.shape[t.rank - 1];
  int64_t rest = row, offset = 0;
  for (int i = t.rank - 2; i >= 0; i--) {
    offset += rest % t.shape[i] * t.stride[i];
    rest /= t.shape[i];
  }
  for (int64_t c = 0; c < last; c++)
    if (const auto x = widened(static_cast<const T*>(host)[offset + c]); !std::isfinite(x))
      throw Error(Exit::non_finite, cat(op, ": output ", output, " ", t.str(), " holds ", number_text(x), " at row ",
                                        row, ", column ", c));
}

template <class Args>
int64_t linear_rows(const Args& a) {
  if constexpr (std::is_same_v<Args, LinearFwd>)
    return a.x.shape[0];
  else if constexpr (std::is_same_v<Args, LinearBwdInput> || std::is_same_v<Args, LinearBwdWeight>)
    return a.dy.shape[0];
  else
    return 0;
}

template <class T, class... Ts>
constexpr bool is_any = (std::is_same_v<T, Ts> || ...);
// KV pages and what lies beside them hold slots that were never written, scores and rings of rows likewise; only what
// reads them is checked.  Of CopyRows it is the rows that are copied.
template <class Args>
constexpr bool partly_written = is_any<Args, PackWeight, KvWrite, KvCopyPages, KvBlockSummary, KvWindowScores,
                                       KvRedundancy, KvMassScores, KvCompact>;

}  // namespace

bool Ledger::Line::operator==(const Line& o) const {
  return calls == o.calls && cost == o.cost && min_rows == o.min_rows;
}

void Ledger::Line::scale(double factor) {
  for (int64_t* x : {&calls, &cost.flops, &cost.read, &cost.written, &cost.sent, &cost.abroad})
    *x = std::llround(static_cast<double>(*x) * factor);
  seconds *= factor;
}

void Ledger::add(const Ledger& other) {
  for (const auto& [phase, ops] : other.phases)
    for (const auto& [op, more] : ops) {
      Line& line = phases[phase][op];
      line.calls += more.calls;
      line.cost += more.cost;
      line.seconds += more.seconds;
      if (more.min_rows && (line.min_rows == 0 || more.min_rows < line.min_rows)) line.min_rows = more.min_rows;
    }
}

Cost Ledger::total(const std::string& phase) const {
  Cost sum;
  if (auto it = phases.find(phase); it != phases.end())
    for (const auto& [op, line] : it->second) sum += line.cost;
  return sum;
}

double Ledger::seconds(const std::string& phase) const {
  double sum = 0;
  if (auto it = phases.find(phase); it != phases.end())
    for (const auto& [op, line] : it->second) sum += line.seconds;
  return sum;
}

Range::Range(const Device& device, const char* what, int64_t number) : end_(device.table().range_end) {
  if (!end_) return;
  char name[64];
  std::snprintf(name, sizeof name, "%s %lld", what, static_cast<long long>(number));
  device.table().range_begin(name);
}

Device::~Device() {
  try {
    if (staged_ > 0) wait();
  } catch (const std::exception&) {  // whoever waited for a result knows
  }
  if (staging_) table_.staging->give(staging_, kStaging);
}

void Device::wait() {
  char nothing;
  table_.download({&nothing, make_tensor(nullptr, DType::u8, {0})}, stream_);
  staged_ = 0;
}

bool Device::together(const std::function<void()>& calls) {
  if (graphs && !check_nan && table_.graphs && !graphs_) graphs_ = table_.graphs();
  if (!graphs || check_nan || !graphs_) {
    calls();
    return false;
  }
  expect(!stream_.graphs, "together() inside together()");
  graphs_->begin();
  stream_.graphs = graphs_.get();
  try {
    calls();
    const bool one = graphs_->launch(stream_);
    stream_.graphs = nullptr;
    return one;
  } catch (...) {
    stream_.graphs = nullptr;
    graphs_->drop();
    throw;
  }
}

void Device::stage(const Upload& a) {
  if (!staging_) staging_ = static_cast<char*>(table_.staging->take(kStaging));
  if (!staging_) throw Error(Exit::memory, cat("no ", kStaging, " bytes of page-locked memory can be had"));
  const auto* src = static_cast<const char*>(a.src);
  Tensor rest = a.dst.flat();
  rest.shape[0] = static_cast<int64_t>(a.dst.bytes());
  rest.dtype = DType::u8;
  while (rest.size() > 0) {
    if (staged_ == kStaging) wait();
    const size_t n = std::min(rest.bytes(), kStaging - staged_);
    std::memcpy(staging_ + staged_, src, n);
    table_.upload({rest.rows(0, static_cast<int64_t>(n)), staging_ + staged_}, stream_);
    staged_ = std::min(kStaging, (staged_ + n + 63) / 64 * 64);
    src += n;
    rest = rest.rows(static_cast<int64_t>(n), rest.size() - static_cast<int64_t>(n));
  }
}

// Returns a copy of t's memory, from its first element to its last.
static std::vector<char> copy(const Table& table, Stream stream, const Tensor& t) {
  int64_t span = t.size() > 0;
  for (int i = 0; i < t.rank && span > 0; i++) span += (t.shape[i] - 1) * t.stride[i];
  std::vector<char> host(static_cast<size_t>(span) * dtype_size(t.dtype));
  table.download({host.data(), make_tensor(t.data, DType::u8, {std::ssize(host)})}, stream);
  return host;
}

template <class Args>
void Device::check_outputs(const char* op, const Args& a) {
  int output = -1;
  for (const Tensor& t : a.outputs()) {
    output++;
    const bool f32 = t.dtype == DType::f32, f64 = t.dtype == DType::f64;
    if (t.size() == 0 || !(f32 || f64 || t.dtype == DType::bf16)) continue;
    const auto check = f32 ? check_row<float> : f64 ? check_row<double> : check_row<uint16_t>;
    const std::vector<char> host = copy(table_, stream_, t);
    if constexpr (std::is_same_v<Args, CopyRows>) {
      if (a.x.data == t.data) continue;  // what is copied within a tensor was there before
      const std::vector<char> pairs = copy(table_, stream_, a.index);
      for (int64_t i = 0; i < a.index.shape[0]; i++)
        check(op, output, t, reinterpret_cast<const int32_t*>(pairs.data())[2 * i + 1], host.data());
    } else {
      for (int64_t row = 0; row < t.size() / t.shape[t.rank - 1]; row++) check(op, output, t, row, host.data());
    }
  }
}

template <class Args>
void Device::call(const char* op, void (*fn)(const Args&, Stream), const Args& a) {
  using Clock = std::chrono::steady_clock;
  const Range range(*this, op);
  check(op, a, table_.act);
  comm.doing.store(op, std::memory_order_relaxed);
  comm.calls.fetch_add(1, std::memory_order_relaxed);
  const auto start = timed ? Clock::now() : Clock::time_point{};
  if constexpr (std::is_same_v<Args, Upload>) {
    table_.staging ? stage(a) : fn(a, stream_);
  } else {
    fn(a, stream_);
  }
  const auto end = timed ? Clock::now() : Clock::time_point{};
  if constexpr (std::is_same_v<Args, Download>) staged_ = 0;
  if (ledger) {
    Ledger::Line& line = ledger->phases[phase][op];
    const Cost c = a.cost();
    line.calls++;
    line.cost += c;
    line.seconds += estimate ? estimate(op, c, [&](int n) { return stretch_of(a, n); })
                             : std::chrono::duration<double>(end - start).count();
    if (const int64_t rows = linear_rows(a); rows && (line.min_rows == 0 || rows < line.min_rows)) line.min_rows = rows;
  }
  if (check_nan && !planning() && !partly_written<Args>) check_outputs(op, a);
}

#define X(op, Args) template void Device::call<Args>(const char*, void (*)(const Args&, Stream), const Args&);
PARE_OPS(X)
#undef X

namespace {
template <class Args>
void nothing(const Args&, Stream) {}
void zeros(const Download& a, Stream) { std::fill_n(static_cast<char*>(a.dst), a.src.bytes(), 0); }
}  // namespace

// No function does anything but download, whose caller reads host memory.
static constexpr Table make_null() {
  Table t{.name = "null",
#define X(op, Args) .op = nothing<Args>,
          PARE_OPS(X)
#undef X
  };
  t.download = zeros;
  t.memory = &no_memory;
  return t;
}
constinit const Table table_null = make_null();

}  // namespace pare
