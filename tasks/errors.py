"""Errors that a person can act on."""

from __future__ import annotations


class UserError(Exception):
    """Bad input or a machine that cannot do what was asked; the command line exits with code 2.

    `setting` names what to change (a dotted configuration key, a flag, an environment variable) and `fix`
    says how, so that the message alone is enough to go on.
    """

    def __init__(self, setting: str, problem: str, fix: str):
        self.setting, self.problem, self.fix = setting, problem, fix
        super().__init__(f"{setting}: {problem}\n  fix: {fix}")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:  # survives a trip between processes
        return type(self), (self.setting, self.problem, self.fix)


class DeadlineExceeded(TimeoutError):
    """A wait ran out: says what was waited for, how long, and what to look at."""

    def __init__(self, waited_for: str, seconds: float, look_at: str):
        self.waited_for, self.seconds, self.look_at = waited_for, seconds, look_at
        super().__init__(f"waited {seconds:.0f} s for {waited_for}; look at {look_at}")

    def __reduce__(self) -> tuple[type, tuple[str, float, str]]:
        return type(self), (self.waited_for, self.seconds, self.look_at)


class RunFailed(Exception):
    """A run that started and ended badly: the reason, and where to look; the command line exits with code 1."""

    def __init__(self, reason: str, look_at: str = ""):
        self.reason, self.look_at = reason, look_at
        super().__init__(f"{reason}\n  look at: {look_at}" if look_at else reason)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reason, self.look_at)
