"""The ledger's promises, under any order of timings, failures and restarts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rollout.ledger import Ledger


def dispatched(ledger: Ledger, wave: int, version: int) -> list[tuple[int, int]]:
    """Dispatch the wave's pending groups, and start them under `version`."""
    keys = ledger.dispatch(wave)
    for key in keys:
        ledger.start(key, version)
    return keys


def test_wave_is_admitted_only_within_the_bound():
    ledger = Ledger(groups=2, redundancy=0, max_staleness=1)
    assert ledger.admits(4, version=3)
    assert not ledger.admits(5, version=3)


def test_batch_takes_older_waves_first_and_waits_for_enough():
    ledger = Ledger(groups=2, redundancy=0, max_staleness=1)
    ledger.open_wave(0)
    ledger.open_wave(1)
    dispatched(ledger, 0, 0)
    dispatched(ledger, 1, 0)
    ledger.finish((1, 0), 0)
    assert ledger.batch(0) is None
    ledger.finish((0, 1), 0)
    assert ledger.batch(0) == [(0, 1), (1, 0)]


def test_late_group_is_carried_over_while_fresh_and_sent_back_when_stale():
    ledger = Ledger(groups=1, redundancy=0, max_staleness=1)
    for wave in (0, 1):
        ledger.open_wave(wave)
        dispatched(ledger, wave, 0)
    ledger.finish((1, 0), 0)
    ledger.consume(ledger.batch(0) or [])
    assert ledger.expire(1) == []  # (0, 0) runs on: batch 1 may still use it
    ledger.open_wave(2)
    dispatched(ledger, 2, 1)
    ledger.finish((2, 0), 1)
    ledger.consume(ledger.batch(1) or [])
    assert ledger.expire(2) == [(0, 0)]
    assert dispatched(ledger, 0, 2) == [(0, 0)]


def test_a_group_that_waits_for_a_slot_does_not_age():
    ledger = Ledger(groups=1, redundancy=0, max_staleness=0)
    ledger.open_wave(0)
    ledger.dispatch(0)
    assert ledger.expire(5) == []
    ledger.start((0, 0), 5)
    assert ledger.expire(5) == []
    assert ledger.expire(6) == [(0, 0)]


def test_spare_groups_are_dropped_once_enough_others_of_their_wave_are_finished():
    ledger = Ledger(groups=2, redundancy=2, max_staleness=1)
    ledger.open_wave(0)
    dispatched(ledger, 0, 0)
    ledger.finish((0, 3), 0)
    assert ledger.losers(0) == []
    ledger.finish((0, 1), 0)
    assert ledger.losers(0) == [(0, 0), (0, 2)]
    assert not ledger.finish((0, 0), 0)
    assert (ledger.batch(0), ledger.dropped) == ([(0, 1), (0, 3)], 2)


def test_with_a_barrier_a_wave_waits_for_the_one_before_it():
    ledger = Ledger(groups=1, redundancy=0, max_staleness=1, barrier=True)
    ledger.open_wave(0)
    dispatched(ledger, 0, 0)
    assert not ledger.admits(1, version=0)
    ledger.finish((0, 0), 0)
    assert ledger.admits(1, version=0)
    assert not ledger.admits(2, version=0)


def test_failed_group_is_replaced_in_its_wave():
    ledger = Ledger(groups=2, redundancy=0, max_staleness=0)
    ledger.open_wave(0)
    dispatched(ledger, 0, 0)
    assert ledger.fail((0, 1)) == (0, 2)
    assert dispatched(ledger, 0, 0) == [(0, 2)]


def test_result_of_a_group_that_expired_meanwhile_is_refused():
    ledger = Ledger(groups=1, redundancy=1, max_staleness=0)
    ledger.open_wave(0)
    dispatched(ledger, 0, 0)
    ledger.finish((0, 0), 0)
    ledger.consume(ledger.batch(0) or [])
    assert ledger.expire(1) == [(0, 1)]
    assert not ledger.finish((0, 1), 0)


@settings(max_examples=300, deadline=None)
@given(
    groups=st.integers(1, 3),
    redundancy=st.integers(0, 2),
    alpha=st.integers(0, 3),
    waves=st.integers(1, 6),
    barrier=st.booleans(),
    data=st.data(),
)
def test_every_batch_fills_once_within_the_bound_whatever_the_timing(
    groups, redundancy, alpha, waves, barrier, data
):
    """Groups finish in any order, under any mix of versions, fail, and the controller restarts at any time."""
    consumed, finished, version = [], {}, 0

    def restart():
        kept = {key: oldest for key, oldest in finished.items() if key not in consumed}
        return Ledger(groups, redundancy, alpha, barrier, consumed, kept)

    ledger, opened, running, steps = restart(), set(), {}, 0
    while version < waves:
        steps += 1
        assert steps < 2000, "deadlock"
        for wave in range(waves):
            if ledger.admits(wave, version):
                if wave not in opened:
                    ledger.open_wave(wave)
                    opened.add(wave)
                running.update(dict.fromkeys(ledger.dispatch(wave)))  # to the version they started under
        for wave in range(waves):  # bounded work in flight
            assert sum(key[0] == wave for key in running) <= groups + redundancy
        assert all(wave <= version + alpha for wave, _ in running)
        event = data.draw(st.sampled_from(["finish", "finish", "start", "start", "fail", "restart"]))
        if event == "restart" and steps % 7 == 0:
            ledger, opened, running = restart(), set(), {}
            continue
        if running and event == "start":
            key = data.draw(st.sampled_from(sorted(running)))
            ledger.start(key, version)
            running[key] = version if running[key] is None else running[key]
        elif running:
            key = data.draw(st.sampled_from(sorted(running)))
            started = running.pop(key)
            ledger.start(key, version)
            oldest = data.draw(st.integers(version if started is None else started, version))
            if event == "fail":
                ledger.fail(key)
            else:
                assert ledger.finish(key, oldest), "what was cancelled is not running any more"
                finished[key] = oldest
                for loser in ledger.losers(key[0]):
                    del running[loser]
        batch = ledger.batch(version)
        if batch is not None:
            assert len(batch) == groups
            assert all(version - finished[key] <= alpha for key in batch)
            assert not set(batch) & set(consumed)
            consumed += batch
            ledger.consume(batch)
            version += 1
            for key in ledger.expire(version):
                del running[key]
    assert len(consumed) == len(set(consumed)) == groups * waves
    assert all(sum(key[0] == wave for key in consumed) == groups for wave in range(waves))
