"""How each service of a run is started: as a child process of the run, or of the flow that hosts it on its pool."""

from __future__ import annotations

import sys

from tasks.config import RunConfig
from tasks.keys import API_KEY, run_key
from tasks.store import Store

MODULES = {
    "engine": "tasks.inference.agent",
    "trainer": "tasks.training.service",
    "environments": "tasks.environments.cluster",
    "reward": "tasks.reward.function",
}
STAGE = {
    "engine": "engine",
    "trainer": "train",
    "environments": "rollout",
    "reward": "reward",
}  # decides the pool
# On a CPU, engine and trainer share cores: an OpenMP thread that spins at a barrier takes them from the other.
_SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def service_restarts(config: RunConfig, kind: str) -> int:
    """How often a service of a kind may be started again after a death."""
    return {"engine": config.inference.restarts, "trainer": config.trainer.restarts}.get(kind, 3)


def service_command(
    store: Store, kind: str, name: str, pin_version: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """The command of a service, and what it needs in its environment. `pin_version`: for an engine, the one to serve."""
    argv = [sys.executable, "-m", MODULES[kind], "--store", store.uri]
    if store.endpoint_url:
        argv += ["--endpoint-url", store.endpoint_url]
    if kind == "engine":
        argv += ["--name", name]
    if pin_version is not None:
        argv += ["--pin-version", str(pin_version)]
    return argv, {API_KEY: run_key(store), **_SHARED_CORES}
