"""What an earlier warm start may be reused for: a run that depends on all the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.warm_start import cache_key
from tasks.config import parse_config

POLICY = {"files": {"tokenizer.json": {"sha256": "0", "size": 1}}}


def key(settings: dict[str, Any] | None = None, policy: dict[str, Any] = POLICY) -> str:
    return cache_key(parse_config({"tasks": [{"name": "frozenlake"}], **(settings or {})}), policy)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 7},
        {"policy": {"layers": 2}},
        {"warm_start": {"steps": 3}},
        {"tasks": [{"name": "arithmetic"}]},
        {"trainer": {"precision": "bf16"}},
    ],
)
def test_whatever_a_warm_start_depends_on_gives_it_another_name(other: dict[str, Any]) -> None:
    assert key(other) != key() == key()


def test_another_tokenizer_gives_it_another_name() -> None:
    assert key(policy={"files": {"tokenizer.json": {"sha256": "1", "size": 1}}}) != key()


def test_what_it_does_not_depend_on_leaves_its_name(tmp_path: Path) -> None:
    assert key({"iterations": 99, "store": {"root": str(tmp_path)}, "rollout": {"max_staleness": 3}}) == key()


def test_other_weights_in_the_same_model_folder_give_it_another_name(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(4, np.float32)}, weights)
    before = key({"policy": {"model": str(tmp_path)}})
    assert key({"policy": {"model": str(tmp_path)}}) == before
    save_file({"w": np.ones(4, np.float32)}, weights)
    os.utime(weights, (1.0, 1.0))
    assert key({"policy": {"model": str(tmp_path)}}) != before
