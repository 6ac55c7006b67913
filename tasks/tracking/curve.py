"""The learning curve of a run, drawn from its record (`tasks.tracking.run_record.read_run`) as PNG bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.tracking.canvas import GREY, GRID, INK, new_figure, say, to_png, write_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TASK_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")


def reward_curve(record: Mapping[str, Any]) -> bytes:
    """Success by version, one panel a task: evaluations on held-out seeds as points, training episodes as a line.

    The success of the best fixed path is dashed, where an evaluation has it (`best_fixed_path`). Rewards get a
    panel where they differ from success. Version v on the axis is the policy after v iterations; batch k was
    made with version k (or older, when rollout runs ahead).
    """
    panels = _panels(record)
    figure, axes = new_figure(max(1, len(panels)), height=3.9)
    for axis, (task, measure) in zip(axes, panels, strict=False):
        colour = TASK_COLOURS[_tasks(record).index(task) % len(TASK_COLOURS)]
        baseline = record["after"].get(task, {}).get("best_fixed_path") if measure == "success" else None
        _draw_panel(axis, record, task, measure, colour, baseline)
    if not panels:
        say(axes[0], "nothing has been measured yet")
    write_title(figure, f"{record['name']}: learning", _gain_line(record))
    return to_png(figure)


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
