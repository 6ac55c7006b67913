"""Evaluation of one version on fixed held-out seeds: the same episodes for every version and every run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows import reporting
from flows.context import RunContext, live, on_pool
from flows.rollout import episode_pool
from tasks.environments import environment_class
from tasks.errors import RunFailed
from tasks.reward import score
from tasks.rollout.waves import evaluation_specs
from tasks.store import layout
from tasks.trajectory import EpisodeFailure, Trajectory

EVALUATION_PRIORITY = 1_000_000  # before training episodes: the training lane waits for it


@flow(flow_run_name="evaluate-v{version}", persist_result=False)
async def evaluate(
    run: str, version: int, episodes: int | None = None, temperature: float | None = None
) -> dict[str, Any]:
    """Evaluate the served `version`, and return the record.

    The first evaluation as the run is configured is the run's own: it goes to the store and stands.

    Returns `{"version", "temperature", "tasks": {name: {"success", "reward", "episodes", "failed", ...}}}`.
    """
    context = live(run)
    settings = context.config.evaluation
    temperature = settings.temperature if temperature is None else temperature
    with on_pool("evaluate", context.config), context.span("evaluate", f"version {version}"):
        tasks = await run_episodes(run, version, episodes or settings.episodes, temperature)
    record = {"version": version, "temperature": temperature, "tasks": tasks}
    as_configured = (episodes or settings.episodes, temperature) == (settings.episodes, settings.temperature)
    if as_configured and not await asyncio.to_thread(context.store.exists, layout.evaluation(version)):
        await asyncio.to_thread(context.store.write_json, layout.evaluation(version), record)
    await reporting.report_evaluation(context, record)
    return record


@task(task_run_name="episodes-v{version}", cache_policy=NO_CACHE, persist_result=False)
async def run_episodes(
    run: str, version: int, episodes: int, temperature: float
) -> dict[str, dict[str, Any]]:
    """Run the held-out episodes of every task, and summarise them by task."""
    context = live(run)
    specs = [spec for task in context.config.tasks for spec in evaluation_specs(task, episodes)]
    context.progress.episodes_done, context.progress.episodes_wanted = 0, len(specs)
    results: dict[str, list[Trajectory | EpisodeFailure]] = defaultdict(list)
    pool = episode_pool(context, "held_out", temperature)
    pool.submit(specs, priority=EVALUATION_PRIORITY)
    async for result in pool:
        results[result.task].append(result)
        context.progress.episodes_done += 1
    return {name: _summary(context, name, found) for name, found in results.items()}


def _summary(context: RunContext, name: str, results: list[Trajectory | EpisodeFailure]) -> dict[str, Any]:
    """The means over the episodes of a task that ended well. Raises RunFailed if none did."""
    settings = context.config.task(name)
    trajectories = [result for result in results if isinstance(result, Trajectory)]
    if not trajectories:
        reason = next(result.reason for result in results if isinstance(result, EpisodeFailure))
        raise RunFailed(f"all {len(results)} held-out episodes of task {name} failed; the first: {reason}")
    summary: dict[str, Any] = {
        "episodes": len(trajectories),
        "failed": len(results) - len(trajectories),
        "success": reporting.mean([t.success for t in trajectories]),
        "reward": reporting.mean([score(t, settings) for t in trajectories]),
        "turns": reporting.mean([t.turns for t in trajectories]),
        "generated_tokens": reporting.mean([t.generated_tokens for t in trajectories]),
        "truncated": reporting.mean([t.truncated for t in trajectories]),
    }
    blind = environment_class(name).blind_success([t.seed for t in trajectories], **settings.options)
    return summary if blind is None else {**summary, "best_fixed_path": blind}
