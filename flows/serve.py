"""The services of a run as flows on their pools: each hosts one service process beside it, and ends with it.

A host waits for a place on its pool's accelerators, keeps the process running, and shows what the process does
for each iteration as a task run on this pool. It lives as long as the run's controller does: a controller that is
paused, failed or gone leaves its services for `services_grace_s`, in which a restarted one finds and uses them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from prefect import flow, get_run_logger, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import Crashed

from flows.accelerator_slot import accelerator_slot
from flows.attempts import on_terminate
from flows.server import ask_again_soon
from hardware.pools import pool_for
from tasks.commands import STAGE, service_command, service_restarts
from tasks.config import RunConfig, stored_config
from tasks.errors import RunFailed
from tasks.services import Registrar, Registration, Supervisor, registered, tail, work_folder
from tasks.store import Store, layout

CONTROLLER = "controller"
LOOK_S = 0.5
QUIET_S = 3.0  # a wave of which nothing has moved for so long has ended
END_S = 5.0  # for task runs to end with their service
LOG_LINES = 60  # of a dead service's log, kept in the store


def _name() -> str:
    parameters = flow_run.parameters
    run = parameters["run"].rstrip("/").rsplit("/", 1)[-1]
    return f"{parameters.get('name') or flow_run.flow_name.removeprefix('serve-')}-{run}"


@flow(name="serve-engine", flow_run_name=_name, persist_result=False)
async def serve_engine(
    run: str, name: str = "engine-0", endpoint_url: str | None = None, pin_version: int | None = None
) -> Any:
    """Host one vLLM engine of the run."""
    return await _Host(run, endpoint_url, "engine", name, pin_version).serve()


@flow(name="serve-trainer", flow_run_name=_name, persist_result=False)
async def serve_trainer(run: str, endpoint_url: str | None = None) -> Any:
    """Host the DeepSpeed trainer of the run."""
    return await _Host(run, endpoint_url, "trainer").serve()


@flow(name="serve-environments", flow_run_name=_name, persist_result=False)
async def serve_environments(run: str, endpoint_url: str | None = None) -> Any:
    """Host the Dask cluster that holds the run's environments."""
    return await _Host(run, endpoint_url, "environments").serve()


@flow(name="serve-reward", flow_run_name=_name, persist_result=False)
async def serve_reward(run: str, endpoint_url: str | None = None) -> Any:
    """Host the reward function of the run."""
    return await _Host(run, endpoint_url, "reward").serve()


class _Host:
    """One service process, from the place on the accelerators to its end."""

    def __init__(
        self, run: str, endpoint_url: str | None, kind: str, name: str | None = None, pin: int | None = None
    ):
        self.store, self.kind, self.name, self.pin = Store(run, endpoint_url), kind, name or kind, pin
        self.config: RunConfig = stored_config(self.store)
        self.pool = pool_for(STAGE[kind], self.config.pools)
        self.supervisor = Supervisor(work_folder(self.store), self._died, f"host-{self.name}.json")
        self.logger = get_run_logger()
        self.over = False  # the service is about to end
        self._said: list[str] = []  # from the supervisor's thread
        self._registrar: Registrar | None = None  # while the service waits to be started

    async def serve(self) -> Any:
        """Host the service until the run ends or lets it go; a terminate signal is a preemption."""
        ask_again_soon()
        stopped = asyncio.Event()
        on_terminate(stopped.set)
        with tags(f"stage:{STAGE[self.kind]}", *self.pool.prefect_tags):
            work = asyncio.ensure_future(self._serve())
            await asyncio.wait(
                {work, asyncio.ensure_future(stopped.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
            try:
                if work.done():
                    return await work
                work.cancel()
                await asyncio.wait({work})
                return Crashed(name="Preempted", message=f"{self.name} was told to end, and ended in order.")
            finally:
                await asyncio.to_thread(self.supervisor.stop, 20.0)

    async def _serve(self) -> str:
        if self.pool.accelerated:
            async with accelerator_slot(self.pool, self.store, self.name, self._waiting):
                try:
                    return await self._host()
                finally:  # the place is free once nothing is on it any more
                    await asyncio.shield(asyncio.to_thread(self.supervisor.stop, 20.0))
        return await self._host()

    async def _host(self) -> str:
        if self._registrar is not None:
            await asyncio.to_thread(
                self._registrar.close, "starting", f"has its place on pool {self.pool.name}"
            )
        argv, environment = service_command(self.store, self.kind, self.name, self.pin)
        service = self.supervisor.add(self.name, argv, environment, service_restarts(self.config, self.kind))
        self.logger.info("started %s on pool %s; its log: %s", self.name, self.pool.name, service.log)
        follower = asyncio.ensure_future(_FOLLOW[self.kind](self))
        try:
            return await self._until_let_go(follower)
        finally:
            self.over = True
            await asyncio.wait({follower}, timeout=END_S)  # its task runs end as they stand
            follower.cancel()

    async def _until_let_go(self, follower: asyncio.Future[None]) -> str:
        """Wait until the run has ended or has been away for its grace; raises RunFailed if the service gives up."""
        controller, changed_at = None, time.monotonic()
        while True:
            now = await self._look(CONTROLLER)
            if now is not None and (controller is None or now.heartbeat_at != controller.heartbeat_at):
                controller, changed_at = now, time.monotonic()
            if controller is not None and controller.status in ("finished", "stopped"):
                return f"the run is {controller.status}"
            if time.monotonic() - changed_at > self.config.services_grace_s:
                how = "away" if controller is None or controller.status == "ready" else controller.status
                return f"the run has been {how} for {self.config.services_grace_s:.0f} s"
            while self._said:
                self.logger.warning(self._said.pop(0))
            self.raise_if_failed()
            if follower.done():
                follower.result()
            await asyncio.sleep(LOOK_S)

    def raise_if_failed(self) -> None:
        """Raise RunFailed with the end of the log once the service may not be restarted any more."""
        service = self.supervisor.failed()
        if service is not None:
            raise RunFailed(
                f"{self.name} gave up (deaths: {service.deaths}); the end of its log:\n{tail(service.log, 20)}",
                look_at=f"{service.log} on this machine, {self.store.uri}/{layout.service_log(self.name)}",
            )

    async def registration(self) -> Registration | None:
        """What the service says of itself."""
        return await self._look(self.name)

    async def exists(self, prefix: str) -> bool:
        """Whether a manifest is there; not while the store is away."""
        try:
            return await asyncio.to_thread(self.store.manifest, prefix) is not None
        except OSError:
            return False

    async def _look(self, name: str) -> Registration | None:
        try:
            return await asyncio.to_thread(registered, self.store, name)
        except OSError:  # the store is away: nothing has changed
            return None

    async def _waiting(self, detail: str) -> None:
        """Say in the store and in the log what the service waits for before it starts."""
        self.logger.info(detail)
        kind: Any = self.kind
        registration = Registration(self.name, kind, self.pool.name, detail=detail)
        self._registrar = await asyncio.to_thread(Registrar, self.store, registration)

    def _died(self, name: str, code: int, log_tail: str, gave_up: bool) -> None:
        how = "gave up" if gave_up else "is restarted"
        self._said.append(f"{name} ended with code {code} and {how}; the end of its log:\n{log_tail}")
        log = self.supervisor.services[name].log
        try:
            self.store.write(layout.service_log(name), tail(log, LOG_LINES).encode())
        except OSError as error:
            self._said.append(f"the end of the log was not written to the store: {error}")


# What a service does for each iteration, as task runs on its pool


async def _follow_trainer(host: _Host) -> None:
    shown: int | None = None  # all batches below have their task run
    while not host.over:
        now = await host.registration()
        if now is not None and now.status == "ready" and now.version is not None:
            shown = now.version if shown is None else min(shown, now.version)  # it replays after a restart
            while shown < now.version or await host.exists(layout.batch(shown)):
                name = f"train-step-{shown:04d}" if shown >= 0 else f"warm-start{shown}"
                if await host.exists(layout.batch(shown)):
                    await train_step.with_options(task_run_name=name)(host, shown)
                shown += 1
                if host.over:
                    return
        await asyncio.sleep(LOOK_S)


@task(cache_policy=NO_CACHE, persist_result=False)
async def train_step(host: Any, k: int) -> None:
    """Batch `k` becomes version `k + 1` on this pool."""
    while not (host.over or await host.exists(layout.weights(k + 1))):
        host.raise_if_failed()
        await asyncio.sleep(LOOK_S)


async def _follow_engine(host: _Host) -> None:
    loaded = -(10**9)
    while not host.over:
        now = await host.registration()
        if now is not None and now.version is not None and now.version > loaded:
            for load in [load for load in now.facts.get("loads", []) if load["version"] > loaded]:
                await load_version(load["version"], load)
            loaded = now.version
        await asyncio.sleep(LOOK_S)


@task(task_run_name="load-v{version}", cache_policy=NO_CACHE, persist_result=False)
async def load_version(version: int, measured: dict[str, Any]) -> None:
    """The engine on this pool has pulled a version; `measured` says how long each part took."""
    get_run_logger().info(
        "version %d: prefetch %.2f s, pause %.2f s, parity %s",
        version,
        measured["prefetch_s"],
        measured["pause_s"],
        measured["parity"],
    )


async def _follow_waves(host: _Host) -> None:
    """One task run a wave: from its first episode (or trajectory) here until nothing of it moves any more."""
    shown: dict[str, asyncio.Task[Any]] = {}
    async with asyncio.TaskGroup() as group:
        while not host.over:
            now = await host.registration()
            waves = now.facts.get("waves", {}) if now is not None else {}
            for wave, (started, ended) in waves.items():
                if wave not in shown or (shown[wave].done() and started > ended):
                    shown[wave] = group.create_task(_wave_task(host, int(wave)))
            await asyncio.sleep(LOOK_S)


def _wave_task(host: _Host, wave: int) -> Coroutine[Any, Any, None]:
    what = "rollout" if host.kind == "environments" else "reward"
    name = f"{what}-{wave:04d}" if wave >= 0 else f"{what}-evaluation"
    return serve_wave.with_options(task_run_name=name)(host, str(wave))


@task(cache_policy=NO_CACHE, persist_result=False)
async def serve_wave(host: Any, wave: str) -> None:
    """The episodes or trajectories of one wave that ran on this pool."""
    counts, changed_at = (0, 0), time.monotonic()
    while not host.over:
        now = await host.registration()
        seen = tuple(now.facts.get("waves", {}).get(wave, counts)) if now is not None else counts
        if seen != counts:
            counts, changed_at = seen, time.monotonic()
        if counts[0] <= counts[1] and time.monotonic() - changed_at > QUIET_S:
            break
        await asyncio.sleep(LOOK_S)
    get_run_logger().info("%d ended", counts[1])


_FOLLOW: dict[str, Callable[[_Host], Coroutine[Any, Any, None]]] = {
    "trainer": _follow_trainer,
    "engine": _follow_engine,
    "environments": _follow_waves,
    "reward": _follow_waves,
}
