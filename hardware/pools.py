"""The pools of a run: where each stage and service runs, declared as data.

A pool is a hardware-tagged Prefect work pool. Placement `local` keeps the same names and tags, so that a
run looks the same in the UI on a laptop and on a cluster. Sets of pools are TOML files in `hardware/sets/`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hardware.accelerators import accelerators

Role = Literal["rollout", "train", "environment", "reward", "control"]

# Which role's pool runs a stage or service.
ROLE_OF: dict[str, Role] = {
    "rollout": "environment",
    "engine": "rollout",
    "reward": "reward",
    "train": "train",
    "warm-start": "train",
    "publish": "train",
    "evaluate": "rollout",
    "control": "control",
}

SETS = Path(__file__).with_name("sets")


class Pool(BaseModel):
    """One pool of machines that are alike. `count`, `memory_gib`, `cores` and the price are of one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    role: Role
    accelerator: str | None = Field(None, description="a profile of hardware/accelerators.toml; none: CPU")
    count: int = Field(0, ge=0, description="accelerators")
    memory_gib: float = Field(0, ge=0, description="main memory, at least")
    cores: int = Field(0, ge=0, description="at least")
    price_per_hour: float = Field(0.0, ge=0)
    slots: int = Field(1, ge=1, description="services and stages that it runs side by side")
    tags: list[str] = []
    type: Literal["process", "kubernetes"] = Field("process", description="of the Prefect work pool")
    prefect_work_pool: str | None = Field(
        None, description="the Prefect work pool; default: of the same name"
    )

    @model_validator(mode="after")
    def _accelerator_is_known(self) -> Pool:
        if self.accelerator is not None and self.accelerator not in (known := accelerators()):
            raise ValueError(f"accelerator {self.accelerator!r} is not one of {', '.join(known)}")
        if (self.accelerator is None) != (self.count == 0):
            raise ValueError(f"pool {self.name}: accelerator and count go together")
        return self

    @property
    def work_pool(self) -> str:
        """The name of the Prefect work pool."""
        return self.prefect_work_pool or self.name

    @property
    def limit(self) -> str:
        """The name of the global concurrency limit of its accelerators; only an `accelerated` pool has one."""
        return f"rollart-{self.name}"

    @property
    def accelerated(self) -> bool:
        """Whether runs have to queue for this pool."""
        return self.role in ("train", "rollout")

    @property
    def hardware(self) -> str:
        """The hardware as one tag, e.g. `8xh800` or `cpu`."""
        return f"{self.count}x{self.accelerator}" if self.accelerator else "cpu"

    @property
    def prefect_tags(self) -> list[str]:
        """Tags of every flow run and task run on this pool, e.g. `["pool:gpu-compute", "hardware:8xh800"]`."""
        return [f"pool:{self.name}", f"hardware:{self.hardware}", *self.tags]


def local_pools() -> list[Pool]:
    """The default set: one process pool a role, all on this machine."""
    return pool_set("local")


def pool_set(name: str) -> list[Pool]:
    """The pools of a shipped set (`local`, `production`) or of a TOML file.

    Raises FileNotFoundError, tomllib.TOMLDecodeError, KeyError without a `pools` table, pydantic.ValidationError.
    """
    shipped = SETS / f"{name}.toml"
    text = (shipped if shipped.exists() else Path(name)).read_text()
    return [Pool(**pool) for pool in tomllib.loads(text)["pools"]]


def pool_for(stage: str, pools: list[Pool]) -> Pool:
    """The pool that runs `stage` (or a service); without one of role control, that of the environments controls.

    Raises KeyError for an unknown stage, LookupError without a pool.
    """
    role = ROLE_OF[stage]
    for wanted in (role, "environment") if role == "control" else (role,):
        for pool in pools:
            if pool.role == wanted:
                return pool
    raise LookupError(f"no pool has role {role!r}, which stage {stage!r} needs")
