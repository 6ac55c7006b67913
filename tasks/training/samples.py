"""What the trainer needs of a trajectory, and the padded tensors of a micro-batch.

Invariants: position t of a sample predicts token t + 1; only positions whose next token was generated are
predicted; tokens after the last generated one are not fed, for nothing depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.training.advantages import ADVANTAGES, has_variance
from tasks.trajectory import NOT_GENERATED, Trajectory


@dataclass(frozen=True)
class Sample:
    """One sequence to train on, of T fed tokens and G generated ones."""

    tokens: np.ndarray  # [T] int64, fed to the model
    positions: np.ndarray  # [G] int64, in 0..T-1
    targets: np.ndarray  # [G] int64
    behaviour: np.ndarray  # [G] float32 log-probs of the policy that generated
    versions: np.ndarray  # [G] int64
    advantage: float = 0.0


@dataclass(frozen=True)
class MicroBatch:
    """Padded tensors: `tokens` [B, T]; all others [N], the generated tokens of all sequences in order."""

    tokens: Tensor
    positions: Tensor  # into the flattened [B * T]
    targets: Tensor
    behaviour: Tensor
    versions: Tensor
    advantages: Tensor
    weights: Tensor
    sequences: Tensor  # which row of `tokens` each belongs to


def sample(trajectory: Trajectory, advantage: float = 0.0) -> Sample | None:
    """The sample of a trajectory, or None if nothing in it was generated."""
    generated = np.flatnonzero(trajectory.loss_mask[1:]) + 1
    if not len(generated):
        return None
    tokens = np.asarray(trajectory.tokens, dtype=np.int64)
    return Sample(
        tokens=tokens[: generated[-1]],
        positions=generated - 1,
        targets=tokens[generated],
        behaviour=np.asarray(trajectory.logprobs[generated], dtype=np.float32),
        versions=np.asarray(trajectory.versions[generated], dtype=np.int64),
        advantage=advantage,
    )


def policy_gradient_samples(trajectories: Sequence[Trajectory], advantage: str) -> tuple[list[Sample], int]:
    """Samples with their advantages within their group, and how many groups were left out for no variance.

    A group is the trajectories with one (wave, group); failed episodes are not among them. Raises ValueError
    for a trajectory without a reward.
    """
    groups: dict[tuple[int, int], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise ValueError(
                f"trajectory {trajectory.wave}/{trajectory.group}/{trajectory.index} has no reward"
            )
        groups.setdefault((trajectory.wave, trajectory.group), []).append(trajectory)
    samples: list[Sample | None] = []
    without = 0
    for key in sorted(groups):
        members = sorted(groups[key], key=lambda t: t.index)
        rewards = np.array([t.reward for t in members], dtype=np.float64)
        if not has_variance(rewards):
            without += 1
            continue
        samples += [sample(t, float(a)) for t, a in zip(members, ADVANTAGES[advantage](rewards), strict=True)]
    return [s for s in samples if s is not None], without


def collate(samples: Sequence[Sample], weights: Sequence[float], device: torch.device) -> MicroBatch:
    """Pad samples on the right and join their generated tokens; `weights` is of each sample's tokens.

    No attention mask is needed: attention is causal and the padding comes last. An empty list gives one
    position without weight, so that a rank without work still takes part in collectives.
    """
    if not samples:
        zero = np.zeros(1, np.int64)
        none = Sample(zero, zero, zero, behaviour=np.zeros(1, np.float32), versions=np.full(1, NOT_GENERATED))
        return collate([none], [0.0], device)
    length = max(len(s.tokens) for s in samples)
    tokens = np.zeros((len(samples), length), dtype=np.int64)
    for row, s in enumerate(samples):
        tokens[row, : len(s.tokens)] = s.tokens
    counts = [len(s.positions) for s in samples]

    def joined(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device)

    return MicroBatch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=joined([s.positions + row * length for row, s in enumerate(samples)]),
        targets=joined([s.targets for s in samples]),
        behaviour=joined([s.behaviour for s in samples]),
        versions=joined([s.versions for s in samples]),
        advantages=joined([np.repeat(np.array([s.advantage for s in samples], np.float32), counts)]),
        weights=joined([np.repeat(np.array(weights, np.float32), counts)]),
        sequences=joined([np.repeat(np.arange(len(samples)), counts)]),
    )
