// Log-probs, losses, sampling.
#include "bench/op_call.h"

namespace pare {

namespace {

using detail::op_call;

Tensor targets(Operands& o, const Dims& d) {
  return o.indices({d["R"]}, [v = d["V"]](int64_t i) { return i * 7919 % v; });
}

}  // namespace

void add_logits_benches(std::vector<OpBench>& list) {
  const Dim rows{"R", 256, "rows of logits"}, vocabulary{"V", 151936, "vocabulary"};
  list.push_back({"logprob", {rows, vocabulary}, [](Operands& o, const Dims& d) {
                    return op_call(
                        o, &Device::logprob,
                        Logprob{o.stat({d["R"]}), o.stat({d["R"]}), o.act({d["R"], d["V"]}), targets(o, d), 1});
                  }});
  list.push_back({"overlap_probs", {rows, vocabulary, {"top_k", 0, "0: every id", 0}}, [](Operands& o, const Dims& d) {
                    return op_call(o, &Device::overlap_probs,
                                   OverlapProbs{o.stat({d["R"]}), o.stat({d["R"]}), o.act({d["R"], d["V"]}),
                                                o.act({d["R"], d["V"]}), 1, 1, static_cast<int32_t>(d["top_k"])});
                  }});
  // PPO with its own log-prob as the old one.  The logits become their gradient: the second run reads that.
  list.push_back({"logits_loss", {rows, vocabulary}, [](Operands& o, const Dims& d) {
                    const int64_t R = d["R"];
                    LogitsLoss a{};
                    a.logprob = o.stat({R}), a.entropy = o.stat({R}), a.loss = o.stat({R}), a.kl = o.stat({R});
                    a.clipped = o.indices({R}, [](int64_t) { return 0; });
                    a.logits = o.act({R, d["V"]}), a.target = targets(o, d);
                    a.weight = o.stat({R}), a.kl_weight = o.stat({R}), a.advantage = o.stat({R});
                    a.old_logprob = o.stat({R}), a.spec.policy = PolicyLoss::ppo;
                    return op_call(o, &Device::logits_loss, a);
                  }});
  list.push_back({"sample",
                  {rows, vocabulary, {"greedy", 0, "1: the largest logit", 0}, {"top_k", 0, "0: off", 0}},
                  [](Operands& o, const Dims& d) {
                    Sample a{};
                    a.token = o.indices({d["R"]}, [](int64_t) { return 0; }), a.logprob = o.stat({d["R"]});
                    a.logits = o.act({d["R"], d["V"]});
                    a.counter = o.indices({d["R"], 3}, [](int64_t i) { return i; });
                    a.key = 5, a.temperature = d["greedy"] ? 0 : 1, a.top_k = static_cast<int32_t>(d["top_k"]),
                    a.top_p = 1;
                    return op_call(o, &Device::sample, a);
                  }});
}

}  // namespace pare
