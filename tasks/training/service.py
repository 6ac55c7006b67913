"""The trainer service: starts the ranks with torchrun, and ends them with itself.

Each rank runs `tasks.training.worker`, which registers, takes batches and publishes versions. This process
holds no state: it hands on a terminate signal, and kills what has not ended in time.

By default all ranks are on this machine. On several, this service runs on each, with ROLLART_NNODES (how many),
ROLLART_NODE_RANK (which one, from 0) and ROLLART_RENDEZVOUS (host:port on node 0, where they meet).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

import psutil

from tasks.config import RunConfig, stored_config
from tasks.errors import UserError
from tasks.services import (
    GAVE_UP,
    PARENT,
    end_processes,
    end_with_parent,
    stop_event,
    store_parser,
    this_process,
)
from tasks.store import Store

GRACE_S = 7.0  # the service itself has 10 s
NODES, NODE_RANK, RENDEZVOUS = "ROLLART_NNODES", "ROLLART_NODE_RANK", "ROLLART_RENDEZVOUS"


def rank_environment(config: RunConfig) -> dict[str, str]:
    """What the ranks need in their environment before they import torch."""
    threads = max(1, config.trainer.threads // config.trainer.ranks)
    has_gpu = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    return {
        PARENT: this_process(),
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin at barriers cost four times the CPU time where engines and environments share the cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # repeatable matrix products on CUDA
        "TOKENIZERS_PARALLELISM": "false",
        **({} if has_gpu or "DS_ACCELERATOR" in os.environ else {"DS_ACCELERATOR": "cpu"}),
    }


def launcher(ranks: int, environment: Mapping[str, str]) -> list[str]:
    """The torchrun command, up to the module, for this node's share of `ranks`.

    Raises UserError naming the setting that is missing or wrong.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    nodes = _number(environment, NODES, at_least=1, default="1")
    if nodes == 1:
        return [*torchrun, "--standalone", f"--nproc-per-node={ranks}"]
    node, rendezvous = _number(environment, NODE_RANK), environment.get(RENDEZVOUS, "")
    if ranks % nodes:
        raise UserError(
            "trainer.ranks", f"is {ranks}, which {nodes} nodes cannot share", f"make it a multiple of {NODES}"
        )
    if node >= nodes:
        raise UserError(NODE_RANK, f"is {node}", f"number the nodes from 0 to {nodes - 1}")
    if not re.fullmatch(r".+:\d+", rendezvous):
        raise UserError(RENDEZVOUS, f"is {rendezvous!r}", "give host:port on node 0")
    # The static rendezvous takes nodes by their number, so that rank 0, which registers, is always on node 0.
    return [
        *torchrun, f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={ranks // nodes}",
        "--rdzv-backend=static", f"--rdzv-endpoint={rendezvous}",
    ]  # fmt: skip


def _number(environment: Mapping[str, str], name: str, at_least: int = 0, default: str = "") -> int:
    given = environment.get(name) or default
    if not given.isdecimal() or int(given) < at_least:
        raise UserError(name, f"is {given!r}", f"give a whole number, {at_least} or more")
    return int(given)


def main(argv: list[str] | None = None) -> int:
    """Run the trainer of the run at --store until a terminate signal, or until a rank fails."""
    arguments = store_parser("tasks.training.service", main.__doc__).parse_args(argv)
    stop = stop_event()
    end_with_parent()
    store = Store(arguments.store, arguments.endpoint_url)
    config = stored_config(store)
    try:
        command = launcher(config.trainer.ranks, os.environ)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return GAVE_UP  # another start would find the same
    command += ["-m", "tasks.training.worker", "--store", arguments.store]
    if arguments.endpoint_url:
        command += ["--endpoint-url", arguments.endpoint_url]
    ranks = subprocess.Popen(
        command, env={**os.environ, **rank_environment(config)}, stdin=subprocess.DEVNULL
    )
    while ranks.poll() is None and not stop.wait(0.1):
        pass
    if stop.is_set():
        if ranks.poll() is None:
            end_processes([psutil.Process(ranks.pid)], GRACE_S)
        return 0
    return ranks.returncode or 1  # ranks end by themselves only when something failed


if __name__ == "__main__":
    sys.exit(main())
