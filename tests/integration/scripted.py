"""Engines and environments for tests of the episode stream: no model, and faults on demand."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from tasks.config import RunConfig
from tasks.environments import TextEnvironment
from tasks.inference.client import Generation
from tasks.rollout.chat import ChatRenderer
from tasks.store import Store


def walker(store: Store, config: RunConfig) -> Callable[..., Generation]:
    """An engine, as EpisodeJob.engine names it: moves at random, by the request's seed."""
    chat = ChatRenderer.from_store(store)
    answers = [chat.answer(word) for word in ("left", "down", "right", "up")]

    def generate(tokens, *, max_tokens, temperature, stop_token_ids, seed, sticky) -> Generation:
        answer = answers[random.Random(seed).randrange(4)][:max_tokens]
        return Generation(answer, [-1.0] * len(answer), [0] * len(answer), "stop")

    return generate


def slow_walker(store: Store, config: RunConfig) -> Callable[..., Generation]:
    """A walker that thinks for 0.1 s."""
    generate = walker(store, config)

    def slowly(tokens, **sampling) -> Generation:
        time.sleep(0.1)
        return generate(tokens, **sampling)

    return slowly


class Hanging(TextEnvironment):
    """Never answers a step."""

    name = "hanging"
    vocabulary = ("up",)

    def __init__(self, *, split="train"):
        pass

    def reset(self, seed):
        return "up", {}

    def step(self, action):
        time.sleep(3600)

    def demonstrate(self, rng, noise):
        return "up"


class Deadly(Hanging):
    """Ends the process that steps it."""

    name = "deadly"

    def step(self, action):
        os._exit(1)
