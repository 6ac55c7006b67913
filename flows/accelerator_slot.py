"""A place on a pool's accelerators: runs queue for it instead of fighting.

The place is one slot of the global concurrency limit `rollart-<pool>`, which `rollart deploy` creates. It is held by
a lease that has to be renewed, and belongs to a service of a run rather than to a process: its id is in the store, and
the service's flow renews it as well as the run's controller, so that a service that died is started again on the same
place. It is given back when the service has ended with its run, and runs out soon after flow and controller are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
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
    """Hold one place on `pool` for a service of a run; `waiting` is told, once, if it is not to be had at once.

    What ends with an error, or is cancelled, leaves its place to the next flow of the same service.
    """
    place, told = _Place(pool.limit, store, service), False
    async with get_client() as client:
        while not await place.take(client):
            if not told:
                told = True
                await waiting(f"{WAITING} on pool {pool.name}: limit {pool.limit} is taken by other runs")
            await asyncio.sleep(ASK_S)
        renewal = asyncio.create_task(place.renew(client))
        try:
            yield
        finally:
            renewal.cancel()
        await place.give_back(client)


async def keep_places(store: Store, services: Iterable[str]) -> None:
    """Renew the leases of services that may not be able to, as the run's controller; no error if there are none."""
    async with get_client() as client:
        for service in services:
            lease = await asyncio.to_thread(_lease, store, service)
            if lease is not None:
                with contextlib.suppress(httpx.HTTPError):  # given back, or the server is away
                    await client.renew_concurrency_lease(lease, LEASE_S)


class _Place:
    """One slot of the limit `name`, by its lease; a lease that the server lost is taken anew."""

    def __init__(self, name: str, store: Store, service: str):
        self.name, self.store, self.service = name, store, service
        self.lease: UUID | None = None

    async def take(self, client: PrefectClient) -> bool:
        """Take over the place of an earlier flow of this service, or a free one; false if there is none."""
        self.lease = await asyncio.to_thread(_lease, self.store, self.service)
        if self.lease is not None and await self._renewed(client):
            return True
        try:
            answer = await client.increment_concurrency_slots_with_lease(
                [self.name], 1, "concurrency", LEASE_S
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.LOCKED:
                return False
            raise
        self.lease = UUID(answer.json()["lease_id"])
        await asyncio.to_thread(self.store.write_json, layout.lease(self.service), {"lease": str(self.lease)})
        return True

    async def renew(self, client: PrefectClient) -> None:
        """Renew the lease until cancelled; a server that is away is asked again."""
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(httpx.HTTPError, OSError):
                if not await self._renewed(client):
                    await self.take(client)

    async def give_back(self, client: PrefectClient) -> None:
        """Free the place. A server that is away frees it when the lease has run out."""
        assert self.lease is not None
        with contextlib.suppress(httpx.HTTPError):
            await client.release_concurrency_slots_with_lease(self.lease)

    async def _renewed(self, client: PrefectClient) -> bool:
        """Renew the lease; false if the server does not know it any more."""
        assert self.lease is not None
        try:
            await client.renew_concurrency_lease(self.lease, LEASE_S)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.GONE:
                return False
            raise
        return True


def _lease(store: Store, service: str) -> UUID | None:
    """What the newest flow of this service took."""
    try:
        return UUID(store.read_json(layout.lease(service))["lease"])
    except FileNotFoundError:
        return None
