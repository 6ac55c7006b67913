"""The reward function over real HTTP: the same rewards as in the process, for those who have the run's key."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import numpy as np
import psutil
import pytest

from tasks.config import RunConfig, TaskConfig
from tasks.errors import DeadlineExceeded, RunFailed
from tasks.keys import API_KEY, SECRET
from tasks.reward import score
from tasks.reward.client import RewardClient
from tasks.services import registered
from tasks.store import Store, layout
from tasks.trajectory import Trajectory, encode_message

TASK = TaskConfig(name="frozenlake", reward="success")
LONG = TaskConfig(name="arithmetic", reward=f"{__name__}:length")


def length(made: Trajectory) -> float:
    if len(made.tokens) > 50:
        raise RuntimeError("too long")
    return float(len(made.tokens))


def trajectory(task: str = "frozenlake", tokens: int = 3, success: bool = True, wave: int = 0) -> Trajectory:
    empty = np.zeros(tokens)
    return Trajectory(task, 0, wave, 0, 0, empty, empty > 0, empty, empty, 1, 0.5, success, False)


class Function:
    """The service as a process."""

    def __init__(self, folder: Path):
        self.store = Store(str(folder / "run"))
        self.store.write(layout.CONFIG, RunConfig(name="run", tasks=[TASK, LONG]).to_toml().encode())
        self.home, self.process = folder / "home", None

    def start(self) -> None:
        environment = {**os.environ, "ROLLART_HOME": str(self.home), SECRET: "secret"}
        environment.pop(API_KEY, None)
        argv = [sys.executable, "-m", "tasks.reward.function", "--store", self.store.uri]
        self.process = subprocess.Popen(argv, env=environment)
        self.wait(lambda found: found.status == "ready" and found.pid == self.process.pid)

    def wait(self, true, deadline_s: float = 60):
        until = time.monotonic() + deadline_s
        while (found := registered(self.store, "reward")) is None or not true(found):
            assert time.monotonic() < until, found
            time.sleep(0.1)
        return found

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=20)


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Function]:
    function = Function(tmp_path_factory.mktemp("reward"))
    function.start()
    yield function
    function.end()


@pytest.fixture
def client(function: Function, monkeypatch: pytest.MonkeyPatch) -> RewardClient:
    monkeypatch.delenv(API_KEY, raising=False)
    monkeypatch.setenv(SECRET, "secret")
    return RewardClient(function.store, deadline_s=30)


@pytest.mark.parametrize("success", [True, False])
def test_the_reward_is_that_of_the_function_in_the_process(client: RewardClient, success: bool) -> None:
    made = trajectory(success=success)
    assert client.scored(made).reward == score(made, TASK)
    other = trajectory("arithmetic", tokens=7)
    scored = client.scored(other)
    assert scored.reward == score(other, LONG) == 7.0 and scored.score_s >= 0


def test_what_a_reward_raises_reaches_the_run_as_its_reason(client: RewardClient) -> None:
    with pytest.raises(RunFailed, match="RuntimeError: too long"):
        client.scored(trajectory("arithmetic", tokens=60))


def test_another_key_is_refused_and_the_message_names_the_setting(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "wrong")
    with pytest.raises(RunFailed, match="ROLLART_KEY"):
        RewardClient(function.store, deadline_s=5).scored(trajectory())


def test_every_route_but_health_needs_the_key_and_it_listens_on_loopback_only(function: Function) -> None:
    address = function.wait(lambda found: found.status == "ready").address
    assert httpx.get(f"{address}/health").status_code == 200
    assert httpx.post(f"{address}/score", content=encode_message([trajectory()])).status_code == 401
    assert httpx.get(f"{address}/other").status_code == 404
    ips = {c.laddr.ip for c in psutil.Process(function.process.pid).net_connections() if c.status == "LISTEN"}
    assert ips == {"127.0.0.1"}


def test_it_counts_what_it_scored_by_wave(function: Function, client: RewardClient) -> None:
    for _ in range(3):
        client.scored(trajectory(wave=41))
    found = function.wait(lambda found: "41" in found.facts["waves"])
    assert found.facts["waves"]["41"] == [3, 3]


def test_a_request_waits_for_a_function_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    monkeypatch.setenv(SECRET, "secret")
    function = Function(tmp_path)
    with pytest.raises(DeadlineExceeded, match="not registered"):
        RewardClient(function.store, deadline_s=0.1).scored(trajectory())
    function.start()
    client = RewardClient(function.store, deadline_s=60)
    assert client.scored(trajectory()).reward == 1.0
    function.process.kill()
    function.process.wait()
    starting = threading.Timer(1.0, function.start)
    starting.start()
    try:
        assert client.scored(trajectory()).reward == 1.0
    finally:
        starting.join()
        function.end()


class Gateway(BaseHTTPRequestHandler):
    """A serverless platform whose first copy of the function is still starting."""

    answers: ClassVar[list[tuple[int, bytes]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_gateway_that_has_no_copy_up_yet_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    monkeypatch.setenv(SECRET, "secret")
    store = Store(str(tmp_path / "run"))
    busy, many = (503, b"upstream connect error"), (429, b"too many requests")
    Gateway.answers = [busy, many, (200, b'{"rewards": [0.25], "seconds": [0.0]}')]
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        client = RewardClient(store, deadline_s=30, url=url)
        assert client.scored(trajectory()).reward == 0.25
        Gateway.answers = [(404, b"<html>no such service</html>")]
        with pytest.raises(RunFailed, match="404 <html>no such service"):
            client.scored(trajectory())
        server.shutdown()
    assert Gateway.answers == []


def test_who_waits_for_a_reward_gives_up_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    monkeypatch.setenv(SECRET, "secret")
    client = RewardClient(Store(str(tmp_path / "run")), deadline_s=600)
    closing = threading.Timer(1.0, client.close)
    closing.start()
    with pytest.raises(DeadlineExceeded):
        client.scored(trajectory())
    closing.join()
