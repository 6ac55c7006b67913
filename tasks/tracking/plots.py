"""The two plots of a run, drawn from its record (`tasks.tracking.run_record.read_run`) as PNG bytes.

Invariants: no global matplotlib state (Figure objects on the Agg canvas), so a plot may be drawn in any thread;
matplotlib is imported only when something is drawn; a record without data gives a picture that says so.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY, GRID = "#1f2933", "#7b8794", "#e4e7eb"
TASK_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
LANES = ("rollout", "reward", "collect", "train", "weights", "evaluate")  # from the top; others follow
LANE_COLOURS = {
    "rollout": "#2563eb",
    "reward": "#059669",
    "collect": "#0891b2",
    "train": "#d97706",
    "weights": "#dc2626",
    "evaluate": "#9333ea",
}
LANE_NAMES = {"train": "trainer", "weights": "weight updates", "evaluate": "evaluation"}


def reward_curve(record: Mapping[str, Any]) -> bytes:
    """Success by version, one panel a task: evaluations on held-out seeds as points, training episodes as a line.

    The success of the best fixed path is dashed, where an evaluation has it (`best_fixed_path`). Rewards get a
    panel where they differ from success. Version v on the axis is the policy after v iterations; batch k was
    made with version k (or older, when rollout runs ahead).
    """
    panels = _panels(record)
    figure, axes = _figure(max(1, len(panels)), height=3.9)
    for axis, (task, measure) in zip(axes, panels, strict=False):
        colour = TASK_COLOURS[_tasks(record).index(task) % len(TASK_COLOURS)]
        baseline = record["after"].get(task, {}).get("best_fixed_path") if measure == "success" else None
        _draw_panel(axis, record, task, measure, colour, baseline)
    if not panels:
        _say(axes[0], "nothing has been measured yet")
    _title(figure, f"{record['name']}: learning", _gain_line(record))
    return _png(figure)


def timeline(record: Mapping[str, Any], iterations: int = 12) -> bytes:
    """What ran when: one row a lane, the last `iterations` iterations that have spans, seconds since the first."""
    kept = [iteration for iteration in record["iterations"] if iteration["spans"]][-iterations:]
    spans = [span for iteration in kept for span in iteration["spans"]]
    lanes = _lanes(spans)
    figure, (axis,) = _figure(1, height=1.7 + 0.52 * max(len(lanes), 2), width=11.5)
    if not spans:
        _say(axis, "no stage has run yet")
        _title(figure, f"{record['name']}: timeline", "")
        return _png(figure)
    origin = min(span["start"] for span in spans)
    until = max(span["end"] for span in spans) - origin
    for row, lane in enumerate(lanes):
        _draw_lane(axis, row, lane, [span for span in spans if span["lane"] == lane], origin, until)
    axis.set_yticks(range(len(lanes)), [LANE_NAMES.get(lane, lane) for lane in lanes])
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlim(0, until * 1.005 or 1)
    axis.set_xlabel("seconds")
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.tick_params(axis="y", length=0)
    shown = f"iterations {kept[0]['k']} to {kept[-1]['k']}" if len(kept) > 1 else f"iteration {kept[0]['k']}"
    busy = (
        ", ".join(f"{LANE_NAMES.get(lane, lane)} {_busy(spans, lane) / until:.0%}" for lane in lanes)
        if until
        else ""
    )
    _title(figure, f"{record['name']}: timeline of {shown}", f"busy: {busy}" if busy else "")
    return _png(figure)


# the learning curve


def _tasks(record: Mapping[str, Any]) -> list[str]:
    """Tasks in the order of the configuration, then any others that were measured."""
    named = [task["name"] for task in record["config"].get("tasks", [])]
    measured = [task for evaluation in record["evaluations"] for task in evaluation["tasks"]]
    trained = [
        name.split("/")[1]
        for i in record["iterations"]
        for name in i["metrics"]
        if name.startswith("success/")
    ]
    return list(dict.fromkeys([*named, *measured, *trained]))


def _panels(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(task, measure) to draw: success always, reward where it tells something else."""
    panels: list[tuple[str, str]] = []
    for task in _tasks(record):
        success = _evaluated(record, task, "success") + _trained(record, task, "success")
        reward = _evaluated(record, task, "reward") + _trained(record, task, "reward")
        if success:
            panels.append((task, "success"))
        differs = any(abs(a[1] - b[1]) > 0.01 for a, b in zip(success, reward, strict=False))
        if reward and (differs or not success):
            panels.append((task, "reward"))
    return panels


def _evaluated(record: Mapping[str, Any], task: str, measure: str) -> list[tuple[int, float, int]]:
    """(version, value, episodes) of the evaluations of the RL part."""
    found = []
    for evaluation in record["evaluations"]:
        measures = evaluation["tasks"].get(task, {})
        if evaluation["version"] >= 0 and measures.get(measure) is not None:
            found.append((evaluation["version"], measures[measure], measures.get("episodes") or 0))
    return found


def _trained(record: Mapping[str, Any], task: str, measure: str) -> list[tuple[int, float, int]]:
    name = f"success/{task}" if measure == "success" else f"reward/{task}/mean"
    values = [(i["k"], i["metrics"].get(name)) for i in record["iterations"] if i["k"] >= 0]
    return [(k, value, 0) for k, value in values if value is not None]


def _draw_panel(
    axis: Axes, record: Mapping[str, Any], task: str, measure: str, colour: str, baseline: float | None
) -> None:
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator

    trained, evaluated = _trained(record, task, measure), _evaluated(record, task, measure)
    if trained:
        steps, values, _ = zip(*trained, strict=True)
        axis.plot(steps, values, color=colour, alpha=0.28, linewidth=1.2)
        axis.plot(
            steps,
            _smooth(values),
            color=colour,
            alpha=0.75,
            linewidth=2.2,
            label="training episodes (smoothed)",
        )
    if evaluated:
        steps, values, episodes = zip(*evaluated, strict=True)
        spread = [
            1.96 * math.sqrt(max(v * (1 - v), 0) / n) if n else 0
            for v, n in zip(values, episodes, strict=True)
        ]
        error = spread if measure == "success" else None
        bars = " (95%)" if error and any(error) else ""
        axis.errorbar(
            steps, values, yerr=error, fmt="o", color=INK, ecolor=INK, elinewidth=1.2, capsize=3, markersize=6.5,
            markerfacecolor="white", markeredgewidth=1.8, zorder=5, label=f"evaluation, held-out seeds{bars}",
        )  # fmt: skip
        for at in {0, len(steps) - 1}:
            above = values[at] < 0.85 or measure != "success"
            bar = spread[at] if error else 0.0
            axis.annotate(
                f"{values[at]:.2f}", (steps[at], values[at] + (bar if above else -bar)),
                xytext=(0, 9 if above else -20), textcoords="offset points", ha="center",
                fontsize=10.5, fontweight="bold", color=INK, zorder=6,
                path_effects=[withStroke(linewidth=3, foreground="white")],
            )  # fmt: skip
    if baseline is not None:
        axis.axhline(
            baseline,
            color=GREY,
            linestyle=(0, (5, 4)),
            linewidth=1.4,
            label=f"best fixed path ({baseline:.2f})",
        )
    if measure == "success":
        axis.set_ylim(0, 1)
    last = max([record["progress"]["of"], *(point[0] for point in [*trained, *evaluated])])
    axis.set_xlim(-0.04 * last - 0.2, 1.04 * last + 0.2)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.set_xlabel("policy version (iterations trained)")
    axis.set_title(f"{task}: {measure}", loc="left", fontsize=11, color=INK)
    axis.grid(color=GRID, linewidth=0.8)
    axis.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)


def _smooth(values: tuple[float, ...], weight: float = 0.6) -> list[float]:
    """Exponential moving average without the bias of its start (Kingma and Ba, arXiv 1412.6980, section 3)."""
    smoothed, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smoothed.append(average / (1 - weight**count))
    return smoothed


def _gain_line(record: Mapping[str, Any]) -> str:
    parts = [
        f"{task} {record['before'][task]['success']:.2f} → {record['after'][task]['success']:.2f} ({gain:+.2f})"
        for task, gain in record["gain"].items()
    ]
    return ("success: " + ", ".join(parts)) if parts else ""


# the timeline


def _lanes(spans: list[dict[str, Any]]) -> list[str]:
    found = {span["lane"] for span in spans}
    return [lane for lane in LANES if lane in found] + sorted(found - set(LANES))


def _draw_lane(
    axis: Axes, row: int, lane: str, spans: list[dict[str, Any]], origin: float, until: float
) -> None:
    colour = LANE_COLOURS.get(lane, GREY)
    placed = _side_by_side(spans)
    height = 0.7 / (1 + max(place for _, place in placed))
    for index, (span, place) in enumerate(placed):
        start, length = span["start"] - origin, span["end"] - span["start"]
        y = row - 0.35 + height * (place + 0.5)
        axis.barh(
            y, max(length, until * 0.002), left=start, height=height, color=colour, alpha=0.95 if index % 2 else 0.75,
            edgecolor="white", linewidth=0.6 if length > until * 0.006 else 0,
        )  # fmt: skip
        names = [span["name"], *span["name"].split()[-1:]]  # the whole name if it fits, else its number
        fitting = [name for name in names if length > until * 0.0066 * len(name) and height > 0.2]
        if fitting:
            axis.text(
                start + length / 2, y, fitting[0], ha="center", va="center", fontsize=7.5, color="white"
            )


def _side_by_side(spans: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
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


def _busy(spans: list[dict[str, Any]], lane: str) -> float:
    """Seconds in which the lane has at least one span: overlapping ones count once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted((span["start"], span["end"]) for span in spans if span["lane"] == lane):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# figures


def _figure(panels: int, height: float, width: float | None = None) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    columns = min(panels, 2)
    rows = math.ceil(panels / columns)
    figure = Figure(
        figsize=(width or (7.2 if columns == 1 else 11.5), 0.7 + height * rows), dpi=130, layout="constrained"
    )
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(panels)]
    for axis in axes:
        axis.set_axisbelow(True)
        axis.tick_params(colors=GREY, labelcolor=INK, labelsize=9)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color(GREY)
    return figure, axes


def _title(figure: Figure, title: str, line: str) -> None:
    text = f"{title}\n" if line else title
    figure.suptitle(text, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK, linespacing=1.4)
    if line:
        inch = figure.get_size_inches()[1]
        figure.text(0.01, 1 - 0.41 / inch, line, ha="left", va="center", fontsize=10, color=GREY)


def _say(axis: Axes, text: str) -> None:
    axis.set_axis_off()
    axis.text(0.5, 0.5, text, ha="center", va="center", color=GREY, transform=axis.transAxes)


def _png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", facecolor="white")
    return sink.getvalue()
