"""Demonstrations of a noisy expert as trajectories, tokenised exactly as the episode loop does it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tasks.config import EnvironmentsConfig, TaskConfig
from tasks.environments import TextEnvironment, make_environment
from tasks.environments.base import derive_seed
from tasks.rollout.chat import ChatRenderer
from tasks.rollout.episode import Transcript
from tasks.trajectory import Trajectory


def demonstrations(
    tasks: Sequence[TaskConfig], chat: ChatRenderer, count: int, seed: int, noise: float, context_limit: int
) -> list[Trajectory]:
    """`count` demonstrations on instances of the split `train`, tasks drawn by their weights.

    The loss mask covers the expert's answers with their end-of-turn tokens; there are no behaviour log-probs
    (0) and no versions (0 where the mask is true). One that would pass `context_limit` (tokens) ends before.
    """
    rng = random.Random(derive_seed("demonstrations", seed))
    plain = EnvironmentsConfig()
    environments = [
        make_environment(task, plain, seed, split="train", index=i) for i, task in enumerate(tasks)
    ]
    made: list[Trajectory] = []
    for number in range(count):
        which = rng.choices(range(len(tasks)), [task.weight for task in tasks])[0]
        episode_seed = derive_seed("demonstration", seed, number)
        made.append(
            _demonstrate(
                tasks[which].name, environments[which], chat, episode_seed, number, rng, noise, context_limit
            )
        )
    return made


def _demonstrate(
    task: str,
    environment: TextEnvironment,
    chat: ChatRenderer,
    seed: int,
    number: int,
    rng: random.Random,
    noise: float,
    context_limit: int,
) -> Trajectory:
    observation, _ = environment.reset(seed)
    transcript, turns, reward, success, over = Transcript(), 0, 0.0, False, False
    heard = chat.open(environment.system_prompt, observation)
    while not over:
        action = environment.demonstrate(rng, noise)
        said = chat.answer(action)
        if len(transcript) + len(heard) + len(said) > context_limit:
            break
        transcript.heard(heard)
        transcript.said(said, [0.0] * len(said), [0] * len(said))
        turns += 1
        observation, gain, terminated, truncated, info = environment.step(action)
        reward, success, over = reward + gain, bool(info.get("success", False)), terminated or truncated
        if not over:
            heard = chat.reply(observation)
    return Trajectory(
        task=task,
        seed=seed,
        wave=0,
        group=number,
        index=0,
        **transcript.arrays(),
        turns=turns,
        env_reward=reward,
        success=success,
        truncated=not over,
        reward=0.0,
    )
