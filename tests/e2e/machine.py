"""A machine of its own for whole runs: home, Prefect database, store and the real command line.

Every process that a command starts carries a mark in its environment, so that a test can ask what is left.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.store import Store, layout
from tasks.trajectory import Trajectory, decode
from tests.integration.cli import MARK, marked

ROOT = Path(__file__).parents[2]
DEADLINE_S = float(os.environ.get("ROLLART_TEST_DEADLINE_S", "540"))  # of one command
AWS_SECRET = "aws-secret-that-must-not-be-written-anywhere"

# The smallest policy that the engine's attention runs, and a reward that gives every group a gradient.
CONFIG = """
iterations = 3

[policy]
hidden_size = 64
layers = 1
heads = 2
kv_heads = 1
intermediate_size = 64

[[tasks]]
name = "frozenlake"
reward = "tests.e2e.rewards:odd_tokens"

[rollout]
groups = 4
group_size = 4

[trainer]
checkpoint_every = 1

[evaluation]
every = 2
episodes = 8

[warm_start]
steps = 4
max_rounds = 1
restart_after = 1
batch_size = 8
gate_success = 0.0
gate_greedy = 0.0
gate_episodes = 8

[tracking]
flush_deadline_s = 300.0
"""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float
    left: list[int]  # processes that outlived it


@dataclass
class Command:
    """A command that is running; its output goes to files, so that no full pipe can hold it up."""

    process: subprocess.Popen[bytes]
    mark: str
    files: tuple[Path, Path]
    started: float = field(default_factory=time.monotonic)

    def wait(self, timeout: float = DEADLINE_S) -> Done:
        """Wait for its end; kills it and fails if that takes too long."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"not done after {timeout:.0f} s; it said:\n{self.said()}") from None
        out, err = (file.read_text() for file in self.files)
        return Done(code, out, err, time.monotonic() - self.started, marked(self.mark))

    def until(self, true: Callable[[], object], what: str, timeout: float = DEADLINE_S) -> None:
        """Wait for a condition while the command runs."""
        started = time.monotonic()
        while not true():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.said()}"
            assert time.monotonic() - started < timeout, f"no {what} after {timeout:.0f} s:\n{self.said()}"
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def left(self) -> list[int]:
        """Its processes that are running now."""
        return marked(self.mark)

    def said(self) -> str:
        return "".join(file.read_text() for file in self.files)[-4000:]


class Machine:
    """Where commands of one test session run."""

    def __init__(self, home: Path):
        self.home = home
        self.config = home / "tiny.toml"
        self.config.write_text(CONFIG)

    @property
    def env(self) -> dict[str, str]:
        """The environment of every command: nothing of this shell's S3, Prefect and MLflow settings."""
        own = ("AWS_", "PREFECT_", "MLFLOW_", "ROLLART_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        return {
            **kept,
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
            "AWS_SECRET_ACCESS_KEY": AWS_SECRET,
        }

    def start(self, *arguments: str) -> Command:
        """Start `rollart` with these arguments."""
        mark = uuid.uuid4().hex
        files = self.home / f"{mark}.out", self.home / f"{mark}.err"
        with files[0].open("wb") as out, files[1].open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *arguments],
                cwd=self.home,
                env={**self.env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        return Command(process, mark, files)

    def run(self, *arguments: str, timeout: float = DEADLINE_S) -> Done:
        """Run `rollart` to its end."""
        return self.start(*arguments).wait(timeout)

    def train(self, name: str, **settings: Any) -> Command:
        """Start the training of a run; `__` in a setting's name stands for the dot."""
        pairs = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in settings.items()]
        return self.start(
            "train", str(self.config), "--name", name, *(x for p in pairs for x in ("--set", p))
        )

    def store(self, run: str) -> Store:
        return Store(str(self.home / "runs" / run))

    def work(self, run: str) -> Path:
        """The run's work folder: logs, the engine's key."""
        (folder,) = (self.home / ".rollart" / "work").glob(f"*_runs_{run}")
        return folder


# What a run leaves in its store


def versions(store: Store) -> list[int]:
    """The complete versions."""
    return [v for v in store.numbers("weights") if store.manifest(layout.weights(v)) is not None]


def batches(store: Store) -> dict[int, dict[str, Any]]:
    """The manifests of the complete policy-gradient batches."""
    found = {k: store.manifest(layout.batch(k)) for k in store.numbers("batches") if k >= 0}
    return {k: manifest for k, manifest in found.items() if manifest is not None}


def consumed(store: Store) -> list[str]:
    """The ids of all consumed groups, in the order of their batches."""
    return [group for _, manifest in sorted(batches(store).items()) for group in manifest["groups"]]


def members(store: Store, k: int) -> list[Trajectory]:
    """The trajectories of a batch."""
    return decode(store.get(layout.batch(k), "batch.parquet"))[0]


def hashes(store: Store, *folders: str) -> dict[str, str]:
    """sha256 of every file below the folders."""
    files = [f for folder in folders for f in sorted((Path(store.root) / folder).rglob("*")) if f.is_file()]
    return {str(f.relative_to(store.root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def check_consumption(store: Store, iterations: int, groups: int, max_staleness: int) -> None:
    """The promises about batches: all there, each group once, each trajectory fresh enough and as listed."""
    manifests = batches(store)
    assert sorted(manifests) == list(range(iterations))
    ids = consumed(store)
    assert len(set(ids)) == len(ids), "a group was consumed twice"
    for k, manifest in manifests.items():
        assert len(manifest["groups"]) == groups
        trajectories = members(store, k)
        assert {f"{t.wave}/{t.group}" for t in trajectories} == set(manifest["groups"])
        staleness = [k - t.oldest_version for t in trajectories]
        assert min(staleness) >= 0 and max(staleness) <= max_staleness, (k, staleness)
        places = [(t.wave, t.group, t.index) for t in trajectories]
        assert len(set(places)) == len(places)
