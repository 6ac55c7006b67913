"""The ledger's promises, under any order of timings, failures and restarts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rollout.ledger import Ledger


def test_wave_is_admitted_only_within_the_bound():
    ledger = Ledger(groups=2, redundancy=0, max_staleness=1, waves=9)
    assert ledger.admits(4, version=3)
    assert not ledger.admits(5, version=3)


def test_batch_takes_older_waves_first_and_waits_for_enough():
    ledger = Ledger(groups=2, redundancy=0, max_staleness=1, waves=3)
    ledger.open_wave(0)
    ledger.open_wave(1)
    ledger.dispatch(0, version=0)
    ledger.dispatch(1, version=0)
    ledger.finish((1, 0), 0)
    assert ledger.batch(0) is None
    ledger.finish((0, 1), 0)
    assert ledger.batch(0) == [(0, 1), (1, 0)]


def test_late_group_is_carried_over_while_fresh_and_sent_back_when_stale():
    ledger = Ledger(groups=1, redundancy=0, max_staleness=1, waves=4)
    for wave in (0, 1):
        ledger.open_wave(wave)
        ledger.dispatch(wave, version=0)
    ledger.finish((1, 0), 0)
    ledger.consume(ledger.batch(0) or [])
    assert ledger.expire(1) == []  # (0, 0) runs on: batch 1 may still use it
    ledger.open_wave(2)
    ledger.dispatch(2, version=1)
    ledger.finish((2, 0), 1)
    ledger.consume(ledger.batch(1) or [])
    assert ledger.expire(2) == [(0, 0)]
    assert ledger.dispatch(0, version=2) == [(0, 0)]


def test_failed_group_is_replaced_in_its_wave():
    ledger = Ledger(groups=2, redundancy=0, max_staleness=0, waves=1)
    ledger.open_wave(0)
    ledger.dispatch(0, version=0)
    assert ledger.fail((0, 1)) == (0, 2)
    assert ledger.dispatch(0, version=0) == [(0, 2)]


def test_result_of_a_group_that_expired_meanwhile_is_refused():
    ledger = Ledger(groups=1, redundancy=1, max_staleness=0, waves=2)
    ledger.open_wave(0)
    ledger.dispatch(0, version=0)
    ledger.finish((0, 0), 0)
    ledger.consume(ledger.batch(0) or [])
    assert ledger.expire(1) == [(0, 1)]
    assert not ledger.finish((0, 1), 0)


@settings(max_examples=200, deadline=None)
@given(
    groups=st.integers(1, 3),
    redundancy=st.integers(0, 2),
    alpha=st.integers(0, 3),
    waves=st.integers(1, 6),
    data=st.data(),
)
def test_every_batch_fills_once_within_the_bound_whatever_the_timing(groups, redundancy, alpha, waves, data):
    consumed, finished, ledger, version = [], {}, None, 0

    def restart():
        kept = {key: oldest for key, oldest in finished.items() if key not in consumed}
        return Ledger(groups, redundancy, alpha, waves, consumed, kept)

    ledger, opened, running, steps = restart(), set(), {}, 0
    while version < waves:
        steps += 1
        assert steps < 2000, "deadlock"
        for wave in range(waves):
            if ledger.admits(wave, version):
                if wave not in opened:
                    ledger.open_wave(wave)
                    opened.add(wave)
                running.update(dict.fromkeys(ledger.dispatch(wave, version), version))
        assert len(running) <= (alpha + 2) * (groups + redundancy) * 2
        event = data.draw(st.sampled_from(["finish", "finish", "finish", "fail", "restart"]))
        if event == "restart" and steps % 7 == 0:
            ledger, opened, running = restart(), set(), {}
            continue
        if running:
            key = data.draw(st.sampled_from(sorted(running)))
            oldest = data.draw(st.integers(running.pop(key), version))
            if event == "fail":
                ledger.fail(key)
            elif ledger.finish(key, oldest):
                finished[key] = oldest
        batch = ledger.batch(version)
        if batch is not None:
            assert len(batch) == groups
            assert all(version - finished[key] <= alpha for key in batch)
            assert not set(batch) & set(consumed)
            consumed += batch
            ledger.consume(batch)
            version += 1
            for key in ledger.expire(version):
                running.pop(key, None)
    assert len(consumed) == len(set(consumed)) == groups * waves
