from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from distributed import Client, Security

from tasks.config import EnvironmentsConfig, RunConfig, TaskConfig
from tasks.environments.cluster import ATTEMPT_S, CONNECT_S, connect
from tasks.errors import UserError
from tasks.keys import run_key, unseal
from tasks.rollout.dispatch import MAX_ABANDONED, EpisodeJob, EpisodePool
from tasks.rollout.slots import Slots
from tasks.services import PARENT, registered, this_process
from tasks.store import Store, layout
from tasks.training.policy import publish_policy
from tasks.trajectory import EpisodeFailure, EpisodeSpec, Trajectory

SLOTS = 8
HANGING, DEADLY = "tests.integration.scripted:Hanging", "tests.integration.scripted:Deadly"


@contextmanager
def service(folder: Path, workers: int = 2) -> Iterator[tuple[Store, subprocess.Popen[bytes]]]:
    """The environments service of a new run below `folder`, ready."""
    config = RunConfig(
        tasks=[TaskConfig(name=name) for name in ("frozenlake", HANGING, DEADLY)],
        environments=EnvironmentsConfig(workers=workers, slots=SLOTS, step_deadline_s=2.0, retries=0),
    )
    store = Store(str(folder / "run"))
    store.write("config.toml", config.to_toml().encode())
    publish_policy(store, config)
    process = start(store)
    try:
        deadline = time.monotonic() + 90
        while not ((registration := registered(store, "environments")) and registration.status == "ready"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield store, process
    finally:
        for left in descendants(process):
            left.kill()
        process.kill()
        process.wait()


def start(store: Store) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "tasks.environments.cluster", "--store", store.uri]
    return subprocess.Popen(argv, env={**os.environ, PARENT: this_process()}, start_new_session=True)


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("dask")
    patch = pytest.MonkeyPatch()
    patch.setenv("ROLLART_HOME", str(folder / "home"))
    with service(folder) as (store, _):
        yield store
    patch.undo()


def specs(count: int, task: str = "frozenlake", wave: int = 0) -> list[EpisodeSpec]:
    return [EpisodeSpec(task, number, wave, number, 0) for number in range(count)]


def run(store: Store, scenario, engine: str = "walker", workers: int = 2):
    """`await scenario(client, pool)` on the run's cluster."""

    async def main():
        client = await connect(store, asynchronous=True)
        job = EpisodeJob(store.uri, engine=f"tests.integration.scripted:{engine}")
        pool = EpisodePool(client, job, Slots(workers * SLOTS))
        try:
            await client.wait_for_workers(workers, timeout=60)
            return await asyncio.wait_for(scenario(client, pool), 60)
        finally:
            await pool.close()
            await client.close()

    return asyncio.run(main())


def test_every_episode_comes_back_once_and_is_the_same_wherever_it_runs(store):
    async def scenario(client, pool):
        pool.submit(specs(100))
        assert pool.in_flight == 100
        results = [result async for result in pool]
        assert pool.in_flight == 0
        return {result.seed: result for result in results}, len(results)

    first, count = run(store, scenario)
    assert count == 100 and sorted(first) == list(range(100))
    assert [result for result in first.values() if isinstance(result, EpisodeFailure)] == []
    again, _ = run(store, scenario)
    assert all(first[seed].tokens.tolist() == again[seed].tokens.tolist() for seed in first)


def test_workers_import_neither_torch_nor_transformers(store):
    def heavy() -> list[str]:
        import sys

        return [
            name for name in ("torch", "transformers", "vllm", "deepspeed", "prefect") if name in sys.modules
        ]

    async def scenario(client, pool):
        pool.submit(specs(20))
        assert len([result async for result in pool]) == 20
        return await client.run(heavy)

    found = run(store, scenario)
    assert len(found) == 2 and not any(found.values())


def test_nobody_without_the_certificate_of_the_run_can_submit(store):
    registration = registered(store, "environments")
    sealed = store.read(layout.access("environments"))
    assert b"PRIVATE KEY" not in sealed
    assert "PRIVATE KEY" in unseal(run_key(store), sealed)["keys"]["tls_client_key"]
    with pytest.raises(UserError):
        unseal("another key", sealed)
    assert registration.address.startswith("tls://127.0.0.1:")
    for security in (Security.temporary(), None):
        address = registration.address if security else registration.address.replace("tls", "tcp")
        with pytest.raises(OSError):
            Client(address, security=security, timeout=2, set_as_default=False).close()


def test_a_killed_worker_costs_a_retry_of_its_episodes_and_nothing_else(store):
    async def scenario(client, pool):
        pool.submit(specs(40))
        await asyncio.sleep(0.5)
        pids = await client.run(os.getpid)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        return [result async for result in pool]

    results = run(store, scenario, "slow_walker")
    assert [result for result in results if isinstance(result, EpisodeFailure)] == []
    assert sorted(result.seed for result in results) == list(range(40))
    assert all(isinstance(result, Trajectory) for result in results)


def test_an_episode_that_kills_its_worker_again_and_again_is_a_recorded_failure(store):
    async def scenario(client, pool):
        pool.submit(specs(1, DEADLY))
        failure = await pool.next()
        pool.submit(specs(10))
        return failure, [result async for result in pool]

    failure, others = run(store, scenario)
    assert isinstance(failure, EpisodeFailure) and failure.stage == "worker" and "died" in failure.reason
    assert len(others) == 10 and all(isinstance(result, Trajectory) for result in others)


def test_cancelled_episodes_give_no_result_and_free_their_slots_at_their_next_turn(store):
    async def scenario(client, pool):
        pool.submit(specs(100, wave=1))
        await asyncio.sleep(0.3)
        await pool.cancel(specs(100, wave=1))
        assert pool.in_flight == 0
        started = time.monotonic()
        pool.submit(specs(2 * SLOTS, wave=2))
        results = [result async for result in pool]
        return results, time.monotonic() - started

    results, seconds = run(store, scenario, "slow_walker")
    assert {result.wave for result in results} == {2} and len(results) == 2 * SLOTS
    assert seconds < 4  # 100 episodes of up to 0.8 s on 16 slots would have taken 5 s more


def test_older_waves_go_first(store):
    async def scenario(client, pool):
        pool.submit(specs(2 * SLOTS, wave=9))  # takes all slots
        await asyncio.sleep(0.1)
        pool.submit(specs(32, wave=5))
        pool.submit(specs(32, wave=3))
        return [result.wave async for result in pool]

    waves = [wave for wave in run(store, scenario, "slow_walker") if wave != 9]
    places = {wave: [place for place, found in enumerate(waves) if found == wave] for wave in (3, 5)}
    assert sum(places[3]) / 32 < sum(places[5]) / 32 - 16


def test_a_worker_full_of_hung_calls_is_replaced_and_the_stream_goes_on(store):
    async def scenario(client, pool):
        before = set((await client.run(os.getpid)).values())
        pool.submit(specs(3 * MAX_ABANDONED, HANGING))
        failures = [result async for result in pool]
        pool.submit(specs(30))
        good = [result async for result in pool]
        await client.wait_for_workers(2, timeout=30)
        return failures, good, before - set((await client.run(os.getpid)).values())

    failures, good, replaced = run(store, scenario)
    assert len(failures) == 3 * MAX_ABANDONED and len(good) == 30
    assert {failure.stage for failure in failures} == {"step"}
    assert all("CallHung" in failure.reason for failure in failures)
    assert all(isinstance(result, Trajectory) for result in good)
    assert replaced


def test_episodes_lost_with_their_scheduler_run_again_on_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path / "home"))
    tries, ensure_connected = [], Client._ensure_connected

    async def noted(client, timeout=None):
        tries.append(timeout)
        await ensure_connected(client, timeout)

    monkeypatch.setattr(Client, "_ensure_connected", noted)
    with service(tmp_path, workers=1) as (store, process):
        again = []

        async def scenario(client, pool):
            pool.submit(specs(40))
            results = [await pool.next() for _ in range(3)]
            process.kill()
            process.wait()
            again.append(start(store))
            return results + [result async for result in pool]

        try:
            results = run(store, scenario, engine="slow_walker", workers=1)
        finally:
            for left in [*descendants(again[0]), psutil.Process(again[0].pid)]:
                left.kill()
            again[0].wait()
    assert sorted(result.seed for result in results) == list(range(40))
    assert not [result for result in results if isinstance(result, EpisodeFailure)]
    assert tries[0] == CONNECT_S and 0 < max(tries[1:]) <= ATTEMPT_S  # soon again, however long it was away


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_service_ends_within_10_s_and_leaves_no_process(tmp_path, monkeypatch, number):
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path / "home"))
    with service(tmp_path, workers=1) as (store, process):

        async def scenario(client, pool):
            pool.submit(specs(4, HANGING))  # hung calls must not hold it
            await asyncio.sleep(1)

        run(store, scenario, workers=1)
        family = descendants(process)
        assert family
        process.send_signal(number)
        process.wait(timeout=10)
        psutil.wait_procs(family, timeout=10)
        assert not [left for left in family if left.is_running() and left.status() != psutil.STATUS_ZOMBIE]
        if number == signal.SIGTERM:
            registration = registered(store, "environments")
            assert process.returncode == 0 and registration.status == "stopped"
