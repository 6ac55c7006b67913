"""Runs on pools: a real Prefect server, four process work pools with a worker each, looked at through the API."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import psutil
import pytest

from tests.e2e.machine import batches, check_consumption, versions
from tests.e2e.site import POOLS, Site
from tests.integration.postgres import postgres

pytestmark = pytest.mark.slow  # a server, four workers and several whole runs

ITERATIONS, GROUPS = 3, 4
# service -> its pool, and what it does for each iteration
SERVICES = {
    "serve-trainer": ("gpu-compute", "train-step-"),
    "serve-engine": ("gpu-bandwidth", "load-v"),
    "serve-environments": ("cpu-env", "rollout-"),
    "serve-reward": ("serverless-reward", "reward-"),
}


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp(f"site-{request.param}")
    if request.param == "sqlite":
        yield from deployed(Site(home))
    else:
        with postgres(home / "postgres") as url:
            yield from deployed(Site(home, url))


def deployed(site: Site) -> Iterator[Site]:
    try:
        site.start_server()
        site.run("flows.cli", "deploy")
        for pool in POOLS:
            site.start_worker(pool)
        yield site
    finally:
        site.end()


@pytest.fixture(scope="module")
def finished(site: Site) -> dict[str, Any]:
    """A run of three iterations, ahead of training by one; its flow run. Another one was started just after it."""
    first = site.train("first", "rollout.max_staleness=1")
    service = site.wait(lambda: site.flow_runs("run:first", "service:engine-0"), "the engine's flow run")[0]
    site.wait(lambda: site.state(service["id"])["type"] == "RUNNING", "the engine on its pool")
    second = site.train("second", "iterations=1", "warm_start.enabled=false")
    assert site.finish(first)["type"] == "COMPLETED", site.said()
    return {"first": site.get(f"/flow_runs/{first}"), "second": second}


def test_the_run_is_whole(site: Site, finished: dict[str, Any]) -> None:
    store = site.store("first")
    assert versions(store)[-1] == ITERATIONS
    check_consumption(store, ITERATIONS, GROUPS, max_staleness=1)


@pytest.mark.parametrize("deployment", SERVICES)
def test_each_service_ran_on_its_pool_and_shows_every_iteration_there(
    site: Site, finished: dict[str, Any], deployment: str
) -> None:
    pool, stage = SERVICES[deployment]
    (host,) = [
        run for run in site.flow_runs("run:first", f"pool:{pool}") if deployed_as(site, run) == deployment
    ]
    assert (host["work_pool_name"], host["state_type"]) == (pool, "COMPLETED")
    tasks = [task for task in site.task_runs(host["id"]) if task["name"].startswith(stage)]
    assert {task["name"] for task in tasks} >= {
        f"{stage}{k:04d}" if stage[-1] == "-" else f"{stage}{k + 1}" for k in range(ITERATIONS)
    }
    for task in tasks:
        assert {f"pool:{pool}", "hardware:cpu"} <= set(task["tags"])


def deployed_as(site: Site, run: dict[str, Any]) -> str | None:
    return run["deployment_id"] and site.get(f"/deployments/{run['deployment_id']}")["name"]


def test_services_and_the_warm_start_are_linked_to_the_run(site: Site, finished: dict[str, Any]) -> None:
    run = finished["first"]["id"]
    direct = site.children(run)
    below = [child for parent in direct for child in site.children(parent["id"])]
    names = {deployed_as(site, child) for child in [*direct, *below]}
    assert names >= {*SERVICES, "warm-start"}


def test_rollout_runs_overlap_iteration_runs_in_time(site: Site, finished: dict[str, Any]) -> None:
    children = site.children(finished["first"]["id"])
    rollouts = [span(run) for run in children if run["name"].startswith("rollout-")]
    iterations = [span(run) for run in children if run["name"].startswith("iteration-")]
    assert len(rollouts) == len(iterations) == ITERATIONS
    assert any(a < d and c < b for (a, b) in rollouts[1:] for (c, d) in iterations[:1])


def span(run: dict[str, Any]) -> tuple[datetime, datetime]:
    return datetime.fromisoformat(run["start_time"]), datetime.fromisoformat(run["end_time"])


def test_tags_and_artifacts_are_there(site: Site, finished: dict[str, Any]) -> None:
    assert {"stage:control", "pool:cpu-env"} <= set(finished["first"]["tags"])
    query = {"artifacts": {"flow_run_id": {"any_": [finished["first"]["id"]]}}}
    assert site.post("/artifacts/filter", query)


def test_the_second_run_waited_for_the_accelerators_and_saw_nothing_of_the_first(
    site: Site, finished: dict[str, Any]
) -> None:
    assert site.finish(finished["second"])["type"] == "COMPLETED"
    (first,) = site.flow_runs("run:first", "service:engine-0")
    (second,) = site.flow_runs("run:second", "service:engine-0")
    started = min(task["start_time"] for task in site.task_runs(second["id"]))
    assert started > first["end_time"]
    assert "waiting for a place on pool gpu-bandwidth" in site.logs(second["id"])
    check_consumption(site.store("second"), 1, GROUPS, max_staleness=0)
    for name in ("rollart-gpu-compute", "rollart-gpu-bandwidth"):
        limit = site.get(f"/v2/concurrency_limits/{name}")
        assert (limit["limit"], limit["active_slots"]) == (1, 0)


def test_deploying_again_changes_nothing(site: Site) -> None:
    assert not re.search(r"^ +(create|update|remove) ", site.run("flows.cli", "deploy"), re.MULTILINE)


# Failures. Each ends with a retry, and with counts that prove what was not done again.


def running(site: Site, name: str, iterations: int = 4) -> str:
    """A run that has trained its first iteration."""
    flow_run = site.train(name, f"iterations={iterations}", "inference.restarts=0", "trainer.restarts=0")
    site.wait(lambda: 1 in versions(site.store(name)), "version 1")
    return flow_run


def host(site: Site, run: str, service: str) -> dict[str, Any]:
    """The newest flow run of a service."""
    return site.flow_runs(f"run:{run}", f"service:{service}")[-1]


def kill(flow_run: dict[str, Any]) -> None:
    """kill -9 of a flow run's process."""
    psutil.Process(int(flow_run["infrastructure_pid"].split(":")[-1])).kill()


def retry(site: Site, flow_run: str) -> None:
    """Once the failed attempt's process has ended: its exit code would be taken for that of the retry (runbook.md)."""
    pid = int(site.get(f"/flow_runs/{flow_run}")["infrastructure_pid"].split(":")[-1])
    site.wait(lambda: not psutil.pid_exists(pid), "end of the failed attempt's process", 60)
    site.run("prefect", "flow-run", "retry", flow_run)


def test_a_killed_trainer_fails_the_run_with_its_reason_and_a_retry_goes_on_there(site: Site) -> None:
    flow_run = running(site, "trainer-killed")
    engine = host(site, "trainer-killed", "engine-0")
    kill(host(site, "trainer-killed", "trainer"))
    state = site.finish(flow_run)
    assert state["type"] == "FAILED"
    assert (
        "service trainer on pool gpu-compute gave up" in state["message"] and "what to do" in state["message"]
    )
    (why,) = site.post("/artifacts/filter", {"artifacts": {"key": {"any_": ["failure-trainer-killed"]}}})
    assert why["flow_run_id"] == flow_run and "service trainer on pool gpu-compute" in why["data"]
    # what ended with it was cancelled
    assert "CRASHED" not in {child["state_type"] for child in site.children(flow_run)}
    before = batches(site.store("trainer-killed"))
    retry(site, flow_run)
    assert site.finish(flow_run)["type"] == "COMPLETED"
    check_consumption(site.store("trainer-killed"), 4, GROUPS, max_staleness=0)
    after = batches(site.store("trainer-killed"))
    assert {k: after[k] for k in before} == before
    assert host(site, "trainer-killed", "engine-0")["id"] == engine["id"]  # alive, so used again
    names = [run["name"] for run in site.children(flow_run) if run["state_type"] == "COMPLETED"]
    assert sorted(name for name in names if name.startswith("iteration-")) == [
        f"iteration-{k:04d}" for k in range(4)
    ]


def test_a_killed_controller_is_retried_with_the_services_that_outlived_it(site: Site) -> None:
    flow_run = running(site, "controller-killed")
    services = {
        name: host(site, "controller-killed", name)["id"] for name in ("engine-0", "trainer", "environments")
    }
    kill(site.get(f"/flow_runs/{flow_run}"))
    assert site.finish(flow_run)["type"] == "CRASHED"
    retry(site, flow_run)
    site.wait(lambda: site.state(flow_run)["type"] == "RUNNING", "the retry")
    assert site.finish(flow_run)["type"] == "COMPLETED"
    check_consumption(site.store("controller-killed"), 4, GROUPS, max_staleness=0)
    assert {name: host(site, "controller-killed", name)["id"] for name in services} == services


def test_a_machine_that_dies_under_the_engine_is_named_and_another_one_takes_its_place(site: Site) -> None:
    flow_run = running(site, "engine-machine")
    trainer = host(site, "engine-machine", "trainer")["id"]
    worker = site.workers.pop("gpu-bandwidth")
    for process in [*worker.children(recursive=True), worker]:  # with it everything that it started
        process.kill()
    worker.wait(60)
    state = site.finish(flow_run)
    assert state["type"] == "FAILED" and "engine-0 on pool gpu-bandwidth" in state["message"]
    before = batches(site.store("engine-machine"))
    site.start_worker("gpu-bandwidth")
    retry(site, flow_run)
    site.wait(lambda: site.state(flow_run)["type"] == "RUNNING", "the retry")
    assert site.finish(flow_run)["type"] == "COMPLETED"
    check_consumption(site.store("engine-machine"), 4, GROUPS, max_staleness=0)
    after = batches(site.store("engine-machine"))
    assert {k: after[k] for k in before} == before
    assert host(site, "engine-machine", "trainer")["id"] == trainer


def test_a_stage_that_raises_is_shown_with_its_reason_and_is_all_that_a_retry_does_again(site: Site) -> None:
    broken = site.home / "broken-reward"
    settings = ["iterations=3", 'tasks.0.reward="tests.e2e.rewards:odd_tokens_unless_broken"']
    flow_run = site.train("stage-raises", *settings)
    site.wait(lambda: 1 in versions(site.store("stage-raises")), "version 1")
    broken.touch()
    state = site.finish(flow_run)
    broken.unlink()
    assert state["type"] == "FAILED" and "RuntimeError: the judge is on strike" in state["message"]
    before = batches(site.store("stage-raises"))
    retry(site, flow_run)
    site.wait(lambda: site.state(flow_run)["type"] == "RUNNING", "the retry")
    assert site.finish(flow_run)["type"] == "COMPLETED"
    check_consumption(site.store("stage-raises"), 3, GROUPS, max_staleness=0)
    after = batches(site.store("stage-raises"))
    assert len(before) < 3 and {k: after[k] for k in before} == before


def test_a_cancelled_run_ends_its_services_and_goes_on_later(site: Site) -> None:
    flow_run = running(site, "cancelled")
    site.set_state(flow_run, type="CANCELLING", name="Cancelling")
    assert site.finish(flow_run)["type"] == "CANCELLED"
    told = "cancelled successfully"  # the worker's own last word, some seconds after the run's
    site.wait(lambda: told in (site.state(flow_run)["message"] or ""), "the worker's word", 120)
    for service in ("engine-0", "trainer", "environments", "reward"):
        assert site.finish(host(site, "cancelled", service)["id"], 60)["type"] == "COMPLETED"
    retry(site, flow_run)
    site.wait(lambda: site.state(flow_run)["type"] == "RUNNING", "the retry")
    assert site.finish(flow_run)["type"] == "COMPLETED"
    check_consumption(site.store("cancelled"), 4, GROUPS, max_staleness=0)


def test_a_paused_run_keeps_its_services_and_goes_on_when_it_is_resumed(site: Site) -> None:
    flow_run = running(site, "paused")
    engine = host(site, "paused", "engine-0")["id"]
    details = {"pause_timeout": "2099-01-01T00:00:00Z", "pause_reschedule": True}
    site.set_state(flow_run, type="PAUSED", name="Suspended", state_details=details)
    site.wait(
        lambda: site.store("paused").read_json("services/controller.json")["status"] == "paused", "the pause"
    )
    time.sleep(100)  # longer than the silence after which a run without heartbeat is taken for dead
    assert site.state(flow_run)["type"] == "PAUSED"
    site.post(f"/flow_runs/{flow_run}/resume", {})
    site.wait(lambda: site.state(flow_run)["type"] == "RUNNING", "the run to go on")
    assert site.finish(flow_run)["type"] == "COMPLETED"
    check_consumption(site.store("paused"), 4, GROUPS, max_staleness=0)
    assert host(site, "paused", "engine-0")["id"] == engine


@pytest.mark.parametrize("service", ["trainer", "engine-0", "controller"])
def test_a_terminate_signal_ends_a_stage_in_order_and_the_run_goes_on(site: Site, service: str) -> None:
    name = f"preempted-{service}"
    flow_run = running(site, name)
    victim = site.get(f"/flow_runs/{flow_run}") if service == "controller" else host(site, name, service)
    psutil.Process(int(victim["infrastructure_pid"].split(":")[-1])).terminate()
    assert site.finish(flow_run)["type"] == "COMPLETED"
    check_consumption(site.store(name), 4, GROUPS, max_staleness=0)
    if service != "controller":
        assert site.state(victim["id"])["name"] == "Preempted"
        assert host(site, name, service)["id"] != victim["id"]


def test_a_wrong_secret_is_named_and_the_right_one_lets_the_retry_through(site: Site) -> None:
    template = site.get("/work_pools/gpu-bandwidth")["base_job_template"]
    wrong = json.loads(json.dumps(template))
    wrong["variables"]["properties"]["env"]["default"]["ROLLART_KEY"] = "wrong"
    site.patch("/work_pools/gpu-bandwidth", {"base_job_template": wrong})
    try:
        flow_run = site.train("wrong-secret", "iterations=1")
        state = site.finish(flow_run)
    finally:
        site.patch("/work_pools/gpu-bandwidth", {"base_job_template": template})
    assert state["type"] == "FAILED"
    assert "engine-0 on pool gpu-bandwidth was started with another ROLLART_KEY" in state["message"]
    refused = host(site, "wrong-secret", "engine-0")["id"]
    retry(site, flow_run)
    site.wait(lambda: site.state(flow_run)["type"] == "RUNNING", "the retry")
    assert site.finish(flow_run)["type"] == "COMPLETED"
    assert host(site, "wrong-secret", "engine-0")["id"] != refused


def end_worker(site: Site, pool: str) -> None:
    worker = site.workers.pop(pool)
    worker.terminate()
    worker.wait(60)


def test_a_pool_without_a_worker_is_named_within_a_minute(site: Site) -> None:
    end_worker(site, "gpu-compute")
    try:
        site.wait(lambda: site.online("gpu-compute") == 0, "the worker to be seen as gone", 180)
        flow_run = site.train("no-worker", "iterations=1")
        site.wait(lambda: site.state(flow_run)["type"] == "RUNNING", "the controller")
        waits = (
            "waits for pool gpu-compute, which has no worker online; start one: rollart worker gpu-compute"
        )
        site.wait(lambda: waits in site.logs(flow_run), "the message", 60)
    finally:
        site.start_worker("gpu-compute")
    assert site.finish(flow_run)["type"] == "COMPLETED"
