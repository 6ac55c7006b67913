"""What a person sees of a run: the plan, a live view while it works, and a summary at its end.

On a terminal the view is redrawn in place; elsewhere it is plain lines, one an event, without control
characters. It only reads `Progress`, whose fields are replaced and never mutated.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

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
    facts = [("rollout", _rollout_facts(progress)), ("seconds", _seconds(progress))]
    services = [(name, Text(state, style=_state_style(state))) for name, state in progress.services.items()]
    messages = [("·", Text(message, style="yellow")) for message in progress.messages[-MESSAGES_SHOWN:]]
    links = [("Prefect", Text(progress.prefect_url)), ("MLflow", Text(progress.mlflow_url))]
    for pairs in (facts, services, messages, links):
        if shown := [(name, value) for name, value in pairs if value]:
            parts += ["", _pairs(shown)]
    title = Text.assemble(" ", (progress.run, "bold"), " ")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=f" {clock(now - started)} ",
        subtitle_align="right",
    )


def _headline(progress: Progress, now: float) -> Text:
    line = Text.assemble((progress.phase, "bold cyan"))
    if progress.stage:
        line.append(f"  {progress.stage}")
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


def _rollout_facts(progress: Progress) -> Text:
    m = progress.history[-1]["metrics"] if progress.history else {}
    parts = []
    if "staleness/mean" in m:
        parts.append(f"staleness {m['staleness/mean']:.1f} (max {m.get('staleness/max', 0):.0f})")
    if "tokens/generated_per_s" in m:
        parts.append(f"{m['tokens/generated_per_s']:,.0f} tokens/s")
    for word in ("failed", "truncated"):
        if m.get(f"episodes/{word}"):
            parts.append(f"{m[f'episodes/{word}']:.0f} {word}")
    if "train/loss" in m:
        parts.append(f"loss {m['train/loss']:.3f}")
    return Text(" · ".join(parts))


def _seconds(progress: Progress) -> Text:
    stages = [f"{stage} {last:.1f} ({median:.1f})" for stage, last, median in stage_seconds(progress)]
    return Text.assemble(" · ".join(stages), ("  last (median)", "dim")) if stages else Text()


def _state_style(state: str) -> str:
    return "green" if state.startswith("ready") else "red" if state.startswith("failed") else "yellow"


def _pairs(pairs: Sequence[tuple[str, str | Text]]) -> Table:
    """Names and values in two columns; a long value folds inside its own."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value)
    return grid


def stage_seconds(progress: Progress) -> list[tuple[str, float, float]]:
    """(stage, seconds in the last iteration that had it, median), in the order of work."""
    found: dict[str, list[float]] = {}
    for record in progress.history:
        for name, value in record["metrics"].items():
            if name.startswith("time/"):
                found.setdefault(name.removeprefix("time/"), []).append(value)
    rank = {stage: index for index, stage in enumerate(STAGES)}
    return [
        (s, found[s][-1], statistics.median(found[s]))
        for s in sorted(found, key=lambda s: (rank.get(s, 99), s))
    ]


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
    console.print(_pairs(plan.facts))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "pool", "tags", "how"):
        table.add_column(column, overflow="fold")
    for row in plan.places:
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    console.print(Text(" ".join(f"{name} {version}" for name, version in plan.packages), style="dim"))


def show_summary(
    kind: str, progress: Progress, store: Store, result: dict[str, Any] | None, console: Console | None = None
) -> None:
    """Print how a run ended well: before and after, where things are, and what to do next."""
    console = console or Console()
    from tasks.tracking.run_record import read_run

    # A resumed run evaluated its first versions in an earlier process: the store knows them all.
    evaluations = read_run(store)["evaluations"] if kind == "train" else progress.evaluations
    console.print(Text.assemble(("done  ", "bold green"), (progress.run, "bold")))
    if evaluations:
        console.print(_before_and_after(evaluations))
    console.print()
    version = evaluations[-1]["version"] if evaluations else progress.version
    console.print(_pairs(_places(kind, progress, store, version)))


def _before_and_after(evaluations: list[dict[str, Any]]) -> Table:
    first, last = evaluations[0], evaluations[-1]
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


def _places(kind: str, progress: Progress, store: Store, version: int | None) -> list[tuple[str, str]]:
    name = run_argument(store)
    pairs = [("run", store.uri)]
    if version is not None:
        pairs.append(("model", f"{store.uri}/weights/{version}"))
    if kind == "train":
        pairs.append(("plots", f"{store.uri}/plots"))
    if progress.prefect_url:
        pairs.append(("Prefect", _prefect_page(progress.prefect_url)))
    if progress.mlflow_url:
        pairs.append(("MLflow", progress.mlflow_url))
    if kind == "warm-start":
        pairs.append(("train it", f"rollart resume {name}"))
    pairs += [("try it", f"rollart play {name}"), ("all figures", f"rollart runs show {name}")]
    return pairs


def _prefect_page(url: str) -> str:
    """The flow run's page; a run's own server has ended with it, but its database has not."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 443), timeout=1).close()
        return url
    except OSError:
        return f"prefect server start, then http://127.0.0.1:4200{parts.path}"


def show_runs(found: list[dict[str, Any]], store: Store, console: Console | None = None) -> None:
    """Print the runs of a store."""
    console = console or Console()
    if not found:
        console.print(
            f"No runs in {store.uri}. Give another root with --store, or start one: rollart train frozenlake"
        )
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold", min_width=20)
    for column in ("state", "started", "took", "done", "success"):
        justify: Literal["right", "left"] = "right" if column in ("took", "done") else "left"
        table.add_column(column, justify=justify, no_wrap=column != "success")
    for run in found:
        table.add_row(
            run["name"],
            Text(run["state"], style=_run_style(run["state"])),
            _date(run["started_at"]).rpartition(":")[0],
            "" if run["seconds"] is None else clock(run["seconds"]),
            f"{run['progress']['done']}/{run['progress']['of']}",
            f"{_successes(run['before'])} -> {_successes(run['after'])}" if run["before"] else "",
        )
    console.print(table)


def show_run(record: dict[str, Any], console: Console | None = None) -> None:
    """Print one run's record."""
    console = console or Console()
    state = Text(record["state"], style=_run_style(record["state"]))
    pairs: list[tuple[str, str | Text]] = [("run", record["uri"]), ("state", state)]
    if record["reason"]:
        pairs.append(("reason", record["reason"]))
    took = "" if record["seconds"] is None else f", {clock(record['seconds'])}"
    pairs += [
        ("started", _date(record["started_at"]) + took),
        ("iterations", f"{record['progress']['done']} of {record['progress']['of']}"),
        ("packages", " ".join(f"{name} {version}" for name, version in record["packages"].items())),
    ]
    console.print(_pairs(pairs))
    progress = Progress(
        history=record["iterations"], evaluations=record["evaluations"], iterations=record["progress"]["of"]
    )
    if record["evaluations"]:
        console.print(Text("\nHeld-out evaluation", style="bold"))
        console.print(_evaluation_table(record["evaluations"]))
    if record["iterations"]:
        console.print(Text("\nIterations", style="bold"))
        console.print(_iterations_table(progress))
        console.print(Text("\nSeconds", style="bold"))
        console.print(_stages_table(record["stage_seconds"]))


def _evaluation_table(evaluations: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("version", "task", "success", "reward", "best fixed path", "episodes", "temperature"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for evaluation in evaluations:
        for name, task in evaluation["tasks"].items():
            fixed = task.get("best_fixed_path")
            table.add_row(
                str(evaluation["version"]),
                name,
                f"{task['success']:.3f}",
                f"{task['reward']:.3f}",
                "-" if fixed is None else f"{fixed:.3f}",
                str(task["episodes"]),
                f"{evaluation['temperature']:g}",
            )
    return table


def _iterations_table(progress: Progress) -> Table:
    tasks = _task_names(progress)
    columns = [(f"success {name}", f"success/{name}", ".2f") for name in tasks]
    columns += [
        ("staleness", "staleness/mean", ".1f"),
        ("tokens/s", "tokens/generated_per_s", ",.0f"),
        ("loss", "train/loss", ".3f"),
        ("grad norm", "train/grad_norm", ".2f"),
        ("entropy", "train/entropy", ".3f"),
    ]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("iteration", justify="right")
    for title, _, _ in columns:
        table.add_column(title, justify="right")
    for record in progress.history:
        values = [(record["metrics"].get(metric), shape) for _, metric, shape in columns]
        table.add_row(
            str(record["k"] + 1), *("-" if value is None else f"{value:{shape}}" for value, shape in values)
        )
    return table


def _stages_table(seconds: dict[str, dict[str, float]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("stage")
    for column in ("median", "longest", "total"):
        table.add_column(column, justify="right")
    for stage, values in seconds.items():
        table.add_row(
            stage,
            *(f"{values[column]:.1f}" for column in ("median", "longest", "total")),
        )
    return table


def _run_style(state: str) -> str:
    return {"finished": "green", "running": "cyan", "failed": "red"}.get(state, "yellow")


def _date(at: float | None) -> str:
    return "-" if at is None else time.strftime("%m-%d %H:%M:%S", time.localtime(at))


def _successes(tasks: dict[str, Any]) -> str:
    several = len(tasks) > 1
    return (
        ", ".join(
            f"{name} {task['success']:.2f}" if several else f"{task['success']:.2f}"
            for name, task in tasks.items()
        )
        or "-"
    )


def show_stopped(progress: Progress, store: Store, console: Console | None = None) -> None:
    """Print what to do with a run that ended before its last iteration."""
    console = console or Console(stderr=True)
    version = "before its first version" if progress.version is None else f"at version {progress.version}"
    console.print(f"{progress.run} ended {version}; nothing that was finished is lost.")
    console.print(_pairs([("run", store.uri), ("continue", f"rollart resume {run_argument(store)}")]))


def run_argument(store: Store) -> str:
    """The run as a command takes it: its name if it is in ./runs, else its whole URI."""
    from pathlib import Path

    path = Path(store.root)
    return path.name if store.local and path.parent == Path("runs").absolute() else store.uri
