"""A site of its own for runs on pools: a real Prefect server, a worker for each pool, and its HTTP API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tasks.services import end_processes, free_port
from tasks.store import Store
from tests.e2e.machine import CONFIG, ROOT

POOLS = ("gpu-compute", "gpu-bandwidth", "cpu-env", "serverless-reward")
START_S = 300.0
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Site:
    """Processes of one test module; everything is looked up through the API."""

    def __init__(self, home: Path, database: str | None = None):
        self.home, self.database = home, database
        self.config = home / "tiny.toml"
        self.config.write_text(f"{CONFIG}\n[store]\nroot = {str(home / 'runs')!r}\n")
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.workers: dict[str, psutil.Popen] = {}
        self._processes: list[psutil.Popen] = []
        self._http = httpx.Client(base_url=self.api, timeout=60)

    @property
    def env(self) -> dict[str, str]:
        """The environment of every process: nothing of this shell's S3, Prefect, MLflow and project settings."""
        own = ("AWS_", "PREFECT_", "MLFLOW_", "ROLLART_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        database = {"PREFECT_API_DATABASE_CONNECTION_URL": self.database} if self.database else {}
        return {
            **kept,
            **database,
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "120",
            "PREFECT_API_URL": self.api,
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }

    # processes

    def start_server(self) -> None:
        """Start the server, as `prefect server start` does, and wait for it."""
        self._start("server", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        self.wait(self._healthy, "the Prefect server", START_S)

    def start_worker(self, pool: str, **env: str) -> None:
        """Start the worker of a pool and wait until the server sees it."""
        self.workers[pool] = self._start(f"worker-{pool}", "flows.cli", "worker", pool, env=env)
        self.wait(lambda: self.online(pool), f"a worker of {pool}", START_S)

    def online(self, pool: str) -> int:
        """How many workers of a pool are online."""
        return sum(w["status"] == "ONLINE" for w in self.post(f"/work_pools/{pool}/workers/filter", {}))

    def run(self, *module_and_arguments: str, timeout: float = 300) -> str:
        """Run `python -m ...` to its end, which must be a good one; returns its output."""
        done = subprocess.run(
            [sys.executable, "-m", *module_and_arguments],
            cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def end(self) -> None:
        """End everything that was started here, with what it started."""
        end_processes([p for p in reversed(self._processes) if p.is_running()], grace_s=20)

    def _start(
        self, name: str, *module_and_arguments: str, env: dict[str, str] | None = None
    ) -> psutil.Popen:
        with (self.home / f"{name}.log").open("ab") as log:
            process = psutil.Popen(
                [sys.executable, "-m", *module_and_arguments],
                cwd=ROOT, env={**self.env, **(env or {})}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _healthy(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    # runs

    def train(self, name: str, *settings: str) -> str:
        """Start a run through its deployment, as a person does; returns the id of its flow run."""
        given = json.dumps(list(settings))
        self.run(
            "prefect", "deployment", "run", "train/train", "--param", f"run={name}", "--param", f"config={self.config}",
            "--param", f"settings={given}",
        )  # fmt: skip
        return self.newest_of("train")["id"]

    def store(self, run: str) -> Store:
        return Store(str(self.home / "runs" / run))

    def newest_of(self, deployment: str) -> dict[str, Any]:
        """The newest flow run of a deployment of this name."""
        query = {"deployments": {"name": {"any_": [deployment]}}, "sort": "ID_DESC", "limit": 200}
        return max(self.post("/flow_runs/filter", query), key=lambda run: run["created"])

    def flow_runs(self, *tags: str) -> list[dict[str, Any]]:
        """The flow runs with all these tags, the oldest first."""
        query = {"flow_runs": {"tags": {"all_": list(tags)}}, "limit": 200}
        return sorted(self.post("/flow_runs/filter", query), key=lambda run: run["created"])

    def children(self, flow_run: str) -> list[dict[str, Any]]:
        """The flow runs that this one started, the oldest first."""
        query = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run]}}, "limit": 200}
        return sorted(self.post("/flow_runs/filter", query), key=lambda run: run["created"])

    def task_runs(self, flow_run: str) -> list[dict[str, Any]]:
        """The task runs of a flow run, the oldest first."""
        query = {"task_runs": {"flow_run_id": {"any_": [flow_run]}}, "limit": 200}
        return sorted(self.post("/task_runs/filter", query), key=lambda run: run["created"])

    def logs(self, flow_run: str) -> str:
        """What a flow run logged."""
        query = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "limit": 200, "sort": "TIMESTAMP_DESC"}
        return "\n".join(line["message"] for line in self.post("/logs/filter", query))

    def state(self, flow_run: str) -> dict[str, Any]:
        """The state of a flow run."""
        return self.get(f"/flow_runs/{flow_run}")["state"]

    def finish(self, flow_run: str, timeout: float = 900) -> dict[str, Any]:
        """Wait until a flow run has ended; returns its state."""
        self.wait(lambda: self.state(flow_run)["type"] in FINAL, f"the end of flow run {flow_run}", timeout)
        return self.state(flow_run)

    def set_state(self, flow_run: str, **state: Any) -> None:
        """Set a state as the UI does."""
        self.post(f"/flow_runs/{flow_run}/set_state", {"state": state})

    # HTTP

    def get(self, path: str) -> Any:
        return self._ask("GET", path).json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, body).json()

    def patch(self, path: str, body: dict[str, Any]) -> None:
        self._ask("PATCH", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """As Prefect's clients do: a server on SQLite answers 503 while another transaction writes."""
        for _ in range(40):
            answer = self._http.request(method, path, json=body)
            if answer.status_code != 503:
                break
            time.sleep(0.5)
        return answer.raise_for_status()

    def wait(self, true: Callable[[], Any], what: str, timeout: float = 600) -> Any:
        """Wait for a condition; returns what made it true."""
        until = time.monotonic() + timeout
        while not (found := true()):
            assert time.monotonic() < until, f"no {what} after {timeout:.0f} s; {self.said()}"
            time.sleep(0.3)
        return found

    def said(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.home.glob("*.log")))
