"""One whole run with the real command line and real services, and everything it leaves behind.

All tests look at one run; those at the end use it further: evaluate, play, and the Prefect database.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.config import load_config, parse_config
from tasks.services import find_process
from tasks.tracking.mlflow_tracker import flatten
from tests.e2e.conftest import Finished
from tests.e2e.machine import AWS_SECRET, Machine, batches, check_consumption, members, versions
from tests.e2e.rewards import odd_tokens

ITERATIONS, GROUPS, GROUP_SIZE = 3, 4, 4
TOLERANCE = 1e-3  # the bound on the difference between engine and trainer log-probs, fp32

# The names that dashboards are built on.
STABLE = [
    "reward/frozenlake/mean", "success/frozenlake", "staleness/mean", "staleness/max",
    "tokens/generated_per_s", "train/loss", "train/grad_norm", "train/kl", "train/entropy",
    "train/clip_fraction", "train/logprob_mismatch_max", "train/padding_fraction", "episodes/failed",
    "episodes/truncated", "episodes/retried",
]  # fmt: skip


def iterations(finished: Finished) -> list[dict[str, Any]]:
    return [finished.store.read_json(f"iterations/{k}.json") for k in range(ITERATIONS)]


# The run itself


def test_it_ends_well_and_leaves_no_process(finished: Finished) -> None:
    print(f"{finished.done.seconds:.0f} s\n{finished.done.out}\n{finished.done.err}")
    assert finished.done.code == 0, finished.done.err
    assert finished.done.left == []
    assert finished.store.read_json("status.json")["status"] == "finished"


def test_each_iteration_makes_exactly_one_version(finished: Finished) -> None:
    assert [v for v in versions(finished.store) if v >= 0] == list(range(ITERATIONS + 1))
    assert [finished.store.manifest(f"weights/{v}")["version"] for v in range(ITERATIONS + 1)] == list(
        range(ITERATIONS + 1)
    )


def test_every_group_is_consumed_once_and_on_policy(finished: Finished) -> None:
    check_consumption(finished.store, ITERATIONS, GROUPS, max_staleness=0)


def test_batches_hold_what_was_generated_and_how_it_was_scored(finished: Finished) -> None:
    for k in batches(finished.store):
        trajectories = members(finished.store, k)
        assert len(trajectories) == GROUPS * GROUP_SIZE
        for t in trajectories:
            assert t.reward == pytest.approx(odd_tokens(t))
            assert t.loss_mask.any() and (t.versions[t.loss_mask] == k).all()
            assert (t.logprobs[t.loss_mask] <= 0).all() and not t.logprobs[~t.loss_mask].any()
        assert len({t.reward for t in trajectories}) > 1


def test_each_iteration_changes_the_weights(finished: Finished) -> None:
    files = [finished.store.manifest(f"weights/{v}")["files"] for v in range(ITERATIONS + 1)]
    assert len({names["model.safetensors"]["sha256"] for names in files}) == ITERATIONS + 1


def test_engine_and_trainer_agree_on_log_probs_in_every_iteration(finished: Finished) -> None:
    for record in iterations(finished):
        metrics = record["metrics"]
        assert 0 <= metrics["engine/parity"] <= TOLERANCE
        assert 0 < metrics["train/logprob_mismatch_max"] <= TOLERANCE  # 0 would mean it was not measured
        assert metrics["train/groups_without_variance"] == 0
        assert metrics["train/grad_norm"] > 0


def test_it_evaluates_before_during_and_after(finished: Finished) -> None:
    found = {
        v: finished.store.read_json(f"evaluations/{v}.json") for v in finished.store.numbers("evaluations")
    }
    assert sorted(found) == [0, 2, 3]
    for version, record in found.items():
        assert record["version"] == version
        task = record["tasks"]["frozenlake"]
        assert task["episodes"] == 8 and task["failed"] == 0
        assert 0 <= task["success"] <= 1 and 0 < task["best_fixed_path"] <= 1


def test_records_say_when_each_stage_worked(finished: Finished) -> None:
    for record in iterations(finished):
        lanes = {span["lane"] for span in record["spans"]}
        assert {"collect", "train", "publish", "weights"} <= lanes
        assert all(span["start"] <= span["end"] <= record["at"] for span in record["spans"])
    spans = [span for record in iterations(finished) for span in record["spans"] if span["lane"] == "rollout"]
    assert sorted(span["name"] for span in spans) == [f"wave {k}" for k in range(ITERATIONS)]


# What a person sees of it


def test_output_that_is_no_terminal_is_plain_lines(finished: Finished) -> None:
    text = finished.done.out + finished.done.err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    lines = finished.done.out.splitlines()
    for k in range(1, ITERATIONS + 1):
        assert len([line for line in lines if f"iteration {k}/{ITERATIONS}" in line]) == 1
    for version in (0, 2, 3):
        assert len([line for line in lines if f"evaluation of version {version} " in line]) == 1


def test_the_summary_says_where_everything_is_and_what_to_do_next(
    finished: Finished, machine: Machine
) -> None:
    summary = finished.done.out[finished.done.out.index("held-out success") :]
    assert finished.store.uri in summary
    assert f"{finished.store.uri}/weights/{ITERATIONS}" in summary
    assert "version 0" in summary and f"version {ITERATIONS}" in summary
    assert f"rollart play {finished.name}" in summary
    assert f"rollart runs show {finished.name}" in summary
    assert "mlflow ui --backend-store-uri" in summary
    assert re.search(r"http://\S+/runs/flow-run/[0-9a-f-]{36}", summary), "no page of the flow run"
    plots = re.search(r"^plots +(.+)$", summary, re.MULTILINE)
    assert plots, "the plots are not named"
    assert list((Path(finished.store.root) / "plots").glob("*.png"))


def test_every_named_error_channel_is_silent(finished: Finished) -> None:
    assert finished.done.err == ""


# Secrets


def test_no_secret_is_written_anywhere(finished: Finished, machine: Machine) -> None:
    key_file = machine.work(finished.name) / "engine.key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    secrets = [key_file.read_bytes(), AWS_SECRET.encode()]
    assert len(secrets[0]) >= 32
    found = [
        str(path)
        for path in machine.home.rglob("*")
        if path.is_file() and path != key_file and any(secret in path.read_bytes() for secret in secrets)
    ]
    assert found == []


# MLflow


@pytest.fixture(scope="module")
def mlflow_run(finished: Finished, machine: Machine) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{machine.home}/.rollart/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "rollart"]
    runs = client.search_runs([experiment.experiment_id])
    (run,) = [run for run in runs if run.info.run_name == finished.name]
    return client, run


def test_mlflow_has_every_metric_under_its_stable_name_at_every_iteration(mlflow_run: Any) -> None:
    client, run = mlflow_run
    wanted = [*STABLE, *(f"time/{lane}" for lane in ("rollout", "train", "publish"))]
    assert [name for name in wanted if name not in run.data.metrics] == []
    for name in wanted:
        points = {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}
        assert sorted(points) == list(range(1, ITERATIONS + 1)), name
        assert all(math.isfinite(value) for value in points.values()), name
    success = client.get_metric_history(run.info.run_id, "eval/frozenlake/success")
    assert sorted(point.step for point in success) == [0, 2, 3]


def test_mlflow_values_are_those_of_the_records(mlflow_run: Any, finished: Finished) -> None:
    client, run = mlflow_run
    for name in ("reward/frozenlake/mean", "train/loss", "tokens/generated_per_s"):
        logged = {p.step: p.value for p in client.get_metric_history(run.info.run_id, name)}
        for record in iterations(finished):
            assert logged[record["k"] + 1] == pytest.approx(record["metrics"][name])


def test_mlflow_has_the_whole_configuration(mlflow_run: Any, finished: Finished) -> None:
    _, run = mlflow_run
    config = parse_config(tomllib.loads(finished.store.read("config.toml").decode()))
    assert set(flatten(config.model_dump(mode="json"))) <= set(run.data.params)
    assert run.data.params["policy.hidden_size"] == "64"
    assert run.data.params["tasks.0.name"] == "frozenlake"
    assert run.info.status == "FINISHED"


def test_mlflow_has_plots_samples_and_a_config_that_loads_again(
    mlflow_run: Any, finished: Finished, tmp_path: Path
) -> None:
    client, run = mlflow_run
    folder = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    images = sorted(path.name for path in (folder / "plots").iterdir())
    assert images == ["curve.png", "timeline.png"]
    assert all((folder / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in images)
    assert load_config(folder / "config.toml") == load_config(Path(finished.store.root) / "config.toml")
    table = json.loads((folder / "samples" / "0.json").read_text())
    assert {"iteration", "task", "reward", "success", "text"} <= set(table["columns"])
    assert table["data"] and all(len(row) == len(table["columns"]) for row in table["data"])
    assert "samples/0.json" in run.data.tags["mlflow.loggedArtifacts"]


def test_the_registered_model_is_the_last_version_and_loads_with_mlflow(
    mlflow_run: Any, finished: Finished, machine: Machine
) -> None:
    client, run = mlflow_run
    (model,) = [m for m in client.search_model_versions("name='rollart'") if m.run_id == run.info.run_id]
    code = (
        "import json, sys, mlflow\n"
        "mlflow.set_tracking_uri(sys.argv[1])\n"
        "parts = mlflow.transformers.load_model(sys.argv[2], return_type='components')\n"
        "from safetensors.torch import load_file\n"
        "stored, held = load_file(sys.argv[3]), parts['model'].state_dict()\n"
        "same = all(bool((held[name].float() == tensor.float()).all()) for name, tensor in stored.items())\n"
        "print(json.dumps([same, len(stored), len(parts['tokenizer']('left')['input_ids'])]))\n"
    )
    weights = f"{finished.store.root}/weights/{ITERATIONS}/model.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", code, client.tracking_uri, f"models:/rollart/{model.version}", weights],
        env={**machine.env, "CUDA_VISIBLE_DEVICES": ""}, cwd=machine.home, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    same, tensors, ids = json.loads(done.stdout.splitlines()[-1])
    assert same and tensors > 5 and ids >= 1


# The record of the run


def test_runs_list_and_show_give_everything_measured_as_json(finished: Finished, machine: Machine) -> None:
    listed = machine.run("runs", "list", "--json")
    assert listed.code == 0, listed.err
    (mine,) = [run for run in json.loads(listed.out) if run["name"] == finished.name]
    assert mine["state"] == "finished" and mine["progress"] == {"done": ITERATIONS, "of": ITERATIONS}
    shown = machine.run("runs", "show", finished.name, "--json")
    record = json.loads(shown.out)
    assert [i["metrics"] for i in record["iterations"]] == [i["metrics"] for i in iterations(finished)]
    assert set(record["before"]) == set(record["after"]) == set(record["gain"]) == {"frozenlake"}
    assert record["config"]["policy"]["hidden_size"] == 64
    assert {"prefect", "torch", "deepspeed", "mlflow", "dask"} <= set(record["packages"])
    assert record["stage_seconds"]["rollout"]["median"] > 0
    plain = machine.run("runs", "show", finished.name)
    assert plain.code == 0 and "finished" in plain.out


def test_a_finished_run_cannot_be_resumed(finished: Finished, machine: Machine) -> None:
    done = machine.run("resume", finished.name)
    assert done.code == 2
    assert "finished" in done.err and "fix:" in done.err


def test_services_say_goodbye_and_their_processes_are_gone(finished: Finished, machine: Machine) -> None:
    for name in ("engine-0", "trainer", "environments"):
        assert finished.store.read_json(f"services/{name}.json")["status"] == "stopped", name
    record = json.loads((machine.work(finished.name) / "processes.json").read_text())
    assert not any(find_process(child) for child in record["children"])


# Prefect


def every(api: str, path: str, **body: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while page := httpx.post(
        f"{api}/{path}", json={**body, "limit": 200, "offset": len(found)}, timeout=60
    ).json():
        found += page
    return found


def test_prefect_shows_the_flows_of_the_run_by_name(finished: Finished, prefect_api: str) -> None:
    tag = f"run:{finished.name}"  # the database holds other tests' runs too; the parent carries no tag
    runs = every(prefect_api, "flow_runs/filter")
    mine = [run for run in runs if tag in run["tags"] or run["name"] == f"train-{finished.name}"]
    states = {run["name"]: run["state_type"] for run in mine}
    expected = [f"train-{finished.name}", "provision", "warm-start"]
    expected += [f"{lane}-{k:04d}" for lane in ("rollout", "iteration") for k in range(ITERATIONS)]
    expected += [f"evaluate-v{version}" for version in (0, 2, 3)]
    assert {name: states.get(name) for name in expected} == dict.fromkeys(expected, "COMPLETED")


def test_prefect_tags_each_stage_with_its_pool_and_hardware(finished: Finished, prefect_api: str) -> None:
    tasks = [
        task for task in every(prefect_api, "task_runs/filter") if f"run:{finished.name}" in task["tags"]
    ]
    assert all(task["state_type"] == "COMPLETED" for task in tasks), [
        (task["name"], task["state"]) for task in tasks if task["state_type"] != "COMPLETED"
    ]
    pools = {
        "wave-0000": "rollout", "train-0000": "train", "publish-v1": "publish", "collect-0000": "control",
        "episodes-v0": "evaluate", "start-trainer": "train", "start-engine-0": "engine",
    }  # fmt: skip
    by_name = {task["name"]: set(task["tags"]) for task in tasks}
    for name, stage in pools.items():
        assert f"stage:{stage}" in by_name[name], (name, by_name[name])
        assert any(tag.startswith("pool:") for tag in by_name[name]), (name, by_name[name])


def test_prefect_has_progress_tables_and_a_person_can_read_them(finished: Finished, prefect_api: str) -> None:
    artifacts = [
        artifact
        for artifact in every(prefect_api, "artifacts/filter")
        if (artifact["key"] or "").endswith(f"-{finished.name}")
    ]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for artifact in artifacts:
        by_kind.setdefault(artifact["type"], []).append(artifact)
    (progress,) = by_kind["progress"]
    assert float(progress["data"]) == 100.0
    tables = [a for a in by_kind["table"] if a["key"] == f"iteration-{finished.name}"]
    described = sorted(a["description"].split(":")[0] for a in tables)
    assert described == [f"Iteration {k}" for k in range(ITERATIONS)]
    rows = {row["metric"]: row["value"] for row in json.loads(tables[0]["data"])}
    assert {"reward/frozenlake/mean", "staleness/max"} <= set(rows)
    evaluations = [a for a in by_kind["table"] if a["key"] == f"evaluation-{finished.name}"]
    assert len(evaluations) == 3


# Used further: these two start services of their own


def test_evaluate_measures_an_older_version_again_and_leaves_the_run_as_it_is(
    finished: Finished, machine: Machine
) -> None:
    before = finished.store.read_json("evaluations/0.json")
    done = machine.run("evaluate", finished.name, "--version", "0", "--episodes", "4")
    print(f"{done.seconds:.0f} s\n{done.out}")
    assert done.code == 0, done.err
    assert done.left == []
    assert re.search(r"^frozenlake +[01]\.\d{3} +[01]\.\d{3} +4 *$", done.out, re.MULTILINE)
    assert finished.store.read_json("evaluations/0.json") == before  # the run's own record stands
    assert finished.store.read_json("status.json")["status"] == "finished"  # an evaluation is not the run


def test_play_shows_one_episode_turn_by_turn(finished: Finished, machine: Machine) -> None:
    done = machine.run("play", finished.name, "--seed", "3", "--greedy")
    print(f"{done.seconds:.0f} s\n{done.out}")
    assert done.code == 0, done.err
    assert done.left == []
    turns = re.findall(r"^turn (\d+)  (.+)  probability ([\d.]+), version 3\b", done.out, re.MULTILINE)
    assert [int(number) for number, *_ in turns] == list(range(1, len(turns) + 1)) and 1 <= len(turns) <= 8
    assert all(0 < float(probability) <= 1 for *_, probability in turns)
    assert re.search(rf"(solved|not solved) in {len(turns)} turns?", done.out)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", done.out)
