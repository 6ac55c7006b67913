"""The terminal view: what it shows of a Progress, at any width, and as plain lines."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from flows import view
from flows.progress import Progress
from tasks.store import Store


def record(k: int, success: float = 0.5, **metrics: float) -> dict[str, Any]:
    measured = {
        "success/frozenlake": success,
        "reward/frozenlake/mean": success,
        "time/stage_train": 4.0 + k,
        **metrics,
    }
    return {"k": k, "at": 1000.0 + 10 * k, "metrics": measured}


def evaluation(version: int, success: float) -> dict[str, Any]:
    return {
        "version": version,
        "tasks": {"frozenlake": {"success": success, "episodes": 256, "best_fixed_path": 0.44}},
    }


def busy() -> Progress:
    return Progress(
        run="frozenlake-1129-143012",
        phase="training",
        iterations=25,
        iteration=5,
        stage="train",
        stage_started_at=1095.0,
        episodes_done=180,
        episodes_wanted=256,
        services={"engine-0": "ready, version 5", "trainer": "failed: out of memory"},
        history=[
            record(k, 0.2 + 0.1 * k, **{"tokens/generated_per_s": 4102.0, "staleness/mean": 0.5})
            for k in range(5)
        ],
        evaluations=[evaluation(0, 0.226), evaluation(5, 0.541)],
        prefect_url="http://127.0.0.1:4217/runs/flow-run/0a1b2c3d-1111-2222-3333-444455556666",
        messages=["engine-0 ended with code -9 and is restarted"],
    )


def text(progress: Progress, width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(view.render(progress, started=0.0, now=1100.0))
    return console.export_text()


def test_the_view_shows_everything_a_person_asks_for() -> None:
    shown = text(busy(), 100)
    for expected in (
        "frozenlake-1129-143012", "training", "iteration 5/25", "episodes 180/256", "about 3:20 left", "0.60", "▃",
        "v0 0.23 → v5 0.54", "staleness 0.5", "4,102 tokens/s", "train 8.0 (6.0)", "ready, version 5", "out of memory",
        "restarted", "18:20",
    ):  # fmt: skip
        assert expected in shown, expected


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("progress", [Progress(run="r"), busy()], ids=["empty", "busy"])
def test_no_line_is_wider_than_the_terminal(progress: Progress, width: int) -> None:
    assert all(cell_len(line) <= width for line in text(progress, width).splitlines())


def test_nothing_is_made_up_before_there_is_something() -> None:
    shown = text(Progress(run="r", iterations=25), 80)
    assert "left" not in shown and "success" not in shown and "rollout" not in shown


def test_time_left_follows_the_pace_of_the_last_iterations() -> None:
    assert view.time_left(Progress(iterations=25, history=[record(0)])) is None
    assert view.time_left(Progress(iterations=25, history=[record(k) for k in range(5)])) == 200.0


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([0.0, 0.5, 1.0], "▁▅█"), ([0.0, 2.0], "▁█"), ([-1.0, 1.0], "▁█")]
)
def test_a_sparkline_spans_zero_to_one_or_the_largest(values: list[float], bars: str) -> None:
    assert view.sparkline(values, 8) == bars
    assert view.sparkline([1.0] * 20, 8) == "█" * 8


@pytest.mark.parametrize(("seconds", "shown"), [(7.9, "7 s"), (123, "2:03"), (3723, "1:02:03")])
def test_clock(seconds: float, shown: str) -> None:
    assert view.clock(seconds) == shown


def test_plain_lines_say_each_event_once_and_hold_no_control_characters() -> None:
    progress, done, file = busy(), threading.Event(), io.StringIO()
    done.set()
    view.watch(progress, done, Console(file=file, force_terminal=False))
    lines = file.getvalue().splitlines()
    assert sum("iteration 5/25" in line for line in lines) == 1
    assert sum("evaluation of version 5" in line and "0.541 of 256 episodes" in line for line in lines) == 1
    assert any(line.endswith("trainer: failed: out of memory") for line in lines)
    assert all(character.isprintable() for line in lines for character in line)


def test_plain_lines_do_not_repeat_themselves() -> None:
    progress, lines = busy(), view.PlainLines()
    assert list(lines.new(progress))
    assert list(lines.new(progress)) == []
    progress.services = {**progress.services, "engine-0": "ready, version 6"}
    assert list(lines.new(progress)) == []
    progress.history = [*progress.history, record(5)]
    assert len(list(lines.new(progress))) == 1


def test_the_summary_sets_before_beside_after() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(view._before_and_after(busy().evaluations))
    shown = console.export_text()
    assert all(
        word in shown for word in ("version 0", "version 5", "0.226", "0.541", "+0.315", "0.440", "256")
    )


def test_the_list_of_runs_shows_both_successes_in_80_columns(tmp_path: Path) -> None:
    out = io.StringIO()
    run = {
        "name": "frozenlake-1129-143012",
        "state": "interrupted",
        "started_at": 1000.0,
        "seconds": 83.0,
        "progress": {"done": 17, "of": 25},
        "before": {"frozenlake": {"success": 0.21}},
        "after": {"frozenlake": {"success": 0.71}},
    }
    fresh = {**run, "state": "prepared", "started_at": None, "seconds": None, "before": {}, "after": {}}
    view.show_runs([run, fresh], Store(str(tmp_path)), Console(file=out, width=80))
    assert "0.21 -> 0.71" in out.getvalue() and len(out.getvalue().splitlines()) == 3
