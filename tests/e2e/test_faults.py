"""Whole runs through faults of real services: each run ends by itself, keeps its promises and says what happened.

Two runs take one blow after the other, each in the middle of an iteration after the last one was made good: in
`hurt` the run's own processes and data, in `deprived` what it needs from outside (store, MLflow, Prefect), with
broken environments all the time. The seconds that each fault cost are printed, and written to the folder
ROLLART_TEST_REPORTS if it is set.
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
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tasks.services import free_port, registered
from tasks.store import Store
from tasks.trajectory import EpisodeFailure, decode
from tests.e2e.machine import Command, Done, Machine, batches, check_consumption, members, versions
from tests.integration.s3 import BUCKET, S3, s3_server

GROUPS, STALENESS, EVERY = 4, 1, 2
TOLERANCE = 1e-3
OUTAGE_S = 20.0
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
pytestmark = pytest.mark.slow  # `hurt` takes 5 minutes, `deprived` 8
Blow = Callable[[Command, Store], None]


@dataclass
class Story:
    """A run, what was done to it, and what it left."""

    name: str
    store: Store
    iterations: int
    blows: dict[str, int] = field(
        default_factory=dict
    )  # what was done, by the last iteration recorded before
    done: Done | None = None
    logs: str = ""  # all messages of its flow runs, as Prefect has them
    states: dict[str, str] = field(default_factory=dict)  # of its flow runs, by name

    @property
    def records(self) -> list[dict[str, Any]]:
        return [self.store.read_json(f"iterations/{k}.json") for k in range(self.iterations)]

    def losses(self) -> dict[str, float]:
        """Seconds by which the iteration that a fault fell into and the one after were longer than the median."""
        seconds = [end["at"] - start["at"] for start, end in itertools.pairwise(self.records)]
        usual = statistics.median(seconds)
        lost = {
            what: sum(max(0.0, s - usual) for s in seconds[k : k + EVERY]) for what, k in self.blows.items()
        }
        return {name: round(s, 1) for name, s in {"median iteration": usual, **lost}.items()}


def strike(story: Story, command: Command, blows: dict[str, tuple[Blow, str]]) -> None:
    """Deal one blow after every EVERY iterations, in the middle of the next one, and wait for the run's end."""
    try:
        _strike(story, command, blows)
        story.done = command.wait()
    finally:
        command.process.kill()


def _strike(story: Story, command: Command, blows: dict[str, tuple[Blow, str]]) -> None:
    for number, (what, (blow, _)) in enumerate(blows.items()):
        k = 1 + number * EVERY
        command.until(lambda k=k: story.store.exists(f"iterations/{k}.json"), f"iteration {k} ({what})")  # type: ignore[misc]
        time.sleep(0.7)
        story.blows[what] = k
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


def kill(module: str, which: int = 0) -> Blow:
    """kill -9 of a process that runs a module."""

    def blow(command: Command, store: Store) -> None:
        processes(command, module)[which].kill()

    return blow


def kill_dask_worker(command: Command, store: Store) -> None:
    (service,) = processes(command, "tasks.environments.cluster")
    workers = [p for p in service.children(recursive=True) if p.cmdline()[0].startswith("dask worker")]
    workers[0].kill()


def corrupt_weights(command: Command, store: Store) -> None:
    """Zero bytes of the next version's weights as soon as they are there, until an engine comes across it."""
    while True:
        version = max(versions(store)) + 1
        shard = Path(store.root) / f"weights/{version}/model.safetensors"
        until = time.monotonic() + 60
        while not shard.exists():
            assert time.monotonic() < until, "no new version"
            time.sleep(0.001)
        part = shard.with_name(".corrupt")
        part.write_bytes(shard.read_bytes()[:-64] + bytes(64))
        os.replace(part, shard)
        if engine_complains(store, version):
            return


def engine_complains(store: Store, version: int) -> bool:
    """Whether the engine cannot fetch a version; false if it was quicker than its corruption."""
    while True:
        engine = registered(store, "engine-0")
        assert engine is not None
        if engine.version == version:
            return False
        if f"version {version} cannot be fetched" in engine.detail:
            return True
        time.sleep(0.01)


# The blows to the run's own processes and data, and what its operator must be able to read about each.
OWN: dict[str, tuple[Blow, str]] = {
    "engine killed": (kill("tasks.inference.server"), "the vLLM server ended with exit code -9"),
    "trainer killed": (kill("tasks.training.worker", -1), "trainer ended with code"),
    "Dask worker killed": (kill_dask_worker, "ended and was started again; its episodes run again"),
    "weights corrupted": (
        corrupt_weights,
        "has another sha256 than its manifest says; the trainer publishes",
    ),
    "environments service killed": (kill("tasks.environments.cluster"), "environments ended with code -9"),
    "own Prefect server killed": (kill("flows.server"), "Prefect server at"),
    "engine's agent killed": (kill("tasks.inference.agent"), "engine-0 ended with code -9"),
}
SETTINGS: dict[str, Any] = {
    "rollout__max_staleness": STALENESS,
    "trainer__checkpoint_every": 2,
    "evaluation__every": 100,
    "inference__start_deadline_s": 900.0,  # for a busy machine
    "trainer__start_deadline_s": 900.0,
    "environments__latency__step_mean_s": 0.2,
    "environments__latency__step_sigma": 0.8,
}


def prefect_server(machine: Machine, port: int) -> subprocess.Popen[bytes]:
    """A Prefect server on the machine's database; starts, and does not wait."""
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (machine.home / "prefect-server.log").open("ab") as log:
        return subprocess.Popen(
            argv,
            env={**machine.env, **QUIET},
            stdout=log,
            stderr=log,
            cwd=machine.home,
            start_new_session=True,
        )


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

    runs = [
        r for r in every("flow_runs/filter") if f"run:{story.name}" in r["tags"] or story.name in r["name"]
    ]
    story.states = {run["name"]: run["state_type"] for run in runs}
    ids = [run["id"] for run in runs]
    logs = every("logs/filter", logs={"flow_run_id": {"any_": ids}}, sort="TIMESTAMP_ASC")
    story.logs = "\n".join(log["message"] for log in logs)


def report(story: Story) -> None:
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
    story = Story("hurt", machine.store("hurt"), len(OWN) * EVERY + 2)
    command = machine.train("hurt", iterations=story.iterations, **SETTINGS)
    strike(story, command, OWN)
    port = free_port()
    server = prefect_server(machine, port)
    try:
        wait_for(f"http://127.0.0.1:{port}/api/health")
        read_prefect(story, f"http://127.0.0.1:{port}/api")
    finally:
        end(server)
    report(story)
    return story


# What a run needs from outside


class Outside(Machine):
    """A machine whose runs use a Prefect server, an MLflow server and an S3 store of its own."""

    def __init__(self, home: Path, s3: S3):
        super().__init__(home)
        self.s3 = s3
        self.prefect_port, self.mlflow_port = free_port(), free_port()
        self.prefect, self.mlflow = self.start_prefect(), self.start_mlflow()
        self.timers: list[threading.Timer] = []

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, **self.s3.env, "PREFECT_API_URL": self.prefect_api}

    @property
    def prefect_api(self) -> str:
        return f"http://127.0.0.1:{self.prefect_port}/api"

    @property
    def mlflow_uri(self) -> str:
        return f"http://127.0.0.1:{self.mlflow_port}"

    def store(self, run: str) -> Store:
        return Store(f"s3://{BUCKET}/runs/{run}", self.s3.endpoint_url)

    def start_prefect(self) -> subprocess.Popen[bytes]:
        return prefect_server(self, self.prefect_port)

    def start_mlflow(self) -> subprocess.Popen[bytes]:
        argv = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.mlflow_port),
        ]
        argv += ["--backend-store-uri", f"sqlite:///{self.home}/mlflow.db", "--workers", "1"]
        argv += ["--artifacts-destination", str(self.home / "mlartifacts")]
        with (self.home / "mlflow-server.log").open("ab") as log:
            return subprocess.Popen(
                argv,
                env={**super().env, **QUIET},
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
            )

    def later(self, do: Callable[[], None]) -> None:
        """Do it when the outage is over."""
        timer = threading.Timer(OUTAGE_S, do)
        timer.start()
        self.timers.append(timer)

    # the blows

    def refuse_s3(self, command: Command, store: Store) -> None:
        self.s3.faults.refuse_until = time.monotonic() + OUTAGE_S

    def kill_mlflow(self, command: Command, store: Store) -> None:
        end(self.mlflow)
        self.later(self._restart_mlflow)

    def hang_prefect(self, command: Command, store: Store) -> None:
        for process in family(self.prefect):
            process.send_signal(signal.SIGSTOP)
        self.later(self._wake_prefect)

    def kill_prefect(self, command: Command, store: Store) -> None:
        end(self.prefect)
        self.later(self._restart_prefect)

    def _restart_mlflow(self) -> None:
        self.mlflow = self.start_mlflow()

    def _wake_prefect(self) -> None:
        for process in family(self.prefect):
            process.send_signal(signal.SIGCONT)

    def _restart_prefect(self) -> None:
        self.prefect = self.start_prefect()

    def close(self) -> None:
        for timer in self.timers:
            timer.cancel()
            timer.join()
        end(self.prefect)
        end(self.mlflow)


OTHERS: dict[str, tuple[Callable[[Outside, Command, Store], None], str]] = {
    "store answers 503": (Outside.refuse_s3, "does not answer and is asked again"),
    "MLflow killed": (Outside.kill_mlflow, "MLflow takes no metrics; they are kept in"),
    "Prefect server hangs": (Outside.hang_prefect, "does not answer (timed out)"),
    "Prefect server killed": (Outside.kill_prefect, "does not answer ([Errno 111] Connection refused)"),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    with s3_server() as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.env.items():
            patch.setenv(name, value)
        machine = Outside(tmp_path_factory.mktemp("outside"), s3)
        try:
            wait_for(f"{machine.prefect_api}/health")
            wait_for(f"{machine.mlflow_uri}/health")
            yield machine
        finally:
            machine.close()


@pytest.fixture(scope="module")
def deprived(outside: Outside) -> Story:
    """A run with broken environments, on servers of others that go away one after the other."""
    story = Story("deprived", outside.store("deprived"), len(OTHERS) * EVERY + 2)
    command = outside.train(
        "deprived",
        iterations=story.iterations,
        store__root=f"s3://{BUCKET}/runs",
        tracking__mlflow_uri=outside.mlflow_uri,
        environments__faults__step_hang_share=0.05,
        environments__faults__reset_exception_share=0.1,
        environments__step_deadline_s=2.0,
        environments__retries=1,
        **SETTINGS,
    )
    blows = {what: (partial(blow, outside), said) for what, (blow, said) in OTHERS.items()}
    strike(story, command, blows)
    read_prefect(story, outside.prefect_api)
    report(story)
    return story


@pytest.fixture(params=["hurt", "deprived"])
def story(request: pytest.FixtureRequest) -> Story:
    return request.getfixturevalue(request.param)


# What every run keeps


def test_it_ends_by_itself_with_every_iteration_done(story: Story) -> None:
    assert story.done is not None
    assert story.done.code == 0, story.done.err
    assert story.done.left == []
    assert story.store.read_json("status.json")["status"] == "finished"
    assert story.store.numbers("iterations") == list(range(story.iterations))
    assert [v for v in versions(story.store) if v >= 0] == list(range(story.iterations + 1))


def test_every_group_is_consumed_once_and_fresh_enough(story: Story) -> None:
    check_consumption(story.store, story.iterations, GROUPS, STALENESS)


def test_no_group_is_lost(story: Story) -> None:
    """Every wave gave its share of groups to the batches."""
    waves = Counter(int(group.split("/")[0]) for m in batches(story.store).values() for group in m["groups"])
    assert waves == dict.fromkeys(range(story.iterations), GROUPS)


def test_engine_and_trainer_agree_on_every_version(story: Story) -> None:
    for record in story.records:
        assert record["metrics"]["engine/parity"] <= TOLERANCE, record["k"]


def test_versions_are_whole_in_the_end(story: Story) -> None:
    for version in versions(story.store):
        story.store.verify(f"weights/{version}")


def test_prefect_shows_every_flow_as_completed(story: Story) -> None:
    assert len(story.states) > 2 * story.iterations
    assert {name: state for name, state in story.states.items() if state != "COMPLETED"} == {}


# What its operator can read


@pytest.mark.parametrize("what", OWN)
def test_the_flow_says_what_happened_to_the_run(hurt: Story, what: str) -> None:
    assert OWN[what][1] in hurt.logs


@pytest.mark.parametrize("what", OTHERS)
def test_the_flow_says_what_happened_outside(deprived: Story, what: str) -> None:
    assert OTHERS[what][1] in deprived.logs


@pytest.mark.parametrize("what", OTHERS)
def test_the_terminal_says_what_happened_outside(deprived: Story, what: str) -> None:
    assert deprived.done is not None
    assert OTHERS[what][1] in " ".join((deprived.done.out + deprived.done.err).split())


@pytest.mark.parametrize("who", ["the store", "MLflow takes metrics again", "the Prefect server"])
def test_the_flow_says_when_it_is_back(deprived: Story, who: str) -> None:
    assert any(who in line and "again" in line for line in deprived.logs.splitlines())


# What is particular to a fault


def failures(story: Story) -> list[EpisodeFailure]:
    found = [decode(story.store.get(f"batches/{k}", "batch.parquet"))[1] for k in batches(story.store)]
    return [failure for batch in found for failure in batch]


def test_episodes_lost_with_their_worker_or_scheduler_run_again(hurt: Story) -> None:
    assert failures(hurt) == []
    assert all(len(members(hurt.store, k)) == GROUPS * 4 for k in range(hurt.iterations))


def test_hung_steps_and_failed_resets_are_recorded_as_such(deprived: Story) -> None:
    reasons = {(failure.stage, failure.reason) for failure in failures(deprived)}
    assert reasons <= {
        ("step", "CallHung: no answer within 2 s"),
        ("reset", "InjectedFault: injected exception"),
    }
    retried = sum(t.retries > 0 for k in batches(deprived.store) for t in members(deprived.store, k))
    assert retried > 0


def test_mlflow_misses_nothing_of_the_time_it_was_away(deprived: Story, outside: Outside) -> None:
    wait_for(f"{outside.mlflow_uri}/health")
    api = f"{outside.mlflow_uri}/api/2.0/mlflow"
    experiment = httpx.get(
        f"{api}/experiments/get-by-name", params={"experiment_name": "rollart"}, timeout=60
    )
    ids = [experiment.json()["experiment"]["experiment_id"]]
    (run,) = httpx.post(f"{api}/runs/search", json={"experiment_ids": ids}, timeout=60).json()["runs"]
    asked = {"run_id": run["info"]["run_id"], "metric_key": "train/loss"}
    history = httpx.get(f"{api}/metrics/get-history", params=asked, timeout=60).json()["metrics"]
    assert sorted(point["step"] for point in history) == list(range(1, deprived.iterations + 1))
    assert run["info"]["status"] == "FINISHED"
