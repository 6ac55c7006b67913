"""What Prefect shows of starts that did not end by themselves: real flows and a real server, no services."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.server import start_server
from tasks.services import Supervisor

# A run's flows without its work: `die` is killed inside, `stop` is cancelled inside, `start` goes through.
SCRIPT = """
import asyncio, os, signal, sys
from types import SimpleNamespace
from prefect import flow, tags
from flows import session

context, started = SimpleNamespace(name="demo"), asyncio.Event()

@flow(flow_run_name="inside")
async def inside(how):
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    started.set()
    await asyncio.sleep(60 if how == "stop" else 0)

@flow(flow_run_name="train-demo")
async def train(how):
    await session._end_dead_start(context)
    try:
        with tags("run:demo"):
            await inside(how)
    except asyncio.CancelledError:
        asyncio.current_task().uncancel()
        await session._end_others(context, "Stopped on request.")
        return session.Cancelled()

async def main(how):
    work = asyncio.ensure_future(train(how))
    if how == "stop":
        await started.wait()
        work.cancel()
    await asyncio.wait([work])

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("prefect")
    supervisor = Supervisor(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(folder))
        patch.delenv("PREFECT_API_URL", raising=False)
        try:
            start_server(supervisor)
            yield {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        finally:
            supervisor.stop()


def states(env: dict[str, str], name: str) -> list[str]:
    body: dict[str, Any] = {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_ASC"}
    found = httpx.post(f"{env['PREFECT_API_URL']}/flow_runs/filter", json=body, timeout=60).json()
    return [run["state_type"] for run in found]


def test_a_dead_start_is_shown_as_crashed_and_a_stopped_one_as_cancelled(env: dict[str, str]) -> None:
    shown = []
    for how in ("die", "stop", "start"):
        subprocess.run([sys.executable, "-c", SCRIPT, how], env=env, timeout=300)
        shown.append((states(env, "train-demo"), states(env, "inside")))
    assert shown[0] == (["RUNNING"], ["RUNNING"])
    assert shown[1] == (["CRASHED", "CANCELLED"],) * 2
    assert shown[2] == (["CRASHED", "CANCELLED", "COMPLETED"],) * 2
