"""Advantages against the papers' formulas, written out in plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.training import advantages

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16).map(
    lambda r: np.array(r, dtype=np.float64)
)


def mean(values):
    return sum(values) / len(values)


@given(rewards)
def test_grpo_is_the_reward_standardised_by_the_population_deviation(r):
    values = r.tolist()
    deviation = math.sqrt(mean([(x - mean(values)) ** 2 for x in values]))
    if max(values) == min(values):
        assert not advantages.grpo(r).any()
    else:
        expected = [(x - mean(values)) / (deviation + 1e-6) for x in values]
        assert advantages.grpo(r) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rewards)
def test_dr_grpo_is_the_reward_less_the_mean(r):
    assert advantages.dr_grpo(r) == pytest.approx([x - mean(r.tolist()) for x in r], abs=1e-9)


@given(rewards)
def test_rloo_is_the_reward_less_the_mean_of_the_others(r):
    expected = [r[i] - mean([r[j] for j in range(len(r)) if j != i]) for i in range(len(r))]
    assert advantages.rloo(r) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", sorted(advantages.ADVANTAGES))
def test_equal_rewards_and_groups_of_one_have_no_advantage_and_no_variance(name):
    for r in (np.full(8, 0.1), np.array([0.7])):
        assert not advantages.has_variance(r)
        assert not advantages.ADVANTAGES[name](r).any()


def test_any_difference_is_variance():
    assert advantages.has_variance(np.array([0.0, 0.0, 1e-6]))
