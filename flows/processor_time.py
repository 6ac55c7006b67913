"""Processor time of the run's processes, for the benchmarks."""

from __future__ import annotations

import psutil


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def spent(process: psutil.Process) -> float:
    """Seconds of processor time, in user and system mode; 0 of a process that is gone."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system
