#include "model/lora.h"

#include <cmath>

#include "base/rng.h"
#include "base/thread_pool.h"

namespace pare {

std::string projection_name(int p) {
  static constexpr std::array<const char*, kProjections> names = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                                                  "gate_proj", "up_proj", "down_proj"};
  return names[static_cast<size_t>(p)];
}

std::string projection_path(int p) {
  return (p < static_cast<int>(Projection::gate) ? "self_attn." : "mlp.") + projection_name(p);
}

static std::array<int64_t, kProjections> outputs_of(const ModelConfig& c) {
  return {c.q_width(), c.kv_width(), c.kv_width(), c.hidden, c.ffn, c.ffn, c.hidden};
}

static int64_t inputs_of(const ModelConfig& c, int p) {
  return p == static_cast<int>(Projection::o)      ? c.q_width()
         : p == static_cast<int>(Projection::down) ? c.ffn
                                                   : c.hidden;
}

std::vector<Parameter> adapter_parameters(const ModelConfig& c, const LoraSpec& spec) {
  std::vector<Parameter> all;
  int64_t offset = 0;
  const auto add = [&](const std::string& name, int64_t rows, int64_t columns) {
    all.push_back({name, {rows, columns}, offset, rows * columns});
    offset += rows * columns;
  };
  for (int64_t l = 0; l < c.layers; l++)
    for (int p = 0; p < kProjections; p++) {
      if (!spec.targets[p]) continue;
      const std::string module = cat("model.layers.", l, ".", projection_path(p));
      add(module + ".lora_A.weight", spec.rank, inputs_of(c, p));
      add(module + ".lora_B.weight", outputs_of(c)[p], spec.rank);
    }
  return all;
}

ParameterReader init_adapters(const ModelConfig& config, const LoraSpec& spec, uint64_t seed) {
  return [layout = adapter_parameters(config, spec), key = rng_key(seed, RngStream::lora, 0)](
             size_t parameter, int64_t begin, int64_t count, float* out) {
    if (parameter % 2 == 1) return static_cast<void>(std::fill_n(out, count, 0.f));
    const double bound = 1 / std::sqrt(static_cast<double>(layout[parameter].shape[1]));
    parallel_for(count, 1 << 10, [&](int64_t b, int64_t e) {
      Rng rng(key, parameter, 2 * static_cast<uint64_t>(begin + b));
      for (int64_t i = b; i < e; i++) out[i] = static_cast<float>((2 * rng.uniform() - 1) * bound);
    });
  };
}

Adapters::Adapters(const ModelConfig& config, const LoraSpec& spec, Device& device, Arena& weights, DType dtype,
                   bool trainable)
    : Parameters(device, weights, dtype, adapter_parameters(config, spec)),
      spec(spec),
      layers(static_cast<size_t>(config.layers)),
      outputs_(outputs_of(config)) {
  for (size_t l = 0; l < layers.size(); l++)
    for (int p = 0; p < kProjections; p++) {
      if (!spec.targets[p]) continue;
      const std::string name = cat("layers.", l, ".", projection_name(p));
      layers[l][p].a = add_weight(weights, name + ".lora_A", spec.rank, inputs_of(config, p));
      layers[l][p].b = add_weight(weights, name + ".lora_B", outputs_[p], spec.rank, spec.scale());
    }
  complete(weights, trainable);
}

AdapterBuffers Adapters::buffers(Arena& arena, int64_t rows) const {
  AdapterBuffers u;
  for (int p = 0; p < kProjections; p++)
    if (spec.targets[p]) u[p] = arena.alloc(projection_name(p) + ".lora_A x", dtype, {rows, spec.rank});
  return u;
}

AdapterViews Adapters::views(size_t layer, const Tensor& flat) const {
  AdapterViews g;
  size_t block = 0;  // of the layout: A and B of each target
  for (int p = 0; p < kProjections; p++) block += 2 * spec.targets[p];
  block *= layer;
  const auto next = [&] {
    const ParameterBlock& b = blocks[block++];
    return flat.rows(b.offset, b.size()).matrix(b.weight.inputs());
  };
  for (int p = 0; p < kProjections; p++)
    if (spec.targets[p]) {
      g[p].a = next();
      g[p].b = next();
    }
  return g;
}

void Adapters::forward(int layer, std::initializer_list<Projection> side_by_side, const Tensor& x,
                       const AdapterBuffers& u, const LinearParts& parts, const Tensor& y) const {
  int64_t column = 0;
  for (const Projection projection : side_by_side) {
    const auto p = static_cast<size_t>(projection);
    const int64_t first = column;
    column += outputs_[p];
    if (!spec.targets[p]) continue;
    const Adapter& w = layers[layer][p];
    device.linear_fwd({.y = u[p], .x = x, .w = w.a, .bias = {}, .residual = {}, .parts = parts});
    if (!y) continue;
    const Tensor part = y.columns(first, outputs_[p]);
    device.linear_fwd({.y = part, .x = u[p], .w = w.b, .bias = {}, .residual = part});
  }
}

void Adapters::backward(int layer, std::initializer_list<Projection> side_by_side, const AdapterViews& g,
                        const Tensor& x, const AdapterBuffers& u, const Tensor& dy, const Tensor& dx,
                        Arena& scratch) const {
  int64_t column = 0;
  for (const Projection projection : side_by_side) {
    const auto p = static_cast<size_t>(projection);
    const Tensor part = dy.columns(column, outputs_[p]);
    column += outputs_[p];
    if (!spec.targets[p]) continue;
    const Adapter& w = layers[layer][p];
    const ArenaScope scope(scratch);
    const Tensor du = scratch.alloc("d lora_A x", dtype, {dy.shape[0], spec.rank});
    device.linear_bwd_weight({.dw = g[p].b, .dbias = {}, .dy = part, .x = u[p]});
    device.linear_bwd_input({.dx = du, .dy = part, .w = w.b, .accumulate = false});
    device.linear_bwd_weight({.dw = g[p].a, .dbias = {}, .dy = du, .x = x});
    device.linear_bwd_input({.dx = dx, .dy = du, .w = w.a, .accumulate = true});
  }
}

}  // namespace pare
