"""What `rollart deploy` wants on a Prefect server, as data, and the steps from what stands there to that.

Nothing here talks to a server. A thing's `body` is what the API takes when it is made and what must stand there
afterwards; whatever is not in it (paused, schedules switched on, a limit's active slots) is a person's to change.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from flows.server import CLIENT
from hardware.pools import Pool, pool_for, pool_set
from tasks.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
DEPLOYMENTS = ROOT / "deployments" / "prefect.yaml"
TEMPLATES = ROOT / "deployments" / "kubernetes"

MARK = "Made by rollart deploy."
SECRET = "rollart-key"
CRASHED = "rollart: runs without heartbeat are crashed"
REPORT = "rollart: report a failed run"
HEARTBEAT_S, SILENCE_S = 30, 90  # 30 s is the shortest that Prefect takes; three missed in a row are a death
RESTS = "rollart.flow-run.rests"  # event
# States of flow runs without a process, and the last word of an attempt that is to go on later.
SILENT = ("Completed", "Failed", "Cancelled", "Crashed", "Preempted", "Suspended", "Paused", "AwaitingRetry")
JOB_ENV = {**CLIENT, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S)}
LEAST_QUOTA = 2  # the trainer's host and the warm start; an engine each, where a run has more
HIGH_PRIORITY, DEFAULT_PRIORITY = 1, 10  # teams come between, in the order in which they were made

Kind = Literal["secret", "work pool", "queue", "limit", "flow", "deployment", "automation"]
Action = Literal["create", "update", "unchanged", "remove", "keep"]
Key = tuple[Kind, str]
Made = set[Key]  # what earlier deploys made
Found = dict[str, Any]  # an object as the API gives it

KINDS: tuple[Kind, ...] = get_args(Kind)  # in the order in which they are made

# Others may have made these as well, and they serve any of them.
SHARED: tuple[Kind, ...] = ("secret", "flow")


@dataclass(frozen=True)
class Thing:
    """One object that should stand on the server. A queue is named POOL/QUEUE, a deployment FLOW/DEPLOYMENT."""

    kind: Kind
    name: str
    body: dict[str, Any] = field(default_factory=dict)
    about: str = ""

    @property
    def key(self) -> Key:
        return self.kind, self.name


@dataclass(frozen=True)
class Step:
    """What is to be done about one object; `body` is what is sent, `found` what stands there."""

    kind: Kind
    name: str
    action: Action
    detail: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    found: Found | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.name


# What was asked for


def read_pools(name: str) -> list[Pool]:
    """The pools of `--pools`: a shipped set or a TOML file. Raises UserError."""
    try:
        pools = pool_set(name)
    except (OSError, tomllib.TOMLDecodeError, KeyError, ValidationError) as error:
        reason = (
            "; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors())
            if isinstance(error, ValidationError)
            else f"{type(error).__name__}: {error}"
        )
        raise UserError(
            "--pools",
            f"{name!r} is no set of pools ({reason})",
            "give local, production, or a TOML file with [[pools]] tables like those in hardware/sets",
        ) from None
    names = [pool.work_pool for pool in pools]
    if twice := sorted({pool for pool in names if names.count(pool) > 1}):
        raise UserError(
            "--pools", f"two pools are the work pool {twice[0]!r}", "give each a prefect_work_pool of its own"
        )
    return pools


def read_teams(quotas: Iterable[str]) -> dict[str, int]:
    """`["research=4"]` as `{"research": 4}`: jobs of a team at once, on each pool. Raises UserError."""
    teams = {}
    for quota in quotas:
        name, _, limit = quota.partition("=")
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) or not limit.isdigit() or int(limit) < 1:
            raise UserError("--team", f"{quota!r} is no quota", "give NAME=LIMIT, e.g. --team research=4")
        if name in ("default", "high"):
            raise UserError("--team", f"every pool has the queue {name!r} already", "choose another name")
        if int(limit) < LEAST_QUOTA:
            raise UserError(
                "--team",
                f"{quota!r} is too little for one run, which has {LEAST_QUOTA} jobs on a pool while it warms up",
                f"give {name}={LEAST_QUOTA} or more",
            )
        teams[name] = int(limit)
    return teams


# What should stand


def wanted(pools: list[Pool], teams: dict[str, int], notify: str | None) -> list[Thing]:
    """Everything that should stand, in the order in which it is made. `notify` is the id of a block. Raises UserError."""
    deployed = list(deployments(pools))
    flows = sorted({thing.name.partition("/")[0] for thing in deployed})
    return [
        Thing("secret", SECRET, about="what the services of a run know each other by"),
        *(thing for pool in pools for thing in _of_pool(pool, teams)),
        *(Thing("flow", name, {"name": name}) for name in flows),
        *deployed,
        crashed_automation(pools),
        *([report_automation(notify)] if notify else []),
    ]


def _of_pool(pool: Pool, teams: dict[str, int]) -> Iterable[Thing]:
    jobs = 4 * pool.slots + 4  # against run-aways only: what protects accelerators is the global limit
    yield Thing(
        "work pool",
        pool.work_pool,
        {
            "name": pool.work_pool,
            "type": pool.type,
            "description": f"{pool.role}, {pool.hardware}. {MARK}",
            "concurrency_limit": jobs,
            "base_job_template": job_template(pool),
        },
        f"{pool.type}, {pool.hardware}, at most {jobs} jobs at once",
    )
    yield _queue(pool, "default", f"priority {DEFAULT_PRIORITY}", priority=DEFAULT_PRIORITY)
    yield _queue(pool, "high", "before all others", description=MARK, priority=HIGH_PRIORITY)
    for team, limit in teams.items():
        yield _queue(pool, team, f"at most {limit} at once", description=MARK, concurrency_limit=limit)
    if pool.accelerated:
        name = pool.limit
        yield Thing("limit", name, {"name": name, "limit": pool.slots}, f"{pool.slots} at once on all runs")


def _queue(pool: Pool, name: str, about: str, **body: Any) -> Thing:
    return Thing("queue", f"{pool.work_pool}/{name}", {"name": name, **body}, about)


def job_template(pool: Pool) -> dict[str, Any]:
    """How a worker of the pool starts a job. Raises UserError without a template for a Kubernetes pool."""
    if pool.type == "process":
        return _process_template()
    file = TEMPLATES / f"{pool.name}.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(
            "--pools",
            f"the Kubernetes pool {pool.name!r} has no job template: {file} is not there",
            "write it (start from: prefect work-pool get-default-base-job-template --type kubernetes)",
        ) from None
    except ValueError as error:
        raise UserError(str(file), f"is not JSON ({error})", "correct it") from None


def _process_template() -> dict[str, Any]:
    """Prefect's own, whose jobs tell that they live and know the runs' key."""
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    template["variables"]["properties"]["env"]["default"] = {
        **JOB_ENV,
        "ROLLART_KEY": f"{{{{ prefect.blocks.secret.{SECRET} }}}}",
    }
    return template


def deployments(pools: list[Pool], file: Path = DEPLOYMENTS) -> Iterable[Thing]:
    """The deployments of prefect.yaml, each on the pool of its stage. Raises UserError."""
    import yaml

    for entry in yaml.safe_load(file.read_text())["deployments"]:
        stage = next(tag for tag in entry["tags"] if tag.startswith("stage:"))
        try:
            pool = pool_for(stage.partition(":")[2], pools)
        except LookupError as error:
            raise UserError("--pools", str(error), "add a pool of that role") from None
        yield _deployment(entry, stage, pool)


def _deployment(entry: dict[str, Any], stage: str, pool: Pool) -> Thing:
    from prefect.utilities.callables import parameter_schema

    flow = _flow(entry["entrypoint"])
    return Thing(
        "deployment",
        f"{flow.name}/{entry['name']}",
        {
            "name": entry["name"],
            "entrypoint": entry["entrypoint"],
            "description": f"{entry['description']}\n\n{MARK}",
            "tags": [stage, *pool.prefect_tags],
            "work_pool_name": pool.work_pool,
            "pull_steps": _pull_steps(pool),
            "parameter_openapi_schema": json.loads(
                json.dumps(parameter_schema(flow).model_dump(exclude_unset=True))
            ),
            "enforce_parameter_schema": True,
            "schedules": [_schedule(schedule) for schedule in entry.get("schedules", [])],
        },
        f"on {pool.work_pool}" + "".join(f", schedule {s['slug']}" for s in entry.get("schedules", [])),
    )


def _flow(entrypoint: str) -> Any:
    """The flow of `flows/train.py:train`, imported by its module's name."""
    file, _, function = entrypoint.partition(":")
    try:
        return getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)
    except (ImportError, AttributeError) as error:
        raise UserError(
            str(DEPLOYMENTS), f"the entrypoint {entrypoint} cannot be had ({error})", "correct it"
        ) from None


def _pull_steps(pool: Pool) -> list[dict[str, Any]]:
    """Before a flow is loaded: go to its folder, and see that the machine keeps the pool's promise.

    The second holds as well for a worker that was started with `prefect worker start`, and for a pod.
    """
    here = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
    enter = {"flows.worker.enter": {"pool": pool.model_dump(mode="json")}}
    if pool.type == "kubernetes":
        return [enter]  # which goes to where the image has the package
    return [here, enter] if pool.accelerator or pool.memory_gib or pool.cores else [here]


def _schedule(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "slug": entry["slug"],
        "active": False,  # a person switches it on
        "schedule": {"cron": entry["cron"], "timezone": entry.get("timezone", "UTC"), "day_or": True},
        "parameters": entry.get("parameters", {}),
    }


# Automations


def crashed_automation(pools: list[Pool]) -> Thing:
    """A process that was killed cannot say so: without this its run would be `Running` for ever."""
    ended = [f"prefect.flow-run.{state}" for state in SILENT] + [RESTS]
    message = f"No heartbeat for {SILENCE_S} s: the process, its machine or its way to the server is gone."
    trigger = {
        "type": "event",
        "posture": "Proactive",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {
            "prefect.resource.role": "tag",
            "prefect.resource.id": [f"prefect.tag.pool:{pool.name}" for pool in pools],
        },
        "for_each": ["prefect.resource.id"],
        "after": ["prefect.flow-run.heartbeat"],
        "expect": ["prefect.flow-run.heartbeat", *ended],
        "threshold": 1,
        "within": SILENCE_S,
    }
    action = {"type": "change-flow-run-state", "state": "CRASHED", "name": "Crashed", "message": message}
    return _automation(CRASHED, trigger, action, f"after {SILENCE_S} s without one, on these pools only")


def report_automation(block: str) -> Thing:
    """A message through the notification block `block` (its id) when a training run fails or crashes."""
    trigger = {
        "type": "event",
        "posture": "Reactive",
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": [
            {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.stage:control"},
            {"prefect.resource.role": "flow", "prefect.resource.name": "train"},
        ],
        "for_each": ["prefect.resource.id"],
        "expect": ["prefect.flow-run.Failed", "prefect.flow-run.Crashed"],
        "threshold": 1,
        "within": 0,
    }
    action = {
        "type": "send-notification",
        "block_document_id": block,
        "subject": "rollart: {{ flow_run.name }} {{ flow_run.state.name | lower }}",
        "body": "{{ flow_run.state.message }}\n\n{{ flow_run | ui_url }}\n\n"
        "It goes on from where it stands when it is started again with the same run.",
    }
    return _automation(REPORT, trigger, action, "to the block given with --notify")


def _automation(name: str, trigger: dict[str, Any], action: dict[str, Any], about: str) -> Thing:
    body = {"name": name, "description": MARK, "enabled": True, "trigger": trigger, "actions": [action]}
    return Thing("automation", name, body, about)


# The steps


def steps_to(things: list[Thing], find: Callable[[Kind, str], Found | None], made: Made) -> list[Step]:
    """The steps to what is wanted. Raises UserError for a thing of the same name that somebody else made."""
    return [step_to(thing, find(*thing.key), thing.key in made) for thing in things]


def step_to(thing: Thing, found: Found | None, made: bool) -> Step:
    """The step to one thing, given what stands there, and whether an earlier deploy made it. Raises UserError."""
    if found is None:
        comes_with_its_pool = thing.kind == "queue" and thing.name.endswith("/default")
        return Step(*thing.key, "update" if comes_with_its_pool else "create", thing.about, thing.body)
    if thing.kind in SHARED:
        return Step(*thing.key, "unchanged", thing.about, found=found)
    adopted = _check_ours(thing, found, made)
    changed = differences(thing, found)
    notes = ["made by prefect deploy"] * adopted + ["made more than once"] * bool(found.get("again"))
    if not changed and not notes:
        return Step(*thing.key, "unchanged", thing.about, found=found)
    detail = "; ".join([*notes, *([", ".join(changed)] if changed else [])])
    return Step(*thing.key, "update", detail, {key: thing.body[key] for key in changed}, found)


def _check_ours(thing: Thing, found: Found, made: bool) -> bool:
    """Whether `found` is taken over from `prefect deploy`. Raises UserError if it may not be changed."""
    if thing.kind == "work pool" and found["type"] != thing.body["type"]:
        raise UserError(
            "--pools",
            f"work pool {thing.name!r} exists and is of type {found['type']}, not {thing.body['type']}",
            "remove it first (rollart undeploy, if that made it), or give the pool another prefect_work_pool",
        )
    if made or is_marked(found) or (thing.kind == "queue" and thing.name.endswith("/default")):
        return False
    if thing.kind == "deployment" and found["entrypoint"] == thing.body["entrypoint"]:
        return True
    another = {"queue": "choose another team name", "work pool": "give the pool another prefect_work_pool"}
    raise UserError(
        f"{thing.kind} {thing.name}",
        "exists, and rollart deploy did not make it; nothing was changed",
        f"rename or delete it, or {another[thing.kind]}" if thing.kind in another else "rename or delete it",
    )


def is_marked(found: Found) -> bool:
    """Whether an object's description says that deploy made it."""
    return MARK in (found.get("description") or "")


def differences(thing: Thing, found: Found) -> list[str]:
    """The settings of `thing` that stand otherwise on the server."""
    if thing.kind == "automation":
        return _automation_differences(thing.body, found)
    return [key for key, value in thing.body.items() if not _same(key, value, found.get(key))]


def _same(key: str, value: Any, stands: Any) -> bool:
    if key != "schedules":
        return value == stands
    by_slug = {schedule["slug"]: schedule for schedule in stands or []}
    return all(
        entry["slug"] in by_slug and entry[part] == by_slug[entry["slug"]][part]
        for entry in value
        for part in ("schedule", "parameters")
    )


def _automation_differences(body: dict[str, Any], found: Found) -> list[str]:
    """Through Prefect's own model, which knows the defaults and that the order of events means nothing."""
    from prefect.events.schemas.automations import AutomationCore

    want, stands = AutomationCore.model_validate(body), AutomationCore.model_validate(found)
    keys = ("description", "trigger", "actions")
    return [key for key in keys if getattr(want, key) != getattr(stands, key)]


def merged_schedules(wanted: list[dict[str, Any]], stand: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The wanted schedules, switched on if a person did so, and those that a person added."""
    parts = ("slug", "active", "schedule", "parameters")
    by_slug = {schedule["slug"]: schedule for schedule in stand}
    ours = [{**entry, "active": by_slug.get(entry["slug"], entry).get("active", False)} for entry in wanted]
    slugs = {entry["slug"] for entry in wanted}
    return [*ours, *({p: s.get(p) for p in parts} for s in stand if s["slug"] not in slugs)]
