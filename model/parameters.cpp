#include "model/parameters.h"

#include <algorithm>

#include "base/half.h"
#include "base/progress.h"
#include "ops/data.h"

namespace pare {

constexpr int64_t kPiece = 1 << 18;                         // elements of a weight that are on their way at a time
constexpr int64_t kHashRun = 1 << 14, kHashRuns = 1 << 10;  // elements of a run that is hashed; runs at a time

Parameters::Parameters(Device& device, Arena& weights, DType dtype, std::vector<Parameter> names)
    : device(device),
      dtype(dtype),
      stat(dtype == DType::f64 ? DType::f64 : DType::f32),
      layout(std::move(names)),
      start_(weights.mark()) {}

int64_t Parameters::next_offset() const { return blocks.empty() ? 0 : blocks.back().offset + blocks.back().size(); }

Tensor Parameters::add_vector(Arena& weights, const std::string& name, int64_t n) {
  blocks.push_back({.offset = next_offset(), .vector = {}, .weight = {}, .place = place(weights)});
  blocks.back().vector = weights.alloc(name, dtype, {n});
  return blocks.back().vector;
}

Weight Parameters::add_weight(Arena& weights, const std::string& name, int64_t outputs, int64_t inputs, double rate) {
  blocks.push_back({.offset = next_offset(), .vector = {}, .weight = {}, .rate = rate, .place = place(weights)});
  blocks.back().weight = {weights.alloc(name, dtype, {weight_panels(outputs), inputs, kPanel}), outputs};
  return blocks.back().weight;
}

void Parameters::complete(Arena& weights, bool trainable) {
  expect(next_offset() == size(), "the blocks hold ", next_offset(), " of ", size(), " parameters");
  const ParameterBlock& first = blocks.front();
  packed = make_tensor((first.vector ? first.vector : first.weight.packed).data, DType::u8, {place(weights)});
  cuts = part_cuts(blocks, device.comm.ranks());
  if (trainable && dtype == DType::bf16) master = weights.alloc("master parameters", stat, {own()});
  int64_t largest = 0, longest = 0;
  for (const ParameterBlock& b : blocks)
    if (!b.vector) {
      largest = std::max(largest, b.size());
      longest = std::max(longest, b.weight.inputs());
    }
  // Two rows more than what is moved at a time, which may begin and end within one.
  staging_ = weights.alloc("staging", dtype, {std::min(largest, kPiece) + 2 * longest});
  if (trainable) hashes_ = weights.alloc("hashes", DType::i32, {std::min(kHashRuns, size() / kHashRun + 1), 2});
}

int64_t Parameters::size() const { return layout.back().offset + layout.back().size; }

const ParameterBlock& Parameters::block_of(const Parameter& parameter) const {
  const auto after = std::upper_bound(blocks.begin(), blocks.end(), parameter.offset,
                                      [](int64_t offset, const ParameterBlock& b) { return offset < b.offset; });
  return *std::prev(after);
}

// [rows, inputs] of the staging memory.
Tensor Parameters::staged(int64_t rows, int64_t inputs) const { return staging_.rows(0, rows * inputs).matrix(inputs); }

void Parameters::set_parameters(const ParameterReader& read, bool in_parts) {
  ProgressLine work(cat("setting ", size(), " parameters"), size());  // read, or drawn
  const int64_t from = in_parts ? own_begin() : 0, to = in_parts ? own_end() : size();
  std::vector<float> host;
  std::vector<double> wide;
  std::vector<uint16_t> narrow;
  // Elements of `host` from `begin` on in the order of the layout, to `t` and to the master.
  const auto upload = [&](const Tensor& t, int64_t begin) {
    const void* from = host.data();
    if (dtype == DType::f64) {
      wide.assign(host.begin(), host.end());
      from = wide.data();
    }
    if (dtype == DType::bf16) {
      narrow.resize(host.size());
      std::transform(host.begin(), host.end(), narrow.begin(), f32_to_bf16);
      from = narrow.data();
    }
    device.upload({t, from});
    const int64_t first = std::max(begin, own_begin()), last = std::min(begin + t.size(), own_end());
    if (master && first < last)
      device.upload({master.rows(first - own_begin(), last - first), host.data() + (first - begin)});
    device.wait();  // so that no more than this piece is under way
  };
  for (size_t i = 0; i < layout.size(); i++) {
    const Parameter& p = layout[i];
    const ParameterBlock& b = block_of(p);
    const int64_t begin = std::max(from, p.offset) - p.offset, end = std::min(to, p.offset + p.size) - p.offset;
    if (begin >= end) continue;
    if (b.vector) {  // whole, as cuts leave it
      host.resize(static_cast<size_t>(p.size));
      read(i, 0, p.size, host.data());
      upload(b.vector.rows(p.offset - b.offset, p.size), p.offset);
      continue;
    }
    const int64_t inputs = b.weight.inputs(), first = (p.offset - b.offset) / inputs, rows = end / inputs;
    const int64_t piece = std::max<int64_t>(1, kPiece / inputs);
    for (int64_t r = begin / inputs, n = 0; r < rows; r += n) {
      n = std::min(piece, rows - r);
      host.resize(static_cast<size_t>(n * inputs));
      read(i, r * inputs, n * inputs, host.data());
      upload(staged(n, inputs), p.offset + r * inputs);
      device.pack_weight({.w = b.weight, .rows = staged(n, inputs), .first = first + r});
      work.done(p.offset + (r + n) * inputs);
    }
  }
  if (in_parts) gather_parts();
  work.done(size());
}

void Parameters::gather_parts() const {
  Comm& comm = device.comm;
  if (comm.ranks() == 1) return;
  const auto place = [&](int64_t cut) { return place_of(blocks, cut, packed.size()); };
  std::vector<int64_t> counts;
  for (size_t r = 1; r < cuts.size(); r++) counts.push_back(place(cuts[r]) - place(cuts[r - 1]));
  device.all_gather({.y = packed, .counts = counts, .comm = &comm});
}

void Parameters::set_parameters(const std::vector<float>& host) {
  expect(static_cast<int64_t>(host.size()) == size(), host.size(), " parameters given to ", size());
  set_parameters([&](size_t parameter, int64_t begin, int64_t count, float* out) {
    std::copy_n(host.data() + layout[parameter].offset + begin, count, out);
  });
}

ParameterReader Parameters::reader() const {
  if (master)
    return [this](size_t parameter, int64_t begin, int64_t count, float* out) {
      device.download({out, master.rows(layout[parameter].offset + begin - own_begin(), count)});
    };
  return rounded();
}

ParameterReader Parameters::rounded() const {
  const auto download = [this](const Tensor& t, float* out) {
    if (dtype == DType::f32) return device.download({out, t});
    if (dtype == DType::bf16) {
      std::vector<uint16_t> narrow(static_cast<size_t>(t.size()));
      device.download({narrow.data(), t});
      std::transform(narrow.begin(), narrow.end(), out, bf16_to_f32);
      return;
    }
    std::vector<double> wide(static_cast<size_t>(t.size()));
    device.download({wide.data(), t});
    std::copy(wide.begin(), wide.end(), out);
  };
  return [this, download](size_t parameter, int64_t begin, int64_t count, float* out) {
    const ParameterBlock& b = block_of(layout[parameter]);
    const int64_t first = layout[parameter].offset - b.offset + begin, end = first + count;
    if (b.vector) return download(b.vector.rows(first, count), out);
    const int64_t inputs = b.weight.inputs(), most = staging_.size() / inputs;
    std::vector<float> rows;
    for (int64_t e = first; e < end;) {
      const int64_t row = e / inputs, n = std::min(most, (end - 1) / inputs + 1 - row);
      const int64_t stop = std::min(end, (row + n) * inputs);
      device.unpack_weight({.rows = staged(n, inputs), .w = b.weight, .first = row});
      rows.resize(static_cast<size_t>(n * inputs));
      download(staged(n, inputs), rows.data());
      out = std::copy(rows.begin() + (e - row * inputs), rows.begin() + (stop - row * inputs), out);
      e = stop;
    }
  };
}

std::vector<float> Parameters::get_parameters() const {
  std::vector<float> host(static_cast<size_t>(size()));
  for (size_t i = 0; i < layout.size(); i++) reader()(i, 0, layout[i].size, host.data() + layout[i].offset);
  return host;
}

// Returns the hash of elements that follow one another.
uint64_t Parameters::hash(const Tensor& x, uint64_t first) const {
  uint64_t sum = 0;
  std::vector<uint32_t> words;
  const int64_t most = hashes_.shape[0] * kHashRun;
  for (int64_t begin = 0; begin < x.size(); begin += most) {
    const HashRuns a{.hash = hashes_,
                     .x = x.rows(begin, std::min(most, x.size() - begin)),
                     .run = kHashRun,
                     .first = first + static_cast<uint64_t>(begin)};
    const Tensor hash = hashes_.rows(0, a.runs());
    device.hash_runs({.hash = hash, .x = a.x, .run = a.run, .first = a.first});
    words.resize(static_cast<size_t>(hash.size()));
    device.download({words.data(), hash});
    for (size_t i = 0; i < words.size(); i += 2) sum += uint64_t{words[i + 1]} << 32 | words[i];
  }
  return sum;
}

uint64_t Parameters::hash(uint64_t first) const {
  if (master) return hash(master, first + static_cast<uint64_t>(own_begin()));
  uint64_t sum = 0;
  for (const ParameterBlock& b : blocks_between(blocks, own_begin(), own_end())) {
    const auto offset = first + static_cast<uint64_t>(b.offset);
    if (b.vector) {
      sum += hash(b.vector, offset);
      continue;
    }
    const int64_t inputs = b.weight.inputs(), rows = b.weight.outputs(), most = staging_.size() / inputs;
    for (int64_t row = 0, n = 0; row < rows; row += n) {
      n = std::min(most, rows - row);
      device.unpack_weight({.rows = staged(n, inputs), .w = b.weight, .first = row});
      sum += hash(staged(n, inputs).flat(), offset + static_cast<uint64_t>(row * inputs));
    }
  }
  return sum;
}

std::vector<double> download_stat(Device& device, const Tensor& t) {
  std::vector<double> values(static_cast<size_t>(t.size()));
  if (t.dtype == DType::f64) {
    device.download({values.data(), t});
  } else {
    std::vector<float> narrow(values.size());
    device.download({narrow.data(), t});
    values.assign(narrow.begin(), narrow.end());
  }
  return values;
}

}  // namespace pare
