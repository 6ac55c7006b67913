from __future__ import annotations

import numpy as np
import pytest

from tasks.config import TaskConfig
from tasks.errors import UserError
from tasks.reward import score
from tasks.trajectory import Trajectory


def trajectory(env_reward: float, success: bool) -> Trajectory:
    empty = np.zeros(2)
    return Trajectory("t", 0, 0, 0, 0, empty, empty > 0, empty, empty, 1, env_reward, success, False)


def shorter_is_better(made: Trajectory) -> float:
    return -float(len(made.tokens))


def nothing(made: Trajectory) -> float:
    return float("nan")


def test_a_trajectory_earns_its_environments_return_by_default():
    assert score(trajectory(0.25, True), TaskConfig(name="frozenlake")) == 0.25


def test_a_reward_is_chosen_by_name_or_brought_along():
    assert score(trajectory(0.25, True), TaskConfig(name="frozenlake", reward="success")) == 1.0
    assert score(trajectory(0.25, True), TaskConfig(name="f", reward=f"{__name__}:shorter_is_better")) == -2.0


def test_an_unknown_reward_is_named_with_the_nearest_one():
    with pytest.raises(UserError, match=r"tasks\.N\.reward: 'sucess' .*\n.*'success'"):
        score(trajectory(1.0, True), TaskConfig(name="frozenlake", reward="sucess"))


def test_a_reward_that_is_no_number_is_an_error_not_a_gradient():
    with pytest.raises(ValueError, match="not a finite number"):
        score(trajectory(1.0, True), TaskConfig(name="f", reward=f"{__name__}:nothing"))
