"""Asks the reward function of a run; a pure function, so a request that got no answer is sent again."""

from __future__ import annotations

import threading
import time

import httpx

from tasks.errors import DeadlineExceeded, RunFailed
from tasks.keys import run_key
from tasks.services import registered
from tasks.store import Store
from tasks.trajectory import Trajectory, encode_message

NAME = "reward"
PAUSE_S, CONNECT_S = 0.5, 10.0
KEPT_S = 30.0  # an idle connection, until the next wave
BUSY = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)


class RewardClient:
    """Scores trajectories where the run's reward function is registered at the time. Safe for many threads."""

    def __init__(self, store: Store, deadline_s: float, url: str | None = None):
        """`url`: where the function always is, if it does not register itself."""
        self._store, self._deadline_s, self._url = store, deadline_s, url
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {run_key(store)}"},
            timeout=httpx.Timeout(CONNECT_S, read=deadline_s),  # a judge may think for long
            limits=httpx.Limits(keepalive_expiry=KEPT_S),
        )
        self._address: str | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """Have all who wait for a reward give up."""
        self._closed.set()

    def scored(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its reward.

        Raises RunFailed with the reason if it cannot be scored or the key is refused, DeadlineExceeded.
        """
        data, started, problem = encode_message([trajectory]), time.monotonic(), "not registered"
        while time.monotonic() - started < self._deadline_s and not self._closed.is_set():
            try:
                self._address = self._address or self._registered()
                if self._address is not None:
                    return self._ask(trajectory, data, self._address)
            except (httpx.TransportError, OSError) as error:
                problem, self._address = f"{type(error).__name__}: {error}", None
            self._closed.wait(PAUSE_S)
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
        if answer.status_code >= 500 or answer.status_code in BUSY:  # a platform's, with no copy free or up
            raise OSError(f"status {answer.status_code} from {address}")
        if answer.status_code != 200:
            ours = answer.headers.get("Content-Type") == "application/json"
            reason = answer.json().get("error") if ours else f"{answer.status_code} {answer.text[:200]}"
            raise RunFailed(
                f"the reward function: {reason}", look_at=f"{self._store.uri}/services/{NAME}.json"
            )
        found = answer.json()
        return trajectory.scored(found["rewards"][0], found["seconds"][0])
