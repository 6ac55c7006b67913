"""The overhead is the time that no stage covers, whatever the overlaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.bench import idle_parts, overhead


def span(lane, start, end):
    return {"lane": lane, "name": lane, "start": start, "end": end}


def test_gaps_are_named_by_their_neighbours():
    gaps = idle_parts([span("rollout", 1, 4), span("train", 5, 8)], 0, 10)
    assert gaps == {"record -> rollout": 1, "rollout -> train": 1, "train -> record": 2}


def test_overlapping_stages_leave_no_gap():
    assert idle_parts([span("rollout", 0, 6), span("train", 3, 10)], 0, 10) == {}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=8))
def test_idle_seconds_equal_a_brute_force_count(intervals):
    spans = [span(f"lane{i}", a, a + length) for i, (a, length) in enumerate(intervals)]
    covered = {second for s in spans for second in range(max(s["start"], 5), min(s["end"], 45))}
    assert sum(idle_parts(spans, 5, 45).values()) == 40 - len(covered)


def test_overhead_is_a_median_over_iterations():
    records = [{"at": 10.0 * k, "spans": [span("train", 10 * k - 9 + k, 10 * k)]} for k in range(1, 5)]
    result = overhead(records)
    assert result["iterations"] == 3
    assert result["median_s"] == pytest.approx(4.0)
