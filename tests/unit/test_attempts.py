"""A later attempt of a flow run never takes an earlier attempt's subflows for its own."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from prefect._internal.engine import dynamic_key_for_task_run
from prefect.settings import PREFECT_WORKER_PREFETCH_SECONDS

from flows import attempts


def keys(run_count: int, monkeypatch: Any, *tasks: str) -> list[int]:
    """The keys that Prefect gives to subflows of these task keys, called in this order in one attempt."""
    context = SimpleNamespace(
        flow_run=SimpleNamespace(run_count=run_count), detached=False, task_run_dynamic_keys={}
    )
    monkeypatch.setattr(attempts.FlowRunContext, "get", lambda: context)
    attempts.renew()
    return [dynamic_key_for_task_run(context, SimpleNamespace(task_key=task)) for task in tasks]  # type: ignore[arg-type]


def test_the_keys_of_attempts_differ_and_count_on_within_one(monkeypatch: Any) -> None:
    calls = ["iteration", "iteration", "provision", "iteration"]
    first, second, third = (keys(count, monkeypatch, *calls) for count in (1, 2, 3))
    assert first == [0, 1, 0, 2]
    assert [key - second[0] for key in second] == first
    assert not set(first) & set(second) and not set(second) & set(third) and not set(first) & set(third)


def test_a_flow_run_that_rests_is_taken_up_after_its_process_has_ended(monkeypatch: Any) -> None:
    said: list[Any] = []

    class Client:
        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def set_flow_run_state(self, flow_run: str, state: Any, force: bool) -> None:
            said.append((flow_run, state, force))

    monkeypatch.setattr(attempts, "get_client", Client)
    monkeypatch.setattr(attempts, "_flow_run", lambda: SimpleNamespace(id="this one"))
    before = datetime.now(UTC)
    pause = asyncio.run(attempts.reschedule("its machine is taken away"))
    ((flow_run, state, force),) = said
    assert (flow_run, state.name, state.message, force) == (
        "this one",
        "AwaitingRetry",
        "its machine is taken away",
        True,
    )
    assert pause.state is state
    ahead = timedelta(seconds=PREFECT_WORKER_PREFETCH_SECONDS.value())
    assert state.state_details.scheduled_time > before + ahead + timedelta(seconds=10)
