"""A place on a pool's accelerators: runs queue for it instead of fighting.

The place is one slot of the global concurrency limit `rollart-<pool>`, which `rollart deploy` creates. It is held by
a lease that has to be renewed, so that it is free again soon after its holder was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import UUID

import httpx
from prefect import get_client

from hardware.pools import Pool

LEASE_S = 60.0  # the shortest that Prefect allows
RENEW_S = 15.0
ASK_S = 2.0


def limit_name(pool: Pool) -> str:
    """The global concurrency limit of a pool."""
    return f"rollart-{pool.name}"


@contextlib.asynccontextmanager
async def accelerator_slot(pool: Pool, waiting: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
    """Hold one place on `pool`; `waiting` is told, once, if it is not to be had at once."""
    name, told = limit_name(pool), False
    async with get_client() as client:
        while True:
            try:
                answer = await client.increment_concurrency_slots_with_lease(
                    [name], 1, "concurrency", LEASE_S
                )
                break
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.LOCKED:
                    raise
            if not told:
                told = True
                await waiting(f"waiting for a place on pool {pool.name}: limit {name} is taken by other runs")
            await asyncio.sleep(ASK_S)
        lease = UUID(answer.json()["lease_id"])
        renewal = asyncio.create_task(_renew(lease))
        try:
            yield
        finally:
            renewal.cancel()
            with contextlib.suppress(httpx.HTTPError):
                await client.release_concurrency_slots_with_lease(lease)


async def _renew(lease: UUID) -> None:
    async with get_client() as client:
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(httpx.HTTPError):  # a server that is away is asked again
                await client.renew_concurrency_lease(lease, LEASE_S)
