"""Which task and environment seed each group has: a pure function of the run's seed, so a group can be made again."""

from __future__ import annotations

import numpy as np

from tasks.config import RunConfig, TaskConfig
from tasks.trajectory import EpisodeSpec

EVALUATION_WAVE = -1  # wave of episodes that no batch consumes


def group_specs(config: RunConfig, wave: int, group: int, first_wave: int = 0) -> list[EpisodeSpec]:
    """The `group_size + spare_episodes` episodes of a group: one task and one environment seed, drawn from (seed,
    wave - first_wave, group).
    """
    rng = np.random.default_rng([config.seed, wave - first_wave, group])
    weights = np.array([task.weight for task in config.tasks])
    task = config.tasks[int(rng.choice(len(weights), p=weights / weights.sum()))]
    seed = int(rng.integers(2**31))
    size = config.rollout.group_size + config.rollout.spare_episodes
    return [EpisodeSpec(task.name, seed, wave, group, index) for index in range(size)]


def evaluation_specs(task: TaskConfig, episodes: int) -> list[EpisodeSpec]:
    """The fixed held-out episodes of a task: the same for every run, version and configuration seed."""
    return [EpisodeSpec(task.name, 1_000_000 + i, EVALUATION_WAVE, i, 0) for i in range(episodes)]
