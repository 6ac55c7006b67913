"""The policy-gradient objective as pure functions of per-token tensors.

All tensors have shape [N]: the generated tokens of some trajectories, one after another. A token's loss is
multiplied by its weight (`token_weights`), which is computed once for a whole minibatch; so the sum over any
cut into micro-batches or ranks is the minibatch's loss, and its gradient does not depend on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """Per-token results [N]: `loss` has a gradient, the others are measurements."""

    loss: Tensor
    ratio: Tensor  # of the policy to the policy it is compared with
    clipped: Tensor  # bool: the clip took the gradient away
    weight: Tensor  # off-policy weight of the proximal policy over the behaviour policy, before its bound
    masked: Tensor  # bool: the correction bounded that weight, or took the gradient away


def ppo(logp: Tensor, proximal: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logp - proximal).

    PPO, arXiv 1707.06347, equation 7; separate bounds ("clip-higher"): DAPO, arXiv 2503.14476, section 3.1.
    """
    ratio = torch.exp(logp - proximal.detach())
    loss, clipped = _clip(ratio, advantages, low, high)
    ratio = ratio.detach()
    return Surrogate(loss, ratio, clipped, torch.ones_like(ratio), torch.zeros_like(clipped))


def decoupled(
    logp: Tensor, proximal: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float, cap: float
) -> Surrogate:
    """PPO clipped against the proximal policy, weighted by min(proximal / behaviour, cap).

    Decoupled PPO, arXiv 2110.00641, equation 7; for language models AReaL, arXiv 2505.24298, section 5.2. The
    weight is truncated as in V-trace (arXiv 1802.01561), so that a few stale tokens cannot carry the batch.
    """
    weight = torch.exp(proximal - behaviour).detach()
    surrogate = ppo(logp, proximal, advantages, low, high)
    return replace(surrogate, loss=weight.clamp(max=cap) * surrogate.loss, weight=weight, masked=weight > cap)


def icepop(
    logp: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    clip: tuple[float, float],
    bounds: tuple[float, float],
) -> Surrogate:
    """PPO clipped against the proximal policy, weighted by w = proximal / behaviour, or 0 where w is outside `bounds`.

    Two-sided masking: IcePop, arXiv 2510.18855, section 3 (double-sided masking of training-inference mismatch).
    """
    weight = torch.exp(proximal - behaviour).detach()
    masked = (weight < bounds[0]) | (weight > bounds[1])
    surrogate = ppo(logp, proximal, advantages, *clip)
    loss = torch.where(masked, 0.0, weight) * surrogate.loss
    return replace(surrogate, loss=loss, weight=weight, masked=masked)


def dppo(logp: Tensor, behaviour: Tensor, advantages: Tensor, bound: float) -> Surrogate:
    """-r A with r = exp(logp - behaviour), without the tokens that moved far already in the direction of A.

    Far is |p - p_behaviour| > `bound`: the total variation of the binary choice of this token. Divergence PPO
    with its binary TV mask, arXiv 2602.04879.
    """
    ratio = torch.exp(logp - behaviour)
    moved = (torch.exp(logp) - torch.exp(behaviour)).detach()
    masked = torch.where(advantages > 0, moved > bound, moved < -bound)
    loss = torch.where(masked, 0.0, -ratio * advantages)
    ratio = ratio.detach()
    return Surrogate(loss, ratio, torch.zeros_like(masked), ratio, masked)


def gspo(
    logp: Tensor, behaviour: Tensor, advantages: Tensor, sequences: Tensor, low: float, high: float
) -> Surrogate:
    """PPO's clip on the ratio of whole sequences: s_i = exp(mean over its tokens of logp - behaviour).

    `sequences` [N] says which sequence each token belongs to; all tokens of one are in the same call.
    GSPO, arXiv 2507.18071, equations 5 and 7.
    """
    count = int(sequences.max()) + 1 if len(sequences) else 0
    zeros = torch.zeros(count, dtype=logp.dtype, device=logp.device)
    lengths = zeros.index_add(0, sequences, torch.ones_like(logp)).clamp(min=1)
    ratio = torch.exp(zeros.index_add(0, sequences, logp - behaviour) / lengths)[sequences]
    loss, clipped = _clip(ratio, advantages, low, high)
    ratio = ratio.detach()
    return Surrogate(loss, ratio, clipped, ratio, clipped)


def truncated(logp: Tensor, behaviour: Tensor, advantages: Tensor, cap: float) -> Surrogate:
    """-stop_gradient(min(r, cap)) A logp with r = exp(logp - behaviour): no proximal policy and no clip.

    Truncated importance sampling of the policy gradient: IMPALA, arXiv 1802.01561, section 4.
    """
    ratio = torch.exp(logp - behaviour).detach()
    over = ratio > cap
    return Surrogate(-ratio.clamp(max=cap) * advantages * logp, ratio, torch.zeros_like(over), ratio, over)


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's loss for a ratio, and where the clip took its gradient away."""
    free, bounded = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(free, bounded), (bounded < free).detach()


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
