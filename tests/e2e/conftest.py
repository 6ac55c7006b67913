"""One machine and one finished run for all end-to-end tests: a whole run takes about a minute."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.services import free_port
from tasks.store import Store
from tests.e2e.machine import Done, Machine


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine"))


@dataclass(frozen=True)
class Finished:
    name: str
    store: Store
    done: Done


@pytest.fixture(scope="session")
def finished(machine: Machine) -> Finished:
    """A whole run of three on-policy iterations, warm start included."""
    return Finished("whole", machine.store("whole"), machine.train("whole").wait())


@pytest.fixture(scope="session")
def prefect_api(machine: Machine, finished: Finished) -> Iterator[str]:
    """The API of a Prefect server on the database that the finished run used, as a person would open it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (machine.home / "prefect-server.log").open("wb") as log:
        server = subprocess.Popen(argv, env=machine.env, stdout=log, stderr=log, cwd=machine.home)
    try:
        _wait_for(f"{url}/health")
        yield url
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(url: str) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"{url} did not answer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test here may wait for the shared run and for one of its own, on a machine that is busy."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1500))
