"""A place on a pool's accelerators: runs queue for it instead of fighting.

The place is one slot of the global concurrency limit `rollart-<pool>`, which `rollart deploy` creates. It is held by
a lease that has to be renewed, so that it is free again soon after its holder was killed; at once, if the same service
of the same run is started again, which finds the lease of its predecessor in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import PrefectClient

from hardware.pools import Pool
from tasks.store import Store, layout

LEASE_S = 60.0  # the shortest that Prefect allows
RENEW_S = 15.0
ASK_S = 2.0
WAITING = "waiting for a place"  # how the registration of a service begins that has none yet


@contextlib.asynccontextmanager
async def accelerator_slot(
    pool: Pool, store: Store, service: str, waiting: Callable[[str], Awaitable[None]]
) -> AsyncIterator[None]:
    """Hold one place on `pool` for a service of a run; `waiting` is told, once, if it is not to be had at once."""
    held, told = _Held(pool.limit, store, service), False
    async with get_client() as client:
        await _release(client, await asyncio.to_thread(_kept_lease, store, service))
        while True:
            try:
                await held.take(client)
                break
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.LOCKED:
                    raise
            if not told:
                told = True
                await waiting(f"{WAITING} on pool {pool.name}: limit {pool.limit} is taken by other runs")
            await asyncio.sleep(ASK_S)
        renewal = asyncio.create_task(held.renew())
        try:
            yield
        finally:
            renewal.cancel()
            await _release(client, held.lease)


class _Held:
    """A lease that is renewed; one that was lost (the server restarted, or was away for too long) is taken anew."""

    def __init__(self, name: str, store: Store, service: str):
        self.name, self.store, self.service = name, store, service
        self.lease: UUID | None = None

    async def take(self, client: PrefectClient) -> None:
        """Take a place, and keep its lease in the store. Raises httpx.HTTPStatusError, LOCKED if none is free."""
        answer = await client.increment_concurrency_slots_with_lease([self.name], 1, "concurrency", LEASE_S)
        self.lease = UUID(answer.json()["lease_id"])
        await asyncio.to_thread(self.store.write_json, layout.lease(self.service), {"lease": str(self.lease)})

    async def renew(self) -> None:
        """Renew the lease until cancelled; a server that is away is asked again."""
        async with get_client() as client:
            while True:
                await asyncio.sleep(RENEW_S)
                with contextlib.suppress(httpx.HTTPError, OSError):
                    try:
                        assert self.lease is not None
                        await client.renew_concurrency_lease(self.lease, LEASE_S)
                    except httpx.HTTPStatusError as error:
                        if error.response.status_code != httpx.codes.GONE:
                            raise
                        await self.take(client)


def _kept_lease(store: Store, service: str) -> UUID | None:
    """What an earlier process of this service held; it has ended, or this one would not have been started."""
    try:
        return UUID(store.read_json(layout.lease(service))["lease"])
    except FileNotFoundError:
        return None


async def _release(client: PrefectClient, lease: UUID | None) -> None:
    if lease is not None:
        with contextlib.suppress(httpx.HTTPError):  # it has run out, or the server is away and it will
            await client.release_concurrency_slots_with_lease(lease)
