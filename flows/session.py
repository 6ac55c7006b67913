"""The frame around everything that needs services: open the run's context, do the work, end what was started.

Whatever happens inside (an error, a stop request, a service that gives up), services end and the run's status
says how it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

from prefect import get_client, tags
from prefect.client.schemas import filters
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Pause, TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed
from prefect.utilities.urls import url_for

from flows import attempts, reporting
from flows.attempts import Ending
from flows.context import RunContext, open_context
from flows.progress import Progress
from flows.provision import on_death, tell_problems, watch_pools, watch_services
from flows.server import ask_again_soon, watch_server
from tasks.services import Supervisor, work_folder
from tasks.store import Store

_MLFLOW_STATUS: dict[Ending, Literal["FINISHED", "KILLED", "FAILED"]] = {
    "finished": "FINISHED",
    "stopped": "KILLED",
    "paused": "KILLED",
    "failed": "FAILED",
}
_WHY: dict[Ending, str] = {  # the flows inside have ended
    "stopped": "Stopped on request.",
    "paused": "Paused on request.",
    "failed": "Ended because the run failed, whose own page says why.",
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
    problems: list[str] = []  # to be logged by the flow
    supervisor = Supervisor(work_folder(store), on_death(problems, progress.say))
    attempts.renew()
    ask_again_soon()
    async with open_context(store, progress, supervisor) as context:
        context.problems = problems
        if context.pools is not None:
            await asyncio.to_thread(context.pools.open, training)
        await attempts.label(*context.tags)
        attempts.ended_by_signal()
        with tags(*context.tags), _heard(context):
            return await _guarded(context, work, training)


async def _guarded(context: RunContext, work: Work, training: bool) -> Any:
    status: Ending = "failed"
    reason = ""
    try:
        if training:
            await _end_dead_start(context)
            await reporting.start_reporting(context)
        result = await _beside_watch(context, work)
        status = "finished"
        return result
    except (asyncio.CancelledError, TerminationSignal):  # the latter from a subflow that was cancelled
        if (this := asyncio.current_task()) is not None:
            this.uncancel()
        status, reason = await attempts.why_stopped()
    except Pause:
        status, reason = "paused", "paused"
        raise
    except Exception as error:
        reason = str(error)
        raise
    finally:
        await asyncio.shield(_close(context, status, reason, training))
        if status == "paused":
            attempts.rest()
    if status == "paused":
        raise await attempts.reschedule(reason)
    return Cancelled(message=f"Stopped on request. Continue with: rollart resume {context.name}")


async def _close(context: RunContext, status: Ending, reason: str, training: bool) -> None:
    if context.dask is not None:
        await context.dask.close(timeout=2)
    stopping = context.pools.stop(status) if context.pools else asyncio.to_thread(context.supervisor.stop)
    await asyncio.gather(stopping, *([_end_others(context, _WHY[status])] if status in _WHY else []))
    if not training:
        return
    if status == "failed":
        await reporting.explain_failure(context, reason)
    if status == "finished":
        context.progress.phase = "writing plots and the model to MLflow"
        await reporting.report_run(context)
    patience = context.config.tracking.flush_deadline_s if status == "finished" else 2.0
    await asyncio.to_thread(context.tracker.close, patience, _MLFLOW_STATUS[status])
    await asyncio.to_thread(reporting.set_status, context, status, reason)


async def _end_others(context: RunContext, why: str) -> None:
    """The flows inside, which Prefect takes for crashed when they end with this one, are cancelled: of a run that
    failed only the cause is to be seen as one.
    """
    own = filters.FlowRunFilterStartTime(after_=flow_run.scheduled_start_time)
    with contextlib.suppress(Exception):  # a server that is away is not waited for
        async with asyncio.timeout(reporting.PREFECT_DEADLINE_S):
            tagged = _tagged(context, StateType.CRASHED)
            tagged.start_time = own
            # those with a deployment have a process of their own, and say themselves how they ended
            tagged.deployment_id = filters.FlowRunFilterDeploymentId(is_null_=True)
            await _set_states(context, tagged, Cancelled(message=why))


async def _end_dead_start(context: RunContext) -> None:
    """The flow runs that a killed start of this run left as running have crashed."""
    crashed: State = Crashed(message="Its process ended without a word; the run was started again.")
    unended = (StateType.RUNNING, StateType.PENDING)
    parents = filters.FlowRunFilter(
        name=filters.FlowRunFilterName(any_=[f"train-{context.name}"]), state=_in_states(*unended)
    )
    with contextlib.suppress(Exception):
        async with asyncio.timeout(reporting.PREFECT_DEADLINE_S):
            await _set_states(context, _tagged(context, *unended), crashed)
            await _set_states(context, parents, crashed)


def _tagged(context: RunContext, *states: StateType) -> filters.FlowRunFilter:
    tag = filters.FlowRunFilterTags(all_=[f"run:{context.name}"])
    return filters.FlowRunFilter(tags=tag, state=_in_states(*states))


def _in_states(*states: StateType) -> filters.FlowRunFilterState:
    return filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=list(states)))


async def _set_states(context: RunContext, which: filters.FlowRunFilter, state: State) -> None:
    """Set the state of the flow runs that `which` finds, except this one and services, which may be alive.

    A run of the same name in another store is left alone.
    """
    async with get_client() as client:
        for found in await client.read_flow_runs(flow_run_filter=which):
            hosts_service = any(tag.startswith("service:") for tag in found.tags)
            run = str(found.parameters.get("run", ""))
            elsewhere = (run.startswith("/") or "://" in run) and run.rstrip("/") != context.run
            if str(found.id) != flow_run.id and not hosts_service and not elsewhere:
                await client.set_flow_run_state(found.id, state, force=True)


class _Heard(logging.Handler):
    """Hands on what the store and the tracker have to say, from whichever thread."""

    def __init__(self, say: Callable[[str], None]):
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())


@contextlib.contextmanager
def _heard(context: RunContext) -> Iterator[None]:
    """Warnings of the loggers below `rollart` go to the terminal and to the flow run's log."""
    logger, handler = logging.getLogger("rollart"), _Heard(context.say)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


async def _beside_watch(context: RunContext, work: Work) -> Any:
    """Do the work beside the watch over everything it needs; the first error ends both."""
    try:
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(watch_services(context)),
                group.create_task(watch_pools(context)),
                group.create_task(tell_problems(context)),
                group.create_task(watch_server(context.say)),
                group.create_task(attempts.watch_pause()),
            ]
            result = await work(context)
            for watch in watches:
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
