"""The client of the engines: token ids in, token ids with log-probs and weight versions out.

Light on CPU, because it shares its cores with the engine: plain `http.client` over pooled keep-alive
connections costs 0.33 ms a request, urllib3 0.66 ms, httpx 1.6 ms. Imports neither torch nor vllm.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tasks.errors import DeadlineExceeded
from tasks.services import HEARTBEAT_S, registered
from tasks.store import Store

FRESH_S = 10 * HEARTBEAT_S  # a registration whose heartbeat is older does not count
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
ABORTED = "abort"  # vLLM's word for a request that an update of the weights cut short


@dataclass(frozen=True)
class Generation:
    """One answer: the generated tokens, the stop token that ended it included.

    `logprobs[i]` is log p (nats) of `tokens[i]` under the distribution it was sampled from, `versions[i]` the
    version of the weights that computed it; all three have the same length.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str  # "stop" or "length"; ABORTED only inside this module

    def followed_by(self, rest: Generation) -> Generation:
        """This one and its continuation as one."""
        return Generation(
            [*self.tokens, *rest.tokens],
            [*self.logprobs, *rest.logprobs],
            [*self.versions, *rest.versions],
            rest.finish_reason,
        )


class EngineClient:
    """Sends requests to a set of engines. Thread-safe; each thread in a request uses one connection."""

    def __init__(self, addresses: Sequence[str], api_key: str, deadline_s: float):
        if not addresses:
            raise ValueError("an EngineClient needs at least one address")
        self.deadline_s = deadline_s
        self._engines = [_Connections(address) for address in addresses]
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
        sticky: str = "",
    ) -> Generation:
        """Continue `tokens` by up to `max_tokens`, ending after the first of `stop_token_ids`.

        Requests with the same `sticky` key go to the same engine (its prefix cache holds their past) while it
        answers, else to the next one. A request that an update of the weights aborts is continued from its own
        tokens, none of which is lost or made again. Lost connections, 5xx and answers of an engine without a
        version yet are retried with back-off. Raises DeadlineExceeded after `deadline_s`, ValueError for a
        request that the engine refuses.
        """
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "stop_token_ids": list(stop_token_ids),
            "logprobs": 0,  # that of the sampled token alone
            "detokenize": False,
            "ignore_eos": True,  # what ends a turn is the caller's stop_token_ids and nothing else
        }
        prompt, choice = [int(t) for t in tokens], zlib.crc32(sticky.encode())
        deadline = time.monotonic() + self.deadline_s
        made = Generation([], [], [], ABORTED)
        while made.finish_reason == ABORTED:
            sampling["max_tokens"] = max_tokens - len(made.tokens)
            if seed is not None:  # another one for each part, or the parts would share their random numbers
                sampling["seed"] = seed + len(made.tokens)
            request = {"token_ids": prompt + made.tokens, "sampling_params": sampling}
            made = made.followed_by(self._send(json.dumps(request).encode(), choice, deadline))
        return made

    def close(self) -> None:
        """Close the idle connections."""
        for engine in self._engines:
            engine.close()

    def _send(self, body: bytes, choice: int, deadline: float) -> Generation:
        pause, failures = FIRST_PAUSE_S, 0
        while True:
            engine = self._engines[(choice + failures) % len(self._engines)]
            try:
                return self._ask(engine, body, deadline - time.monotonic())
            except _Unavailable as error:
                failures += 1
                last = f"{engine.address} ({error})"
            if time.monotonic() + pause > deadline:
                raise DeadlineExceeded("an answer of an engine", self.deadline_s, f"the engine at {last}")
            if failures % len(self._engines) == 0:  # every engine has been asked
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _ask(self, engine: _Connections, body: bytes, timeout_s: float) -> Generation:
        status, data = engine.post("/inference/v1/generate", body, self._headers, timeout_s)
        if status >= 500:
            raise _Unavailable(f"status {status}: {data[:200]!r}")
        if status != 200:
            raise ValueError(f"the engine at {engine.address} refused the request ({status}): {data[:500]!r}")
        return _generation(json.loads(data))


class _Unavailable(Exception):
    """This engine gives no answer now."""


class _Connections:
    """Idle keep-alive connections to one engine, the last used first."""

    def __init__(self, address: str):
        self.address = address
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def post(self, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises _Unavailable."""
        connection = self._take(max(timeout_s, 0.001))
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _Unavailable(repr(error)) from error
        except BaseException:  # interrupted between request and answer: the connection is of no more use
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return answer.status, data

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self, timeout_s: float) -> http.client.HTTPConnection:
        while (connection := self._pop()) is not None and _closed_by_server(connection):
            connection.close()
        if connection is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        connection.timeout = timeout_s
        if isinstance(connection.sock, socket.socket):
            connection.sock.settimeout(timeout_s)
        return connection

    def _pop(self) -> http.client.HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None


def _closed_by_server(connection: http.client.HTTPConnection) -> bool:
    """Whether an idle connection has something to read, which can only be its end: a server keeps one for some
    seconds, and to find that out by a failed request, one connection after the other, costs a pause each.
    """
    if connection.sock is None:
        return True
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _generation(answer: dict[str, Any]) -> Generation:
    choice = answer["choices"][0]
    tokens, ended = choice["token_ids"], choice["finish_reason"]
    if ended not in ("stop", "length", ABORTED) or (ended == ABORTED and not tokens):
        raise _Unavailable(f"the request ended with {ended!r} after {len(tokens)} tokens")
    versions: list[int] = []
    for span in choice["weight_versions"] or []:
        try:
            version = int(span["version"])
        except ValueError:  # "default": restarted, and its agent has not loaded a version yet
            raise _Unavailable("it serves no version of the policy yet") from None
        versions += [version] * (span["end"] - span["start"])
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    if not len(tokens) == len(logprobs) == len(versions):
        raise _Unavailable(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
    return Generation(tokens, logprobs, versions, ended)


def served_version(store: Store, engines: int) -> int | None:
    """The lowest version among those of `engines` engines that are ready with a fresh heartbeat; None if none is."""
    versions: list[int] = []
    for index in range(engines):
        registration = registered(store, f"engine-{index}")
        if registration is None or registration.status != "ready" or registration.version is None:
            continue
        if time.time() - registration.heartbeat_at <= FRESH_S:
            versions.append(registration.version)
    return min(versions) if versions else None
