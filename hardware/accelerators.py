"""Accelerator profiles: what a pool's hardware tag promises."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator. `device` is a regular expression for its name in the driver, memory is in GiB."""

    name: str
    device: str
    memory_gib: float


@functools.cache
def accelerators() -> dict[str, Accelerator]:
    """The known profiles by name."""
    data = tomllib.loads(Path(__file__).with_name("accelerators.toml").read_text())
    return {name: Accelerator(name, **profile) for name, profile in data.items()}
