"""One iteration of the training lane: collect a batch, train on it, publish the new version, evaluate, record."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows import reporting
from flows.context import RunContext, live, on_pool
from flows.evaluate import evaluate
from flows.provision import raise_if_given_up
from tasks.errors import DeadlineExceeded
from tasks.rollout.ledger import GroupKey
from tasks.services import registered
from tasks.store import layout
from tasks.trajectory import Group, Trajectory, decode, encode, group_id


@flow(flow_run_name="iteration-{k:04d}", persist_result=False)
async def iteration(run: str, k: int) -> None:
    """Consume batch `k` and turn version `k` into version `k + 1`."""
    context = live(run)
    context.progress.iteration = k
    with on_pool("control", context.config):
        trajectories = await collect(run, k)
    with on_pool("train", context.config):
        await train_step(run, k)
    with on_pool("publish", context.config):
        await publish(run, k + 1)
    if (k + 1) % context.config.evaluation.every == 0 or k + 1 == context.config.iterations:
        context.progress.enter("evaluate")
        await evaluate(run, k + 1)
    await reporting.record_iteration(context, k, trajectories)


@task(task_run_name="collect-{k:04d}", cache_policy=NO_CACHE, persist_result=False)
async def collect(run: str, k: int) -> list[Trajectory]:
    """Close batch `k` as soon as enough fresh groups are finished, and write it with its manifest.

    A batch that is already written is read back: its groups are never consumed a second time.
    """
    context = live(run)
    context.progress.enter("collect")
    store, groups = context.store, context.groups
    if await asyncio.to_thread(store.manifest, layout.batch(k)) is not None:
        return decode(await asyncio.to_thread(store.get, layout.batch(k), "batch.parquet"))[0]
    started = time.time()
    await context.wait_until(
        lambda: groups.batch(k) is not None,
        context.config.rollout.wave_deadline_s,
        f"{groups.groups} fresh groups for batch {k}",
        f"{run}/groups and the episodes' failures in flow run rollout-{k:04d}",
    )
    keys = groups.batch(k)
    assert keys is not None
    with context.span("collect", f"batch {k}"):
        trajectories = await _write_batch(context, k, keys)
    await _close(context, k, keys)
    get_run_logger().info("batch %d: %d groups, waited %.1f s", k, len(keys), time.time() - started)
    return trajectories


async def _write_batch(context: RunContext, k: int, keys: list[GroupKey]) -> list[Trajectory]:
    members = [await _group(context, key) for key in keys]
    trajectories = [trajectory for group in members for trajectory in group.trajectories]
    data = encode(trajectories, [failure for group in members for failure in group.failures])
    await asyncio.to_thread(
        context.store.put,
        layout.batch(k),
        {"batch.parquet": data},
        k=k,
        objective="policy_gradient",
        groups=[group_id(*key) for key in keys],
        max_staleness=context.config.rollout.max_staleness,
    )
    return trajectories


async def _group(context: RunContext, key: GroupKey) -> Group:
    if key in context.finished:
        return context.finished[key]
    return Group(*key, *decode(await asyncio.to_thread(context.store.read, layout.group(*key))))


async def _close(context: RunContext, k: int, keys: list[GroupKey]) -> None:
    """The manifest of batch `k` is written: settle the ledger, cancel what batch `k + 1` cannot use."""
    context.groups.consume(keys)
    stale = context.groups.expire(k + 1)
    for wave, cancel in list(context.cancel_groups.items()):
        if keys_of_wave := [key for key in stale if key[0] == wave]:
            await cancel(keys_of_wave)
    kept = context.groups.finished_keys()
    for key in context.finished.keys() - kept - set(keys):
        context.waste(context.finished[key].trajectories)
    context.finished = {key: group for key, group in context.finished.items() if key in kept}
    await context.notify()


@task(task_run_name="train-{k:04d}", cache_policy=NO_CACHE, persist_result=False)
async def train_step(run: str, k: int) -> dict[str, Any]:
    """Wait for the trainer to answer batch `k` with version `k + 1`; returns its metrics.

    Raises RunFailed with the trainer's own reason, or DeadlineExceeded.
    """
    context = live(run)
    context.progress.enter("train")
    store = context.store
    deadline = time.monotonic() + context.config.trainer.step_deadline_s
    while await asyncio.to_thread(store.manifest, layout.weights(k + 1)) is None:
        raise_if_given_up(context)
        if time.monotonic() > deadline:
            trainer = await asyncio.to_thread(registered, store, "trainer")
            doing = trainer.detail if trainer else "never registered"
            waited_for = f"version {k + 1} from the trainer ({doing})"
            look_at = trainer.log if trainer else f"{run}/services"
            raise DeadlineExceeded(waited_for, context.config.trainer.step_deadline_s, look_at)
        await asyncio.sleep(store.poll_s)
    context.progress.version = k + 1
    return await asyncio.to_thread(store.read_json, layout.trainer_metrics(k))


@task(task_run_name="publish-v{version}", cache_policy=NO_CACHE, persist_result=False)
async def publish(run: str, version: int) -> None:
    """Wait until every engine has pulled `version` and its weight parity held."""
    context = live(run)
    context.progress.enter("publish")
    await context.wait_until(
        lambda: context.served is not None and context.served >= version,
        2 * context.config.inference.start_deadline_s,  # an engine that dies while it starts is started again
        f"every engine to serve version {version} (now: {context.served})",
        f"{run}/services/engine-0.json",
    )
