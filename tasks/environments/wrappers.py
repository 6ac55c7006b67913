"""Seeded latency and seeded faults around any environment, for tests and benchmarks."""

from __future__ import annotations

import difflib
import math
import random
import time
from typing import Any

from tasks.environments.base import Step, TextEnvironment, derive_seed
from tasks.errors import UserError

LATENCY_DEFAULTS = {"step_mean_s": 0.0, "step_sigma": 0.0, "reset_mean_s": 0.0, "reset_sigma": 0.0}
FAULTS, CALLS = ("exception", "hang", "malformed"), ("reset", "step")
# `hang_share` is of all calls, `step_hang_share` of the steps alone and on top of it.
FAULT_DEFAULTS = {
    **{f"{kind}_share": 0.0 for kind in FAULTS},
    **{f"{what}_{kind}_share": 0.0 for what in CALLS for kind in FAULTS},
    "hang_s": 3600.0,
}


class InjectedFault(RuntimeError):
    """The exception that the faults wrapper raises."""


class _Wrapper(TextEnvironment):
    """Everything goes to the wrapped environment; subclasses put something in front."""

    name = "wrapper"
    vocabulary = ()

    def __init__(self, inner: TextEnvironment):
        self.inner = inner
        self.system_prompt, self.max_turns = inner.system_prompt, inner.max_turns
        self.max_action_tokens = inner.max_action_tokens

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return self.inner.reset(seed)

    def step(self, action: str) -> Step:
        return self.inner.step(action)

    def demonstrate(self, rng: random.Random, noise: float) -> str:
        return self.inner.demonstrate(rng, noise)

    def close(self) -> None:
        self.inner.close()


class Latency(_Wrapper):
    """Sleeps before each reset and step; log-normal with the given mean (s) and sigma of the logarithm."""

    def __init__(self, inner: TextEnvironment, settings: dict[str, float], seed: int):
        super().__init__(inner)
        self._settings = settings
        self._rng = random.Random(derive_seed("latency", seed))

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._sleep("reset")
        return self.inner.reset(seed)

    def step(self, action: str) -> Step:
        self._sleep("step")
        return self.inner.step(action)

    def _sleep(self, what: str) -> None:
        mean, sigma = self._settings[f"{what}_mean_s"], self._settings[f"{what}_sigma"]
        if mean > 0:  # the mean of a log-normal is exp(mu + sigma^2 / 2)
            time.sleep(self._rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))


class Faults(_Wrapper):
    """Each reset and step fails with the given shares: by an exception, a hang, or a malformed reply."""

    def __init__(self, inner: TextEnvironment, settings: dict[str, float], seed: int):
        super().__init__(inner)
        self._settings = settings
        self._rng = random.Random(derive_seed("faults", seed))

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return self._malformed() if self._fault("reset") else self.inner.reset(seed)

    def step(self, action: str) -> Step:
        return self._malformed() if self._fault("step") else self.inner.step(action)

    def _fault(self, what: str) -> bool:
        """Raise or hang if this call's draw says so; True asks for a malformed reply."""
        draw = self._rng.random()
        for kind in FAULTS:
            share = self._settings[f"{kind}_share"] + self._settings[f"{what}_{kind}_share"]
            if draw < share:
                if kind == "exception":
                    raise InjectedFault("injected exception")
                if kind == "hang":
                    time.sleep(self._settings["hang_s"])
                    return False
                return True
            draw -= share
        return False

    @staticmethod
    def _malformed() -> Any:
        return ("injected malformed reply",)


def with_latency(environment: TextEnvironment, settings: dict[str, float], seed: int) -> TextEnvironment:
    """The environment behind seeded latency, or as it is without settings. Raises UserError."""
    complete = _complete(settings, LATENCY_DEFAULTS, "environments.latency")
    return Latency(environment, complete, seed) if settings else environment


def with_faults(environment: TextEnvironment, settings: dict[str, float], seed: int) -> TextEnvironment:
    """The environment behind seeded faults, or as it is without settings. Raises UserError."""
    complete = _complete(settings, FAULT_DEFAULTS, "environments.faults")
    if max(sum(complete[f"{k}_share"] + complete[f"{what}_{k}_share"] for k in FAULTS) for what in CALLS) > 1:
        raise UserError("environments.faults", "has shares that sum to more than 1", "lower them")
    return Faults(environment, complete, seed) if settings else environment


def _complete(given: dict[str, float], defaults: dict[str, float], setting: str) -> dict[str, float]:
    for name, value in given.items():
        if name not in defaults:
            nearest = difflib.get_close_matches(name, defaults, n=1, cutoff=0.5)
            fix = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(defaults)}"
            raise UserError(f"{setting}.{name}", "is not a setting", fix)
        if value < 0 or (name.endswith("_share") and value > 1):
            bound = "between 0 and 1" if name.endswith("_share") else "0 or more"
            raise UserError(f"{setting}.{name}", f"must be {bound}, but it is {value}", "correct the value")
    return {**defaults, **given}
