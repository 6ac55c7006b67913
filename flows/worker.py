"""A worker on a machine that keeps its pool's promise, and the same check in the job itself."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from flows.deploy_plan import ROOT, read_pools
from hardware.machine import Machine, missing, this_machine
from hardware.pools import Pool
from tasks.errors import UserError

POLL_S = 2  # Prefect's default is 10 s, which each start of a service would wait for


def pool_named(name: str, pools: str) -> Pool:
    """The pool of a set by its name or its work pool's. Raises UserError."""
    known = read_pools(pools)
    for pool in known:
        if name in (pool.name, pool.work_pool):
            return pool
    raise UserError(
        "POOL",
        f"the set {pools!r} has no pool {name!r}",
        f"use one of {', '.join(pool.name for pool in known)}, or another set with --pools",
    )


def check(pool: Pool) -> Machine:
    """This machine, if it has what the pool's tag says. Raises UserError with everything that it lacks."""
    machine = this_machine()
    if lacks := missing(pool, machine):
        fix = f"run it on a machine with {pool.hardware}, or correct the pool in its set if the promise is wrong"
        if pool.type == "kubernetes":
            fix += (
                f"\n  A worker that only submits pods to the cluster needs no such machine: prefect worker start"
                f" --pool {pool.work_pool}\n  (every pod is checked when it starts)"
            )
        raise UserError("this machine", f"pool {pool.name} ({pool.hardware}) wants {'; '.join(lacks)}", fix)
    return machine


def start(pool: Pool, name: str | None) -> NoReturn:
    """Become a Prefect worker of the pool, in this process. Raises UserError if the server has no such work pool."""
    from flows.deploy_server import connected

    with connected() as server:
        if server.find("work pool", pool.work_pool) is None:
            raise UserError(
                "POOL",
                f"{server.url} has no work pool {pool.work_pool!r}",
                "create it: rollart deploy (with the same --pools)",
            )
    argv = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool.work_pool]
    os.environ.setdefault("PREFECT_WORKER_QUERY_SECONDS", str(POLL_S))
    sys.stdout.flush()
    os.execv(sys.executable, [*argv, *(["--name", name] if name else [])])


def enter(pool: dict[str, Any]) -> dict[str, str]:
    """A pull step of deployments: the folder to run in, if the machine has what the pool says. Raises UserError.

    A pod has its share of a machine, which the cluster gave it as its job template asked: of what the pool says,
    only the kind of accelerator can be seen from inside.
    """
    promised = Pool.model_validate(pool)
    if promised.type == "kubernetes":
        promised = promised.model_copy(update={"count": 1, "memory_gib": 0, "cores": 0})
    check(promised)
    return {"directory": str(ROOT)}
