"""A user's own reward, named in the configuration as `tests.e2e.rewards:odd_tokens`."""

from __future__ import annotations

from pathlib import Path

from tasks.trajectory import Trajectory


def odd_tokens(trajectory: Trajectory) -> float:
    """The share of generated tokens with an odd id: any policy varies in it, so every group has a gradient."""
    generated = trajectory.tokens[trajectory.loss_mask]
    return float((generated % 2).mean()) if len(generated) else 0.0


def odd_tokens_unless_broken(trajectory: Trajectory) -> float:
    """The same, but it raises while there is a file ~/broken-reward."""
    if (Path.home() / "broken-reward").exists():
        raise RuntimeError("the judge is on strike")
    return odd_tokens(trajectory)
