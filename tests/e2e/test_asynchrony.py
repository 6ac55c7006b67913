"""Rollout ahead of training, with slow and broken environments: the run ends by itself and keeps its bound."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from tasks.store import Store
from tasks.trajectory import EpisodeFailure, decode
from tests.e2e.conftest import Finished
from tests.e2e.machine import Done, Machine, batches, check_consumption, members, versions

NAME, ITERATIONS, GROUPS, GROUP_SIZE, STALENESS = "asynchronous", 6, 4, 4, 2


@dataclass(frozen=True)
class Outcome:
    store: Store
    done: Done


@pytest.fixture(scope="module")
def outcome(machine: Machine, finished: Finished) -> Outcome:
    """A run with log-normal latency, and with exceptions, hangs and malformed replies in some steps."""
    command = machine.train(
        NAME,
        iterations=ITERATIONS,
        rollout__max_staleness=STALENESS,
        rollout__redundancy=1,
        rollout__spare_episodes=1,
        environments__latency__step_mean_s=0.1,
        environments__latency__step_sigma=1.0,
        environments__faults__exception_share=0.05,
        environments__faults__hang_share=0.01,
        environments__faults__malformed_share=0.03,
        environments__faults__hang_s=30.0,
        environments__step_deadline_s=3.0,
        environments__reset_deadline_s=3.0,
        environments__retries=1,
    )
    return Outcome(machine.store(NAME), command.wait())


def failures(store: Store) -> list[EpisodeFailure]:
    found = [decode(store.get(f"batches/{k}", "batch.parquet"))[1] for k in batches(store)]
    return [failure for batch in found for failure in batch]


def test_it_ends_by_itself_with_every_iteration_done(outcome: Outcome) -> None:
    print(f"{outcome.done.seconds:.0f} s\n{outcome.done.out}\n{outcome.done.err}")
    assert outcome.done.code == 0, outcome.done.err
    assert outcome.done.left == []
    assert [v for v in versions(outcome.store) if v >= 0] == list(range(ITERATIONS + 1))


def test_nothing_is_consumed_twice_and_the_bound_is_kept(outcome: Outcome) -> None:
    check_consumption(outcome.store, ITERATIONS, GROUPS, STALENESS)


def test_rollout_runs_ahead_of_training(outcome: Outcome) -> None:
    """Otherwise the bound would be kept by never using it."""
    staleness = [k - t.oldest_version for k in batches(outcome.store) for t in members(outcome.store, k)]
    assert max(staleness) >= 1
    recorded = [outcome.store.read_json(f"iterations/{k}.json")["metrics"] for k in range(ITERATIONS)]
    assert max(metrics["staleness/max"] for metrics in recorded) == max(staleness)
    waves = {
        int(g.split("/")[0])
        for k, m in batches(outcome.store).items()
        for g in m["groups"]
        if int(g.split("/")[0]) != k
    }
    assert waves or max(staleness) >= 1


def test_broken_episodes_are_retried_and_then_recorded_with_their_reason(outcome: Outcome) -> None:
    retried = sum(t.retries > 0 for k in batches(outcome.store) for t in members(outcome.store, k))
    assert retried > 0
    found = failures(outcome.store)
    assert found
    for failure in found:
        assert failure.stage in ("reset", "step") and failure.attempts == 2
        assert any(word in failure.reason for word in ("injected", "deadline", "malformed", " s")), failure
    last = outcome.store.read_json(f"iterations/{ITERATIONS - 1}.json")["metrics"]
    assert last["episodes/failed"] >= len(found)


def test_a_failed_episode_is_no_member_of_its_group(outcome: Outcome) -> None:
    missing = {(f.wave, f.group, f.index) for f in failures(outcome.store)}
    for k in batches(outcome.store):
        there = {(t.wave, t.group, t.index) for t in members(outcome.store, k)}
        assert not missing & there
        assert all(t.reward is not None for t in members(outcome.store, k))


def test_stale_tokens_are_corrected_and_the_engine_still_agrees_with_the_trainer(outcome: Outcome) -> None:
    for k in range(ITERATIONS):
        metrics = outcome.store.read_json(f"iterations/{k}.json")["metrics"]
        assert metrics["engine/parity"] <= 1e-3
        assert metrics["train/grad_norm"] > 0


def test_spare_episodes_take_the_place_of_slower_or_failed_ones(outcome: Outcome) -> None:
    found = [t for k in batches(outcome.store) for t in members(outcome.store, k)]
    assert any(t.index == GROUP_SIZE for t in found)  # the spare one
    sizes = Counter((t.wave, t.group) for t in found)
    assert max(sizes.values()) == GROUP_SIZE


def test_records_say_how_busy_each_lane_was_and_what_was_lost(outcome: Outcome) -> None:
    records = [outcome.store.read_json(f"iterations/{k}.json")["metrics"] for k in range(ITERATIONS)]
    for metrics in records:
        assert sum(v for n, v in metrics.items() if n.startswith("staleness/share_")) == pytest.approx(1)
        for lane in ("environments", "engine", "trainer"):
            assert 0 <= metrics.get(f"idle/{lane}", 0) <= 1
    assert sum(metrics["in_flight/episodes"] for metrics in records) > 1
    assert sum(f"idle/{lane}" in m for m in records for lane in ("engine", "trainer")) > ITERATIONS
    last = records[-1]
    assert last["groups/cancelled"] > 0 and last["tokens/wasted"] > 0  # of what was spare
