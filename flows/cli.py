"""The command line: `rollart train|warm-start|evaluate|play|resume|runs|deploy|undeploy|worker|bench|doctor`.

Exit codes: 0 done, 1 the run failed (reason and where to look), 2 bad input (the setting and the fix),
128 + n ended by signal n. Everything costly is imported inside the command that needs it, so `--help` is quick.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from flows import new_run
from tasks.errors import DeadlineExceeded, RunFailed, UserError

if TYPE_CHECKING:
    from flows.progress import Progress
    from tasks.config import RunConfig
    from tasks.store import Store

HARD_EXIT_S = 12.0  # after a signal, the longest wait for the run to end its children in order


class _Commands(click.Group):
    """A group that turns the project's errors into one message on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        try:
            return super().invoke(ctx)
        except UserError as error:
            _leave(f"error: {error}", 2)
        except RunFailed as error:
            _leave(f"the run failed: {error}", 1)
        except DeadlineExceeded as error:
            _leave(f"gave up: {error}", 1)
        except KeyboardInterrupt:
            _leave("", 128 + signal.SIGINT)


def _leave(message: str, code: int) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(code)


class _Example(click.Command):
    """A command whose docstring keeps its line breaks, so that examples stay readable."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for line in inspect.cleandoc(self.help or "").splitlines():
            formatter.write(f"  {line}".rstrip() + "\n")


_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; repeatable."
)
_STORE = click.option(
    "--store",
    "root",
    envvar="ROLLART_STORE",
    default="runs",
    show_default=True,
    show_envvar=True,
    help="Store root the run is in: a folder or s3://bucket/prefix.",
)

_JSON_FILE = click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures to FILE as well.",
)

_POOLS = click.option(
    "--pools",
    default="local",
    show_default=True,
    metavar="SET",
    help="Set of pools: local, production, or a TOML file like those in hardware/sets.",
)


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(package_name="prefect-rollart")
def cli() -> None:
    """Train LLM agents with reinforcement learning, as operable Prefect flows.

    \b
    rollart train frozenlake        train the default small agent on this machine
    rollart play RUN                watch the trained agent
    """


@cli.command(cls=_Example)
@click.argument("config")
@_SET
@click.option("--name", help="Name of the run. Default: from the config's file name and the time.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan; start nothing.")
@click.option(
    "--prepare",
    is_flag=True,
    help="Check everything and write the run's configuration, for a work pool to start.",
)
def train(config: str, overrides: tuple[str, ...], name: str | None, dry_run: bool, prepare: bool) -> None:
    """Train a policy with RL, after a warm start if the config asks for one.

    CONFIG is a TOML file, or the name of a shipped one: frozenlake, two-tasks, smoke.

    Examples:
      rollart train frozenlake
      rollart train my.toml --set trainer.learning_rate=1e-4 --name try-1
      rollart train frozenlake --set store.root=s3://bucket/runs --dry-run
      rollart train frozenlake --set placement=pools --prepare
    """
    _new_run("train", config, overrides, name, dry_run, prepare)


@cli.command("warm-start", cls=_Example)
@click.argument("config")
@_SET
@click.option("--name", help="Name of the run. Default: from the config's file name and the time.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan; start nothing.")
def warm_start(config: str, overrides: tuple[str, ...], name: str | None, dry_run: bool) -> None:
    """Make only the supervised warm start: version 0 of a run, which `rollart resume` then trains.

    Example:
      rollart warm-start frozenlake --name warm-1
    """
    _new_run("warm-start", config, overrides, name, dry_run)


@cli.command(cls=_Example)
@click.argument("run")
@_STORE
@_SET
def resume(run: str, root: str, overrides: tuple[str, ...]) -> None:
    """Continue a run that was stopped, killed or failed; no group is trained twice and none is lost.

    A few settings may change: more iterations (unless the schedule is cosine), deadlines, restarts, tracking,
    where services run, and where the store is. Anything that would make it another experiment is refused.

    Examples:
      rollart resume frozenlake-1129-143012
      rollart resume frozenlake-1129-143012 --set inference.restarts=10
    """
    from flows import checks

    store, config = _stored(run, root, overrides)
    changed = checks.resumed_config(store, config, list(overrides))
    name = _split(run, root)[1]
    checks.preflight(changed, name, store=store, resume=True)
    if changed != config:
        store.write("config.toml", changed.to_toml().encode())
    _watch("train", store, changed)


@cli.command(cls=_Example)
@click.argument("run")
@_STORE
@click.option("--version", type=int, help="Policy version. Default: the latest.")
@click.option(
    "--episodes", type=click.IntRange(min=1), help="Per task. Default: evaluation.episodes of the run."
)
@click.option("--temperature", type=click.FloatRange(min=0), help="0 is greedy. Default: that of the run.")
def evaluate(
    run: str, root: str, version: int | None, episodes: int | None, temperature: float | None
) -> None:
    """Evaluate one version of a run on the fixed held-out seeds.

    Example:
      rollart evaluate frozenlake-1129-143012 --version 10 --temperature 0
    """
    from flows import checks

    store, config = _stored(run, root)
    chosen = checks.existing_version(store, version)
    checks.not_running(store)
    checks.preflight(config, _split(run, root)[1], store=store, resume=True)
    given = {"episodes": episodes, "temperature": temperature}
    _watch("evaluate", store, config, version=chosen, **{k: v for k, v in given.items() if v is not None})


@cli.command(cls=_Example)
@click.argument("run")
@_STORE
@click.option("--version", type=int, help="Policy version. Default: the latest.")
@click.option("--task", help="Task to play. Default: the run's first.")
@click.option(
    "--seed", type=click.IntRange(min=0), help="Of the held-out episode. Default: a new one each time."
)
@click.option("--greedy", is_flag=True, help="Take the likeliest action instead of sampling.")
@click.option(
    "--episodes", type=click.IntRange(min=1), default=1, show_default=True, help="Episodes to play."
)
def play(
    run: str, root: str, version: int | None, task: str | None, seed: int | None, greedy: bool, episodes: int
) -> None:
    """Watch the trained agent play episodes it never trained on, turn by turn.

    Starts an engine of its own first, which takes about a minute.

    Example:
      rollart play frozenlake-1129-143012 --seed 3 --greedy
    """
    from flows import checks
    from flows import play as player

    store, config = _stored(run, root)
    player.play(
        store,
        config,
        checks.existing_version(store, version),
        player.chosen_task(config, task),
        seed,
        greedy,
        episodes,
    )


@cli.group(context_settings=_SETTINGS)
def runs() -> None:
    """List runs, and show everything measured about one."""


@runs.command("list", cls=_Example)
@_STORE
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def list_(root: str, as_json: bool) -> None:
    """List the runs in a store, the newest first.

    Example:
      rollart runs list --store s3://bucket/runs
    """
    import json

    from flows import checks, view
    from tasks.store import Store
    from tasks.tracking.run_record import list_runs

    store = Store(root)
    checks.check_root(store)
    found = list_runs(store)
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        view.show_runs(found, store)


@runs.command(cls=_Example)
@click.argument("run")
@_STORE
@click.option("--json", "as_json", is_flag=True, help="Machine-readable: everything, iteration by iteration.")
def show(run: str, root: str, as_json: bool) -> None:
    """Show a run: state, evaluations, seconds per stage, iterations, package versions.

    Example:
      rollart runs show frozenlake-1129-143012 --json
    """
    import json

    from flows import view
    from tasks.tracking.run_record import read_run

    record = read_run(_stored(run, root)[0])
    if as_json:
        click.echo(json.dumps(record, indent=1))
    else:
        view.show_run(record)


@cli.command(cls=_Example)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def doctor(as_json: bool) -> None:
    """Say what this machine can run and what is missing, with the fix for each.

    Exits 0 if the default local run can run here, 1 if not.

    Example:
      rollart doctor --json
    """
    import json

    from flows import doctor as doctors

    findings = doctors.diagnose()
    click.echo(json.dumps(doctors.as_json(findings), indent=1) if as_json else doctors.as_text(findings))
    sys.exit(0 if doctors.can_run(findings) else 1)


@cli.command(cls=_Example)
@_POOLS
@click.option(
    "--team",
    "teams",
    multiple=True,
    metavar="NAME=LIMIT",
    help="A queue for a team on every pool, and how many jobs it may run at once there; repeatable.",
)
@click.option(
    "--notify", metavar="TYPE/NAME", help="Notification block that is told when a training run fails."
)
@click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
def deploy(pools: str, teams: tuple[str, ...], notify: str | None, dry_run: bool) -> None:
    """Create or update everything on the configured Prefect server: done twice, it changes nothing.

    Work pools with job templates, limits and queues, one global limit for each pool of engines or trainers, the deployments of
    deployments/prefect.yaml, and automations. Schedules come switched off, and what a person switched on or
    paused stays so. Nothing that somebody else made is touched.

    Examples:
      rollart deploy --dry-run
      rollart deploy --pools production --team research=4 --team product=8
      rollart deploy --notify slack-webhook/ops
    """
    from flows.deploy import deploy as deploy_all

    deploy_all(pools, teams, notify, dry_run, click.echo)


@cli.command(cls=_Example)
@click.option("--pools", metavar="SET", help="Only of these pools. Default: all that rollart deploy made.")
@click.option("--dry-run", is_flag=True, help="Print the plan; remove nothing.")
def undeploy(pools: str | None, dry_run: bool) -> None:
    """Remove from the configured Prefect server what `rollart deploy` made, and nothing else.

    Runs and their history stay, and so do the flows that have any.

    Examples:
      rollart undeploy --dry-run
      rollart undeploy
    """
    from flows.deploy import undeploy as undeploy_all

    undeploy_all(pools, dry_run, click.echo)


@cli.command(cls=_Example)
@click.argument("pool")
@_POOLS
@click.option("--name", help="Name of the worker in the UI. Default: made by Prefect.")
@click.option("--check", "only_check", is_flag=True, help="Only check this machine; start nothing.")
def worker(pool: str, pools: str, name: str | None, only_check: bool) -> None:
    """Run a Prefect worker of POOL here, if this machine has what the pool's tag says.

    GPUs (model, count, memory), main memory and cores are compared with the pool's entry in its set.

    Examples:
      rollart worker cpu-env
      rollart worker gpu-compute --pools production --check
      rollart worker gpu-bandwidth --pools my-pools.toml --name rack-7
    """
    from flows import worker as workers

    chosen = workers.pool_named(pool, pools)
    click.echo(f"this machine has what pool {chosen.name} wants: {workers.check(chosen)}")
    if not only_check:
        workers.start(chosen, name)


@cli.group(context_settings=_SETTINGS)
def bench() -> None:
    """Measure the workflow itself."""


@bench.command("overhead", cls=_Example)
@click.argument("run")
@_STORE
@_JSON_FILE
def bench_overhead(run: str, root: str, file: Path | None) -> None:
    """Seconds of each iteration in which no stage was working, and between which stages they passed.

    The first iteration has no predecessor to be measured from, so a run of 21 gives 20.

    Example:
      rollart bench overhead frozenlake-1129-143012 --json overhead.json
    """
    from flows.bench import overhead
    from tasks.store import layout

    store = _stored(run, root)[0]
    found = overhead([store.read_json(layout.iteration(k)) for k in store.numbers("iterations")])
    if not found["iterations"]:
        raise UserError(
            "RUN", "has no two finished iterations to measure between", "let it train on: rollart resume"
        )
    click.echo(
        f"median {found['median_s']:.2f} s, longest {found['max_s']:.2f} s, {found['iterations']} iterations"
    )
    for part, seconds in found["parts"].items():
        click.echo(f"  {seconds:6.2f} s  {part}")
    _write_figures(file, found)


class _Count(click.ParamType):
    """A whole number, or one with K, M or B behind it."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        scale = {"K": 10**3, "M": 10**6, "B": 10**9}.get(value[-1:].upper(), 1)
        try:
            count = int(float(value[:-1] if scale > 1 else value) * scale)
        except (ValueError, OverflowError):
            count = 0
        if count < 1:
            self.fail(f"{value!r} is not a number like 2000000 or 100M", param, ctx)
        return count


@bench.command("weights", cls=_Example)
@click.option(
    "--parameters", type=_Count(), default="100M", show_default=True, help="Of the policy, at least."
)
@click.option(
    "--updates", type=click.IntRange(min=1), default=5, show_default=True, help="Versions to publish."
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Long requests kept in flight.",
)
@click.option(
    "--update",
    type=click.Choice(["keep", "abort"]),
    default="keep",
    show_default=True,
    help="What an update does to them: inference.update.",
)
@_JSON_FILE
def bench_weights(parameters: int, updates: int, requests: int, update: str, file: Path | None) -> None:
    """Seconds of each step of an update of the weights, from the trainer to a busy engine that serves them.

    Starts one engine on a temporary store (TMPDIR says where), publishes versions of a policy with random weights
    the way the trainer does, and does the same bytes beside it in a plain process: a copy, and a load into the same
    module. Nothing is downloaded. 100M parameters need 4 GB of memory and 3 GB of disk.

    Examples:
      rollart bench weights --json weights.json
      rollart bench weights --parameters 2M --updates 3 --update abort
    """
    from tasks.inference.bench import line, measure

    found = measure(parameters, updates, requests, update, say=click.echo)
    click.echo(f"median: {line(found['median'])}")
    _write_figures(file, found)


@bench.command("async", cls=_Example)
@click.option(
    "--preset",
    "presets",
    type=click.Choice(["mild", "middle", "heavy"]),
    multiple=True,
    default=["mild", "middle", "heavy"],
    show_default=True,
    help="Environment latency; repeatable.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--iterations", type=click.IntRange(min=1), default=4, show_default=True, help="Measured, of every turn."
)
@_SET
@_JSON_FILE
def bench_async(
    presets: tuple[str, ...], repeats: int, iterations: int, overrides: tuple[str, ...], file: Path | None
) -> None:
    """Compare four schedules on the same services: monolithic, synchronous, one-off and rollart.

    They do the same work in turns; printed are seconds an iteration, idle shares, speed-ups, and how close
    rollart comes to the pure work of its busiest lane. The four timelines are drawn under each other. A preset
    takes 15 to 40 minutes with the defaults.

    Examples:
      rollart bench async --preset middle --json async.json
      rollart bench async --preset heavy --repeats 1 --iterations 2
    """
    from rich.console import Console

    from flows import bench_report
    from flows.schedules import PRESETS, RESULTS

    figures = {}
    for preset in presets:
        latency = [
            f"environments.{section}.{key}={value}"
            for section, values in PRESETS[preset].items()
            for key, value in values.items()
        ]
        store = _bench_run(
            "bench-async", f"-{preset}", [*latency, *overrides], repeats=repeats, iterations=iterations
        )
        turns = store.read_json(RESULTS)["turns"]
        figures[preset] = {"parameters": PRESETS[preset], **bench_report.summarise(turns), "turns": turns}
        bench_report.show(preset, figures[preset], Console())
        image = bench_report.picture(f"environment latency: {preset}", store, turns)
        store.write("plots/async.png", image)
        click.echo(f"timelines: {store.uri}/plots/async.png")
        _write_figures(file, figures)


def _write_figures(file: Path | None, figures: dict[str, Any]) -> None:
    """What --json asks for."""
    import json

    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n")


def _bench_run(kind: str, suffix: str, overrides: list[str], **parameters: Any) -> Store:
    """A run of a benchmark, to its end; returns its store."""
    path = new_run.CONFIGS / f"{kind}.toml"
    store, config = new_run.create(path, [*overrides, f"name={new_run.run_name(path) + suffix!r}"])
    _watch(kind, store, config, **parameters)
    return store


@bench.command("dispatch", cls=_Example)
@click.option(
    "--episodes",
    "counts",
    type=click.IntRange(min=1),
    multiple=True,
    default=[200, 500, 1000, 2000],
    show_default=True,
    help="Episodes at once; repeatable.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@_SET
@_JSON_FILE
def bench_dispatch(
    counts: tuple[int, ...], repeats: int, overrides: tuple[str, ...], file: Path | None
) -> None:
    """Processor time that scheduling costs an episode, in the controller and in the Dask scheduler.

    Episodes of one turn in the simplest environment, all at once, through the real cluster and a real engine.

    Example:
      rollart bench dispatch --episodes 200 --episodes 2000 --json dispatch.json
    """
    from flows.schedules import DISPATCH_RESULTS

    store = _bench_run("bench-dispatch", "", list(overrides), counts=counts, repeats=repeats)
    found = store.read_json(DISPATCH_RESULTS)
    click.echo("episodes  controller  scheduler  together     took  (processor time an episode; medians)")
    for burst in found["bursts"]:
        controller, scheduler = burst["controller_ms"], burst["scheduler_ms"]
        click.echo(
            f"{burst['episodes']:8}  {controller:7.2f} ms {scheduler:7.2f} ms {controller + scheduler:6.2f} ms"
            f"  {burst['seconds']:5.1f} s"
        )
    _write_figures(file, found)


# How a run starts and is watched


def _new_run(
    kind: str,
    config_name: str,
    overrides: tuple[str, ...],
    name: str | None,
    dry_run: bool,
    prepare: bool = False,
) -> None:
    from flows import checks, view

    if dry_run and prepare:
        raise UserError("--dry-run", "changes nothing, and --prepare writes the run", "give one of them")
    path = new_run.find_config(config_name)
    named = [*overrides, *([f"name={name!r}"] if name else [])]
    if dry_run:
        config = new_run.resolved(path, named)
        view.show_plan(checks.preflight(config, str(config.name), resume=False))
        return
    store, config = new_run.create(path, named)
    if prepare:
        _show_prepared(store)
        return
    _watch(kind, store, config)


def _show_prepared(store: Store) -> None:
    endpoint = f" --param endpoint_url={store.endpoint_url}" if store.endpoint_url else ""
    click.echo(f"The run is prepared, and nothing is started: {store.uri}")
    click.echo("Start it through its deployment (deployments/README.md):")
    click.echo(f"  prefect deployment run train/train --param run={store.uri}{endpoint}")


def _split(run: str, root: str) -> tuple[str, str]:
    """RUN as (store root, name): a name below the store root, or a whole URI."""
    run = run.rstrip("/")
    if "/" not in run:
        return root, run
    parent, _, name = run.rpartition("/")
    return parent or "/", name


def _stored(run: str, root: str, overrides: tuple[str, ...] = ()) -> tuple[Store, RunConfig]:
    """The store and the resolved configuration of an existing run. Raises UserError."""
    from flows import checks

    moved = dict(o.partition("=")[::2] for o in overrides)
    root = moved.get("store.root", root).strip("\"'")
    endpoint = moved.get("store.endpoint_url", "").strip("\"'") or None
    root, name = _split(run, root)
    return checks.stored_run(root, name, endpoint)


def _watch(kind: str, store: Store, config: RunConfig, **parameters: Any) -> None:
    """Run a flow in a thread of its own, show its progress in this one, end with the right exit code."""
    from flows import view
    from flows.progress import Progress

    progress = Progress(run=str(config.name), iterations=config.iterations)
    stop, done = threading.Event(), threading.Event()
    received = _catch_signals(stop, progress)
    outcome: list[Any] = []

    def work() -> None:
        try:
            from flows.local import run_flow

            outcome.append(run_flow(kind, store.uri, store.endpoint_url, progress, stop=stop, **parameters))
        except BaseException as error:
            outcome.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="flow", daemon=True).start()
    view.watch(progress, done)
    result = outcome[0]
    if received:
        view.show_stopped(progress, store)
        sys.exit(128 + received[0])
    if isinstance(result, BaseException):
        view.show_stopped(progress, store)
        raise result
    if not kind.startswith("bench-"):  # which print their own
        view.show_summary(kind, progress, store, result)


def _catch_signals(stop: threading.Event, progress: Progress) -> list[int]:
    """The first signal asks the run to stop in order; a second, or HARD_EXIT_S, ends this process at once.

    A hard exit leaves no service behind either.
    """
    received: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        if received:
            _end_now(128 + number)
        received.append(number)
        progress.phase = "stopping; the run can be resumed (once more to end at once)"
        stop.set()
        watchdog = threading.Timer(HARD_EXIT_S, _end_now, [128 + number])
        watchdog.daemon = True
        watchdog.start()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    return received


def _end_now(code: int) -> NoReturn:
    """End this process and all its descendants at once: the store keeps what was finished."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    os._exit(code)


def main() -> None:
    """Entry point of the `rollart` command."""
    cli(prog_name="rollart")


if __name__ == "__main__":
    main()
