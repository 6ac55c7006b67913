"""Checkpoints: each rank's masters and optimiser state as safetensors in the store, whole or not at all.

`checkpoints/<v>/rank-<r>/` is written by its rank, with a manifest of its own; the manifest of
`checkpoints/<v>`, written last and by rank 0, makes the set complete. The weights themselves are those of
`weights/<v>`, which is always there first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch.distributed as dist
from torch import Tensor

from tasks.store import Store, layout
from tasks.training.model import ShardedPolicy

FILE = "state.safetensors"


def save(store: Store, version: int, policy: ShardedPolicy, kept: int, **facts: Any) -> None:
    """Write the checkpoint of `version` and remove all but the newest `kept`. Collective."""
    prefix = layout.checkpoint(version)
    if store.manifest(prefix) is not None:
        return
    rank = dist.get_rank()
    if rank == 0:
        store.delete(prefix)  # what a killed trainer left half written
    dist.barrier()
    with tempfile.TemporaryDirectory(prefix="rollart-checkpoint-") as folder:
        path = Path(folder) / FILE
        safetensors.torch.save_file(policy.shard(), path)
        store.put(f"{prefix}/rank-{rank}", {FILE: path}, rank=rank)
    dist.barrier()
    if rank == 0:
        store.put(prefix, {}, version=version, ranks=dist.get_world_size(), stage=policy.stage, **facts)
        for old in complete(store)[:-kept]:
            store.delete(layout.checkpoint(old))


def complete(store: Store) -> list[int]:
    """Versions that have a complete checkpoint, oldest first."""
    return [v for v in store.numbers("checkpoints") if store.manifest(layout.checkpoint(v)) is not None]


def steps(store: Store, version: int) -> int:
    """Optimiser steps of the schedule that a complete checkpoint had taken."""
    return int((store.manifest(layout.checkpoint(version)) or {})["steps"])


def read(store: Store, version: int) -> dict[str, Tensor]:
    """This rank's state at `version`. Raises CorruptObject, or FileNotFoundError without a manifest."""
    data = store.get(f"{layout.checkpoint(version)}/rank-{dist.get_rank()}", FILE)
    return safetensors.torch.load(data)
