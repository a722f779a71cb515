#!/usr/bin/env python3
"""Writes tests/golden/truncated_losses.json: the loss of truncated rows of logits and its gradient, by JAX in double.

    python3 tools/make_truncated_golden.py > tests/golden/truncated_losses.json      # needs jax

The mask of kept ids is given; autodiff goes through log_softmax of the masked logits, PPO's clipped loss and the entropy.
"""
import json

import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)

TEMPERATURE, CLIP, ENTROPY = (float(jnp.float32(x)) for x in (0.8, 0.2, 0.3))  # pare's numbers are f32
OLD, ADVANTAGE, WEIGHT, KL_WEIGHT = -1.2, -2.0, 1.5, 0.7
ROW = [0.3, -1.2, 1.7, 0.9, -0.4, 1.1, -2.0, 0.2]
CASES = [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 6, "top_p": 0.85, "min_p": 0.2}, {}]


def kept(z, top_k=0, top_p=1.0, min_p=0.0):
    p = jax.nn.softmax(z)
    order = jnp.argsort(-p)
    mask = jnp.arange(len(z)) < (top_k or len(z))
    p = jnp.where(mask, p[order], 0)
    p = p / p.sum()
    mask = mask & (jnp.cumsum(p) - p < top_p) & (p >= min_p * p[0])
    return jnp.zeros(len(z), bool).at[order].set(mask)


def parts(z, mask, target):
    p = jax.nn.log_softmax(jnp.where(mask, z / TEMPERATURE, -jnp.inf))
    finite = jnp.where(mask, p, 0)
    ratio = jnp.exp(p[target] - OLD)
    loss = jnp.maximum(-ADVANTAGE * ratio, -ADVANTAGE * jnp.clip(ratio, 1 - CLIP, 1 + CLIP))
    return p[target], -jnp.sum(jnp.where(mask, jnp.exp(finite) * finite, 0)), loss


def objective(z, mask, target):
    _, entropy, loss = parts(z, mask, target)
    return WEIGHT * loss - KL_WEIGHT * ENTROPY * entropy


rows = []
z = jnp.array(ROW)
for case in CASES:
    mask = kept(z / TEMPERATURE, **case)
    for target in (2, 5):
        logprob, entropy, loss = parts(z, mask, target)
        rows.append({**case, "target": target, "kept": [int(i) for i in jnp.nonzero(mask)[0]], "logprob": float(logprob),
                     "entropy": float(entropy), "loss": float(loss),
                     "gradient": [float(g) for g in jax.grad(objective)(z, mask, target)]})
print(json.dumps({"made_by": f"tools/make_truncated_golden.py, jax {jax.__version__}", "row": ROW, "cases": rows}, indent=1))
