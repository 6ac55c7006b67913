"""Trajectories on disk: what goes in comes out, bit for bit, and a damaged file is an error."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from tasks.trajectory import (
    NOT_GENERATED,
    EpisodeFailure,
    Group,
    Trajectory,
    decode,
    decode_message,
    encode,
    encode_message,
    group_id,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)
INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**31 - 1)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 40))

    def array(dtype: type, elements: st.SearchStrategy | None = None) -> np.ndarray:
        return draw(st_np.arrays(dtype, length, elements=elements))

    return Trajectory(
        task=draw(st.text(st.characters(codec="utf-8"), max_size=12)),
        seed=draw(INT64), wave=draw(INT64), group=draw(COUNT), index=draw(COUNT),
        tokens=array(np.int32), loss_mask=array(np.bool_), versions=array(np.int32),
        logprobs=array(np.float32, st.floats(width=32, allow_nan=False, allow_infinity=False)),
        turns=draw(COUNT), env_reward=draw(FINITE), success=draw(st.booleans()), truncated=draw(st.booleans()),
        reward=draw(st.none() | FINITE), retries=draw(COUNT),
        started_at=draw(FINITE), ended_at=draw(FINITE), env_s=draw(FINITE), generate_s=draw(FINITE),
    )  # fmt: skip


FAILURES = st.builds(
    EpisodeFailure,
    task=st.text(st.characters(codec="utf-8"), max_size=12),
    seed=INT64, wave=INT64, group=COUNT, index=COUNT,
    stage=st.sampled_from(["reset", "step", "generate", "worker"]),
    reason=st.text(st.characters(codec="utf-8"), max_size=60), attempts=COUNT,
)  # fmt: skip


def same(one: Trajectory, other: Trajectory) -> None:
    for field in fields(Trajectory):
        before, after = getattr(one, field.name), getattr(other, field.name)
        if isinstance(before, np.ndarray):
            assert after.dtype == before.dtype, field.name
            np.testing.assert_array_equal(after, before, err_msg=field.name)
        else:
            assert type(after) is type(before) and after == before, field.name


def tiny(**changes: object) -> Trajectory:
    values = {
        "task": "t", "seed": 1, "wave": 0, "group": 0, "index": 0,
        "tokens": np.array([5, 6, 7, 8], np.int32),
        "loss_mask": np.array([False, False, True, True]),
        "logprobs": np.array([0, 0, -0.5, -1.5], np.float32),
        "versions": np.array([NOT_GENERATED, NOT_GENERATED, 4, 3], np.int32),
        "turns": 1, "env_reward": 1.0, "success": True, "truncated": False,
    }  # fmt: skip
    return Trajectory(**{**values, **changes})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(st.lists(trajectories(), max_size=6), st.lists(FAILURES, max_size=4))
def test_what_is_encoded_comes_back_with_order_types_and_every_bit(
    given_trajectories: list[Trajectory], failures: list[EpisodeFailure]
) -> None:
    decoded, failed = decode(encode(given_trajectories, failures))
    assert failed == failures
    assert len(decoded) == len(given_trajectories)
    sent = decode_message(encode_message(given_trajectories))
    for one, kept, other in zip(given_trajectories, decoded, sent, strict=True):
        same(one, kept)
        same(one, other)


def test_no_trajectories_and_only_failures_survive() -> None:
    failure = EpisodeFailure("t", 1, 2, 3, 4, "reset", "a reason", 3)
    assert decode(encode([], [failure])) == ([], [failure])
    assert decode(encode([])) == ([], [])


def test_an_empty_trajectory_between_two_others_shifts_nothing() -> None:
    nothing = {"tokens": np.empty(0, np.int32), "loss_mask": np.empty(0, np.bool_)}
    nothing |= {"logprobs": np.empty(0, np.float32), "versions": np.empty(0, np.int32)}
    given_trajectories = [tiny(index=0), tiny(index=1, **nothing), tiny(index=2)]
    for one, other in zip(given_trajectories, decode(encode(given_trajectories))[0], strict=True):
        same(one, other)


def test_the_same_trajectories_encode_to_the_same_bytes() -> None:
    assert encode([tiny(), tiny(index=1)]) == encode([tiny(), tiny(index=1)])


def test_the_file_is_plain_parquet_that_other_tools_read() -> None:
    table = pq.read_table(pa.BufferReader(encode([tiny()])))
    assert table.num_rows == 1
    assert table.column("tokens").to_pylist() == [[5, 6, 7, 8]]
    assert table.column("reward").to_pylist() == [None]
    assert table.schema.field("logprobs").type == pa.list_(pa.float32())


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[: len(d) // 2], lambda d: b"no parquet" * 9])
def test_bytes_that_are_no_such_file_raise(damage) -> None:
    with pytest.raises(pa.ArrowInvalid):
        decode(damage(encode([tiny()])))


def test_oldest_version_looks_at_generated_tokens_only() -> None:
    assert tiny().oldest_version == 3
    masked = tiny(versions=np.array([1, 2, 4, 3], np.int32))
    assert masked.oldest_version == 3
    assert tiny(loss_mask=np.zeros(4, np.bool_)).oldest_version == NOT_GENERATED


def test_scoring_makes_a_new_trajectory_and_changes_nothing_else() -> None:
    before = tiny()
    after = before.scored(0.25)
    assert (before.reward, after.reward) == (None, 0.25)
    assert after.scored_at > 0
    same(before, replace(after, reward=None, scored_at=0.0))


def test_a_group_is_as_old_as_its_oldest_member_and_named_by_wave_and_group() -> None:
    young = tiny(versions=np.array([NOT_GENERATED, NOT_GENERATED, 9, 9], np.int32))
    group = Group(3, 17, [young, tiny()])
    assert group.oldest_version == 3
    assert group.id == group_id(3, 17) == "3/17"
