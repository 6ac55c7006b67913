"""What `rollart bench async` prints and draws, from the turns it measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tasks.store import Store, layout
from tasks.tracking.activity import of_waves
from tasks.tracking.timeline import Panel, timelines

AROUND = 3  # waves before and after the measured ones that may be at work beside them


def summarise(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread by schedule, speed-ups of `rollart`, and how close it comes to its lower bound.

    The bound is the pure work of its busiest lane: environment seconds of the consumed trajectories over the
    slots, processor seconds of the engine's core, and the trainer's seconds in `synchronous`, where nothing
    else runs. Each turn is compared with its own bound: one whose episodes happen to be long has more work too.
    """
    found: dict[str, Any] = {}
    for schedule in dict.fromkeys(turn["schedule"] for turn in turns):
        mine = [turn for turn in turns if turn["schedule"] == schedule]
        if mine:
            found[schedule] = _medians(mine)
    rollart, synchronous = found["rollart"], found["synchronous"]
    lanes_work = {**rollart["work"], "trainer": synchronous["work"]["trainer"]}
    lanes_work.pop("all cores")
    lane = max(lanes_work, key=lambda name: lanes_work[name])
    return {
        "schedules": found,
        "speedup": {name: f["seconds"] / rollart["seconds"] for name, f in found.items()},
        "lower_bound": {"lane": lane, "seconds": lanes_work[lane], "work": lanes_work},
        "over_lower_bound": statistics.median(
            turn["seconds"] / (lanes_work if lane == "trainer" else turn["work"])[lane]
            for turn in turns
            if turn["schedule"] == "rollart"
        ),
    }


def _medians(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    plain = ("seconds", "trajectories_per_s", "trained_tokens", "success", "staleness", "wasted_tokens")
    seconds = [turn["seconds"] for turn in turns]
    return {
        **{name: statistics.median(turn[name] for turn in turns) for name in plain},
        "fastest": min(seconds),
        "slowest": max(seconds),
        "repeats": len(turns),
        **{
            group: {lane: statistics.median(turn[group][lane] for turn in turns) for lane in turns[0][group]}
            for group in ("idle", "work")
        },
    }


def show(preset: str, summary: dict[str, Any], console: Console) -> None:
    """The table of a preset, and two lines that say what it means."""
    table = Table(
        title=f"environment latency: {preset}", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    headings = (
        "schedule",
        "s/iter",
        "spread",
        "traj/s",
        "idle: env",
        "engine",
        "trainer",
        "stale",
        "rollart",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "schedule" else "right", no_wrap=True)
    for name, found in summary["schedules"].items():
        idle = found["idle"]
        table.add_row(
            name,
            f"{found['seconds']:.2f}",
            f"{found['fastest']:.1f}-{found['slowest']:.1f}",
            f"{found['trajectories_per_s']:.1f}",
            *(f"{idle[lane]:.0%}" for lane in ("environments", "engine", "trainer")),
            f"{found['staleness']:.2f}",
            f"{summary['speedup'][name]:.2f}x",
        )
    console.print(table)
    bound = summary["lower_bound"]
    work = ", ".join(f"{lane} {seconds:.2f} s" for lane, seconds in bound["work"].items())
    console.print(f"pure work an iteration: {work}")
    console.print(
        f"lower bound: {bound['seconds']:.2f} s ({bound['lane']}); rollart takes {summary['over_lower_bound']:.2f} times its own"
    )


def picture(title: str, store: Store, turns: Sequence[dict[str, Any]]) -> bytes:
    """The timelines of the schedules' median turns under each other, on one scale."""
    panels = []
    for schedule in dict.fromkeys(turn["schedule"] for turn in turns):
        mine = sorted((t for t in turns if t["schedule"] == schedule), key=lambda turn: turn["seconds"])
        turn = mine[len(mine) // 2]
        batches = range(turn["first"], turn["first"] + turn["iterations"])
        spans = [span for k in batches for span in store.read_json(layout.iteration(k))["spans"]]
        label = f"{schedule}: {turn['seconds']:.1f} s an iteration"
        panels.append(
            Panel(
                label,
                spans,
                of_waves(store, range(batches.start - AROUND, batches.stop + AROUND)),
                turn["start"],
                turn["end"],
            )
        )
    return timelines(title, panels)
