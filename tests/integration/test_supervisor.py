"""Supervision of real child processes: restarts, giving up, a clean end, and nothing left after a kill -9."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tasks.services import (
    GAVE_UP,
    PARENT,
    Registrar,
    Registration,
    Supervisor,
    end_leftovers,
    find_process,
    free_port,
    identify,
    registered,
    tail,
    this_process,
)
from tasks.store import Store

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
IGNORES_TERMINATE = [
    sys.executable, "-S", "-c",
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)",
]  # fmt: skip


def script(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < seconds, "it did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def deaths() -> list[tuple[str, int, str, bool]]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, deaths: list[tuple[str, int, str, bool]]) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path, lambda *death: deaths.append(death))
    yield made
    made.stop(grace_s=1.0)


def starts(folder: Path) -> list[float]:
    try:
        return [float(line) for line in (folder / "starts").read_text().split()]
    except FileNotFoundError:
        return []


def note_start_then(folder: Path, rest: str) -> list[str]:
    return script(f"import time\nopen({str(folder / 'starts')!r}, 'a').write(f'{{time.time()}}\\n')\n{rest}")


def test_a_supervisor_without_services_stops_and_leaves_nothing(tmp_path: Path) -> None:
    Supervisor(tmp_path / "none").stop()
    assert list(tmp_path.iterdir()) == []


def test_a_dead_service_is_restarted_and_its_death_told_with_code_and_log(
    supervisor: Supervisor, deaths: list, tmp_path: Path
) -> None:
    rest = f"import os\nif len(open({str(tmp_path / 'starts')!r}).readlines()) == 1:\n"
    rest += "    print('the reason', flush=True); os._exit(7)\ntime.sleep(600)"
    service = supervisor.add("one", note_start_then(tmp_path, rest))
    until(lambda: len(starts(tmp_path)) == 2)
    assert deaths == [("one", 7, "the reason", False)]
    assert service.process is not None and service.process.poll() is None
    assert supervisor.failed() is None


def test_restarts_wait_longer_each_time_and_end_after_the_last_one_allowed(
    supervisor: Supervisor, deaths: list, tmp_path: Path
) -> None:
    service = supervisor.add("one", note_start_then(tmp_path, "raise SystemExit(5)"), restarts=2)
    until(lambda: supervisor.failed() is service)
    time.sleep(1.0)
    times = starts(tmp_path)
    assert len(times) == 3  # the first start and two restarts
    assert [gave_up for *_, gave_up in deaths] == [False, False, True]
    first, second = (later - earlier for earlier, later in itertools.pairwise(times))
    assert first >= 0.9 and second >= 1.9  # 1 s, then 2 s, from the moment the death is seen


def test_a_death_after_a_long_life_starts_the_count_again(
    supervisor: Supervisor, deaths: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.services.HEALTHY_S", 0.2)
    supervisor.add("one", note_start_then(tmp_path, "time.sleep(0.4); raise SystemExit(5)"), restarts=1)
    until(lambda: len(starts(tmp_path)) == 4)
    assert supervisor.failed() is None
    assert [gave_up for *_, gave_up in deaths] == [False] * 3


def test_a_service_that_says_it_gave_up_is_not_restarted(
    supervisor: Supervisor, deaths: list, tmp_path: Path
) -> None:
    service = supervisor.add("one", note_start_then(tmp_path, f"raise SystemExit({GAVE_UP})"), restarts=9)
    until(lambda: supervisor.failed() is service)
    time.sleep(1.5)
    assert len(starts(tmp_path)) == 1
    assert [(code, gave_up) for _, code, _, gave_up in deaths] == [(GAVE_UP, True)]


def test_one_service_that_dies_does_not_touch_the_others(supervisor: Supervisor, tmp_path: Path) -> None:
    steady = supervisor.add("steady", SLEEP)
    supervisor.add("dies", script("raise SystemExit(1)"), restarts=0)
    until(lambda: supervisor.failed() is not None)
    assert steady.process is not None and steady.process.poll() is None
    assert steady.deaths == 0


def test_an_error_in_looking_after_a_service_does_not_end_the_watch(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    supervisor = Supervisor(tmp_path, full_disk)
    try:
        supervisor.add("short", script("pass"), restarts=1)
        until(lambda: (failed := supervisor.failed()) and failed.deaths == 2)
    finally:
        supervisor.stop()
    assert "No space left" in capfd.readouterr().err


def test_stop_ends_services_that_ignore_the_terminate_signal_with_their_children(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    service = supervisor.add("stubborn", IGNORES_TERMINATE)
    plain = supervisor.add("plain", SLEEP)
    until(lambda: "ready" in tail(service.log))
    assert service.process is not None and plain.process is not None
    family = psutil.Process(service.process.pid).children(recursive=True)
    assert len(family) == 1
    started = time.monotonic()
    supervisor.stop(grace_s=1.0)
    assert time.monotonic() - started < 8
    assert identify(service.process.pid) is None and identify(plain.process.pid) is None
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    assert json.loads((tmp_path / "processes.json").read_text())["children"] == []


def test_stop_leaves_no_grandchild_of_a_service_that_ends_by_itself(supervisor: Supervisor) -> None:
    """A service that obeys at once but forgets its own child."""
    code = "import subprocess, sys, time\n"
    code += "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    code += "print('ready', flush=True)\ntime.sleep(600)"
    service = supervisor.add("forgetful", script(code))
    until(lambda: "ready" in tail(service.log))
    assert service.process is not None
    (grandchild,) = psutil.Process(service.process.pid).children(recursive=True)
    supervisor.stop(grace_s=2.0)
    until(lambda: not grandchild.is_running(), 5)


def test_a_stopped_supervisor_restarts_nothing(supervisor: Supervisor, deaths: list, tmp_path: Path) -> None:
    supervisor.add("one", note_start_then(tmp_path, "time.sleep(600)"))
    until(lambda: len(starts(tmp_path)) == 1)
    supervisor.stop()
    time.sleep(1.5)
    assert len(starts(tmp_path)) == 1 and deaths == []


def test_services_get_their_environment_their_parent_and_no_terminal_signals(supervisor: Supervisor) -> None:
    code = f"import os; print(os.environ['EXTRA'], os.environ['{PARENT}'], os.getsid(0) == os.getpid(), flush=True)"
    service = supervisor.add("one", script(code + "\nimport time; time.sleep(600)"), {"EXTRA": "given"})
    until(lambda: tail(service.log))
    assert (
        tail(service.log) == f"given {this_process()} True"
    )  # a session of its own: Ctrl-C does not reach it


# What a killed parent leaves


def record(folder: Path, parent: str, *children: str) -> None:
    (folder / "processes.json").write_text(json.dumps({"parent": parent, "children": list(children)}))


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def test_leftovers_are_ended_by_their_recorded_identity(tmp_path: Path, child: subprocess.Popen) -> None:
    record(tmp_path, "999999:1.00", identify(child.pid) or "")
    assert end_leftovers(tmp_path) == 1
    child.wait(timeout=5)
    assert end_leftovers(tmp_path) == 0


def test_a_later_process_with_a_recorded_id_is_left_alone(tmp_path: Path, child: subprocess.Popen) -> None:
    earlier = f"{child.pid}:{psutil.Process(child.pid).create_time() - 5:.2f}"
    record(tmp_path, "999999:1.00", earlier)
    assert end_leftovers(tmp_path) == 0
    time.sleep(0.2)
    assert child.poll() is None


def test_children_of_a_living_parent_are_left_alone(tmp_path: Path, child: subprocess.Popen) -> None:
    other = subprocess.Popen(SLEEP)
    try:
        record(tmp_path, identify(other.pid) or "", identify(child.pid) or "")
        with pytest.raises(RuntimeError, match=str(other.pid)):
            end_leftovers(tmp_path)
        assert child.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("content", [None, "", "{", '{"parent": "999999:1.00", "children": []}'])
def test_no_record_or_half_a_record_is_no_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "processes.json").write_text(content)
    assert end_leftovers(tmp_path) == 0


def test_identity_of_a_process_that_has_ended_finds_nothing() -> None:
    process = subprocess.Popen(script(""))
    identity = identify(process.pid)
    assert identity is not None
    process.wait()
    assert find_process(identity) is None
    assert find_process(this_process()) is not None


PARENT_SCRIPT = """
import sys, time
from pathlib import Path
from tasks.services import Supervisor
supervisor = Supervisor(Path({folder!r}))
for name, argv in {children!r}.items():
    supervisor.add(name, argv)
while not all("ready" in s.log.read_text() for s in supervisor.services.values()):
    time.sleep(0.05)
print("ready", flush=True)
time.sleep(600)
"""
WATCHES = "from tasks.services import end_with_parent\n{before}end_with_parent({then})\nprint('ready', flush=True)\n{after}"


def killed_parent(tmp_path: Path, **children: str) -> list[str]:
    """Start a parent that supervises `children`, kill -9 it, and return its children's identities."""
    argv = {name: [sys.executable, "-c", code] for name, code in children.items()}
    code = PARENT_SCRIPT.format(folder=str(tmp_path), children=argv)
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    )
    assert parent.stdout is not None and parent.stdout.readline().strip() == b"ready"
    recorded = json.loads((tmp_path / "processes.json").read_text())["children"]
    parent.kill()
    parent.wait()
    return recorded


def test_children_end_with_a_killed_parent_in_order_or_by_force(tmp_path: Path) -> None:
    """A plain child, one that closes in order, and one that ignores the terminate signal."""
    sleeps = "import time; time.sleep(600)"
    closes = "import threading; stop = threading.Event()\n"
    closed = tmp_path / "closed"
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    recorded = killed_parent(
        tmp_path,
        plain=WATCHES.format(before="", then="", after=sleeps),
        orderly=WATCHES.format(
            before=closes, then="stop.set", after=f"stop.wait(); open({str(closed)!r}, 'w')"
        ),
        stubborn=WATCHES.format(before=ignores, then="", after=sleeps),
    )
    assert len(recorded) == 3
    started = time.monotonic()
    until(lambda: sum(find_process(child) is not None for child in recorded) <= 1, 15)
    assert time.monotonic() - started < 8
    until(lambda: not any(find_process(child) for child in recorded), 20)  # by force after 10 s
    assert closed.exists()


def test_a_later_start_ends_what_a_killed_parent_left(tmp_path: Path) -> None:
    """A child that does not watch its parent."""
    recorded = killed_parent(tmp_path, deaf="print('ready', flush=True); import time; time.sleep(600)")
    time.sleep(0.5)
    assert find_process(recorded[0]) is not None
    assert end_leftovers(tmp_path) == 1
    until(lambda: find_process(recorded[0]) is None, 5)


# Registrations


def test_a_registration_is_written_at_once_kept_fresh_and_closed_with_a_last_word(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert registered(store, "engine-0") is None
    registrar = Registrar(store, Registration("engine-0", "engine", "pool"))
    first = registered(store, "engine-0")
    assert first is not None and (first.status, first.pid) == ("starting", os.getpid())
    registrar.update(status="ready", version=3, facts={"loads": []})
    second = registered(store, "engine-0")
    assert second is not None and (second.status, second.version) == ("ready", 3)
    until(lambda: (registered(store, "engine-0") or second).heartbeat_at > second.heartbeat_at, 10)
    registrar.close("failed", "the reason")
    last = registered(store, "engine-0")
    assert last is not None and (last.status, last.detail, last.version) == ("failed", "the reason", 3)


def test_the_heartbeat_outlives_a_store_that_is_away(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    store = Store(str(tmp_path / "store"))
    registrar = Registrar(store, Registration("trainer", "trainer", "pool"))
    folder = tmp_path / "store" / "services"
    folder.rename(tmp_path / "away")
    folder.write_text("not a folder")
    until(lambda: "heartbeat not written" in capfd.readouterr().err, 15)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    seen = registered(store, "trainer")
    assert seen is not None
    until(lambda: (registered(store, "trainer") or seen).heartbeat_at > seen.heartbeat_at, 15)
    registrar.close()


def test_a_free_port_can_be_bound() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))
