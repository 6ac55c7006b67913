"""Environments by name: the project's own, and a user's by `package.module:ClassName`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import TypeVar

from tasks.config import EnvironmentsConfig, TaskConfig
from tasks.environments.base import Split, TextEnvironment
from tasks.environments.wrappers import with_faults, with_latency
from tasks.errors import UserError

E = TypeVar("E", bound=type[TextEnvironment])

_CLASSES: dict[str, type[TextEnvironment]] = {}


def register(cls: E) -> E:
    """Class decorator: make an environment known by its `name`."""
    _CLASSES[cls.name] = cls
    return cls


def environment_names() -> list[str]:
    """The names of the project's own environments."""
    _load_own()
    return sorted(_CLASSES)


def environment_class(name: str, index: int | None = None) -> type[TextEnvironment]:
    """The class of a task's environment.

    `index` is the task's place in the configuration, for the message. Raises UserError for an unknown name or
    a `package.module:ClassName` that does not lead to an environment.
    """
    setting = f"tasks.{'N' if index is None else index}.name"
    if ":" in name:
        return _import_class(name, setting)
    _load_own()
    if name in _CLASSES:
        return _CLASSES[name]
    nearest = difflib.get_close_matches(name, _CLASSES, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise UserError(
        setting,
        f"{name!r} is not an environment",
        f"{hint}known: {', '.join(sorted(_CLASSES))}; or your own as 'package.module:ClassName'",
    )


def make_environment(
    task: TaskConfig,
    environments: EnvironmentsConfig,
    seed: int,
    *,
    split: Split = "train",
    index: int | None = None,
) -> TextEnvironment:
    """The environment of a task, with the configured latency and faults drawn from `seed`.

    Raises UserError for an unknown option and for a value its environment refuses.
    """
    cls = environment_class(task.name, index)
    setting = f"tasks.{'N' if index is None else index}.options"
    options = [name for name in inspect.signature(cls).parameters if name != "split"]
    for given in task.options:
        if given not in options:
            nearest = difflib.get_close_matches(given, options, n=1, cutoff=0.5)
            fix = f"did you mean {nearest[0]!r}?" if nearest else f"options: {', '.join(options) or 'none'}"
            raise UserError(f"{setting}.{given}", f"is not an option of {task.name!r}", fix)
    try:
        environment = cls(split=split, **task.options)  # type: ignore[call-arg]
    except (ValueError, TypeError) as error:
        raise UserError(setting, f"{task.name!r} refuses them: {error}", "correct the option") from None
    environment = with_latency(environment, environments.latency, seed)
    return with_faults(environment, environments.faults, seed)


def _load_own() -> None:
    """Import the project's own environments, which registers them."""
    importlib.import_module("tasks.environments.frozenlake")
    importlib.import_module("tasks.environments.arithmetic")


def _import_class(name: str, setting: str) -> type[TextEnvironment]:
    module, _, attribute = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        fix = "give 'package.module:ClassName', importable where `rollart` and the Dask workers run"
        raise UserError(setting, f"{name!r} cannot be imported ({error})", fix) from None
    if not (isinstance(cls, type) and issubclass(cls, TextEnvironment)):
        raise UserError(setting, f"{name!r} is not an environment", "derive it from TextEnvironment")
    return cls
