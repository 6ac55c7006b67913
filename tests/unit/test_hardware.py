"""Every stage finds the pool of its role, whatever the pools are called, and carries its tags."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hardware.pools import ROLE_OF, Pool, local_pools, pool_for, pool_set
from tasks.config import parse_config
from tasks.errors import UserError


@pytest.mark.parametrize(
    ("stage", "pool"),
    [
        ("engine", "gpu-bandwidth"),
        ("train", "gpu-compute"),
        ("warm-start", "gpu-compute"),
        ("publish", "gpu-compute"),
        ("rollout", "cpu-env"),
        ("reward", "serverless-reward"),
        ("control", "cpu-env"),
    ],
)
def test_a_stage_runs_on_the_local_pool_of_its_role(stage: str, pool: str) -> None:
    assert pool_for(stage, local_pools()).name == pool


@pytest.mark.parametrize("name", ["local", "production"])
def test_a_shipped_set_has_a_pool_for_every_stage(name: str) -> None:
    for stage in ROLE_OF.keys() - {"control"}:
        assert pool_for(stage, pool_set(name)).role == ROLE_OF[stage]


def test_a_pool_of_its_own_controls_if_there_is_one() -> None:
    pools = [*local_pools(), Pool(name="boss", role="control")]
    assert pool_for("control", pools).name == "boss"


def test_the_first_pool_of_a_role_is_taken_in_any_order_of_the_others() -> None:
    pools = [
        Pool(name="a", role="reward"),
        Pool(name="b", role="train", tags=["h800"]),
        Pool(name="c", role="train"),
    ]
    assert pool_for("train", pools).name == "b"


def test_prefect_tags_name_the_pool_and_its_hardware() -> None:
    pool = Pool(name="gpu-compute", role="train", accelerator="h800", count=8, tags=["eu"])
    assert pool.prefect_tags == ["pool:gpu-compute", "hardware:8xh800", "eu"]
    assert Pool(name="cpu-env", role="environment").prefect_tags == ["pool:cpu-env", "hardware:cpu"]


def test_an_unknown_stage_is_an_error_that_names_it() -> None:
    with pytest.raises(KeyError, match="distil"):
        pool_for("distil", local_pools())


def test_a_role_without_a_pool_is_an_error_that_names_the_role_and_the_stage() -> None:
    pools = [pool for pool in local_pools() if pool.role != "rollout"]
    with pytest.raises(LookupError, match=r"'rollout'.*'engine'"):
        pool_for("engine", pools)


def test_a_configuration_without_a_pool_for_a_role_is_refused() -> None:
    pools = [pool.model_dump() for pool in local_pools() if pool.role != "train"]
    with pytest.raises(UserError, match="no pool has the role train"):
        parse_config({"pools": pools})


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "GPU pool"},
        {"accelerator": "h801", "count": 8},
        {"accelerator": "h800"},
        {"count": 8},
        {"type": "slurm"},
        {"role": "gpu"},
        {"slots": 0},
        {"slots": "4"},
        {"price": 1},
    ],
)
def test_a_wrong_pool_is_refused(wrong: dict[str, object]) -> None:
    Pool(name="ok", role="train")
    with pytest.raises(ValidationError):
        Pool(**{"name": "ok", "role": "train", **wrong})  # type: ignore[arg-type]
