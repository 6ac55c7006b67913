"""Bad input on the real command line: exit code 2, quickly, nothing started, one message with setting and fix."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.config import RunConfig, load_config
from tasks.store import Store
from tasks.training.policy import tiny_policy, vocabulary
from tests.integration.cli import Outcome, rollart


def check_refused(outcome: Outcome, setting: str, fix: str) -> None:
    print(f"{outcome.seconds:.2f} s: {outcome.err.strip()}")
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    assert outcome.err.startswith(f"error: {setting}"), outcome.err
    assert outcome.err.count("fix:") == 1
    assert fix in outcome.err.split("fix:")[1], outcome.err
    assert outcome.out == ""
    assert outcome.left == []


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*")) if folder.exists() else []


# one override each


SETTINGS = {
    "unknown key": ("trainer.learnig_rate=1e-4", "trainer.learnig_rate", "did you mean 'learning_rate'?"),
    "wrong type": ('trainer.learning_rate="fast"', "trainer.learning_rate", "a number"),
    "out of range": ("rollout.temperature=0.0", "rollout.temperature", "more than 0"),
    "unknown task": ("tasks.0.name=frozenlak", "tasks.0.name", "frozenlake"),
    "unknown advantage": ("loss.advantage=gpro", "loss.advantage", "did you mean 'grpo'?"),
    "unknown schedule": ("trainer.schedule=cosin", "trainer.schedule", "did you mean 'cosine'?"),
    "group of one": ("rollout.group_size=1", "rollout.group_size", "2 or more"),
    "context shorter than the prompt": ("policy.context_limit=12", "policy.context_limit", "set it to"),
    "missing model folder": ("policy.model=./nowhere", "policy.model", "tiny"),
    "folder that is no model": ("policy.model=.", "policy.model", "Hugging Face"),
    "not enough disk": (
        "policy={hidden_size = 65536, heads = 512, kv_heads = 512, layers = 2000, intermediate_size = 262144}",
        "ROLLART_HOME",
        "free some space",
    ),
    "no scheduler there": (
        "environments.scheduler=tcp://127.0.0.1:9",
        "environments.scheduler",
        "local cluster",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_bad_setting_is_refused_before_anything_starts(case: str, tmp_path: Path) -> None:
    override, setting, fix = SETTINGS[case]
    before = files_in(tmp_path)
    check_refused(
        rollart("train", "smoke", "--set", override, "--name", "bad-1", home=tmp_path), setting, fix
    )
    assert files_in(tmp_path) == before


def test_an_unknown_config_name_lists_the_shipped_ones(tmp_path: Path) -> None:
    check_refused(rollart("train", "frozenlak", home=tmp_path), "CONFIG", "did you mean 'frozenlake'?")


def test_a_config_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("iterations = \n")
    check_refused(rollart("train", "bad.toml", home=tmp_path), "bad.toml", "correct the file")


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    check_refused(rollart("train", "none.toml", home=tmp_path), "none.toml", "path of a TOML file")


# the model


def model_folder(path: Path) -> Path:
    config = RunConfig()
    path.mkdir()
    for name, data in tiny_policy(config.policy, vocabulary(["frozenlake"])).items():
        (path / name).write_bytes(data if isinstance(data, bytes) else data.read_bytes())
    save_file({"w": np.zeros((64, 64), np.float32)}, path / "model.safetensors")
    return path


def test_corrupt_safetensors_are_refused(tmp_path: Path) -> None:
    weights = model_folder(tmp_path / "model") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    outcome = rollart("train", "smoke", "--set", "policy.model=./model", home=tmp_path)
    check_refused(outcome, "policy.model", "again")
    assert "corrupt" in outcome.err


def test_a_model_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (model_folder(tmp_path / "model") / "tokenizer.json").unlink()
    check_refused(
        rollart("train", "smoke", "--set", "policy.model=./model", home=tmp_path), "policy.model", "tokenizer"
    )


# the store


def test_a_store_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_refused(
        rollart("train", "smoke", "--set", "store.root=file/runs", home=tmp_path), "store.root", "folder"
    )


def test_a_store_of_unknown_scheme_is_refused(tmp_path: Path) -> None:
    check_refused(
        rollart("train", "smoke", "--set", "store.root=s9://bucket", home=tmp_path), "store.root", "s3://"
    )


def test_s3_without_credentials_is_refused(tmp_path: Path) -> None:
    env = {"AWS_EC2_METADATA_DISABLED": "true"}
    outcome = rollart("train", "smoke", "--set", "store.root=s3://bucket/runs", home=tmp_path, env=env)
    check_refused(outcome, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def test_an_s3_endpoint_where_nothing_listens_is_refused(tmp_path: Path) -> None:
    env = {
        "AWS_ACCESS_KEY_ID": "who",
        "AWS_SECRET_ACCESS_KEY": "what-is-secret",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }
    outcome = rollart("train", "smoke", "--set", "store.root=s3://bucket/runs", home=tmp_path, env=env)
    check_refused(outcome, "AWS_ENDPOINT_URL", "address")
    assert "what-is-secret" not in outcome.err


# ports


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = rollart("train", "smoke", "--set", f"inference.port={port}", home=tmp_path)
    check_refused(outcome, "inference.port", "0 for a free one")
    assert str(port) in outcome.err


# runs that exist


def stored_run(root: Path, *overrides: str, finished: bool = False) -> Store:
    """A run as an earlier process left it in `root`/runs."""
    config = load_config(
        Path(__file__).parents[2] / "deployments/configs/smoke.toml", ["name=run-1", *overrides]
    )
    store = Store(str(root / "runs" / "run-1"))
    store.write("config.toml", config.to_toml().encode())
    versions = config.iterations + 1 if finished else 2
    for version in range(versions):
        store.put(f"weights/{version}", {"config.json": b"{}"}, version=version)
        store.write_json(f"evaluations/{version}.json", {"version": version, "tasks": {}})
    return store


def test_a_run_name_that_exists_is_refused(tmp_path: Path) -> None:
    stored_run(tmp_path)
    before = files_in(tmp_path)
    check_refused(rollart("train", "smoke", "--name", "run-1", home=tmp_path), "name", "rollart resume run-1")
    assert files_in(tmp_path) == before


def test_resuming_an_unknown_run_is_refused_and_lists_the_known(tmp_path: Path) -> None:
    stored_run(tmp_path)
    check_refused(rollart("resume", "run-2", home=tmp_path), "RUN", "run-1")


def test_resuming_without_any_run_is_refused(tmp_path: Path) -> None:
    check_refused(rollart("resume", "run-2", home=tmp_path), "RUN", "--store")
    assert not (tmp_path / "runs").exists()


def test_resuming_a_finished_run_is_refused(tmp_path: Path) -> None:
    stored_run(tmp_path, finished=True)
    check_refused(rollart("resume", "run-1", home=tmp_path), "RUN", "--set iterations=4")


def test_resuming_with_a_change_that_makes_it_another_experiment_is_refused(tmp_path: Path) -> None:
    store = stored_run(tmp_path)
    before = store.read("config.toml")
    outcome = rollart("resume", "run-1", "--set", "loss.advantage=rloo", home=tmp_path)
    check_refused(outcome, "loss.advantage", "rollart train")
    assert store.read("config.toml") == before


def test_evaluating_a_version_that_is_not_there_is_refused(tmp_path: Path) -> None:
    stored_run(tmp_path)
    check_refused(rollart("evaluate", "run-1", "--version", "9", home=tmp_path), "--version", "0 to 1")


def test_a_moved_store_is_found_by_its_new_root(tmp_path: Path) -> None:
    stored_run(tmp_path)
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    outcome = rollart("resume", "run-1", "--store", "moved", "--set", "seed=7", home=tmp_path)
    check_refused(outcome, "seed", "rollart train")
