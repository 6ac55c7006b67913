"""The real command line in a process of its own, and what it may leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "ROLLART_TEST_MARK"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    seconds: float
    left: list[int]  # processes that outlived the command


def rollart(*arguments: str, home: Path, env: dict[str, str] | None = None, timeout: float = 15) -> Outcome:
    """Run `rollart` in folder `home`, without this shell's S3, Prefect and MLflow settings."""
    mark = uuid.uuid4().hex
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "PREFECT_", "MLFLOW_", "ROLLART_"))
    }
    clean = {**kept, "HOME": str(home), "ROLLART_HOME": str(home / ".rollart"), MARK: mark, "COLUMNS": "100"}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=home,
        env={**clean, "PYTHONPATH": str(Path(__file__).parents[2]), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - started
    return Outcome(done.returncode, done.stdout, done.stderr, seconds, marked(mark))


def marked(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
