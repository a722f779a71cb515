// Log-probs, losses, sampling.

#include "ops/logits.h"

#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "base/rng.h"
#include "cases/cases.h"

namespace pare::cases {

namespace {

constexpr double kScale = 2;  // of logits: they stay below 10
const Dim kTemperature = edge("temperature", "in hundredths", 100);

const Dim kSums = edge("sums", "1: with the sums of tiles that the product of the LM head makes");

Tensor targets(Operands& o, const Dims& d) { return o.index("target", {d["R"]}, below("target", d["R"], d["V"])); }

// VocabSums of "logits" with these values; absent without `sums`.
Tensor tiles(Operands& o, const Dims& d, const Fill& logits, double temperature) {
  if (!d["sums"]) return {};
  const int64_t R = d["R"], V = d["V"], count = vocab_tiles(V);
  const Fill sums([=, act = o.act](const std::string&, int64_t n) {
    std::vector<double> z = logits.values("logits", R * V), out(static_cast<size_t>(n));
    const std::vector<int32_t> target = below("target", R, V);
    for (double& x : z) x = (act == DType::bf16 ? bf16_to_f32(f32_to_bf16(static_cast<float>(x))) : x) / temperature;
    for (int64_t r = 0; r < R; r++) {
      double* const row = out.data() + r * (count + 1) * 3;
      for (int64_t t = 0; t < count; t++) {
        const auto begin = z.begin() + r * V + t * kVocabTile,
                   end = z.begin() + r * V + std::min(V, (t + 1) * kVocabTile);
        const double top = row[3 * t] = *std::max_element(begin, end);
        for (auto x = begin; x != end; ++x) {
          row[3 * t + 1] += std::exp(*x - top);
          row[3 * t + 2] += (*x - top) * std::exp(*x - top);
        }
      }
      row[3 * count] = z[static_cast<size_t>(r * V + target[static_cast<size_t>(r)])];
    }
    return out;
  });
  return o.stat_in("tiles", {R, count + 1, 3}, sums);
}

Call logprob(Operands& o, const Dims& d) {
  const Fill logits = scaled(kScale);
  const float temperature = d.share("temperature");
  return Logprob{o.stat_out("logprob", {d["R"]}),
                 o.stat_out("entropy", {d["R"]}),
                 o.in("logits", {d["R"], d["V"]}, logits),
                 targets(o, d),
                 temperature,
                 tiles(o, d, logits, temperature)};
}

// q near p, with ties; the top sets have some ids in common.
Call overlap_probs(Operands& o, const Dims& d) {
  const Shape shape{d["R"], d["V"]};
  const Fill near([](const std::string& name, int64_t n) {
    const std::vector<double> p = rounded(kScale, 8).values("p_logits", n);
    std::vector<double> q = normal(name, n, kScale);
    for (size_t i = 0; i < q.size(); i++) q[i] = i % 3 == 0 ? p[i] : std::round((p[i] + 0.3 * q[i]) * 8) / 8;
    return q;
  });
  return OverlapProbs{o.stat_out("overlap", {d["R"]}),
                      o.stat_out("mass", {d["R"]}),
                      o.in("p_logits", shape, rounded(kScale, 8)),
                      o.in("q_logits", shape, near),
                      d.share("temperature"),
                      d.share("lambda"),
                      d.i32("top_k")};
}

// Log-probs near those of the logits, so that ratios fall on both sides of the clip range.
Fill near_logprob(const Dims& d, double distance) {
  return Fill([=, R = d["R"], V = d["V"], t = double(d.share("temperature"))](const std::string& name, int64_t) {
    const std::vector<double> logits = normal("logits", R * V, kScale);
    const std::vector<int32_t> target = below("target", R, V);
    std::vector<double> lp = normal(name, R, distance);
    for (int64_t r = 0; r < R; r++) {
      double sum = 0;
      for (int64_t v = 0; v < V; v++) sum += std::exp(logits[r * V + v] / t);
      lp[r] = static_cast<float>(lp[r] + logits[r * V + target[r]] / t - std::log(sum));
    }
    return lp;
  });
}
// The third row has no weight.
const Fill kWeight(
    [](const std::string& name, int64_t n) {
      std::vector<double> v = positive().values(name, n);
      if (n > 2 && name == "weight") v[2] = 0;
      return v;
    },
    true);

Call logits_loss(Operands& o, const Dims& d) {
  const int64_t R = d["R"], V = d["V"];
  LogitsLoss a{};
  a.spec = {static_cast<PolicyLoss>(d["policy"]), static_cast<KlLoss>(d["kl"]), .2f, d.share("clip_high")};
  a.spec.clip_c = d.share("clip_c");
  a.spec.kl_coef = d.share("kl_coef");
  a.spec.entropy_coef = d.share("entropy_coef");
  a.spec.temperature = d.share("temperature");
  a.logprob = o.stat_out("logprob", {R});
  a.entropy = o.stat_out("entropy", {R});
  a.loss = o.stat_out("loss", {R});
  a.kl = o.stat_out("kl", {R});
  a.clipped = o.index_out("clipped", {R});
  a.logits = o.inout("logits", {R, V}, scaled(kScale));
  a.target = targets(o, d);
  a.weight = o.stat_in("weight", {R}, kWeight);
  a.kl_weight = o.stat_in("kl_weight", {R}, kWeight);
  a.advantage = o.stat_in("advantage", {R}, scaled(1.5));
  a.old_logprob = o.stat_in("old_logprob", {R}, d["own"] ? Fill(std::vector<double>(R, NAN)) : near_logprob(d, 0.4));
  if (a.spec.policy == PolicyLoss::gspo) a.log_ratio = o.stat_in("log_ratio", {R}, scaled(0.3));
  if (is_exact(a.spec.kl))
    a.ref_logits = o.in("ref_logits", {R, V}, scaled(kScale));
  else if (a.spec.kl != KlLoss::none)
    a.ref_logprob = o.stat_in("ref_logprob", {R}, near_logprob(d, 0.7));
  a.spec.kl_ratio = d["kl_ratio"];
  if (const int64_t centring = d["centring"]) {
    a.spec.centring = {.on = true, .by_ratio = centring != 1};
    if (centring == 2) a.spec.centring.cap = 1.1f;
    if (centring == 3) {
      a.spec.centring.low = .6f;
      a.spec.centring.high = 1.7f;
    }
    a.sampler_logits = o.in("sampler_logits", {R, V}, scaled(kScale));
  }
  a.tiles = tiles(o, d, scaled(kScale), a.spec.temperature);
  return a;
}

Call truncate(Operands& o, const Dims& d) {
  return Truncate{o.inout("logits", {d["R"], d["V"]}, rounded(kScale, 8)),  // many ties, as in bf16
                  d.share("temperature"),
                  {d.i32("top_k"), d.share("top_p"), d.share("min_p")}};
}

// Every third id, every second of which is -infinity, and one in each row.
Fill truncated() {
  return Fill([](const std::string& name, int64_t n) {
    std::vector<double> v = normal(name, n, kScale);
    for (int64_t i = 0; i < n; i++)
      if (i % 3 == 1 || (i % 7 > 3 && i % 5)) v[static_cast<size_t>(i)] = -INFINITY;
    return v;
  });
}

Call list_kept(Operands& o, const Dims& d) {
  return ListKept{o.index_out("ids", {d["R"], 1 + d["limit"]}), o.in("logits", {d["R"], d["V"]}, truncated())};
}

Call keep_listed(Operands& o, const Dims& d) {
  const int64_t R = d["R"], V = d["V"], limit = d["limit"];
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < R; r++) {
    std::vector<int32_t> row;
    for (int32_t v = static_cast<int32_t>(r % V); v < V && std::ssize(row) < limit - r % 2; v += 1 + (v + 7) % 5)
      row.push_back(v);
    ids.push_back(static_cast<int32_t>(row.size()));
    row.resize(static_cast<size_t>(limit), -1);
    ids.insert(ids.end(), row.begin(), row.end());
  }
  return KeepListed{o.inout("logits", {R, V}, scaled(kScale)), o.index("ids", {R, 1 + limit}, ids)};
}

Call sample(Operands& o, const Dims& d) {
  const int64_t R = d["R"];
  Sample a{};
  a.token = o.index_out("token", {R});
  a.logprob = o.stat_out("logprob", {R});
  const Fill logits = rounded(kScale, 8);  // many ties, as in bf16
  a.logits = o.in("logits", {R, d["V"]}, logits);
  a.counter = o.index("counter", {R, 3}, below("counter", R * 3, INT32_MAX));
  a.key = rng_key(7, RngStream::sample, 3);
  a.temperature = d["greedy"] ? 0 : d.share("temperature");
  a.tiles = tiles(o, d, logits, d["greedy"] ? 1 : a.temperature);
  return a;
}

std::vector<std::string> losses() {
  std::vector<std::string> list = {"R=1,V=1,policy=0", "R=3,V=300,policy=1,sums=1",
                                   // More than the CUDA kernels take at a time.
                                   "R=2,V=2051,policy=0,kl=4,kl_coef=30,entropy_coef=10",
                                   "R=2,V=2052,policy=0,kl=5,kl_coef=30",
                                   "R=2,V=2051,policy=1,kl=3,kl_coef=30,centring=2"};
  for (int kl = 1; kl < 4; kl++) {
    list.push_back(cat("R=7,V=33,policy=1,kl_ratio=1,kl_coef=30,kl=", kl));
    list.push_back(cat("R=7,V=129,policy=2,kl_ratio=1,kl_coef=30,entropy_coef=10,temperature=70,kl=", kl));
  }
  for (int centring = 1; centring < 4; centring++) {
    list.push_back(cat("R=7,V=33,policy=1,own=1,centring=", centring));
    list.push_back(cat("R=5,V=131,policy=3,kl=3,kl_coef=30,entropy_coef=10,temperature=130,centring=", centring));
  }
  for (int policy = 0; policy < 4; policy++)
    for (int kl = 0; kl < 6; kl++) {
      const std::string spec = cat(",policy=", policy, ",kl=", kl, ",clip_high=28,clip_c=150,kl_coef=30");
      list.push_back(cat("R=13,V=17", spec, ",entropy_coef=10,temperature=70"));
      list.push_back(cat("R=3,V=", kl % 2 ? 257 : 128, spec, ",own=1"));
    }
  return list;
}

}  // namespace

std::vector<OpCase> logits_cases() {
  const Dim rows{"R", 256, "rows of logits"}, vocabulary{"V", 151936, "vocabulary"};
  return {{"logprob",
           {rows, vocabulary, kTemperature, kSums},
           {"R=1,V=1", "R=3,V=130,sums=1", "R=2,V=1021,temperature=70,sums=1", "R=3,V=17", "R=5,V=16,temperature=50",
            "R=2,V=129,temperature=130", "R=7,V=1021", "R=1,V=63,temperature=300", "R=2,V=127",
            "R=2,V=128,temperature=70", "R=2,V=1000", "R=2,V=4099"},
           logprob},
          {"overlap_probs",
           {rows, vocabulary, {"top_k", 0, "0: every id", 0}, edge("lambda", "in hundredths", 100), kTemperature},
           {"R=1,V=1", "R=5,V=17", "R=3,V=129,temperature=70,lambda=250", "R=7,V=1021,temperature=130,lambda=50",
            "R=9,V=33,top_k=5", "R=4,V=257,top_k=20,temperature=80,lambda=200", "R=2,V=16,top_k=16", "R=2,V=127",
            "R=2,V=128,top_k=127"},
           overlap_probs},
          // The logits become their gradient: a second run reads that.
          {"logits_loss",
           {rows, vocabulary, edge("policy", "0 nll, 1 ppo, 2 gspo, 3 cispo", 1),
            edge("kl", "0 none, 1 k1, 2 k2, 3 k3, 4 exact, 5 exact_forward"),
            edge("own", "1: the pass's own log-prob is the old one"), edge("clip_high", "in hundredths", 20),
            edge("clip_c", "in hundredths"), edge("kl_coef", "in hundredths"), edge("entropy_coef", "in hundredths"),
            kTemperature, edge("kl_ratio", "1: the KL estimate is weighted by the ratio"),
            edge("centring", "0 off, 1 by weight 1, 2 by the capped ratio, 3 by the ratio inside bounds"), kSums},
           losses(),
           logits_loss},
          {"truncate",
           {rows, vocabulary, edge("top_k", "0: off"), edge("top_p", "in hundredths; 100: off", 100),
            edge("min_p", "in hundredths; 0: off"), kTemperature},
           {"R=1,V=1,top_k=3,top_p=50,min_p=100", "R=33,V=129,top_k=1", "R=33,V=129,top_k=5,temperature=130",
            "R=33,V=129,top_p=60", "R=33,V=65,top_k=20,top_p=90,temperature=80", "R=7,V=1021,top_k=1000,top_p=99",
            "R=3,V=16,top_k=16,top_p=1,temperature=200", "R=9,V=257,min_p=7", "R=9,V=1000,top_p=95,min_p=3",
            "R=5,V=300,top_k=90,top_p=90,min_p=20,temperature=150", "R=4,V=130,min_p=100"},
           truncate},
          {"list_kept",
           {rows, vocabulary, {"limit", 256, "ids that are listed"}},
           {"R=1,V=1,limit=1", "R=5,V=17,limit=3", "R=3,V=129,limit=200", "R=7,V=1021,limit=300", "R=2,V=4099,limit=9"},
           list_kept},
          {"keep_listed",
           {rows, vocabulary, {"limit", 256, "ids that are listed"}},
           {"R=1,V=1,limit=1", "R=5,V=17,limit=3", "R=3,V=129,limit=200", "R=7,V=1021,limit=300", "R=2,V=4099,limit=9"},
           keep_listed},
          {"sample",
           {rows, vocabulary, {"greedy", 0, "1: the largest logit", 0}, kTemperature, kSums},
           {"R=1,V=1", "R=5,V=17", "R=33,V=129,temperature=70", "R=33,V=129,greedy=1", "R=33,V=300,sums=1",
            "R=9,V=300,greedy=1,sums=1",
            // Most ids are passed over: by their random words alone, or by their logits.
            "R=5,V=9001", "R=5,V=9000,temperature=5"},
           sample}};
}

}  // namespace pare::cases
