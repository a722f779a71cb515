#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/half.h"
#include "base/progress.h"
#include "base/rng.h"
#include "base/thread_pool.h"

namespace pare {

namespace {

constexpr int64_t kPiece = 1 << 18;  // elements of a weight that are on their way at a time

// [rows, cols] of the flat buffer from `first` on.
Tensor matrix(const Tensor& flat, const Parameter& first, int64_t rows, int64_t cols) {
  return flat.rows(first.offset, rows * cols).matrix(cols);
}
Tensor vector_of(const Tensor& flat, const Parameter& first, int64_t n) { return flat.rows(first.offset, n); }

// cos and sin of every position, computed in double and rounded once.
template <class T>
std::vector<T> rope_table(const ModelConfig& c) {
  const std::vector<double> inv_freq = rope_inv_freq(c);
  const int64_t half = c.head_dim / 2;
  std::vector<T> table(static_cast<size_t>(c.max_position * c.head_dim));
  for (int64_t p = 0; p < c.max_position; p++)
    for (int64_t i = 0; i < half; i++) {
      const double angle = static_cast<double>(p) * inv_freq[i];
      table[p * c.head_dim + i] = static_cast<T>(std::cos(angle));
      table[p * c.head_dim + half + i] = static_cast<T>(std::sin(angle));
    }
  return table;
}

}  // namespace

ParameterViews::ParameterViews(const ModelConfig& c, const std::vector<Parameter>& layout, const Tensor& flat) {
  std::map<std::string, const Parameter*> find;
  for (const Parameter& p : layout) find[p.name] = &p;
  const auto at = [&](const std::string& name) -> const Parameter& { return *find.at(name); };
  const int64_t C = c.hidden, D = c.head_dim;
  embedding = matrix(flat, at("model.embed_tokens.weight"), c.vocab, C);
  final_norm = vector_of(flat, at("model.norm.weight"), C);
  head = c.tied ? embedding : matrix(flat, at("lm_head.weight"), c.vocab, C);
  for (int64_t l = 0; l < c.layers; l++) {
    const std::string base = cat("model.layers.", l, ".");
    LayerViews v;
    v.input_norm = vector_of(flat, at(base + "input_layernorm.weight"), C);
    v.qkv = matrix(flat, at(base + "self_attn.q_proj.weight"), c.qkv_width(), C);
    if (c.qkv_bias) v.qkv_bias = vector_of(flat, at(base + "self_attn.q_proj.bias"), c.qkv_width());
    if (c.qk_norm) {
      v.q_norm = vector_of(flat, at(base + "self_attn.q_norm.weight"), D);
      v.k_norm = vector_of(flat, at(base + "self_attn.k_norm.weight"), D);
    }
    v.o = matrix(flat, at(base + "self_attn.o_proj.weight"), C, c.q_width());
    v.post_norm = vector_of(flat, at(base + "post_attention_layernorm.weight"), C);
    v.gate_up = matrix(flat, at(base + "mlp.gate_proj.weight"), 2 * c.ffn, C);
    v.down = matrix(flat, at(base + "mlp.down_proj.weight"), C, c.ffn);
    layers.push_back(v);
  }
}

Model::Model(const ModelConfig& config, Device& device, Arena& weights, DType dtype, bool trainable)
    : config(config),
      device(device),
      dtype(dtype),
      stat(dtype == DType::f64 ? DType::f64 : DType::f32),
      layout(parameters(config)),
      master(trainable && dtype == DType::bf16 ? weights.alloc("master parameters", stat, {size()}) : Tensor{}) {
  const ModelConfig& c = config;
  if (device.table().expect_head_dim) device.table().expect_head_dim(dtype, c.head_dim);
  int64_t offset = 0, largest = 0, longest = 0;
  const auto add_vector = [&](const std::string& name, int64_t n) {
    blocks.push_back({.offset = offset, .vector = weights.alloc(name, dtype, {n}), .weight = {}});
    offset += n;
    return blocks.back().vector;
  };
  const auto add_weight = [&](const std::string& name, int64_t outputs, int64_t inputs) {
    const Weight w{weights.alloc(name, dtype, {weight_panels(outputs), inputs, kPanel}), outputs};
    blocks.push_back({.offset = offset, .vector = {}, .weight = w});
    offset += w.size(), largest = std::max(largest, w.size()), longest = std::max(longest, inputs);
    return w;
  };
  embedding = add_weight("embedding", c.vocab, c.hidden);
  for (int64_t l = 0; l < c.layers; l++) {
    const std::string base = cat("layers.", l, ".");
    Layer v;
    v.input_norm = add_vector(base + "input_norm", c.hidden);
    v.qkv = add_weight(base + "qkv", c.qkv_width(), c.hidden);
    if (c.qkv_bias) v.qkv_bias = add_vector(base + "qkv_bias", c.qkv_width());
    if (c.qk_norm) v.q_norm = add_vector(base + "q_norm", c.head_dim);
    if (c.qk_norm) v.k_norm = add_vector(base + "k_norm", c.head_dim);
    v.o = add_weight(base + "o", c.hidden, c.q_width());
    v.post_norm = add_vector(base + "post_norm", c.hidden);
    v.gate_up = add_weight(base + "gate_up", 2 * c.ffn, c.hidden);
    v.down = add_weight(base + "down", c.hidden, c.ffn);
    layers.push_back(v);
  }
  final_norm = add_vector("final_norm", c.hidden);
  head = c.tied ? embedding : add_weight("head", c.vocab, c.hidden);
  expect(offset == size(), "the blocks hold ", offset, " of ", size(), " parameters");
  // Two rows more than what is moved at a time, which may begin and end within one.
  staging_ = weights.alloc("staging", dtype, {std::min(largest, kPiece) + 2 * longest});
  rope = weights.alloc("rope", stat, {c.max_position, c.head_dim});
  if (stat == DType::f64) {
    const auto table = rope_table<double>(c);
    device.upload({rope, table.data()});
  } else {
    const auto table = rope_table<float>(c);
    device.upload({rope, table.data()});
  }
}

int64_t Model::size() const { return layout.back().offset + layout.back().size; }

const ParameterBlock& Model::block_of(const Parameter& parameter) const {
  const auto after = std::upper_bound(blocks.begin(), blocks.end(), parameter.offset,
                                      [](int64_t offset, const ParameterBlock& b) { return offset < b.offset; });
  return *std::prev(after);
}

// [rows, inputs] of the staging memory.
Tensor Model::staged(int64_t rows, int64_t inputs) const { return staging_.rows(0, rows * inputs).matrix(inputs); }

void Model::set_parameters(const ParameterReader& read) {
  LongWork work(cat("setting ", size(), " parameters"), size());  // read, or drawn
  std::vector<float> host;
  std::vector<double> wide;
  std::vector<uint16_t> narrow;
  // Elements of `host` from `begin` on in the order of parameters(config), to `t` and to the master.
  const auto upload = [&](const Tensor& t, int64_t begin) {
    const void* from = host.data();
    if (dtype == DType::f64) wide.assign(host.begin(), host.end()), from = wide.data();
    if (dtype == DType::bf16) {
      narrow.resize(host.size());
      std::transform(host.begin(), host.end(), narrow.begin(), f32_to_bf16);
      from = narrow.data();
    }
    device.upload({t, from});
    if (master) device.upload({master.rows(begin, t.size()), host.data()});
    device.wait();  // so that no more than this piece is under way
  };
  for (size_t i = 0; i < layout.size(); i++) {
    const Parameter& p = layout[i];
    const ParameterBlock& b = block_of(p);
    if (b.vector) {
      host.resize(static_cast<size_t>(p.size));
      read(i, 0, p.size, host.data());
      upload(b.vector.rows(p.offset - b.offset, p.size), p.offset);
      continue;
    }
    const int64_t inputs = b.weight.inputs(), rows = p.size / inputs, first = (p.offset - b.offset) / inputs;
    const int64_t piece = std::max<int64_t>(1, kPiece / inputs);
    for (int64_t r = 0, n = 0; r < rows; r += n) {
      n = std::min(piece, rows - r);
      host.resize(static_cast<size_t>(n * inputs));
      read(i, r * inputs, n * inputs, host.data());
      upload(staged(n, inputs), p.offset + r * inputs);
      device.pack_weight({.w = b.weight, .rows = staged(n, inputs), .first = first + r});
      work.done(p.offset + (r + n) * inputs);
    }
  }
  work.done(size());
}

void Model::set_parameters(const std::vector<float>& host) {
  expect(static_cast<int64_t>(host.size()) == size(), host.size(), " parameters given to a model of ", size());
  set_parameters(flat_parameters(config, host.data()));
}

ParameterReader Model::reader() const {
  if (master)
    return [this](size_t parameter, int64_t begin, int64_t count, float* out) {
      device.download({out, master.rows(layout[parameter].offset + begin, count)});
    };
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

std::vector<float> Model::get_parameters() const {
  std::vector<float> host(static_cast<size_t>(size()));
  for (size_t i = 0; i < layout.size(); i++) reader()(i, 0, layout[i].size, host.data() + layout[i].offset);
  return host;
}

float Model::attention_scale() const { return 1 / std::sqrt(static_cast<float>(config.head_dim)); }

ParameterReader init_parameters(const ModelConfig& config, uint64_t seed, Init init) {
  return [config, layout = parameters(config), key = rng_key(seed, RngStream::init, 0), init](
             size_t parameter, int64_t begin, int64_t count, float* out) {
    const Parameter& p = layout[parameter];
    const auto ends = [&](const char* suffix) { return p.name.ends_with(suffix); };
    if (p.shape.size() == 1) return static_cast<void>(std::fill_n(out, count, ends(".bias") ? 0.f : 1.f));
    double std = config.initializer_range;
    if (init == Init::fan_in) {
      std = 1 / std::sqrt(static_cast<double>(p.shape[1]));
      if (ends("o_proj.weight") || ends("down_proj.weight")) std /= std::sqrt(2.0 * static_cast<double>(config.layers));
    }
    parallel_for(count, 1 << 10, [&](int64_t b, int64_t e) {
      Rng rng(key, parameter, 4 * static_cast<uint64_t>(begin + b));
      for (int64_t i = b; i < e; i++) out[i] = static_cast<float>(rng.normal() * std);
    });
  };
}

}  // namespace pare
