#include "ops/device.h"

#include <chrono>
#include <cmath>
#include <type_traits>
#include <vector>

namespace pare {

namespace {

template <class T>
void check_finite(const char* op, int output, const Tensor& t) {
  // Any strides: walk the rows of the last dimension.
  const T* base = static_cast<const T*>(t.data);
  const int64_t last = t.shape[t.rank - 1], rows = last ? t.size() / last : 0;
  for (int64_t r = 0; r < rows; r++) {
    int64_t rest = r, offset = 0;
    for (int i = t.rank - 2; i >= 0; i--) offset += rest % t.shape[i] * t.stride[i], rest /= t.shape[i];
    for (int64_t c = 0; c < last; c++)
      if (!std::isfinite(base[offset + c]))
        throw Error(Exit::non_finite, cat(op, ": output ", output, " ", t.str(), " holds ", base[offset + c],
                                          " at row ", r, ", column ", c));
  }
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
// reads them is checked.
template <class Args>
constexpr bool partly_written = is_any<Args, PackWeight, KvWrite, KvCopyPages, KvBlockSummary, CopyRows, KvWindowScores,
                                       KvRedundancy, KvMass, KvMassScores, KvCompact>;

}  // namespace

bool Ledger::Line::operator==(const Line& o) const {
  return calls == o.calls && cost.flops == o.cost.flops && cost.read == o.cost.read && cost.written == o.cost.written &&
         min_rows == o.min_rows;
}

Cost Ledger::total(const std::string& phase) const {
  Cost sum;
  if (auto it = phases.find(phase); it != phases.end())
    for (const auto& [op, line] : it->second)
      sum.flops += line.cost.flops, sum.read += line.cost.read, sum.written += line.cost.written;
  return sum;
}

double Ledger::seconds(const std::string& phase) const {
  double sum = 0;
  if (auto it = phases.find(phase); it != phases.end())
    for (const auto& [op, line] : it->second) sum += line.seconds;
  return sum;
}

template <class Args>
void Device::call(const char* op, void (*fn)(const Args&, Stream), const Args& a) {
  using Clock = std::chrono::steady_clock;
  const auto start = timed ? Clock::now() : Clock::time_point{};
  fn(a, stream_);
  if (ledger) {
    Ledger::Line& line = ledger->phases[phase][op];
    const Cost c = a.cost();
    line.calls++, line.cost.flops += c.flops, line.cost.read += c.read, line.cost.written += c.written;
    if (timed) line.seconds += std::chrono::duration<double>(Clock::now() - start).count();
    if (const int64_t rows = linear_rows(a); rows && (line.min_rows == 0 || rows < line.min_rows)) line.min_rows = rows;
  }
  if (check_nan && !planning() && !partly_written<Args>) {
    int i = 0;
    for (const Tensor& t : a.outputs()) {
      if (t && t.dtype == DType::f32) check_finite<float>(op, i, t);
      if (t && t.dtype == DType::f64) check_finite<double>(op, i, t);
      i++;
    }
  }
}

#define X(op, Args) template void Device::call<Args>(const char*, void (*)(const Args&, Stream), const Args&);
PARE_OPS(X)
#undef X

namespace {
template <class Args>
void nothing(const Args&, Stream) {}
void zeros(const Download& a, Stream) { std::fill_n(static_cast<char*>(a.dst), a.src.bytes(), 0); }
}  // namespace

// Everything does nothing but download, whose caller reads host memory.
static constexpr Table make_null() {
  Table t{.name = "null",
#define X(op, Args) .op = nothing<Args>,
          PARE_OPS(X)
#undef X
  };
  t.download = zeros;
  return t;
}
constinit const Table table_null = make_null();

}  // namespace pare
