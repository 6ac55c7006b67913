"""The trainer service: starts the ranks with torchrun, and ends them with itself.

Each rank runs `tasks.training.worker`, which registers, takes batches and publishes versions. This process
holds no state: it hands on a terminate signal, and kills what has not ended in time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import tomllib

import psutil

from tasks.config import RunConfig, parse_config
from tasks.services import PARENT, end_processes, end_with_parent, this_process
from tasks.store import Store, layout

GRACE_S = 7.0  # the service itself has 10 s


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


def main(argv: list[str] | None = None) -> int:
    """Run the trainer of the run at --store until a terminate signal, or until a rank fails."""
    parser = argparse.ArgumentParser(prog="python -m tasks.training.service", description=main.__doc__)
    parser.add_argument("--store", required=True, help="the run's root URI")
    parser.add_argument("--endpoint-url", help="S3 endpoint")
    arguments = parser.parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    end_with_parent()
    store = Store(arguments.store, arguments.endpoint_url)
    config = parse_config(tomllib.loads(store.read(layout.CONFIG).decode()))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={config.trainer.ranks}", "-m", "tasks.training.worker", "--store", arguments.store,
    ]  # fmt: skip
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
