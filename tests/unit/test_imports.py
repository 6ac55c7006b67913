"""What runs on a machine without torch and vLLM must not import them: the controller, the Dask workers, `--help`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "deepspeed", "transformers")
FLOWS = sorted(f"flows.{path.stem}" for path in (ROOT / "flows").glob("[a-z]*.py"))
LIGHT = [
    *FLOWS,
    "hardware.pools",
    "tasks.config",
    "tasks.environments.cluster",
    "tasks.environments.registry",
    "tasks.inference",
    "tasks.inference.client",
    "tasks.reward.score",
    "tasks.rollout.chat",
    "tasks.rollout.dispatch",
    "tasks.rollout.episode",
    "tasks.services",
    "tasks.store",
    "tasks.tracking.mlflow_tracker",
    "tasks.tracking.run_record",
    "tasks.training",
    "tasks.training.policy",
    "tasks.trajectory",
]

# A forbidden package is refused as soon as anything asks for it, so the report names who did.
FIRST_USE = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {heavy!r}:
            raise AssertionError(f"{{module}} imports {{name}}")
sys.meta_path.insert(0, Refuse())
for module in {modules!r}:
    importlib.import_module(module)
assert not set({heavy!r}) & set(sys.modules)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_list_of_flows_is_not_empty() -> None:
    assert {"flows.train", "flows.cli", "flows.rollout"} <= set(FLOWS)


def test_controller_and_workers_import_no_torch_vllm_deepspeed_or_transformers() -> None:
    done = run(FIRST_USE.format(heavy=HEAVY, modules=LIGHT))
    assert done.returncode == 0, done.stderr


def test_the_check_would_notice_an_import_of_torch() -> None:
    done = run(FIRST_USE.format(heavy=HEAVY, modules=["tasks.training.losses"]))
    assert "tasks.training.losses imports torch" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["runs", "show", "--help"]])
def test_help_imports_no_torch_vllm_deepspeed_or_transformers(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom flows.cli import cli\n"
        f"cli({arguments!r}, standalone_mode=False)\n"
        f"assert not set({HEAVY!r}) & set(sys.modules), sorted(sys.modules)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
