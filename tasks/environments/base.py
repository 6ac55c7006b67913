"""The interface of an environment: Gymnasium's, with text in and out.

Invariants: what an environment shows depends on its options, the split and the seed of `reset`, and nothing
else; training and held-out instances are split by their content, so no instance is in both.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 5  # one instance in five

Step = tuple[str, float, bool, bool, dict[str, Any]]


class TextEnvironment(ABC):
    """One environment; an object plays many episodes, one after the other.

    A subclass takes `split` and its options as keyword arguments; the options of a task in the configuration
    are exactly these. A wrong value raises ValueError with a message that starts with the option's name.
    """

    name: ClassVar[str]
    vocabulary: ClassVar[tuple[str, ...]]  # every word it says or hears; whitespace separates them
    system_prompt: str = ""
    max_turns: int = 1
    max_action_tokens: int = 16  # of one action, the end-of-turn token included

    @abstractmethod
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Start the episode of `seed`; returns the first observation and facts about it."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Take the policy's text; returns observation, reward, terminated, truncated, info.

        When the episode is over, `info["success"]` says whether it was solved. A text that is not an action
        is an answer of the policy, not an error.
        """

    @abstractmethod
    def demonstrate(self, rng: random.Random, noise: float) -> str:
        """The expert's next action in the current state; a share `noise` of its decisions is random."""

    @classmethod
    def blind_success(cls, seeds: Sequence[int], **options: Any) -> float | None:
        """Success on the held-out episodes of `seeds` without reading what the environment says, if known.

        A policy that is no better has not been shown to read.
        """
        return None

    def close(self) -> None:  # noqa: B027  (most environments hold nothing)
        """Give back what the environment holds."""


def split_of(content: str) -> Split:
    """The split an instance belongs to, by the hash of its content: the same on every machine and for ever."""
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0 else "train"


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on all parts, for a stream of its own."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
