"""What a restart knows: the ledger as batches and groups in the store say it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flows.train import first_open_iteration, latest_version, restore_ledger
from tasks.config import RunConfig
from tasks.store import Store, layout
from tasks.trajectory import Trajectory, encode


def context(store: Store, **rollout: int) -> Any:
    config = RunConfig(iterations=4, rollout={"groups": 2, "group_size": 2, **rollout})
    return SimpleNamespace(store=store, config=config, progress=SimpleNamespace(history=[]))


def put_group(store: Store, wave: int, group: int, version: int) -> None:
    one = Trajectory(
        task="t", seed=0, wave=wave, group=group, index=0,
        tokens=np.zeros(2, np.int32), loss_mask=np.array([False, True]), logprobs=np.zeros(2, np.float32),
        versions=np.array([0, version], np.int32), turns=1, env_reward=0.0, success=False, truncated=False, reward=0.0,
    )  # fmt: skip
    store.write(layout.group(wave, group), encode([one]))


def put_batch(store: Store, k: int, *groups: str) -> None:
    store.put(layout.batch(k), {"batch.parquet": b"x"}, k=k, objective="policy_gradient", groups=list(groups))


def test_consumed_groups_are_not_offered_again_and_finished_ones_are(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for group in range(2):
        put_group(store, 0, group, version=0)
    put_group(store, 1, 1, version=1)
    put_batch(store, 0, "0/0", "0/1")
    ledger = restore_ledger(context(store))
    assert ledger.finished_keys() == {(1, 1)}
    ledger.open_wave(0)
    ledger.open_wave(1)
    assert ledger.dispatch(0) == []
    assert ledger.dispatch(1) == [(1, 0)]


def test_a_batch_without_its_manifest_consumed_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    put_group(store, 0, 0, version=0)
    store.write("batches/0/batch.parquet", b"half a batch")
    assert restore_ledger(context(store)).finished_keys() == {(0, 0)}


def test_supervised_batches_of_the_warm_start_are_no_groups(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put(layout.batch(-1), {"batch.parquet": b"x"}, k=-1, objective="supervised")
    assert restore_ledger(context(store)).finished_keys() == set()


def test_a_late_group_of_an_earlier_wave_is_made_again_after_a_restart(tmp_path: Path) -> None:
    """Batch 0 took a group of wave 1, for (0, 1) was late and in flight when the run stopped."""
    store = Store(str(tmp_path))
    for wave, group in [(0, 0), (1, 0)]:
        put_group(store, wave, group, version=0)
    put_batch(store, 0, "0/0", "1/0")
    ledger = restore_ledger(context(store, max_staleness=1))
    waves = [*ledger.short_waves(1), *range(1, 4)]  # as the rollout lane opens them
    assert waves == [0, 1, 2, 3]
    for wave in waves:
        ledger.open_wave(wave)
        for key in ledger.dispatch(wave):
            ledger.finish(key, 1)
    for k in range(1, 4):  # enough for every batch that is left
        keys = ledger.batch(k)
        assert keys is not None, k
        ledger.consume(keys)
        for key in ledger.expire(k + 1):
            ledger.finish(key, k + 1)
        for wave in waves:
            for key in ledger.dispatch(wave):
                ledger.finish(key, k + 1)


def test_waves_that_gave_their_share_are_not_opened_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    put_batch(store, 0, "0/0", "0/1")
    put_batch(store, 1, "1/0", "1/2")  # a spare group took the place of another
    assert restore_ledger(context(store, redundancy=1)).short_waves(2) == []


def test_the_newest_version_is_the_newest_with_a_manifest(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put(layout.weights(0), {"model.safetensors": b"x"}, version=0)
    store.put(layout.weights(1), {"model.safetensors": b"x"}, version=1)
    store.write("weights/2/model.safetensors", b"half a version")
    assert latest_version(store) == 1


def test_a_restart_begins_at_the_first_iteration_without_a_record(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    given = context(store)
    assert first_open_iteration(given) == 0
    for k in (0, 1):
        store.write_json(layout.iteration(k), {"k": k})
    put_batch(store, 2, "2/0", "2/1")  # its record is missing: the iteration is not finished
    assert first_open_iteration(given) == 2
    assert [record["k"] for record in given.progress.history] == [0, 1]


def test_a_group_too_old_for_the_next_batch_is_made_again(tmp_path: Path) -> None:
    """It may have expired just before the stop; offered as finished, it would leave the last batch short for ever."""
    store = Store(str(tmp_path))
    for wave, group, version in [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 0)]:
        put_group(store, wave, group, version)
    put_batch(store, 0, "0/0", "0/1")
    put_batch(store, 1, "0/0", "0/1")
    ledger = restore_ledger(context(store, max_staleness=1))
    assert ledger.finished_keys() == {(1, 0)}
    ledger.open_wave(1)
    assert ledger.dispatch(1) == [(1, 1)]
