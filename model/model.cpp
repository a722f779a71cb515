#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/half.h"
#include "base/rng.h"

namespace pare {

namespace {

// [rows, cols] of the flat buffer from `first` on.
Tensor matrix(const Tensor& flat, const Parameter& first, int64_t rows, int64_t cols) {
  Tensor t = flat.rows(first.offset, rows * cols);
  t.rank = 2;
  t.shape = {rows, cols};
  t.stride = {cols, 1};
  return t;
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
      flat(weights.alloc("parameters", dtype, {layout.back().offset + layout.back().size})),
      master(trainable && dtype == DType::bf16 ? weights.alloc("master parameters", stat, {flat.size()}) : Tensor{}),
      views(config, layout, flat) {
  const auto packed = [&](const std::string& name, const Tensor& w) {
    Weight weight{.w = w, .packed = {}, .packed_t = {}};
    weight.packed = weights.alloc(name + ".packed", dtype, {packed_size(w.shape[0], w.shape[1])});
    if (trainable) weight.packed_t = weights.alloc(name + ".packed_t", dtype, {packed_size(w.shape[1], w.shape[0])});
    return weight;
  };
  head = packed("head", views.head);
  for (size_t l = 0; l < views.layers.size(); l++) {
    const LayerViews& v = views.layers[l];
    const std::string base = cat("layers.", l, ".");
    layers.push_back({.qkv = packed(base + "qkv", v.qkv),
                      .o = packed(base + "o", v.o),
                      .gate_up = packed(base + "gate_up", v.gate_up),
                      .down = packed(base + "down", v.down)});
  }
  rope = weights.alloc("rope", stat, {config.max_position, config.head_dim});
  if (stat == DType::f64) {
    const auto table = rope_table<double>(config);
    device.upload({rope, table.data()});
  } else {
    const auto table = rope_table<float>(config);
    device.upload({rope, table.data()});
  }
}

void Model::set_parameters(const std::vector<float>& host) {
  expect(static_cast<int64_t>(host.size()) == flat.size(), host.size(), " parameters given to a model of ",
         flat.size());
  if (dtype == DType::f64) {
    device.upload({flat, std::vector<double>(host.begin(), host.end()).data()});
  } else if (dtype == DType::bf16) {
    std::vector<uint16_t> narrow(host.size());
    std::transform(host.begin(), host.end(), narrow.begin(), f32_to_bf16);
    device.upload({flat, narrow.data()});
    if (master) device.upload({master, host.data()});
  } else {
    device.upload({flat, host.data()});
  }
  refresh();
  device.wait();
}

std::vector<float> Model::get_parameters() const {
  std::vector<float> host(flat.size());
  if (dtype == DType::f64) {
    std::vector<double> wide(flat.size());
    device.download({wide.data(), flat});
    host.assign(wide.begin(), wide.end());
  } else if (dtype == DType::bf16 && !master) {
    std::vector<uint16_t> narrow(flat.size());
    device.download({narrow.data(), flat});
    std::transform(narrow.begin(), narrow.end(), host.begin(), bf16_to_f32);
  } else {
    device.download({host.data(), master ? master : flat});
  }
  return host;
}

void Model::refresh() {
  device.prepare_weight({head});
  for (const Layer& l : layers)
    for (const Weight& w : {l.qkv, l.o, l.gate_up, l.down}) device.prepare_weight({w});
}

float Model::attention_scale() const { return 1 / std::sqrt(static_cast<float>(config.head_dim)); }

std::vector<float> init_parameters(const ModelConfig& config, uint64_t seed, Init init) {
  const std::vector<Parameter> layout = parameters(config);
  std::vector<float> host(layout.back().offset + layout.back().size);
  for (size_t i = 0; i < layout.size(); i++) {
    const Parameter& p = layout[i];
    Rng rng(rng_key(seed, RngStream::init, 0), i);
    const auto ends = [&](const char* suffix) { return p.name.ends_with(suffix); };
    if (p.shape.size() == 1) {
      for (int64_t j = 0; j < p.size; j++) host[p.offset + j] = ends(".bias") ? 0.f : 1.f;
      continue;
    }
    double std = config.initializer_range;
    if (init == Init::fan_in) {
      std = 1 / std::sqrt(static_cast<double>(p.shape[1]));
      if (ends("o_proj.weight") || ends("down_proj.weight")) std /= std::sqrt(2.0 * static_cast<double>(config.layers));
    }
    for (int64_t j = 0; j < p.size; j++) host[p.offset + j] = static_cast<float>(rng.normal() * std);
  }
  return host;
}

}  // namespace pare
