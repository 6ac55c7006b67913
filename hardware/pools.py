"""The pools of a run: where each stage and service runs, declared as data.

A pool is a hardware-tagged Prefect work pool. Placement `local` keeps the same names and tags, so that a
run looks the same in the UI on a laptop and on a cluster.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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


class Pool(BaseModel):
    """One pool: `slots` is how many services or stages it runs side by side."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    role: Role
    tags: list[str] = []
    slots: int = Field(default=1, ge=1)

    @property
    def prefect_tags(self) -> list[str]:
        """Tags of every flow run and task run on this pool, e.g. `["pool:gpu-compute", "h800"]`."""
        return [f"pool:{self.name}", *self.tags]


def local_pools() -> list[Pool]:
    """The default set: one pool a role, all on this machine."""
    text = Path(__file__).with_name("local.toml").read_text()
    return [Pool(**pool) for pool in tomllib.loads(text)["pools"]]


def pool_for(stage: str, pools: list[Pool]) -> Pool:
    """The pool that runs `stage` (or a service). Raises KeyError for an unknown stage, LookupError without a pool."""
    role = ROLE_OF[stage]
    for pool in pools:
        if pool.role == role:
            return pool
    raise LookupError(f"no pool has role {role!r}, which stage {stage!r} needs")
