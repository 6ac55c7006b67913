"""A later attempt of a flow run never takes an earlier attempt's subflows for its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prefect._internal.engine import dynamic_key_for_task_run

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
