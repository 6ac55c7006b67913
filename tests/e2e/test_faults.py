"""Whole runs through faults of real services: each run ends by itself, keeps its promises and says what happened.

Two runs take one blow after the other, each in the middle of an iteration after the last one was made good: in
`hurt` the run's own processes and data, in `outside` what it needs from outside (store, MLflow, Prefect), with
broken environments all the time. The seconds that each fault cost are printed and written to `faults.json`.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tasks.services import free_port
from tasks.store import Store
from tasks.trajectory import EpisodeFailure, decode
from tests.e2e.machine import Command, Done, Machine, batches, check_consumption, members, versions
from tests.integration.s3 import BUCKET, S3, s3_server

GROUPS, STALENESS = 4, 1
TOLERANCE = 1e-3
OUTAGE_S = 20.0
Blow = Callable[[Command, Store], None]


@dataclass
class Story:
    """A run, what was done to it and when, and what it left."""

    name: str
    store: Store
    iterations: int
    blows: list[tuple[str, float]] = field(default_factory=list)  # what, and when
    done: Done | None = None
    logs: str = ""  # all messages of the flow runs, as Prefect has them
    states: dict[str, str] = field(default_factory=dict)  # of the flow runs, by name

    @property
    def records(self) -> list[dict[str, Any]]:
        return [self.store.read_json(f"iterations/{k}.json") for k in range(self.iterations)]

    def losses(self) -> dict[str, float]:
        """Seconds by which the iterations that each fault fell into were longer than the median one.

        A fault's share ends where the next one begins; what it delayed of the iteration after is its own.
        """
        ends = [record["at"] for record in self.records]
        spans = list(itertools.pairwise(ends))
        usual = statistics.median(end - start for start, end in spans)
        times = [at for _, at in self.blows] + [float("inf")]
        found: dict[str, float] = {}
        for (what, at), after in zip(self.blows, times[1:], strict=True):
            hit = [(start, end) for start, end in spans if end > at and start < after][:2]
            hit = [(start, end) for start, end in hit if not start < after < end or start < at]
            found[what] = round(sum(max(0.0, end - start - usual) for start, end in hit), 1)
        return {"median iteration": round(usual, 1), **found}


def strike(story: Story, command: Command, blows: dict[str, tuple[Blow, str]], every: int) -> None:
    """Deal the blows, one after every `every` iterations, when groups are in flight."""
    for number, (what, (blow, _)) in enumerate(blows.items()):
        k = 1 + number * every
        command.until(lambda k=k: story.store.exists(f"iterations/{k}.json"), f"iteration {k} ({what})")  # type: ignore[misc]
        time.sleep(0.7)  # into the iteration
        story.blows.append((what, time.time()))
        blow(command, story.store)


def processes(command: Command, module: str) -> list[psutil.Process]:
    """The processes of the run that run a module, parents first."""
    found = []
    for pid in command.left():
        try:
            process = psutil.Process(pid)
            if module in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=lambda process: process.create_time())


def kill(module: str) -> Blow:
    """kill -9 of the first process that runs a module."""

    def blow(command: Command, store: Store) -> None:
        processes(command, module)[0].kill()

    return blow


def kill_dask_worker(command: Command, store: Store) -> None:
    (service,) = processes(command, "tasks.environments.cluster")[:1]
    workers = [p for p in service.children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
    workers[0].kill()


def corrupt_next_weights(command: Command, store: Store) -> None:
    """Flip bytes of the next version's weights as soon as they are there, before its manifest can be read."""
    version = max(versions(store)) + 1
    shard = Path(store.root) / f"weights/{version}/model.safetensors"
    until = time.monotonic() + 60
    while not shard.exists():
        assert time.monotonic() < until
        time.sleep(0.001)
    data = bytearray(shard.read_bytes())
    data[-64:] = bytes(64)
    part = shard.with_name(".corrupt")
    part.write_bytes(data)
    os.replace(part, shard)


# The blows to the run's own processes and data, and what its operator must be able to read about each.
OWN: dict[str, tuple[Blow, str]] = {
    "engine killed": (kill("tasks.inference.server"), "the vLLM server ended with exit code -9"),
    "trainer killed": (kill("tasks.training.worker"), "trainer ended with code"),
    "Dask worker killed": (kill_dask_worker, "ended and was started again; its episodes run again"),
    "weights corrupted": (corrupt_next_weights, "has another sha256 than its manifest says; the trainer publishes"),
    "environments service killed": (kill("tasks.environments.cluster"), "environments ended with code -9"),
    "own Prefect server killed": (kill("flows.server"), "Prefect server at"),
    "engine's agent killed": (kill("tasks.inference.agent"), "engine-0 ended with code -9"),
}
EVERY = 2
SETTINGS: dict[str, Any] = {
    "rollout__max_staleness": STALENESS,
    "trainer__checkpoint_every": 2,
    "evaluation__every": 100,
    "environments__latency__step_mean_s": 0.2,
    "environments__latency__step_sigma": 0.8,
}


def prefect_server(machine: Machine, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """A Prefect server on the machine's database; starts, and does not wait."""
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "prefect-server.log").open("ab") as log:
        return subprocess.Popen(argv, env=machine.env, stdout=log, stderr=log, cwd=machine.home, start_new_session=True)


def wait_for(url: str) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise AssertionError(f"{url} did not answer")


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and what it started."""
    if process.poll() is None:
        for member in family(process):
            member.kill()
    process.wait()


def read_prefect(story: Story, api: str) -> None:
    """Take over what Prefect knows about the run: the messages and states of its flow runs."""

    def every(path: str, **body: Any) -> Iterator[dict[str, Any]]:
        offset = 0
        while page := httpx.post(
            f"{api}/{path}", json={**body, "limit": 200, "offset": offset}, timeout=60
        ).json():
            yield from page
            offset += len(page)

    runs = [r for r in every("flow_runs/filter") if f"run:{story.name}" in r["tags"] or story.name in r["name"]]
    story.states = {run["name"]: run["state_type"] for run in runs}
    ids = [run["id"] for run in runs]
    logs = every("logs/filter", logs={"flow_run_id": {"any_": ids}}, sort="TIMESTAMP_ASC")
    story.logs = "\n".join(log["message"] for log in logs)


def report(story: Story, machine: Machine) -> None:
    """Print the time lost to each fault, and keep it where ROLLART_TEST_REPORTS says."""
    assert story.done is not None
    print(f"{story.done.seconds:.0f} s\n{story.done.out}\n{story.done.err}")
    losses = story.losses()
    print(json.dumps(losses, indent=1))
    if folder := os.environ.get("ROLLART_TEST_REPORTS"):
        (Path(folder) / f"faults-{story.name}.json").write_text(json.dumps(losses, indent=1))


@pytest.fixture(scope="module")
def hurt(machine: Machine) -> Story:
    """A run with its own Prefect server and a local store, whose processes and data are hurt."""
    iterations = len(OWN) * EVERY + 2
    story = Story("hurt", machine.store("hurt"), iterations)
    command = machine.train("hurt", iterations=iterations, **SETTINGS)
    strike(story, command, OWN, EVERY)
    story.done = command.wait()
    port = free_port()
    server = prefect_server(machine, port, machine.home)
    try:
        wait_for(f"http://127.0.0.1:{port}/api/health")
        read_prefect(story, f"http://127.0.0.1:{port}/api")
    finally:
        end(server)
    return story
