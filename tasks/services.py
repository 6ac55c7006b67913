"""Long-lived services: how a process registers itself, is supervised, and never outlives its run.

A service writes `services/<name>.json` in the store: status, address, version, heartbeat. Locally it is a
child process; its id is recorded in the run's work folder, so that a later start can end what a killed
parent left behind, and it watches its parent, so that it ends by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from tasks.store import Store, layout

HEARTBEAT_S = 2.0
HEALTHY_S = 3600.0  # a service that lived for so long is in order: earlier deaths count no more
GAVE_UP = 3  # exit code of a service that has tried again itself, as often as it may: it is not restarted
PARENT = "ROLLART_PARENT"  # "<pid>:<create time>" of the process whose end ends this one
Status = Literal["starting", "ready", "failed", "stopped", "finished", "paused"]


def home() -> Path:
    """This machine's folder for what is not shared: work folders, logs, the default MLflow database."""
    return Path(os.environ.get("ROLLART_HOME", "~/.rollart")).expanduser()


def work_folder(store: Store) -> Path:
    """The local folder of the run rooted at `store`: logs, process ids, prefetched weights. Mode 0700."""
    folder = home() / "work" / store.uri.replace("://", "_").strip("/").replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


# What a service says about itself


@dataclass(frozen=True)
class Registration:
    """The content of `services/<name>.json`."""

    name: str
    kind: Literal["engine", "trainer", "environments", "reward", "controller"]
    pool: str
    status: Status = "starting"
    address: str | None = None
    version: int | None = None  # the policy version it serves (engine) or holds (trainer)
    detail: str = ""  # one line for a person: what it is doing, or why it failed
    log: str = ""  # path of its log on its host
    key: str = ""  # fingerprint of the run's key it was started with
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started_at: float = field(default_factory=time.time)
    heartbeat_at: float = 0.0
    facts: dict[str, Any] = field(
        default_factory=dict
    )  # measurements, e.g. parity and pause times of each load


class Registrar:
    """Writes a service's registration at once on every change and again every HEARTBEAT_S.

    `measure`, if set, is called before every write and gives facts that change all the time; it must not raise.
    """

    def __init__(self, store: Store, registration: Registration):
        self.store, self.registration = store, registration
        self.measure: Callable[[], dict[str, Any]] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._write()  # the first one must succeed: a service without a registration is of no use
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Change fields of the registration and write it; a store that is away gets it with a later heartbeat."""
        with self._lock:
            facts = {
                **changes.pop("facts", self.registration.facts),
                **(self.measure() if self.measure else {}),
            }
            self.registration = replace(self.registration, **changes, facts=facts)
            try:
                self._write()
            except Exception as error:
                print(f"heartbeat not written: {error}", file=sys.stderr, flush=True)

    def close(self, status: Status = "stopped", detail: str = "") -> None:
        """Stop the heartbeat and write the last word."""
        self._stop.set()
        self._thread.join(timeout=10)
        self.update(status=status, detail=detail)

    def _write(self) -> None:
        self.registration = replace(self.registration, heartbeat_at=time.time())
        self.store.write_json(layout.service(self.registration.name), asdict(self.registration))

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self.update()


def registered(store: Store, name: str) -> Registration | None:
    """A service's registration, or None before its first one."""
    try:
        return Registration(**store.read_json(layout.service(name)))
    except FileNotFoundError:
        return None


# Children


@dataclass
class Service:
    """A child process to keep running: restarted with back-off after a death, as often as `died` allows."""

    name: str
    argv: Sequence[str]
    env: dict[str, str]
    log: Path
    restarts: int = 3
    process: subprocess.Popen[bytes] | None = None
    deaths: int = 0
    started: float = 0.0  # monotonic
    next_start: float = 0.0


def died(deaths: int, lived_s: float) -> int:
    """How many deaths count after one more: one that comes after HEALTHY_S of life is the first again."""
    return 1 if lived_s > HEALTHY_S else deaths + 1


class Supervisor:
    """Starts, watches and ends the child processes of one run.

    All of them are started by the supervisor's own thread. `on_death(name, exit code, log tail, gave up)` is
    called from that thread for each unexpected death.
    """

    def __init__(
        self,
        folder: Path,
        on_death: Callable[[str, int, str, bool], None] | None = None,
        record: str = "processes.json",
    ):
        self.folder, self.on_death, self.record = folder, on_death, record
        self.services: dict[str, Service] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(
        self, name: str, argv: Sequence[str], env: dict[str, str] | None = None, restarts: int = 3
    ) -> Service:
        """Start a service; its output goes to `<folder>/logs/<name>.log`."""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        service = Service(name, list(argv), dict(env or {}), log, restarts)
        with self._lock:
            self.services[name] = service
            self._start(service)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
                self._thread.start()
        return service

    def failed(self) -> Service | None:
        """A service that died more often than it may, if any."""
        with self._lock:
            return next((s for s in self.services.values() if s.deaths > s.restarts), None)

    def stop(self, grace_s: float = 10.0) -> None:
        """Terminate all services together, kill what is left after `grace_s`, with all their descendants."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        with self._lock:
            processes = [s.process for s in self.services.values() if s.process is not None]
            end_processes([psutil.Process(p.pid) for p in processes if p.poll() is None], grace_s)
            for process in processes:
                process.wait(timeout=5)
            if self.services:  # else there may not even be a folder
                self._record()

    def _start(self, service: Service) -> None:
        log: IO[bytes] = service.log.open("ab")
        with log:
            service.process = subprocess.Popen(
                service.argv,
                env={**os.environ, **service.env, PARENT: this_process()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends its children in order
            )
        service.started = time.monotonic()
        self._record()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            for service in list(self.services.values()):
                try:
                    with self._lock:
                        code = self._look_after(service)
                    if (
                        code is not None and self.on_death is not None
                    ):  # it may take its time: not under the lock
                        gave_up = service.deaths > service.restarts
                        self.on_death(service.name, code, tail(service.log), gave_up)
                except Exception as error:  # a full disk, for one: whatever it is, the watch goes on
                    service.next_start = time.monotonic() + 5.0
                    print(f"looking after {service.name}: {error}", file=sys.stderr, flush=True)

    def _look_after(self, service: Service) -> int | None:
        """Start a service again when it is time; the exit code of one that has died since the last look."""
        if service.process is None:
            if service.deaths <= service.restarts and time.monotonic() >= service.next_start:
                self._start(service)
            return None
        code = service.process.poll()
        if code is None:
            return None
        service.process = None
        lived_s = time.monotonic() - service.started
        service.deaths = service.restarts + 1 if code == GAVE_UP else died(service.deaths, lived_s)
        service.next_start = time.monotonic() + min(0.5 * 2**service.deaths, 30.0)
        return code

    def _record(self) -> None:
        ids = [
            identify(s.process.pid) for s in self.services.values() if s.process and s.process.poll() is None
        ]
        path = self.folder / self.record
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"parent": this_process(), "children": [i for i in ids if i]}))
        os.replace(part, path)


def end_leftovers(folder: Path) -> int:
    """End the children that a killed parent recorded in `folder`; returns how many were still there.

    Raises RuntimeError if the parent is alive: the run is going on elsewhere on this machine.
    """
    try:
        record = json.loads((folder / "processes.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return 0
    if record["parent"] != this_process() and find_process(record["parent"]) is not None:
        raise RuntimeError(record["parent"].split(":")[0])
    left = [p for p in (find_process(child) for child in record["children"]) if p is not None]
    end_processes(left, grace_s=10.0)
    return len(left)


def end_processes(processes: list[psutil.Process], grace_s: float) -> None:
    """Terminate processes, give them `grace_s` to end, then kill them and all their descendants."""
    family = list(processes)
    for process in processes:
        try:
            family += process.children(recursive=True)
        except psutil.NoSuchProcess:
            pass
    for process in processes:
        _signal(process, signal.SIGTERM)
    psutil.wait_procs(processes, timeout=grace_s)
    remaining = [process for process in family if process.is_running()]
    for process in remaining:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(remaining, timeout=3)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)  # psutil checks the create time: a reused id is not signalled
    except psutil.NoSuchProcess:
        pass


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 200 * lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


# Parents


def this_process() -> str:
    """This process as `<pid>:<create time>`, which no later process shares."""
    return identify(os.getpid()) or ""


def identify(pid: int) -> str | None:
    """`<pid>:<create time>`, or None if there is no such process."""
    try:
        return f"{pid}:{psutil.Process(pid).create_time():.2f}"
    except psutil.NoSuchProcess:
        return None


def find_process(identity: str) -> psutil.Process | None:
    """The process of an identity, or None if it has ended."""
    pid = int(identity.split(":")[0])
    if identify(pid) != identity:
        return None
    process = psutil.Process(pid)
    return None if process.status() == psutil.STATUS_ZOMBIE else process


def stop_event() -> threading.Event:
    """An event that a terminate or interrupt signal to this process sets."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def store_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The command line `python -m <module> --store URI`, which services and one-shot stages share."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--store", required=True, help="the run's root URI")
    parser.add_argument("--endpoint-url", help="S3 endpoint")
    return parser


def end_with_parent(then: Callable[[], None] | None = None) -> None:
    """Watch the process named by ROLLART_PARENT and end this one with it.

    Calls `then`, or sends this process a terminate signal; after 10 s more it exits whatever happens.
    """
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while find_process(parent) is not None:
            time.sleep(0.5)
        print("the parent process is gone; ending", file=sys.stderr, flush=True)
        if then is not None:
            then()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def listen_host() -> str:
    """The address services listen on and register: loopback, unless ROLLART_HOST names this machine's in its pool."""
    return os.environ.get("ROLLART_HOST", "127.0.0.1")


def is_free(port: int) -> bool:
    """Whether a server can listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen_host(), port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((listen_host(), 0))
        return probe.getsockname()[1]
