"""One flow run may be started several times: a retry, a resume after a pause, capacity that comes back.

Each start is an attempt of the same flow run. Prefect would take the subflows of an earlier attempt for those of this
one (its first iteration for the first iteration now), so every attempt counts its subflows anew; what is
done already, the store says.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import Pause
from prefect.states import AwaitingRetry
from prefect.utilities import engine

from flows.deploy_plan import RESTS

WATCH_S = 2.0
# A worker takes a flow run up 10 s ahead of its time, and one whose process is still ending is not started right.
REST_S = 25.0
_STRIDE = 1_000_000  # more subflows than an attempt has

Ending = Literal["finished", "stopped", "paused", "failed"]


class _Keys(dict[str, int]):
    """Prefect's counters of subflows and tasks, counting from `start`."""

    def __init__(self, start: int):
        super().__init__()
        self.start = start

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value if key in self else self.start + value)


def renew() -> None:
    """Give the subflows and tasks of this attempt identities of their own."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None and context.flow_run.run_count > 1:
        context.__dict__["task_run_dynamic_keys"] = _Keys(context.flow_run.run_count * _STRIDE)


def ended_by_signal() -> None:
    """Have a terminate signal cancel the calling task, once, so that it ends in order, where a worker started it."""
    task = asyncio.current_task()
    if task is not None and _deployed():
        on_terminate(task.cancel)


def on_terminate(act: Callable[[], Any]) -> None:
    """Call `act` in this event loop at the first terminate signal, instead of Prefect's own answer.

    That raises an exception wherever the main thread is, also inside the event loop, and every subflow puts it in
    place again unless it is there already: so this takes its place in Prefect as well.
    """
    loop = asyncio.get_running_loop()
    told: list[bool] = []

    def handle(*_: object) -> None:
        if not told and not loop.is_closed():
            told.append(True)
            loop.call_soon_threadsafe(act)

    engine._prefect_sigterm_handler = handle  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, handle)


async def watch_pause() -> None:
    """Raise Pause once a person has paused this flow run; until cancelled. Nobody can pause one without a deployment."""
    if not _deployed():
        return
    async with get_client() as client:  # one for all looks: each costs 30 ms of this event loop
        while True:
            await asyncio.sleep(WATCH_S)
            state = await _own_state(client)
            if state is not None and state.type == StateType.PAUSED:
                raise Pause(state=state)


async def why_stopped() -> tuple[Ending, str]:
    """Whether a person stopped the flow run, or its machine is taken away: then it goes on elsewhere."""
    if not _deployed():
        return "stopped", "stopped on request"
    async with get_client() as client:
        state = await _own_state(client)
    if state is None or state.type in (StateType.CANCELLING, StateType.CANCELLED):
        return "stopped", "cancelled"
    return "paused", "its process was told to end: it goes on when there is a worker for it"


def rest() -> None:
    """Say that this attempt ends and the flow run goes on later, so that its silence is not taken for a death."""
    run = _flow_run()
    related = [
        {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in run.tags
    ]
    emit_event(RESTS, {"prefect.resource.id": f"prefect.flow-run.{run.id}"}, related=related)


async def reschedule(reason: str) -> Pause:
    """Have a worker take this flow run up again, after REST_S; returns what ends this attempt."""
    at = datetime.now(UTC) + timedelta(seconds=REST_S)
    state: State[Any] = AwaitingRetry(scheduled_time=at, message=reason)
    async with get_client() as client:
        await client.set_flow_run_state(_flow_run().id, state, force=True)
    return Pause(reason, state=state)


async def label(*tags: str) -> None:
    """Give this flow run more tags, so that it is found by them; a server that is away is not waited for."""
    with contextlib.suppress(Exception):
        async with get_client() as client, asyncio.timeout(5):
            run = _flow_run()
            await client.update_flow_run(run.id, tags=sorted({*run.tags, *tags}))


async def _own_state(client: PrefectClient) -> State[Any] | None:
    """The state of this flow run on the server; None while that is away."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(5):
            return (await client.read_flow_run(_flow_run().id)).state
    return None


def _flow_run() -> Any:
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    return context.flow_run


def _deployed() -> bool:
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
