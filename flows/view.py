"""What a person sees of a run: the plan, a live view while it works, and a summary at its end.

On a terminal the view is redrawn in place; elsewhere it is plain lines, one an event, without control
characters. It only reads `Progress`, whose fields are replaced and never mutated.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flows.progress import Progress

if TYPE_CHECKING:
    from flows.checks import Plan
    from tasks.store import Store

BARS = "▁▂▃▄▅▆▇█"
REDRAW_S = 0.25
MESSAGES_SHOWN = 4
STAGES = ("rollout", "reward", "collect", "train", "publish", "weights", "evaluate")  # in the order of work


def watch(progress: Progress, done: threading.Event, console: Console | None = None) -> None:
    """Show `progress` until `done`; the caller's thread does the drawing."""
    console = console or Console()
    if not console.is_terminal:
        _watch_plainly(progress, done, console)
        return
    started = time.time()
    with Live(
        console=console, auto_refresh=False, transient=True, redirect_stdout=True, redirect_stderr=True
    ) as live:
        while not done.wait(REDRAW_S):
            live.update(render(progress, started), refresh=True)


# The live view


def render(progress: Progress, started: float, now: float | None = None) -> RenderableType:
    """The view of this moment."""
    now = time.time() if now is None else now
    parts: list[RenderableType] = [_headline(progress, now), _iteration_bar(progress)]
    if table := _task_table(progress):
        parts += ["", table]
    facts = [line for line in (_rollout_line(progress), _seconds_line(progress)) if line]
    if facts:
        parts += ["", *facts]
    if progress.services:
        parts += ["", _services_table(progress)]
    if progress.messages:
        parts += [
            "",
            *(Text(f"· {message}", style="yellow") for message in progress.messages[-MESSAGES_SHOWN:]),
        ]
    links = [("Prefect", progress.prefect_url), ("MLflow", progress.mlflow_url)]
    if any(url for _, url in links):
        parts += ["", *(Text.assemble((f"{name:8}", "dim"), url) for name, url in links if url)]
    title = Text.assemble(" ", (progress.run, "bold"), " ")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=f" {clock(now - started)} ",
        subtitle_align="right",
    )


def _headline(progress: Progress, now: float) -> Text:
    line = Text(progress.phase, style="bold cyan")
    if progress.stage:
        line.append(f"  {progress.stage}", style="default")
        line.append(f" {clock(now - progress.stage_started_at)}", style="dim")
    if progress.episodes_wanted:
        line.append(
            f"  episodes {min(progress.episodes_done, progress.episodes_wanted)}/{progress.episodes_wanted}",
            style="default",
        )
    return line


def _iteration_bar(progress: Progress) -> RenderableType:
    done = (
        len(progress.history) if progress.iteration is None else max(progress.iteration, _finished(progress))
    )
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=max(progress.iterations, 1), completed=done)
    left = time_left(progress)
    grid.add_row(
        f"iteration {done}/{progress.iterations}", bar, "" if left is None else f"about {clock(left)} left"
    )
    return grid


def _finished(progress: Progress) -> int:
    return int(progress.history[-1]["k"]) + 1 if progress.history else 0


def time_left(progress: Progress) -> float | None:
    """Seconds left at the pace of the last iterations, evaluations included; None before there are two."""
    ends = [record["at"] for record in progress.history[-9:]]
    if len(ends) < 2:
        return None
    pace = (ends[-1] - ends[0]) / (len(ends) - 1)
    return pace * max(progress.iterations - _finished(progress), 0)


def _task_table(progress: Progress) -> Table | None:
    names = _task_names(progress)
    if not names:
        return None
    table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
    table.add_column("task", style="bold", no_wrap=True)
    table.add_column("success", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("held-out success by version")
    for name in names:
        success = _series(progress, f"success/{name}")
        reward = _series(progress, f"reward/{name}/mean")
        table.add_row(
            name,
            f"{success[-1]:.2f}" if success else "-",
            Text(sparkline(success, 16), style="green"),
            f"{reward[-1]:.2f}" if reward else "-",
            _evaluations(progress, name),
        )
    return table


def _task_names(progress: Progress) -> list[str]:
    names = {
        name.removeprefix("success/")
        for record in progress.history
        for name in record["metrics"]
        if name.startswith("success/")
    }
    names |= {name for record in progress.evaluations for name in record["tasks"]}
    return sorted(names)


def _series(progress: Progress, metric: str) -> list[float]:
    return [record["metrics"][metric] for record in progress.history if metric in record["metrics"]]


def _evaluations(progress: Progress, task: str) -> str:
    """`v0 0.23 → v10 0.54 → v15 0.61`: the first and the last two."""
    shown = [
        f"v{e['version']} {e['tasks'][task]['success']:.2f}"
        for e in progress.evaluations
        if task in e["tasks"]
    ]
    return " → ".join(shown if len(shown) <= 3 else [shown[0], "…", *shown[-2:]])


def _rollout_line(progress: Progress) -> Text | None:
    if not progress.history:
        return None
    m = progress.history[-1]["metrics"]
    parts = []
    if "staleness/mean" in m:
        parts.append(f"staleness {m['staleness/mean']:.1f} (max {m.get('staleness/max', 0):.0f})")
    if "tokens/generated_per_s" in m:
        parts.append(f"{m['tokens/generated_per_s']:,.0f} tokens/s")
    if m.get("episodes/failed"):
        parts.append(f"{m['episodes/failed']:.0f} failed")
    if m.get("episodes/truncated"):
        parts.append(f"{m['episodes/truncated']:.0f} truncated")
    if "train/loss" in m:
        parts.append(f"loss {m['train/loss']:.3f}")
    return Text.assemble(("rollout  ", "dim"), " · ".join(parts))


def _seconds_line(progress: Progress) -> Text | None:
    stages = [f"{stage} {last:.1f} ({median:.1f})" for stage, last, median in stage_seconds(progress)]
    return (
        Text.assemble(("seconds  ", "dim"), " · ".join(stages), ("  last (median)", "dim"))
        if stages
        else None
    )


def stage_seconds(progress: Progress) -> list[tuple[str, float, float]]:
    """(stage, seconds in the last iteration that had it, median), in the order of work."""
    found: dict[str, list[float]] = {}
    for record in progress.history:
        for name, value in record["metrics"].items():
            if name.startswith("time/"):
                found.setdefault(name.removeprefix("time/").removeprefix("stage_"), []).append(value)
    rank = {stage: index for index, stage in enumerate(STAGES)}
    return [
        (s, found[s][-1], statistics.median(found[s]))
        for s in sorted(found, key=lambda s: (rank.get(s, 99), s))
    ]


def _services_table(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for name, state in progress.services.items():
        style = "green" if state.startswith("ready") else "red" if state.startswith("failed") else "yellow"
        table.add_row(name, Text(state, style=style))
    return table


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values as bars between 0 and 1, or the largest if it is above 1."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values[-width:])


def clock(seconds: float) -> str:
    """`1:02:03`, `2:03`, or `7 s`."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


# Plain lines


def _watch_plainly(progress: Progress, done: threading.Event, console: Console) -> None:
    lines = PlainLines()
    while True:
        last = done.wait(REDRAW_S)
        for line in lines.new(progress):
            console.file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        console.file.flush()
        if last:
            return


class PlainLines:
    """Turns changes of a Progress into lines: phases, iterations, evaluations, services, messages."""

    def __init__(self) -> None:
        self.phase = ""
        self.services: dict[str, str] = {}
        self.iterations = self.evaluations = self.messages = 0
        self.links: set[str] = set()

    def new(self, progress: Progress) -> Iterator[str]:
        """Lines for what happened since the last call."""
        if progress.phase != self.phase:
            self.phase = progress.phase
            yield self.phase
        yield from self._services(progress)
        for message in progress.messages[self.messages :]:
            self.messages += 1
            yield message
        for record in progress.history[self.iterations :]:
            self.iterations += 1
            yield iteration_line(record, progress)
        for record in progress.evaluations[self.evaluations :]:
            self.evaluations += 1
            yield evaluation_line(record)
        for name, url in (("Prefect", progress.prefect_url), ("MLflow", progress.mlflow_url)):
            if url and url not in self.links:
                self.links.add(url)
                yield f"{name}: {url}"

    def _services(self, progress: Progress) -> Iterator[str]:
        """A service's change of status; new versions and details come too often."""
        for name, state in progress.services.items():
            status = state.split(",")[0].split(":")[0]
            if self.services.get(name) != status:
                self.services[name] = status
                yield f"{name}: {state}"


def iteration_line(record: dict[str, Any], progress: Progress) -> str:
    """One iteration in one line."""
    m = record["metrics"]
    parts = [
        f"{n.removeprefix('success/')}: success {v:.2f} reward {m.get(f'reward/{n[8:]}/mean', 0):.2f}"
        for n, v in m.items()
        if n.startswith("success/")
    ]
    parts += [
        f"{label} {m[name]:{shape}}"
        for label, name, shape in (
            ("staleness", "staleness/mean", ".1f"),
            ("tokens/s", "tokens/generated_per_s", ".0f"),
            ("loss", "train/loss", ".3f"),
        )
        if name in m
    ]
    left = time_left(progress)
    return (
        f"iteration {record['k'] + 1}/{progress.iterations}  "
        + "  ".join(parts)
        + ("" if left is None else f"  about {clock(left)} left")
    )


def evaluation_line(record: dict[str, Any]) -> str:
    """One evaluation in one line."""
    tasks = [
        f"{name}: success {task['success']:.3f} of {task['episodes']} episodes"
        for name, task in record["tasks"].items()
    ]
    return f"evaluation of version {record['version']}  " + "  ".join(tasks)


# The plan and the end


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the plan of a run."""
    console = console or Console()
    console.print(Text.assemble("Plan of run ", (plan.name, "bold"), " (nothing was started)"))
    _print_pairs(console, plan.facts)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "pool", "tags", "how"):
        table.add_column(column, overflow="fold")
    for row in plan.places:
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    console.print(Text(" ".join(f"{name} {version}" for name, version in plan.packages), style="dim"))


def _print_pairs(console: Console, pairs: list[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value)
    console.print(grid)


def show_summary(
    kind: str, progress: Progress, store: Store, result: dict[str, Any] | None, console: Console | None = None
) -> None:
    """Print how a run ended well: before and after, where things are, and what to do next."""
    console = console or Console()
    console.print(Text.assemble(("done  ", "bold green"), (progress.run, "bold")))
    if progress.evaluations:
        console.print(_before_and_after(progress))
    console.print()
    _print_pairs(console, _places(kind, progress, store, result or {}))


def _before_and_after(progress: Progress) -> Table:
    first, last = progress.evaluations[0], progress.evaluations[-1]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("held-out success", style="bold")
    table.add_column(f"version {first['version']}", justify="right")
    if last is not first:
        table.add_column(f"version {last['version']}", justify="right", style="green")
        table.add_column("gain", justify="right")
    table.add_column("best fixed path", justify="right")
    table.add_column("episodes", justify="right")
    for name, after in last["tasks"].items():
        before = first["tasks"].get(name, after)
        row = [name, f"{before['success']:.3f}"]
        if last is not first:
            row += [f"{after['success']:.3f}", f"{after['success'] - before['success']:+.3f}"]
        fixed = after.get("best_fixed_path")
        table.add_row(*row, "-" if fixed is None else f"{fixed:.3f}", str(after["episodes"]))
    return table


def _places(kind: str, progress: Progress, store: Store, result: dict[str, Any]) -> list[tuple[str, str]]:
    name = run_argument(store)
    version = progress.evaluations[-1]["version"] if progress.evaluations else progress.version
    pairs = [("run", store.uri)]
    if version is not None:
        pairs.append(("model", f"{store.uri}/weights/{version}"))
    if plots := result.get("plots"):
        pairs.append(("plots", plots if isinstance(plots, str) else ", ".join(map(str, plots))))
    pairs.append(
        ("Prefect", f"{progress.prefect_url or 'http://127.0.0.1:4200'}  (open the UI: prefect server start)")
    )
    if progress.mlflow_url:
        pairs.append(("MLflow", progress.mlflow_url))
    if kind == "warm-start":
        pairs.append(("train it", f"rollart resume {name}"))
    pairs += [("try it", f"rollart play {name}"), ("all figures", f"rollart runs show {name}")]
    return pairs


def show_stopped(progress: Progress, store: Store, console: Console | None = None) -> None:
    """Print what to do with a run that ended before its last iteration."""
    console = console or Console(stderr=True)
    version = "before its first version" if progress.version is None else f"at version {progress.version}"
    console.print(f"{progress.run} ended {version}; nothing that was finished is lost.")
    _print_pairs(console, [("run", store.uri), ("continue", f"rollart resume {run_argument(store)}")])


def run_argument(store: Store) -> str:
    """The run as a command takes it: its name if it is in ./runs, else its whole URI."""
    from pathlib import Path

    path = Path(store.root)
    return path.name if store.local and path.parent == Path("runs").absolute() else store.uri
