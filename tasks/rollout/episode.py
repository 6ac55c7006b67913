"""One episode, token in, token out.

Invariants: the token list is only appended to, and what the policy generated is never tokenised again; the
loss mask is true exactly on generated tokens; whatever goes wrong is data: `run_episode` returns a trajectory
or a recorded failure, and raises only for a configuration that no episode could run with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from tasks.config import EnvironmentsConfig, TaskConfig
from tasks.environments import Split, TextEnvironment, make_environment
from tasks.environments.base import Step, derive_seed
from tasks.environments.deadline import CallHung, call
from tasks.errors import UserError
from tasks.rollout.chat import ChatRenderer
from tasks.trajectory import NOT_GENERATED, EpisodeFailure, EpisodeSpec, Trajectory


class Generated(Protocol):
    """What the engine's client returns: per generated token its id, log-prob and weight version."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def versions(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str: ...


Generate = Callable[..., Generated]


@dataclass(frozen=True)
class Turn:
    """One turn of an episode, for whoever watches it."""

    observation: str  # what the policy saw
    action: str
    logprob: float  # of the whole action, the end-of-turn token included; natural log
    version: int  # of the policy that acted
    reward: float
    next_observation: str
    over: bool


class EpisodeCancelled(Exception):
    """The episode is no longer wanted; `tokens` is how many it had generated."""

    def __init__(self, tokens: int = 0):
        super().__init__(f"cancelled after {tokens} generated tokens")
        self.tokens = tokens


class _Failed(Exception):
    """One attempt failed at a stage."""

    def __init__(self, stage: Literal["reset", "step", "generate"], error: Exception):
        super().__init__(f"{type(error).__name__}: {error}"[:500])
        self.stage = stage


@dataclass
class Transcript:
    """The token list of an episode in the making, and what is known about each token."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def heard(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy did not generate."""
        self.tokens += tokens
        self.loss_mask += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [NOT_GENERATED] * len(tokens)

    def said(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append generated tokens. Raises ValueError if they are not described one by one."""
        if len(tokens) == 0 or not len(tokens) == len(logprobs) == len(versions):
            raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
        self.tokens += tokens
        self.loss_mask += [True] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions

    def arrays(self) -> dict[str, Any]:
        """The arrays of a Trajectory, each of shape [T]."""
        return {
            "tokens": np.array(self.tokens, np.int32),
            "loss_mask": np.array(self.loss_mask, np.bool_),
            "logprobs": np.array(self.logprobs, np.float32),
            "versions": np.array(self.versions, np.int32),
        }


def run_episode(
    spec: EpisodeSpec,
    task: TaskConfig,
    environments: EnvironmentsConfig,
    generate: Generate,
    chat: ChatRenderer,
    *,
    context_limit: int,
    temperature: float,
    split: Split = "train",
    before_turn: Callable[[], None] = lambda: None,
    on_turn: Callable[[Turn], None] = lambda turn: None,
) -> Trajectory | EpisodeFailure:
    """Run an episode, again after a failed attempt, at most `environments.retries` times.

    Reaching `context_limit` (tokens), the turn limit or an action's token limit ends it as truncated. All
    randomness (sampling, latency, faults) is drawn from `spec` and the attempt. Raises UserError for options
    no environment takes. `before_turn` is called before every turn; it may wait, and may raise EpisodeCancelled.
    `on_turn` hears of every turn taken.
    """
    env_s = 0.0
    for attempt in range(environments.retries + 1):
        seed = derive_seed(spec.task, spec.seed, spec.wave, spec.group, spec.index, attempt)
        environment = make_environment(task, environments, seed, split=split)
        playing = _Attempt(
            spec,
            task,
            environments,
            generate,
            chat,
            context_limit,
            temperature,
            before_turn,
            on_turn,
            seed,
            env_s,
        )
        try:
            return playing.run(environment, retries=attempt)
        except _Failed as error:
            failure, env_s = error, playing.env_s
        finally:
            playing.close(environment)
    return EpisodeFailure(**vars(spec), stage=failure.stage, reason=str(failure), attempts=attempt + 1)


@dataclass
class _Attempt:
    """One attempt at an episode."""

    spec: EpisodeSpec
    task: TaskConfig
    environments: EnvironmentsConfig
    generate: Generate
    chat: ChatRenderer
    context_limit: int
    temperature: float
    before_turn: Callable[[], None]
    on_turn: Callable[[Turn], None]
    seed: int
    env_s: float  # so far, failed attempts included
    calls: list[float] = field(default_factory=list)
    hung: bool = False

    def run(self, environment: TextEnvironment, retries: int) -> Trajectory:
        started_at = time.time()
        transcript, turns, reward, success, truncated = Transcript(), 0, 0.0, False, False
        seen = self._reset(environment)
        transcript.heard(self.chat.open(environment.system_prompt, seen))
        if len(transcript) >= self.context_limit:
            problem = f"a prompt of {len(transcript)} tokens leaves no room in {self.context_limit}"
            raise _Failed("reset", ValueError(problem))
        while not truncated:
            self._ready(transcript)
            generation = self._generate(transcript, self._action_limit(environment), turns)
            turns += 1
            closed = transcript.tokens[-1] in self.chat.stop_token_ids
            if not closed and len(transcript) >= self.context_limit:
                truncated = True  # cut in the middle of an action, which therefore is not taken
                break
            action = self.chat.decode(generation.tokens)
            observation, gain, terminated, truncated, info = self._step(environment, action)
            logprob, over = sum(generation.logprobs), terminated or truncated
            self.on_turn(Turn(seen, action, logprob, generation.versions[-1], gain, observation, over))
            seen = observation
            reward += gain
            success = bool(info.get("success", False))
            if terminated or truncated:
                truncated = truncated or not closed
                break
            reply = self.chat.reply(observation, closed=closed)
            if len(transcript) + len(reply) >= self.context_limit:
                truncated = True
            else:
                transcript.heard(reply)
        return Trajectory(
            **vars(self.spec),
            **transcript.arrays(),
            calls=np.array(self.calls, np.float64),
            turns=turns,
            env_reward=reward,
            success=success,
            truncated=truncated,
            retries=retries,
            started_at=started_at,
            ended_at=time.time(),
            env_s=self.env_s,
            generate_s=sum(self.calls[1::2]) - sum(self.calls[::2]),
        )

    def _ready(self, transcript: Transcript) -> None:
        try:
            self.before_turn()
        except EpisodeCancelled:
            raise EpisodeCancelled(sum(transcript.loss_mask)) from None

    def _action_limit(self, environment: TextEnvironment) -> int:
        return self.task.max_action_tokens or environment.max_action_tokens

    def _reset(self, environment: TextEnvironment) -> str:
        with self._in_environment("reset"):
            deadline_s = self.environments.reset_deadline_s
            return _checked_reset(call(environment.reset, self.spec.seed, deadline_s=deadline_s))

    def _step(self, environment: TextEnvironment, action: str) -> Step:
        with self._in_environment("step"):
            deadline_s = self.environments.step_deadline_s
            return _checked_step(call(environment.step, action, deadline_s=deadline_s))

    @contextmanager
    def _in_environment(self, stage: Literal["reset", "step"]) -> Iterator[None]:
        """Counts the time, and turns whatever the environment does wrong into a failure of `stage`."""
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            self.hung = isinstance(error, CallHung)
            raise _Failed(stage, error) from error
        finally:
            self.env_s += time.monotonic() - started

    def _generate(self, transcript: Transcript, limit: int, turn: int) -> Generated:
        self.calls.append(time.time())
        try:
            generation = self.generate(
                transcript.tokens,
                max_tokens=min(limit, self.context_limit - len(transcript)),
                temperature=self.temperature,
                stop_token_ids=self.chat.stop_token_ids,
                seed=derive_seed(self.seed, turn),
                sticky=f"{self.spec.wave}/{self.spec.group}/{self.spec.index}",
            )
            transcript.said(generation.tokens, generation.logprobs, generation.versions)
            return generation
        except UserError:
            raise
        except Exception as error:
            raise _Failed("generate", error) from error
        finally:
            self.calls.append(time.time())

    def close(self, environment: TextEnvironment) -> None:
        """Close the environment, unless a call of it still runs."""
        if self.hung:
            return
        try:
            call(environment.close, deadline_s=self.environments.step_deadline_s)
        except Exception:  # the episode is over and its result is good
            pass


def _checked_reset(reply: Any) -> str:
    if not (isinstance(reply, tuple) and len(reply) == 2 and isinstance(reply[0], str)):
        raise TypeError(f"malformed reply to reset: {str(reply)[:100]!r}")
    return reply[0]


def _checked_step(reply: Any) -> Step:
    fits = isinstance(reply, tuple) and len(reply) == 5 and isinstance(reply[0], str)
    if not (
        fits and isinstance(reply[1], int | float) and np.isfinite(reply[1]) and isinstance(reply[4], dict)
    ):
        raise TypeError(f"malformed reply to step: {str(reply)[:100]!r}")
    return reply[0], float(reply[1]), bool(reply[2]), bool(reply[3]), reply[4]
