"""The live side of one run in the controller's process: what the flows share besides the store.

Flows and tasks take the run's URI as their parameter, which is what the Prefect UI shows, and find the live
objects here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows.progress import Progress
from hardware.pools import pool_for
from tasks.config import RunConfig, stored_config
from tasks.errors import DeadlineExceeded
from tasks.reward.client import RewardClient
from tasks.rollout.ledger import GroupKey, Ledger
from tasks.rollout.slots import Slots
from tasks.services import Supervisor
from tasks.store import Store
from tasks.trajectory import EpisodeFailure, Group, Trajectory

if TYPE_CHECKING:
    from distributed import Client

    from flows.pools import PoolServices
    from tasks.tracking.mlflow_tracker import Tracker

SCORING_THREADS = 32  # trajectories that may be scored at once


@dataclass
class RunContext:
    """Everything live about one run."""

    store: Store
    config: RunConfig
    progress: Progress
    supervisor: Supervisor  # of the services that are child processes of this one
    tracker: Tracker
    pools: PoolServices | None = None  # of those that are flows on their pools
    rewards: RewardClient | None = None  # of the reward function; without one, rewards are computed here
    scoring: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(SCORING_THREADS, "scoring")
    )  # of its own: rewards that wait must not keep the watch over the services from its threads
    dask: Client | None = None
    slots: Slots = field(default_factory=lambda: Slots(1))  # of the environments cluster
    ledger: Ledger | None = None
    first_wave: int = 0  # whose groups get the first seeds
    served: int | None = None  # the lowest version that every ready engine serves
    finished: dict[GroupKey, Group] = field(
        default_factory=dict
    )  # finished groups that no batch consumed yet
    cancel_groups: dict[int, Callable[[list[GroupKey]], Awaitable[None]]] = field(
        default_factory=dict
    )  # by wave
    spans: list[dict[str, Any]] = field(default_factory=list)  # of the iteration in work
    failed_episodes: int = 0
    wasted_tokens: int = (
        0  # generated, and in no batch: of cancelled episodes, of spare and of expired groups
    )
    last_look: tuple[float, float] = field(
        default_factory=lambda: (time.time(), 0.0)
    )  # and slots.busy_s then
    engines_busy: dict[str, dict[str, float]] = field(default_factory=dict)  # by engine, at the last look
    problems: list[str] = field(default_factory=list)  # what others had to say, to be logged by the flow
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    changes: int = 0  # notifications so far: who compares them misses none between a look and a wait

    @property
    def services(self) -> Supervisor | PoolServices:
        """Where this run's services are started and looked after."""
        return self.pools or self.supervisor

    @property
    def run(self) -> str:
        return self.store.uri

    @property
    def name(self) -> str:
        """The run's name: the last part of its URI."""
        return self.store.name

    @property
    def next_version_s(self) -> float:
        """The longest wait for the engines to serve another version: each stage before that has its own deadline."""
        config = self.config
        return (
            config.rollout.wave_deadline_s
            + config.trainer.step_deadline_s
            + config.trainer.start_deadline_s
            + config.inference.start_deadline_s
        )

    @property
    def tags(self) -> list[str]:
        """Prefect tags of everything that belongs to the run."""
        return run_tags(self.name, self.config)

    @property
    def groups(self) -> Ledger:
        """The ledger of groups; it exists from the start of the two lanes on."""
        assert self.ledger is not None
        return self.ledger

    @property
    def cluster(self) -> Client:
        """The client of the environments cluster; it exists once the services are provisioned."""
        assert self.dask is not None
        return self.dask

    def say(self, text: str) -> None:
        """Tell the person who watches, and have the flow log it."""
        self.progress.say(text)
        self.problems.append(text)

    def waste(self, results: Iterable[Trajectory | EpisodeFailure]) -> None:
        """Count the tokens of trajectories that no batch will consume."""
        self.wasted_tokens += sum(r.generated_tokens for r in results if isinstance(r, Trajectory))

    async def notify(self) -> None:
        """Wake everything that waits for a change of the ledger or of the served version."""
        async with self.changed:
            self.changes += 1
            self.changed.notify_all()

    async def wait_until(self, true: Callable[[], bool], deadline_s: float, what: str, look_at: str) -> None:
        """Wait for a condition on the ledger or the served version; raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(deadline_s), self.changed:
                await self.changed.wait_for(true)
        except TimeoutError:
            raise DeadlineExceeded(what, deadline_s, look_at) from None

    @contextlib.contextmanager
    def span(
        self, lane: Literal["rollout", "reward", "train", "weights", "evaluate", "collect"], name: str
    ) -> Iterator[None]:
        """Record when a stage worked, for the timeline and the time per stage."""
        start = time.time()
        try:
            yield
        finally:
            self.spans.append({"lane": lane, "name": name, "start": start, "end": time.time()})


def run_tags(name: str, config: RunConfig) -> list[str]:
    """Prefect tags of everything that belongs to the run of a name."""
    return [f"run:{name}", f"model:{Path(config.policy.model).name}"]


_live: dict[str, RunContext] = {}


def live(run: str) -> RunContext:
    """The context of a run that this process controls."""
    return _live[run]


@contextlib.asynccontextmanager
async def open_context(store: Store, progress: Progress, supervisor: Supervisor) -> AsyncIterator[RunContext]:
    """Make the context of the run at `store`, with its tracker; closed again at the end."""
    from tasks.tracking.mlflow_tracker import Tracker

    config = stored_config(store)
    context = RunContext(store, config, progress, supervisor, Tracker(config, store.name, store))
    if config.placement == "pools":
        from flows.pools import PoolServices

        context.pools = PoolServices(store, config, context.say)
        context.rewards = RewardClient(store, config.rollout.wave_deadline_s, config.reward_url)
    progress.iterations = config.iterations
    _live[store.uri] = context
    try:
        yield context
    finally:
        del _live[store.uri]
        if context.rewards is not None:
            context.rewards.close()
        context.scoring.shutdown(wait=False, cancel_futures=True)


def named(prefix: str) -> Callable[[], str]:
    """A flow run's name: the prefix and the run's name, not its whole URI."""

    def name() -> str:
        from prefect.runtime import flow_run

        return f"{prefix}-{flow_run.parameters['run'].rstrip('/').rsplit('/', 1)[-1]}"

    return name


@contextlib.contextmanager
def on_pool(stage: str, config: RunConfig) -> Iterator[None]:
    """Flow runs and task runs started inside carry the stage's pool and hardware as Prefect tags."""
    from prefect import tags

    with tags(f"stage:{stage}", *pool_for(stage, config.pools).prefect_tags):
        yield
