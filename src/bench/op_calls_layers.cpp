// Data movement, weights, embedding, norms, linear layers, RoPE, SwiGLU, optimizer.
#include <algorithm>
#include <memory>

#include "base/rng.h"
#include "bench/op_call.h"

namespace pare {

namespace {

using detail::op_call;

const Dim kRows{"N", 4096, "rows (tokens)"};
const Dim kWidth{"C", 1536, "model width"};
const Dim kVocabulary{"V", 151936, "vocabulary"};

// Random row numbers below n.
Tensor random_rows(Operands& o, int64_t count, int64_t n) {
  Rng rng(rng_key(3, RngStream::test, 0));
  return o.indices({count}, [&](int64_t) { return rng.below(static_cast<uint32_t>(n)); });
}

void add_data(std::vector<OpBench>& list) {
  const Dim bytes{"n", 1 << 24, "bytes"};
  list.push_back({"upload", {bytes}, [](Operands& o, const Dims& d) {
                    const auto host = std::make_shared<std::vector<char>>(d["n"], 1);
                    const Upload a{o.bytes(d["n"]), host->data()};
                    return OpCall{[&device = o.device, host, a] { device.upload(a); }, a.cost()};
                  }});
  list.push_back({"download", {bytes}, [](Operands& o, const Dims& d) {
                    const auto host = std::make_shared<std::vector<char>>(d["n"]);
                    const Download a{host->data(), o.bytes(d["n"])};
                    o.device.zero({a.src});
                    return OpCall{[&device = o.device, host, a] { device.download(a); }, a.cost()};
                  }});
  list.push_back(
      {"zero", {bytes}, [](Operands& o, const Dims& d) { return op_call(o, &Device::zero, Zero{o.bytes(d["n"])}); }});
  list.push_back({"accumulate", {{"n", 1 << 24, "elements"}}, [](Operands& o, const Dims& d) {
                    return op_call(o, &Device::accumulate, Accumulate{o.stat({d["n"]}), o.stat({d["n"]})});
                  }});
  const std::vector<Dim> rows = {{"R", 1024, "rows that are moved"}, {"N", 4096, "rows there are"}, kWidth};
  list.push_back({"scatter_add_rows", rows, [](Operands& o, const Dims& d) {
                    return op_call(o, &Device::scatter_add_rows,
                                   ScatterAddRows{o.act({d["N"], d["C"]}), o.act({d["R"], d["C"]}),
                                                  random_rows(o, d["R"], d["N"])});
                  }});
}

void add_weights(std::vector<OpBench>& list) {
  const std::vector<Dim> shape = {{"N", 17920, "outputs"}, {"K", 1536, "inputs"}};
  list.push_back(
      {"pack_weight", shape, [](Operands& o, const Dims& d) {
         return op_call(o, &Device::pack_weight, PackWeight{o.weight(d["N"], d["K"]), o.act({d["N"], d["K"]}), 0});
       }});
  list.push_back(
      {"unpack_weight", shape, [](Operands& o, const Dims& d) {
         return op_call(o, &Device::unpack_weight, UnpackWeight{o.act({d["N"], d["K"]}), o.weight(d["N"], d["K"]), 0});
       }});
  const std::vector<Dim> table = {kRows, kWidth, kVocabulary};
  list.push_back({"embedding_fwd", table, [](Operands& o, const Dims& d) {
                    return op_call(o, &Device::embedding_fwd,
                                   EmbeddingFwd{o.act({d["N"], d["C"]}), o.weight(d["V"], d["C"]),
                                                random_rows(o, d["N"], d["V"])});
                  }});
  list.push_back({"embedding_bwd", table, [](Operands& o, const Dims& d) {
                    return op_call(o, &Device::embedding_bwd,
                                   EmbeddingBwd{o.stat({d["V"], d["C"]}), o.act({d["N"], d["C"]}),
                                                random_rows(o, d["N"], d["V"])});
                  }});
}

void add_norms(std::vector<OpBench>& list) {
  const std::vector<Dim> shape = {kRows, kWidth};
  list.push_back({"rmsnorm_fwd", shape, [](Operands& o, const Dims& d) {
                    const Tensor y = o.act({d["N"], d["C"]}), x = o.act({d["N"], d["C"]});
                    return op_call(o, &Device::rmsnorm_fwd, RmsnormFwd{y, o.stat({d["N"]}), x, o.act({d["C"]}), 1e-6f});
                  }});
  list.push_back(
      {"rmsnorm_bwd", shape, [](Operands& o, const Dims& d) {
         const auto rows = [&] { return o.act({d["N"], d["C"]}); };
         const Tensor dx = rows(), dy = rows(), x = rows(), rstd = o.positive({d["N"]});
         return op_call(o, &Device::rmsnorm_bwd, RmsnormBwd{dx, o.stat({d["C"]}), dy, x, o.act({d["C"]}), rstd, false});
       }});
}

void add_linear(std::vector<OpBench>& list) {
  const Dim m{"M", 256, "rows (tokens)"}, n{"N", 17920, "outputs"}, k{"K", 1536, "inputs"};
  const Dim bias{"bias", 0, "1: with a bias", 0};
  list.push_back({"linear_fwd",
                  {m, n, k, bias, {"residual", 0, "1: adds a residual", 0}, kTensorKernel},
                  [](Operands& o, const Dims& d) {
                    choose_tensor_kernel(o, d);
                    LinearFwd a{o.act({d["M"], d["N"]}), o.act({d["M"], d["K"]}), o.weight(d["N"], d["K"]), {}, {}};
                    if (d["bias"]) a.bias = o.act({d["N"]});
                    if (d["residual"]) a.residual = o.act({d["M"], d["N"]});
                    return op_call(o, &Device::linear_fwd, a);
                  }});
  list.push_back({"linear_bwd_input",
                  {m, n, k, {"accumulate", 0, "1: adds to dx", 0}, kTensorKernel},
                  [](Operands& o, const Dims& d) {
                    choose_tensor_kernel(o, d);
                    return op_call(o, &Device::linear_bwd_input,
                                   LinearBwdInput{o.act({d["M"], d["K"]}), o.act({d["M"], d["N"]}),
                                                  o.weight(d["N"], d["K"]), d["accumulate"] != 0});
                  }});
  list.push_back({"linear_bwd_weight", {m, n, k, bias, kTensorKernel}, [](Operands& o, const Dims& d) {
                    choose_tensor_kernel(o, d);
                    LinearBwdWeight a{o.stat({d["N"], d["K"]}), {}, o.act({d["M"], d["N"]}), o.act({d["M"], d["K"]})};
                    if (d["bias"]) a.dbias = o.stat({d["N"]});
                    return op_call(o, &Device::linear_bwd_weight, a);
                  }});
}

RopeFwd rope(Operands& o, const Dims& d) {
  return {o.act({d["N"], d["H"], d["D"]}), o.stat({d["N"], d["D"]}), o.indices({d["N"]}, [](int64_t i) { return i; })};
}

Tensor qk_heads(Operands& o, const Dims& d) { return o.act({d["N"], d["H"] + d["K"], d["D"]}); }

void add_rope_and_swiglu(std::vector<OpBench>& list) {
  const std::vector<Dim> heads = {kRows, {"H", 14, "heads, of queries and keys"}, {"D", 128, "head dim, even"}};
  list.push_back(
      {"rope_fwd", heads, [](Operands& o, const Dims& d) { return op_call(o, &Device::rope_fwd, rope(o, d)); }});
  list.push_back({"rope_bwd", heads, [](Operands& o, const Dims& d) {
                    const RopeFwd a = rope(o, d);
                    return op_call(o, &Device::rope_bwd, RopeBwd{a.x, a.table, a.pos});
                  }});
  const std::vector<Dim> qk = {kRows, {"H", 12, "query heads"}, {"K", 2, "key heads"}, {"D", 128, "head dim, even"}};
  list.push_back({"qk_norm_rope_fwd", qk, [](Operands& o, const Dims& d) {
                    QkNormRopeFwd a{};
                    a.y = qk_heads(o, d), a.x = qk_heads(o, d), a.rstd = o.stat({d["N"], d["H"] + d["K"]});
                    a.q_norm = o.act({d["D"]}), a.k_norm = o.act({d["D"]}), a.table = o.stat({d["N"], d["D"]});
                    a.pos = o.indices({d["N"]}, [](int64_t i) { return i; }), a.q_heads = d["H"], a.eps = 1e-6f;
                    return op_call(o, &Device::qk_norm_rope_fwd, a);
                  }});
  list.push_back({"qk_norm_rope_bwd", qk, [](Operands& o, const Dims& d) {
                    QkNormRopeBwd a{};
                    a.dx = qk_heads(o, d), a.dq_norm = o.stat({d["D"]}), a.dk_norm = o.stat({d["D"]});
                    a.dy = qk_heads(o, d), a.x = qk_heads(o, d), a.rstd = o.positive({d["N"], d["H"] + d["K"]});
                    a.q_norm = o.act({d["D"]}), a.k_norm = o.act({d["D"]}), a.table = o.stat({d["N"], d["D"]});
                    a.pos = o.indices({d["N"]}, [](int64_t i) { return i; }), a.q_heads = d["H"];
                    return op_call(o, &Device::qk_norm_rope_bwd, a);
                  }});
  const std::vector<Dim> ffn = {kRows, {"F", 8960, "feed-forward width"}};
  list.push_back(
      {"swiglu_fwd", ffn, [](Operands& o, const Dims& d) {
         return op_call(o, &Device::swiglu_fwd, SwigluFwd{o.act({d["N"], d["F"]}), o.act({d["N"], 2 * d["F"]})});
       }});
  list.push_back({"swiglu_bwd", ffn, [](Operands& o, const Dims& d) {
                    return op_call(
                        o, &Device::swiglu_bwd,
                        SwigluBwd{o.act({d["N"], 2 * d["F"]}), o.act({d["N"], d["F"]}), o.act({d["N"], 2 * d["F"]})});
                  }});
}

void add_optimizer(std::vector<OpBench>& list) {
  const Dim n{"n", 1 << 25, "parameters"};
  list.push_back({"global_norm", {n}, [](Operands& o, const Dims& d) {
                    return op_call(o, &Device::global_norm,
                                   GlobalNorm{o.stat({1}), o.stat({norm_blocks(d["n"])}), o.stat({d["n"]})});
                  }});
  // Where act is bf16 there is an f32 master.
  list.push_back({"adamw", {n, {"bf16_moments", 0, "1: moments in bf16", 0}}, [](Operands& o, const Dims& d) {
                    const DType moments = d["bf16_moments"] ? DType::bf16 : DType::f32;
                    AdamW a{};
                    a.p = o.act({d["n"]}), a.grad = o.stat({d["n"]}), a.norm = o.positive({1});
                    a.m = o.positive({d["n"]}, moments), a.v = o.positive({d["n"]}, moments);
                    a.max_norm = 1, a.lr = 1e-3f, a.beta1 = 0.9f, a.beta2 = 0.98f, a.eps = 1e-8f;
                    a.weight_decay = 0.01f, a.step = 7;
                    if (o.act_type == DType::bf16) a.master = o.stat({d["n"]});
                    return op_call(o, &Device::adamw, a);
                  }});
}

}  // namespace

void add_layer_benches(std::vector<OpBench>& list) {
  add_data(list);
  add_weights(list);
  add_norms(list);
  add_linear(list);
  add_rope_and_swiglu(list);
  add_optimizer(list);
}

}  // namespace pare
