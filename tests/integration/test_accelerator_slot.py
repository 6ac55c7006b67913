"""A place on an accelerator pool, taken on a real Prefect server: who waits, who takes over, and when it is free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import accelerator_slot as module
from flows.accelerator_slot import accelerator_slot
from hardware.pools import local_pools
from tasks.store import Store
from tests.integration.test_deploy import Api, server

POOL = next(pool for pool in local_pools() if pool.accelerated)
SOON_S = 60.0


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with server(tmp_path_factory.mktemp("server")) as api:
        yield api


@pytest.fixture
def first(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "first"))


@pytest.fixture
def second(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "second"))


@contextlib.asynccontextmanager
async def one_place() -> AsyncIterator[PrefectClient]:
    """A pool with a single place."""
    async with get_client() as client:
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=POOL.limit, limit=1))
        try:
            yield client
        finally:
            await client.delete_global_concurrency_limit_by_name(POOL.limit)


async def taken(client: PrefectClient) -> int:
    return (await client.read_global_concurrency_limit_by_name(POOL.limit)).active_slots


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON_S):
        while not await condition():
            await asyncio.sleep(0.1)


async def silent(text: str) -> None:
    raise AssertionError(f"it waited: {text}")


def on(api: Api, check: Callable[[PrefectClient], Awaitable[None]]) -> None:
    async def checked() -> None:
        async with one_place() as client:
            await check(client)

    with temporary_settings({PREFECT_API_URL: api.url}):
        asyncio.run(checked())


def test_a_second_run_says_what_it_waits_for_and_gets_the_place_when_the_first_has_left(
    api: Api, first: Store, second: Store
) -> None:
    async def check(client: PrefectClient) -> None:
        said: list[str] = []
        has = asyncio.Event()

        async def waiting(text: str) -> None:
            said.append(text)

        async def queue() -> None:
            async with accelerator_slot(POOL, second, "engine-0", waiting):
                has.set()

        async with accelerator_slot(POOL, first, "engine-0", silent):
            queued = asyncio.create_task(queue())
            await asyncio.sleep(2 * module.ASK_S + 1)  # long enough for it to ask more than once
            assert not has.is_set() and await taken(client) == 1
            assert len(said) == 1 and POOL.name in said[0] and POOL.limit in said[0]
        await asyncio.wait_for(queued, SOON_S)
        assert has.is_set() and await taken(client) == 0

    on(api, check)


def test_a_lease_that_the_server_lost_is_taken_anew(
    api: Api, first: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.2)

    async def check(client: PrefectClient) -> None:
        async with accelerator_slot(POOL, first, "engine-0", silent):
            lost = module._lease(first, "engine-0")
            assert lost is not None
            await client.release_concurrency_slots_with_lease(lost)

            async def renewed() -> bool:
                return module._lease(first, "engine-0") != lost

            await until(renewed)
            assert await taken(client) == 1
        assert await taken(client) == 0

    on(api, check)


def test_a_service_that_is_started_again_takes_over_the_place_of_its_killed_predecessor(
    api: Api, first: Store
) -> None:
    async def check(client: PrefectClient) -> None:
        assert await module._Place(POOL.limit, first, "engine-0").take(client)  # and never gives it back
        async with accelerator_slot(POOL, first, "engine-0", silent):
            assert await taken(client) == 1
        assert await taken(client) == 0

    on(api, check)


def test_a_service_that_ends_before_its_run_leaves_its_place_to_the_next_one(
    api: Api, first: Store, second: Store
) -> None:
    async def check(client: PrefectClient) -> None:
        for ended in (RuntimeError("it died"), asyncio.CancelledError()):
            with pytest.raises(type(ended)):
                async with accelerator_slot(POOL, first, "engine-0", silent):
                    raise ended
            assert await taken(client) == 1
            assert not await module._Place(POOL.limit, second, "engine-0").take(client)
        async with accelerator_slot(POOL, first, "engine-0", silent):
            pass
        assert await module._Place(POOL.limit, second, "engine-0").take(client)

    on(api, check)


@pytest.mark.slow
def test_a_place_is_kept_while_the_controller_says_so_and_free_soon_after(api: Api, first: Store) -> None:
    async def check(client: PrefectClient) -> None:
        assert await module._Place(POOL.limit, first, "engine-0").take(client)
        for _ in range(6):
            await asyncio.sleep(module.RENEW_S)
            await module.keep_places(first, ["engine-0", "trainer"])  # the trainer never had one
        assert await taken(client) == 1
        await asyncio.sleep(module.LEASE_S)

        async def free() -> bool:
            return await taken(client) == 0

        await until(free)

    on(api, check)
