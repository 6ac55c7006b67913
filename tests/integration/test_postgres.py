"""Prefect's server on PostgreSQL, as in deployments/compose.yaml, with the work pools of deployments/kubernetes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tasks.services import end_processes, free_port
from tests.integration.postgres import postgres

TEMPLATES = Path(__file__).parents[2] / "deployments/kubernetes"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of the server's clients, while it runs."""
    folder = tmp_path_factory.mktemp("prefect")
    with postgres(folder) as url, (folder / "log").open("w") as log:
        port = free_port()
        client = {"PREFECT_HOME": str(folder), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **client, "PREFECT_API_DATABASE_CONNECTION_URL": url},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            wait_until_healthy(client["PREFECT_API_URL"], process, folder / "log")
            yield client
        finally:
            if process.poll() is None:
                end_processes([psutil.Process(process.pid)], grace_s=20)


def wait_until_healthy(api: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{api}/health", timeout=2).json() is True:
                return
        except (httpx.TransportError, ValueError):
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def test_the_server_keeps_a_kubernetes_work_pool_with_its_template(server: dict[str, str]) -> None:
    template = TEMPLATES / "gpu-compute.json"
    command = ["work-pool", "create", "gpu-compute", "--type", "kubernetes"]
    made = subprocess.run(
        [sys.executable, "-m", "prefect", *command, "--base-job-template", str(template)],
        env={**os.environ, **server}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    pool = httpx.get(f"{server['PREFECT_API_URL']}/work_pools/gpu-compute").raise_for_status().json()
    variables = pool["base_job_template"]["variables"]["properties"]
    assert (pool["type"], variables["gpus"]["default"]) == ("kubernetes", 8)
