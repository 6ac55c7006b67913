"""The timeline of a run: one row a lane, so that it can be seen what overlaps with what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.tracking.activity import Intervals, occupancy
from tasks.tracking.canvas import GREY, GRID, INK, new_figure, say, to_png, write_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Span = Mapping[str, Any]  # {"lane", "name", "start", "end"}, seconds since the epoch

AREAS = ("environments", "engine", "reward")  # drawn as how many are at work
BARS = ("rollout", "train", "weights", "evaluate")  # drawn one by one
ROWS = ("rollout", *AREAS, "train", "weights", "evaluate")  # from the top
NAMES = {
    "rollout": "waves",
    "train": "trainer",
    "weights": "weight updates",
    "evaluate": "evaluation",
}
COLOURS = {
    "rollout": "#2563eb",
    "environments": "#0891b2",
    "engine": "#4f46e5",
    "reward": "#059669",
    "train": "#d97706",
    "weights": "#dc2626",
    "evaluate": "#9333ea",
}
BINS = 400


@dataclass(frozen=True)
class Panel:
    """What one timeline shows between `start` and `end`, seconds since the epoch."""

    title: str
    spans: Sequence[Span]
    intervals: Intervals
    start: float
    end: float


def timeline(record: Mapping[str, Any], intervals: Intervals | None = None, iterations: int = 12) -> bytes:
    """PNG of the last `iterations` iterations of a run's record that have spans, seconds since the first.

    `intervals` is of the trajectories of those iterations.
    """
    kept = [iteration for iteration in record["iterations"] if iteration["spans"]][-iterations:]
    spans = [span for iteration in kept for span in iteration["spans"]]
    if not spans:
        figure, (axis,) = new_figure(1, height=2.5, width=11.5)
        say(axis, "no stage has run yet")
        write_title(figure, f"{record['name']}: timeline", "")
        return to_png(figure)
    shown = f"iterations {kept[0]['k']} to {kept[-1]['k']}" if len(kept) > 1 else f"iteration {kept[0]['k']}"
    start, end = min(s["start"] for s in spans), max(s["end"] for s in spans)
    return timelines(
        f"{record['name']}: timeline of {shown}", [Panel("", spans, intervals or {}, start, end)]
    )


def timelines(title: str, panels: Sequence[Panel]) -> bytes:
    """PNG of several timelines under each other, on one scale of seconds."""
    rows = [row for row in ROWS if any(_has(panel, row) for panel in panels)]
    height = 0.8 + 0.46 * max(len(rows), 2)
    figure, axes = new_figure(len(panels), height=height, width=11.5, columns=1)
    until = max(panel.end - panel.start for panel in panels)
    for axis, panel in zip(axes, panels, strict=True):
        for place, row in enumerate(rows):
            if row in AREAS:
                _draw_area(axis, place, row, panel)
            else:
                _draw_bars(axis, place, row, panel, until)
        axis.set_yticks(range(len(rows)), [NAMES.get(row, row) for row in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlim(0, until * 1.005 or 1)
        axis.grid(axis="x", color=GRID, linewidth=0.8)
        axis.tick_params(axis="y", length=0)
        if panel.title:
            axis.set_title(panel.title, loc="left", fontsize=11, color=INK)
    axes[-1].set_xlabel("seconds")
    write_title(figure, title, _busy_line(panels[0], rows) if len(panels) == 1 else "")
    return to_png(figure)


def busy(spans: Sequence[Span], lane: str, start: float = -math.inf, end: float = math.inf) -> float:
    """Seconds between `start` and `end` in which the lane has at least one span: overlapping ones count once."""
    total, reached = 0.0, start
    for begin, until in sorted((s["start"], s["end"]) for s in spans if s["lane"] == lane):
        until = min(until, end)
        total += max(0.0, until - max(begin, reached))
        reached = max(reached, until)
    return total


def _has(panel: Panel, row: str) -> bool:
    if row in AREAS:
        return len(panel.intervals.get(row, ())) > 0
    return any(span["lane"] == row for span in panel.spans)


def _busy_line(panel: Panel, rows: Sequence[str]) -> str:
    seconds = panel.end - panel.start
    lanes = [row for row in rows if row in BARS]
    parts = [
        f"{NAMES.get(row, row)} {busy(panel.spans, row, panel.start, panel.end) / seconds:.0%}"
        for row in lanes
    ]
    return f"busy: {', '.join(parts)}" if seconds and parts else ""


def _draw_area(axis: Axes, place: int, row: str, panel: Panel) -> None:
    """How many episodes are in this lane at each moment, up to the most there were."""
    spans = panel.intervals.get(row, np.empty((0, 2)))
    if not len(spans) or panel.end <= panel.start:
        return
    edges = np.linspace(panel.start, panel.end, BINS + 1)
    counts = occupancy(spans, edges)
    most = counts.max()
    if most <= 0:
        return
    base, height = place + 0.35, 0.75 * counts / most
    axis.fill_between(
        edges[:-1] - panel.start, base, base - height, step="post", color=COLOURS[row], alpha=0.8, linewidth=0
    )
    axis.axhline(base, color=GRID, linewidth=0.8)
    if most < 1:
        return
    axis.annotate(
        f"most at once: {most:.0f}", (1.0, base - 0.6), xycoords=("axes fraction", "data"), xytext=(4, 0),
        textcoords="offset points", fontsize=7.5, color=GREY, va="center", annotation_clip=False,
    )  # fmt: skip


def _draw_bars(axis: Axes, place: int, row: str, panel: Panel, until: float) -> None:
    spans = [
        s for s in panel.spans if s["lane"] == row and s["end"] >= panel.start and s["start"] <= panel.end
    ]
    placed = _side_by_side(spans)
    height = 0.7 / (1 + max((at for _, at in placed), default=0))
    for index, (span, at) in enumerate(placed):
        start = max(span["start"], panel.start) - panel.start
        length = min(span["end"], panel.end) - panel.start - start
        y = place - 0.35 + height * (at + 0.5)
        axis.barh(
            y, max(length, until * 0.002), left=start, height=height, color=COLOURS[row],
            alpha=0.95 if index % 2 else 0.75, edgecolor="white", linewidth=0.6 if length > until * 0.006 else 0,
        )  # fmt: skip
        names = [span["name"], *span["name"].split()[-1:]]  # the whole name if it fits, else its number
        fitting = [name for name in names if length > until * 0.0066 * len(name) and height > 0.2]
        if fitting:
            axis.text(
                start + length / 2, y, fitting[0], ha="center", va="center", fontsize=7.5, color="white"
            )


def _side_by_side(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Spans in the order of their start, each with the first place in its lane that is free (at most 4 places)."""
    free_from: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda span: span["start"]):
        place = next((i for i, end in enumerate(free_from) if end <= span["start"]), len(free_from))
        if place == len(free_from) and place < 4:
            free_from.append(0.0)
        place = min(place, 3)
        free_from[place] = span["end"]
        placed.append((span, place))
    return placed
