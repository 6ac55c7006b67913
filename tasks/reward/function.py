"""The reward function of a run over HTTP: trajectories in, rewards out, nothing kept.

    python -m tasks.reward.function --store URI [--endpoint-url URL]

POST /score takes the Arrow stream of `tasks.trajectory.encode_message` and answers `{"rewards": [...], "seconds": [...]}`; a
trajectory that cannot be scored is answered with 422 and the reason. Every request but GET /health needs
the run's key. As it keeps nothing, any number of copies may run, and a request may be sent again.
"""

from __future__ import annotations

import hmac
import json
import os
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from hardware.pools import pool_for
from tasks.config import RunConfig, stored_config
from tasks.keys import fingerprint, run_key
from tasks.reward.score import score
from tasks.services import (
    Registrar,
    Registration,
    end_with_parent,
    free_port,
    listen_host,
    stop_event,
    store_parser,
    work_folder,
)
from tasks.store import Store
from tasks.trajectory import decode_message

NAME: Literal["reward"] = "reward"
LONGEST_BODY = 64 * 2**20  # bytes
WAVES_SHOWN = 8


class RewardServer(ThreadingHTTPServer):
    """Scores under the tasks of one run's configuration."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], config: RunConfig, key: str):
        super().__init__(address, _Handler)
        self.config, self.expected = config, f"Bearer {key}"
        self._scored: Counter[int] = Counter()
        self._lock = threading.Lock()

    def rewards(self, data: bytes) -> dict[str, Any]:
        """The answer to /score. Raises ValueError with the reason if there is none."""
        trajectories = decode_message(data)
        rewards, seconds = [], []
        for trajectory in trajectories:
            started = time.perf_counter()
            rewards.append(score(trajectory, self.config.task(trajectory.task)))
            seconds.append(time.perf_counter() - started)
        with self._lock:
            self._scored.update(trajectory.wave for trajectory in trajectories)
        return {"rewards": rewards, "seconds": seconds}

    def waves(self) -> dict[str, list[int]]:
        """wave -> [started, ended] of the newest waves."""
        with self._lock:
            return {str(w): [self._scored[w]] * 2 for w in sorted(self._scored)[-WAVES_SHOWN:]}


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds an idle connection stays open

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self.server.expected.encode()):
            self.close_connection = True  # its body stays unread
            self._answer(401, {"error": "the run's key is needed; is ROLLART_KEY the same on every pool?"})
        elif self.path != "/score" or length > LONGEST_BODY:
            self.close_connection = True
            self._answer(404 if self.path != "/score" else 413, {})
        else:
            data = self.rfile.read(length)
            try:
                self._answer(200, self.server.rewards(data))
            except Exception as error:  # whatever a reward raises is its caller's to know
                self._answer(422, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""


def main(argv: list[str] | None = None) -> None:
    """Run the service until a terminate signal, or the end of its parent."""
    arguments = store_parser("tasks.reward.function", __doc__).parse_args(argv)
    stop = stop_event()
    end_with_parent(then=stop.set)
    store = Store(arguments.store, arguments.endpoint_url)
    config = stored_config(store)
    key, log = run_key(store), str(work_folder(store) / "logs" / f"{NAME}.log")
    pool = pool_for("reward", config.pools).name
    port = int(os.environ.get("PORT", 0)) or free_port()  # a serverless platform says where it will call
    server = RewardServer((listen_host(), port), config, key)
    registrar = Registrar(store, Registration(NAME, NAME, pool, log=log, key=fingerprint(key)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registrar.measure = lambda: {"waves": server.waves()}
    rewards = ", ".join(sorted({task.reward for task in config.tasks}))
    registrar.update(status="ready", address=f"http://{listen_host()}:{port}", detail=f"scores {rewards}")
    stop.wait()
    server.shutdown()
    registrar.close()
    os._exit(0)


if __name__ == "__main__":
    main()
