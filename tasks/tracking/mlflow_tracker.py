"""MLflow: one MLflow run per training run, fed from a spool so that MLflow can never slow or fail the run.

Invariants: a logging call only appends a line to a local file; MLflow is imported and spoken to in daemon
threads alone; what MLflow has not taken when the run ends waits in the run's work folder for the next `Tracker`
of that run or for `flush_spool`. Of two values for one metric and step the first stands, whoever sent it: the
steps that MLflow already has are asked of MLflow itself, so neither a restart nor a lost answer doubles a point.
Metrics and files have a spool each: an artifact store that is down does not hold up the metrics.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tasks.config import RunConfig
from tasks.services import PARENT, home, this_process, work_folder
from tasks.store import Store
from tasks.tracking.spool import Item, Spool, logger, redact

RUN_TAG = "rollart.run"
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

# A blocked server must not hold a thread for MLflow's default of 120 s a request and 7 retries: the spool retries.
_MLFLOW_ENV = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
}
_REGISTRATION_ENV = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "600", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
REGISTRATION_DEADLINE_S = 900.0
REGISTRATIONS_TRIED = 2
_PARAMS_AT_ONCE, _METRICS_AT_ONCE, _LONGEST_PARAM = 100, 1000, 6000


class Tracker:
    """Logs one training run to MLflow. Every method but `close` returns within a fraction of a millisecond."""

    def __init__(self, config: RunConfig, run_name: str, store: Store):
        self.config, self.run_name, self.store = config, run_name, store
        self.uri = tracking_uri(config)
        self.folder = work_folder(store) / "mlflow"
        self.metrics = Spool(self.folder, "metrics", self._send_records)
        self.files = Spool(self.folder, "files", self._send_files)
        self._run = _Run(self.uri, config.tracking.experiment, run_name, store.uri)
        self._started = False
        self._failed_registrations = 0

    # what the run calls

    def start(self) -> None:
        """Log the configuration and start to send; a resumed run goes on with its MLflow run."""
        self.metrics.append({"status": "RUNNING", "time": _now_ms()})
        self.log_params(flatten(self.config.model_dump(mode="json")))
        self.log_artifact_bytes("config.toml", self.config.to_toml().encode())
        self._start()

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers under their stable names at an iteration; a (name, step) that MLflow has is kept as it is."""
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        self.metrics.append({"metrics": numbers, "step": int(step), "time": _now_ms()})

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log parameters; credentials inside URIs are masked. A value that MLflow already has stands."""
        self.metrics.append({"params": {name: _param(value) for name, value in values.items()}})

    def log_artifact_bytes(self, path: str, data: bytes) -> None:
        """Log a file; logged again, the newest content wins."""
        target = self._kept(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{threading.get_ident()}")
        part.write_bytes(redact(data.decode()).encode() if path.endswith(".toml") else data)
        os.replace(part, target)
        self.files.append({"artifact": path})

    def log_table(self, path: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Log a table that MLflow's evaluation view shows; `path` ends in `.json`."""
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        self.log_artifact_bytes(path, json.dumps(table, default=str).encode())
        self.files.append({"table": path})

    def register_model(self, version: int, name: str) -> None:
        """Register the policy of `version` under `name` in the model registry, in a process of its own."""
        self.files.append({"register": int(version), "name": name})

    def close(self, deadline_s: float | None = None, status: RunStatus = "FINISHED") -> bool:
        """Send what is left for at most `deadline_s` (default: the configuration's); returns whether all went."""
        self.metrics.append({"status": status, "time": _now_ms()})
        return self._close(self.config.tracking.flush_deadline_s if deadline_s is None else deadline_s)

    # what a person is shown

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, once MLflow has answered."""
        return self._run.id

    @property
    def url(self) -> str | None:
        """A link to the run, if MLflow is a server and has answered."""
        if not self.uri.startswith("http") or self._run.id is None:
            return None
        return f"{redact(self.uri).rstrip('/')}/#/experiments/{self._run.experiment_id}/runs/{self._run.id}"

    @property
    def ui_command(self) -> str:
        """The command that opens the MLflow UI on what was logged, or the address where it is open already."""
        uri = redact(self.uri)
        return uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"

    # how

    def _start(self) -> None:
        self._started = True
        self.metrics.start()
        self.files.start()

    def _close(self, deadline_s: float) -> bool:
        if not self._started:
            self._start()
        until = time.monotonic() + deadline_s
        self.files.closing.set()  # both at once: they share the deadline
        sent = self.metrics.close(deadline_s)
        if not self.files.close(max(0.0, until - time.monotonic())):
            return False
        shutil.rmtree(self.folder / "artifacts", ignore_errors=True)
        return sent

    def _kept(self, path: str) -> Path:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"artifact path {path!r} must be relative and stay below the run")
        return self.folder / "artifacts" / path

    def _send_records(self, items: Sequence[Item]) -> None:
        for params in _merge(item["params"] for item in items if "params" in item):
            self._run.log_params(params)
        points = [
            (name, value, item["time"], item["step"])
            for item in items
            if "metrics" in item
            for name, value in item["metrics"].items()
        ]
        self._run.log_points(points)
        for item in [item for item in items if "status" in item][-1:]:
            self._run.set_status(item["status"], item["time"])

    def _send_files(self, items: Sequence[Item]) -> None:
        last = {json.dumps(item, sort_keys=True): item for item in items}  # a file logged twice is sent once
        for item in last.values():
            if "artifact" in item:
                path = item["artifact"]
                self._run.log_file(self._kept(path), str(Path(path).parent))
            elif "table" in item:
                self._run.mark_table(item["table"])
            else:
                self._register(item["register"], item["name"])

    def _register(self, version: int, name: str) -> None:
        command = [sys.executable, "-m", "tasks.training.register", "--store", self.store.uri]
        command += [
            "--version",
            str(version),
            "--tracking-uri",
            self.uri,
            "--run-id",
            self._run.find(),
            "--name",
            name,
        ]
        env = {**os.environ, **_REGISTRATION_ENV, PARENT: this_process()}
        if self.store.endpoint_url:
            command += ["--endpoint-url", self.store.endpoint_url]
        with (self.folder / "register.log").open("w+b") as log:
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            until = time.monotonic() + REGISTRATION_DEADLINE_S
            while process.poll() is None and not self.files.stopped.wait(0.1) and time.monotonic() < until:
                pass
            if process.poll() is None:
                process.kill()
            code = process.wait()
        if code == 0:
            return
        self._failed_registrations += 1
        said = f"registering version {version} as {name!r} failed; see {self.folder}/register.log"
        if self.files.stopped.is_set() or self._failed_registrations < REGISTRATIONS_TRIED:
            raise RuntimeError(said)  # again later
        logger.warning(said)  # MLflow has answered, so another try would end the same way


class _Run:
    """The MLflow side: finds or creates the run, and sends to it. Only the spools' threads call it.

    MLflow is imported first inside `find`, under its lock: two threads that import it at once fail on its cycles.
    """

    def __init__(self, uri: str, experiment: str, run_name: str, tag: str):
        self.uri, self.experiment, self.run_name, self.tag = uri, experiment, run_name, tag
        self.id: str | None = None
        self.experiment_id = ""
        self._lock = threading.Lock()
        self._client: Any = None
        self._steps: dict[str, set[int]] = {}  # the steps that MLflow has of each metric
        self._all_known = False  # whether a metric that is not in _steps has none

    def find(self) -> str:
        """The run's id: found by its tag, else created."""
        with self._lock:
            if self.id is None:
                client = self.client()
                self.experiment_id = self._find_experiment()
                quoted = self.tag.replace('"', "")
                found = client.search_runs(
                    [self.experiment_id], filter_string=f'tags.`{RUN_TAG}` = "{quoted}"'
                )
                if found:
                    self.id = found[0].info.run_id
                else:
                    tags = {RUN_TAG: quoted, "mlflow.source.name": "rollart"}
                    self.id = client.create_run(
                        self.experiment_id, run_name=self.run_name, tags=tags
                    ).info.run_id
                    self._all_known = True
            return self.id

    def log_params(self, params: dict[str, str]) -> None:
        run_id = self.find()
        from mlflow.entities import Param

        has = self.client().get_run(run_id).data.params
        new = [Param(name, value) for name, value in params.items() if name not in has]
        for start in range(0, len(new), _PARAMS_AT_ONCE):
            self._send(run_id, "params", new[start : start + _PARAMS_AT_ONCE])

    def log_points(self, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Send (name, value, time in ms, step) that MLflow does not have yet."""
        run_id = self.find()
        from mlflow.entities import Metric

        new: dict[tuple[str, int], Any] = {}
        for name, value, at, step in points:
            if step not in self._steps_of(run_id, name):
                new.setdefault((name, step), Metric(name, value, at, step))
        keys = list(new)
        for start in range(0, len(keys), _METRICS_AT_ONCE):
            chunk = keys[start : start + _METRICS_AT_ONCE]
            try:
                self._send(run_id, "metrics", [new[key] for key in chunk])
            except Exception:
                self._steps, self._all_known = (
                    {},
                    False,
                )  # it may have arrived all the same: ask before the next try
                raise
            for name, step in chunk:
                self._steps[name].add(step)

    def _send(self, run_id: str, kind: Literal["metrics", "params"], entities: list[Any]) -> None:
        """One batch; if MLflow calls it invalid, each alone, and what is invalid alone is dropped with a message."""
        from mlflow.exceptions import MlflowException

        try:
            self.client().log_batch(run_id, **{kind: entities})
        except MlflowException as error:
            if error.get_http_status_code() != 400:
                raise
            if len(entities) == 1:
                logger.warning(redact(f"MLflow refuses {entities[0].key!r}: {error}")[:300])
                return
            for entity in entities:
                self._send(run_id, kind, [entity])

    def set_status(self, status: str, at: int) -> None:
        run_id = self.find()
        if status == "RUNNING":
            self.client().update_run(run_id, status=status)
        else:
            self.client().set_terminated(run_id, status=status, end_time=at)

    def log_file(self, file: Path, folder: str) -> None:
        if not file.exists():  # sent by an earlier process that was killed before it could say so
            return
        self.client().log_artifact(self.find(), str(file), None if folder == "." else folder)

    def mark_table(self, path: str) -> None:
        """List the artifact among the run's tables, as `mlflow.log_table` does."""
        name, run_id = "mlflow.loggedArtifacts", self.find()
        listed = json.loads(self.client().get_run(run_id).data.tags.get(name, "[]"))
        entry = {"path": path, "type": "table"}
        if entry not in listed:
            self.client().set_tag(run_id, name, json.dumps([*listed, entry]))

    def client(self) -> Any:
        if self._client is None:
            for name, value in _MLFLOW_ENV.items():
                os.environ.setdefault(name, value)
            from mlflow import MlflowClient

            if self.uri.startswith("sqlite:///"):
                Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(tracking_uri=self.uri)
        return self._client

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        client = self.client()
        if (found := client.get_experiment_by_name(self.experiment)) is not None:
            return found.experiment_id
        location = (
            None if self.uri.startswith("http") else (home() / "mlartifacts" / self.experiment).as_uri()
        )
        try:
            return client.create_experiment(self.experiment, artifact_location=location)
        except MlflowException:  # another run was quicker
            if (found := client.get_experiment_by_name(self.experiment)) is None:
                raise
            return found.experiment_id

    def _steps_of(self, run_id: str, name: str) -> set[int]:
        if name not in self._steps:
            history = [] if self._all_known else self.client().get_metric_history(run_id, name)
            self._steps[name] = {point.step for point in history}
        return self._steps[name]


def flush_spool(config: RunConfig, run_name: str, store: Store, deadline_s: float = 60.0) -> bool:
    """Send to MLflow what a run that has ended left in its spool; returns whether all of it went."""
    return Tracker(config, run_name, store)._close(deadline_s)


def tracking_uri(config: RunConfig) -> str:
    """Where MLflow is: the configuration, else MLFLOW_TRACKING_URI, else a SQLite file in ROLLART_HOME."""
    default = f"sqlite:///{home().absolute()}/mlflow.db"
    return config.tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or default


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys: `{"a": [{"b": 1}]}` -> `{"a.0.b": 1}`; empty tables are kept."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None or (not tree and prefix):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _param(value: Any) -> str:
    return redact(value if isinstance(value, str) else json.dumps(value, default=str))[:_LONGEST_PARAM]


def _merge(tables: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    merged: dict[str, str] = {}
    for table in tables:
        merged = {**table, **merged}
    return [merged] if merged else []


def _now_ms() -> int:
    return int(time.time() * 1000)
