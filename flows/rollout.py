"""One wave of the rollout lane: dispatch its groups as episodes, score and store what comes back.

A wave's flow ends when every group of it is settled (consumed by a batch, replaced or dropped), so a group
that got too old is dispatched again by the flow that knows it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.context import RunContext, live, on_pool
from tasks.environments import Split
from tasks.errors import RunFailed
from tasks.reward import score
from tasks.rollout.dispatch import EpisodeJob, EpisodePool
from tasks.rollout.ledger import GroupKey
from tasks.rollout.waves import group_specs
from tasks.store import layout
from tasks.trajectory import EpisodeFailure, Group, Trajectory, encode

MAX_FAILED_GROUPS = 3  # times the groups of a batch: then the environments are broken, not unlucky


@flow(flow_run_name="rollout-{wave:04d}", persist_result=False)
async def rollout(run: str, wave: int) -> None:
    """Make the groups of `wave`, at most `max_staleness` ahead of the served version."""
    context = live(run)
    await context.wait_until(
        lambda: context.served is not None and context.groups.admits(wave, context.served),
        context.config.trainer.step_deadline_s,
        f"an engine to serve version {wave - context.config.rollout.max_staleness} or later",
        f"{run}/services/engine-0.json",
    )
    with on_pool("rollout", context.config):
        await run_wave(run, wave)


@task(task_run_name="wave-{wave:04d}", cache_policy=NO_CACHE, persist_result=False)
async def run_wave(run: str, wave: int) -> None:
    """Run the wave's episodes on the Dask cluster until all its groups are settled."""
    context = live(run)
    context.groups.open_wave(wave)
    temperature = context.config.rollout.temperature
    await _Wave(context, wave, EpisodePool(context.cluster, episode_job(context, "train", temperature))).run()


def episode_job(context: RunContext, split: Split, temperature: float) -> EpisodeJob:
    """What all episodes of a wave or an evaluation have in common."""
    return EpisodeJob(context.store.uri, context.store.endpoint_url, temperature, split)


class _Wave:
    """The groups of one wave in flight."""

    def __init__(self, context: RunContext, wave: int, episodes: EpisodePool):
        self.context, self.wave, self.episodes = context, wave, episodes
        self.results: dict[GroupKey, list[Trajectory | EpisodeFailure]] = defaultdict(list)
        self.logger = get_run_logger()
        self.started_at = 0.0

    async def run(self) -> None:
        self.context.cancel_episodes[self.wave] = self.cancel
        receiver = asyncio.create_task(self._receive())
        try:
            while True:
                seen = self.context.changes
                if not self._dispatch() and self.context.groups.settled(self.wave):
                    break
                await self._wait_for_change(receiver, seen)
        finally:
            del self.context.cancel_episodes[self.wave]
            receiver.cancel()
            await self.episodes.close()

    async def cancel(self, keys: list[GroupKey]) -> None:
        """Stop the episodes of groups that are not wanted any more."""
        for key in keys:
            self.results.pop(key, None)
        await self.episodes.cancel([spec for key in keys for spec in group_specs(self.context.config, *key)])

    def _dispatch(self) -> list[GroupKey]:
        served = self.context.served
        assert served is not None
        if not self.context.groups.admits(self.wave, served):
            return []
        keys = self.context.groups.dispatch(self.wave, served)
        for key in keys:
            self.episodes.submit(group_specs(self.context.config, *key))
        if keys:
            self.started_at = self.started_at or time.time()
            progress = self.context.progress
            progress.episodes_wanted += len(keys) * self.context.config.rollout.group_size
        return keys

    async def _wait_for_change(self, receiver: asyncio.Task[None], seen: int) -> None:
        async def changed() -> None:
            async with self.context.changed:
                await self.context.changed.wait_for(lambda: self.context.changes != seen)

        change = asyncio.create_task(changed())
        try:
            await asyncio.wait({change, receiver}, return_when=asyncio.FIRST_COMPLETED)
            if receiver.done():
                receiver.result()  # it only ends with an error
        finally:
            change.cancel()

    async def _receive(self) -> None:
        while True:
            result = await self.episodes.next()
            self.context.progress.episodes_done += 1
            key = (result.wave, result.group)
            self.results[key].append(self._scored(result))
            if isinstance(result, EpisodeFailure):
                self.context.failed_episodes += 1
                self.logger.warning(
                    "episode %s of group %s failed in %s: %s", result.index, key, result.stage, result.reason
                )
            if len(self.results[key]) == self.context.config.rollout.group_size:
                await self._finish(key, self.results.pop(key))

    def _scored(self, result: Trajectory | EpisodeFailure) -> Trajectory | EpisodeFailure:
        """A trajectory is scored the moment it ends, while its siblings still run."""
        if isinstance(result, EpisodeFailure):
            return result
        return result.scored(score(result, self.context.config.task(result.task)))

    async def _finish(self, key: GroupKey, results: list[Trajectory | EpisodeFailure]) -> None:
        trajectories = sorted((r for r in results if isinstance(r, Trajectory)), key=lambda t: t.index)
        failures = [r for r in results if isinstance(r, EpisodeFailure)]
        if len(trajectories) < 2:  # nothing to compare with
            self._replace(key, failures)
        else:
            group = Group(*key, trajectories, failures)
            data = encode(trajectories, failures)
            await asyncio.to_thread(self.context.store.write, layout.group(*key), data)
            if self.context.groups.finish(key, group.oldest_version):
                self.context.finished[key] = group
        if not self.context.groups.open(self.wave):
            self.context.spans.append(
                {"lane": "rollout", "name": f"wave {self.wave}", "start": self.started_at, "end": time.time()}
            )
        await self.context.notify()

    def _replace(self, key: GroupKey, failures: list[EpisodeFailure]) -> None:
        replacement = self.context.groups.fail(key)
        self.logger.warning("group %s has too few trajectories and is replaced by %s", key, replacement)
        if self.context.groups.failures > MAX_FAILED_GROUPS * self.context.config.rollout.groups:
            last = failures[-1]
            raise RunFailed(
                f"{self.context.groups.failures} groups failed; the last episode failed in {last.stage}: {last.reason}",
                look_at=f"environment {last.task!r} with seed {last.seed}",
            )
