"""Start the services of a run, keep an eye on them, and tell the person who watches what happens to them.

Placement `local`: each service is a supervised child process; `pools`: a flow on its pool. What a service is and
how it does is read from its registration in the store, so hardly anything here depends on where it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from prefect import flow, get_client, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.accelerator_slot import WAITING
from flows.clocks import Clocks
from flows.context import RunContext, live, on_pool
from flows.pools import LOOK_S, PoolService, PoolServices
from tasks.commands import STAGE, service_command, service_restarts
from tasks.errors import DeadlineExceeded, RunFailed
from tasks.keys import SECRET, fingerprint, run_key
from tasks.rollout.slots import CANCELLED, Slots
from tasks.services import HEARTBEAT_S, Registration, registered, tail
from tasks.store import MANIFEST, CorruptObject, layout
from tasks.training.policy import publish_policy

ALL = ("environments", "engine", "trainer")
ACCELERATED = ("engine", "trainer")  # take their pools in this order: two runs never wait for each other


@flow(flow_run_name="provision", persist_result=False)
async def provision(run: str, kinds: Sequence[str] = ALL, pin_version: int | None = None) -> None:
    """Start the services of `kinds`, and wait for trainer and environments.

    Engines boot on while a warm start trains: whoever needs one waits for the version it must serve.
    """
    context = live(run)
    started_at = time.time()
    await asyncio.to_thread(publish_policy, context.store, context.config)
    for kind in (*kinds, "reward") if _hosts_reward(context) else kinds:
        names = service_names(context, kind)
        for name in names:
            with on_pool(STAGE[kind], context.config):
                await start_service(run, kind, name, pin_version if kind == "engine" else None)
        if kind in ACCELERATED:
            await admitted(context, names)
    await asyncio.gather(*(ready(context, kind, started_at) for kind in kinds if kind != "engine"))
    if "environments" in kinds:
        await connect_environments(context)


def _hosts_reward(context: RunContext) -> bool:
    """Whether the reward function is a service of this run: not in its own process, not a platform's."""
    return context.pools is not None and context.config.reward_url is None


async def connect_environments(context: RunContext) -> None:
    """Connect to the environments cluster, and hear from it what cancelled episodes had generated."""
    from tasks.environments.cluster import connect

    settings = context.config.environments
    context.slots = Slots(settings.workers * settings.slots)
    context.dask = await connect(context.store, asynchronous=True)
    _hear_of_cancelled(context)


def _hear_of_cancelled(context: RunContext) -> None:
    """Subscribe to what cancelled episodes had generated; to be done again with each new scheduler."""

    def note(event: tuple[float, Any]) -> None:
        _, said = event
        if said["run"] == context.run:
            context.wasted_tokens += said["tokens"]

    context.cluster.subscribe_topic(CANCELLED, note)


def service_names(context: RunContext, kind: str) -> list[str]:
    """The names under which services of a kind register."""
    if kind == "engine":
        return [f"engine-{i}" for i in range(context.config.inference.engines)]
    return [kind]


@task(task_run_name="start-{name}", cache_policy=NO_CACHE, persist_result=False)
async def start_service(run: str, kind: str, name: str, pin_version: int | None) -> None:
    """Start one service: as a child process of the run, or as a flow on its pool."""
    context = live(run)
    if context.pools is not None:
        await context.pools.start(kind, name, pin_version)
    else:
        argv, environment = service_command(context.store, kind, name, pin_version)
        context.supervisor.add(name, argv, environment, service_restarts(context.config, kind))
    get_run_logger().info("started %s; log: %s", name, context.services.services[name].log)


async def ready(context: RunContext, kind: str, started_at: float) -> Registration:
    """Wait until a service has registered itself as ready; on this machine, since `started_at`.

    Time in which it waits for its pool does not count. Raises RunFailed if it was started with another key.
    """
    settings = context.config.trainer if kind == "trainer" else context.config.inference
    deadline = time.monotonic() + settings.start_deadline_s
    while time.monotonic() < deadline:
        found = await asyncio.to_thread(registered, context.store, kind)
        if found is not None and found.status == "ready" and _is_new(context, found, started_at):
            check_key(context, found)
            return found
        raise_if_given_up(context)
        if waiting(context):
            deadline = time.monotonic() + settings.start_deadline_s
        await asyncio.sleep(0.2)
    log = context.services.services[kind].log
    raise DeadlineExceeded(f"service {kind} to be ready", settings.start_deadline_s, str(log))


async def admitted(context: RunContext, names: Sequence[str]) -> None:
    """Wait until one of these services has its place on its accelerator pool, so that runs take all pools in the same
    order. One is enough to go on with: of runs with several engines each none waits for what others hold.
    """
    while context.pools is not None:
        for name in names:
            found = await asyncio.to_thread(registered, context.store, name)
            if (
                found is not None
                and _of_this_start(context.pools, found)
                and not found.detail.startswith(WAITING)
            ):
                check_key(context, found)
                return
        raise_if_given_up(context)
        await asyncio.sleep(0.2)


def waiting(context: RunContext) -> str:
    """What services wait for before they start; empty if none does."""
    if context.pools is None:
        return ""
    return "; ".join(f"{s.name} {s.waiting}" for s in context.pools.services.values() if s.waiting)


def check_key(context: RunContext, found: Registration) -> None:
    """Raise RunFailed if a service was started with another key than this process has."""
    if found.key and found.key != fingerprint(run_key(context.store)):
        raise RunFailed(
            f"{found.name} on pool {found.pool} was started with another {SECRET} than the run's controller: they"
            " would refuse each other; give all pools the same (Prefect Secret block rollart-key), then retry",
            look_at=f"{context.run}/{layout.service(found.name)}",
        )


def _of_this_start(pools: PoolServices, found: Registration) -> bool:
    """Whether a registration on pools was written since the service was started, or found alive."""
    return found.heartbeat_at > pools.services[found.name].started_at - 1


def _is_new(context: RunContext, found: Registration, started_at: float) -> bool:
    """Whether a registration is of this start: on pools, services may have been alive before it."""
    if context.pools is None:
        return found.started_at >= started_at - 1
    return time.time() - found.heartbeat_at < 3 * HEARTBEAT_S


async def watch_services(context: RunContext) -> None:
    """Follow the registrations until cancelled: the served version, what the view shows, services that gave up.

    Raises RunFailed when a service died more often than its `restarts` allow.
    """
    from tasks.inference.client import served_version

    seen: dict[str, Registration] = {}
    clocks = Clocks(context.problems.append)
    while True:
        served = await asyncio.to_thread(served_version, context.store, context.config.inference.engines)
        if served is not None and served != context.served:
            context.served = served
            await context.notify()
        found = await asyncio.to_thread(_look_at_services, context)
        for name, registration in found.items():
            clocks.see(registration)
            if name in seen:
                _note_change(context, seen[name], registration)
        seen = found
        await asyncio.to_thread(_repair_weights, context, found)
        if context.pools is not None:
            context.progress.services |= {
                s.name: s.waiting for s in context.pools.services.values() if s.waiting
            }
        raise_if_given_up(context)
        await asyncio.sleep(max(context.store.poll_s, 0.1))


async def watch_pools(context: RunContext) -> None:
    """Follow the flow runs of services on pools, until cancelled.

    Beside `watch_services`: it asks the Prefect server, and a new version of the policy must not wait for that.
    """
    if context.pools is None:
        return
    async with get_client() as client:  # one for all looks: each costs 30 ms of this event loop
        while True:
            await context.pools.look(client)
            await asyncio.sleep(LOOK_S)


async def tell_problems(context: RunContext) -> None:
    """Log what other threads had to say in the flow run, until cancelled; a store that is away is no obstacle."""
    logger = get_run_logger()
    while True:
        while context.problems:
            logger.warning(context.problems.pop(0))
        await asyncio.sleep(0.2)


def _look_at_services(context: RunContext) -> dict[str, Registration]:
    """The registrations, also for the view.

    Raises RunFailed if an engine refuses the version it should serve, or a service has another key.
    """
    registrations, shown = {}, {}
    for name in list(context.services.services):
        found = registered(context.store, name)
        if found is None:
            continue
        if found.kind == "engine" and found.status == "failed":
            raise RunFailed(f"{name}: {found.detail}", look_at=found.log)
        alive = found.status in ("starting", "ready")
        if alive and context.pools is not None and _of_this_start(context.pools, found):
            check_key(context, found)  # its flow registered without one while it waited for its place
        version = "" if found.version is None else f", version {found.version}"
        shown[name] = f"{found.status}{version}" + (f": {found.detail}" if found.detail else "")
        registrations[name] = found
    context.progress.services = shown
    return registrations


def _note_change(context: RunContext, before: Registration, now: Registration) -> None:
    """Log what a service says anew. A trainer tells every step, so of it only a change of status."""
    if now.kind == "environments" and now.started_at != before.started_at and context.dask is not None:
        _hear_of_cancelled(context)
    if now.status != before.status or (now.detail != before.detail and now.kind != "trainer"):
        problem = now.detail.startswith(("restarting", "version "))  # the agent's words
        well = now.status in ("ready", "starting") and not problem
        log = get_run_logger().info if well else get_run_logger().warning
        log("%s is %s: %s", now.name, now.status, now.detail)


def _repair_weights(context: RunContext, found: dict[str, Registration]) -> None:
    """Have the trainer publish its version again if engines cannot fetch it and it is corrupt in the store."""
    trainer = found.get("trainer")
    if trainer is None or trainer.version is None:
        return
    complaint = f"version {trainer.version} cannot be fetched"
    if not any(engine.detail.startswith(complaint) for engine in found.values() if engine.kind == "engine"):
        return
    prefix = layout.weights(trainer.version)
    try:
        context.store.verify(prefix)
    except FileNotFoundError:  # it is being published again
        pass
    except CorruptObject as error:
        context.store.delete(f"{prefix}/{MANIFEST}")  # the manifest alone: the rest is written over
        context.problems.append(f"{error}; the trainer publishes version {trainer.version} again")


def raise_if_given_up(context: RunContext) -> None:
    """Fail the run with a service's own reason once it may not be restarted any more."""
    service = context.services.failed()
    if service is None:
        return
    if isinstance(service, PoolService):
        raise RunFailed(_why_ended(context, service), look_at=service.log)
    found = registered(context.store, service.name)
    reason = found.detail if found is not None and found.status == "failed" else "it died"
    raise RunFailed(
        f"service {service.name} gave up (deaths: {service.deaths}): {reason}\n{tail(service.log, 15)}",
        look_at=str(service.log),
    )


def _why_ended(context: RunContext, service: PoolService) -> str:
    """A pool's service gave up: how its flow run ended, the end of its log, and what to do."""
    try:
        log = context.store.read(layout.service_log(service.name)).decode(errors="replace")
    except OSError:
        log = "(none: it was killed, or its machine is gone)"
    lines = "\n".join(log.splitlines()[-15:])
    return (
        f"service {service.name} on pool {service.pool.name} gave up (deaths: {service.deaths}); the last: {service.reason}\n"
        f"the end of its log:\n{lines}\nwhat to do: mend the cause, then Retry this run; it goes on at the failed stage"
    )


def on_death(problems: list[str], say: Callable[[str], None]) -> Callable[[str, int, str, bool], None]:
    """The supervisor's callback: note the death for the flow's log and for the person who watches."""

    def note(name: str, code: int, log_tail: str, gave_up: bool) -> None:
        what = "gave up" if gave_up else "is restarted"
        say(f"{name} ended with code {code} and {what}")
        problems.append(f"{name} ended with code {code} and {what}; the end of its log:\n{log_tail}")

    return note
