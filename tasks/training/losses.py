"""The policy-gradient objective as pure functions of per-token tensors.

All tensors have shape [N]: the generated tokens of some trajectories, one after another. A token's loss is
multiplied by its weight (`token_weights`), which is computed once for a whole minibatch; so the sum over any
cut into micro-batches or ranks is the minibatch's loss, and its gradient does not depend on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """Per-token results [N]: `loss` has a gradient, the others are measurements."""

    loss: Tensor
    ratio: Tensor  # of the policy to the policy it is clipped against
    clipped: Tensor  # bool: the clip took the gradient away


def ppo(logp: Tensor, proximal: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logp - proximal).

    PPO, arXiv 1707.06347, equation 7; separate bounds ("clip-higher"): DAPO, arXiv 2503.14476, section 3.1.
    """
    ratio = torch.exp(logp - proximal.detach())
    free, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return Surrogate(-torch.minimum(free, bounded), ratio.detach(), (bounded < free).detach())


def decoupled(
    logp: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float, cap: float
) -> Surrogate:
    """PPO clipped against the proximal policy, weighted by min(proximal / behaviour, cap).

    Decoupled PPO, arXiv 2110.00641, equation 7; for language models AReaL, arXiv 2505.24298, section 5.2. The
    weight is truncated as in V-trace (arXiv 1802.01561), so that a few stale tokens cannot carry the batch.
    """
    weight = torch.exp(proximal - behaviour).clamp(max=cap).detach()
    surrogate = ppo(logp, proximal, advantages, low, high)
    return Surrogate(weight * surrogate.loss, surrogate.ratio, surrogate.clipped)


def truncated(logp: Tensor, behaviour: Tensor, advantages: Tensor, cap: float) -> Surrogate:
    """-stop_gradient(min(r, cap)) A logp with r = exp(logp - behaviour): no proximal policy and no clip.

    Truncated importance sampling of the policy gradient: IMPALA, arXiv 1802.01561, section 4.
    """
    ratio = torch.exp(logp - behaviour).detach()
    return Surrogate(-ratio.clamp(max=cap) * advantages * logp, ratio, ratio > cap)


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - logp: an unbiased, non-negative estimate of KL(policy || reference).

    Schulman, "Approximating KL divergence" (2020); as a loss term in GRPO, arXiv 2402.03300, equation 4.
    """
    difference = reference - logp
    return torch.exp(difference) - difference - 1


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats [N] of the distributions given by `logits` [N, V]."""
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp).sum(dim=-1)


def token_weights(lengths: np.ndarray, normalisation: str, fixed_length: int) -> np.ndarray:
    """The weight [B] of each token of sequence i in its minibatch, for sequences of `lengths` [B] > 0 tokens.

    token_mean      1 / sum of lengths: every token counts alike. DAPO, arXiv 2503.14476, section 3.3
    sequence_mean   1 / (B length_i): every sequence counts alike. GRPO, arXiv 2402.03300, equation 3
    fixed_length    1 / (B fixed_length): no length in the denominator. Dr. GRPO, arXiv 2503.20783, section 3.2
    """
    size = len(lengths)
    if normalisation == "token_mean":
        return np.full(size, 1.0 / max(1, lengths.sum()))
    if normalisation == "sequence_mean":
        return 1.0 / (size * lengths)
    if normalisation == "fixed_length":
        return np.full(size, 1.0 / (max(1, size) * fixed_length))
    raise ValueError(f"unknown normalisation {normalisation!r}")
