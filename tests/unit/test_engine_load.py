"""The order in which an engine's server is asked to change its weights."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tasks.config import parse_config
from tasks.inference import engine as module
from tasks.inference.engine import Engine, EngineDied

BUSY = {"in_flight": 3, "tokens_in_flight": 70}


class Server:
    """Answers as vLLM does; weights are prepared at the third look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, cpu: bool, broken: str = ""):
        monkeypatch.setattr(module, "on_cpu", lambda: cpu)
        self.asked: list[str] = []
        self.looks, self.broken = 0, broken
        self.engine = Engine(parse_config({}), tmp_path, 1, "key", tmp_path / "log")
        self.engine._http = httpx.Client(base_url="http://engine", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        step = body.get("method", request.url.path.strip("/"))
        if self.asked[-1:] != [step]:
            self.asked.append(step)
        if step == self.broken:
            return httpx.Response(500, text="no")
        if step == "weights_prepared":
            self.looks += 1
            return httpx.Response(200, json={"results": [{"ready": self.looks > 2}]})
        return httpx.Response(200, json={"results": [None], "success": True, **BUSY})


CHANGE = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache"]


def test_on_cpu_the_weights_are_loaded_before_the_pause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(monkeypatch, tmp_path, cpu=True)
    times = server.engine.load(tmp_path, 4)
    assert server.asked == ["prepare_weights", "weights_prepared", "busy", *CHANGE, "resume"]
    assert server.looks == 3
    assert times.load_s >= 2 * module.PREPARED_POLL_S  # the load counts what came before the pause
    assert (times.requests_in_flight, times.tokens_in_flight) == (3, 70)


def test_on_a_gpu_they_are_loaded_within_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(monkeypatch, tmp_path, cpu=False)
    server.engine.load(tmp_path, 4)
    assert server.asked == ["busy", *CHANGE, "resume"]


def test_an_update_that_fails_ends_the_pause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(monkeypatch, tmp_path, cpu=True, broken="update_weights")
    with pytest.raises(EngineDied, match="update_weights"):
        server.engine.load(tmp_path, 4)
    assert server.asked[-1] == "resume"


def test_weights_that_cannot_be_prepared_cost_no_pause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(monkeypatch, tmp_path, cpu=True, broken="weights_prepared")
    with pytest.raises(EngineDied, match="collective_rpc"):
        server.engine.load(tmp_path, 4)
    assert "pause" not in server.asked
