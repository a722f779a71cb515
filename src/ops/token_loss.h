// The loss of one token as a function of its log-prob.  Every table computes exactly this.
#pragma once
#include <cmath>

#include "base/host_device.h"
#include "ops/logits.h"

namespace pare {

template <class T>
struct TokenLoss {
  T policy;     // policy loss l(lp), to be minimised
  T d_policy;   // dl / dlp
  T kl;         // KL estimate; 0 for none and exact
  T d_kl;       // dkl / dlp
  int clipped;  // as LogitsLoss::clipped
};

// lp: log-prob now; old: of the policy that the ratio refers to (NaN: lp itself); seq: mean log-ratio of the sequence
// (gspo only); ref: of the reference policy (k1, k2, k3 only).  `exp` is the table's own exponential.
//   nll    l = -lp
//   ppo    r = exp(clamp(lp - old, +-20)); l = max(-A r, -A clip(r)); A < 0 and c > 0: min(l, -A c)   (DAPO, dual clip)
//   gspo   the same with r = exp(clamp(seq, +-20)) for every token of the sequence, dr/dlp = r: the gradient of
//          exp(lp - sg(lp) + sg(seq)), Zheng et al. 2025
//   cispo  l = -sg(clip(r)) A lp   (MiniMax-M1, 2025)
//   KL with x = clamp(ref - lp, +-20): k1 = -x, k2 = x^2 / 2, k3 = min(exp(x) - x - 1, 10)   (Schulman 2020); where a
//   clamp is in force the gradient is 0.  Without the bound on k3, which is verl's, a token that the reference finds
//   e^5 times more probable would have a gradient of 147 (TRL has no bound).
//   kl_ratio: r k with the gradient r (k + dk/dlp) d lp, whose mean over the old policy's tokens is that of KL(p ||
//   ref) for k1 and k3 (DeepSeek-V3.2, eq. 7; TRL use_bias_correction_kl).  r is not clipped.
template <class T, class Exp>
PARE_HOST_DEVICE inline TokenLoss<T> token_loss(const LossSpec& s, T lp, T old, T seq, T advantage, T ref, Exp exp) {
  TokenLoss<T> t{};
  T r = T(1);
  bool inside = true;
  if (s.policy == PolicyLoss::nll) {
    t.policy = -lp;
    t.d_policy = T(-1);
  } else {
    T log_ratio = s.policy == PolicyLoss::gspo ? seq : old != old ? T(0) : lp - old;
    inside = log_ratio >= T(-20) && log_ratio <= T(20);
    log_ratio = log_ratio < T(-20) ? T(-20) : log_ratio > T(20) ? T(20) : log_ratio;
    r = exp(log_ratio);
    const T low = T(1) - T(s.clip_low), high = T(1) + T(s.clip_high);
    const T kept = r < low ? low : r > high ? high : r;
    if (s.policy == PolicyLoss::cispo) {
      t.policy = -kept * advantage * lp;
      t.d_policy = -kept * advantage;
      t.clipped = kept != r;
    } else {
      const T plain = -advantage * r, clip = -advantage * kept;
      t.clipped = clip > plain;
      t.policy = t.clipped ? clip : plain;
      t.d_policy = t.clipped || !inside ? T(0) : plain;  // d(-A r)/dlp = -A r
      const T dual = -advantage * T(s.clip_c);
      if (s.clip_c > 0 && advantage < 0 && dual < t.policy) {
        t.policy = dual;
        t.d_policy = T(0);
        t.clipped = 2;
      }
    }
  }
  if (s.kl == KlLoss::k1 || s.kl == KlLoss::k2 || s.kl == KlLoss::k3) {
    const T raw = ref - lp, x = raw < T(-20) ? T(-20) : raw > T(20) ? T(20) : raw;
    const T slope = raw == x ? T(1) : T(0);
    if (s.kl == KlLoss::k1) {
      t.kl = -x;
      t.d_kl = slope;
    }
    if (s.kl == KlLoss::k2) {
      t.kl = x * x / 2;
      t.d_kl = -x * slope;
    }
    if (s.kl == KlLoss::k3) {
      const T e = exp(x), k3 = e - x - T(1);
      t.kl = k3 > T(10) ? T(10) : k3;
      t.d_kl = k3 > T(10) ? T(0) : (T(1) - e) * slope;
    }
    if (s.kl_ratio) {
      t.d_kl = r * (inside ? t.kl + t.d_kl : t.d_kl);
      t.kl = r * t.kl;
    }
  }
  return t;
}

// c_v of Centring.
template <class T>
PARE_HOST_DEVICE inline T centring_mass(const Centring& c, T p, T q) {
  if (p < T(c.low) * q || p > T(c.high) * q) return T(0);
  const T most = T(c.cap) * q;
  return !c.by_ratio ? q : p < most ? p : most;
}

}  // namespace pare
