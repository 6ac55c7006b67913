"""What `rollart bench async` makes of its turns, and the order it takes them in."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from flows.bench_async import in_turn
from flows.bench_report import show, summarise
from flows.schedules import PRESETS, SCHEDULES
from tasks.config import RunConfig


def turn(schedule: str, repeat: int, seconds: float) -> dict[str, Any]:
    return {
        "schedule": schedule, "repeat": repeat, "first": 0, "iterations": 4, "start": 0.0, "end": 4 * seconds,
        "seconds": seconds, "trajectories_per_s": 32 / seconds, "trained_tokens": 100.0, "success": 0.5,
        "staleness": 0.0, "wasted_tokens": 0.0,
        "idle": {"environments": 0.5, "engine": 0.5, "trainer": 0.5},
        "work": {"environments": 3.0, "engine": 1.0, "trainer": 2.0 if schedule == "synchronous" else 9.0,
                 "all cores": 8.0},
    }  # fmt: skip


TURNS = [
    turn(name, repeat, seconds + repeat)
    for name, seconds in [("monolithic", 20.0), ("synchronous", 8.0), ("one-off", 6.0), ("rollart", 3.0)]
    for repeat in range(3)
]


def test_speed_ups_are_ratios_of_medians() -> None:
    speedup = summarise(TURNS)["speedup"]
    assert speedup == pytest.approx(
        {"monolithic": 21 / 4, "synchronous": 9 / 4, "one-off": 7 / 4, "rollart": 1}
    )


def test_the_lower_bound_is_the_busiest_lane_with_the_trainer_undisturbed() -> None:
    summary = summarise(TURNS)
    assert (summary["lower_bound"]["lane"], summary["lower_bound"]["seconds"]) == ("environments", 3.0)
    assert summary["over_lower_bound"] == pytest.approx(4 / 3)


def test_a_turn_is_compared_with_its_own_bound() -> None:
    turns = copy.deepcopy(TURNS)
    mine = [turn for turn in turns if turn["schedule"] == "rollart"]  # 3, 4 and 5 s an iteration
    for one, seconds in zip(mine, (2.9, 3.2, 3.3), strict=True):
        one["work"]["environments"] = seconds
    assert summarise(turns)["over_lower_bound"] == pytest.approx(4 / 3.2)


def test_the_table_has_a_line_for_every_schedule() -> None:
    console = Console(record=True, width=110)
    show("middle", summarise(TURNS), console)
    text = console.export_text()
    assert all(name in text for name in SCHEDULES)
    assert "5.25x" in text and "1.33 times" in text


def test_each_schedule_comes_at_each_place_equally_often() -> None:
    orders = [in_turn(list(SCHEDULES), repeat) for repeat in range(8)]
    for place in range(4):
        assert set(Counter(order[place] for order in orders).values()) == {2}


def test_schedules_and_presets_are_settings_of_a_run() -> None:
    for rollout in SCHEDULES.values():
        RunConfig(rollout={"groups": 8, "group_size": 4, **rollout}, environments={"slots": 32})
    for environments in PRESETS.values():
        RunConfig(environments=environments)
