"""Heartbeats carry the time of the machine that writes them: whether it goes by the same clock as this one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from tasks.services import Registration

APART_S = 5.0
IN_A_ROW = 5  # heartbeats; a single late one may be the store's fault


class Clocks:
    """Compares each new heartbeat with the time at which it is seen, and tells `say` once of each machine."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._last: dict[str, float] = {}  # service -> its newest heartbeat
        self._apart: Counter[str] = Counter()  # host -> heartbeats in a row

    def see(self, found: Registration) -> None:
        """Take in a registration that was read from the store just now."""
        if found.heartbeat_at == self._last.get(found.name):
            return
        first, self._last[found.name] = found.name not in self._last, found.heartbeat_at
        if first:  # it may be an old one
            return
        behind = time.time() - found.heartbeat_at
        self._apart[found.host] = self._apart[found.host] + 1 if abs(behind) > APART_S else 0
        if self._apart[found.host] == IN_A_ROW:
            how = f"{abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'}"
            self._say(
                f"the clock of {found.host} is {how} this machine's, or the store is as slow: services there may be"
                " taken for dead; have both keep time (chrony, systemd-timesyncd)"
            )
