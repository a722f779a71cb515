#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace pare {

// For YaRN: the part of the factor that pair `i` gets, from 0 at the first of the pairs that blend to 1 at the last.
static double yarn_ramp(const ModelConfig& c, double i) {
  const RopeYarn& r = *c.yarn;
  const double d = static_cast<double>(c.head_dim);
  const auto pair_of = [&](double turns) {
    return d * std::log(r.original_max_position_embeddings / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(c.rope_theta));
  };
  double low = pair_of(r.beta_fast), high = pair_of(r.beta_slow);
  if (r.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, d - 1);
  if (low == high) high += 0.001;
  return std::clamp((i - low) / (high - low), 0.0, 1.0);
}

std::vector<double> rope_inv_freq(const ModelConfig& config) {
  std::vector<double> frequency(static_cast<size_t>(config.head_dim / 2));
  for (size_t i = 0; i < frequency.size(); i++) {
    double& f = frequency[i];
    f = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim));
    if (config.yarn) {
      const double ramp = yarn_ramp(config, static_cast<double>(i));
      f = f / config.yarn->factor * ramp + f * (1 - ramp);
    }
    if (!config.rope_scaling) continue;
    const RopeLlama3& r = *config.rope_scaling;
    const double turns = r.original_max_position_embeddings * f / (2 * std::numbers::pi);  // original / wavelength
    if (turns < r.low_freq_factor) {
      f /= r.factor;
    } else if (turns <= r.high_freq_factor) {
      const double keep = (turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
      f = (1 - keep) * f / r.factor + keep * f;
    }
  }
  return frequency;
}

std::vector<Parameter> parameters(const ModelConfig& c) {
  std::vector<Parameter> list;
  int64_t offset = 0;
  auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    int64_t size = 1;
    for (int64_t n : shape) size *= n;
    list.push_back({name, std::move(shape), offset, size});
    offset += size;
  };
  add("model.embed_tokens.weight", {c.vocab, c.hidden});
  for (int64_t i = 0; i < c.layers; i++) {
    const std::string layer = cat("model.layers.", i, "."), attention = layer + "self_attn.";
    add(layer + "input_layernorm.weight", {c.hidden});
    add(attention + "q_proj.weight", {c.q_width(), c.hidden});
    add(attention + "k_proj.weight", {c.kv_width(), c.hidden});
    add(attention + "v_proj.weight", {c.kv_width(), c.hidden});
    if (c.qkv_bias) {
      add(attention + "q_proj.bias", {c.q_width()});
      add(attention + "k_proj.bias", {c.kv_width()});
      add(attention + "v_proj.bias", {c.kv_width()});
    }
    if (c.qk_norm) {
      add(attention + "q_norm.weight", {c.head_dim});
      add(attention + "k_norm.weight", {c.head_dim});
    }
    add(attention + "o_proj.weight", {c.hidden, c.q_width()});
    add(layer + "post_attention_layernorm.weight", {c.hidden});
    add(layer + "mlp.gate_proj.weight", {c.ffn, c.hidden});
    add(layer + "mlp.up_proj.weight", {c.ffn, c.hidden});
    add(layer + "mlp.down_proj.weight", {c.hidden, c.ffn});
  }
  add("model.norm.weight", {c.hidden});
  if (!c.tied) add("lm_head.weight", {c.vocab, c.hidden});
  return list;
}

ParameterReader flat_parameters(const ModelConfig& config, const float* values) {
  return [layout = parameters(config), values](size_t parameter, int64_t begin, int64_t count, float* out) {
    std::copy_n(values + layout[parameter].offset + begin, count, out);
  };
}

}  // namespace pare
