"""Advantages of a group's members from their rewards: pure functions, no baseline network.

A group whose rewards are all equal says nothing about which member was better: it has no advantage, and
`has_variance` lets the trainer leave its tokens out of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

EPSILON = 1e-6


def has_variance(rewards: np.ndarray) -> bool:
    """Whether any two rewards [G] of a group differ; false for a group of one."""
    return bool(len(rewards) > 1 and rewards.max() > rewards.min())


def grpo(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-6) for rewards [G]: GRPO, arXiv 2402.03300, section 4.1.2.

    The standard deviation is the population's. All zero for a group without variance.
    """
    return dr_grpo(rewards) / (np.std(rewards) + EPSILON) if has_variance(rewards) else np.zeros(len(rewards))


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """Rewards [G] less their mean, not divided: Dr. GRPO, arXiv 2503.20783, section 3.2."""
    return rewards - np.mean(rewards) if has_variance(rewards) else np.zeros(len(rewards))


def rloo(rewards: np.ndarray) -> np.ndarray:
    """Each of rewards [G] less the mean of the others: RLOO, arXiv 2402.14740, section 3.4."""
    size = len(rewards)
    return dr_grpo(rewards) * size / (size - 1) if size > 1 else np.zeros(size)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
