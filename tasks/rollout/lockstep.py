"""Lock step by turn, as monolithic systems roll out: every episode of a wave waits for all others before each turn.

Only for comparison (`rollout.barrier = "turn"`). It works inside one worker process that holds a whole wave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.trajectory import EpisodeSpec

WAIT_S = 120.0

_barriers: dict[tuple[str, int, int], TurnBarrier] = {}
_lock = threading.Lock()


class TurnBarrier:
    """Lets its parties go on together; unlike threading.Barrier, parties leave one by one."""

    def __init__(self, parties: int):
        self._parties, self._waiting, self._round = parties, 0, 0
        self._changed = threading.Condition()

    def wait(self) -> None:
        """Wait until every party that has not left waits too, or for WAIT_S: a party may have died unseen."""
        with self._changed:
            self._waiting += 1
            this_round = self._round
            self._go_on()
            if not self._changed.wait_for(lambda: self._round != this_round, WAIT_S):
                self._waiting -= 1

    def leave(self) -> int:
        """This party comes no more; returns how many are left."""
        with self._changed:
            self._parties -= 1
            self._go_on()
            return self._parties

    def _go_on(self) -> None:
        if self._waiting >= self._parties:
            self._waiting, self._round = 0, self._round + 1
            self._changed.notify_all()


@contextmanager
def turn_barrier(
    run: str, lockstep: tuple[int, int] | None, spec: EpisodeSpec
) -> Iterator[Callable[[], None]]:
    """Take part in the lock step of a wave of (groups, group_size); yields what to call before each turn."""
    if lockstep is None:
        yield lambda: None
        return
    groups, group_size = lockstep
    replacement = spec.group >= groups  # it comes after the others
    key = (run, spec.wave, spec.group if replacement else 0)
    with _lock:
        barrier = _barriers.setdefault(key, TurnBarrier(group_size * (1 if replacement else groups)))
    try:
        yield barrier.wait
    finally:
        if barrier.leave() == 0:
            with _lock:
                _barriers.pop(key, None)
