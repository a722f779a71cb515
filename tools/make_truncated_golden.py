#!/usr/bin/env python3
"""Writes tests/golden/truncated_losses.json: the loss of truncated rows of logits and its gradient, by torch in double.

    python3 tools/make_truncated_golden.py > tests/golden/truncated_losses.json      # needs torch

The mask of kept ids is given; autograd goes through log_softmax of the masked logits, PPO's clipped loss and the entropy.
"""
import json

import torch

# pare's numbers are f32.
TEMPERATURE, CLIP, ENTROPY = (torch.tensor(x, dtype=torch.float32).item() for x in (0.8, 0.2, 0.3))
OLD, ADVANTAGE, WEIGHT, KL_WEIGHT = -1.2, -2.0, 1.5, 0.7
ROW = [0.3, -1.2, 1.7, 0.9, -0.4, 1.1, -2.0, 0.2]
CASES = [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 6, "top_p": 0.85, "min_p": 0.2}, {}]


def kept(z, top_k=0, top_p=1.0, min_p=0.0):
    p, order = torch.softmax(z, 0).sort(descending=True)
    p[top_k or len(z):] = 0
    p = p / p.sum()
    mask = torch.zeros(len(z), dtype=torch.bool)
    mask[order] = (p > 0) & (p.cumsum(0) - p < top_p) & (p >= min_p * p[0])
    return mask


def parts(z, mask, target):
    p = torch.log_softmax((z / TEMPERATURE).masked_fill(~mask, -torch.inf), 0)
    ratio = torch.exp(p[target] - OLD)
    loss = torch.maximum(-ADVANTAGE * ratio, -ADVANTAGE * ratio.clamp(1 - CLIP, 1 + CLIP))
    return p[target], -(p[mask].exp() * p[mask]).sum(), loss


rows = []
for case in CASES:
    for target in (2, 5):
        z = torch.tensor(ROW, dtype=torch.float64, requires_grad=True)
        mask = kept(z.detach() / TEMPERATURE, **case)
        logprob, entropy, loss = parts(z, mask, target)
        (WEIGHT * loss - KL_WEIGHT * ENTROPY * entropy).backward()
        rows.append({**case, "target": target, "kept": mask.nonzero()[:, 0].tolist(), "logprob": logprob.item(),
                     "entropy": entropy.item(), "loss": loss.item(), "gradient": z.grad.tolist()})
made_by = f"tools/make_truncated_golden.py, torch {torch.__version__}"
print(json.dumps({"made_by": made_by, "row": ROW, "cases": rows}, indent=1))
