"""`prefect deploy` of the `train` flow against a real server and a process work pool, and a run through it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flows.server import start_server
from hardware.pools import local_pools, pool_for
from tasks.services import Supervisor
from tasks.store import Store
from tests.integration.cli import rollart

ROOT = Path(__file__).parents[2]
TINY_RUN = ["--set", "iterations=1", "--set", "warm_start.enabled=false"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server of its own, with the process pool and the deployment; its API URL."""
    home = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(home))
        patch.setenv("PREFECT_API_URL", "")  # start_server sets it; here it is put back afterwards
        supervisor = Supervisor(home / "server")
        try:
            yield start_server(supervisor)
        finally:
            supervisor.stop()


@pytest.fixture(scope="module")
def deployment(api: str) -> dict:
    """The deployment as the API knows it, made by the commands of deployments/prefect.yaml."""
    prefect("work-pool", "create", "control", "--type", "process")
    prefect("--no-prompt", "deploy", "--name", "train", "--prefect-file", "deployments/prefect.yaml")
    return httpx.get(f"{api}/deployments/name/train/train", timeout=30).raise_for_status().json()


def prefect(*arguments: str, timeout: float = 280, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_deploy_registers_the_train_flow_on_the_control_pool(deployment: dict) -> None:
    control = pool_for("control", local_pools())
    assert deployment["entrypoint"] == "flows/train.py:train"
    assert deployment["work_pool_name"] == control.name
    assert set(deployment["tags"]) == {"stage:control", f"pool:{control.name}"}
    assert deployment["parameters"] == {"endpoint_url": None}


def test_the_deployment_runs_from_this_folder_and_asks_for_the_run(deployment: dict) -> None:
    (step,) = deployment["pull_steps"]
    assert step["prefect.deployments.steps.set_working_directory"]["directory"] == str(ROOT)
    assert deployment["parameter_openapi_schema"]["required"] == ["run"]
    url = f"{os.environ['PREFECT_API_URL']}/deployments/{deployment['id']}/create_flow_run"
    assert httpx.post(url, json={"parameters": {}}, timeout=30).status_code == 409  # `run` is missing


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
def test_a_worker_trains_a_prepared_run_to_its_end(api: str, deployment: dict, tmp_path: Path) -> None:
    prepared = rollart("train", "smoke", "--prepare", "--name", "tiny", *TINY_RUN, home=tmp_path, timeout=60)
    command = prepared.out.strip().splitlines()[-1].split()
    assert command[0] == "prefect"
    prefect(*command[1:])
    env = {"ROLLART_HOME": str(tmp_path / "home")}
    prefect("worker", "start", "--pool", "control", "--run-once", timeout=550, env=env)
    store = Store(str(tmp_path / "runs" / "tiny"))
    assert store.read_json("status.json")["status"] == "finished"
    assert store.manifest("weights/1") is not None
    query = {"deployments": {"id": {"any_": [deployment["id"]]}}, "sort": "START_TIME_DESC"}
    newest = httpx.post(f"{api}/flow_runs/filter", json=query, timeout=30).raise_for_status().json()[0]
    assert newest["name"] == "train-tiny" or newest["parameters"]["run"] == store.uri
    assert newest["state_type"] == "COMPLETED"
