"""What the trainer's tests share: a small run, synthetic trajectories, and the real service as a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tasks.config import RunConfig, parse_config
from tasks.services import PARENT, this_process
from tasks.store import Store, layout
from tasks.training.policy import publish_policy
from tasks.trajectory import NOT_GENERATED, Trajectory, encode

WAIT_S = 240.0
SMALL: dict[str, Any] = {
    "iterations": 4,
    "policy": {
        "hidden_size": 64,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "intermediate_size": 64,
        "context_limit": 64,
    },
    "trainer": {"threads": 1, "tokens_per_micro_batch": 256, "checkpoint_every": 2, "warmup_steps": 2},
    "warm_start": {"max_rounds": 2},
}


def settings(**tables: dict[str, Any]) -> RunConfig:
    """The small run's configuration with some keys changed."""
    names = set(SMALL) | set(tables)
    merged = {n: {**SMALL.get(n, {}), **tables.get(n, {})} if n in tables else SMALL[n] for n in names}
    return parse_config({"name": "trainer", **merged})


def new_run(folder: Path, config: RunConfig) -> Store:
    """A run's root with its configuration and policy."""
    store = Store(str(folder))
    store.write(layout.CONFIG, config.to_toml().encode())
    publish_policy(store, config)
    return store


def trajectories(store: Store, groups: int, size: int, version: int, seed: int) -> list[Trajectory]:
    """Random token lists of different lengths; every second group has equal rewards if its number is odd."""
    vocabulary = store.read_json("policy/config.json")["vocab_size"]
    random = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        for index in range(size):
            length = int(random.integers(8, 40))
            mask = np.zeros(length, bool)
            mask[4::5] = mask[5::5] = True
            made.append(
                Trajectory(
                    task="frozenlake", seed=group, wave=0, group=group, index=index,
                    tokens=random.integers(6, vocabulary, length).astype(np.int32), loss_mask=mask,
                    logprobs=np.where(mask, -2.5 + random.normal(0, 0.2, length), 0).astype(np.float32),
                    versions=np.where(mask, version, NOT_GENERATED).astype(np.int32),
                    turns=1, env_reward=0.0, success=False, truncated=False,
                    reward=1.0 if group % 4 == 3 else float(index % 2),
                )
            )  # fmt: skip
    return made


def put_supervised(store: Store, k: int, steps: int = 4, restart_seed: int | None = None) -> None:
    """Batch k: the same demonstrations in every step, so that the loss must fall."""
    rows = trajectories(store, 8, 1, NOT_GENERATED, seed=5) * steps
    store.put(
        layout.batch(k), {"batch.parquet": encode(rows)}, k=k, objective="supervised", batch_size=8,
        learning_rate=1e-2, restart_seed=restart_seed,
    )  # fmt: skip


def put_policy_gradient(store: Store, k: int) -> None:
    """Batch k: 8 groups of 4, of which two have no variance."""
    rows = trajectories(store, 8, 4, k, seed=100 + k)
    store.put(
        layout.batch(k), {"batch.parquet": encode(rows)}, k=k, objective="policy_gradient",
        groups=[f"0/{i}" for i in range(8)], max_staleness=0,
    )  # fmt: skip


def start(store: Store, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """The service, as a supervisor starts it."""
    environment = {PARENT: this_process(), "ROLLART_HOME": str(log.parent / "home"), **environment}
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.training.service", "--store", store.uri],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


@contextmanager
def service(store: Store, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """The service while the block runs; none of its processes is left afterwards."""
    process = start(store, log, **environment)
    family = [psutil.Process(process.pid)]
    try:
        yield process
        family += family[0].children(recursive=True)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(12)
        finally:
            for member in family:
                if member.is_running():
                    member.kill()


def wait(store: Store, version: int, log: Path) -> dict[str, Any]:
    """The manifest of a version; fails with the end of the log."""
    try:
        return store.wait_for(layout.weights(version), WAIT_S, str(log))
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from None


def eventually(condition, what: str, deadline_s: float = WAIT_S) -> None:
    """Wait until `condition()`."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def sha256(store: Store, version: int) -> str:
    """The hash of a version's weights, from its manifest."""
    return json.loads(store.read(f"weights/{version}/manifest.json"))["files"]["model.safetensors"]["sha256"]
