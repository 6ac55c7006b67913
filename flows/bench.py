"""Benchmarks of the workflow itself, computed from what runs recorded: figures and ratios, never a pass or fail."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

Span = dict[str, Any]  # {"lane", "name", "start", "end"}, seconds since the epoch


def overhead(iterations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The orchestration's own time: seconds of each iteration in which no stage was working.

    Takes the records of a run's iterations in order (`iterations/<k>.json`); an iteration's window runs from the
    end of its predecessor's record to the end of its own. Returns `{"iterations", "median_s", "max_s", "parts"}`,
    where a part is the median gap between two stages, e.g. `"rollout -> collect"`.
    """
    totals: list[float] = []
    parts: dict[str, list[float]] = {}
    for before, record in itertools.pairwise(iterations):
        gaps = idle_parts([*before["spans"], *record["spans"]], before["at"], record["at"])
        totals.append(sum(gaps.values()))
        for name, seconds in gaps.items():
            parts.setdefault(name, []).append(seconds)
    if not totals:
        return {"iterations": 0, "median_s": 0.0, "max_s": 0.0, "parts": {}}
    medians = {
        name: statistics.median([*found, *[0.0] * (len(totals) - len(found))])
        for name, found in parts.items()
    }
    return {
        "iterations": len(totals),
        "median_s": statistics.median(totals),
        "max_s": max(totals),
        "parts": dict(sorted(medians.items(), key=lambda part: -part[1])),
    }


def idle_parts(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Seconds of the window in which no span was open, by the stages before and after each gap."""
    inside = sorted(
        ({**span, "start": max(span["start"], start), "end": min(span["end"], end)} for span in spans),
        key=lambda span: span["start"],
    )
    gaps: dict[str, float] = {}
    reached, last = start, "record"
    for span in inside:
        if span["end"] <= span["start"]:
            continue
        if span["start"] > reached:
            _add(gaps, f"{last} -> {span['lane']}", span["start"] - reached)
        if span["end"] > reached:
            reached, last = span["end"], span["lane"]
    if end > reached:
        _add(gaps, f"{last} -> record", end - reached)
    return gaps


def _add(gaps: dict[str, float], name: str, seconds: float) -> None:
    gaps[name] = gaps.get(name, 0.0) + seconds
