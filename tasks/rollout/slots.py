"""The environment slots of a run's cluster: who may start an episode next, and how busy the slots are."""

from __future__ import annotations

import time
from typing import Protocol

CANCELLED = "rollart-cancelled"  # Dask topic: what cancelled episodes had generated


class Waiting(Protocol):
    """Something with episodes that wait for a slot."""

    def urgency(self) -> tuple[float, int]:
        """Of the next episode that waits: smaller is more urgent."""

    def start_waiting(self) -> None:
        """Start as many episodes as there are slots."""


class Slots:
    """The environments that the cluster holds at once, shared by the pools of a run.

    `busy_s` is the integral of the slots in use over time, in slot-seconds.
    """

    def __init__(self, total: int):
        self.total, self.used = total, 0
        self._pools: list[Waiting] = []
        self._busy_s, self._since = 0.0, time.monotonic()

    @property
    def free(self) -> int:
        return max(0, self.total - self.used)

    @property
    def busy_s(self) -> float:
        self.take(0)
        return self._busy_s

    def take(self, count: int) -> None:
        """Use `count` slots more; negative gives them back."""
        now = time.monotonic()
        self._busy_s += self.used * (now - self._since)
        self.used, self._since = self.used + count, now

    def join(self, pool: Waiting) -> None:
        """Have the pool's episodes started when there are slots."""
        if pool not in self._pools:
            self._pools.append(pool)

    def leave(self, pool: Waiting) -> None:
        """Nothing of the pool waits any more."""
        if pool in self._pools:
            self._pools.remove(pool)

    def fill(self) -> None:
        """Start what waits, the pool with the most urgent episode first."""
        for pool in sorted(self._pools, key=lambda pool: pool.urgency()):
            if not self.free:
                break
            pool.start_waiting()
