"""`rollart bench async`: four schedules of the same work, on the same services, in turns.

All schedules share one policy that does not change, the same environment seeds, one engine, one trainer and one
environments cluster; what differs is `[rollout]` alone. They take turns repeat by repeat, so that the machine's
drift hits all alike. A turn is some iterations; its first ones fill the pipeline and are not measured, and the
rollout lane goes on past the last one, so that no schedule is measured while it runs empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from prefect import flow

from flows.context import RunContext, named
from flows.iteration import publish
from flows.processor_time import family, spent
from flows.provision import provision
from flows.reporting import mean
from flows.schedules import RESULTS, SCHEDULES
from flows.session import in_session
from flows.train import lanes, latest_version, new_ledger
from flows.warm_start import initial_policy
from tasks.store import layout
from tasks.trajectory import Trajectory, decode


@dataclass
class Turn:
    """What one schedule did in its turn. Seconds are of the measured iterations, per iteration."""

    schedule: str
    repeat: int
    first: int
    iterations: int
    start: float
    end: float
    seconds: float
    trajectories_per_s: float
    trained_tokens: float
    success: float
    staleness: float
    wasted_tokens: float
    idle: dict[str, float]  # lane -> share of the time
    work: dict[str, float] = field(default_factory=dict)  # lane -> seconds of pure work per iteration


@flow(name="bench-async", flow_run_name=named("bench-async"), persist_result=False)
async def bench_async(
    run: str, endpoint_url: str | None = None, repeats: int = 5, iterations: int = 4
) -> Any:
    """Measure every schedule `repeats` times over `iterations` iterations each; returns the results."""

    async def work(context: RunContext) -> list[dict[str, Any]]:
        context.progress.phase = "starting services"
        await provision(run)
        await initial_policy(context)
        await publish(run, await asyncio.to_thread(latest_version, context.store))
        turns: list[dict[str, Any]] = []
        context.progress.iterations = repeats * sum(fill(name) + iterations for name in SCHEDULES)
        for repeat in range(repeats):
            for schedule in in_turn(list(SCHEDULES), repeat):
                context.progress.phase = f"repeat {repeat + 1} of {repeats}: {schedule}"
                turn = await take_turn(context, schedule, repeat, iterations)
                turns.append(asdict(turn))
                context.progress.say(f"{schedule}: {turn.seconds:.2f} s an iteration")
                await asyncio.to_thread(context.store.write_json, RESULTS, {"turns": turns})
        return turns

    return await in_session(run, endpoint_url, work, training=False)


def in_turn(schedules: list[str], repeat: int) -> list[str]:
    """The order of a repeat: each schedule comes first, second, ... equally often, forwards and backwards."""
    start = repeat % len(schedules)
    rotated = schedules[start:] + schedules[:start]
    return rotated[::-1] if repeat // len(schedules) % 2 else rotated


def fill(schedule: str) -> int:
    """Iterations at the beginning of a turn that are not measured, since the pipeline is not full before them: the
    first batches get the short episodes, and wait for the long ones only `max_staleness` iterations later.
    """
    return int(SCHEDULES[schedule]["max_staleness"]) + 2


async def take_turn(context: RunContext, schedule: str, repeat: int, iterations: int) -> Turn:
    """Run `fill(schedule) + iterations` iterations under a schedule, and measure the last `iterations`."""
    settings = context.config.rollout.model_copy(update={"barrier": "none", **SCHEDULES[schedule]})
    context.config = context.config.model_copy(update={"rollout": settings})
    first = await asyncio.to_thread(latest_version, context.store)
    measured = first + fill(schedule)
    last = measured + iterations
    context.first_wave = first
    context.ledger = new_ledger(settings, set())  # waves that the turn before ran ahead with are made anew
    context.finished, context.spans, context.wasted_tokens = {}, [], 0
    cpu = _Cpu(context)
    watch = asyncio.create_task(_mark(context, measured, cpu))
    try:
        await lanes(context, range(first, last), range(first, last + settings.max_staleness + 1))
    finally:
        watch.cancel()
    cpu.stop()
    return await asyncio.to_thread(_measure, context, schedule, repeat, measured, last, cpu)


async def _mark(context: RunContext, k: int, cpu: _Cpu) -> None:
    """Start counting processor time when iteration `k` begins."""
    while len(context.progress.history) == 0 or context.progress.history[-1]["k"] < k - 1:
        await asyncio.sleep(0.05)
    cpu.start()


class _Cpu:
    """Processor time since `start`: of the busiest engine process, which is its core, and of all processes."""

    def __init__(self, context: RunContext):
        services = context.supervisor.services
        self._engines = [
            s.process.pid for n, s in services.items() if n.startswith("engine") and s.process is not None
        ]
        self.seconds: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def start(self) -> None:
        self._before = self._now()

    def stop(self) -> None:
        now = self._now()
        self.seconds = {name: now[name] - self._before.get(name, now[name]) for name in now}

    def _now(self) -> dict[str, float]:
        return {
            "all": sum(map(spent, family(psutil.Process().pid))),
            "engine": max((spent(p) for pid in self._engines for p in family(pid)), default=0.0),
        }


def _measure(context: RunContext, schedule: str, repeat: int, first: int, last: int, cpu: _Cpu) -> Turn:
    """The figures of iterations `first` to `last - 1`: from the record before them to the last one's."""
    store = context.store
    records = [store.read_json(layout.iteration(k)) for k in range(first - 1, last)]
    start, end, count = records[0]["at"], records[-1]["at"], last - first
    trajectories = _trajectories(context, range(first, last))
    metrics = [record["metrics"] for record in records[1:]]
    seconds = (end - start) / count
    slots = context.slots.total
    env_s = sum(t.env_s for t in trajectories)
    return Turn(
        schedule=schedule,
        repeat=repeat,
        first=first,
        iterations=count,
        start=start,
        end=end,
        seconds=seconds,
        trajectories_per_s=len(trajectories) / (end - start),
        trained_tokens=mean([m["train/tokens"] for m in metrics]),
        success=mean([t.success for t in trajectories]),
        staleness=mean([m["staleness/mean"] for m in metrics]),
        wasted_tokens=context.wasted_tokens / count,
        idle={
            "environments": mean([m["idle/environments"] for m in metrics]),
            "engine": mean([m["idle/engine"] for m in metrics if "idle/engine" in m]),
            "trainer": mean([m["idle/trainer"] for m in metrics]),
        },
        work={
            "environments": env_s / slots / count,
            "engine": cpu.seconds["engine"] / count,
            "trainer": mean([m["time/train"] + m.get("time/publish", 0.0) for m in metrics]),
            "all cores": cpu.seconds["all"] / (psutil.cpu_count() or 1) / count,
        },
    )


def _trajectories(context: RunContext, batches: Sequence[int]) -> list[Trajectory]:
    return [t for k in batches for t in decode(context.store.get(layout.batch(k), "batch.parquet"))[0]]
