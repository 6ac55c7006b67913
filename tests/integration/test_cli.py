"""The command line as a person and a program meet it: help, plan, doctor, records of runs, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.config import load_config
from tasks.store import Store
from tests.integration.cli import rollart

COMMANDS = [
    "train",
    "warm-start",
    "evaluate",
    "play",
    "resume",
    "runs list",
    "runs show",
    "bench overhead",
    "doctor",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, tmp_path: Path) -> None:
    outcome = rollart(*command.split(), "--help", home=tmp_path)
    assert outcome.code == 0
    assert f"  rollart {command} " in outcome.out
    assert "Example" in outcome.out


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, time; start = time.process_time()\n"
        "from flows.cli import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "print(time.process_time() - start, file=sys.stderr)\n"
        "heavy = {'prefect', 'mlflow', 'dask', 'distributed', 'torch', 'vllm', 'pydantic', 'fsspec', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert float(done.stderr) < 0.5  # seconds of CPU, so that a busy machine does not fail it


@pytest.mark.parametrize("config", ["frozenlake", "two-tasks", "smoke"])
def test_a_dry_run_prints_the_plan_and_starts_nothing(config: str, tmp_path: Path) -> None:
    outcome = rollart("train", config, "--dry-run", "--name", "plan-1", home=tmp_path)
    print(f"{outcome.seconds:.2f} s\n{outcome.out}")
    assert outcome.code == 0, outcome.err
    for expected in (
        "plan-1",
        "gpu-bandwidth",
        "gpu-compute",
        "cpu-env",
        "DeepSpeed ZeRO 0",
        "a checkpoint",
        "vllm",
    ):
        assert expected in outcome.out
    assert list(tmp_path.iterdir()) == []
    assert outcome.left == []


def test_a_run_without_a_name_is_named_after_its_config_and_the_time(tmp_path: Path) -> None:
    outcome = rollart("train", "smoke", "--dry-run", home=tmp_path)
    assert f"Plan of run smoke-{time.strftime('%m%d')}-" in outcome.out


def test_doctor_answers_for_a_person_and_for_a_program(tmp_path: Path) -> None:
    text, data = rollart("doctor", home=tmp_path), rollart("doctor", "--json", home=tmp_path)
    report = json.loads(data.out)
    assert text.code == data.code == (0 if report["can_run_default"] else 1)
    names = {finding["name"] for finding in report["findings"]}
    assert {
        "Python",
        "CPU cores",
        "memory",
        "disk",
        "/dev/shm",
        "GPUs",
        "S3",
        "Prefect API",
        "trainer packages",
    } <= names
    assert "The default local run can" in text.out


def test_doctor_names_a_prefect_api_that_does_not_answer(tmp_path: Path) -> None:
    outcome = rollart("doctor", home=tmp_path, env={"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    assert outcome.code == 1
    assert "nothing answers at http://127.0.0.1:9/api" in outcome.out
    assert "unset PREFECT_API_URL" in outcome.out


def finished_run(home: Path) -> Store:
    config = load_config(Path(__file__).parents[2] / "deployments/configs/smoke.toml", ["name=run-1"])
    store = Store(str(home / "runs" / "run-1"))
    store.write("config.toml", config.to_toml().encode())
    store.write_json("facts.json", {"packages": {"torch": "2"}, "host": "h", "started_at": 1000.0})
    store.write_json("status.json", {"status": "finished", "reason": "", "at": 1090.0})
    for version in range(3):
        store.put(f"weights/{version}", {"config.json": b"{}"}, version=version)
        task = {"success": 0.25 * version, "reward": 0.25 * version, "episodes": 8, "best_fixed_path": 0.4}
        store.write_json(
            f"evaluations/{version}.json",
            {"version": version, "temperature": 1.0, "tasks": {"frozenlake": task}},
        )
    for k in range(2):
        metrics = {"success/frozenlake": 0.3, "time/stage_train": 2.0 + k, "staleness/mean": 0.0}
        store.write_json(f"iterations/{k}.json", {"k": k, "at": 1000.0 + k, "metrics": metrics, "spans": []})
    return store


def test_runs_are_listed_and_shown_for_a_person_and_for_a_program(tmp_path: Path) -> None:
    finished_run(tmp_path)
    listed = rollart("runs", "list", home=tmp_path)
    assert listed.code == 0, listed.err
    assert all(word in listed.out for word in ("run-1", "finished", "2/2", "0.50", "1:30"))
    assert [run["name"] for run in json.loads(rollart("runs", "list", "--json", home=tmp_path).out)] == [
        "run-1"
    ]
    shown = rollart("runs", "show", "run-1", home=tmp_path)
    assert shown.code == 0, shown.err
    assert all(word in shown.out for word in ("finished", "0.500", "0.400", "torch 2", "train"))
    record = json.loads(rollart("runs", "show", "run-1", "--json", home=tmp_path).out)
    assert record["after"]["frozenlake"]["success"] == 0.5
    assert record["config"]["rollout"]["groups"] == 4


def test_a_run_is_found_by_store_option_environment_or_its_whole_address(tmp_path: Path) -> None:
    store = finished_run(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for arguments, env in (
        (["run-1", "--store", str(tmp_path / "runs")], {}),
        (["run-1"], {"ROLLART_STORE": str(tmp_path / "runs")}),
        ([store.uri], {}),
        (["../runs/run-1"], {}),
    ):
        outcome = rollart("runs", "show", *arguments, home=tmp_path / "elsewhere", env=env)
        assert outcome.code == 0, outcome.err


def test_an_empty_store_lists_no_runs(tmp_path: Path) -> None:
    outcome = rollart("runs", "list", home=tmp_path)
    assert outcome.code == 0
    assert "No runs in" in outcome.out


def test_bench_overhead_says_where_the_idle_seconds_are(tmp_path: Path) -> None:
    store = finished_run(tmp_path)
    refused = rollart("bench", "overhead", "empty", home=tmp_path, timeout=150)
    assert refused.code == 2
    for k in range(4):  # iterations of 10 s that train from second 3 + k to second 9
        span = {"lane": "train", "name": f"batch {k}", "start": 10.0 * k + 3 + k, "end": 10.0 * k + 9}
        store.write_json(
            f"iterations/{k}.json", {"k": k, "at": 10.0 * k + 10, "metrics": {}, "spans": [span]}
        )
    file = tmp_path / "overhead.json"
    outcome = rollart("bench", "overhead", "run-1", "--json", str(file), home=tmp_path, timeout=150)
    assert outcome.code == 0, outcome.err
    assert "median 6.00 s, longest 7.00 s, 3 iterations" in outcome.out
    assert "5.00 s  record -> train" in outcome.out
    assert json.loads(file.read_text())["parts"] == {"record -> train": 5.0, "train -> record": 1.0}


def test_bench_overhead_of_a_run_with_one_iteration_is_refused(tmp_path: Path) -> None:
    finished_run(tmp_path).delete("iterations/1.json")
    outcome = rollart("bench", "overhead", "run-1", home=tmp_path, timeout=150)
    assert outcome.code == 2
    assert "no two finished iterations" in outcome.err
