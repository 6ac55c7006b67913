"""The record of a run: everything measured about it, read from the store alone, as one dict that JSON can hold.

Invariants: reads only, so it works while the run goes on and after it is gone; what is not there yet is absent
or empty, never invented; numbers that are not finite become None.
"""

from __future__ import annotations

import math
import statistics
import time
import tomllib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tasks.errors import UserError
from tasks.store import Store, layout

T = TypeVar("T")
R = TypeVar("R")

FACTS, STATUS = "facts.json", "status.json"
ALIVE_S = 30.0  # a run without a heartbeat for this long has been interrupted
STAGE = "time/"  # metrics of seconds per stage start with this


def read_run(store: Store) -> dict[str, Any]:
    """Everything measured about the run rooted at `store`. Raises UserError if there is no run.

    Keys: name, uri, state, reason, started_at, seconds, config (nested), packages, host, progress
    {"done", "of"}, iterations [{"k", "metrics", "spans"}], evaluations [{"version", "tasks"}], before and after
    {task: measures} (versions 0 and the newest evaluated), gain {task: success}, stage_seconds {stage: {"total",
    "median", "longest"}}, services [registration + "heartbeat_age_s"].
    """
    summary, config = _summary(store)
    iterations = [_iteration(k, data) for k, data in _numbered(store, "iterations", layout.iteration)]
    facts = _json(store, FACTS) or {}
    return _finite(
        {
            **summary,
            "packages": facts.get("packages", {}),
            "host": facts.get("host"),
            "config": config,
            "stage_seconds": _stage_seconds(iterations),
            "services": _services(store),
            "iterations": iterations,
        }
    )


def list_runs(store: Store) -> list[dict[str, Any]]:
    """A short record of each run below `store`, the newest first: `read_run` without config and iterations."""
    names = [name for name in store.names("") if not name.endswith(".json")]
    found = _together(lambda name: _summary_or_none(store.below(name)), names)
    return sorted(
        (_finite(run) for run in found if run), key=lambda run: run["started_at"] or 0, reverse=True
    )


def state_of(store: Store, iterations: int) -> tuple[str, str]:
    """prepared, running, stopped, finished, failed or interrupted, and the reason if there is one.

    Finished needs the last version's manifest; running needs a heartbeat (or the status itself) of the last
    ALIVE_S seconds.
    """
    status = _json(store, STATUS) or {}
    said, reason = status.get("status", "running"), status.get("reason", "")
    if said == "finished" and store.manifest(layout.weights(iterations)) is None:
        return "failed", f"it says finished, but version {iterations} is not in the store"
    if said != "running":
        return said, reason
    signs = [status.get("at", 0.0), *(service["heartbeat_at"] for service in _services(store))]
    if time.time() - max(signs) <= ALIVE_S:
        return "running", reason
    if max(signs) == 0:
        return "prepared", "nothing has started it yet"
    return "interrupted", f"no sign of life since {_clock(max(signs))}"


def _summary(store: Store) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        config = tomllib.loads(store.read(layout.CONFIG).decode())
    except FileNotFoundError:
        name = store.uri.rsplit("/", 1)[-1]
        raise UserError(
            "RUN", f"there is no run {name!r} at {store.uri}", "see `rollart runs list`"
        ) from None
    wanted = int(config.get("iterations", 0))
    state, reason = state_of(store, wanted)
    evaluations = [data for _, data in _numbered(store, "evaluations", layout.evaluation)]
    rl = [
        evaluation for evaluation in evaluations if evaluation["version"] >= 0
    ]  # below 0: of the warm start
    before, after = (rl[0]["tasks"], rl[-1]["tasks"]) if rl else ({}, {})
    facts, status = _json(store, FACTS) or {}, _json(store, STATUS) or {}
    started, said_at = facts.get("started_at"), status.get("at")
    ended = time.time() if state == "running" else said_at
    done = [v for v in store.numbers("weights") if v >= 0]
    summary = {
        "name": store.uri.rsplit("/", 1)[-1],
        "uri": store.uri,
        "state": state,
        "reason": reason,
        "started_at": started,
        "seconds": ended - started if started and ended else None,
        "progress": {"done": max(done, default=0), "of": wanted},
        "before": before,
        "after": after,
        "gain": {
            task: measures["success"] - before[task]["success"]
            for task, measures in after.items()
            if task in before and "success" in measures and "success" in before[task]
        },
        "evaluations": evaluations,
    }
    return summary, config


def _summary_or_none(store: Store) -> dict[str, Any] | None:
    try:
        return _summary(store)[0]
    except UserError:
        return None


def _iteration(k: int, data: dict[str, Any]) -> dict[str, Any]:
    return {"k": k, "at": data.get("at"), "metrics": data.get("metrics", {}), "spans": data.get("spans", [])}


def _stage_seconds(iterations: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds of each stage over all iterations: total, median and longest."""
    seconds: dict[str, list[float]] = {}
    for iteration in iterations:
        for name, value in iteration["metrics"].items():
            if name.startswith(STAGE):
                seconds.setdefault(name.removeprefix(STAGE), []).append(value)
    return {
        stage: {"total": sum(values), "median": statistics.median(values), "longest": max(values)}
        for stage, values in seconds.items()
    }


def _services(store: Store) -> list[dict[str, Any]]:
    names = [name.removesuffix(".json") for name in store.names("services") if name.endswith(".json")]
    found = [data for data in _together(lambda name: _json(store, layout.service(name)), names) if data]
    now = time.time()
    return [{**data, "heartbeat_age_s": now - data["heartbeat_at"]} for data in found]


def _numbered(store: Store, folder: str, key: Callable[[int], str]) -> list[tuple[int, dict[str, Any]]]:
    numbers = store.numbers(folder)
    found = _together(lambda number: _json(store, key(number)), numbers)
    return [(number, data) for number, data in zip(numbers, found, strict=True) if data is not None]


def _json(store: Store, key: str) -> dict[str, Any] | None:
    try:
        return store.read_json(key)
    except FileNotFoundError:
        return None


def _together(read: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Reads side by side: an object store answers each in tens of milliseconds."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(read, items))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
