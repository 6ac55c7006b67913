"""The agent over a store that misbehaves, with an engine that only remembers what was asked of it."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.config import parse_config
from tasks.errors import DeadlineExceeded
from tasks.inference import agent as module
from tasks.inference.agent import Agent
from tasks.inference.engine import LoadTimes
from tasks.keys import API_KEY
from tasks.services import GAVE_UP, Registration, registered
from tasks.store import Store, layout


class Engine:
    """Stands in for the vLLM server."""

    address = "http://127.0.0.1:1"

    def __init__(self, *_: Any):
        self.starts, self.stops, self.loads = 0, 0, []
        self.ending = threading.Event()
        self.began = time.time()
        self.tokens = itertools.count()

    def start(self) -> None:
        self.starts += 1

    def stop(self) -> None:
        self.stops += 1

    def check(self) -> None:
        if self.ending.is_set():
            raise SystemExit

    def wait_until_healthy(self, deadline_s: float) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def load(self, folder: Path, version: int) -> LoadTimes:
        assert (folder / "model.safetensors").read_bytes() == f"weights {version}".encode()
        self.loads.append(version)
        return LoadTimes(pause_s=0.2, load_s=0.1, requests_in_flight=3, tokens_in_flight=70)

    def busy(self) -> dict[str, Any]:
        return {
            "started_at": self.began,
            "busy_s": time.time() - self.began,
            "in_flight": 3,
            "answered": 0,
            "tokens_in_flight": next(self.tokens),
        }


class _Elsewhere(Store):
    """The store as a trainer sees it that still reaches it."""

    write_json = Store.write_json


class Scene:
    """An agent in a thread, its engine and its store."""

    def __init__(self, folder: Path, **inference: Any):
        self.store = Store(str(folder / "run"))
        self.store.write(layout.CONFIG, parse_config({"inference": inference}).to_toml().encode())
        self.store.put("policy", {"config.json": b"{}"})
        self.agent = Agent(self.store, "engine-0", "key")
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.agent.run()
        except SystemExit:
            pass

    def publish(self, version: int) -> None:
        objects: dict[str, bytes | Path] = {"model.safetensors": f"weights {version}".encode()}
        self.store.put(layout.weights(version), objects, version=version)

    def serves(self, version: int) -> Registration:
        return self.wait(lambda found: found.status == "ready" and found.version == version)

    def wait(self, what: Callable[[Registration], bool], deadline_s: float = 15) -> Registration:
        started = time.monotonic()
        while time.monotonic() - started < deadline_s:
            found = registered(Store(self.store.uri), "engine-0")
            if found is not None and what(found):
                return found
            assert self.thread.is_alive(), "the agent ended"
            time.sleep(0.02)
        raise AssertionError(found)

    @property
    def engine(self) -> Any:
        return self.agent.engine


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "Engine", Engine)
    scene = Scene(tmp_path)
    scene.publish(0)
    scene.thread.start()
    scene.serves(0)
    yield scene
    scene.engine.ending.set()
    scene.thread.join(10)
    scene.agent.registrar.close()
    assert not scene.thread.is_alive()


def test_each_load_and_each_heartbeat_says_what_was_measured(scene: Scene) -> None:
    scene.publish(1)
    found = scene.serves(1)
    load = found.facts["loads"][-1]
    assert (load["pause_s"], load["load_s"]) == (0.2, 0.1)
    assert (load["requests_in_flight"], load["tokens_in_flight"]) == (3, 70)
    written_at = (scene.store.manifest(layout.weights(1)) or {})["written_at"]
    assert load["serving_s"] == load["at"] - written_at > 0
    busy = found.facts["busy"]
    assert busy["in_flight"] == 3 and busy["busy_s"] > 0
    later = scene.wait(lambda now: now.heartbeat_at > found.heartbeat_at)
    assert later.facts["busy"]["busy_s"] > busy["busy_s"] and later.facts["busy"]["at"] > busy["at"]
    assert later.facts["loads"][-1] == load  # a heartbeat keeps the other facts


def test_a_folder_that_is_away_ends_neither_agent_nor_engine(
    scene: Scene, capfd: pytest.CaptureFixture[str]
) -> None:
    root = Path(scene.store.uri)
    root.rename(root.with_name("away"))
    root.write_text("not a folder")
    time.sleep(3)  # longer than a heartbeat
    assert scene.thread.is_alive()
    root.unlink()
    root.with_name("away").rename(root)
    scene.publish(1)
    scene.serves(1)
    assert (scene.engine.starts, scene.engine.stops, scene.engine.loads) == (1, 0, [0, 1])
    assert "heartbeat not written" in capfd.readouterr().err


@pytest.mark.parametrize("during", ["listing", "fetch"])
def test_a_store_that_gives_up_after_its_retries_ends_neither_agent_nor_engine(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    def away(*_: Any, **__: Any) -> Any:
        raise DeadlineExceeded("the store", 60, "its endpoint (503 Slow Down)")

    published = _Elsewhere(scene.store.uri)
    with monkeypatch.context() as outage:
        outage.setattr(Store, "write_json", away)
        outage.setattr(Store, "numbers" if during == "listing" else "fetch", away)
        outage.setattr(module, "RETRY_LONGEST_S", 0.5)
        if during == "fetch":
            published.put(layout.weights(1), {"model.safetensors": b"weights 1"}, version=1)
        time.sleep(2.5)  # longer than a heartbeat
        assert scene.thread.is_alive() and scene.engine.stops == 0
        said = scene.agent.registrar.registration.detail
        assert ("cannot be fetched" if during == "fetch" else "the store is away") in said and "503" in said
    scene.publish(1)
    scene.serves(1)
    assert (scene.engine.starts, scene.engine.stops) == (1, 0)


def test_a_corrupt_version_is_fetched_again_while_the_old_one_serves(scene: Scene) -> None:
    scene.publish(1)
    key = f"{layout.weights(2)}/model.safetensors"
    manifest = scene.store.manifest(layout.weights(1)) or {}
    scene.serves(1)
    scene.store.write(key, b"weights 3")  # of the right size
    scene.store.write_json(
        f"{layout.weights(2)}/manifest.json", {**_described(b"weights 2", manifest), "version": 2}
    )
    found = scene.wait(lambda found: "cannot be fetched" in found.detail)
    assert (found.status, found.version) == ("ready", 1)
    scene.store.write(key, b"weights 2")
    scene.serves(2)
    assert scene.engine.loads == [0, 1, 2]


def _described(content: bytes, manifest: dict[str, Any]) -> dict[str, Any]:
    import hashlib

    described = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {**manifest, "files": {"model.safetensors": described}}


def test_a_version_overtaken_while_it_is_fetched_is_skipped_but_never_two_in_a_row(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Store.fetch

    def overtaken(store: Store, prefix: str, folder: Path, **how: Any) -> dict[str, Any]:
        manifest = fetch(store, prefix, folder, **how)
        if prefix.startswith("weights/") and manifest["version"] < 6:
            scene.publish(manifest["version"] + 1)
        return manifest

    monkeypatch.setattr(Store, "fetch", overtaken)
    scene.publish(1)
    scene.serves(6)
    assert scene.engine.loads == [0, 2, 4, 6]


def test_of_two_versions_published_at_once_only_the_newest_is_loaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Store.numbers
    with monkeypatch.context() as blind:
        blind.setattr(Store, "numbers", lambda *_: [])
        scene.publish(1)
        scene.publish(2)
        blind.setattr(Store, "numbers", numbers)
    scene.serves(2)
    assert scene.engine.loads == [0, 2]


def test_a_taken_port_ends_the_agent_for_good_and_names_the_setting(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = parse_config({"inference": {"port": taken.getsockname()[1]}})
        store.write(layout.CONFIG, config.to_toml().encode())
        done = subprocess.run(
            [sys.executable, "-m", "tasks.inference.agent", "--store", store.uri, "--name", "engine-0"],
            env={**os.environ, "ROLLART_HOME": str(tmp_path / "home"), API_KEY: "k"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == GAVE_UP
    assert "error: inference.port: port" in done.stderr and "Traceback" not in done.stderr
    found = json.loads(store.read(layout.service("engine-0")))
    assert found["status"] == "failed" and "inference.port" in found["detail"]


def test_an_engine_that_makes_no_token_is_started_again_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "Engine", Engine)
    monkeypatch.setattr("tasks.services.HEARTBEAT_S", 0.1)
    scene = Scene(tmp_path, request_deadline_s=10.0)
    scene.publish(0)
    scene.thread.start()
    try:
        scene.serves(0)
        scene.engine.tokens = itertools.repeat(70)
        found = scene.wait(lambda found: found.status == "starting")
        assert "no token" in found.detail and "inference.request_deadline_s" in found.detail
        scene.engine.tokens = itertools.count()
        scene.serves(0)
        assert (scene.engine.starts, scene.engine.loads) == (2, [0, 0])
    finally:
        scene.engine.ending.set()
        scene.thread.join(10)
        scene.agent.registrar.close()


def test_an_engine_without_requests_does_not_hang() -> None:
    progress = module.Progress()
    for _ in range(2):
        progress._at -= 100
        progress.note({"in_flight": 0, "answered": 7, "tokens_in_flight": 0})
        assert progress.still_s() < 50


def test_an_engine_moves_with_every_answer_and_every_token_and_with_nothing_else() -> None:
    progress, seen = module.Progress(), {"in_flight": 2, "answered": 7, "tokens_in_flight": 90}
    progress.note(seen)
    for change, moves in [
        ({}, False),
        ({"in_flight": 9}, False),  # more requests, none answered
        ({"in_flight": 1, "tokens_in_flight": 40}, False),  # one was given up by its client
        ({"tokens_in_flight": 41}, True),
        ({"answered": 8, "tokens_in_flight": 0}, True),
        ({"answered": 9}, True),  # answered with its first token
    ]:
        progress._at = time.monotonic() - 100
        seen = {**seen, **change}
        progress.note(seen)
        assert (progress.still_s() < 50) == moves, change


def test_heartbeats_that_the_store_holds_up_are_no_hang(scene: Scene) -> None:
    scene.agent._progress._at -= 100  # no heartbeat has measured for so long
    scene.agent._check_progress()
    assert scene.agent._progress.still_s() < 50
