"""How a run comes to be: its configuration is found, resolved, checked, and written to the store."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import UserError

if TYPE_CHECKING:
    from tasks.config import RunConfig
    from tasks.store import Store

CONFIGS = Path(__file__).parent.parent / "deployments" / "configs"


def find_config(name: str) -> Path:
    """The file of a config given as a path or as the name of a shipped one. Raises UserError."""
    path = Path(name)
    if path.suffix == ".toml" or "/" in name:
        return path
    shipped = {file.stem: file for file in sorted(CONFIGS.glob("*.toml")) if "bench-" not in file.stem}
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    did = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(
        "CONFIG",
        f"there is no shipped config {name!r}",
        f"{did}give a .toml file or one of: {', '.join(shipped)}",
    )


def stem_of(path: Path) -> str:
    """What the names of a config's runs begin with."""
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in path.stem.lower()).strip("._-") or "run"
    return stem[:40]


def run_name(path: Path) -> str:
    """A name for a new run: `frozenlake-1129-143012` (month, day, hour, minute, second)."""
    return f"{stem_of(path)}-{time.strftime('%m%d-%H%M%S')}"


def resolved(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a new run, with a name."""
    from tasks.config import load_config

    config = load_config(path, list(overrides))
    return config if config.name else load_config(path, [*overrides, f"name={run_name(path)!r}"])


def create(path: Path, overrides: Sequence[str]) -> tuple[Store, RunConfig]:
    """Check everything, then write the new run's configuration. Raises UserError, also for a run that exists."""
    from flows import checks
    from tasks.store import layout

    config = resolved(path, overrides)
    checks.preflight(config, str(config.name), resume=False)
    store = checks.store_of(config).below(str(config.name))
    store.write(layout.CONFIG, config.to_toml().encode())
    return store, config


def open_run(run: str, config: str | None, settings: Sequence[str], endpoint_url: str | None) -> Store:
    """The store of a run that a deployment is to train: one that exists, or a new one from a config.

    `run` is the whole URI of a prepared run, or a name below the `store.root` of `config`. Settings that differ from
    those of a run that exists are changed as `rollart resume` changes them. Raises UserError.
    """
    from flows import checks
    from tasks.store import Store, layout

    if config is None:
        store = Store(run, endpoint_url)
        if not store.exists(layout.CONFIG):
            raise UserError(
                "run",
                f"there is no run at {run}",
                "give the URI of a prepared run, or `config` to make a new one",
            )
        return _changed(store, settings)
    path = find_config(config)
    overrides = ["placement=pools", *settings, f"name={run!r}"]
    store = checks.store_of(resolved(path, overrides)).below(run)
    return _changed(store, settings) if store.exists(layout.CONFIG) else create(path, overrides)[0]


def _changed(store: Store, settings: Sequence[str]) -> Store:
    """The store of a run, whose configuration now has these settings. Raises UserError if they may not change."""
    from flows import checks
    from tasks.config import parse_config, stored_config
    from tasks.store import layout

    config = stored_config(store)
    if parse_config(config.model_dump(mode="json", exclude_none=True), list(settings)) != config:
        changed = checks.resumed_config(store, config, list(settings))
        store.write(layout.CONFIG, changed.to_toml().encode())
    return store
