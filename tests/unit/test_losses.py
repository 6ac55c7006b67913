"""Losses against the papers' formulas in numpy loops, and gradients against the cut into micro-batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.training import losses
from tasks.training.batching import plan

LOW, HIGH, CAP = 0.2, 0.28, 2.0
tokens = st.lists(
    st.tuples(st.floats(-5, -0.01), st.floats(-5, -0.01), st.floats(-5, -0.01), st.floats(-3, 3)),
    min_size=1,
    max_size=12,
)


def columns(rows):
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def clipped_objective(logp, centre, advantage):
    ratio = math.exp(logp - centre)
    return min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)


@given(tokens)
def test_ppo_is_the_clipped_surrogate_with_separate_bounds(rows):
    logp, centre, _, advantage = columns(rows)
    expected = [-clipped_objective(a, b, d) for a, b, _, d in rows]
    assert losses.ppo(logp, centre, advantage, LOW, HIGH).loss.tolist() == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


@given(tokens)
def test_decoupled_is_ppo_around_the_proximal_policy_times_the_capped_weight(rows):
    logp, proximal, behaviour, advantage = columns(rows)
    expected = [-min(math.exp(b - c), CAP) * clipped_objective(a, b, d) for a, b, c, d in rows]
    result = losses.decoupled(logp, proximal, behaviour, advantage, LOW, HIGH, CAP)
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(tokens)
def test_truncated_has_the_capped_importance_weighted_policy_gradient(rows):
    logp, _, behaviour, advantage = columns(rows)
    logp.requires_grad_()
    losses.truncated(logp, behaviour, advantage, CAP).loss.sum().backward()
    expected = [-min(math.exp(a - c), CAP) * d for a, _, c, d in rows]
    assert logp.grad.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(tokens)
def test_icepop_drops_tokens_whose_weight_is_outside_its_bounds_on_either_side(rows):
    logp, proximal, behaviour, advantage = columns(rows)
    weights = [math.exp(b - c) for _, b, c, _ in rows]
    calibrated = [w if 0.5 <= w <= 5.0 else 0.0 for w in weights]
    expected = [-m * clipped_objective(a, b, d) for m, (a, b, _, d) in zip(calibrated, rows, strict=True)]
    result = losses.icepop(logp, proximal, behaviour, advantage, (LOW, HIGH), (0.5, 5.0))
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert result.weight.tolist() == pytest.approx(weights)
    assert result.masked.tolist() == [not 0.5 <= w <= 5.0 for w in weights]


@given(tokens)
def test_dppo_drops_tokens_whose_probability_moved_far_in_the_direction_of_their_advantage(rows):
    logp, _, behaviour, advantage = columns(rows)
    logp.requires_grad_()
    result = losses.dppo(logp, behaviour, advantage, 0.2)
    result.loss.sum().backward()
    expected, masked = [], []
    for a, _, c, d in rows:
        ratio, far = math.exp(a - c), abs(math.exp(a) - math.exp(c)) > 0.2
        drop = far and ((d > 0 and ratio > 1) or (d <= 0 and ratio < 1))
        masked.append(drop)
        expected.append(0.0 if drop else -ratio * d)
    assert result.masked.tolist() == masked
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert logp.grad.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)  # d(r A) / d logp = r A


@given(st.lists(tokens, min_size=1, max_size=4), st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_gspo_is_the_clipped_objective_of_the_geometric_mean_ratio_of_each_sequence(sequences, advantages):
    logp, _, behaviour, _ = columns([row for rows in sequences for row in rows])
    lengths = torch.tensor([len(rows) for rows in sequences])
    belongs = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    advantage = torch.tensor(advantages, dtype=torch.float64)[belongs]
    result = losses.gspo(logp, behaviour, advantage, belongs, LOW, HIGH)
    weights = torch.tensor(losses.token_weights(lengths.numpy(), "sequence_mean", 0))[belongs]
    total = 0.0
    for rows, a in zip(sequences, advantages, strict=False):
        ratio = math.prod(math.exp(x - c) for x, _, c, _ in rows) ** (1 / len(rows))
        total += min(ratio * a, min(max(ratio, 1 - LOW), 1 + HIGH) * a)
    assert float((weights * result.loss).sum()) == pytest.approx(-total / len(sequences), rel=1e-6, abs=1e-9)


def test_a_clipped_token_carries_no_gradient_and_is_counted():
    logp = torch.tensor([0.0, 0.0, 0.0, 0.0], requires_grad=True)
    centre = torch.log(torch.tensor([1 / 1.4, 1 / 1.4, 1 / 0.7, 1 / 0.7]))  # ratios 1.4 and 0.7
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    result = losses.ppo(logp, centre, advantage, LOW, HIGH)
    result.loss.sum().backward()
    assert result.clipped.tolist() == [True, False, False, True]
    assert (logp.grad != 0).tolist() == [False, True, True, False]


def test_on_policy_every_correction_has_the_plain_policy_gradient():
    advantage = torch.tensor([0.5, -1.5, 2.0])
    for correction in (
        lambda x, b: losses.ppo(x, b, advantage, LOW, HIGH),
        lambda x, b: losses.decoupled(x, b, b, advantage, LOW, HIGH, CAP),
        lambda x, b: losses.truncated(x, b, advantage, CAP),
        lambda x, b: losses.icepop(x, b, b, advantage, (LOW, HIGH), (0.5, 5.0)),
        lambda x, b: losses.dppo(x, b, advantage, 0.2),
        lambda x, b: losses.gspo(x, b, advantage, torch.arange(3), LOW, HIGH),
    ):
        logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
        correction(logp, logp.detach().clone()).loss.sum().backward()
        assert logp.grad.tolist() == pytest.approx((-advantage).tolist())


@given(
    st.lists(st.floats(0.05, 5), min_size=2, max_size=6), st.lists(st.floats(0.05, 5), min_size=6, max_size=6)
)
def test_k3_is_non_negative_and_its_mean_under_the_policy_is_the_kl(p, q):
    p, q = np.array(p) / sum(p), np.array(q[: len(p)]) / sum(q[: len(p)])
    estimate = losses.k3(torch.tensor(np.log(p)), torch.tensor(np.log(q)))
    assert (estimate >= -1e-12).all()
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert float((torch.tensor(p) * estimate).sum()) == pytest.approx(exact, abs=1e-9)


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=8))
def test_entropy_is_that_of_the_softmax(logits):
    p = np.exp(logits) / np.exp(logits).sum()
    expected = -sum(x * math.log(x) for x in p)
    assert float(losses.entropy(torch.tensor([logits], dtype=torch.float64))) == pytest.approx(
        expected, abs=1e-9
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_normalisations_are_those_of_dapo_grpo_and_dr_grpo(lengths):
    random = np.random.default_rng(0)
    values = [random.normal(size=n) for n in lengths]
    expected = {
        "token_mean": sum(v.sum() for v in values) / sum(lengths),
        "sequence_mean": sum(v.sum() / len(v) for v in values) / len(values),
        "fixed_length": sum(v.sum() / 256 for v in values) / len(values),
    }
    for normalisation, loss in expected.items():
        weights = losses.token_weights(np.array(lengths), normalisation, 256)
        assert sum(w * v.sum() for w, v in zip(weights, values, strict=True)) == pytest.approx(loss)


@pytest.mark.parametrize("normalisation", ["token_mean", "sequence_mean", "fixed_length"])
@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 40), st.integers(1, 3))
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches_or_ranks(
    normalisation, lengths, budget, ranks
):
    random = torch.Generator().manual_seed(0)
    features = [torch.randn(n, 3, generator=random, dtype=torch.float64) for n in lengths]
    advantage = [torch.randn(n, generator=random, dtype=torch.float64) for n in lengths]
    weights = losses.token_weights(np.array(lengths), normalisation, 16)

    def gradient(cut):
        total = torch.zeros(3, dtype=torch.float64)
        for micro in cut:
            theta = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
            for i in micro:
                logp = torch.nn.functional.logsigmoid(features[i] @ theta)
                (
                    weights[i] * losses.ppo(logp, logp.detach() + 0.1, advantage[i], LOW, HIGH).loss
                ).sum().backward()
            total += theta.grad if theta.grad is not None else 0
        return total

    cut = [micro for rank in plan(lengths, budget, ranks) for micro in rank]
    assert torch.allclose(gradient(cut), gradient([range(len(lengths))]), atol=1e-12)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(ValueError, match="sum"):
        losses.token_weights(np.array([1]), "sum", 1)
