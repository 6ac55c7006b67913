"""What README.md and deployments/README.md tell a user to type works, and the code they show runs."""

from __future__ import annotations

import importlib
import importlib.util
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

from flows.cli import cli
from tasks.config import EnvironmentsConfig, load_config
from tasks.environments import make_environment
from tasks.reward import score
from tasks.store import Store
from tasks.trajectory import Trajectory
from tests.integration.cli import rollart
from tests.integration.s3 import BUCKET, S3

ROOT = Path(__file__).parents[2]
PAGES = {
    name: (ROOT / name).read_text()
    for name in ("README.md", "docs/asynchrony.md", "deployments/README.md", "deployments/pools.md")
}
LEASES = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE="
RUN = "frozenlake-1129-143012"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def named_file(language: str, name: str) -> str:
    """The block that starts with a comment of its file's name."""
    (found,) = [block for block in blocks("README.md", language) if block.startswith(f"# {name}\n")]
    return found


COMMANDS = sorted(
    {line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines() if line}
)
ROLLART = [command for command in COMMANDS if "rollart " in command]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the README shows; its Python module can be imported."""
    for language, name in (("python", "my_tasks.py"), ("toml", "my.toml"), ("toml", "my-model.toml")):
        (tmp_path / name).write_text(named_file(language, name))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    return tmp_path


def finished_run(home: Path) -> None:
    """A run by the README's name with two recorded iterations, in the default store."""
    store = Store(str(home / "runs" / RUN))
    store.write("config.toml", load_config(ROOT / "deployments/configs/smoke.toml").to_toml().encode())
    store.write_json("status.json", {"status": "finished", "reason": "", "at": 100.0})
    for k in range(2):
        span = {"lane": "train", "name": f"batch {k}", "start": 10.0 * k + 4, "end": 10.0 * k + 9}
        store.write_json(
            f"iterations/{k}.json", {"k": k, "at": 10.0 * k + 10, "metrics": {}, "spans": [span]}
        )


def test_the_pages_have_commands() -> None:
    assert "make train" in COMMANDS
    assert len(ROLLART) >= 12


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_known(command: str) -> None:
    """Everything but `rollart`: a target of the Makefile, a setting, or a tool's command that exists."""
    word, *rest = shlex.split(command)
    if word == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif word == "export":
        assert all(part.startswith(("AWS_", "PREFECT_API_URL=", LEASES)) for part in rest)
        modules = [part.removeprefix(LEASES) for part in rest if part.startswith(LEASES)]
        assert all(importlib.util.find_spec(module) for module in modules)
    elif word == "uv":
        assert all((ROOT / part).exists() for part in rest if part.startswith("deployments/"))
    elif word in ("prefect", "mlflow"):
        module = [sys.executable, "-m", word, *[part for part in rest[:2] if part.isalpha()], "--help"]
        done = subprocess.run(module, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        assert all(part in done.stdout for part in rest if part.startswith("--"))
    else:
        assert word == "rollart" or command.startswith("PYTHONPATH=. rollart ")


@pytest.mark.parametrize("command", ROLLART)
def test_every_rollart_command_has_the_options_it_shows(command: str) -> None:
    context: click.Context | None = None
    found: click.Command = cli
    words = shlex.split(command.split("rollart ", 1)[1])
    while isinstance(found, click.Group):
        found = found.commands[words.pop(0)]
        context = click.Context(found, parent=context)
    found.make_context("rollart", words)  # parses, and raises a UsageError for what it does not know


@pytest.mark.parametrize(
    "command",
    [
        c
        for c in ROLLART
        if c.split("rollart ")[1].startswith(("train", "runs", "bench overhead"))
        and "s3://" not in c
        and "placement=pools" not in c  # wants a server: tests/e2e/test_pools.py
    ],
)
def test_commands_that_start_no_service_run(command: str, own: Path) -> None:
    finished_run(own)
    words = shlex.split(command.split("rollart ", 1)[1])
    if words[0] == "train" and not {"--dry-run", "--prepare"} & set(words):
        words.append("--dry-run")
    env = {"PYTHONPATH": f"{own}:{ROOT}"}
    outcome = rollart(*words, home=own, env=env, timeout=150)
    assert outcome.code == 0, outcome.err
    assert outcome.left == []


def test_the_commands_for_s3_run_against_a_real_one(s3_env: S3, tmp_path: Path) -> None:
    for command in [c for c in ROLLART if "s3://" in c]:
        words = shlex.split(command.replace("s3://bucket/", f"s3://{BUCKET}/").split("rollart ", 1)[1])
        words += ["--dry-run"] if words[0] == "train" else []
        outcome = rollart(*words, home=tmp_path, env=s3_env.env, timeout=150)
        assert outcome.code == 0, outcome.err


def test_the_own_environment_is_solved_by_its_expert_and_scored_by_the_own_reward(own: Path) -> None:
    config = load_config(own / "my.toml")
    task = config.tasks[0]
    hidden: dict[str, set[int]] = {"train": set(), "held_out": set()}
    for split in ("train", "held_out"):
        environment = make_environment(task, EnvironmentsConfig(), 0, split=split)
        for seed in range(40):
            observation, _ = environment.reset(seed)
            hidden[split].add(environment.hidden)  # type: ignore[attr-defined]
            turns, reward, over, info = 0, 0.0, False, {}
            while not over:
                assert set(observation.split()) <= set(type(environment).vocabulary)
                action = environment.demonstrate(random.Random(seed), noise=0.0)
                observation, gain, terminated, truncated, info = environment.step(action)
                turns, reward, over = turns + 1, reward + gain, terminated or truncated
            assert info["success"]
            assert score(trajectory(turns, reward), task) == 1 / turns
    assert not hidden["train"] & hidden["held_out"]
    importlib.import_module("my_tasks")


def trajectory(turns: int, reward: float) -> Trajectory:
    empty = np.zeros(0)
    return Trajectory(
        "my_tasks:Guess", 0, 0, 0, 0, empty, empty, empty, empty, turns, reward, reward > 0, False
    )


def test_the_own_model_is_a_valid_configuration(own: Path) -> None:
    config = load_config(own / "my-model.toml")
    assert not config.warm_start.enabled
    make_environment(config.tasks[0], config.environments, 0)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_picture_is_there(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        assert "://" in target or (ROOT / page).parent.joinpath(target).exists(), target
