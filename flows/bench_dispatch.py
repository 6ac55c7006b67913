"""`rollart bench dispatch`: what it costs to hand an episode to Dask and to take its result back.

Counted is the processor time of the two processes that schedule: the controller, which is this one, and the
environments service, which holds the Dask scheduler. Workers and engine do the episodes' own work.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

import psutil
from prefect import flow

from flows.context import RunContext, named
from flows.iteration import publish
from flows.processor_time import spent
from flows.provision import provision
from flows.rollout import episode_pool
from flows.schedules import DISPATCH_RESULTS
from flows.session import in_session
from tasks.rollout.waves import EVALUATION_WAVE
from tasks.services import registered
from tasks.trajectory import EpisodeFailure, EpisodeSpec


@flow(name="bench-dispatch", flow_run_name=named("bench-dispatch"), persist_result=False)
async def bench_dispatch(
    run: str, endpoint_url: str | None = None, counts: Sequence[int] = (200, 2000), repeats: int = 3
) -> Any:
    """Run `counts` episodes at once, each number `repeats` times in turns; the medians go to the store."""

    async def work(context: RunContext) -> list[dict[str, Any]]:
        context.progress.phase = "starting services"
        await provision(run)
        await publish(run, 0)
        await burst(context, counts[0])  # imports, connections, and the engine's first batches
        found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        for _ in range(repeats):
            for count in counts:
                context.progress.phase = f"{count} episodes at once"
                found[count].append(await burst(context, count))
        result = [{"episodes": count, **_medians(bursts)} for count, bursts in found.items()]
        await asyncio.to_thread(context.store.write_json, DISPATCH_RESULTS, {"bursts": result})
        return result

    return await in_session(run, endpoint_url, work, training=False)


async def burst(context: RunContext, count: int) -> dict[str, float]:
    """Run `count` episodes at once: seconds, and milliseconds of processor time an episode in each process."""
    task = context.config.tasks[0].name
    specs = [EpisodeSpec(task, number, EVALUATION_WAVE, number, 0) for number in range(count)]
    service = await asyncio.to_thread(registered, context.store, "environments")
    assert service is not None
    processes = {"controller_ms": psutil.Process(), "scheduler_ms": psutil.Process(service.pid)}
    before, started = {name: spent(process) for name, process in processes.items()}, time.monotonic()
    pool = episode_pool(context, "train", 1.0)
    pool.submit(specs)
    results = [result async for result in pool]
    if failed := [result for result in results if isinstance(result, EpisodeFailure)]:
        context.progress.say(f"{len(failed)} of {count} episodes failed; the last: {failed[-1].reason}")
    spent = {name: 1000 * (spent(process) - before[name]) / count for name, process in processes.items()}
    return {**spent, "seconds": time.monotonic() - started, "failed": float(len(failed))}


def _medians(bursts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(burst[name] for burst in bursts) for name in bursts[0]}
