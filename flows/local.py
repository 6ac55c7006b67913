"""Run a flow in this process on one machine: a Prefect server if none is configured, a clean end on request."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from flows.progress import Progress
from flows.server import CLIENT, ask_again_soon, configured_api, start_server
from tasks.errors import RunFailed, UserError
from tasks.services import Supervisor, end_leftovers, work_folder
from tasks.store import Store

# The terminal belongs to the view; everything is in the Prefect UI and in the services' logs.
_PREFECT = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",  # it complains of what a stop request cancels
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    **CLIENT,
}


def run_flow(
    kind: str,
    run: str,
    endpoint_url: str | None,
    progress: Progress,
    stop: threading.Event | None = None,
    **parameters: Any,
) -> Any:
    """Run flow `kind` (train, warm-start, evaluate, bench-async or bench-dispatch) on the run at URI `run`; blocks until it ends.

    `stop` ends it in order: services are ended and the run can be resumed. Raises RunFailed with the reason,
    and UserError if the run is going on in another process on this machine.
    """
    for name, value in _PREFECT.items():
        os.environ.setdefault(name, value)
    folder = work_folder(Store(run, endpoint_url))
    _end_leftovers(folder, progress)
    server = Supervisor(folder / "server", _tell_death(progress))
    _end_leftovers(folder / "server", progress)
    try:
        if configured_api() is None:
            progress.phase = "starting a Prefect server"
            progress.prefect_url = start_server(server, _flows).removesuffix("/api")
        ask_again_soon()
        return _run_until_stopped(kind, run, endpoint_url, progress, stop or threading.Event(), parameters)
    finally:
        _send_logs()
        server.stop()


def _tell_death(progress: Progress) -> Callable[[str, int, str, bool], None]:
    def tell(name: str, code: int, _log_tail: str, gave_up: bool) -> None:
        progress.say(f"{name} ended with code {code} and {'gave up' if gave_up else 'is restarted'}")

    return tell


def _send_logs() -> None:
    """Hand Prefect what is queued while its server is there: later it would be an error on the terminal."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=2.0)


def _end_leftovers(folder: Any, progress: Progress) -> None:
    try:
        if count := end_leftovers(folder):
            progress.say(f"ended {count} processes that a killed run had left behind")
    except RuntimeError as owner:
        raise UserError("RUN", f"is going on in process {owner}", "wait for it, or stop it first") from None


def _flows() -> dict[str, Any]:
    """The flows by their kind. They import Prefect, which takes seconds and fixes its settings."""
    from flows.bench_async import bench_async
    from flows.bench_dispatch import bench_dispatch
    from flows.single import evaluate_run, warm_start_run
    from flows.train import train

    return {
        "train": train,
        "warm-start": warm_start_run,
        "evaluate": evaluate_run,
        "bench-async": bench_async,
        "bench-dispatch": bench_dispatch,
    }


def _run_until_stopped(
    kind: str,
    run: str,
    endpoint_url: str | None,
    progress: Progress,
    stop: threading.Event,
    parameters: dict[str, Any],
) -> Any:
    from flows.session import watch_progress

    flows = _flows()
    watch_progress(run, progress)

    async def until_stopped() -> Any:
        work = asyncio.ensure_future(flows[kind](run=run, endpoint_url=endpoint_url, **parameters))
        waiter = asyncio.ensure_future(asyncio.to_thread(stop.wait))
        await asyncio.wait({work, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        stop.set()  # frees the waiter's thread
        return await work

    try:
        return asyncio.run(until_stopped())
    except (RunFailed, UserError):
        raise
    except asyncio.CancelledError:
        return None
    except Exception as error:
        if type(error).__name__ == "CancelledRun":
            return None
        raise RunFailed(
            f"{type(error).__name__}: {error}", look_at=str(work_folder(Store(run, endpoint_url)) / "logs")
        ) from error
