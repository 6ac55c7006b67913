"""What this machine has, and what of a pool's promise it lacks."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from hardware.accelerators import accelerators
from hardware.pools import Pool

GIB = 2**30
QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
QUERY_DEADLINE_S = 30.0  # without the persistence daemon the driver initialises every GPU first
# A driver or a kernel keeps some memory for itself: an accelerator sold with 80 GB reports 79.6 GiB, a machine of 1000 GiB 985.
ENOUGH = 0.95


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it."""

    name: str
    memory_gib: float


@dataclass(frozen=True)
class Machine:
    """What this process may use: GPUs, main memory (of its container, if that is less), cores."""

    gpus: tuple[Gpu, ...]
    memory_gib: float
    cores: int

    def __str__(self) -> str:
        gpus = ", ".join(_counted([gpu.name for gpu in self.gpus])) or "no GPU"
        return f"{gpus}, {self.memory_gib:.0f} GiB of memory, {self.cores} cores"


def this_machine() -> Machine:
    """Look at this machine. One without `nvidia-smi`, or whose driver does not answer, has no GPU."""
    return Machine(_gpus(), min(psutil.virtual_memory().total, _container_memory()) / GIB, _cores())


def missing(pool: Pool, machine: Machine) -> list[str]:
    """What `pool` promises and `machine` lacks, one sentence each; empty if it keeps the promise."""
    lacks = []
    if pool.accelerator is not None and (lack := _missing_gpus(pool, machine)):
        lacks.append(lack)
    if machine.memory_gib < ENOUGH * pool.memory_gib:
        lacks.append(f"{pool.memory_gib:g} GiB of memory, but it has {machine.memory_gib:.1f}")
    if machine.cores < pool.cores:
        lacks.append(f"{pool.cores} cores, but it has {machine.cores}")
    return lacks


def _missing_gpus(pool: Pool, machine: Machine) -> str:
    profile = accelerators()[str(pool.accelerator)]
    fitting = [
        gpu
        for gpu in machine.gpus
        if re.search(profile.device, gpu.name, re.IGNORECASE)
        and gpu.memory_gib >= ENOUGH * profile.memory_gib
    ]
    if len(fitting) >= pool.count:
        return ""
    seen = _counted([f"{gpu.name} ({gpu.memory_gib:.0f} GiB)" for gpu in machine.gpus])
    wanted = f"{pool.count} x {profile.name.upper()} with {profile.memory_gib:g} GiB"
    return f"{wanted}, but it has {', '.join(seen) or 'no GPU that nvidia-smi shows'}"


def _counted(names: list[str]) -> list[str]:
    """`["8 x NVIDIA H20"]`, in order of first appearance."""
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def _gpus() -> tuple[Gpu, ...]:
    try:
        output = subprocess.run(
            QUERY, capture_output=True, text=True, timeout=QUERY_DEADLINE_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(_gpu(line) for line in output.splitlines() if "," in line)


def _gpu(line: str) -> Gpu:
    """`NVIDIA H20, 97871 MiB` as a Gpu; memory that the driver cannot tell (`[N/A]`) is 0."""
    name, _, memory = line.rpartition(",")
    amount = memory.split()[:1] or [""]
    return Gpu(name.strip(), float(amount[0]) / 1024 if amount[0].isdigit() else 0.0)


def _container_memory() -> float:
    """The memory limit of this process's container, in bytes."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else float(limit)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
