"""The run record, read from a store folder written by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.config import RunConfig
from tasks.errors import UserError
from tasks.store import Store
from tasks.tracking.run_record import list_runs, read_run


def make_run(
    root: Path, name: str = "demo", status: dict[str, Any] | None = None, versions: int = 3
) -> Store:
    store = Store(str(root / name))
    config = RunConfig(name=name, iterations=2)
    store.write("config.toml", config.to_toml().encode())
    store.write_json(
        "facts.json", {"packages": {"torch": "2.13"}, "host": "h", "started_at": time.time() - 60}
    )
    store.write_json("status.json", status or {"status": "running", "reason": "", "at": time.time()})
    for k in range(2):
        span = {"lane": "rollout", "name": f"wave {k}", "start": 10.0 * k, "end": 10.0 * k + 7}
        metrics = {"success/frozenlake": 0.2 + 0.1 * k, "time/train": 2.0 + k, "train/kl": float("nan")}
        store.write_json(f"iterations/{k}.json", {"k": k, "metrics": metrics, "spans": [span]})
    for version, success in [(-2, 0.05), (0, 0.2), (2, 0.7)]:
        tasks = {"frozenlake": {"success": success, "reward": success, "episodes": 256, "failed": 0}}
        store.write_json(f"evaluations/{version}.json", {"version": version, "tasks": tasks})
    for version in range(versions):
        store.put(f"weights/{version}", {"config.json": b"{}"}, version=version)
    return store


def beat(store: Store, at: float) -> None:
    service = {"name": "trainer", "kind": "trainer", "status": "ready", "heartbeat_at": at}
    store.write_json("services/trainer.json", service)


def test_the_record_holds_what_was_measured_and_is_strict_json(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["config"]["trainer"]["learning_rate"] == 3e-4
    assert record["packages"] == {"torch": "2.13"}
    assert [i["k"] for i in record["iterations"]] == [0, 1]
    assert record["iterations"][1]["metrics"] == {
        "success/frozenlake": pytest.approx(0.3),
        "time/train": 3.0,
        "train/kl": None,
    }
    assert record["iterations"][1]["spans"][0]["name"] == "wave 1"
    assert record["stage_seconds"]["train"] == {"total": 5.0, "median": 2.5, "longest": 3.0}
    assert record["progress"] == {"done": 2, "of": 2}


def test_before_is_version_0_and_after_is_the_newest_evaluated(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path))
    assert record["before"]["frozenlake"]["success"] == 0.2
    assert record["after"]["frozenlake"]["success"] == 0.7
    assert record["gain"] == {"frozenlake": pytest.approx(0.5)}
    assert [e["version"] for e in record["evaluations"]] == [-2, 0, 2]


@pytest.mark.parametrize("said", ["stopped", "failed", "finished"])
def test_a_state_that_the_run_wrote_itself_stands(tmp_path: Path, said: str) -> None:
    store = make_run(tmp_path, status={"status": said, "reason": "why", "at": time.time() - 1000})
    record = read_run(store)
    assert (record["state"], record["reason"]) == (said, "why")


def test_finished_needs_the_last_version_in_the_store(tmp_path: Path) -> None:
    store = make_run(tmp_path, status={"status": "finished", "reason": "", "at": time.time()}, versions=2)
    assert read_run(store)["state"] == "failed"


def test_running_without_a_heartbeat_for_30_s_is_interrupted(tmp_path: Path) -> None:
    store = make_run(tmp_path, status={"status": "running", "reason": "", "at": time.time() - 500})
    beat(store, time.time() - 31)
    assert read_run(store)["state"] == "interrupted"
    beat(store, time.time() - 5)
    assert read_run(store)["state"] == "running"


def test_a_run_that_has_only_its_config_can_be_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "new"))
    store.write("config.toml", RunConfig().to_toml().encode())
    record = read_run(store)
    assert record["state"] == "prepared" and record["iterations"] == [] and record["before"] == {}


def test_an_unknown_run_is_a_user_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nope"):
        read_run(Store(str(tmp_path / "nope")))


def test_runs_are_listed_newest_first_and_other_folders_are_not_runs(tmp_path: Path) -> None:
    old = make_run(tmp_path, "old")
    old.write_json("facts.json", {"started_at": 5.0})
    make_run(tmp_path, "new")
    (tmp_path / "cache").mkdir()
    runs = list_runs(Store(str(tmp_path)))
    assert [run["name"] for run in runs] == ["new", "old"]
    assert runs[0]["gain"]["frozenlake"] == pytest.approx(0.5)


def test_no_runs_in_an_empty_or_absent_root(tmp_path: Path) -> None:
    assert list_runs(Store(str(tmp_path))) == [] == list_runs(Store(str(tmp_path / "absent")))
