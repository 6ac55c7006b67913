"""`rollart bench weights` runs, measures every step and leaves nothing behind: structure, never time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.cli import cli
from tasks.config import PolicyConfig, parse_config
from tasks.inference.bench import architecture
from tasks.training.policy import tiny_policy
from tests.integration.cli import rollart

SECONDS = ("publish_s", "prefetch_s", "pause_s", "load_s", "parity_s", "serving_s", "copy_s", "plain_load_s")


@pytest.mark.slow
@pytest.mark.parametrize("update", ["keep", "abort"])
def test_every_step_of_every_update_is_measured(tmp_path: Path, update: str) -> None:
    (tmp_path / "scratch").mkdir()
    command = ["bench", "weights", "--parameters", "1M", "--updates", "2", "--requests", "2"]
    arguments = [*command, "--update", update, "--json", "out.json"]
    done = rollart(*arguments, home=tmp_path, env={"TMPDIR": str(tmp_path / "scratch")}, timeout=500)
    assert done.code == 0, done.err
    assert done.left == []
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["parameters"] >= 1e6 and found["bytes"] == 4 * found["parameters"]
    assert (found["requests"], found["update"]) == (2, update)
    assert [one["version"] for one in found["updates"]] == [1, 2]
    for one in found["updates"]:
        assert all(one[name] > 0 for name in SECONDS)
        assert one["load_s"] < one["pause_s"] < one["serving_s"]
        assert one["parity"] < 1e-3
        assert one["requests_in_flight"] == 2 and one["tokens_in_flight"] > 64
        assert one["ratio"] == (one["prefetch_s"] + one["load_s"]) / (one["copy_s"] + one["plain_load_s"])
        to_serving = one["publish_s"] + one["serving_s"] - one["parity_s"]
        assert one["pause_share"] == one["pause_s"] / to_serving
    assert set(found["median"]) == set(found["updates"][0]) - {"version", "parity"}
    assert "median: publish" in done.out and "2 requests" in done.out
    assert list((tmp_path / "scratch").glob("rollart-*")) == []


@pytest.mark.parametrize("parameters", [1, 10**5, 10**6, 10**8, 10**9])
def test_the_policy_has_at_least_as_many_parameters_as_asked_for(parameters: int) -> None:
    policy = parse_config({"policy": architecture(parameters)}).policy
    config = json.loads(bytes(tiny_policy(policy, ["<pad>", "<|im_end|>"])["config.json"]))  # type: ignore[arg-type]
    width, key_values = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    layer = 2 * width * width + 2 * width * key_values + 3 * width * config["intermediate_size"]
    assert layer * config["num_hidden_layers"] >= parameters
    assert layer * (config["num_hidden_layers"] - 1) < 1.1 * parameters
    assert PolicyConfig(**architecture(parameters)).layers <= 24


@pytest.mark.parametrize("given", ["0", "-3M", "x", "1T", "infM"])
def test_a_number_that_is_none_is_refused(given: str) -> None:
    answer = CliRunner().invoke(cli, ["bench", "weights", "--parameters", given])
    assert answer.exit_code == 2 and "is not a number like" in answer.output
