"""The parent flow of a run: services, warm start, and two lanes side by side.

The rollout lane opens waves, at most `max_staleness` ahead; the training lane consumes batches in order.
They meet in the ledger and in the store only. Whatever the store already holds is not done again, so a retry,
a resume and a crashed controller's restart are one and the same: call `train` with the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.context import RunContext
from flows.evaluate import evaluate
from flows.iteration import iteration, publish
from flows.new_run import open_run, stem_of
from flows.pools import on_its_pool
from flows.provision import provision
from flows.rollout import rollout
from flows.session import in_session
from flows.warm_start import initial_policy, needs_warm_start
from tasks.config import RolloutConfig
from tasks.errors import UserError
from tasks.rollout.ledger import GroupKey, Ledger
from tasks.store import Store, layout
from tasks.trajectory import decode


def _run_of(parameters: dict[str, Any], flow_run_id: str) -> str:
    """The run that the parameters mean: without one, its name comes from the flow run, which a retry keeps."""
    return parameters["run"] or f"{stem_of(Path(parameters['config'] or 'run'))}-{flow_run_id[:8]}"


def _flow_run_name() -> str:
    run = _run_of(flow_run.parameters, str(flow_run.id))
    return f"train-{run.rstrip('/').rsplit('/', 1)[-1]}"


@flow(name="train", flow_run_name=_flow_run_name, persist_result=False)
async def train(
    run: str | None = None,
    config: str | None = None,
    settings: list[str] | None = None,
    endpoint_url: str | None = None,
) -> Any:
    """Train a run, from wherever it stands.

    Args:
        run: The URI of a prepared run; or, with `config`, a name: a new run is made, one that exists goes on.
        config: A shipped configuration (frozenlake, two-tasks, smoke) or the path of a TOML file.
        settings: With `config`: settings of a new run as KEY=VALUE. It is placed on the pools unless they say otherwise.
        endpoint_url: With a prepared run: the S3 endpoint of its store.
    """
    if run is None and config is None:
        raise UserError("config", "is missing, and `run` too", "give one, for example config=frozenlake")
    name = _run_of({"run": run, "config": config}, str(flow_run.id))
    store = await asyncio.to_thread(open_run, name, config, settings or [], endpoint_url)
    return await in_session(store.uri, store.endpoint_url, _train)


async def _train(context: RunContext) -> dict[str, str]:
    context.progress.phase = "starting services"
    await provision(context.run)
    if context.pools is not None and await asyncio.to_thread(needs_warm_start, context):
        await on_its_pool("warm-start-run/warm-start", context)
    await initial_policy(context)
    first = await asyncio.to_thread(first_open_iteration, context)
    context.ledger = await asyncio.to_thread(restore_ledger, context)
    await publish(context.run, await asyncio.to_thread(latest_version, context.store))
    context.progress.phase = "training"
    if not await asyncio.to_thread(context.store.exists, layout.evaluation(0)) and first == 0:
        await evaluate(context.run, 0)
    context.spans.clear()  # the records of iterations hold their own stages only
    last = context.config.iterations
    waves = [*context.groups.short_waves(first), *range(first, last)]
    await lanes(context, range(first, last), waves)
    return {"plots": f"{context.run}/plots"}  # drawn when the session closes


async def lanes(context: RunContext, iterations: Sequence[int], waves: Sequence[int]) -> None:
    """The training lane consumes the batches of `iterations` while the rollout lane makes `waves`."""
    async with asyncio.TaskGroup() as group:
        group.create_task(rollout_lane(context, waves))
        for k in iterations:
            await iteration(context.run, k)
        context.groups.close()
        await context.notify()


async def rollout_lane(context: RunContext, waves: Sequence[int]) -> None:
    """Open a flow for every wave, one wave before it may be dispatched, so that its start costs no time."""
    async with asyncio.TaskGroup() as flows:
        for wave in waves:
            await context.wait_until(
                lambda wave=wave: context.groups.admits(wave - 1, context.served or 0),  # type: ignore[misc]
                2 * context.next_version_s,
                f"wave {wave} to be admitted",
                f"{context.run}/services",
            )
            flows.create_task(rollout(context.run, wave))


def latest_version(store: Store) -> int:
    """The newest complete version."""
    return max(v for v in store.numbers("weights") if store.manifest(layout.weights(v)) is not None)


def first_open_iteration(context: RunContext) -> int:
    """The first iteration without a record; everything before it is finished."""
    k = 0
    while context.store.exists(layout.iteration(k)):
        context.progress.history = [*context.progress.history, context.store.read_json(layout.iteration(k))]
        k += 1
    return k


def restore_ledger(context: RunContext) -> Ledger:
    """The ledger as the store's batches and finished groups say; what is too old for the next batch is made again."""
    store, consumed = context.store, consumed_groups(context.store)
    finished = {key: _oldest_version(store, key) for key in _stored_groups(store) if key not in consumed}
    ledger = new_ledger(context.config.rollout, consumed, finished)
    newest = (k for k in reversed(store.numbers("batches")) if store.manifest(layout.batch(k)) is not None)
    ledger.expire(max(next(newest, -1) + 1, 0))
    return ledger


def new_ledger(
    settings: RolloutConfig, consumed: set[GroupKey], finished: dict[GroupKey, int] | None = None
) -> Ledger:
    """A ledger under these settings."""
    barrier = settings.barrier != "none"
    return Ledger(
        settings.groups, settings.redundancy, settings.max_staleness, barrier, consumed, finished or {}
    )


def consumed_groups(store: Store) -> set[GroupKey]:
    """The groups that the run's batches name."""
    consumed: set[GroupKey] = set()
    for k in store.numbers("batches"):
        manifest = store.manifest(layout.batch(k))
        if k >= 0 and manifest is not None:
            consumed |= {_group_key(name) for name in manifest["groups"]}
    return consumed


def _stored_groups(store: Store) -> list[GroupKey]:
    return [(wave, index) for wave in store.numbers("groups") for index in store.numbers(f"groups/{wave}")]


def _oldest_version(store: Store, key: GroupKey) -> int:
    trajectories, _ = decode(store.read(layout.group(*key)))
    return min(trajectory.oldest_version for trajectory in trajectories)


def _group_key(name: str) -> GroupKey:
    wave, group = name.split("/")
    return int(wave), int(group)
