from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.config import EnvironmentsConfig, PolicyConfig, TaskConfig
from tasks.environments import TextEnvironment
from tasks.inference.client import Generation
from tasks.rollout.chat import ChatRenderer
from tasks.rollout.demonstrations import demonstrations
from tasks.rollout.episode import EpisodeCancelled, run_episode
from tasks.training.policy import tiny_policy, vocabulary
from tasks.trajectory import NOT_GENERATED, EpisodeFailure, EpisodeSpec, Trajectory

LAKE, SUMS = TaskConfig(name="frozenlake"), TaskConfig(name="arithmetic")
SPEC = EpisodeSpec("frozenlake", 5, 1, 2, 3)


def renderer() -> ChatRenderer:
    files: dict[str, bytes | Path] = tiny_policy(PolicyConfig(), vocabulary(["frozenlake", "arithmetic"]))
    return ChatRenderer({name: data for name, data in files.items() if isinstance(data, bytes)})


CHAT = renderer()
END = CHAT.stop_token_ids[0]


@dataclass
class Script:
    """An engine that says given texts, or random ids by the request's seed; keeps what it was asked."""

    texts: list[str] | None = None
    version: int = 0

    def __post_init__(self):
        self.asked: list[dict] = []

    def __call__(self, tokens, **sampling):
        self.asked.append({"tokens": list(tokens), **sampling})
        if self.texts is None:
            rng = random.Random(sampling["seed"])
            ids = [rng.randrange(3, 20) for _ in range(rng.randint(1, 6))] + [END]
        else:
            ids = CHAT.answer(self.texts[(len(self.asked) - 1) % len(self.texts)])
        ids = ids[: sampling["max_tokens"]]
        reason = "stop" if ids[-1] == END else "length"
        return Generation(ids, [-0.5 * i for i in ids], [self.version + len(self.asked)] * len(ids), reason)


def run(generate, task=LAKE, environments=None, spec=SPEC, context_limit=256, **more):
    environments = environments or EnvironmentsConfig()
    return run_episode(
        spec, task, environments, generate, CHAT, context_limit=context_limit, temperature=1.0, **more
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), context_limit=st.integers(20, 200), limit=st.integers(1, 8))
def test_tokens_are_only_appended_and_the_mask_is_exactly_what_was_generated(seed, context_limit, limit):
    engine = Script()
    made = run(
        engine,
        TaskConfig(name="frozenlake", max_action_tokens=limit),
        None,
        EpisodeSpec("frozenlake", seed, 0, 0, 0),
        context_limit,
    )
    assert isinstance(made, Trajectory)
    tokens = made.tokens.tolist()
    assert len(tokens) <= context_limit
    generated = np.zeros(len(tokens), bool)
    ends = [len(asked["tokens"]) for asked in engine.asked]
    for asked, start in zip(engine.asked, ends, strict=True):
        assert tokens[:start] == asked["tokens"]  # each prompt is a prefix of the whole
    for turn, asked in enumerate(engine.asked):
        answer = Script()(asked["tokens"], **{k: v for k, v in asked.items() if k != "tokens"})
        start = ends[turn]
        assert tokens[start : start + len(answer.tokens)] == answer.tokens
        generated[start : start + len(answer.tokens)] = True
        assert (made.versions[start : start + len(answer.tokens)] == turn + 1).all()
        np.testing.assert_allclose(made.logprobs[start : start + len(answer.tokens)], answer.logprobs)
    assert (made.loss_mask == generated).all()
    assert (made.versions[~generated] == NOT_GENERATED).all() and (made.logprobs[~generated] == 0).all()
    assert made.turns == len(engine.asked)


def test_an_episode_is_repeatable_from_its_spec():
    first, second = run(Script()), run(Script())
    assert first.tokens.tolist() == second.tokens.tolist()
    other = run(Script(), spec=EpisodeSpec("frozenlake", 5, 1, 2, 4))
    assert first.tokens.tolist() != other.tokens.tolist()  # another member of the group samples for itself


def test_reaching_the_goal_earns_the_reward():
    demonstration = next(d for d in demonstrations([LAKE], CHAT, 20, 0, 0.0, 256) if d.success)
    words = CHAT.decode(demonstration.tokens[demonstration.loss_mask]).split()
    made = run(Script(words), spec=EpisodeSpec("frozenlake", demonstration.seed, 0, 0, 0))
    assert (made.env_reward, made.success, made.truncated, made.reward) == (1.0, True, False, None)
    # The loop and the demonstrations agree on every token and on the mask.
    assert made.tokens.tolist() == demonstration.tokens.tolist()
    assert made.loss_mask.tolist() == demonstration.loss_mask.tolist()


def test_the_turn_limit_truncates():
    made = run(Script(["up"]))
    assert (made.turns, made.truncated, made.success) == (8, True, False)


def test_the_context_limit_truncates_and_is_never_passed():
    made = run(Script(["up"]), context_limit=70)
    assert made.truncated and made.turns == 3 and len(made.tokens) <= 70
    assert made.loss_mask[-1]  # nothing is heard that is not answered


def test_an_answer_cut_by_its_token_limit_is_taken_as_it_is_and_the_episode_is_truncated():
    made = run(
        Script(["4 + 4"]),
        TaskConfig(name="arithmetic", max_action_tokens=2),
        spec=EpisodeSpec("arithmetic", 1, 0, 0, 0),
    )
    assert made.truncated and made.generated_tokens == 2 and made.env_reward == 0.0


def test_a_prompt_longer_than_the_context_is_a_recorded_failure():
    made = run(Script(), context_limit=10)
    assert isinstance(made, EpisodeFailure) and "leaves no room in 10" in made.reason


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"exception_share": 1.0}, "InjectedFault: injected exception"),
        ({"hang_share": 1.0, "hang_s": 0.5}, "CallHung: no answer within 0.05 s"),
        ({"malformed_share": 1.0}, "malformed reply to reset"),
    ],
)
def test_a_fault_is_a_recorded_failure_after_its_retries(faults, reason):
    environments = EnvironmentsConfig(faults=faults, retries=1, reset_deadline_s=0.05)
    made = run(Script(), environments=environments)
    assert isinstance(made, EpisodeFailure)
    assert (made.stage, made.attempts, made.task, made.index) == ("reset", 2, "frozenlake", 3)
    assert reason in made.reason


def test_some_faults_cost_retries_and_no_result_is_changed_by_them():
    environments = EnvironmentsConfig(faults={"exception_share": 0.02, "malformed_share": 0.02}, retries=5)
    specs = [EpisodeSpec("frozenlake", seed, 0, seed, 0) for seed in range(100)]
    made = [run(Script(["down"]), environments=environments, spec=spec) for spec in specs]
    assert all(isinstance(result, Trajectory) for result in made)
    assert 10 < sum(result.retries for result in made) < 100
    clean = [run(Script(["down"]), spec=spec) for spec in specs]
    assert [r.tokens.tolist() for r in made] == [r.tokens.tolist() for r in clean]


def test_an_engine_that_fails_is_a_failure_of_the_stage_generate():
    def broken(tokens, **sampling):
        raise ConnectionError("engine gone")

    made = run(broken, environments=EnvironmentsConfig(retries=0))
    assert isinstance(made, EpisodeFailure) and (made.stage, made.reason) == (
        "generate",
        "ConnectionError: engine gone",
    )


def test_an_answer_that_is_not_described_token_by_token_is_a_failure_not_a_trajectory():
    def short(tokens, **sampling):
        return Generation([5, END], [0.0], [0, 0], "stop")

    made = run(short, environments=EnvironmentsConfig(retries=0))
    assert isinstance(made, EpisodeFailure) and made.stage == "generate"


def test_a_cancelled_episode_stops_at_its_next_turn():
    engine = Script(["up"])

    def before_turn():
        if len(engine.asked) == 2:
            raise EpisodeCancelled

    with pytest.raises(EpisodeCancelled) as cancelled:
        run(engine, before_turn=before_turn)
    assert len(engine.asked) == 2
    assert cancelled.value.tokens == 4  # two turns of an action and its end


def test_a_trajectory_says_when_its_turns_waited_for_the_engine():
    made = run(Script(["up"]))
    assert isinstance(made, Trajectory)
    assert len(made.calls) == 2 * made.turns
    times = [made.started_at, *made.calls, made.ended_at]
    assert times == sorted(times)
    assert made.generate_s == pytest.approx(sum(made.calls[1::2] - made.calls[::2]), abs=1e-5)


class Slow(TextEnvironment):
    name = "slow"
    vocabulary = ()
    max_turns = 2
    closed = 0

    def __init__(self, *, split="train"):
        pass

    def reset(self, seed):
        return "P", {}

    def step(self, action):
        time.sleep(0.05)
        return "P", 0.5, False, True, {}

    def demonstrate(self, rng, noise):
        return "up"

    def close(self):
        Slow.closed += 1


def test_time_in_the_environment_is_measured_and_it_is_closed_also_after_a_failure():
    task = TaskConfig(name=f"{__name__}:Slow")
    made = run(Script(["up"]), task)
    assert made.env_s >= 0.05 > made.generate_s and made.ended_at - made.started_at >= 0.05
    assert (made.env_reward, made.success, Slow.closed) == (0.5, False, 1)

    def broken(tokens, **sampling):
        raise ConnectionError

    run(broken, task, EnvironmentsConfig(retries=0))
    assert Slow.closed == 2


def test_demonstrations_are_repeatable_follow_the_weights_and_train_on_answers_alone():
    tasks = [TaskConfig(name="frozenlake", weight=3.0), SUMS]
    made = demonstrations(tasks, CHAT, 400, 1, 0.3, 256)
    again = demonstrations(tasks, CHAT, 400, 1, 0.3, 256)
    assert [d.tokens.tolist() for d in made] == [d.tokens.tolist() for d in again]
    assert sum(d.task == "frozenlake" for d in made) / 400 == pytest.approx(0.75, abs=0.06)
    for d in made:
        assert (d.versions[d.loss_mask] == 0).all() and (d.versions[~d.loss_mask] == NOT_GENERATED).all()
        assert d.tokens[-1] == END and d.loss_mask[-1] and d.reward == 0.0
        assert int((d.tokens[d.loss_mask] == END).sum()) == d.turns
    assert 0.3 < np.mean([d.success for d in made]) < 0.8
    assert max(len(d.tokens) for d in demonstrations([LAKE], CHAT, 50, 1, 1.0, 60)) <= 60


class SlowThenBroken(Slow):
    """Its first instance takes 0.1 s for a step that raises."""

    name = "slow-then-broken"
    made = 0

    def __init__(self, *, split="train"):
        SlowThenBroken.made += 1
        self.broken = SlowThenBroken.made == 1

    def step(self, action):
        if self.broken:
            time.sleep(0.1)
            raise OSError("gone")
        return super().step(action)


def test_seconds_in_the_environment_of_a_failed_attempt_count():
    task = TaskConfig(name=f"{__name__}:SlowThenBroken")
    made = run(Script(["up"]), task, EnvironmentsConfig(retries=1))
    assert made.retries == 1 and made.env_s >= 0.15
