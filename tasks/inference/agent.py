"""The agent beside one engine: `python -m tasks.inference.agent --store URI --name engine-0`.

It keeps a vLLM server running and pulls every new version of the policy from the store into it: prefetch while
generation goes on, pause, local load, resume, parity with the trainer. Pull, not push: an engine that restarts
or joins late catches up by itself.

Invariants: the registration says `ready` with version v only after v was loaded and its parity held, and is
written at once after each load; a version that does not match its probe is never registered, and the one
before it serves on; a store that is away ends neither agent nor server; a server that hangs is started again
like one that died; whatever ends the agent ends the server too.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hardware.pools import pool_for
from tasks.config import RunConfig, stored_config
from tasks.errors import DeadlineExceeded, UserError
from tasks.inference.engine import Engine, EngineDied, choose_port, parity
from tasks.keys import fingerprint, run_key
from tasks.services import (
    GAVE_UP,
    Registrar,
    Registration,
    died,
    end_with_parent,
    is_free,
    store_parser,
    work_folder,
)
from tasks.store import CorruptObject, Store, layout

LOADS_KEPT = 50
RETRY_FIRST_S, RETRY_LONGEST_S = 0.5, 15.0
AWAY_S = 1.0  # between two looks at a store that is away


@dataclass(frozen=True)
class LocalVersion:
    """A version of the policy on the local disk, checked against its manifest."""

    version: int
    folder: Path
    probe: dict[str, Any] | None
    prefetch_s: float
    written_at: float  # when its manifest was, by the trainer's clock


class BusyCount:
    """The busy seconds of one engine over all its server processes: each of them starts from zero, this does not."""

    def __init__(self) -> None:
        self._by_process: dict[float, float] = {}
        self._lock = threading.Lock()

    def add(self, counted: dict[str, Any]) -> dict[str, Any]:
        """Take an answer of `Engine.busy` in; returns the fact to register: `busy_s`, `at` (epoch), `in_flight`."""
        with self._lock:
            process = counted["started_at"]
            self._by_process[process] = max(counted["busy_s"], self._by_process.get(process, 0.0))
            total = sum(self._by_process.values())
        return {"busy_s": total, "at": time.time(), "in_flight": counted["in_flight"]}


class Progress:
    """How long an engine has made no token although it has requests, or has not answered."""

    def __init__(self) -> None:
        self._answered, self._tokens = -1, -1
        self._at = time.monotonic()

    def note(self, counted: dict[str, Any]) -> None:
        """Take an answer of `Engine.busy` in."""
        answered, tokens = counted["answered"], counted["tokens_in_flight"]
        if counted["in_flight"] == 0 or answered != self._answered or tokens > self._tokens:
            self._at = time.monotonic()
        self._answered, self._tokens = answered, tokens

    def still_s(self) -> float:
        """Seconds since it last moved, or had nothing to do."""
        return time.monotonic() - self._at


class Refused(Exception):
    """The engine does not reproduce the trainer's log-probs with this version's weights."""


class Agent:
    """Runs in the main thread until a terminate signal (SystemExit)."""

    def __init__(self, store: Store, name: str, api_key: str, pin: int | None = None):
        self.store, self.name, self.pin = store, name, pin
        self.config: RunConfig = stored_config(store)
        self.folder = work_folder(store) / name
        shutil.rmtree(self.folder, ignore_errors=True)
        log = work_folder(store) / "logs" / f"{name}-vllm.log"
        self.registrar = Registrar(
            store,
            Registration(
                name,
                "engine",
                pool_for("engine", self.config.pools).name,
                log=str(log),
                key=fingerprint(api_key),
            ),
        )
        self.loads: list[dict[str, Any]] = []
        self.serving: LocalVersion | None = None
        self.refused: int | None = None
        self._api_key, self._log = api_key, log
        self._busy_count = BusyCount()
        self._busy: dict[str, Any] = {}
        self._progress = Progress()
        self._skipped = False  # the version before the one at hand, because it was overtaken

    def run(self) -> NoReturn:
        """Keep the engine running; restart it after a death, with back-off, as often as configured.

        Raises UserError (inference.port is taken), DeadlineExceeded (no policy in the store).
        """
        port = self._port()
        self.say("fetching the policy's folder")
        self.store.wait_for("policy", self.config.inference.start_deadline_s, "the run's controller")
        self.store.fetch("policy", self.folder / "policy")
        self.engine = Engine(self.config, self.folder / "policy", port, self._api_key, self._log)
        self.registrar.measure = self._measure
        deaths = 0
        try:
            while True:
                started = time.monotonic()
                try:
                    self._serve()
                except (EngineDied, DeadlineExceeded) as error:
                    deaths = died(deaths, time.monotonic() - started)
                    self.engine.stop()
                    if deaths > self.config.inference.restarts:
                        self._give_up(f"the engine died {deaths} times; the last: {error}")
                    said = f"restarting the engine ({deaths}): {error}".splitlines()[0]
                    self.say(said, status="starting", address=None, version=None)
                    time.sleep(min(0.5 * 2**deaths, 30.0))
        finally:
            self.engine.stop()

    def _port(self) -> int:
        """The port of an earlier start of this agent, if it is free: requests on their way find the engine again."""
        kept = self.folder.with_suffix(".port")
        chosen = choose_port(self.config, int(self.name.rsplit("-", 1)[-1]))
        if self.config.inference.port == 0 and kept.exists() and is_free(int(kept.read_text())):
            return int(kept.read_text())
        kept.write_text(str(chosen))
        return chosen

    def say(self, detail: str, **changes: Any) -> None:
        """Put one line into the log and the registration."""
        print(f"{time.strftime('%H:%M:%S')} {self.name}: {detail}", flush=True)
        self.registrar.update(detail=detail, **changes)

    def _serve(self) -> None:
        started = time.monotonic()
        self.engine.start()
        self.say("starting the vLLM server", status="starting", address=None, version=None)
        self.engine.wait_until_healthy(self.config.inference.start_deadline_s)
        self.engine.warm_up()
        self.say(f"the vLLM server is up after {time.monotonic() - started:.1f} s; waiting for weights")
        if self.serving is not None:  # a restart: the version that it served is still on the local disk
            self._load(self.serving)
        away = False
        self._progress = Progress()
        while True:
            self.engine.check()
            self._check_progress()
            try:
                version = self._newest()
                away = False
                if version is not None:
                    self._take(version)
            except OSError as error:  # TimeoutError too; the engine serves on meanwhile
                if not away:
                    self.say(f"the store is away: {error}".splitlines()[0])
                away = True
            time.sleep(AWAY_S if away else self.store.poll_s)

    def _check_progress(self) -> None:
        """Raises EngineDied if the server hangs; soon enough that its requests can wait for the next one."""
        longest_s = self.config.inference.request_deadline_s / 2
        if self._progress.still_s() > longest_s:
            self._measure()  # a store that is away holds up the heartbeats, which measure
        if (still_s := self._progress.still_s()) > longest_s:
            raise EngineDied(
                f"the vLLM server has made no token for {still_s:.0f} s, half of inference.request_deadline_s;"
                f" it is taken to hang (see {self._log})"
            )

    def _newest(self) -> int | None:
        """The newest complete version in the store, if it is newer than the one served and not refused.

        With a pinned version, that one and no other.
        """
        have = None if self.serving is None else self.serving.version
        if self.pin is not None:
            complete = have != self.pin and self.store.manifest(layout.weights(self.pin)) is not None
            return self.pin if complete else None
        for version in reversed(self.store.numbers("weights")):
            if have is not None and version <= have:
                return None
            if version != self.refused and self.store.manifest(layout.weights(version)) is not None:
                return version
        return None

    def _take(self, version: int) -> None:
        """Prefetch, load and check a version; a version that fails twice is refused.

        One that was overtaken while it was fetched is not loaded, but never two in a row: a trainer that
        publishes faster than the fetch must not keep the engine on an old version.
        """
        local = self._prefetch(version)
        if local is None:
            return
        self._skipped = not self._skipped and self._newest() != version
        if self._skipped:
            return
        try:
            self._load(local)
        except Refused as first:
            self.say(f"{first}; fetching it again")
            shutil.rmtree(local.folder, ignore_errors=True)
            local = self._prefetch(version)
            try:
                if local is not None:
                    self._load(local)
            except Refused as second:
                self.refused = version
                self.say(str(second), status="failed")

    def _prefetch(self, version: int) -> LocalVersion | None:
        """Copy a version to the local disk, as often as it takes; None if it is gone or overtaken."""
        folder = self.folder / "weights" / str(version)
        pause, started = RETRY_FIRST_S, time.monotonic()
        while True:
            self.engine.check()
            try:
                manifest = self.store.fetch(layout.weights(version), folder, read_only=True)
                took = time.monotonic() - started
                return LocalVersion(version, folder, manifest.get("probe"), took, manifest["written_at"])
            except FileNotFoundError:
                return None
            except (CorruptObject, OSError) as error:
                self.say(f"version {version} cannot be fetched, trying again in {pause:.1f} s: {error}")
            time.sleep(pause)
            pause = min(2 * pause, RETRY_LONGEST_S)
            if self._newest() != version:
                return None

    def _load(self, local: LocalVersion) -> None:
        """Load a local version and check its parity. Raises Refused with the version before it loaded again."""
        started_at = time.time()
        times = self.engine.load(local.folder, local.version)
        loaded_at = time.time()
        self._progress = Progress()  # a long load is no hang
        difference = parity(self.engine, local.probe) if local.probe else None
        load: dict[str, Any] = {
            "version": local.version,
            "parity": difference,
            "prefetch_s": local.prefetch_s,
            "pause_s": times.pause_s,
            "load_s": times.load_s,
            "requests_in_flight": times.requests_in_flight,
            "tokens_in_flight": times.tokens_in_flight,
            "parity_s": time.time() - loaded_at,
            "started_at": started_at,
            "at": time.time(),
        }
        if local is not self.serving:  # not after a restart
            load["serving_s"] = load["at"] - local.written_at
        self.loads = [*self.loads, load][-LOADS_KEPT:]
        tolerance = self.config.inference.parity_tolerance
        if difference is not None and not difference <= tolerance:
            if self.serving is not None:
                self.engine.load(self.serving.folder, self.serving.version)
            self.registrar.update(facts={"loads": self.loads})
            raise Refused(
                f"version {local.version} is refused: its log-probs differ from the trainer's by"
                f" {difference:.2e}, more than inference.parity_tolerance = {tolerance:.0e}"
            )
        self.serving = local
        shown = "not checked, the manifest has no probe" if difference is None else f"{difference:.2e}"
        self.say(
            f"serving version {local.version}; parity {shown}; prefetch {local.prefetch_s:.2f} s,"
            f" pause {times.pause_s:.2f} s",
            status="ready",
            address=self.engine.address,
            version=local.version,
            facts={"loads": self.loads},
        )
        self._tidy()

    def _measure(self) -> dict[str, Any]:
        """How busy the engine is, for every registration; the last count stands while it does not answer."""
        try:
            counted = self.engine.busy()
            self._busy = self._busy_count.add(counted)
            self._progress.note(counted)
        except EngineDied:
            pass
        return {"busy": self._busy} if self._busy else {}

    def _tidy(self) -> None:
        """Keep the two newest loaded versions on the local disk."""
        loaded = list(dict.fromkeys(load["version"] for load in reversed(self.loads)))
        for folder in (self.folder / "weights").iterdir():
            if int(folder.name) not in loaded[:2]:
                shutil.rmtree(folder, ignore_errors=True)

    def _give_up(self, reason: str) -> NoReturn:
        """Say why, and end for good: a restart of the agent would not help."""
        self.say(reason, status="failed")
        raise SystemExit(GAVE_UP)


def main() -> None:
    """Command line of the service."""
    parser = store_parser("tasks.inference.agent", __doc__)
    parser.add_argument("--name", required=True, help="engine-<number>")
    parser.add_argument("--pin-version", type=int, help="serve this version; default: the newest, always")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    end_with_parent()
    store = Store(options.store, options.endpoint_url)
    agent = Agent(store, options.name, run_key(store), options.pin_version)
    try:
        agent.run()
    except SystemExit as end:
        gave_up = end.code == GAVE_UP
        agent.registrar.close(
            "failed" if gave_up else "stopped", agent.registrar.registration.detail if gave_up else ""
        )
        raise
    except UserError as error:  # a restart would not help
        agent.registrar.close("failed", str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(GAVE_UP) from None
    except Exception as error:
        agent.registrar.close("failed", str(error))
        raise


def _end(*_: object) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # a second signal must not cut the clean-up short
    sys.exit(0)


if __name__ == "__main__":
    main()
