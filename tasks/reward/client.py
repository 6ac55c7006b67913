"""Asks the reward function of a run; a pure function, so a request that got no answer is sent again."""

from __future__ import annotations

import time

import httpx

from tasks.errors import DeadlineExceeded, RunFailed
from tasks.keys import run_key
from tasks.services import registered
from tasks.store import Store
from tasks.trajectory import Trajectory, encode

NAME = "reward"
PAUSE_S = 0.5


class RewardClient:
    """Scores trajectories where the run's reward function is registered at the time. Safe for many threads."""

    def __init__(self, store: Store, deadline_s: float, url: str | None = None):
        """`url`: where the function always is, if it does not register itself."""
        self._store, self._deadline_s, self._url = store, deadline_s, url
        self._http = httpx.Client(headers={"Authorization": f"Bearer {run_key(store)}"}, timeout=30.0)
        self._address: str | None = None

    def scored(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its reward.

        Raises RunFailed with the reason if it cannot be scored or the key is refused, DeadlineExceeded.
        """
        data, started, problem = encode([trajectory]), time.monotonic(), "not registered"
        while time.monotonic() - started < self._deadline_s:
            try:
                self._address = self._address or self._registered()
                if self._address is not None:
                    return self._ask(trajectory, data, self._address)
            except (httpx.TransportError, OSError) as error:
                problem, self._address = f"{type(error).__name__}: {error}", None
            time.sleep(PAUSE_S)
        raise DeadlineExceeded(
            f"the reward function ({problem})", self._deadline_s, f"{self._store.uri}/services/{NAME}.json"
        )

    def _registered(self) -> str | None:
        if self._url is not None:
            return self._url.rstrip("/")
        found = registered(self._store, NAME)
        return found.address if found is not None and found.status == "ready" else None

    def _ask(self, trajectory: Trajectory, data: bytes, address: str) -> Trajectory:
        answer = self._http.post(f"{address}/score", content=data)
        if answer.status_code >= 500:  # of a platform's gateway: no copy of the function is up yet
            raise OSError(f"status {answer.status_code} from {address}")
        if answer.status_code != 200:
            reason = answer.json().get("error", f"status {answer.status_code}")
            raise RunFailed(
                f"the reward function: {reason}", look_at=f"{self._store.uri}/services/{NAME}.json"
            )
        found = answer.json()
        return trajectory.scored(found["rewards"][0], found["seconds"][0])
