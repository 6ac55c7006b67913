"""The environments service: a local Dask cluster whose workers hold environments.

    python -m tasks.environments.cluster --store URI [--endpoint-url URL]

Dask runs what its clients send it, so the cluster listens on loopback, unless told otherwise, and demands a TLS
certificate made for this run; certificate and keys are handed over in the store, sealed with the run's key. A service
that is started again after a death takes the same certificate and port, so that its clients find it again.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import dask
import psutil
from distributed import Client, LocalCluster, Security
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from hardware.pools import pool_for
from tasks.config import RunConfig, stored_config
from tasks.errors import UserError
from tasks.keys import fingerprint, run_key, seal, unseal
from tasks.services import (
    Registrar,
    Registration,
    end_processes,
    end_with_parent,
    free_port,
    is_free,
    listen_host,
    registered,
    stop_event,
    store_parser,
    work_folder,
)
from tasks.store import Store, layout

NAME: Literal["environments"] = "environments"
SLOT = "env"  # the Dask resource; a worker has as many as it holds environments at once
MAX_WORKER_DEATHS = 3  # under one episode, after which it counts as failed
CLOSE_S = 4.0
WATCH_S = 1.0
WAVES_SHOWN = 8
CONNECT_S = 120.0  # longest time without a scheduler: a new one is up after 5 s on a quiet machine
ATTEMPT_S = 10.0  # of one try to connect again

_DASK_SETTINGS = {
    "distributed.scheduler.allowed-failures": MAX_WORKER_DEATHS,
    "distributed.worker.profile.enabled": False,  # sampling every thread 100 times a second costs more than episodes
    "distributed.worker.daemon": False,  # an environment may have child processes
    "distributed.comm.timeouts.connect": "10s",
}


class PromptClient(Client):
    """Finds a scheduler that is back within seconds: Dask doubles its pauses up to the end of the one try it makes."""

    _again = False

    async def _reconnect(self) -> None:
        self._again = True
        await super()._reconnect()

    async def _ensure_connected(self, timeout: float | None = None) -> None:
        if self._again and timeout is not None:
            timeout = min(timeout, ATTEMPT_S)  # _reconnect tries again, up to CONNECT_S
        await super()._ensure_connected(timeout)


def connect(store: Store, *, asynchronous: bool = False) -> Client:
    """A client of the run's environments cluster; with `asynchronous`, await it.

    Takes `environments.scheduler` if the configuration names one (TLS then from Dask's own configuration),
    else the registered service. Raises ConnectionError if none is registered, OSError if none answers.
    """
    config = stored_config(store)
    options: dict[str, Any] = {"asynchronous": asynchronous, "set_as_default": False, "timeout": CONNECT_S}
    if config.environments.scheduler is not None:
        return PromptClient(config.environments.scheduler, **options)
    registration = registered(store, NAME)
    if registration is None or registration.status != "ready" or registration.address is None:
        raise ConnectionError(f"no environments cluster is ready; look at {store.uri}/{layout.service(NAME)}")
    security, _ = _read_access(store)
    return PromptClient(registration.address, security=security, **options)


def main(argv: list[str] | None = None) -> None:
    """Run the service until a terminate signal, or the end of its parent."""
    arguments = store_parser("tasks.environments.cluster", __doc__).parse_args(argv)
    stop = stop_event()
    end_with_parent(then=stop.set)
    store = Store(arguments.store, arguments.endpoint_url)
    config = stored_config(store)
    folder = work_folder(store)
    pool = pool_for("rollout", config.pools).name
    log = str(folder / "logs" / f"{NAME}.log")
    registrar = Registrar(
        store,
        Registration(NAME, NAME, pool, log=log, key=fingerprint(run_key(store)), detail="starting workers"),
    )
    try:
        _serve(config, folder, store, registrar, stop)
    except Exception as error:
        registrar.close("failed", f"{type(error).__name__}: {error}")
        raise
    registrar.close()
    sys.stdout.flush()
    os._exit(0)  # Dask's own threads may take their time


def _serve(
    config: RunConfig, folder: Path, store: Store, registrar: Registrar, stop: threading.Event
) -> None:
    security, port = _access(store)
    environments = config.environments
    with dask.config.set({**_DASK_SETTINGS, "temporary-directory": str(folder)}):
        cluster = LocalCluster(
            n_workers=environments.workers,
            threads_per_worker=environments.slots,
            processes=True,
            host=listen_host(),
            scheduler_port=port,
            protocol="tls://",
            security=security,
            dashboard_address=None,
            silence_logs=logging.ERROR,
            memory_limit=0,  # the limit of a shared machine is not Dask's to guess
            resources={SLOT: environments.slots},
        )
        registrar.update(
            status="ready",
            address=cluster.scheduler_address,
            detail=f"{environments.workers} workers with {environments.slots} environments each",
            facts={"workers": environments.workers, "slots": environments.slots},
        )
        waves = _Waves()
        cluster.sync(_add_plugin, cluster, waves)
        registrar.measure = lambda: {"waves": waves.newest()}
        workers = _processes(cluster)
        while not stop.wait(WATCH_S):
            try:
                cluster.sync(_replace_lost, cluster)
            except Exception as error:  # the next look tries again
                print(f"a worker could not be started: {error}", file=sys.stderr, flush=True)
            before, workers = workers, {**workers, **_processes(cluster)}
            if replaced := [
                f"{name} (process {pid})" for name, pid in before.items() if workers[name] != pid
            ]:
                detail = f"worker {', '.join(replaced)} ended and was started again; its episodes run again"
                print(detail, file=sys.stderr, flush=True)
                registrar.update(detail=detail)
        _close(cluster)


async def _replace_lost(cluster: LocalCluster) -> None:
    """Start workers again that their nannies gave up: they do when a worker dies while it starts, which an
    episode that kills its process brings about, as Dask sends it again at once.
    """
    for name, nanny in list(cluster.workers.items()):
        if nanny.status in (Status.closed, Status.failed):
            del cluster.workers[name]
        elif nanny.status == Status.running and not nanny.is_alive():
            print(f"worker {name} is gone; starting it again", file=sys.stderr, flush=True)
            await nanny.instantiate()
    if len(cluster.workers) < len(cluster.worker_spec):
        await cluster._correct_state()


def _processes(cluster: LocalCluster) -> dict[Any, int]:
    """The process of each worker that has one now."""
    return {name: nanny.pid for name, nanny in cluster.workers.items() if nanny.pid is not None}


def _close(cluster: LocalCluster) -> None:
    """Close in order; what has not ended after CLOSE_S (a hung environment) is killed."""
    family = psutil.Process().children(recursive=True)
    closing = threading.Thread(target=cluster.close, kwargs={"timeout": CLOSE_S}, daemon=True)
    closing.start()
    closing.join(CLOSE_S)
    end_processes([process for process in family if process.is_running()], grace_s=1.0)


_SECURITY_FIELDS = (
    "tls_ca_file", "tls_client_key", "tls_client_cert", "tls_scheduler_key", "tls_scheduler_cert",
    "tls_worker_key", "tls_worker_cert",
)  # fmt: skip


def _access(store: Store) -> tuple[Security, int]:
    """Certificate, keys and port: what an earlier start of this service left, or new ones."""
    try:
        security, port = _read_access(store)
        if is_free(port):
            return security, port
    except FileNotFoundError:
        security = Security.temporary()
    except UserError:  # left under another key
        security = Security.temporary()
    port = free_port()
    keys = {name: getattr(security, name) for name in _SECURITY_FIELDS}
    store.write(layout.access(NAME), seal(run_key(store), {"port": port, "keys": keys}))
    return security, port


def _read_access(store: Store) -> tuple[Security, int]:
    access = unseal(run_key(store), store.read(layout.access(NAME)))
    return Security(require_encryption=True, **access["keys"]), access["port"]


class _Waves(SchedulerPlugin):
    """Counts, by wave, the episodes that were started on the cluster and those of them that have ended."""

    def __init__(self) -> None:
        self._counts: dict[int, list[int]] = {}

    def transition(self, key: Any, start: str, finish: str, *_args: Any, **_kwargs: Any) -> None:
        if "processing" in (start, finish) and str(key).startswith("episode-"):
            count = self._counts.setdefault(int(str(key).split("_")[1]), [0, 0])
            count[start == "processing"] += 1

    def newest(self) -> dict[str, list[int]]:
        """wave -> [started, ended] of the newest waves."""
        return {str(wave): list(self._counts[wave]) for wave in sorted(self._counts.copy())[-WAVES_SHOWN:]}


async def _add_plugin(cluster: LocalCluster, plugin: SchedulerPlugin) -> None:
    assert cluster.scheduler is not None
    cluster.scheduler.add_plugin(plugin, name="waves")


if __name__ == "__main__":
    main()
