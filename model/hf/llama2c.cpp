#include "model/hf/llama2c.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/error.h"

namespace pare {
namespace {

static_assert(std::endian::native == std::endian::little, "checkpoints are read as they lie in the file");

using Header = std::array<int32_t, 7>;

ModelConfig config_of(const Header& header, const std::string& path) {
  constexpr int32_t kMagic = 0x616b3432;  // "ak42", later versions
  if (header[0] == kMagic)
    fail(path, ": a llama2.c checkpoint of version ", header[1], "; expected version 0 (export.py --version 0)");
  const auto [dim, ffn, layers, heads, kv_heads, vocab, positions] = header;
  constexpr int32_t kMost = 1 << 20;  // keeps the products below within int64
  for (int32_t n : {dim, ffn, layers, heads, kv_heads, positions}) {
    if (n < 1 || n > kMost) fail(path, ": not a llama2.c checkpoint: a size of ", n, " in its header");
  }
  if (vocab == 0 || vocab == INT32_MIN) fail(path, ": not a llama2.c checkpoint: a vocabulary of ", vocab);
  if (dim % (2 * heads) != 0 || heads % kv_heads != 0)
    fail(path, ": not a llama2.c checkpoint: ", heads, " heads and ", kv_heads, " kv heads in ", dim, " dimensions");
  ModelConfig c;
  c.model_type = "llama";
  c.hidden = dim;
  c.layers = layers;
  c.heads = heads;
  c.kv_heads = kv_heads;
  c.head_dim = dim / heads;
  c.ffn = ffn;
  c.vocab = std::abs(vocab);
  c.max_position = positions;
  c.rms_eps = 1e-5f;
  c.tied = vocab > 0;
  c.eos_ids = {1, 2};
  c.bos_id = 1;
  return c;
}

// A tensor in the file: its place (in floats), and for q and k the heads whose rows are reordered.
struct Source {
  int64_t offset, size, rotary_heads;
};

// Returns the number of floats after the header.
int64_t floats_of(const ModelConfig& c) {
  const int64_t attention = 2 * c.hidden * (c.q_width() + c.kv_width()), mlp = 3 * c.hidden * c.ffn;
  return (c.tied ? 1 : 2) * c.vocab * c.hidden + c.layers * (2 * c.hidden + attention + mlp) + c.hidden +
         c.max_position * c.head_dim;
}

// Returns the tensors of the file by their Hugging Face names.
std::map<std::string, Source> sources_of(const ModelConfig& c) {
  std::map<std::string, Source> sources;
  int64_t at = 0;
  const auto one = [&](const std::string& name, int64_t size, int64_t rotary_heads = 0) {
    sources[name] = {at, size, rotary_heads};
    at += size;
  };
  const auto each_layer = [&](const std::string& name, int64_t size, int64_t rotary_heads = 0) {
    for (int64_t l = 0; l < c.layers; l++) one(cat("model.layers.", l, ".", name, ".weight"), size, rotary_heads);
  };
  one("model.embed_tokens.weight", c.vocab * c.hidden);
  each_layer("input_layernorm", c.hidden);
  each_layer("self_attn.q_proj", c.q_width() * c.hidden, c.heads);
  each_layer("self_attn.k_proj", c.kv_width() * c.hidden, c.kv_heads);
  each_layer("self_attn.v_proj", c.kv_width() * c.hidden);
  each_layer("self_attn.o_proj", c.hidden * c.q_width());
  each_layer("post_attention_layernorm", c.hidden);
  each_layer("mlp.gate_proj", c.ffn * c.hidden);
  each_layer("mlp.down_proj", c.hidden * c.ffn);
  each_layer("mlp.up_proj", c.ffn * c.hidden);
  one("model.norm.weight", c.hidden);
  at += c.max_position * c.head_dim;  // cosines and sines
  if (!c.tied) one("lm_head.weight", c.vocab * c.hidden);
  expect(at == floats_of(c), "tensors of a llama2.c checkpoint have ", at, " floats, not ", floats_of(c));
  return sources;
}

void copy(const float* from, const Source& source, const ModelConfig& c, float* to) {
  if (source.rotary_heads == 0) {
    std::copy_n(from, source.size, to);
    return;
  }
  for (int64_t h = 0; h < source.rotary_heads; h++) {
    for (int64_t row = 0; row < c.head_dim; row++) {
      const int64_t half = row % 2, i = row / 2;  // row 2i + half becomes row i + half D/2
      const int64_t place = h * c.head_dim + half * (c.head_dim / 2) + i;
      std::copy_n(from + (h * c.head_dim + row) * c.hidden, c.hidden, to + place * c.hidden);
    }
  }
}

}  // namespace

Llama2cCheckpoint load_llama2c(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  std::error_code ignored;
  if (!in || std::filesystem::is_directory(path, ignored)) fail(path, ": cannot be read; expected a checkpoint file");
  const int64_t bytes = in.tellg();
  in.seekg(0);
  Header header;
  if (!in.read(reinterpret_cast<char*>(header.data()), sizeof header))
    fail(path, ": not a llama2.c checkpoint: its header has ", sizeof header, " bytes, this file ", bytes);
  Llama2cCheckpoint checkpoint{config_of(header, path), {}};
  const ModelConfig& config = checkpoint.config;
  const int64_t total = floats_of(config), rest = bytes - static_cast<int64_t>(sizeof header);
  if (rest % 4 != 0 || rest / 4 != total)
    fail(path, ": ", rest, " bytes after the header, expected ", total, " floats (4 bytes each) for ", config.layers,
         " layers of ", config.hidden, " dimensions and a vocabulary of ", config.vocab,
         "; the file is cut or not a llama2.c checkpoint");
  std::vector<float> file(static_cast<size_t>(total));
  if (!in.read(reinterpret_cast<char*>(file.data()), total * 4)) fail(path, ": cannot be read");
  const std::map<std::string, Source> sources = sources_of(config);
  const std::vector<Parameter> layout = parameters(config);
  checkpoint.weights.resize(static_cast<size_t>(layout.back().offset + layout.back().size));
  for (const Parameter& p : layout) {
    const auto source = sources.find(p.name);
    expect(source != sources.end() && source->second.size == p.size, p.name, " is not in a llama2.c checkpoint");
    copy(file.data() + source->second.offset, source->second, config, checkpoint.weights.data() + p.offset);
  }
  return checkpoint;
}

}  // namespace pare
