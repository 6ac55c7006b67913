"""One wave of the rollout lane: dispatch its groups as episodes, score and store what comes back.

A wave's flow ends when every group of it is settled (consumed by a batch, replaced or dropped), so a group
that got too old is dispatched again by the flow that knows it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.context import RunContext, live, on_pool
from tasks.config import TaskConfig
from tasks.environments import Split
from tasks.errors import RunFailed
from tasks.reward import score
from tasks.rollout.dispatch import EpisodeJob, EpisodePool
from tasks.rollout.ledger import GroupKey
from tasks.rollout.waves import group_specs
from tasks.store import layout
from tasks.trajectory import EpisodeFailure, EpisodeSpec, Group, Trajectory, encode

MAX_FAILED_GROUPS = 3  # times the groups of a batch: then the environments are broken, not unlucky


@flow(flow_run_name="rollout-{wave:04d}", persist_result=False)
async def rollout(run: str, wave: int) -> None:
    """Make the groups of `wave`, at most `max_staleness` ahead of the served version."""
    context = live(run)
    await context.wait_until(
        lambda: context.served is not None and context.groups.admits(wave, context.served),
        context.next_version_s,
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
    await _Wave(context, wave).run()


def episode_pool(
    context: RunContext,
    split: Split,
    temperature: float,
    on_start: Callable[[EpisodeSpec], None] = lambda spec: None,
) -> EpisodePool:
    """Episodes of a wave or an evaluation, on the run's cluster."""
    rollout = context.config.rollout
    lockstep = (rollout.groups, rollout.group_size) if (rollout.barrier, split) == ("turn", "train") else None
    job = EpisodeJob(context.store.uri, context.store.endpoint_url, temperature, split, lockstep=lockstep)
    return EpisodePool(context.cluster, job, context.slots, on_start)


class _Wave:
    """The groups of one wave in flight."""

    def __init__(self, context: RunContext, wave: int):
        self.context, self.wave, self.settings = context, wave, context.config.rollout
        self.episodes = episode_pool(context, "train", self.settings.temperature, self._started)
        self.results: dict[GroupKey, list[Trajectory | EpisodeFailure]] = {}  # of the groups in flight
        self.held: list[Trajectory | EpisodeFailure] = []  # with a barrier at every turn: not scored yet
        self.logger = get_run_logger()
        self.started_at = 0.0

    async def run(self) -> None:
        self.context.cancel_groups[self.wave] = self.cancel
        receiver = asyncio.create_task(self._receive())
        try:
            while True:
                seen = self.context.changes
                if not self._dispatch() and self.context.groups.settled(self.wave):
                    break
                await self._wait_for_change(receiver, seen)
        finally:
            del self.context.cancel_groups[self.wave]
            receiver.cancel()
            await self.episodes.close()

    async def cancel(self, keys: list[GroupKey]) -> None:
        """Stop the episodes of groups that are not wanted any more."""
        for key in keys:
            self.context.waste(self.results.pop(key, []))
        await self.episodes.cancel([spec for key in keys for spec in self._specs(key)])

    def _dispatch(self) -> list[GroupKey]:
        served = self.context.served
        assert served is not None
        if not self.context.groups.admits(self.wave, served):
            return []
        keys = self.context.groups.dispatch(self.wave)
        for key in keys:
            self.results[key] = []
            self.episodes.submit(self._specs(key))
        if keys:
            self.started_at = self.started_at or time.time()
            progress = self.context.progress
            progress.episodes_wanted += len(keys) * self._group_episodes
        return keys

    def _started(self, spec: EpisodeSpec) -> None:
        assert self.context.served is not None
        self.context.groups.start((spec.wave, spec.group), self.context.served)

    def _specs(self, key: GroupKey) -> list[EpisodeSpec]:
        return group_specs(self.context.config, *key, first_wave=self.context.first_wave)

    @property
    def _group_episodes(self) -> int:
        return self.settings.group_size + self.settings.spare_episodes

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
        """Score each trajectory the moment it ends, while its siblings still run."""
        async with asyncio.TaskGroup() as scoring:
            while True:
                result = await self.episodes.next()
                self.context.progress.episodes_done += 1
                if isinstance(result, EpisodeFailure):
                    self._note_failure(result)
                self.held.append(result)
                if self.settings.barrier == "turn" and self.episodes.in_flight:
                    continue
                for ended in self.held:
                    members = self.results.get((ended.wave, ended.group))
                    scoring.create_task(self._take(ended, members))
                self.held = []

    def _note_failure(self, failure: EpisodeFailure) -> None:
        self.context.failed_episodes += 1
        key = (failure.wave, failure.group)
        self.logger.warning(
            "episode %s of group %s failed in %s: %s", failure.index, key, failure.stage, failure.reason
        )

    async def _take(
        self, result: Trajectory | EpisodeFailure, members: list[Trajectory | EpisodeFailure] | None
    ) -> None:
        """Score a result and put it to its group, `members`; the group is finished by enough trajectories."""
        key = (result.wave, result.group)
        if isinstance(result, Trajectory) and members is not None:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self.context.scoring, self._scored, result)
        # Cancelled meanwhile, perhaps dispatched again, or enough others were faster:
        if members is None or self.results.get(key) is not members:
            self.context.waste([result])
            return
        members.append(result)
        good = [member for member in members if isinstance(member, Trajectory)]
        if len(good) == self.settings.group_size or len(members) == self._group_episodes:
            del self.results[key]
            await self.episodes.cancel(self._specs(key))  # the slowest, if there are spare ones
            await self._finish(key, members)

    def _scored(self, trajectory: Trajectory) -> Trajectory:
        if self.context.rewards is not None:
            return self.context.rewards.scored(trajectory)
        return scored(trajectory, self.context.config.task(trajectory.task))

    async def _finish(self, key: GroupKey, results: list[Trajectory | EpisodeFailure]) -> None:
        groups = self.context.groups
        trajectories = sorted((r for r in results if isinstance(r, Trajectory)), key=lambda t: t.index)
        failures = [r for r in results if isinstance(r, EpisodeFailure)]
        if len(trajectories) < 2:  # nothing to compare with
            self._replace(key, failures)
        else:
            group = Group(*key, trajectories, failures)
            data = encode(trajectories, failures)
            await asyncio.to_thread(self.context.store.write, layout.group(*key), data)
            again = key in self.results  # too old by now, and dispatched again
            if not again and groups.finish(key, group.oldest_version):
                self.context.finished[key] = group
            else:
                self.context.waste(results)
            await self.cancel(groups.losers(self.wave))
        if not groups.open(self.wave):
            self.context.spans.append(
                {"lane": "rollout", "name": f"wave {self.wave}", "start": self.started_at, "end": time.time()}
            )
        await self.context.notify()

    def _replace(self, key: GroupKey, failures: list[EpisodeFailure]) -> None:
        replacement = self.context.groups.fail(key)
        self.logger.warning("group %s has too few trajectories and is replaced by %s", key, replacement)
        if self.context.groups.failures > MAX_FAILED_GROUPS * self.settings.groups:
            last = failures[-1]
            raise RunFailed(
                f"{self.context.groups.failures} groups failed; the last episode failed in {last.stage}: {last.reason}",
                look_at=f"environment {last.task!r} with seed {last.seed}",
            )


def scored(trajectory: Trajectory, task: TaskConfig) -> Trajectory:
    """The trajectory with its reward."""
    started = time.perf_counter()
    return trajectory.scored(score(trajectory, task), time.perf_counter() - started)
