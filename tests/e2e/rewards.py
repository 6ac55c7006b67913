"""A user's own reward, named in the configuration as `tests.e2e.rewards:odd_tokens`."""

from __future__ import annotations

from tasks.trajectory import Trajectory


def odd_tokens(trajectory: Trajectory) -> float:
    """The share of generated tokens with an odd id: any policy varies in it, so every group has a gradient."""
    generated = trajectory.tokens[trajectory.loss_mask]
    return float((generated % 2).mean()) if len(generated) else 0.0
