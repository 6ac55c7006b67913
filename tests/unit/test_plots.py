"""The plots of a run record: pictures that matplotlib's own reader takes, and what the lanes say."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tracking import activity
from tasks.tracking.curve import _smooth, reward_curve
from tasks.tracking.timeline import Panel, _side_by_side, busy, timeline, timelines


def record(iterations: int = 6) -> dict[str, Any]:
    def measures(version: int) -> dict[str, Any]:
        return {"frozenlake": {"success": 0.2 + 0.05 * version, "reward": 0.1, "episodes": 64}}

    return {
        "name": "demo",
        "config": {"tasks": [{"name": "frozenlake"}]},
        "progress": {"done": iterations, "of": iterations},
        "iterations": [
            {
                "k": k,
                "metrics": {"success/frozenlake": 0.3, "reward/frozenlake/mean": None},
                "spans": [
                    {"lane": "rollout", "name": f"wave {k}", "start": 100.0 + 10 * k, "end": 107.0 + 10 * k},
                    {"lane": "train", "name": f"batch {k}", "start": 107.0 + 10 * k, "end": 109.0 + 10 * k},
                ],
            }
            for k in range(iterations)
        ],
        "evaluations": [{"version": v, "tasks": measures(v)} for v in (-1, 0, 5)],
        "before": measures(0),
        "after": measures(5),
        "gain": {"frozenlake": 0.25},
    }


def size(png: bytes) -> tuple[int, int]:
    from matplotlib.image import imread

    height, width, _ = imread(io.BytesIO(png), format="png").shape
    return width, height


def test_both_plots_are_pictures_of_a_readable_size() -> None:
    assert min(size(reward_curve(record()))) > 400
    width, height = size(timeline(record()))
    assert width > 1000 and height > 300


def test_the_best_fixed_path_is_drawn_where_it_was_measured() -> None:
    with_baseline = record()
    with_baseline["after"]["frozenlake"]["best_fixed_path"] = 0.43
    assert reward_curve(record()) != reward_curve(with_baseline)


@pytest.mark.parametrize("plot", [reward_curve, timeline])
def test_a_run_without_measurements_still_gives_a_picture(plot: Any) -> None:
    empty = {**record(0), "evaluations": [], "before": {}, "after": {}, "gain": {}, "config": {}}
    assert min(size(plot(empty))) > 100


def test_overlapping_spans_count_once_as_busy_time() -> None:
    spans = [{"lane": "rollout", "start": s, "end": e} for s, e in [(0, 4), (2, 3), (3, 6), (8, 9)]]
    assert busy(spans, "rollout") == 7
    assert busy(spans, "rollout", 1, 8.5) == 5.5


def test_overlapping_spans_are_drawn_in_places_of_their_own() -> None:
    spans = [
        {"name": n, "start": s, "end": e} for n, s, e in [("a", 0, 5), ("b", 1, 6), ("c", 5, 7), ("d", 6, 8)]
    ]
    assert [(span["name"], place) for span, place in _side_by_side(spans)] == [
        ("a", 0),
        ("b", 1),
        ("c", 0),
        ("d", 1),
    ]


def test_timelines_under_each_other_take_room_for_each() -> None:
    spans = record()["iterations"][0]["spans"]
    intervals = {"engine": np.array([[100.0, 103.0], [101.0, 106.0]])}
    one, three = (
        size(timelines("t", [Panel("p", spans, intervals, 100.0, 110.0)] * count)) for count in (1, 3)
    )
    assert three[1] > 2 * one[1] and three[0] == one[0]


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), max_size=12),
    st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True),
)
def test_occupancy_is_the_mean_number_of_open_intervals(starts, edges):
    spans = np.array([(a, a + length) for a, length in starts]).reshape(-1, 2)
    edges = np.array(sorted(edges), float)
    expected = [
        sum(max(0.0, min(b, end) - max(a, start)) for a, b in spans) / (end - start)
        for start, end in itertools.pairwise(edges)
    ]
    assert activity.occupancy(spans, edges) == pytest.approx(expected, abs=1e-6)


def test_smoothing_keeps_a_constant_and_starts_at_the_first_value() -> None:
    assert _smooth((0.4, 0.4, 0.4)) == pytest.approx([0.4] * 3)
    assert _smooth((0.2, 0.9))[0] == pytest.approx(0.2)


def test_matplotlib_and_mlflow_are_not_imported_with_the_tracking_modules() -> None:
    code = (
        "import sys, tasks.tracking.curve, tasks.tracking.timeline, tasks.tracking.run_record, tasks.tracking.mlflow_tracker\n"
        "assert not {'matplotlib', 'mlflow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
