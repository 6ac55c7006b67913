"""What was busy when, from the times that trajectories carry: environments, engine and reward.

Only trajectories of finished groups are seen; cancelled and failed episodes are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tasks.store import Store, layout
from tasks.trajectory import Trajectory, decode

Intervals = dict[str, np.ndarray]  # lane -> [N, 2] float64: from and to, seconds since the epoch


def intervals(trajectories: Iterable[Trajectory]) -> Intervals:
    """When environments, the engine and the reward worked on each trajectory.

    An episode holds an environment from its start to its end; it is in the engine's batch during its calls.
    """
    environments, engine, reward = [np.empty((0, 2))], [np.empty((0, 2))], [np.empty((0, 2))]
    for t in trajectories:
        environments.append(np.array([[t.started_at, t.ended_at]]))
        engine.append(np.asarray(t.calls, np.float64).reshape(-1, 2))
        if t.scored_at:
            reward.append(np.array([[t.scored_at - t.score_s, t.scored_at]]))
    found = {"environments": environments, "engine": engine, "reward": reward}
    return {lane: np.concatenate(parts) for lane, parts in found.items()}


def of_waves(store: Store, waves: Sequence[int]) -> Intervals:
    """The intervals of all trajectories in the finished groups of these waves."""
    keys = [layout.group(wave, index) for wave in waves for index in store.numbers(f"groups/{wave}")]
    return intervals(t for key in keys for t in decode(store.read(key))[0])


def occupancy(spans: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How many of the intervals `spans` [N, 2] are open on average between successive `edges` [B + 1]: [B]."""
    return np.diff(_open_seconds(spans, edges)) / np.diff(edges)


def _open_seconds(spans: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The integral, up to each edge, of the number of open intervals."""
    total = np.zeros(len(edges))
    for sign, times in ((1, spans[:, 0]), (-1, spans[:, 1])):
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        before = np.searchsorted(ordered, edges, side="right")
        total += sign * (before * edges - sums[before])
    return total
