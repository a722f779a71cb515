#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/rng.h"
#include "base/thread_pool.h"
#include "ops/data.h"

namespace pare {

namespace {

// [rows, cols] of the flat buffer from `first` on.
Tensor matrix(const Tensor& flat, const Parameter& first, int64_t rows, int64_t cols) {
  return flat.rows(first.offset, rows * cols).matrix(cols);
}
Tensor vector_of(const Tensor& flat, const Parameter& first, int64_t n) { return flat.rows(first.offset, n); }

// cos and sin of every position times `factor`, computed in double and rounded once; a plan, of whose time it would be
// most, goes without.
template <class T>
std::vector<T> rope_values(const ModelConfig& c, double factor) {
  const std::vector<double> inv_freq = rope_inv_freq(c);
  const int64_t half = c.head_dim / 2;
  std::vector<T> table(static_cast<size_t>(c.max_position * c.head_dim));
  for (int64_t p = 0; p < c.max_position; p++)
    for (int64_t i = 0; i < half; i++) {
      const double angle = static_cast<double>(p) * inv_freq[i];
      table[p * c.head_dim + i] = static_cast<T>(std::cos(angle) * factor);
      table[p * c.head_dim + half + i] = static_cast<T>(std::sin(angle) * factor);
    }
  return table;
}

Tensor rope_table(const char* name, const ModelConfig& c, double factor, Device& device, Arena& weights, DType stat) {
  const Tensor rope = weights.alloc(name, stat, {c.max_position, c.head_dim});
  const auto upload = [&](const auto& values) { device.upload({rope, values.data()}); };
  if (device.planning())
    device.upload({rope, nullptr});
  else if (stat == DType::f64)
    upload(rope_values<double>(c, factor));
  else
    upload(rope_values<float>(c, factor));
  return rope;
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

ParameterViews::ParameterViews(const Adapters& adapters, const Tensor& flat) : layers(adapters.layers.size()) {
  for (size_t l = 0; l < layers.size(); l++) layers[l].adapters = adapters.views(l, flat);
}

Model::Model(const ModelConfig& config, Device& device, Arena& weights, DType dtype, bool trainable)
    : Parameters(device, weights, dtype, parameters(config)), config(config) {
  const ModelConfig& c = config;
  device.expect_head_dim(dtype, c.head_dim);
  const auto add_vector = [&](const std::string& name, int64_t n) { return Parameters::add_vector(weights, name, n); };
  const auto add_weight = [&](const std::string& name, int64_t outputs, int64_t inputs) {
    return Parameters::add_weight(weights, name, outputs, inputs);
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
  complete(weights, trainable);
  rope = rope_table("rope", c, c.attention_factor(), device, weights, stat);
  rotation = c.attention_factor() == 1 ? rope : rope_table("rotation", c, 1, device, weights, stat);
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
