"""The frame around everything that needs services: open the run's context, do the work, end what was started.

Whatever happens inside (an error, a stop request, a service that gives up), services end and the run's status
says how it went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from prefect import tags
from prefect.runtime import flow_run
from prefect.states import Cancelled
from prefect.utilities.urls import url_for

from flows import reporting
from flows.context import RunContext, open_context
from flows.progress import Progress
from flows.provision import on_death, watch_services
from tasks.services import Supervisor, work_folder
from tasks.store import Store

_MLFLOW_STATUS: dict[str, Literal["FINISHED", "KILLED", "FAILED"]] = {
    "finished": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
}

Work = Callable[[RunContext], Awaitable[Any]]

_watched: dict[str, Progress] = {}


def watch_progress(run: str, progress: Progress) -> None:
    """Have the flows of `run` in this process report to `progress`."""
    _watched[run] = progress


async def in_session(run: str, endpoint_url: str | None, work: Work, *, training: bool = True) -> Any:
    """Do `work` with the run's context; returns its result, or a Cancelled state after a stop request.

    `training` says that this is the run itself: its status in the store and in MLflow follow the outcome.
    """
    store = Store(run, endpoint_url)
    progress = _watched.get(run) or Progress(run=run)
    if page := url_for("flow-run", obj_id=flow_run.id):
        progress.prefect_url = page
    problems: list[str] = []
    supervisor = Supervisor(work_folder(store), on_death(problems, progress.say))
    async with open_context(store, progress, supervisor) as context:
        context.problems = problems
        with tags(f"run:{context.name}"):
            return await _guarded(context, work, training)


async def _guarded(context: RunContext, work: Work, training: bool) -> Any:
    status, reason = "failed", ""
    try:
        if training:
            await reporting.start_reporting(context)
        result = await _beside_watch(context, work)
        status = "finished"
        return result
    except asyncio.CancelledError:
        status, reason = "stopped", "stopped on request"
        if (this := asyncio.current_task()) is not None:
            this.uncancel()
        return Cancelled(message=f"Stopped on request. Continue with: rollart resume {context.name}")
    except Exception as error:
        reason = str(error)
        raise
    finally:
        await asyncio.shield(_close(context, status, reason, training))


async def _close(context: RunContext, status: str, reason: str, training: bool) -> None:
    if context.dask is not None:
        await context.dask.close(timeout=2)
    await asyncio.to_thread(context.supervisor.stop)
    if not training:
        return
    if status == "finished":
        context.progress.phase = "writing plots and the model to MLflow"
        await asyncio.to_thread(reporting.report_run, context)
    patience = context.config.tracking.flush_deadline_s if status == "finished" else 2.0
    await asyncio.to_thread(context.tracker.close, patience, _MLFLOW_STATUS[status])
    await asyncio.to_thread(reporting.set_status, context, status, reason)


async def _beside_watch(context: RunContext, work: Work) -> Any:
    """Do the work beside the watch over its services; the first error ends both."""
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(watch_services(context))
            result = await work(context)
            watch.cancel()
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    return result


def _first(errors: BaseExceptionGroup) -> BaseException:  # type: ignore[type-arg]
    """The first error of a group that is not a mere cancellation."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(_first(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((e for e in flat if not isinstance(e, asyncio.CancelledError)), flat[0])
