"""A Prefect server for a run on one machine, when none is configured: on loopback, ended with the run.

It uses the ordinary Prefect database, so `prefect server start` shows its runs later.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tasks.errors import DeadlineExceeded, UserError
from tasks.services import Supervisor, end_with_parent, free_port

CLIENT = {"PREFECT_CLIENT_MAX_RETRIES": "50"}  # a server may be away for about 4 minutes, see ask_again_soon
START_DEADLINE_S = 300.0  # 6 s on a quiet machine
WATCH_S, WATCH_DEADLINE_S = 2.0, 5.0
LONGEST_PAUSE_S = 5.0

# One run needs neither schedules nor late-run marking from its own server.
_QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
}


def configured_api() -> str | None:
    """The Prefect API that the environment or the active profile names, if any.

    Reads the profile's file itself: Prefect fixes its settings when it is imported, and the server that is
    started when there is no other must be known by then.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    try:
        profiles = tomllib.loads(
            Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).read_text()
        )
    except OSError:
        return None
    active = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
    return profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")


def answering_api() -> str:
    """The configured Prefect API, which answers. Raises UserError without one, or if it does not answer in seconds."""
    url = configured_api()
    if not url:
        raise UserError(
            "PREFECT_API_URL",
            "no Prefect server is configured, and this command needs one that stays",
            "start one (prefect server start), then: prefect config set PREFECT_API_URL=http://HOST:4200/api",
        )
    if problem := _problem(url):
        raise UserError(
            "PREFECT_API_URL",
            f"nothing answers at {url} ({problem})",
            "start it (prefect server start), or correct the address",
        )
    return url


def start_server(supervisor: Supervisor, meanwhile: Callable[[], object] = lambda: None) -> str:
    """Start a server under `supervisor`; returns its API URL and sets PREFECT_API_URL in this process.

    Calls `meanwhile` while the server starts. Raises DeadlineExceeded if it does not answer in time.
    """
    port = free_port()
    argv = [sys.executable, "-m", "flows.server", str(port)]
    url = f"http://127.0.0.1:{port}/api"
    service = supervisor.add("prefect-server", argv, {**_QUIET, "PREFECT_API_URL": url})
    os.environ["PREFECT_API_URL"] = url
    meanwhile()
    _wait_until_healthy(url, str(service.log))
    return url


def ask_again_soon() -> None:
    """Have Prefect's client ask a server that is away every few seconds.

    It doubles its pauses without an end: after an outage of a minute the run would wait for another one. To be
    called after the settings are known, as it imports Prefect.
    """
    from prefect.client import base

    def pause(average_interval: float, clamping_factor: float = 0.3) -> float:
        return usual(min(average_interval, LONGEST_PAUSE_S), clamping_factor)

    usual = base.clamped_poisson_interval
    if usual.__module__ != __name__:  # once is enough
        base.clamped_poisson_interval = pause  # what _send_with_retry sleeps


async def watch_server(say: Callable[[str], None]) -> None:
    """Say when the configured Prefect server stops to answer and when it answers again, until cancelled."""
    url, away_since = configured_api(), 0.0
    while url is not None:
        asked = time.time()
        problem = await asyncio.to_thread(_problem, url)
        if problem and not away_since:
            away_since = asked
            say(f"the Prefect server at {url} does not answer ({problem}); the run goes on when it is back")
        elif away_since and not problem:
            say(f"the Prefect server at {url} answers again, after {time.time() - away_since:.0f} s")
            away_since = 0.0
        await asyncio.sleep(WATCH_S)


def _problem(url: str) -> str:
    """Why the server does not answer; empty if it does."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=WATCH_DEADLINE_S).close()
    except urllib.error.HTTPError as error:
        return f"status {error.code}" if error.code >= 500 else ""
    except (urllib.error.URLError, OSError, HTTPException) as error:
        return str(getattr(error, "reason", "") or error)
    return ""


def _wait_until_healthy(url: str, log: str) -> None:
    started = time.monotonic()
    while time.monotonic() - started < START_DEADLINE_S:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise DeadlineExceeded("the Prefect server's /health", START_DEADLINE_S, log)


def serve(port: int) -> None:
    """Run the server in this process: what `prefect server start` runs, ended with its parent."""
    end_with_parent()
    import uvicorn

    _take_write_locks_at_once()
    uvicorn.run(
        "prefect.server.api.server:create_app", factory=True, host="127.0.0.1", port=port, log_level="error"
    )


def _take_write_locks_at_once() -> None:
    """Have the server's SQLite transactions begin IMMEDIATE, so that they wait for each other.

    Prefect begins most of them DEFERRED; one that reads and then writes is refused as soon as another has
    written in between, and the client answers that 503 with a pause of 2 s: several seconds an iteration.
    """
    from prefect.server.database import configurations

    def begin(self: object, connection: Any) -> None:
        if configurations.SQLITE_BEGIN_MODE.get() is not None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    configurations.AioSqliteConfiguration.begin_sqlite_stmt = begin  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
