"""Stages on their own, with services just for them: a warm start, or the evaluation of one version."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.context import RunContext, named
from flows.evaluate import evaluate
from flows.iteration import publish
from flows.provision import provision
from flows.session import in_session
from flows.warm_start import initial_policy


@flow(name="warm-start-run", flow_run_name=named("warm-start"), persist_result=False)
async def warm_start_run(run: str, endpoint_url: str | None = None) -> Any:
    """Make version 0 of a run and stop there; `train` continues it."""

    async def work(context: RunContext) -> None:
        context.progress.phase = "starting services"
        await provision(run)
        await initial_policy(context)

    return await in_session(run, endpoint_url, work, training=False)


@flow(name="evaluate-run", flow_run_name=named("evaluate"), persist_result=False)
async def evaluate_run(
    run: str,
    version: int,
    endpoint_url: str | None = None,
    episodes: int | None = None,
    temperature: float | None = None,
) -> Any:
    """Evaluate one version of a run that is not running."""

    async def work(context: RunContext) -> dict[str, Any]:
        context.progress.phase = "starting services"
        await provision(run, kinds=("environments", "engine"), pin_version=version)
        await publish(run, version)
        return await evaluate(run, version, episodes, temperature)

    return await in_session(run, endpoint_url, work, training=False)
