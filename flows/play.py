"""Watch a trained agent play, turn by turn, on instances it never trained on.

It uses the engine of a run that is going on here, or starts one of its own and ends it again.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status
from rich.text import Text

from flows.checks import existing_version, running_process
from tasks.config import RunConfig, TaskConfig
from tasks.errors import RunFailed, UserError
from tasks.inference.client import EngineClient
from tasks.keys import API_KEY, run_key
from tasks.rollout.chat import ChatRenderer
from tasks.rollout.episode import Turn, run_episode
from tasks.services import Registration, Supervisor, registered, tail, work_folder
from tasks.store import Store
from tasks.trajectory import EpisodeFailure, EpisodeSpec, Trajectory

ENGINE = "engine-0"
SEEDS = 1_000_000  # of episodes, when none is given


def play(
    store: Store,
    config: RunConfig,
    version: int,
    task: TaskConfig,
    seed: int | None,
    greedy: bool,
    episodes: int,
    console: Console | None = None,
) -> None:
    """Play `episodes` held-out episodes of `task` with policy `version`, and print each turn.

    Raises RunFailed if no engine serves the version, or an episode fails.
    """
    console = console or Console(highlight=False)
    with _engine(store, config, version, console) as engine:
        client = EngineClient([str(engine.address)], run_key(store), config.inference.request_deadline_s)
        chat = ChatRenderer.from_store(store)
        for number in range(episodes):
            chosen = random.randrange(SEEDS) if seed is None else seed + number
            _play_one(
                config, task, chosen, 0.0 if greedy else config.evaluation.temperature, client, chat, console
            )


def chosen_task(config: RunConfig, name: str | None) -> TaskConfig:
    """The task called `name`, or the run's first. Raises UserError."""
    if name is None:
        return config.tasks[0]
    for task in config.tasks:
        if task.name == name:
            return task
    raise UserError(
        "--task", f"the run has no task {name!r}", f"use {' or '.join(task.name for task in config.tasks)}"
    )


def _play_one(
    config: RunConfig,
    task: TaskConfig,
    seed: int,
    temperature: float,
    client: EngineClient,
    chat: ChatRenderer,
    console: Console,
) -> None:
    console.print(Text.assemble(("\n" + task.name, "bold"), f", seed {seed}, temperature {temperature:g}"))
    shown = TurnPrinter(console)
    result = run_episode(
        EpisodeSpec(task.name, seed, 0, 0, 0),
        task,
        config.environments.model_copy(update={"latency": {}, "faults": {}}),
        client.generate,
        chat,
        context_limit=config.policy.context_limit,
        temperature=temperature,
        split="held_out",
        on_turn=shown,
    )
    console.print(outcome(result))
    if isinstance(result, EpisodeFailure):
        raise RunFailed(f"the episode failed in {result.stage}: {result.reason}")


class TurnPrinter:
    """Prints each turn as it happens."""

    def __init__(self, console: Console):
        self.console, self.turns = console, 0

    def __call__(self, turn: Turn) -> None:
        if self.turns == 0:
            self.console.print(Text(turn.observation))
        self.turns += 1
        self.console.print(
            Text.assemble(
                (f"\nturn {self.turns}  ", "dim"),
                (turn.action or "(nothing)", "bold cyan"),
                (f"  probability {math.exp(turn.logprob):.2f}, version {turn.version}", "dim"),
                f"  reward {turn.reward:g}" if turn.reward else "",
            )
        )
        if turn.next_observation:
            self.console.print(Text(turn.next_observation))
        if self.console.is_terminal:
            time.sleep(0.4)  # so that an eye can follow


def outcome(result: Trajectory | EpisodeFailure) -> Text:
    """One line on how an episode ended."""
    if isinstance(result, EpisodeFailure):
        return Text(f"failed in {result.stage}: {result.reason}", style="red")
    ending = ("solved", "bold green") if result.success else ("not solved", "bold red")
    turns = f"{result.turns} turn{'s' if result.turns != 1 else ''}"
    return Text.assemble(
        "\n", ending, f" in {turns}, reward {result.env_reward:g}", ", cut short" if result.truncated else ""
    )


@contextlib.contextmanager
def _engine(store: Store, config: RunConfig, version: int, console: Console) -> Iterator[Registration]:
    """An engine that serves `version`: that of a run going on, or a new one that ends with the block."""
    if running_process(store) is not None:
        engine = registered(store, ENGINE)
        if engine is None or engine.status != "ready" or engine.version != version:
            serves = "no version" if engine is None or engine.version is None else f"version {engine.version}"
            raise UserError(
                "--version",
                f"the run is going on, and its engine serves {serves}",
                "play that, or wait for the run's end",
            )
        yield engine
        return
    argv = [sys.executable, "-m", "tasks.inference.agent", "--store", store.uri, "--name", ENGINE]
    if version != existing_version(store, None):  # by itself an engine takes the latest
        argv += ["--pin-version", str(version)]
    if store.endpoint_url:
        argv += ["--endpoint-url", store.endpoint_url]
    supervisor, started_at = Supervisor(work_folder(store)), time.time()
    try:
        service = supervisor.add(ENGINE, argv, {API_KEY: run_key(store)}, restarts=0)
        with console.status(f"starting an engine with version {version}") as status:
            engine = _wait(store, config, version, supervisor, str(service.log), started_at, status)
        yield engine
    finally:
        with console.status("ending the engine"):
            supervisor.stop()


def _wait(
    store: Store,
    config: RunConfig,
    version: int,
    supervisor: Supervisor,
    log: str,
    started_at: float,
    status: Status,
) -> Registration:
    while time.time() - started_at < config.inference.start_deadline_s:
        engine = registered(store, ENGINE)
        if engine is not None and engine.started_at >= started_at - 1:
            if engine.status == "ready" and engine.version == version:
                return engine
            if engine.status == "failed":
                raise RunFailed(f"the engine failed: {engine.detail}", look_at=engine.log or log)
            status.update(
                f"starting an engine with version {version}, {time.time() - started_at:.0f} s: {engine.detail}"
            )
        if (failed := supervisor.failed()) is not None:
            raise RunFailed(f"the engine ended:\n{tail(failed.log, 10)}", look_at=log)
        time.sleep(0.2)
    raise RunFailed(f"no engine served version {version} within inference.start_deadline_s", look_at=log)
