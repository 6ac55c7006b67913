"""Invariants of the micro-batch plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.training.batching import padding_fraction, plan

lengths_ = st.lists(st.integers(1, 300), max_size=40)


@given(lengths_, st.integers(1, 2000), st.integers(1, 4))
def test_every_sequence_is_in_exactly_one_micro_batch(lengths, budget, ranks):
    placed = [i for rank in plan(lengths, budget, ranks) for micro in rank for i in micro]
    assert sorted(placed) == list(range(len(lengths)))


@given(lengths_, st.integers(1, 2000), st.integers(1, 4))
def test_a_micro_batch_fits_the_budget_or_is_one_sequence(lengths, budget, ranks):
    for micro in (m for rank in plan(lengths, budget, ranks) for m in rank):
        assert len(micro) <= 1 or len(micro) * max(lengths[i] for i in micro) <= budget


@given(lengths_, st.integers(1, 2000), st.integers(2, 4))
def test_ranks_have_the_same_number_of_micro_batches_and_like_shares(lengths, budget, ranks):
    planned = plan(lengths, budget, ranks)
    assert len(planned) == ranks and len({len(rank) for rank in planned}) == 1
    tokens = [sum(lengths[i] for micro in rank for i in micro) for rank in planned]
    assert max(tokens) - min(tokens) <= 2 * max(lengths, default=0)


@given(lengths_, st.integers(1, 2000), st.integers(1, 4))
def test_the_plan_depends_on_its_arguments_alone(lengths, budget, ranks):
    assert plan(lengths, budget, ranks) == plan(list(lengths), budget, ranks)


def test_bucketing_by_length_leaves_little_padding():
    lengths = [20 + (37 * i) % 150 for i in range(128)]
    micro = plan(lengths, 16384)[0]
    assert padding_fraction(lengths, micro) < 0.1 < padding_fraction(lengths, [list(range(128))])


def test_padding_fraction_counts_padded_positions():
    assert padding_fraction([2, 4, 3], [[0, 1], [2]]) == pytest.approx(1 - 9 / 11)
    assert padding_fraction([2], [[]]) == 0.0
