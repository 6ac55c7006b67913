"""`rollart deploy`, `undeploy`, `worker` and `train --prepare` against real Prefect servers, and `prefect deploy` beside."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hardware.pools import local_pools, pool_for
from tasks.services import free_port
from tasks.store import Store
from tests.integration.cli import Outcome, rollart

ROOT = Path(__file__).parents[2]
TINY_RUN = ["--set", "iterations=1", "--set", "warm_start.enabled=false"]
DATABASES = ["sqlite", *(["postgres"] if importlib.util.find_spec("tests.integration.postgres") else [])]
LISTS = (
    "work_pools",
    "work_queues",
    "v2/concurrency_limits",
    "flows",
    "deployments",
    "automations",
    "variables",
    "block_documents",
)
DEPLOYMENTS = {
    "evaluate-run/evaluate",
    "serve-engine/serve-engine",
    "serve-environments/serve-environments",
    "serve-reward/serve-reward",
    "serve-trainer/serve-trainer",
    "train/train",
    "warm-start-run/warm-start",
}


class Api:
    """A Prefect server of its own, and the two command lines against it."""

    def __init__(self, url: str, home: Path):
        self.url, self.home = url, home

    def rollart(self, *arguments: str, **env: str) -> Outcome:
        return rollart(*arguments, home=self.home, env={**self.env, **env}, timeout=240)

    def prefect(self, *arguments: str, timeout: float = 280, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            cwd=ROOT,
            env={**os.environ, **self.env, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def env(self) -> dict[str, str]:
        return {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(self.home / "prefect")}

    def get(self, path: str) -> Any:
        return self._request("GET", path).json()

    def post(self, path: str, body: Any = None) -> Any:
        return self._request("POST", path, body or {}).json()

    def patch(self, path: str, body: Any) -> None:
        self._request("PATCH", path, body)

    def delete(self, path: str) -> None:
        self._request("DELETE", path)

    def _request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """As a client is to: a server on SQLite answers 503 while another transaction writes."""
        for _ in range(20):
            answer = httpx.request(method, f"{self.url}/{path}", json=body, timeout=90)
            if answer.status_code != 503:
                break
            time.sleep(0.5)
        return answer.raise_for_status()

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def everything(self) -> dict[str, Any]:
        """All objects with all their fields, timestamps too. Some lists are sets, whose order means nothing."""
        return {kind: ordered(self.post(f"{kind}/filter")) for kind in LISTS}

    def names(self, kind: str) -> set[str]:
        return {found["name"] for found in self.post(f"{kind}/filter")}

    def deployments(self) -> set[str]:
        flows = {found["id"]: found["name"] for found in self.post("flows/filter")}
        return {f"{flows[found['flow_id']]}/{found['name']}" for found in self.post("deployments/filter")}


def ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: ordered(part) for key, part in value.items()}
    if isinstance(value, list):
        return sorted((ordered(part) for part in value), key=lambda part: json.dumps(part, sort_keys=True))
    return value


def actions(outcome: Outcome) -> set[str]:
    """What a printed plan would do."""
    assert outcome.code == 0, outcome.err
    return {line.split()[0] for line in outcome.out.splitlines() if line.startswith("  ")}


# As `prefect server start`, but for one thing: on SQLite that can wait for its own thread for ever when an automation is
# written (PrefectHQ/prefect issue 23055). What it waits for, its trigger service finds by itself within seconds.
SERVER = """
import sys, uvicorn
from prefect.server.events.models import automations
automations.run_coro_as_sync = lambda coroutine: coroutine.close()
app = "prefect.server.api.server:create_app"
uvicorn.run(app, factory=True, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@contextlib.contextmanager
def server(home: Path, database: str = "sqlite") -> Iterator[Api]:
    with contextlib.ExitStack() as stack:
        port = free_port()
        api = Api(f"http://127.0.0.1:{port}/api", home)
        env = {**os.environ, **api.env, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        if database == "postgres":
            from tests.integration.postgres import postgres

            env["PREFECT_API_DATABASE_CONNECTION_URL"] = stack.enter_context(postgres(home))
        log = stack.enter_context((home / "server.log").open("w"))
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        stack.callback(process.wait, 30)
        stack.callback(process.kill)
        wait(api.answers, 280, f"the server; its log is {log.name}")
        yield api


@pytest.fixture(scope="module")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with server(tmp_path_factory.mktemp("sqlite")) as api:
        yield api


@pytest.fixture
def api(sqlite: Api) -> Iterator[Api]:
    """An empty server; what a test deployed is undeployed, and its runs are deleted with their flows."""
    yield sqlite
    for flow in sqlite.post("flows/filter"):
        sqlite.delete(f"flows/{flow['id']}")
    if sqlite.names("variables"):
        assert sqlite.rollart("undeploy").code == 0
    assert {kind: found for kind in LISTS if (found := sqlite.post(f"{kind}/filter"))} == {}


@pytest.fixture(params=DATABASES)
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    """A server for each database."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite")
    else:
        with server(tmp_path, request.param) as api:
            yield api


# What is made


def test_a_second_deploy_changes_nothing_and_undeploy_leaves_a_server_as_it_was(either: Api) -> None:
    with others(either):
        before = either.everything()
        assert actions(either.rollart("deploy", "--team", "research=4", "--team", "product=2")) == {
            "create",
            "update",
        }
        made = either.everything()
        assert all(made[kind] != before[kind] for kind in LISTS)
        again = either.rollart("deploy", "--team", "research=4", "--team", "product=2")
        assert actions(again) == {"unchanged"}
        assert either.everything() == made
        assert actions(either.rollart("undeploy", "--dry-run")) == {"remove"}
        assert either.everything() == made
        assert actions(either.rollart("undeploy")) == {"remove"}
        assert either.everything() == before


def test_everything_is_there_after_deploy(api: Api) -> None:
    assert actions(api.rollart("deploy", "--dry-run")) == {"create", "update"}
    assert {kind for kind in LISTS if api.post(f"{kind}/filter")} == set()
    done = api.rollart("deploy", "--team", "research=4")
    pools = local_pools()
    for pool in pools:
        stands = api.get(f"work_pools/{pool.name}")
        assert (stands["type"], stands["concurrency_limit"]) == ("process", 4 * pool.slots + 4)
        queues = api.post(f"work_pools/{pool.name}/queues/filter")
        assert {queue["name"]: queue["priority"] for queue in queues} == {
            "high": 1,
            "research": 2,
            "default": 10,
        }
    limits = {found["name"]: found["limit"] for found in api.post("v2/concurrency_limits/filter")}
    assert limits == {"rollart-gpu-compute": 1, "rollart-gpu-bandwidth": 1}
    assert api.deployments() == DEPLOYMENTS
    train = api.get("deployments/name/train/train")
    assert train["work_pool_name"] == pool_for("control", pools).name == "cpu-env"
    assert train["tags"] == ["stage:control", "pool:cpu-env", "hardware:cpu"]
    assert [(schedule["slug"], schedule["active"]) for schedule in train["schedules"]] == [("nightly", False)]
    (step,) = train["pull_steps"]
    assert step["prefect.deployments.steps.set_working_directory"]["directory"] == str(ROOT)
    assert api.names("automations") == {"rollart: runs without heartbeat are crashed"}
    url = f"{api.url}/deployments/{train['id']}/create_flow_run"
    assert httpx.post(url, json={"parameters": {"config": 3}}, timeout=30).status_code == 409
    plan, table = done.out.split("\n\n")
    assert "  create  work pool   cpu-env " in plan
    assert "30 to create, 4 to update" in plan
    row = next(line for line in table.splitlines() if line.startswith("gpu-compute"))
    assert row.split("  ")[-2:] == ["high, research (4 at once), default", "serve-trainer, warm-start"]
    (block,) = api.post("block_documents/filter", {"include_secrets": True})
    assert block["name"] == "rollart-key"
    assert len(block["data"]["value"]) >= 32
    assert block["data"]["value"] not in done.out + done.err


def test_the_production_set_stands_on_kubernetes_pools_whose_jobs_check_their_pod(api: Api) -> None:
    assert api.rollart("deploy", "--pools", "production").code == 0
    assert {found["type"] for found in api.post("work_pools/filter")} == {"kubernetes"}
    engine = api.get("deployments/name/serve-engine/serve-engine")
    assert "hardware:8xh20" in engine["tags"]
    assert [next(iter(step)) for step in engine["pull_steps"]] == ["flows.worker.enter"]
    assert actions(api.rollart("deploy", "--pools", "production")) == {"unchanged"}
    other = api.rollart("deploy")
    assert other.code == 2
    assert "is of type kubernetes, not process" in other.err


def test_what_drifted_is_set_back_and_what_a_person_switched_stays(api: Api) -> None:
    api.rollart("deploy", "--team", "research=4")
    train = api.get("deployments/name/train/train")
    api.patch(f"deployments/{train['id']}", {"tags": ["mine"], "paused": True})
    schedule = train["schedules"][0]["id"]
    api.patch(f"deployments/{train['id']}/schedules/{schedule}", {"active": True})
    api.patch("work_pools/cpu-env", {"concurrency_limit": 1, "is_paused": True})
    api.patch("v2/concurrency_limits/rollart-gpu-compute", {"limit": 9})
    api.patch("work_pools/cpu-env/queues/research", {"is_paused": True})
    done = api.rollart("deploy", "--team", "research=5")
    updates = [line.split() for line in done.out.splitlines() if line.startswith("  update")]
    assert len(updates) == 3 + len(local_pools()), done.out
    train = api.get("deployments/name/train/train")
    assert train["tags"] == ["stage:control", "pool:cpu-env", "hardware:cpu"]
    assert (train["paused"], train["schedules"][0]["active"]) == (True, True)
    pool, queue = api.get("work_pools/cpu-env"), api.get("work_pools/cpu-env/queues/research")
    assert (pool["concurrency_limit"], pool["is_paused"]) == (260, True)
    assert (queue["concurrency_limit"], queue["is_paused"]) == (5, True)
    assert api.get("v2/concurrency_limits/rollart-gpu-compute")["limit"] == 1


# What others made


@contextlib.contextmanager
def others(api: Api) -> Iterator[None]:
    """What somebody else has on the server: one object of every kind."""
    flow = api.post("flows/", {"name": "theirs"})
    api.post("work_pools/", {"name": "theirs", "type": "process"})
    deployment = {"name": "theirs", "flow_id": flow["id"], "work_pool_name": "theirs"}
    api.post("deployments/", deployment)
    api.post("v2/concurrency_limits/", {"name": "theirs", "limit": 3})
    api.post("variables/", {"name": "theirs", "value": 1})
    trigger = {"type": "event", "posture": "Reactive", "expect": ["a.b"], "threshold": 1, "within": 0}
    automation = {"name": "theirs", "trigger": trigger, "actions": [{"type": "do-nothing"}]}
    made = api.post("automations/", automation)
    try:
        yield
    finally:
        for path in (
            f"automations/{made['id']}",
            f"flows/{flow['id']}",
            "work_pools/theirs",
            "v2/concurrency_limits/theirs",
            "variables/name/theirs",
        ):
            api.delete(path)


@pytest.mark.parametrize(
    ("path", "body", "named", "remove"),
    [
        ("work_pools/", {"name": "cpu-env", "type": "process"}, "work pool cpu-env", "work_pools/cpu-env"),
        (
            "v2/concurrency_limits/",
            {"name": "rollart-gpu-compute", "limit": 7},
            "limit rollart-gpu-compute",
            "v2/concurrency_limits/rollart-gpu-compute",
        ),
    ],
)
def test_a_thing_of_the_same_name_stops_deploy_before_anything_is_changed(
    api: Api, path: str, body: dict[str, Any], named: str, remove: str
) -> None:
    api.post(path, body)
    before = api.everything()
    done = api.rollart("deploy")
    assert done.code == 2
    assert f"{named}: exists, and rollart deploy did not make it; nothing was changed" in done.err
    assert api.rollart("undeploy").code == 0
    assert api.everything() == before
    api.delete(remove)


def test_undeploy_keeps_what_others_use_by_now_until_they_do_not(api: Api) -> None:
    api.rollart("deploy")
    api.post("work_pools/cpu-env/queues", {"name": "theirs"})
    flow = api.post("flows/", {"name": "theirs"})
    body = {"name": "theirs", "flow_id": flow["id"], "work_pool_name": "gpu-compute"}
    api.post("deployments/", body)
    run = api.post(f"deployments/{api.get('deployments/name/train/train')['id']}/create_flow_run")
    state = {"type": "FAILED", "message": "a test"}
    api.post(f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    kept = [
        line.split(maxsplit=1)[1]
        for line in api.rollart("undeploy").out.splitlines()
        if line.startswith("  keep")
    ]
    assert [" ".join(line.split()) for line in kept] == [
        "flow train used by 1 runs",
        "work pool cpu-env used by queue theirs",
        "work pool gpu-compute used by deployment theirs",
    ]
    assert api.names("work_pools") == {"cpu-env", "gpu-compute"}
    assert api.get(f"flow_runs/{run['id']}")["state_type"] == "FAILED"
    api.delete(f"flows/{flow['id']}")
    api.delete("work_pools/cpu-env/queues/theirs")
    assert actions(api.rollart("undeploy")) == {"remove"}


def test_only_the_pools_of_a_set_are_removed_and_what_all_share_goes_last(api: Api, tmp_path: Path) -> None:
    api.rollart("deploy")
    rewards = tmp_path / "rewards.toml"
    rewards.write_text("[[pools]]\nname = 'serverless-reward'\nrole = 'reward'\n")
    assert actions(api.rollart("undeploy", "--pools", str(rewards))) == {"remove"}
    assert api.names("work_pools") == {"gpu-compute", "gpu-bandwidth", "cpu-env"}
    assert api.deployments() == DEPLOYMENTS - {"serve-reward/serve-reward"}
    assert api.names("block_documents") == {"rollart-key"}
    assert actions(api.rollart("undeploy", "--pools", "local")) == {"remove"}


def test_an_automation_made_twice_by_a_lost_answer_is_one_again_and_then_none(api: Api) -> None:
    api.rollart("deploy")
    (made,) = api.post("automations/filter")
    parts = ("name", "description", "trigger", "actions")
    api.post("automations/", {part: made[part] for part in parts})
    assert "made more than once" in api.rollart("deploy").out
    assert len(api.post("automations/filter")) == 1
    api.post("automations/", {part: made[part] for part in parts})
    api.rollart("undeploy")
    assert api.post("automations/filter") == []


def test_prefect_deploy_works_on_pools_that_exist_and_deploy_takes_its_deployments_over(api: Api) -> None:
    api.rollart("deploy")
    api.prefect("--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    assert api.deployments() == DEPLOYMENTS
    assert "Made by" not in api.get("deployments/name/train/train")["description"]
    updates = [
        " ".join(line.split()[3:])
        for line in api.rollart("deploy").out.splitlines()
        if line.startswith("  update")
    ]
    assert updates == ["description, tags"] * len(DEPLOYMENTS)
    assert actions(api.rollart("deploy")) == {"unchanged"}


# Notifications


def test_a_failed_training_run_is_reported_to_the_block_and_others_are_not(api: Api) -> None:
    with webhook() as (url, received):
        block = made_block(api, url)
        try:
            assert actions(api.rollart("deploy", "--notify", "custom-webhook/ops")) == {"create", "update"}
            assert actions(api.rollart("deploy", "--notify", "custom-webhook/ops")) == {"unchanged"}
            for wrong, problem in {
                "custom-webhook/nope": "has no block",
                "ops": "has no block",
                "secret/rollart-key": "is no notification block",
            }.items():
                assert problem in api.rollart("deploy", "--notify", wrong).err
            engine = fail(api, "serve-engine/serve-engine", {"run": "r", "name": "engine-0"})
            train = fail(api, "train/train", {"config": "smoke"})
            wait(lambda: received, 30, "a notification")
            time.sleep(3)
            assert [train["name"] in text and "the disk is full" in text for text in received] == [True]
            assert engine["name"] not in received[0]
        finally:
            api.delete(f"block_documents/{block}")


def made_block(api: Api, url: str) -> str:
    kind = api.get("block_types/slug/custom-webhook")
    filters = {"block_schemas": {"block_type_id": {"any_": [kind["id"]]}}}
    schema = api.post("block_schemas/filter", filters)[0]
    data = {"name": "ops", "url": url, "method": "POST", "json_data": {"text": "{{subject}} {{body}}"}}
    body = {"name": "ops", "data": data, "block_type_id": kind["id"], "block_schema_id": schema["id"]}
    return api.post("block_documents/", body)["id"]


def fail(api: Api, deployment: str, parameters: dict[str, Any]) -> Any:
    """A run of a deployment, and its failure as the engine would tell it."""
    found = api.get(f"deployments/name/{deployment}")
    run = api.post(f"deployments/{found['id']}/create_flow_run", {"parameters": parameters})
    state = {"type": "FAILED", "message": "the disk is full"}
    api.post(f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return run


@contextlib.contextmanager
def webhook() -> Iterator[tuple[str, list[str]]]:
    """A URL that takes messages, and those that it got."""
    received: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}/", received
        listener.shutdown()


def wait(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.3)


# Bad input


@pytest.mark.parametrize("command", [["deploy"], ["undeploy"], ["worker", "cpu-env"]])
def test_without_a_server_that_stays_the_message_says_how_to_have_one(
    tmp_path: Path, command: list[str]
) -> None:
    done = rollart(*command, home=tmp_path)
    assert done.code == 2
    assert "PREFECT_API_URL" in done.err
    assert "prefect server start" in done.err


@pytest.mark.parametrize("command", [["deploy"], ["undeploy"], ["worker", "cpu-env"]])
def test_a_server_that_does_not_answer_is_named_within_seconds(tmp_path: Path, command: list[str]) -> None:
    url = "http://127.0.0.1:9/api"
    done = rollart(*command, home=tmp_path, env={"PREFECT_API_URL": url})
    assert done.code == 2
    assert f"nothing answers at {url}" in done.err
    assert done.seconds < 12


# Workers


def test_a_worker_is_refused_on_a_machine_without_what_its_pool_says(tmp_path: Path) -> None:
    done = rollart("worker", "gpu-compute", "--pools", "production", "--check", home=tmp_path)
    assert done.code == 2
    assert "8 x H800 with 80 GiB, but it has" in done.err
    assert done.left == []


def test_a_worker_is_welcome_on_a_machine_with_what_its_pool_says(tmp_path: Path) -> None:
    driver, pools = tmp_path / "bin" / "nvidia-smi", tmp_path / "pools.toml"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\nfor i in 1 2; do echo 'NVIDIA H20, 97871 MiB'; done\n")
    driver.chmod(0o755)
    text = "[[pools]]\nname = 'gpus'\nrole = 'rollout'\naccelerator = 'h20'\ncount = %d\n"
    env = {"PATH": f"{driver.parent}{os.pathsep}{os.environ['PATH']}"}
    check = ["worker", "gpus", "--pools", str(pools), "--check"]
    pools.write_text(text % 2)
    done = rollart(*check, home=tmp_path, env=env)
    assert done.code == 0, done.err
    assert "2 x NVIDIA H20" in done.out
    pools.write_text(text % 3)
    done = rollart(*check, home=tmp_path, env=env)
    assert done.code == 2
    assert "3 x H20 with 96 GiB, but it has 2 x NVIDIA H20 (96 GiB)" in done.err


def test_a_worker_of_a_pool_that_the_server_does_not_have_is_told_to_deploy(api: Api, tmp_path: Path) -> None:
    pools = tmp_path / "pools.toml"
    pools.write_text("[[pools]]\nname = 'new'\nrole = 'environment'\n")
    done = api.rollart("worker", "new", "--pools", str(pools))
    assert done.code == 2
    assert "has no work pool 'new'" in done.err
    assert "rollart deploy" in done.err


PROBE = """
import os, time
from pathlib import Path
from prefect import flow

@flow
def probe(folder: str) -> None:
    key = os.environ["ROLLART_KEY"]
    Path(folder, "started").write_text(f"{os.getpid()} {len(key)} {key[:2]}")
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_run_is_crashed_and_one_of_another_pool_is_not_touched(api: Api, tmp_path: Path) -> None:
    """The worker hands the key to its jobs, which tell that they live; both are killed, and nobody can say so."""
    api.rollart("deploy")
    (tmp_path / "probe.py").write_text(PROBE)
    started = tmp_path / "started"
    run, other = (probe_run(api, tmp_path, tag) for tag in ("pool:cpu-env", "pool:theirs"))
    worker = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "worker", "cpu-env", "--name", "test"],
        cwd=tmp_path,
        env={**os.environ, **api.env, "PYTHONPATH": str(ROOT)},
        stdout=(tmp_path / "worker.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        wait(
            lambda: all(state(api, each) == "RUNNING" for each in (run, other)),
            120,
            "two running probes",
        )
        wait(started.exists, 30, "a probe's word")
        assert int(started.read_text().split()[1]) >= 32
        table = api.rollart("deploy").out
        assert next(line for line in table.splitlines() if line.startswith("cpu-env")).split()[5] == "1"
        time.sleep(5)  # the first heartbeat is on its way
    finally:
        for process in [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]:
            process.kill()
        worker.wait()
    wait(lambda: state(api, run) == "CRASHED", 180, "the killed run to be marked as crashed")
    assert "No heartbeat for 90 s" in api.get(f"flow_runs/{run}")["state"]["message"]
    assert state(api, other) == "RUNNING"


def probe_run(api: Api, folder: Path, tag: str) -> str:
    """A scheduled run of the probe on pool cpu-env, with `tag`."""
    flow = api.post("flows/", {"name": "probe"})
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(folder)}}
    deployment = api.post(
        "deployments/",
        {
            "name": tag.replace(":", "-"),
            "flow_id": flow["id"],
            "work_pool_name": "cpu-env",
            "entrypoint": "probe.py:probe",
            "pull_steps": [step],
            "parameters": {"folder": str(folder)},
            "tags": [tag],
        },
    )
    return api.post(f"deployments/{deployment['id']}/create_flow_run")["id"]


def state(api: Api, run: str) -> str:
    return api.get(f"flow_runs/{run}")["state_type"]


# A prepared run


def test_prepare_writes_the_configuration_starts_nothing_and_prints_the_command(tmp_path: Path) -> None:
    outcome = rollart("train", "smoke", "--prepare", "--name", "prepared", home=tmp_path, timeout=60)
    assert outcome.code == 0, outcome.err
    store = Store(str(tmp_path / "runs" / "prepared"))
    assert store.names("") == ["config.toml"]
    assert f"prefect deployment run train/train --param run={store.uri}\n" in outcome.out
    assert outcome.left == []
    again = rollart("train", "smoke", "--prepare", "--name", "prepared", home=tmp_path, timeout=60)
    assert again.code == 2
    assert "exists" in again.err


def test_prepare_of_a_wrong_configuration_writes_nothing(tmp_path: Path) -> None:
    outcome = rollart(
        "train",
        "smoke",
        "--prepare",
        "--set",
        "tasks.0.name=frozenlaek",
        "--name",
        "x",
        home=tmp_path,
        timeout=60,
    )
    assert outcome.code == 2
    assert "frozenlake" in outcome.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_worker_trains_a_prepared_run_to_its_end(api: Api, tmp_path: Path) -> None:
    prepared = rollart("train", "smoke", "--prepare", "--name", "tiny", *TINY_RUN, home=tmp_path, timeout=60)
    api.rollart("deploy")
    command = prepared.out.strip().splitlines()[-1].split()
    assert command[0] == "prefect"
    api.prefect(*command[1:])
    env = {"ROLLART_HOME": str(tmp_path / "home")}
    api.prefect("worker", "start", "--pool", "cpu-env", "--run-once", timeout=550, env=env)
    store = Store(str(tmp_path / "runs" / "tiny"))
    assert store.read_json("status.json")["status"] == "finished"
    assert store.manifest("weights/1") is not None
    train = api.get("deployments/name/train/train")
    query = {"deployments": {"id": {"any_": [train["id"]]}}, "sort": "START_TIME_DESC"}
    newest = api.post("flow_runs/filter", query)[0]
    assert newest["name"] == "train-tiny" or newest["parameters"]["run"] == store.uri
    assert newest["state_type"] == "COMPLETED"
