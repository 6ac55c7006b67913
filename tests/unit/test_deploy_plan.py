"""The plan of `rollart deploy`: what is wanted, and the steps to it from whatever stands on the server."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from flows import deploy_plan
from flows.deploy import show_steps
from flows.deploy_plan import (
    MARK,
    Found,
    Step,
    Thing,
    crashed_automation,
    merged_schedules,
    read_pools,
    read_teams,
    steps_to,
    wanted,
)
from hardware.pools import Pool, local_pools, pool_set
from tasks.errors import UserError

BLOCK = "0b6d6e3e-1a55-4f0b-9c0e-2f5f4f0a7a11"


@pytest.fixture(scope="module")
def things() -> list[Thing]:
    return wanted(local_pools(), {"research": 4}, BLOCK)


def standing(things: list[Thing]) -> dict[tuple[str, str], Found]:
    """What a server gives back once all of it stands."""
    return {thing.key: {"id": thing.name, **copy.deepcopy(thing.body)} for thing in things}


def plan(things: list[Thing], server: dict[Any, Found], made: set[Any] | None = None) -> dict[Any, Step]:
    every = {thing.key for thing in things}
    steps = steps_to(things, lambda *key: server.get(key), every if made is None else made)
    return {step.key: step for step in steps}


def named(things: list[Thing], kind: str, name: str) -> Thing:
    return next(thing for thing in things if thing.key == (kind, name))


# What is wanted


def test_every_pool_has_a_work_pool_and_its_queues(things: list[Thing]) -> None:
    for pool in local_pools():
        body = named(things, "work pool", pool.name).body
        assert (body["type"], body["concurrency_limit"]) == ("process", 4 * pool.slots + 4)
        assert named(things, "queue", f"{pool.name}/high").body["priority"] == 1
        assert named(things, "queue", f"{pool.name}/default").body["priority"] == 10
        assert named(things, "queue", f"{pool.name}/research").body["concurrency_limit"] == 4


def test_only_pools_with_accelerators_have_a_global_limit_of_their_slots(things: list[Thing]) -> None:
    limits = {thing.name: thing.body["limit"] for thing in things if thing.kind == "limit"}
    assert limits == {"rollart-gpu-compute": 1, "rollart-gpu-bandwidth": 1}


def test_jobs_tell_that_they_live_and_know_the_key_by_reference(things: list[Thing]) -> None:
    template = named(things, "work pool", "cpu-env").body["base_job_template"]
    assert template["variables"]["properties"]["env"]["default"] == {
        "PREFECT_CLIENT_MAX_RETRIES": "50",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "ROLLART_KEY": "{{ prefect.blocks.secret.rollart-key }}",
    }


def test_a_deployment_runs_on_the_pool_of_its_stage_and_carries_its_tags(things: list[Thing]) -> None:
    train = named(things, "deployment", "train/train").body
    assert train["tags"] == ["stage:control", "pool:cpu-env", "hardware:cpu"]
    assert (train["work_pool_name"], train["entrypoint"]) == ("cpu-env", "flows/train.py:train")
    (step,) = train["pull_steps"]
    folder = step["prefect.deployments.steps.set_working_directory"]["directory"]
    assert (Path(folder) / "flows" / "train.py").exists()
    assert "config" in train["parameter_openapi_schema"]["properties"]
    assert [(s["slug"], s["active"]) for s in train["schedules"]] == [("nightly", False)]


def test_a_set_with_other_names_gets_the_deployments_on_its_own_pools() -> None:
    renamed = [
        pool.model_copy(update={"name": f"my-{pool.name}", "prefect_work_pool": f"wp-{pool.name}"})
        for pool in local_pools()
    ]
    body = named(wanted(renamed, {}, None), "deployment", "serve-engine/serve-engine").body
    assert body["work_pool_name"] == "wp-gpu-bandwidth"
    assert body["tags"] == ["stage:engine", "pool:my-gpu-bandwidth", "hardware:cpu"]


def test_a_pool_with_a_promise_has_its_jobs_check_the_machine() -> None:
    pools = [
        pool.model_copy(update={"accelerator": "h20", "count": 8}) if pool.role == "rollout" else pool
        for pool in local_pools()
    ]
    found = wanted(pools, {}, None)
    steps = named(found, "deployment", "serve-engine/serve-engine").body["pull_steps"]
    assert [next(iter(step)) for step in steps][-1] == "flows.worker.enter"
    assert steps[-1]["flows.worker.enter"]["pool"]["accelerator"] == "h20"
    json.dumps(steps)
    assert len(named(found, "deployment", "train/train").body["pull_steps"]) == 1


def test_a_run_that_rests_is_not_taken_for_dead(things: list[Thing]) -> None:
    """A paused or a preempted run has no process, and so no heartbeat."""
    expected = named(things, "automation", deploy_plan.CRASHED).body["trigger"]["expect"]
    for last_word in ("prefect.flow-run.Suspended", "prefect.flow-run.AwaitingRetry", deploy_plan.RESTS):
        assert last_word in expected


def test_pods_say_that_they_live_as_often_as_processes_do() -> None:
    """Or the automation that waits for three missed heartbeats would end healthy ones."""
    for pool in pool_set("production"):
        env = deploy_plan.job_template(pool)["variables"]["properties"]["env"]["default"]
        assert env == deploy_plan.JOB_ENV
    within = crashed_automation(pool_set("production")).body["trigger"]["within"]
    assert within >= 3 * int(deploy_plan.JOB_ENV["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])


def test_a_report_is_wanted_only_with_a_block_to_send_it_to() -> None:
    assert not [thing for thing in wanted(local_pools(), {}, None) if thing.name == deploy_plan.REPORT]


def test_silent_runs_are_crashed_on_these_pools_only(things: list[Thing]) -> None:
    trigger = named(things, "automation", deploy_plan.CRASHED).body["trigger"]
    tags = trigger["match_related"]["prefect.resource.id"]
    assert tags == [f"prefect.tag.pool:{pool.name}" for pool in local_pools()]
    assert trigger["within"] == 3 * 30


def test_a_kubernetes_pool_takes_its_template_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(name="gpu-compute", role="train", type="kubernetes")
    monkeypatch.setattr(deploy_plan, "TEMPLATES", tmp_path)
    with pytest.raises(UserError, match=r"gpu-compute.*no job template.*gpu-compute\.json"):
        deploy_plan.job_template(pool)
    (tmp_path / "gpu-compute.json").write_text('{"variables": {}, "job_configuration": {}}')
    assert deploy_plan.job_template(pool) == {"variables": {}, "job_configuration": {}}
    (tmp_path / "gpu-compute.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        deploy_plan.job_template(pool)


# The steps


def test_on_an_empty_server_everything_is_created(things: list[Thing]) -> None:
    steps = plan(things, {}, made=set())
    updates = {name for (_, name), step in steps.items() if step.action == "update"}
    assert updates == {f"{pool.name}/default" for pool in local_pools()}  # a new work pool brings that queue
    assert {step.action for step in steps.values()} == {"create", "update"}
    assert [step.kind for step in steps.values()] == [thing.kind for thing in things]


def test_where_everything_stands_nothing_is_done(things: list[Thing]) -> None:
    assert {step.action for step in plan(things, standing(things)).values()} == {"unchanged"}


def test_what_a_person_switched_is_no_change(things: list[Thing]) -> None:
    server = standing(things)
    server["work pool", "cpu-env"]["is_paused"] = True
    server["queue", "cpu-env/research"]["is_paused"] = True
    server["limit", "rollart-gpu-compute"]["active_slots"] = 1
    server["automation", deploy_plan.CRASHED]["enabled"] = False
    train = server["deployment", "train/train"]
    train["paused"], train["schedules"][0]["active"] = True, True
    train["schedules"].append({"slug": None, "schedule": {"interval": 60}, "parameters": {}, "active": True})
    assert {step.action for step in plan(things, server).values()} == {"unchanged"}


def test_an_automation_is_the_same_in_whatever_order_the_server_gives_its_events(things: list[Thing]) -> None:
    server = standing(things)
    trigger = server["automation", deploy_plan.CRASHED]["trigger"]
    trigger.update(expect=trigger["expect"][::-1], within=90.0, id=BLOCK)
    assert plan(things, server)["automation", deploy_plan.CRASHED].action == "unchanged"


@pytest.mark.parametrize(
    ("kind", "name", "key", "value"),
    [
        ("work pool", "cpu-env", "concurrency_limit", 1),
        ("work pool", "cpu-env", "base_job_template", {}),
        ("queue", "cpu-env/research", "concurrency_limit", 5),
        ("queue", "cpu-env/high", "priority", 3),
        ("limit", "rollart-gpu-compute", "limit", 2),
        ("deployment", "train/train", "tags", []),
        ("deployment", "train/train", "work_pool_name", "gpu-compute"),
        ("deployment", "train/train", "schedules", []),
        ("automation", deploy_plan.CRASHED, "actions", [{"type": "cancel-flow-run"}]),
        ("automation", deploy_plan.REPORT, "description", MARK + " And more."),
    ],
)
def test_what_stands_otherwise_is_updated_and_nothing_else_is_sent(
    things: list[Thing], kind: str, name: str, key: str, value: Any
) -> None:
    server = standing(things)
    server[kind, name][key] = value
    steps = plan(things, server)
    changed = [step for step in steps.values() if step.action != "unchanged"]
    assert [(step.key, step.action, step.detail) for step in changed] == [((kind, name), "update", key)]
    assert changed[0].body == {key: named(things, kind, name).body[key]}


def test_a_schedule_with_another_time_is_set_back_and_stays_switched_on(things: list[Thing]) -> None:
    want = named(things, "deployment", "train/train").body["schedules"]
    stands = [
        {**want[0], "schedule": {"cron": "0 5 * * *", "timezone": "UTC", "day_or": True}, "active": True},
        {"slug": "mine", "schedule": {"interval": 60}, "parameters": {}, "active": True, "id": "x"},
    ]
    server = standing(things)
    server["deployment", "train/train"]["schedules"] = stands
    assert plan(things, server)["deployment", "train/train"].detail == "schedules"
    ours, theirs = merged_schedules(want, stands)
    assert (ours["schedule"]["cron"], ours["active"]) == ("0 2 * * *", True)
    assert theirs == {key: value for key, value in stands[1].items() if key != "id"}


# What others made


@pytest.mark.parametrize(
    ("kind", "name", "fix"),
    [
        ("work pool", "cpu-env", "prefect_work_pool"),
        ("queue", "cpu-env/research", "another team name"),
        ("limit", "rollart-gpu-compute", "rename or delete"),
        ("deployment", "train/train", "rename or delete"),
        ("automation", deploy_plan.CRASHED, "rename or delete"),
    ],
)
def test_a_thing_of_the_same_name_that_others_made_stops_everything(
    things: list[Thing], kind: str, name: str, fix: str
) -> None:
    theirs = {**standing(things)[kind, name], "description": "ours!", "entrypoint": "other.py:train"}
    with pytest.raises(UserError, match=rf"{kind} {name}.*did not make it; nothing was changed\n.*{fix}"):
        plan(things, {(kind, name): theirs}, made=set())


def test_an_interrupted_deploy_knows_its_own_by_the_mark(things: list[Thing]) -> None:
    server = {key: found for key, found in standing(things).items() if MARK in found.get("description", "")}
    assert {key[0] for key in server} == {"work pool", "queue", "deployment", "automation"}
    steps = plan(things, server, made=set())
    assert {steps[key].action for key in server} == {"unchanged"}


def test_an_automation_that_a_lost_answer_had_made_twice_is_made_one_again(things: list[Thing]) -> None:
    server, key = standing(things), ("automation", deploy_plan.CRASHED)
    server[key]["again"] = ["x"]
    step = plan(things, server)[key]
    assert (step.action, step.detail, step.body) == ("update", "made more than once", {})


def test_flows_and_the_key_are_used_whoever_made_them(things: list[Thing]) -> None:
    server = {key: {"id": "x"} for key in standing(things) if key[0] in ("flow", "secret")}
    steps = plan(things, server, made=set())
    assert {steps[key].action for key in server} == {"unchanged"}


def test_what_prefect_deploy_made_is_adopted(things: list[Thing]) -> None:
    key = ("deployment", "train/train")
    theirs = {**standing(things)[key], "description": "Train.", "tags": ["stage:control"]}
    step = plan(things, {key: theirs}, made=set())[key]
    assert (step.action, step.detail) == ("update", "made by prefect deploy; description, tags")


def test_a_work_pool_keeps_its_type(things: list[Thing]) -> None:
    server = standing(things)
    server["work pool", "cpu-env"]["type"] = "kubernetes"
    with pytest.raises(UserError, match=r"'cpu-env' exists and is of type kubernetes, not process"):
        plan(things, server)


# What was asked for


def test_quotas_are_read() -> None:
    assert read_teams(["research=4", "a-1=2"]) == {"research": 4, "a-1": 2}


@pytest.mark.parametrize(
    "quota", ["research", "research=", "research=0", "research=1", "re search=2", "=3", "a=-1", "a=b"]
)
def test_a_wrong_quota_is_refused(quota: str) -> None:
    with pytest.raises(UserError, match="--team"):
        read_teams([quota])


@pytest.mark.parametrize("name", ["default", "high"])
def test_a_team_is_not_called_like_a_queue_that_every_pool_has(name: str) -> None:
    with pytest.raises(UserError, match="already"):
        read_teams([f"{name}=4"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pools = [", "TOMLDecodeError"),
        ("a = 1", "KeyError"),
        ("[[pools]]\nname = 'x'\nrole = 'gpu'\n", "role"),
        ("[[pools]]\nname = 'x'\nrole = 'train'\n" * 2, "two pools are the work pool 'x'"),
    ],
)
def test_a_wrong_set_of_pools_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "pools.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"--pools.*{problem}"):
        read_pools(str(file))


def test_a_set_without_a_role_is_refused() -> None:
    with pytest.raises(UserError, match="no pool has role 'reward'"):
        wanted([pool for pool in local_pools() if pool.role != "reward"], {}, None)


def test_the_printed_plan_has_a_line_for_each_step_and_the_numbers() -> None:
    steps = [
        Step("work pool", "cpu-env", "create", "process"),
        Step("queue", "cpu-env/high", "unchanged"),
        Step("flow", "train", "keep", "used by 3 runs"),
    ]
    assert show_steps(steps, "http://x/api").splitlines() == [
        "Plan for http://x/api",
        "  create     work pool  cpu-env       process",
        "  unchanged  queue      cpu-env/high",
        "  keep       flow       train         used by 3 runs",
        "1 to create, 1 unchanged, 1 to keep",
    ]
