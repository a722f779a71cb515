// Backward ops of `ref` against central differences of its forward ops, in double.
#include <functional>

#include "op_harness.h"

namespace pare::test {

namespace {

using Values = std::vector<double>;

Tensor view(Values& v, std::initializer_list<int64_t> shape) { return make_tensor(v.data(), DType::f64, shape); }
Tensor view(std::vector<int32_t>& v, std::initializer_list<int64_t> shape) {
  return make_tensor(v.data(), DType::i32, shape);
}
double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
  return sum;
}

// d f / d x by central differences equals `gradient`.  Cutting the series costs h^2 and rounding 1e-16 / h: with h =
// 1e-5 both stay near 1e-10 for functions of size and derivatives of order 1 to 10.
void expect_gradient(const char* what, Values& x, const Values& gradient, const std::function<double()>& f) {
  ASSERT_EQ(x.size(), gradient.size());
  for (size_t i = 0; i < x.size(); i++) {
    const double at = x[i], h = 1e-5;
    x[i] = at + h;
    const double above = f();
    x[i] = at - h;
    const double below = f();
    x[i] = at;
    const double slope = (above - below) / (2 * h);
    ASSERT_NEAR(gradient[i], slope, 1e-7 * (1 + std::fabs(slope))) << what << "[" << i << "]";
  }
}

TEST(OpGradients, Embedding) {
  const int64_t V = 5, N = 7, C = 3;
  Values table = normal("table", V * C), y(N * C), dy = normal("dy", N * C), d(V * C);
  std::vector<int32_t> ids = below("ids", N, V);
  table_ref.embedding_bwd({view(d, {V, C}), view(dy, {N, C}), view(ids, {N})}, {});
  expect_gradient("table", table, d, [&] {
    Values packed = panels(table, V, C);
    table_ref.embedding_fwd({view(y, {N, C}), {view(packed, {1, C, 16}), V}, view(ids, {N})}, {});
    return dot(y, dy);
  });
}

TEST(OpGradients, CopyAndScatterAreTransposes) {
  const int64_t N = 5, R = 7, C = 3;
  Values x = normal("x", N * C), y(R * C), dy = normal("dy", R * C), d(N * C);
  std::vector<int32_t> index = below("index", R, N), pairs;
  for (int32_t r = 0; r < R; r++) pairs.insert(pairs.end(), {index[r], r});
  table_ref.scatter_add_rows({view(d, {N, C}), view(dy, {R, C}), view(index, {R})}, {});
  expect_gradient("x", x, d, [&] {
    table_ref.copy_rows({view(y, {R, C}), view(x, {N, C}), view(pairs, {R, 2})}, {});
    return dot(y, dy);
  });
}

TEST(OpGradients, Rmsnorm) {
  const int64_t N = 6, C = 5;
  Values x = normal("x", N * C), w = normal("w", C), y(x.size()), rstd(N), dy = normal("dy", x.size());
  auto forward = [&] {
    table_ref.rmsnorm_fwd({view(y, {N, C}), view(rstd, {N}), view(x, {N, C}), view(w, {C}), 1e-2f}, {});
    return dot(y, dy);
  };
  forward();
  Values dx = normal("dx", x.size()), before = dx, dw(C);
  table_ref.rmsnorm_bwd(
      {view(dx, {N, C}), view(dw, {C}), view(dy, {N, C}), view(x, {N, C}), view(w, {C}), view(rstd, {N}), true}, {});
  for (size_t i = 0; i < dx.size(); i++) dx[i] -= before[i];
  expect_gradient("x", x, dx, forward);
  expect_gradient("w", w, dw, forward);
}

TEST(OpGradients, Linear) {
  const int64_t N = 4, I = 5, O = 3;
  Values x = normal("x", N * I), w = normal("w", O * I), bias = normal("bias", O), residual = normal("res", N * O);
  Values y(N * O), dy = normal("dy", N * O);
  auto forward = [&] {
    Values packed = panels(w, O, I);
    table_ref.linear_fwd(
        {view(y, {N, O}), view(x, {N, I}), {view(packed, {1, I, 16}), O}, view(bias, {O}), view(residual, {N, O})}, {});
    return dot(y, dy);
  };
  Values dx(N * I), dw(O * I), dbias(O), packed = panels(w, O, I);
  table_ref.linear_bwd_input({view(dx, {N, I}), view(dy, {N, O}), {view(packed, {1, I, 16}), O}, false}, {});
  table_ref.linear_bwd_weight({view(dw, {O, I}), view(dbias, {O}), view(dy, {N, O}), view(x, {N, I})}, {});
  expect_gradient("x", x, dx, forward);
  expect_gradient("w", w, dw, forward);
  expect_gradient("bias", bias, dbias, forward);
  expect_gradient("residual", residual, dy, forward);
}

// cos and sin of some angles, [positions, D].
Values angles(int64_t positions, int64_t D) {
  Values table(positions * D);
  for (int64_t p = 0; p < positions; p++)
    for (int64_t c = 0; c < D / 2; c++)
      table[p * D + c] = std::cos(p * 0.7 / (c + 1)), table[p * D + D / 2 + c] = std::sin(p * 0.7 / (c + 1));
  return table;
}

TEST(OpGradients, Rope) {
  const int64_t N = 4, h = 3, D = 6, positions = 5;
  Values x = normal("x", N * h * D), table = angles(positions, D), dy = normal("dy", N * h * D), dx = dy;
  std::vector<int32_t> pos = below("pos", N, positions);
  table_ref.rope_bwd({view(dx, {N, h, D}), view(table, {positions, D}), view(pos, {N})}, {});
  expect_gradient("x", x, dx, [&] {
    Values y = x;
    table_ref.rope_fwd({view(y, {N, h, D}), view(table, {positions, D}), view(pos, {N})}, {});
    return dot(y, dy);
  });
}

TEST(OpGradients, QkNormRope) {
  const int64_t N = 4, H = 2, h = 3, D = 6, positions = 5;
  Values x = normal("x", N * h * D), q_norm = normal("q", D), k_norm = normal("k", D), table = angles(positions, D);
  Values y(x.size()), rstd(N * h), dy = normal("dy", x.size());
  std::vector<int32_t> pos = below("pos", N, positions);
  auto forward = [&] {
    table_ref.qk_norm_rope_fwd({view(y, {N, h, D}), view(rstd, {N, h}), view(x, {N, h, D}), view(q_norm, {D}),
                                view(k_norm, {D}), view(table, {positions, D}), view(pos, {N}), H, 1e-2f},
                               {});
    return dot(y, dy);
  };
  forward();
  Values dx(x.size()), dq(D), dk(D);
  table_ref.qk_norm_rope_bwd(
      {view(dx, {N, h, D}), view(dq, {D}), view(dk, {D}), view(dy, {N, h, D}), view(x, {N, h, D}), view(q_norm, {D}),
       view(k_norm, {D}), view(rstd, {N, h}), view(table, {positions, D}), view(pos, {N}), H},
      {});
  expect_gradient("x", x, dx, forward);
  expect_gradient("q_norm", q_norm, dq, forward);
  expect_gradient("k_norm", k_norm, dk, forward);
}

TEST(OpGradients, Swiglu) {
  const int64_t N = 3, F = 5;
  Values gate_up = normal("gate_up", N * 2 * F, 2), y(N * F), dy = normal("dy", N * F), d(N * 2 * F);
  table_ref.swiglu_bwd({view(d, {N, 2 * F}), view(dy, {N, F}), view(gate_up, {N, 2 * F})}, {});
  expect_gradient("gate_up", gate_up, d, [&] {
    table_ref.swiglu_fwd({view(y, {N, F}), view(gate_up, {N, 2 * F})}, {});
    return dot(y, dy);
  });
}

// Two members behind a shared parent of the same batch, or parents in another batch.
void check_attention(bool other_batch, std::vector<int32_t> lists = {}) {
  const int64_t N = 9, P = other_batch ? 6 : N, H = 4, K = 2, D = 3;
  std::vector<int32_t> segments = other_batch ? std::vector<int32_t>{0, 4, 1, 5, 4, 5, 2, 3}
                                              : std::vector<int32_t>{4, 2, 0, 4, 6, 3, 1, 3, 0, 4, 0, 0};
  const int64_t S = static_cast<int64_t>(segments.size()) / 4;
  const Tensor parents = lists.empty() ? Tensor{} : view(lists, {static_cast<int64_t>(lists.size()) / K, K});
  int64_t pairs = 0;
  for (int64_t i = 0; i < S; i++) {
    const int64_t len = segments[i * 4 + 1], parent = segments[i * 4 + 3];
    pairs += len * parent + len * (len + 1) / 2;
  }
  Values q = normal("q", N * H * D), k = normal("k", N * K * D), v = normal("v", N * K * D);
  Values own_pk = normal("pk", P * K * D), own_pv = normal("pv", P * K * D);
  Values &pk = other_batch ? own_pk : k, &pv = other_batch ? own_pv : v;
  Values o(N * H * D), lse(N * H), d_o = normal("d_o", N * H * D);
  auto forward = [&] {
    table_ref.attn_fwd(
        {view(o, {N, H, D}), view(lse, {N, H}), view(q, {N, H, D}), view(k, {N, K, D}), view(v, {N, K, D}),
         view(pk, {P, K, D}), view(pv, {P, K, D}), view(segments, {S, 4}), pairs, 0.6f, parents},
        {});
    return dot(o, d_o);
  };
  forward();
  Values dq(q.size()), dk(k.size()), dv(v.size()), own_dpk(own_pk.size()), own_dpv(own_pv.size());
  Values &dpk = other_batch ? own_dpk : dk, &dpv = other_batch ? own_dpv : dv;
  AttnBwd a{};
  a.dq = view(dq, {N, H, D}), a.dk = view(dk, {N, K, D}), a.dv = view(dv, {N, K, D});
  a.dpk = view(dpk, {P, K, D}), a.dpv = view(dpv, {P, K, D});
  a.d_o = view(d_o, {N, H, D}), a.o = view(o, {N, H, D}), a.lse = view(lse, {N, H});
  a.q = view(q, {N, H, D}), a.k = view(k, {N, K, D}), a.v = view(v, {N, K, D});
  a.pk = view(pk, {P, K, D}), a.pv = view(pv, {P, K, D});
  a.segments = view(segments, {S, 4}), a.pairs = pairs, a.scale = 0.6f, a.lists = parents;
  table_ref.attn_bwd(a, {});
  expect_gradient("q", q, dq, forward);
  expect_gradient("k", k, dk, forward);
  expect_gradient("v", v, dv, forward);
  if (!other_batch) return;
  expect_gradient("pk", pk, dpk, forward);
  expect_gradient("pv", pv, dpv, forward);
}
// Blocks of 4 slots; lists are constants.
TEST(OpGradients, AttentionWithBlockLists) {
  const int64_t N = 19, H = 4, K = 2, D = 3;
  std::vector<int32_t> segments = {10, 9, 0, 10, 0, 10, 0, 0}, budget(N, 9), blocks(N * K * 3, -1);
  std::fill(budget.begin() + 12, budget.end(), 3);
  int64_t pairs = 0;
  for (int64_t n = 0; n < N; n++) {
    pairs += listed_slots(n + 1, budget[n], 4);
    if (n < 12) continue;
    for (int32_t h = 0; h < K; h++) {  // of blocks 0 .. n / 4
      int32_t* list = &blocks[(n * K + h) * 3];
      list[0] = h, list[1] = n / 4 - 1, list[2] = n / 4;
    }
  }
  Values q = normal("q", N * H * D), k = normal("k", N * K * D), v = normal("v", N * K * D);
  Values o(N * H * D), lse(N * H), d_o = normal("d_o", N * H * D), dq(q.size()), dk(k.size()), dv(v.size());
  auto forward = [&] {
    AttnFwd a{};
    a.o = view(o, {N, H, D}), a.lse = view(lse, {N, H}), a.q = view(q, {N, H, D});
    a.k = a.pk = view(k, {N, K, D}), a.v = a.pv = view(v, {N, K, D});
    a.segments = view(segments, {2, 4}), a.pairs = pairs, a.scale = 0.6f;
    a.blocks = view(blocks, {N, K, 3}), a.budget = view(budget, {N}), a.block = 4;
    table_ref.attn_fwd(a, {});
    return dot(o, d_o);
  };
  forward();
  AttnBwd a{};
  a.dq = view(dq, {N, H, D}), a.dk = a.dpk = view(dk, {N, K, D}), a.dv = a.dpv = view(dv, {N, K, D});
  a.d_o = view(d_o, {N, H, D}), a.o = view(o, {N, H, D}), a.lse = view(lse, {N, H});
  a.q = view(q, {N, H, D}), a.k = a.pk = view(k, {N, K, D}), a.v = a.pv = view(v, {N, K, D});
  a.segments = view(segments, {2, 4}), a.pairs = pairs, a.scale = 0.6f;
  a.blocks = view(blocks, {N, K, 3}), a.budget = view(budget, {N}), a.block = 4;
  table_ref.attn_bwd(a, {});
  expect_gradient("q", q, dq, forward);
  expect_gradient("k", k, dk, forward);
  expect_gradient("v", v, dv, forward);
}

TEST(OpGradients, AttentionWithParentsInTheBatch) { check_attention(false); }
TEST(OpGradients, AttentionWithParentsInAnotherBatch) { check_attention(true); }
TEST(OpGradients, AttentionWithListedParents) {
  check_attention(false, {7, 3, 1, 2, 3, 1, 2, 0});  // entries 0 to 3 and 1 to 3
  check_attention(true, {0, 0, 8, -5, -2, -6, -4, -1, -6, -3, -1, 4});
}

// ---- the loss: every policy loss with every KL

class LossGradients : public testing::TestWithParam<std::tuple<PolicyLoss, KlLoss, double>> {};

TEST_P(LossGradients, EqualDifferences) {
  const PolicyLoss policy = std::get<0>(GetParam());
  LossSpec spec{.policy = policy, .kl = std::get<1>(GetParam())};
  spec.clip_low = 0.2f, spec.clip_high = 0.28f, spec.clip_c = 1.6f;
  spec.kl_coef = 0.3f, spec.entropy_coef = 0.2f, spec.temperature = static_cast<float>(std::get<2>(GetParam()));
  const int64_t V = 6;
  // Log-ratios inside, below and above the clip range and beyond the dual clip, for both signs of the advantage.
  const Values ratios = {0.05, -0.1, -0.5, 0.4, 0.7, 0.05, -0.1, -0.5, 0.4, 0.7};
  Values A = {1.5, 0.5, 1, 2, 1, -1.5, -0.5, -1, -2, -1};
  const int64_t R = static_cast<int64_t>(ratios.size());
  Values z = normal("z", R * V), ref_z = normal("ref_z", R * V), old(R), seq = ratios, ref(R), lp(R), h(R), loss(R),
         kl(R);
  Values weight = normal("weight", R), kl_weight = normal("kl_weight", R);
  std::vector<int32_t> target = below("target", R, V), clipped(R);
  auto logprobs = [&] {
    table_ref.logprob({view(lp, {R}), view(h, {R}), view(z, {R, V}), view(target, {R}), spec.temperature}, {});
  };
  logprobs();
  const Values lp0 = lp;
  for (int64_t r = 0; r < R; r++) old[r] = lp0[r] - ratios[r], ref[r] = lp0[r] + ratios[R - 1 - r];
  auto run = [&](Values& logits) {
    LogitsLoss a{};
    a.logprob = view(lp, {R}), a.entropy = view(h, {R}), a.loss = view(loss, {R}), a.kl = view(kl, {R});
    a.clipped = view(clipped, {R}), a.logits = view(logits, {R, V}), a.target = view(target, {R});
    a.weight = view(weight, {R}), a.kl_weight = view(kl_weight, {R}), a.advantage = view(A, {R});
    a.old_logprob = view(old, {R}), a.log_ratio = view(seq, {R}), a.ref_logprob = view(ref, {R});
    a.ref_logits = view(ref_z, {R, V}), a.spec = spec;
    table_ref.logits_loss(a, {});
  };
  Values gradient = z;
  run(gradient);
  const Values lp1 = lp;
  EXPECT_EQ(lp1, lp0);
  std::vector<int32_t> expected = {0, 0, 0, 1, 1, 0, 0, 1, 0, 2};
  if (policy == PolicyLoss::nll) expected.assign(R, 0);
  if (policy == PolicyLoss::cispo) expected = {0, 0, 1, 1, 1, 0, 0, 1, 1, 1};
  EXPECT_EQ(clipped, expected);

  // What is held constant inside the loss moves with lp in its value: gspo's gradient is that of the ratio
  // exp(lp - sg(lp) + seq); cispo's ratio stays.
  const Values old0 = old;
  expect_gradient("logits", z, gradient, [&] {
    logprobs();
    for (int64_t r = 0; r < R; r++) {
      seq[r] = ratios[r] + lp[r] - lp0[r];
      old[r] = old0[r] + (policy == PolicyLoss::cispo ? lp[r] - lp0[r] : 0);
    }
    Values logits = z;
    run(logits);
    double sum = 0;
    for (int64_t r = 0; r < R; r++)
      sum += weight[r] * loss[r] + kl_weight[r] * (double(spec.kl_coef) * kl[r] - double(spec.entropy_coef) * h[r]);
    return sum;
  });

  // Without an old log-prob the ratio is 1 and its gradient that of old = lp.
  if (policy != PolicyLoss::ppo && policy != PolicyLoss::cispo) return;
  old = lp0;
  Values same = z, none = z;
  run(same);
  old.assign(R, NAN);
  run(none);
  EXPECT_EQ(same, none);
}

INSTANTIATE_TEST_SUITE_P(
    All, LossGradients,
    testing::Combine(testing::Values(PolicyLoss::nll, PolicyLoss::ppo, PolicyLoss::gspo, PolicyLoss::cispo),
                     testing::Values(KlLoss::none, KlLoss::k1, KlLoss::k2, KlLoss::k3, KlLoss::exact),
                     testing::Values(1.0, 0.7)));

// The exact KL is the mean of k1 over the policy's own tokens, and so is its gradient the mean of (k1 + its score
// term).
TEST(LossValues, ExactKlIsTheMeanOfK1) {
  const int64_t V = 7;
  Values z = normal("z", V), ref_z = normal("ref_z", V);
  auto at = [&](Values& logits, int32_t token, float temperature) {
    Values lp(1), h(1);
    std::vector<int32_t> target = {token};
    table_ref.logprob({view(lp, {1}), view(h, {1}), view(logits, {1, V}), view(target, {1}), temperature}, {});
    return lp[0];
  };
  const float temperature = 1.7f;
  double mean = 0;
  for (int32_t v = 0; v < V; v++) {
    const double lp = at(z, v, temperature);
    mean += std::exp(lp) * (lp - at(ref_z, v, temperature));
  }
  Values lp(1), h(1), loss(1), kl(1), weight = {1}, kl_weight = {1}, logits = z;
  std::vector<int32_t> target = {2}, clipped(1);
  LogitsLoss a{};
  a.logprob = view(lp, {1}), a.entropy = view(h, {1}), a.loss = view(loss, {1}), a.kl = view(kl, {1});
  a.clipped = view(clipped, {1}), a.logits = view(logits, {1, V}), a.target = view(target, {1});
  a.weight = view(weight, {1}), a.kl_weight = view(kl_weight, {1}), a.ref_logits = view(ref_z, {1, V});
  a.spec.kl = KlLoss::exact, a.spec.temperature = temperature;
  table_ref.logits_loss(a, {});
  EXPECT_NEAR(kl[0], mean, 1e-14);
  EXPECT_GT(kl[0], 0.01);
}

}  // namespace

}  // namespace pare::test
