"""The spool: lines arrive once, in order, whatever the receiver and the process do."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.config import RunConfig
from tasks.store import Store
from tasks.tracking import spool as spool_module
from tasks.tracking.mlflow_tracker import Tracker, flatten
from tasks.tracking.spool import Spool, redact


class Receiver:
    """Takes items after refusing the first `refuse` calls."""

    def __init__(self, refuse: int = 0):
        self.refuse, self.taken, self.calls = refuse, [], 0  # type: ignore[var-annotated]

    def __call__(self, items: Sequence[Any]) -> None:
        self.calls += 1
        if self.calls <= self.refuse:
            raise ConnectionError("http://user:hunter2@host is down")
        self.taken += [item["n"] for item in items]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module, "FIRST_PAUSE_S", 0.02)


def test_items_arrive_once_in_order_and_the_spool_is_empty_after(tmp_path: Path) -> None:
    receiver = Receiver(refuse=3)
    spool = Spool(tmp_path, "metrics", receiver)
    spool.start()
    for n in range(1200):
        spool.append({"n": n})
    assert spool.close(20)
    assert receiver.taken == list(range(1200))
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.lock"}


def test_what_a_dead_receiver_did_not_take_is_sent_by_the_next_spool(tmp_path: Path) -> None:
    first = Spool(tmp_path, "metrics", Receiver(refuse=10**9))
    first.start()
    first.append({"n": 0})
    assert not first.close(0.2)
    first.append({"n": 1})  # after the end: kept too
    receiver = Receiver()
    second = Spool(tmp_path, "metrics", receiver)
    second.append({"n": 2})
    second.start()
    assert second.close(20)
    assert receiver.taken == [0, 1, 2]


def test_only_one_spool_sends_at_a_time(tmp_path: Path) -> None:
    gate, busy = threading.Event(), threading.Event()

    def blocked(_: Sequence[Any]) -> None:
        busy.set()
        gate.wait(20)

    first, receiver = Spool(tmp_path, "metrics", blocked), Receiver()
    first.append({"n": 0})
    first.start()
    assert busy.wait(10)
    second = Spool(tmp_path, "metrics", receiver)
    second.start()
    assert not second.close(0.3) and receiver.taken == []
    gate.set()
    assert first.close(20)


def test_a_hanging_receiver_delays_close_by_its_deadline_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "metrics", lambda _: time.sleep(5))
    spool.start()
    spool.append({"n": 0})
    started = time.monotonic()
    assert not spool.close(0.3)
    assert time.monotonic() - started < 1


def test_a_line_torn_by_a_kill_costs_no_other_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"n":0}\n{"n":1}\n{"n":')
    receiver = Receiver()
    spool = Spool(tmp_path, "metrics", receiver)
    spool.append({"n": 2})
    spool.start()
    assert spool.close(20)
    assert receiver.taken == [0, 1, 2]


@pytest.mark.parametrize("offset", ["", "x", "999"])
def test_a_damaged_offset_means_sending_again_not_losing(tmp_path: Path, offset: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"n":0}\n{"n":1}\n')
    (tmp_path / "metrics.sent").write_text(offset)
    receiver = Receiver()
    spool = Spool(tmp_path, "metrics", receiver)
    spool.start()
    assert spool.close(20)
    assert receiver.taken == [0, 1]


def test_the_message_about_a_dead_receiver_comes_once_and_without_its_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path, "metrics", Receiver(refuse=4))
    spool.append({"n": 0})
    spool.start()
    assert spool.close(20)
    said = caplog.text
    assert said.count("is down") == 1 and said.count("takes metrics again") == 1
    assert "hunter2" not in said and "***@host" in said


def test_the_interpreter_ends_at_once_with_a_hanging_receiver(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tasks.tracking.spool import Spool\n"
        "s = Spool(Path(sys.argv[1]), 'm', lambda _: time.sleep(60)); s.start(); s.append({'n': 0}); s.close(0.1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=15)


def test_a_configuration_is_flattened_with_dotted_keys_and_nothing_is_left_out() -> None:
    assert flatten({"a": {"b": 1, "c": []}, "d": [{"e": None}]}) == {"a.b": 1, "a.c": [], "d.0.e": None}


def test_credentials_in_uris_are_masked() -> None:
    assert redact("postgresql://me:pw@db/x and http://h/a@b") == "postgresql://***@db/x and http://h/a@b"


def test_a_tracker_shows_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:hunter2@db/mlflow")
    tracker = Tracker(RunConfig(), "demo", Store(str(tmp_path / "run")))
    tracker.log_params({"uri": "http://me:hunter2@host"})
    assert "hunter2" not in tracker.ui_command + tracker.metrics.lines.read_text()
    assert tracker.url is None


def test_an_artifact_path_cannot_leave_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path))
    tracker = Tracker(RunConfig(), "demo", Store(str(tmp_path / "run")))
    for path in ("../x", "/etc/x"):
        with pytest.raises(ValueError, match="stay below"):
            tracker.log_artifact_bytes(path, b"")
