"""A machine whose clock is wrong is named once; a store that is slow now and then is not taken for one."""

from __future__ import annotations

import time

import pytest

from flows.clocks import APART_S, IN_A_ROW, Clocks
from tasks.services import Registration


def beats(clocks: Clocks, offsets: list[float], host: str = "gpu-7") -> None:
    for number, offset in enumerate(offsets):
        at = time.time() + offset + number * 1e-3
        clocks.see(Registration("trainer", "trainer", "gpu-compute", host=host, heartbeat_at=at))


@pytest.mark.parametrize(("offset", "how"), [(60.0, "60 s ahead of"), (-60.0, "60 s behind")])
def test_a_clock_that_is_apart_is_said_once_with_its_machine(offset: float, how: str) -> None:
    said: list[str] = []
    beats(Clocks(said.append), [offset] * 3 * (IN_A_ROW + 1))
    assert len(said) == 1 and "gpu-7" in said[0] and how in said[0]


def test_clocks_that_agree_and_single_late_heartbeats_are_no_news() -> None:
    said: list[str] = []
    late = [-2 * APART_S] * (IN_A_ROW - 1)
    beats(Clocks(said.append), [0.0, *late, 0.0, *late, APART_S / 2])
    assert said == []


def test_an_old_registration_that_nobody_renews_is_no_news() -> None:
    said: list[str] = []
    clocks, old = Clocks(said.append), Registration("trainer", "trainer", "gpu-compute", heartbeat_at=1.0)
    for _ in range(2 * IN_A_ROW):
        clocks.see(old)
    assert said == []
