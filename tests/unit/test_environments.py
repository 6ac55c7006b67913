from __future__ import annotations

import random
import statistics
import time

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from tasks.config import EnvironmentsConfig, TaskConfig
from tasks.environments import TextEnvironment, environment_class, environment_names, make_environment
from tasks.environments.arithmetic import Arithmetic
from tasks.environments.base import HELD_OUT_SHARE
from tasks.environments.deadline import CallHung, abandoned_calls, call
from tasks.environments.frozenlake import ACTIONS, FrozenLake, best_fixed_path, lake_map
from tasks.environments.wrappers import InjectedFault
from tasks.errors import UserError

PLAIN = EnvironmentsConfig()


class Echo(TextEnvironment):
    """A user's own environment."""

    name = "echo"
    vocabulary = ("yes",)

    def __init__(self, *, split="train", word: str = "yes"):
        self.word = word

    def reset(self, seed):
        return self.word, {}

    def step(self, action):
        return "", float(action == self.word), True, False, {"success": action == self.word}

    def demonstrate(self, rng, noise):
        return self.word


@pytest.mark.parametrize("name", environment_names())
def test_each_environment_says_and_hears_only_words_of_its_vocabulary(name):
    environment = make_environment(TaskConfig(name=name), PLAIN, 0)
    words = set(environment.vocabulary)
    for seed in range(30):
        texts, over = [environment.reset(seed)[0]], False
        while not over:
            action = environment.demonstrate(random.Random(seed), 0.3)
            texts.append(action)
            observation, _, terminated, truncated, info = environment.step(action)
            texts.append(observation)
            over = terminated or truncated
        assert isinstance(info["success"], bool)
        for word in " ".join(texts).split():
            assert word in words or (word.isdigit() and set(word) <= words), word


@pytest.mark.parametrize("name", environment_names())
def test_the_expert_without_noise_solves_every_instance(name):
    environment = make_environment(TaskConfig(name=name), PLAIN, 0)
    for seed in range(200):
        environment.reset(seed)
        over = False
        while not over:
            _, reward, terminated, truncated, info = environment.step(
                environment.demonstrate(random.Random(0), 0.0)
            )
            over = terminated or truncated
        # A lake whose shortest way is longer than the turns cannot be crossed; every other can.
        assert info["success"] or (truncated and name == "frozenlake")
        assert reward == float(info["success"])


@pytest.mark.parametrize("name", environment_names())
def test_the_same_seed_gives_the_same_episode(name):
    def play():
        environment = make_environment(TaskConfig(name=name), PLAIN, 0)
        return [
            environment.reset(7),
            [environment.step(w) for w in ("down", "right")][: environment.max_turns],
        ]

    assert play() == play()


@pytest.mark.parametrize("name", environment_names())
def test_no_instance_is_both_in_training_and_held_out(name):
    def instances(split):
        environment = make_environment(TaskConfig(name=name), PLAIN, 0, split=split)
        return {environment.reset(seed)[0] for seed in range(2000)}

    train, held_out = instances("train"), instances("held_out")
    assert len(held_out) > 200
    assert not train & held_out


def test_held_out_maps_are_a_fair_share_of_all_maps():
    environment = FrozenLake()
    shares = []
    for split in ("train", "held_out"):
        environment.split = split
        shares.append(
            statistics.mean("".join(environment.reset(s)[1]["map"]).count("H") for s in range(1500))
        )
    assert shares[0] == pytest.approx(shares[1], abs=0.2)
    assert HELD_OUT_SHARE == 5


def test_frozenlake_moves_as_gymnasium_does():
    for seed in range(50):
        mine = FrozenLake(max_turns=30)
        rows = mine.reset(seed)[1]["map"]
        theirs = FrozenLakeEnv(desc=list(rows), is_slippery=False)
        theirs.reset(seed=0)
        rng, over = random.Random(seed), False
        for _ in range(30):
            action = rng.randrange(4)
            state, reward, over, *_ = theirs.step(action)
            text, gain, terminated, _, _ = mine.step(ACTIONS[action])
            assert (float(reward), over) == (gain, terminated)
            assert text.split().index("P") == state
            if over:
                break


def test_a_slippery_lake_slips_as_often_as_its_success_rate_says():
    lake, moved = FrozenLake(slippery=True, success_rate=0.5, size=8, frozen_share=0.99), 0
    for seed in range(2000):
        lake.reset(seed)
        moved += lake.step("down")[0].split().index("P") == 8
    assert moved / 2000 == pytest.approx(0.5, abs=0.04)


def test_a_word_that_is_no_move_costs_a_turn_and_nothing_else():
    lake = FrozenLake(max_turns=2)
    start, _ = lake.reset(3)
    assert lake.step("hello")[:4] == (start, 0.0, False, False)
    assert lake.step("")[:4] == (start, 0.0, False, True)


def test_the_best_fixed_path_is_as_good_as_any_sequence_of_moves():
    seeds = range(128)
    path, success = best_fixed_path(seeds)
    lake = FrozenLake(split="held_out")
    tables = []
    for seed in seeds:
        lake.reset(seed)
        tables.append([[lake._lake.P[s][a][0][1] for a in range(4)] for s in range(16)])
    table, maps = np.array(tables, np.int8), np.arange(len(tables))
    states = np.zeros((1, len(tables)), np.int8)
    for _ in range(8):  # all 4**8 sequences; goal and holes hold whoever reaches them
        states = np.concatenate([table[maps, states, action] for action in range(4)])
    assert success == (states == 15).mean(axis=1).max()
    replayed = []
    for seed in seeds:
        lake.reset(seed)
        replayed.append(max(lake.step(move)[1] for move in path))
    assert success == np.mean(replayed)


def read_off(answer: str, base: int) -> int:
    """The sum a filled-in form states, by string handling alone."""
    results = [column.split("=")[1].replace(" ", "") for column in answer.split(";")]
    return int(results[-1][0] + "".join(result[-1] for result in reversed(results)), base)


@pytest.mark.parametrize(("base", "digits"), [(2, 6), (3, 4), (10, 3)])
def test_the_worked_answer_is_long_and_states_the_sum(base, digits):
    sums = Arithmetic(base=base, digits=digits)
    for seed in range(50):
        question, facts = sums.reset(seed)
        answer = sums.demonstrate(random.Random(0), 0.0)
        assert 20 <= len(answer.split()) < sums.max_action_tokens and len(answer) == len(question)
        assert read_off(answer, base) == sum(facts["numbers"])
        assert sums.step(answer.replace(" ", ""))[1] == 1.0


def test_only_the_sum_counts_and_a_wrong_one_earns_nothing():
    sums = Arithmetic()
    sums.reset(5)
    right = sums.demonstrate(random.Random(0), 0.0)
    assert sums.step(" ; ".join(column[column.index("=") :] for column in right.split(" ; ")))[1] == 1.0
    flipped = right[:-1] + str((int(right[-1]) + 1) % 3)
    longer, shorter = f"{right} ; 0 0 0 = 0 0", right[: right.rindex(";")]
    for text in (flipped, longer, shorter, f"{right} ;", right.replace("=", "_", 1), "", ";", "="):
        assert sums.step(text)[1] == 0.0


@pytest.mark.parametrize("base", [2, 10])
def test_noise_makes_the_share_of_random_digits_it_says(base):
    sums, rng, solved = Arithmetic(base=base, digits=4), random.Random(0), 0
    for seed in range(2000):
        sums.reset(seed)
        solved += sums.step(sums.demonstrate(rng, 0.3))[4]["success"]
    assert solved / 2000 == pytest.approx((1 - 0.3 * (1 - 1 / base)) ** 4, abs=0.04)


def test_a_sum_and_its_mirror_are_on_the_same_side_of_the_split():
    def pairs(split):
        sums = Arithmetic(split=split, digits=3)
        return {tuple(sorted(sums.reset(seed)[1]["numbers"])) for seed in range(500)}

    assert not pairs("train") & pairs("held_out")


def test_an_unknown_environment_is_named_with_its_setting_and_the_nearest_one():
    with pytest.raises(UserError, match=r"tasks\.1\.name: 'frozenlak' .*\n.*did you mean 'frozenlake'"):
        environment_class("frozenlak", 1)


def test_a_user_brings_an_environment_by_module_and_class():
    task = TaskConfig(name=f"{__name__}:Echo", options={"word": "no"})
    assert make_environment(task, PLAIN, 0).reset(0) == ("no", {})
    for name in ("no.such.module:Echo", f"{__name__}:Nothing", f"{__name__}:PLAIN"):
        with pytest.raises(UserError, match=r"tasks\.0\.name"):
            environment_class(name, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sise": 5}, r"tasks\.0\.options\.sise: .*\n.*'size'"),
        ({"size": 1}, r"tasks\.0\.options: .*size must be 2 to 16"),
        ({"size": "four"}, r"tasks\.0\.options: .*size"),
        ({"split": "train"}, r"tasks\.0\.options\.split"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(UserError, match=message):
        make_environment(TaskConfig(name="frozenlake", options=options), PLAIN, 0, index=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latency": {"step_mean": 1.0}}, "environments.latency.step_mean: .*\n.*step_mean_s"),
        ({"faults": {"hang": 1.0}}, "environments.faults.hang: "),
        ({"faults": {"hang_share": 1.5}}, "environments.faults.hang_share: .*between 0 and 1"),
        ({"faults": {"hang_share": 0.6, "exception_share": 0.6}}, "environments.faults: "),
    ],
)
def test_a_wrong_wrapper_setting_is_named(settings, message):
    with pytest.raises(UserError, match=message):
        make_environment(TaskConfig(name="frozenlake"), EnvironmentsConfig(**settings), 0)


def test_faults_come_with_their_shares_and_the_same_for_the_same_seed():
    config = EnvironmentsConfig(faults={"exception_share": 0.3, "malformed_share": 0.2})

    def outcomes(seed):
        environment = make_environment(TaskConfig(name="frozenlake"), config, seed)
        found = []
        for _ in range(1000):
            try:
                found.append("good" if len(environment.reset(0)) == 2 else "malformed")
            except InjectedFault:
                found.append("exception")
        return found

    first = outcomes(1)
    assert first == outcomes(1) != outcomes(2)
    assert first.count("exception") / 1000 == pytest.approx(0.3, abs=0.05)
    assert first.count("malformed") / 1000 == pytest.approx(0.2, abs=0.05)


def test_latency_has_the_mean_it_was_given(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("tasks.environments.wrappers.time.sleep", slept.append)
    config = EnvironmentsConfig(latency={"reset_mean_s": 2.0, "reset_sigma": 0.5})
    environment = make_environment(TaskConfig(name="frozenlake"), config, 0)
    for _ in range(3000):
        environment.reset(0)
    assert statistics.mean(slept) == pytest.approx(2.0, rel=0.05)
    assert statistics.stdev(np.log(slept)) == pytest.approx(0.5, rel=0.05)


def test_a_call_that_hangs_is_left_after_its_deadline_counted_and_the_next_one_works():
    before, started = abandoned_calls(), time.monotonic()
    with pytest.raises(CallHung):
        call(time.sleep, 0.6, deadline_s=0.1)
    assert time.monotonic() - started < 0.5
    assert abandoned_calls() == before + 1
    assert call(lambda: 5, deadline_s=1.0) == 5
    time.sleep(0.8)
    assert abandoned_calls() == before  # it came back, and its thread with it


def test_user_code_cannot_end_the_process():
    with pytest.raises(RuntimeError, match="SystemExit"):
        call(exit, 3, deadline_s=1.0)
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 / 0, deadline_s=1.0)


def test_a_map_depends_on_seed_and_split_alone():
    assert lake_map(4, "train") == lake_map(4, "train") != lake_map(4, "held_out")
