"""Scoring: a trajectory in, its reward out.

Rewards are pure functions by name: no state, so any backend may run them anywhere and again. `score` is the
one place that chooses where they run; today that is here, in the calling process.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable

from tasks.config import TaskConfig
from tasks.errors import UserError
from tasks.trajectory import Trajectory

Reward = Callable[[Trajectory], float]

_REWARDS: dict[str, Reward] = {}


def register_reward(name: str) -> Callable[[Reward], Reward]:
    """Decorator: make a reward known by `name`."""

    def decorate(function: Reward) -> Reward:
        _REWARDS[name] = function
        return function

    return decorate


@register_reward("env_return")
def env_return(trajectory: Trajectory) -> float:
    """The sum of the environment's step rewards."""
    return trajectory.env_reward


@register_reward("success")
def success(trajectory: Trajectory) -> float:
    """1 if the environment says the episode was solved, else 0."""
    return float(trajectory.success)


def reward_function(name: str, index: int | None = None) -> Reward:
    """The reward of a name, or of `package.module:function`. Raises UserError naming `tasks.<index>.reward`."""
    setting = f"tasks.{'N' if index is None else index}.reward"
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(
                setting, f"{name!r} cannot be imported ({error})", "give 'package.module:function'"
            ) from None
    if name in _REWARDS:
        return _REWARDS[name]
    nearest = difflib.get_close_matches(name, _REWARDS, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    fix = f"{hint}known: {', '.join(sorted(_REWARDS))}; or your own as 'package.module:function'"
    raise UserError(setting, f"{name!r} is not a reward", fix)


def score(trajectory: Trajectory, task: TaskConfig) -> float:
    """The reward of a trajectory under its task. Raises ValueError if it is not a finite number."""
    reward = float(reward_function(task.reward)(trajectory))
    if not math.isfinite(reward):
        raise ValueError(
            f"reward {task.reward!r} of task {task.name!r} is {reward}, which is not a finite number"
        )
    return reward
