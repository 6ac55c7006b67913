"""Which groups exist, where each one stands, and which batch may consume it. Pure bookkeeping: no clock, no I/O.

A group is pending -> running -> finished -> consumed. Invariants, for every sequence of calls:

- a group is consumed at most once, and only if `k - oldest version <= max_staleness` at batch `k`;
- every wave gives exactly `groups` groups to batches: one that got too old goes back to pending with the same
  seed, one whose environments failed is replaced by a new group of the same wave, and the spare ones are
  dropped once enough others are finished;
- at most `groups + redundancy` groups a wave are pending, running or finished at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

GroupKey = tuple[int, int]  # wave, group
LIVE = ("pending", "running", "finished", "consumed")


@dataclass
class _Entry:
    state: Literal["pending", "running", "finished", "consumed", "failed", "dropped"] = "pending"
    oldest: int | None = (
        None  # version of its oldest token: of a running group, the one served when it started
    )


class Ledger:
    """The groups of one run's iterations `first`, `first + 1`, ...

    `barrier`: a wave also waits for the groups of the waves before it. `consumed` and `finished` (group ->
    oldest version) restore what the store already holds after a restart.
    """

    def __init__(
        self,
        groups: int,
        redundancy: int,
        max_staleness: int,
        barrier: bool = False,
        consumed: Iterable[GroupKey] = (),
        finished: Mapping[GroupKey, int] | None = None,
    ):
        self.groups, self.redundancy, self.max_staleness = groups, redundancy, max_staleness
        self.barrier = barrier
        self._entries: dict[GroupKey, _Entry] = {key: _Entry("consumed") for key in consumed}
        for key, oldest in (finished or {}).items():
            self._entries.setdefault(key, _Entry("finished", oldest))
        self.expired = 0  # groups that got too old and were dispatched again
        self.failures = 0  # groups replaced because their environments failed
        self.closed = False  # nothing more is wanted
        self.dropped = 0  # spare groups that lost, and groups in flight when the last batch was full

    def admits(self, wave: int, version: int) -> bool:
        """Whether `wave` may be dispatched while the engines serve `version`. Of a closed ledger, so that its
        flow ends.
        """
        if self.closed:
            return True
        if self.barrier and any(
            w < wave and e.state in ("pending", "running") for (w, _), e in self._entries.items()
        ):
            return False
        return wave <= version + self.max_staleness

    def open_wave(self, wave: int) -> None:
        """Add the groups of a wave; what a restart restored is kept as it stands."""
        if self.closed:
            return
        for group in range(self.groups + self.redundancy):
            self._entries.setdefault((wave, group), _Entry())
        self.losers(wave)

    def dispatch(self, wave: int) -> list[GroupKey]:
        """The wave's pending groups, now running: handed out, and started as soon as there is a slot."""
        keys = [key for key in self._of(wave) if self._entries[key].state == "pending"]
        for key in keys:
            self._entries[key] = _Entry("running")
        return keys

    def start(self, key: GroupKey, version: int) -> None:
        """An episode of the group starts while the engines serve `version`; the first one counts."""
        entry = self._entries[key]
        if entry.state == "running" and entry.oldest is None:
            entry.oldest = version

    def finish(self, key: GroupKey, oldest_version: int) -> bool:
        """A running group finished; false if it is no longer wanted (it expired or was dropped meanwhile)."""
        if self._entries[key].state != "running":
            return False
        self._entries[key] = _Entry("finished", oldest_version)
        return True

    def losers(self, wave: int) -> list[GroupKey]:
        """Drop the wave's other groups once enough are finished. Returns the keys whose episodes are to be cancelled."""
        if self._count(wave, ("finished", "consumed")) < self.groups:
            return []
        return self._drop(
            [key for key in self._of(wave) if self._entries[key].state in ("pending", "running")]
        )

    def fail(self, key: GroupKey) -> GroupKey | None:
        """A running group has too few trajectories to compare; returns the pending group that replaces it."""
        if self._entries[key].state != "running":
            return None
        self._entries[key].state = "failed"
        self.failures += 1
        wave = key[0]
        replacement = (wave, 1 + max(group for w, group in self._entries if w == wave))
        self._entries[replacement] = _Entry()
        return replacement

    def batch(self, k: int) -> list[GroupKey] | None:
        """The groups of batch `k`, oldest wave first, or None while too few fresh ones are finished."""
        fresh = [
            key for key, e in sorted(self._entries.items()) if e.state == "finished" and self._fresh(e, k)
        ]
        return fresh[: self.groups] if len(fresh) >= self.groups else None

    def consume(self, keys: Iterable[GroupKey]) -> None:
        """The batch manifest that names these groups is written."""
        for key in keys:
            self._entries[key].state = "consumed"

    def expire(self, k: int) -> list[GroupKey]:
        """Send groups that batch `k` could not consume any more back to pending, spare ones away.

        Returns the keys whose episodes are to be cancelled. Call it when the batch before `k` is closed.
        """
        stale = [
            key
            for key, e in sorted(self._entries.items())
            if e.state in ("running", "finished") and not self._fresh(e, k)
        ]
        cancelled = [key for key in stale if self._entries[key].state == "running"]
        for key in stale:
            if self._count(key[0], LIVE) > self.groups:
                self._drop([key])
            else:
                self._entries[key] = _Entry("pending")
                self.expired += 1
        return cancelled

    def close(self) -> list[GroupKey]:
        """The last batch is closed: nothing else is wanted. Returns the keys whose episodes are to be cancelled."""
        self.closed = True
        return self._drop([key for key, e in self._entries.items() if e.state in LIVE[:3]])

    def finished_keys(self) -> set[GroupKey]:
        """The finished groups that no batch consumed yet."""
        return {key for key, entry in self._entries.items() if entry.state == "finished"}

    def short_waves(self, before: int) -> list[int]:
        """Waves below `before` that gave batches fewer than their share: a restart has to open them again, or
        the groups that were in flight when the run stopped would be missing at its end.
        """
        return [wave for wave in range(before) if self._count(wave, ("consumed",)) < self.groups]

    def settled(self, wave: int) -> bool:
        """Whether every group of the wave is consumed, replaced or dropped."""
        return all(self._entries[key].state in ("consumed", "failed", "dropped") for key in self._of(wave))

    def open(self, wave: int) -> list[GroupKey]:
        """The wave's groups that are pending or running."""
        return [key for key in self._of(wave) if self._entries[key].state in ("pending", "running")]

    def count(self, state: str) -> int:
        """How many groups are in a state."""
        return sum(entry.state == state for entry in self._entries.values())

    def _drop(self, keys: list[GroupKey]) -> list[GroupKey]:
        """Drop groups; returns those that were running."""
        running = [key for key in keys if self._entries[key].state == "running"]
        for key in keys:
            self._entries[key] = _Entry("dropped")
        self.dropped += len(keys)
        return running

    def _count(self, wave: int, states: tuple[str, ...]) -> int:
        return sum(self._entries[key].state in states for key in self._of(wave))

    def _of(self, wave: int) -> list[GroupKey]:
        return sorted(key for key in self._entries if key[0] == wave)

    def _fresh(self, entry: _Entry, k: int) -> bool:
        return entry.oldest is None or k - entry.oldest <= self.max_staleness
