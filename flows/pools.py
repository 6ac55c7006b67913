"""The services of a run on its pools: each one a flow run of its deployment, looked after from the run's controller.

Invariants: a service that is alive is used and not started a second time, also by a controller that was restarted;
one that ended unasked is started again, as often as its `restarts` allow, and a preempted one as often as it takes;
the controller's registration in the store tells the services whether their run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.blocks.system import Secret
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import arun_deployment
from prefect.states import Cancelled, Cancelling, Crashed

from flows.accelerator_slot import RENEW_S, WAITING, keep_places
from flows.context import run_tags
from flows.deploy_plan import SECRET as SECRET_BLOCK
from flows.serve import CONTROLLER
from flows.server import configured_api
from hardware.pools import Pool, pool_for
from tasks.commands import STAGE, service_restarts
from tasks.config import RunConfig
from tasks.errors import RunFailed, UserError
from tasks.keys import SECRET, fingerprint, run_key
from tasks.services import HEARTBEAT_S, Registrar, Registration, Status, died, registered
from tasks.store import Store, layout

if TYPE_CHECKING:
    from flows.context import RunContext

LIVE = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING)
LOOK_S = 2.0
WORKER_S = 10.0  # a service that no worker has taken up for so long is asked about
STALE_S = 6 * HEARTBEAT_S
END_S = 40.0  # for services to end in order


@dataclass
class PoolService:
    """One service of the run and its newest flow run."""

    name: str
    kind: str
    pool: Pool
    parameters: dict[str, Any]
    restarts: int
    log: str
    flow_run_id: UUID | None = None
    started_at: float = 0.0
    deaths: int = 0
    waiting: str = ""  # what it waits for before it starts
    reason: str = ""  # of the last death


class PoolServices:
    """Starts, watches and lets go the services of one run; `say` is told what a person should know."""

    def __init__(self, store: Store, config: RunConfig, say: Callable[[str], None]):
        self.store, self.config, self.say = store, config, say
        self.services: dict[str, PoolService] = {}
        self.name = store.name
        self._registrar: Registrar | None = None
        self._renewed_at = 0.0

    def open(self, training: bool) -> None:
        """Register this process as the run's controller.

        If there is another one: a stage on its own uses its services; to train, raises UserError. One that was
        killed looks alive for some seconds more, in which this waits.
        """
        while (other := registered(self.store, CONTROLLER)) is not None and other.status == "ready":
            if not self._alive(other):
                break
            if not training:
                return
            time.sleep(HEARTBEAT_S)
            now = registered(self.store, CONTROLLER)
            if now is not None and now.heartbeat_at > other.heartbeat_at:
                where = f"process {other.pid} on {other.host}"
                raise UserError(
                    "run", f"{self.name} is going on in {where}", "wait for it, or cancel it first"
                )
        pool = pool_for("control", self.config.pools).name
        self._registrar = Registrar(self.store, Registration(CONTROLLER, "controller", pool, "ready"))

    async def start(self, kind: str, name: str, pin_version: int | None) -> None:
        """Start a service on its pool, or use the one that is alive."""
        parameters: dict[str, Any] = {"run": self.store.uri, "endpoint_url": self.store.endpoint_url}
        if kind == "engine":
            parameters |= {"name": name, "pin_version": pin_version}
        pool, log = pool_for(STAGE[kind], self.config.pools), f"{self.store.uri}/{layout.service_log(name)}"
        service = PoolService(name, kind, pool, parameters, service_restarts(self.config, kind), log)
        self.services[name] = service
        found = await self._find(service)
        if found is None and self._registrar is None:
            raise UserError(
                "run", f"{self.name} is going on, and its {name} is not what this needs", "wait for its end"
            )
        if found is not None:
            service.flow_run_id, service.started_at = found, time.time()
            self.say(f"{name} is alive on pool {pool.name} and is used again")
        else:
            await self._run(service)

    async def look(self, client: PrefectClient) -> None:
        """See how the services' flow runs are: start again what ended, say what waits, keep the run's places."""
        now = time.monotonic()
        by_id = {service.flow_run_id: service for service in self.services.values() if service.flow_run_id}
        if not by_id:
            return
        ids = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=list(by_id)))
        for run in await client.read_flow_runs(flow_run_filter=ids):
            await self._judge(client, by_id[run.id], run)
        if self._registrar is not None and now - self._renewed_at > RENEW_S:
            self._renewed_at = now
            await keep_places(self.store, [s.name for s in self.services.values() if s.pool.accelerated])

    def failed(self) -> PoolService | None:
        """A service that ended more often than it may, if any."""
        return next((s for s in self.services.values() if s.deaths > s.restarts), None)

    async def stop(self, status: Status) -> None:
        """Tell the services how the run ended, and wait for them unless they stay for a while."""
        if self._registrar is None:
            return
        await asyncio.to_thread(self._registrar.close, status)
        if status not in ("finished", "stopped"):
            return
        ids = [service.flow_run_id for service in self.services.values() if service.flow_run_id]
        which = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=ids), state=_state(LIVE))
        deadline = time.monotonic() + END_S
        async with get_client() as client:
            while (
                ids
                and time.monotonic() < deadline
                and (left := await client.read_flow_runs(flow_run_filter=which))
            ):
                for run in left:  # one that no worker has taken up would start for nothing
                    if run.state is not None and run.state.type == StateType.SCHEDULED:
                        await client.set_flow_run_state(run.id, Cancelled(), force=True)
                await asyncio.sleep(0.5)

    async def _find(self, service: PoolService) -> UUID | None:
        """The flow run of this service that can be used; others are ended, a dead one is marked as crashed."""
        tagged = filters.FlowRunFilterTags(all_=[f"run:{self.name}", f"service:{service.name}"])
        async with get_client() as client:
            which = filters.FlowRunFilter(tags=tagged, state=_state(LIVE))
            for run in await client.read_flow_runs(flow_run_filter=which):
                if run.parameters.get("run") != self.store.uri or run.state is None:
                    continue
                heard = run.state.type != StateType.RUNNING or await self._heard(service)
                if heard and run.parameters == service.parameters and await self._same_key(service):
                    return run.id
                if self._registrar is None:
                    return None
                if heard:
                    await _end(client, run)
                else:
                    silent = f"{service.name} has not been heard of for {STALE_S:.0f} s."
                    await client.set_flow_run_state(run.id, Crashed(message=silent), force=True)
        return None

    async def _same_key(self, service: PoolService) -> bool:
        found = await asyncio.to_thread(registered, self.store, service.name)
        return found is None or not found.key or found.key == fingerprint(run_key(self.store))

    async def _heard(self, service: PoolService) -> bool:
        """Whether the service, or the flow that hosts it, has written its registration lately."""
        found = await asyncio.to_thread(registered, self.store, service.name)
        return found is not None and self._alive(found)

    def _alive(self, registration: Registration) -> bool:
        return time.time() - registration.heartbeat_at < STALE_S

    async def _run(self, service: PoolService) -> None:
        stage = STAGE[service.kind]
        run = await arun_deployment(
            f"serve-{service.kind}/serve-{service.kind}",
            parameters=service.parameters,
            timeout=0,
            flow_run_name=f"{service.name}-{self.name}",
            tags=[
                *run_tags(self.name, self.config),
                f"service:{service.name}",
                f"stage:{stage}",
                *service.pool.prefect_tags,
            ],
            work_queue_name=self.config.work_queue,
        )
        service.flow_run_id, service.started_at, service.waiting = run.id, time.time(), ""

    async def _judge(self, client: PrefectClient, service: PoolService, run: FlowRun) -> None:
        state = run.state
        assert state is not None
        if state.is_final() and self._registrar is None:
            return  # whose run it is starts it again
        if state.is_final():
            preempted = state.name == "Preempted"
            if not preempted:
                service.deaths = died(service.deaths, run.total_run_time.total_seconds())
            service.reason = f"{state.name}: {state.message or 'no message'}"
            how = "gave up" if service.deaths > service.restarts else "is started again"
            self.say(f"{service.name} on pool {service.pool.name} ended ({service.reason}) and {how}")
            if service.deaths <= service.restarts:
                await self._run(service)
            return
        waiting = await self._waits_for(client, service, state.type)
        if waiting and waiting != service.waiting:
            self.say(f"{service.name} {waiting}")
        service.waiting = waiting

    async def _waits_for(self, client: PrefectClient, service: PoolService, state: StateType) -> str:
        if state == StateType.RUNNING:
            found = await asyncio.to_thread(registered, self.store, service.name)
            waits = found is not None and self._alive(found) and found.detail.startswith(WAITING)
            return found.detail if found is not None and waits else ""
        if time.time() - service.started_at < WORKER_S:
            return service.waiting
        return await _not_taken_up(client, service.pool.work_pool)


async def _not_taken_up(client: PrefectClient, pool: str) -> str:
    """Why no worker of a work pool has taken up a flow run."""
    workers = await client.read_workers_for_work_pool(pool)
    if any(worker.status == "ONLINE" for worker in workers):
        return f"waits for a place on pool {pool}: its limit is reached, or its worker is busy"
    return f"waits for pool {pool}, which has no worker online; start one: rollart worker {pool}"


async def _end(client: PrefectClient, run: FlowRun) -> None:
    """Cancel a flow run, and wait until its worker has ended it."""
    started = run.state is not None and run.state.type == StateType.RUNNING
    await client.set_flow_run_state(run.id, Cancelling() if started else Cancelled(), force=True)
    deadline = time.monotonic() + END_S
    while run.state is not None and not run.state.is_final() and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        run = await client.read_flow_run(run.id)


def _state(types: tuple[StateType, ...]) -> filters.FlowRunFilterState:
    return filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=list(types)))


async def on_its_pool(deployment: str, context: RunContext) -> None:
    """Run a one-shot stage of a run as a deployment on its pool, linked to the flow that calls this; waits for it.

    Raises RunFailed with its message unless it completes. If this is cancelled, so is the stage.
    """
    store = context.store
    parameters = {"run": store.uri, "endpoint_url": store.endpoint_url}
    run = await arun_deployment(
        deployment,
        parameters=parameters,
        timeout=0,
        tags=context.tags,
        work_queue_name=context.config.work_queue,
    )
    context.say(f"{deployment} is on its pool: flow run {run.name}")
    asked_at, told = time.monotonic(), False
    async with get_client() as client:
        try:
            while not (run.state is not None and run.state.is_final()):
                await asyncio.sleep(LOOK_S)
                run = await client.read_flow_run(run.id)
                late = time.monotonic() - asked_at > WORKER_S and not told
                if late and run.start_time is None and run.work_pool_name is not None:
                    told = True
                    context.say(f"{run.name} {await _not_taken_up(client, run.work_pool_name)}")
        except asyncio.CancelledError:
            await asyncio.shield(client.set_flow_run_state(run.id, Cancelling(), force=True))
            raise
    if not run.state.is_completed():
        raise RunFailed(
            f"{deployment} ended as {run.state.name}: {run.state.message}", look_at=f"flow run {run.name}"
        )


def check_pools(config: RunConfig) -> None:
    """The Prefect server has what a run on pools needs. Raises UserError; returns within seconds."""
    api = configured_api()
    if api is None:
        raise UserError(
            "placement",
            "is 'pools', but no Prefect server is configured",
            "export PREFECT_API_URL=http://<server>:4200/api, or set placement = 'local'",
        )
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            for kind in STAGE:
                client.read_deployment_by_name(f"serve-{kind}/serve-{kind}")
            for stage in STAGE.values():
                pool = pool_for(stage, config.pools).work_pool
                client.read_work_pool(pool)
                queues = [queue.name for queue in client.read_work_queues(work_pool_name=pool)]
                if config.work_queue not in queues:  # the server would make one, without a quota
                    raise UserError(
                        "work_queue",
                        f"pool {pool} has no queue {config.work_queue!r}",
                        f"use one of {', '.join(queues)}, or make it: rollart deploy --team {config.work_queue}=LIMIT",
                    )
        except ObjectNotFound as error:
            raise UserError(
                "placement",
                f"is 'pools', but the server at {api} lacks them ({error})",
                "run: rollart deploy",
            ) from None
        except httpx.HTTPError as error:
            raise UserError(
                "PREFECT_API_URL", f"{api} does not answer ({error})", "start it: prefect server start"
            ) from None
    _know_the_key()


def _know_the_key() -> None:
    """Outside of a job, as in a terminal, take the key of the runs from where `rollart deploy` put it."""
    if not os.environ.get(SECRET):
        with contextlib.suppress(ValueError):  # no such block: the keys came another way
            block: Any = Secret.load(SECRET_BLOCK)  # the checks run outside of any event loop
            os.environ[SECRET] = str(block.get())
