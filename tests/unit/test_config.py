"""The configuration: strict, overridable, and every error names the setting and the fix."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.config import RunConfig, load_config, parse_config
from tasks.errors import UserError

SHIPPED = sorted((Path(__file__).parents[2] / "deployments/configs").glob("*.toml"))


def refused(*overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        parse_config({"tasks": [{"name": "frozenlake"}]}, list(overrides))
    return caught.value


@pytest.mark.parametrize(
    ("override", "setting", "fix"),
    [
        ("iteratons=3", "iteratons", "did you mean 'iterations'?"),
        ("trainr.learning_rate=1e-4", "trainr", "did you mean 'trainer'?"),
        ("trainer.learnig_rate=1e-4", "trainer.learnig_rate", "did you mean 'learning_rate'?"),
        ("tasks.0.wieght=2.0", "tasks.0.wieght", "did you mean 'weight'?"),
        ('pools=[{name = "a", rolle = "train"}]', "pools.0.rolle", "did you mean 'role'?"),
        ("trainer.xyzzy=1", "trainer.xyzzy", "known keys: "),
        ('trainer.learning_rate="fast"', "trainer.learning_rate", "a number"),
        ("iterations=2.5", "iterations", "a whole number"),
        ("trainer.ranks=true", "trainer.ranks", "a whole number"),
        ("trainer.gradient_checkpointing=1", "trainer.gradient_checkpointing", "true or false"),
        ("tasks.0.name=3", "tasks.0.name", "text in quotes"),
        ("trainer=3", "trainer", "a table"),
        ('tasks="frozenlake"', "tasks", "a list"),
        ("rollout.temperature=0.0", "rollout.temperature", "more than 0"),
        ("rollout.temperature=inf", "rollout.temperature", "a finite number"),
        ("rollout.temperature=nan", "rollout.temperature", ""),
        ("iterations=0", "iterations", "1 or more"),
        ("inference.port=70000", "inference.port", "65535 or less"),
        ("trainer.learning_rate=1.0", "trainer.learning_rate", "less than 1"),
        ("tasks=[]", "tasks", "1 or more"),
        ("tasks=[{weight = 1.0}]", "tasks.0.name", "add it"),
        ("loss.advantage=gpro", "loss.advantage", "did you mean 'grpo'?"),
        ("rollout.barrier='turn'", "rollout.barrier", "environments.slots = 256"),
        ("loss.correction=truncate", "loss.correction", "did you mean 'truncated'?"),
        ("trainer.schedule=cosin", "trainer.schedule", "did you mean 'cosine'?"),
        ("trainer.zero_stage=4", "trainer.zero_stage", "0, 1, 2 or 3"),
        ("name=Not/Good", "name", "lower-case letters"),
        ("rollout.group_size=1", "rollout.group_size", "2 or more"),
        ("policy.heads=3", "policy.heads", "for example"),
        ('tasks=[{name = "frozenlake"}, {name = "frozenlake"}]', "tasks", "one [[tasks]] table"),
        ('pools=[{name = "a", role = "train"}]', "pools", "leave pools out"),
        ("iterations", "--set", "--set trainer.learning_rate=1e-4"),
        ("iterations.x=3", "iterations", "a whole number"),
        ("tasks.4.weight=2.0", "--set tasks.4.weight", "0 to 0"),
        ("tasks.0=3", "--set tasks.0", "tasks.0.weight"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(override: str, setting: str, fix: str) -> None:
    error = refused(override)
    assert error.setting == setting
    assert fix in error.fix
    assert "\n" not in error.problem


def test_overrides_win_over_the_file_and_bare_words_are_strings(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('iterations = 7\n[[tasks]]\nname = "frozenlake"\n')
    config = load_config(
        tmp_path / "a.toml",
        ["name=demo", "trainer.learning_rate=1e-4", "tasks.0.options.size=5", "evaluation.every=2"],
    )
    assert (config.iterations, config.name, config.evaluation.every) == (7, "demo", 2)
    assert config.trainer.learning_rate == 1e-4
    assert config.tasks[0].options == {"size": 5}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_survive_a_round_trip(path: Path) -> None:
    config = load_config(path)
    assert parse_config(tomllib.loads(config.to_toml())) == config


@given(
    st.builds(
        dict,
        seed=st.integers(0, 2**31),
        iterations=st.integers(1, 10**6),
        rollout=st.builds(
            dict,
            groups=st.integers(1, 1000),
            group_size=st.integers(2, 64),
            max_staleness=st.integers(0, 8),
            temperature=st.floats(0.01, 10),
        ),
        trainer=st.builds(dict, learning_rate=st.floats(1e-9, 0.5), max_grad_norm=st.floats(1e-3, 1e3)),
        name=st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,30}\Z"),
    )
)
def test_the_resolved_configuration_reads_back_equal(data: dict[str, object]) -> None:
    config = RunConfig.model_validate(data)
    assert parse_config(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(("staleness", "expected"), [(0, "none"), (1, "decoupled"), (4, "decoupled")])
def test_the_correction_follows_from_the_staleness_bound(staleness: int, expected: str) -> None:
    assert parse_config({"rollout": {"max_staleness": staleness}}).correction == expected
    assert (
        parse_config(
            {"rollout": {"max_staleness": staleness}, "loss": {"correction": "truncated"}}
        ).correction
        == "truncated"
    )


def test_a_missing_file_and_a_broken_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("iterations = \n")
    with pytest.raises(UserError, match="is not valid TOML"):
        load_config(tmp_path / "broken.toml")


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path) -> None:
    (tmp_path / "bad.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(UserError, match="UTF-8"):
        load_config(tmp_path / "bad.toml")
