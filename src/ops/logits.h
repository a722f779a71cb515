// Log-probs, losses and sampling: everything that turns logits into numbers (roles of types and orders of sums:
// list.h).
#pragma once
#include <array>
#include <cstdint>
#include <utility>

#include "ops/contract.h"
#include "ops/cost.h"
#include "ops/options.h"
#include "ops/vocab_sums.h"

namespace pare {

// A logit of -infinity has probability 0, and adds nothing to any sum or gradient.
//
// z = logits / temperature; lse = max z + log(sum exp(z - max)); logprob = z[target] - max - log(sum); the entropy of
// the distribution is log(sum) - sum((z - max) exp(z - max)) / sum.  One function computes these for sampler and
// learner, in the order that list.h states.
struct Logprob {
  Tensor logprob;  // stat [R] out
  Tensor entropy;  // stat [R] out
  Tensor logits;   // act [R, V]
  Tensor target;   // i32 [R], each in [0, V)
  float temperature;
  Tensor tiles = {};  // VocabSums of these logits, target and temperature, or absent
  void check(Contract& c) const {
    const int64_t R = logits.shape[0];
    c.act("logits", logits, {R, logits.shape[1]});
    if (tiles) VocabSums{tiles, target, temperature}.check(c, R, logits.shape[1]);
    c.stat("logprob", logprob, {R});
    c.stat("entropy", entropy, {R});
    c.index("target", target, {R});
    c.that(temperature > 0, "temperature is ", temperature, ", expected more than 0");
  }
  Cost cost() const {
    return {6 * logits.size(), detail::total_bytes(summed(tiles, logits), target),
            detail::total_bytes(logprob, entropy)};
  }
  auto outputs() const { return std::array{logprob, entropy}; }
};

// Overlap of two distributions over the vocabulary: p and q are the softmax of logits / temperature,
//   overlap = sum_v min(p_v, q_v)                 the part of draws from q that speculative sampling would accept for p
//   mass    = sum_{v in S} min(q_v, p_v / lambda)  the same for rejection with a budget (OBRS, Jackpot); S: every id,
//   or
//                                                  with top_k those among the top_k largest logits of both (ties: lower
//                                                  id first), which bounds it from below
// The maxima and sums of exponentials are those of Logprob.  Over every id the sums are computed as 1 - the sum of
// max(q - p, 0), so that equal logits give exactly 1; over top_k ids as one chain, ids ascending.
struct OverlapProbs {
  Tensor overlap, mass;       // stat [R] out
  Tensor p_logits, q_logits;  // act [R, V]
  float temperature, lambda;  // above 0
  int32_t top_k;              // 0: off
  void check(Contract& c) const {
    const int64_t R = p_logits.shape[0], V = p_logits.shape[1];
    c.act("p_logits", p_logits, {R, V});
    c.act("q_logits", q_logits, {R, V});
    c.stat("overlap", overlap, {R});
    c.stat("mass", mass, {R});
    c.that(temperature > 0 && lambda > 0 && top_k >= 0, "temperature, lambda and top_k are ", temperature, ", ", lambda,
           ", ", top_k, ", expected > 0, > 0, >= 0");
  }
  Cost cost() const {
    return {18 * p_logits.size(), detail::total_bytes(p_logits, q_logits), detail::total_bytes(overlap, mass)};
  }
  auto outputs() const { return std::array{overlap, mass}; }
};

// Row r adds weight * policy loss + kl_weight * (kl_coef * kl - entropy_coef * entropy) to the loss.  Overwrites the
// logits by the gradient of that sum with respect to them, to which centring adds kl_weight * advantage * (c - p
// sum(c)) / temperature.
struct LogitsLoss {
  Tensor logprob;         // stat [R] out, as Logprob
  Tensor entropy;         // stat [R] out, as Logprob
  Tensor loss;            // stat [R] out: policy loss before the weight
  Tensor kl;              // stat [R] out: the KL estimate before the coefficient; 0 without KL
  Tensor clipped;         // i32 [R] out: 1 ratio clipped (the clipped branch is the larger loss), 2 dual clip, else 0
  Tensor logits;          // act [R, V] in; out: d loss / d logits
  Tensor target;          // i32 [R]
  Tensor weight;          // stat [R]: every per-token factor but the advantage, denominator included
  Tensor kl_weight;       // stat [R]: the same for the KL and entropy terms
  Tensor advantage;       // stat [R]; read by all but nll
  Tensor old_logprob;     // stat [R]; NaN: this pass's own log-prob, a constant (ratio exactly 1)
  Tensor log_ratio;       // stat [R] or absent; gspo: the sequence's mean log-ratio, a constant
  Tensor ref_logprob;     // stat [R] or absent; k1, k2, k3
  Tensor ref_logits;      // act [R, V] or absent; exact, exact_forward
  Tensor sampler_logits;  // act [R, V] or absent; centring: those of q
  LossSpec spec;
  Tensor tiles = {};  // VocabSums of these logits and the temperature, or absent
  void check(Contract& c) const {
    const int64_t R = logits.shape[0], V = logits.shape[1];
    const bool gspo = spec.policy == PolicyLoss::gspo;
    c.act("logits", logits, {R, V});
    if (tiles) VocabSums{tiles, {}, spec.temperature}.check(c, R, V);
    for (const auto& [name, t] : {std::pair{"logprob", &logprob},
                                  {"entropy", &entropy},
                                  {"loss", &loss},
                                  {"kl", &kl},
                                  {"weight", &weight},
                                  {"kl_weight", &kl_weight}})
      c.stat(name, *t, {R});
    c.index("clipped", clipped, {R});
    c.index("target", target, {R});
    if (spec.policy != PolicyLoss::nll) {
      c.stat("advantage", advantage, {R});
      gspo ? c.stat("log_ratio", log_ratio, {R}) : c.stat("old_logprob", old_logprob, {R});
    }
    if (is_exact(spec.kl)) c.act("ref_logits", ref_logits, {R, V});
    if (spec.kl != KlLoss::none && !is_exact(spec.kl)) c.stat("ref_logprob", ref_logprob, {R});
    if (spec.centring.on) c.act("sampler_logits", sampler_logits, {R, V});
    c.that(!spec.centring.on || (spec.policy != PolicyLoss::nll && !is_exact(spec.kl)),
           "centring is on, expected a loss with advantages and no exact KL");
    c.that(spec.temperature > 0, "temperature is ", spec.temperature, ", expected more than 0");
  }
  Cost cost() const {
    return {10 * logits.size(),
            detail::total_bytes(logits, target, weight, kl_weight, advantage, old_logprob, log_ratio, ref_logprob,
                                ref_logits, sampler_logits, tiles),
            detail::total_bytes(logits, logprob, entropy, loss, kl, clipped)};
  }
  auto outputs() const { return std::array{logprob, entropy, loss, kl, logits}; }
};

// Truncated sampling: the logits of ids that `keep` leaves out become -infinity, so that Sample, Logprob and LogitsLoss
// are of the distribution over the others.  Sampler and learner call it on the same logits and get the same set.  The
// probability of an id counts as floor(2^40 exp(z - max z)): sums of these integers have no order.
struct Truncate {
  Tensor logits;      // act [R, V] in place
  float temperature;  // above 0
  Truncation keep;
  void check(Contract& c) const {
    c.act("logits", logits, {logits.shape[0], logits.shape[1]});
    c.that(temperature > 0, "temperature is ", temperature, ", expected more than 0");
    c.that(keep.valid(), "top_k, top_p and min_p are ", keep.top_k, ", ", keep.top_p, ", ", keep.min_p,
           ", expected >= 0, (0, 1], [0, 1]");
  }
  Cost cost() const { return {8 * logits.size(), detail::total_bytes(logits), detail::total_bytes(logits)}; }
  auto outputs() const { return std::array<Tensor, 0>{}; }  // -infinity is meant
};

// Lists the ids that Truncate left of a row; KeepListed truncates other logits by the list.
struct ListKept {
  Tensor ids;     // i32 [R, 1 + limit] out: the number of ids that are not -infinity; the first `limit`, ascending; -1
  Tensor logits;  // act [R, V]
  void check(Contract& c) const {
    c.act("logits", logits, {logits.shape[0], logits.shape[1]});
    c.index("ids", ids, {logits.shape[0], ids.shape[1]});
    c.that(ids.shape[1] >= 2, "ids has no room");
  }
  Cost cost() const { return {2 * logits.size(), detail::total_bytes(logits), detail::total_bytes(ids)}; }
  auto outputs() const { return std::array<Tensor, 0>{}; }
};

// The logits of ids that are not listed become -infinity.  A learner whose logits are not the sampler's (other weights,
// another policy, another cache) gets the distribution over the set that was sampled from: a ratio of two policies, or
// a KL between them, over different sets would be 0 or infinite.
struct KeepListed {
  Tensor logits;  // act [R, V] in place
  Tensor ids;     // i32 [R, 1 + limit], of ListKept, the number being `limit` at most
  void check(Contract& c) const {
    c.act("logits", logits, {logits.shape[0], logits.shape[1]});
    c.index("ids", ids, {logits.shape[0], ids.shape[1]});
    c.that(ids.shape[1] >= 2, "ids has no room");
  }
  Cost cost() const { return {2 * logits.size(), detail::total_bytes(ids), detail::total_bytes(logits)}; }
  auto outputs() const { return std::array<Tensor, 0>{}; }  // -infinity is meant
};

constexpr float kMostGumbel = 16.65f;  // above -log(-log(u)) of any word: 16.636 at most

// Draws a token per row from softmax(logits / temperature).  Gumbel-max: argmax of z - log(-log(u)), lower id on ties,
// with u = uniform_open(rng_word(key, uid, position, id)).  The log-prob is bitwise that of Logprob.  temperature 0:
// argmax of the logits, log-prob 0.
struct Sample {
  Tensor token;    // i32 [R] out
  Tensor logprob;  // stat [R] out
  Tensor logits;   // act [R, V]
  Tensor counter;  // i32 [R, 3]: uid low word, uid high word, position
  uint64_t key;    // rng_key
  float temperature;
  Tensor tiles = {};  // VocabSums of these logits and the temperature, or 1 for temperature 0; or absent
  void check(Contract& c) const {
    const int64_t R = logits.shape[0];
    c.act("logits", logits, {R, logits.shape[1]});
    if (tiles) VocabSums{tiles, {}, 1}.check(c, R, logits.shape[1]);
    c.index("token", token, {R});
    c.stat("logprob", logprob, {R});
    c.index("counter", counter, {R, 3});
    c.that(temperature >= 0, "temperature is ", temperature, ", expected 0 or more");
  }
  Cost cost() const {
    return {8 * logits.size(), detail::total_bytes(summed(tiles, logits), counter),
            detail::total_bytes(token, logprob)};
  }
  auto outputs() const { return std::array{token, logprob}; }
};

}  // namespace pare
