"""Supervised warm start from a noisy expert, so that RL starts from a mediocre but valid policy.

Its rounds are iterations with negative numbers: of R = max_rounds rounds, round r is batch `r - R` and makes
version `r - R + 1`. After each, the candidate is evaluated; one that passes the gate becomes version 0. The
result is cached in the store by everything it depends on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.checks import policy_kind
from flows.context import RunContext, live, on_pool
from flows.evaluate import run_episodes
from flows.iteration import publish, train_step
from tasks.config import RunConfig
from tasks.errors import RunFailed
from tasks.rollout.chat import ChatRenderer
from tasks.rollout.demonstrations import demonstrations
from tasks.store import Store, layout
from tasks.training.model_folder import weight_files
from tasks.trajectory import encode

RECIPE = (
    1  # raise it when the demonstrations or the supervised objective change: old results are not reused then
)
CACHE = "warm-starts"


@flow(flow_run_name="warm-start", persist_result=False)
async def warm_start(run: str) -> None:
    """Make version 0: from the cache, or in supervised rounds until the gate is passed.

    Raises RunFailed if no round passes.
    """
    context = live(run)
    if await asyncio.to_thread(context.store.manifest, layout.weights(0)) is not None:
        return
    rounds = context.config.warm_start.max_rounds
    for number in range(rounds):
        k = number - rounds
        context.progress.phase = f"warm start, round {number + 1} of at most {rounds}"
        with on_pool("warm-start", context.config):
            await demonstrate(run, k, number)
            await train_step(run, k)
            await publish(run, k + 1)
        if await gate(run, k + 1):
            await asyncio.to_thread(_keep, context, k + 1)
            return
    raise RunFailed(
        f"no warm-start round of {rounds} passed the gate",
        look_at="warm_start.steps, gate_success and gate_greedy",
    )


@task(task_run_name="demonstrate-{k}", cache_policy=NO_CACHE, persist_result=False)
async def demonstrate(run: str, k: int, number: int) -> None:
    """Write the round's demonstrations as batch `k`."""
    context = live(run)
    settings = context.config.warm_start
    if await asyncio.to_thread(context.store.manifest, layout.batch(k)) is not None:
        return
    restart = number > 0 and number % settings.restart_after == 0
    steps = settings.steps if number == 0 or restart else settings.round_steps
    made = await asyncio.to_thread(
        demonstrations,
        context.config.tasks,
        ChatRenderer.from_store(context.store),
        count=steps * settings.batch_size,
        seed=context.config.seed * 1000 + number,
        noise=settings.noise,
        context_limit=context.config.policy.context_limit,
    )
    await asyncio.to_thread(
        context.store.put,
        layout.batch(k),
        {"batch.parquet": encode(made)},
        k=k,
        objective="supervised",
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        restart_seed=context.config.seed + number if restart else None,
    )
    get_run_logger().info(
        "%d demonstrations, %d steps%s", len(made), steps, ", from new weights" if restart else ""
    )


@task(task_run_name="gate-v{version}", cache_policy=NO_CACHE, persist_result=False)
async def gate(run: str, version: int) -> bool:
    """Whether a candidate's sampled and greedy success pass on every task."""
    context = live(run)
    settings = context.config.warm_start
    episodes = settings.gate_episodes
    with on_pool("evaluate", context.config):
        sampled = await run_episodes(run, version, episodes, temperature=1.0)
        greedy = await run_episodes(run, version, episodes, temperature=0.0)
    verdicts = {
        name: sampled[name]["success"] >= settings.gate_success
        and greedy[name]["success"] >= settings.gate_greedy
        for name in sampled
    }
    for name, passed in verdicts.items():
        line = (
            f"warm start v{version}, {name}: sampled success {sampled[name]['success']:.2f} (gate {settings.gate_success}),"
            f" greedy {greedy[name]['success']:.2f} (gate {settings.gate_greedy}): {'passed' if passed else 'not yet'}"
        )
        get_run_logger().info(line)
        context.progress.say(line)
    return all(verdicts.values())


def cache_key(config: RunConfig, policy: dict[str, Any]) -> str:
    """The name of a warm start's result: a hash of everything it depends on.

    `policy` is the manifest of `policy/`: architecture, tokenizer and chat template by their sha256.
    """
    facts: dict[str, Any] = {
        "recipe": RECIPE,
        "policy": {name: file["sha256"] for name, file in policy["files"].items()},
        "model": config.policy.model_dump(),
        "tasks": [task.model_dump() for task in config.tasks],
        "warm_start": config.warm_start.model_dump(),
        "seed": config.seed,
        "precision": config.trainer.precision,
    }
    if policy_kind(config) == "folder":  # its weights may be other ones by now
        folder = Path(config.policy.model).expanduser()
        stats = {name: (folder / name).stat() for name in weight_files(folder)}
        facts["weights"] = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _keep(context: RunContext, version: int) -> None:
    """The passed candidate becomes version 0, and is cached for later runs."""
    context.store.copy(layout.weights(version), layout.weights(0), version=0)
    policy = context.store.manifest("policy")
    assert policy is not None
    root, name = _root(context)
    root.copy(f"{name}/{layout.weights(0)}", f"{CACHE}/{cache_key(context.config, policy)}")


async def initial_policy(context: RunContext) -> None:
    """See to it that version 0 exists: from the trainer, from a cached warm start, or by a warm start."""
    if not context.config.warm_start.enabled:
        await asyncio.to_thread(
            context.store.wait_for,
            layout.weights(0),
            context.config.trainer.start_deadline_s,
            "the trainer's log",
        )
    elif await asyncio.to_thread(needs_warm_start, context):
        await warm_start(context.run)


def needs_warm_start(context: RunContext) -> bool:
    """Whether version 0 is still to be trained."""
    if not context.config.warm_start.enabled or context.store.manifest(layout.weights(0)) is not None:
        return False
    return not from_cache(context)


def from_cache(context: RunContext) -> bool:
    """Publish version 0 from an earlier warm start, if one with the same key is in the store."""
    policy = context.store.manifest("policy")
    root, name = _root(context)
    if policy is None or root.manifest(cached := f"{CACHE}/{cache_key(context.config, policy)}") is None:
        return False
    root.copy(cached, f"{name}/{layout.weights(0)}", version=0)
    context.progress.say("warm start: an earlier result with the same settings is reused")
    return True


def _root(context: RunContext) -> tuple[Store, str]:
    """The store that holds all runs, and this run's name in it."""
    root, _, name = context.run.rpartition("/")
    return Store(root, context.store.endpoint_url), name
