"""The environments service: a local Dask cluster whose workers hold environments.

    python -m tasks.environments.cluster --store URI [--endpoint-url URL]

Dask runs what its clients send it, so the cluster listens on loopback alone and demands a TLS certificate
made for this run; the certificate and key are handed over in a file that only this user can read. A service that
is started again after a death takes the same certificate and port, so that its clients find it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any, Literal

import dask
import psutil
from distributed import Client, LocalCluster, Security
from distributed.core import Status

from hardware.pools import pool_for
from tasks.config import RunConfig, parse_config
from tasks.services import (
    PARENT,
    Registrar,
    Registration,
    end_processes,
    end_with_parent,
    free_port,
    registered,
    work_folder,
)
from tasks.store import Store, layout

NAME: Literal["environments"] = "environments"
SLOT = "env"  # the Dask resource; a worker has as many as it holds environments at once
MAX_WORKER_DEATHS = 3  # under one episode, after which it counts as failed
CLOSE_S = 4.0
WATCH_S = 1.0
CONNECT_S = 120.0  # longest time without a scheduler: a new one is up after 5 s on a quiet machine

_DASK_SETTINGS = {
    "distributed.scheduler.allowed-failures": MAX_WORKER_DEATHS,
    "distributed.worker.profile.enabled": False,  # sampling every thread 100 times a second costs more than episodes
    "distributed.worker.daemon": False,  # an environment may have child processes
    "distributed.comm.timeouts.connect": "10s",
}


def connect(store: Store, *, asynchronous: bool = False) -> Client:
    """A client of the run's environments cluster; with `asynchronous`, await it.

    Takes `environments.scheduler` if the configuration names one (TLS then from Dask's own configuration),
    else the registered service. Raises ConnectionError if none is registered, OSError if none answers.
    """
    config = _config(store)
    options: dict[str, Any] = {"asynchronous": asynchronous, "set_as_default": False, "timeout": CONNECT_S}
    if config.environments.scheduler is not None:
        return Client(config.environments.scheduler, **options)
    registration = registered(store, NAME)
    if registration is None or registration.status != "ready" or registration.address is None:
        raise ConnectionError(f"no environments cluster is ready; look at {store.uri}/{layout.service(NAME)}")
    security, _ = _read_access(Path(registration.facts["security"]))
    return Client(registration.address, security=security, **options)


def main(argv: list[str] | None = None) -> None:
    """Run the service until a terminate signal, or the end of its parent."""
    parser = argparse.ArgumentParser(prog="python -m tasks.environments.cluster", description=__doc__)
    parser.add_argument("--store", required=True, help="root URI of the run")
    parser.add_argument("--endpoint-url", default=None, help="S3 endpoint")
    arguments = parser.parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    end_with_parent(then=stop.set)
    store = Store(arguments.store, arguments.endpoint_url)
    config = _config(store)
    folder = work_folder(store)
    pool = pool_for("rollout", config.pools).name
    log = str(folder / "logs" / f"{NAME}.log")
    registrar = Registrar(store, Registration(NAME, NAME, pool, log=log, detail="starting workers"))
    try:
        _serve(config, folder, registrar, stop)
    except Exception as error:
        registrar.close("failed", f"{type(error).__name__}: {error}")
        raise
    registrar.close()
    sys.stdout.flush()
    os._exit(0)  # Dask's own threads may take their time


def _serve(config: RunConfig, folder: Path, registrar: Registrar, stop: threading.Event) -> None:
    path = folder / "dask-tls.json"
    security, port = _access(path)
    environments = config.environments
    with dask.config.set({**_DASK_SETTINGS, "temporary-directory": str(folder)}):
        cluster = LocalCluster(
            n_workers=environments.workers,
            threads_per_worker=environments.slots,
            processes=True,
            host="127.0.0.1",
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
            facts={"workers": environments.workers, "slots": environments.slots, "security": str(path)},
        )
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
        path.unlink(missing_ok=True)
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


def _config(store: Store) -> RunConfig:
    return parse_config(tomllib.loads(store.read(layout.CONFIG).decode()))


_SECURITY_FIELDS = (
    "tls_ca_file", "tls_client_key", "tls_client_cert", "tls_scheduler_key", "tls_scheduler_cert",
    "tls_worker_key", "tls_worker_cert",
)  # fmt: skip


def _access(path: Path) -> tuple[Security, int]:
    """Certificate, keys and port: what an earlier start of this service under the same parent left, or new ones."""
    parent = os.environ.get(PARENT)
    try:
        if parent is not None and json.loads(path.read_text())["parent"] == parent:
            return _read_access(path)
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        pass
    security, port = Security.temporary(), free_port()
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # for this user alone
    with os.fdopen(descriptor, "w") as file:
        keys = {name: getattr(security, name) for name in _SECURITY_FIELDS}
        json.dump({"parent": parent, "port": port, "keys": keys}, file)
    return security, port


def _read_access(path: Path) -> tuple[Security, int]:
    access = json.loads(path.read_text())
    return Security(require_encryption=True, **access["keys"]), access["port"]


if __name__ == "__main__":
    main()
