"""Episodes as Dask futures: what is sent, what runs on a worker, and the stream of results.

Prefect sees stages, Dask sees episodes. A future carries one small EpisodeSpec and one small EpisodeJob; the
rest (configuration, tokenizer, engine client) each worker reads from the store once. All pools of a run share
the cluster's slots, and an episode is handed to Dask when there is a slot for it: those of older waves first. A
worker that dies costs a retry of its episodes: Dask runs them again elsewhere, and after several deaths under
one episode that episode counts as failed. A scheduler that dies loses all of its futures: the client connects to
the next one at the same address, and the episodes that were lost are handed out again.
"""

from __future__ import annotations

import asyncio
import heapq
import importlib
import math
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future, get_worker
from distributed.client import FutureCancelledError
from distributed.worker import thread_state

from tasks.config import RunConfig, stored_config
from tasks.environments import Split
from tasks.environments.cluster import SLOT
from tasks.environments.deadline import abandoned_calls
from tasks.errors import UserError
from tasks.keys import run_key
from tasks.rollout.chat import ChatRenderer
from tasks.rollout.episode import EpisodeCancelled, Generate, Generated, run_episode
from tasks.rollout.lockstep import turn_barrier
from tasks.rollout.slots import CANCELLED, Slots
from tasks.services import registered
from tasks.store import Store
from tasks.trajectory import EpisodeFailure, EpisodeSpec, Trajectory

ADDRESSES_VALID_S = 5.0
MAX_ABANDONED = 32  # hung environment calls a worker process may hold before it is replaced

Result = Trajectory | EpisodeFailure


@dataclass(frozen=True)
class EpisodeJob:
    """What the episodes of a pool have in common.

    `engine` names a function `(store, config) -> Generate` as `package.module:function`; it is called once a
    worker process. `lockstep` is (groups, group_size) of a wave whose episodes wait for each other at every turn.
    """

    store_uri: str
    endpoint_url: str | None = None
    temperature: float = 1.0
    split: Split = "train"
    engine: str = "tasks.rollout.dispatch:engine_client"
    lockstep: tuple[int, int] | None = None


def engine_client(store: Store, config: RunConfig) -> Generate:
    """A function that asks the run's engines, wherever they are registered at the time."""
    return _Engines(store, config).generate


class _Engines:
    """The client of the registered engines, made anew when their addresses change (an engine restarted)."""

    def __init__(self, store: Store, config: RunConfig):
        self._store, self._config = store, config
        self._lock = threading.Lock()
        self._addresses: list[str] = []
        self._looked_at = -float("inf")
        self._client: Any = None

    def generate(self, tokens: Sequence[int], **sampling: Any) -> Generated:
        # No sampling seed goes out: vLLM's CPU sampler dies ("CPU Generator does not use offset") when a seeded
        # request is prefilled in parts, as after an in-flight update, and samples seeded rows one by one.
        return self._current().generate(tokens, **{**sampling, "seed": None})

    def _current(self) -> Any:
        from tasks.inference.client import EngineClient

        with self._lock:
            if self._client is None or time.monotonic() - self._looked_at > ADDRESSES_VALID_S:
                addresses = self._registered()
                if addresses and addresses != self._addresses:  # the old client closes with its last request
                    deadline_s = self._config.inference.request_deadline_s
                    self._client = EngineClient(addresses, run_key(self._store), deadline_s)
                    self._addresses = addresses
                self._looked_at = time.monotonic()
            if self._client is None:
                raise ConnectionError(
                    f"no engine is registered; look at {self._store.uri}/services/engine-0.json"
                )
            return self._client

    def _registered(self) -> list[str]:
        names = [f"engine-{index}" for index in range(self._config.inference.engines)]
        found = [registered(self._store, name) for name in names]
        return [engine.address for engine in found if engine and engine.address and engine.status == "ready"]


# On the worker


@dataclass(frozen=True)
class _Setup:
    config: RunConfig
    chat: ChatRenderer
    generate: Generate


_setups: dict[tuple[str, str | None, str], _Setup] = {}
_setup_lock = threading.Lock()


def _setup(job: EpisodeJob) -> _Setup:
    """This process's configuration, tokenizer and engine client for a run, made once."""
    key = (job.store_uri, job.endpoint_url, job.engine)
    with _setup_lock:
        if key not in _setups:
            store = Store(job.store_uri, job.endpoint_url)
            config = stored_config(store)
            module, _, function = job.engine.partition(":")
            generate = getattr(importlib.import_module(module), function)(store, config)
            _setups[key] = _Setup(config, ChatRenderer.from_store(store), generate)
        return _setups[key]


def run_on_worker(spec: EpisodeSpec, job: EpisodeJob) -> Result:
    """One episode, as a Dask task."""
    setup = _setup(job)
    config = setup.config
    task = next(task for task in config.tasks if task.name == spec.task)
    worker, key = get_worker(), thread_state.key
    with turn_barrier(job.store_uri, job.lockstep, spec) as wait_for_others:

        def before_turn() -> None:
            wait_for_others()
            state = worker.state.tasks.get(key)
            if state is None or state.state == "cancelled":
                raise EpisodeCancelled

        try:
            result = run_episode(
                spec,
                task,
                config.environments,
                setup.generate,
                setup.chat,
                context_limit=config.policy.context_limit,
                temperature=job.temperature,
                split=job.split,
                before_turn=before_turn,
            )
        except EpisodeCancelled as cancelled:
            worker.log_event(CANCELLED, {"run": job.store_uri, "tokens": cancelled.tokens})
            raise
    if abandoned_calls() > MAX_ABANDONED:
        _replace_worker(worker)
    return result


def _replace_worker(worker: Any) -> None:
    """Have this worker process replaced by a new one; Dask runs its unfinished episodes again."""
    reason = f"{abandoned_calls()} environment calls hang"
    worker.loop.add_callback(worker.close_gracefully, restart=True, reason=reason)


# On the controller


class EpisodePool:
    """Episodes in flight on a Dask cluster; belongs to the event loop of its asynchronous client.

    Results come in the order in which episodes finish:

        pool.submit(specs)
        async for result in pool: ...

    `on_start` hears of the episodes that are handed to Dask.
    """

    def __init__(
        self,
        client: Client,
        job: EpisodeJob,
        slots: Slots,
        on_start: Callable[[EpisodeSpec], None] = lambda spec: None,
    ):
        self._client, self._job, self._slots, self._on_start = client, job, slots, on_start
        self._loop = asyncio.get_running_loop()
        self._futures: dict[EpisodeSpec, Future] = {}
        self._specs: dict[Any, EpisodeSpec] = {}  # by key of the future
        self._finished: asyncio.Queue[Future] = asyncio.Queue()
        self._results: deque[Result] = deque()
        self._waiting: set[EpisodeSpec] = set()
        self._priority: dict[EpisodeSpec, int] = {}  # of those waiting and those with Dask
        self._order: list[tuple[int, int, EpisodeSpec]] = []  # heap of (-priority, number, spec)
        self._name, self._submitted = secrets.token_hex(4), 0  # a future's key is never used twice

    @property
    def in_flight(self) -> int:
        """Episodes submitted whose results have not been handed out."""
        return len(self._waiting) + len(self._futures) + len(self._results)

    @property
    def in_flight_specs(self) -> list[EpisodeSpec]:
        """The episodes that have not finished."""
        return [*self._futures, *self._waiting]

    def submit(self, specs: Sequence[EpisodeSpec], priority: int | None = None) -> None:
        """Send episodes; returns at once. Higher `priority` first; by default older waves first."""
        for spec in specs:
            if spec not in self._futures and spec not in self._waiting:
                self._priority[spec] = -spec.wave if priority is None else priority
                self._wait_for_slot(spec)
        self._slots.fill()

    async def cancel(self, specs: Iterable[EpisodeSpec]) -> None:
        """Drop episodes: those waiting never start, those running stop at their next turn. No result comes."""
        futures = []
        for spec in specs:
            self._waiting.discard(spec)
            self._priority.pop(spec, None)
            future = self._futures.pop(spec, None)
            if future is not None:
                del self._specs[future.key]
                futures.append(future)
        self._slots.take(-len(futures))
        if futures:
            await self._client.cancel(futures)
        self._slots.fill()

    def urgency(self) -> tuple[float, int]:
        """Of the next episode that waits: smaller is more urgent."""
        return self._order[0][:2] if self._order else (math.inf, 0)

    def start_waiting(self) -> None:
        """Hand Dask as many episodes as there are slots, not more: it blames the death of a worker on all
        that it has assigned to it, also on those that wait.
        """
        chosen: dict[int, list[tuple[int, EpisodeSpec]]] = defaultdict(list)
        room = self._slots.free
        while room > 0 and self._order:
            _, number, spec = heapq.heappop(self._order)
            if spec in self._waiting:  # else cancelled
                self._waiting.discard(spec)
                chosen[self._priority[spec]].append((number, spec))
                room -= 1
        if not self._order:
            self._slots.leave(self)
        self._slots.take(sum(map(len, chosen.values())))
        for priority, episodes in chosen.items():
            futures = self._client.map(
                run_on_worker,
                [spec for _, spec in episodes],
                job=self._job,
                key=[f"episode-{self._name}-{number}_{spec.wave}" for number, spec in episodes],
                pure=False,
                resources={SLOT: 1},
                priority=priority,
            )
            for (_, spec), future in zip(episodes, futures, strict=True):
                self._futures[spec] = future
                self._specs[future.key] = spec
                future.add_done_callback(self._done)
                self._on_start(spec)

    async def next(self) -> Result:
        """The next finished episode; waits, also while nothing is in flight."""
        while not self._results:
            await self._collect()
        return self._results.popleft()

    async def close(self) -> None:
        """Drop everything in flight."""
        self._results.clear()
        await self.cancel(self.in_flight_specs)

    async def __aiter__(self) -> AsyncIterator[Result]:
        """Finished episodes, until none is in flight."""
        while self.in_flight:
            yield await self.next()

    def _wait_for_slot(self, spec: EpisodeSpec) -> None:
        self._waiting.add(spec)
        heapq.heappush(self._order, (-self._priority[spec], self._submitted, spec))
        self._submitted += 1
        self._slots.join(self)

    def _done(self, future: Future) -> None:
        """From one of Dask's threads."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._finished.put_nowait, future)

    async def _collect(self) -> None:
        """Move all finished futures to results, with one gather."""
        finished = [await self._finished.get()]
        while not self._finished.empty():
            finished.append(self._finished.get_nowait())
        wanted = [future for future in finished if future.key in self._specs]
        good = [future for future in wanted if future.status == "finished"]
        results = await self._gather(good)
        for future in wanted:
            if future.key not in results and future.status in ("pending", "lost"):
                future.add_done_callback(self._done)  # its result died with its worker; Dask makes it again
                continue
            spec = self._specs.pop(future.key, None)
            if spec is None:  # cancelled during the gather
                continue
            del self._futures[spec]
            self._slots.take(-1)
            if future.key not in results and future.status != "error":
                self._wait_for_slot(spec)  # lost with its scheduler
                continue
            del self._priority[spec]
            self._results.append(
                results[future.key] if future.key in results else await _failure(spec, future)
            )
        self._slots.fill()

    async def _gather(self, futures: list[Future]) -> dict[Any, Result]:
        """The results of finished futures by key; none if their scheduler died before it handed them out."""
        if not futures:
            return {}
        try:
            return dict(zip([f.key for f in futures], await self._client.gather(futures), strict=True))
        except (OSError, FutureCancelledError):
            return {}


async def _failure(spec: EpisodeSpec, future: Future) -> EpisodeFailure:
    """What the error of a future means. Raises UserError if that is what the episode raised."""
    error = await future.exception()
    if isinstance(error, UserError):
        raise error
    reason = f"{type(error).__name__}: {error}"[:500]
    return EpisodeFailure(**vars(spec), stage="worker", reason=reason, attempts=1)
