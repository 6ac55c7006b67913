"""Environments: text in and out, registered by name."""

from tasks.environments.base import Split, TextEnvironment
from tasks.environments.registry import environment_class, environment_names, make_environment, register

__all__ = [
    "Split",
    "TextEnvironment",
    "environment_class",
    "environment_names",
    "make_environment",
    "register",
]
