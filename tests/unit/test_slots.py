"""Slots that pools share, and the lock step of the monolithic schedule."""

from __future__ import annotations

import threading
import time

import pytest

from tasks.rollout import slots as slots_module
from tasks.rollout.lockstep import TurnBarrier, turn_barrier
from tasks.rollout.slots import Slots
from tasks.trajectory import EpisodeSpec


class Pool:
    """Episodes of one priority that wait."""

    def __init__(self, slots: Slots, priority: float, waiting: int):
        self.slots, self.priority, self.waiting, self.started = slots, priority, waiting, 0
        slots.join(self)

    def urgency(self) -> tuple[float, int]:
        return (self.priority, 0)

    def start_waiting(self) -> None:
        count = min(self.slots.free, self.waiting)
        self.waiting, self.started = self.waiting - count, self.started + count
        self.slots.take(count)


def test_the_most_urgent_pool_gets_the_free_slots_first() -> None:
    slots = Slots(5)
    late, early = Pool(slots, 2, 4), Pool(slots, 1, 3)
    slots.fill()
    assert (early.started, late.started, slots.free) == (3, 2, 0)
    slots.take(-1)
    slots.fill()
    assert late.started == 3


def test_busy_seconds_are_the_integral_of_the_slots_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(slots_module.time, "monotonic", lambda: now)
    slots = Slots(4)
    slots.take(3)
    now = 102.0
    slots.take(-2)
    now = 105.0
    assert slots.busy_s == pytest.approx(3 * 2 + 1 * 3)


def test_parties_go_on_together_turn_by_turn_and_leave_one_by_one() -> None:
    barrier, log, lock = TurnBarrier(3), [], threading.Lock()

    def episode(name: int, turns: int) -> None:
        for turn in range(turns):
            barrier.wait()
            with lock:
                log.append((turn, name))
            time.sleep(0.02 * name)
        barrier.leave()

    threads = [
        threading.Thread(target=episode, args=(name, turns)) for name, turns in [(0, 4), (1, 2), (2, 3)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [turn for turn, _ in log] == sorted(turn for turn, _ in log)
    assert sorted(log) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 2), (3, 0)]


def test_a_replacement_group_waits_only_for_its_own_members() -> None:
    with turn_barrier("run", (2, 1), EpisodeSpec("t", 0, 7, 2, 0)) as wait:
        wait()  # alone, it goes on at once
