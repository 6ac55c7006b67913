"""Trajectories and groups, and their one format on disk and between stages: Parquet, never pickle.

Invariants: `tokens`, `loss_mask`, `logprobs` and `versions` have one length; `loss_mask` is true exactly on
tokens the policy generated; `versions` holds the weight version of each generated token and NOT_GENERATED
elsewhere.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NOT_GENERATED = np.iinfo(np.int32).min


@dataclass(frozen=True)
class EpisodeSpec:
    """One attempt to make: everything a worker needs to know which episode this is."""

    task: str
    seed: int  # of the environment; the same for all members of a group
    wave: int
    group: int
    index: int  # within the group


@dataclass(frozen=True)
class Trajectory:
    """A whole episode, token in, token out. Arrays have shape [T], but `calls`."""

    task: str
    seed: int
    wave: int
    group: int
    index: int
    tokens: np.ndarray  # int32
    loss_mask: np.ndarray  # bool
    logprobs: np.ndarray  # float32, natural log, under the sampling distribution; 0 where not generated
    versions: np.ndarray  # int32
    turns: int
    env_reward: float  # sum of the environment's step rewards
    success: bool
    truncated: bool  # by the context limit, the turn limit or the token limit; not an error
    reward: float | None = None  # set by the reward stage
    retries: int = 0  # failed attempts before this one
    started_at: float = 0.0  # seconds since the epoch
    ended_at: float = 0.0
    env_s: float = 0.0  # seconds inside reset and step, those of failed attempts included
    generate_s: float = 0.0  # seconds waiting for the engine
    calls: np.ndarray = field(
        default_factory=lambda: np.empty(0)
    )  # float64 [2 x turns]: when each call to the engine began and ended, seconds since the epoch
    scored_at: float = 0.0  # when its reward was known
    score_s: float = 0.0  # seconds the reward took

    @property
    def oldest_version(self) -> int:
        """The oldest weight version among the generated tokens; staleness at iteration k is k minus this."""
        return int(self.versions[self.loss_mask].min()) if self.loss_mask.any() else NOT_GENERATED

    @property
    def versions_used(self) -> int:
        """How many versions generated it: more than one if the weights changed while it ran."""
        return len(np.unique(self.versions[self.loss_mask]))

    @property
    def generated_tokens(self) -> int:
        """How many tokens the policy generated."""
        return int(self.loss_mask.sum())

    def scored(self, reward: float, seconds: float = 0.0) -> Trajectory:
        """The same trajectory with its reward, which took `seconds` and is known now."""
        return replace(self, reward=reward, score_s=seconds, scored_at=time.time())


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode that ended without a trajectory, after its retries. Data, not an exception."""

    task: str
    seed: int
    wave: int
    group: int
    index: int
    stage: Literal["reset", "step", "generate", "worker"]
    reason: str
    attempts: int


@dataclass(frozen=True)
class Group:
    """The finished, scored members of one GRPO group, and its failed episodes."""

    wave: int
    group: int
    trajectories: list[Trajectory]
    failures: list[EpisodeFailure] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Names the group in batch manifests, e.g. `3/17`."""
        return group_id(self.wave, self.group)

    @property
    def oldest_version(self) -> int:
        """The oldest version among all members."""
        return min(trajectory.oldest_version for trajectory in self.trajectories)


def group_id(wave: int, group: int) -> str:
    """The id of a group, as batch manifests list it."""
    return f"{wave}/{group}"


_ARRAYS: dict[str, Any] = {
    "tokens": (pa.int32(), np.int32),
    "loss_mask": (pa.bool_(), np.bool_),
    "logprobs": (pa.float32(), np.float32),
    "versions": (pa.int32(), np.int32),
    "calls": (pa.float64(), np.float64),
}
_SCALARS: dict[str, Any] = {
    "task": pa.string(), "seed": pa.int64(), "wave": pa.int64(), "group": pa.int64(), "index": pa.int64(),
    "turns": pa.int64(), "env_reward": pa.float64(), "success": pa.bool_(), "truncated": pa.bool_(),
    "reward": pa.float64(), "retries": pa.int64(), "started_at": pa.float64(), "ended_at": pa.float64(),
    "env_s": pa.float64(), "generate_s": pa.float64(), "scored_at": pa.float64(), "score_s": pa.float64(),
}  # fmt: skip
_SCHEMA = pa.schema(list(_SCALARS.items()) + [(name, pa.list_(kind)) for name, (kind, _) in _ARRAYS.items()])


def encode(trajectories: Sequence[Trajectory], failures: Iterable[EpisodeFailure] = ()) -> bytes:
    """Parquet bytes, one row a trajectory; failures travel in the file's metadata as JSON."""
    sink = io.BytesIO()
    # dictionaries and statistics would be half the time for a few rows, and of no use here
    pq.write_table(
        _table(trajectories, failures),
        sink,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
    )
    return sink.getvalue()


def encode_message(trajectories: Sequence[Trajectory]) -> bytes:
    """Arrow IPC stream of the same rows: for a request, not to be kept; a quarter of the time of Parquet."""
    table, sink = _table(trajectories), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def decode_message(data: bytes) -> list[Trajectory]:
    """The inverse of `encode_message`. Raises pyarrow.ArrowInvalid on bytes that are no such stream."""
    return _trajectories(pa.ipc.open_stream(data).read_all())


def _table(trajectories: Sequence[Trajectory], failures: Iterable[EpisodeFailure] = ()) -> pa.Table:
    columns: dict[str, Any] = {name: [getattr(t, name) for t in trajectories] for name in _SCALARS}
    for name, (kind, dtype) in _ARRAYS.items():
        arrays = [np.asarray(getattr(t, name), dtype=dtype) for t in trajectories]
        offsets = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int32)
        flat = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, type=kind))
    meta = {b"failures": json.dumps([vars(failure) for failure in failures]).encode()}
    return pa.table(columns, schema=_SCHEMA).replace_schema_metadata(meta)


def decode(data: bytes) -> tuple[list[Trajectory], list[EpisodeFailure]]:
    """The inverse of `encode`. Raises pyarrow.ArrowInvalid on bytes that are not such a file."""
    table = pq.ParquetFile(io.BytesIO(data)).read(use_threads=False)
    failures = json.loads((table.schema.metadata or {}).get(b"failures", b"[]"))
    return _trajectories(table), [EpisodeFailure(**failure) for failure in failures]


def _trajectories(table: pa.Table) -> list[Trajectory]:
    scalars = {name: table.column(name).to_pylist() for name in _SCALARS}
    arrays = {name: _rows(table.column(name), dtype) for name, (_, dtype) in _ARRAYS.items()}
    columns: dict[str, list[Any]] = {**scalars, **arrays}
    return [Trajectory(**{name: columns[name][row] for name in columns}) for row in range(table.num_rows)]


def _rows(column: pa.ChunkedArray, dtype: Any) -> list[Any]:
    """The arrays of a list column, without going through Python objects."""
    array = column.combine_chunks()
    flat = np.asarray(array.flatten().to_numpy(zero_copy_only=False), dtype=dtype)
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    return list(np.split(flat, np.cumsum(lengths)[:-1])) if len(lengths) else []


assert {f.name for f in fields(Trajectory)} == set(_SCALARS) | set(_ARRAYS)
