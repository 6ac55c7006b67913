"""The process of one vLLM server: `python -m tasks.inference.server <vLLM's arguments>`.

vLLM's own OpenAI-compatible server, with four differences. It dies with the process that started it, its
engine core too, however that ends. Every route but /health wants the API key: vLLM's own key leaves the
control routes (/pause, /update_weights, /collective_rpc) open. GET /busy says how busy it has been. And on CPU
the engine core is forked instead of spawned, which saves importing everything a second time (15-20 s of each
start on one core).
"""

from __future__ import annotations

import ctypes
import hmac
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tasks.keys import API_KEY

FORK = "ROLLART_ENGINE_FORK"
GENERATE, BUSY = "/inference/v1/generate", "/busy"
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class RequireKey:
    """ASGI middleware: 401 for every request but GET /health without `Authorization: Bearer <key>`."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        self.expected = f"Bearer {os.environ[API_KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and not self._allowed(scope):
            await _refuse(scope, send)
        else:
            await self.app(scope, receive, send)

    def _allowed(self, scope: dict[str, Any]) -> bool:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/health":
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self.expected)


class CountRequests:
    """ASGI middleware: counts the requests that generate, and answers GET /busy with what it counted.

    The answer: `busy_s`, seconds since `started_at` (epoch) with at least one request in flight; `in_flight`,
    the requests now; `answered`, those that had an answer; `tokens_in_flight`, prompt and generated tokens of those past their prefill, which is what
    an update of the weights makes the engine compute again.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app
        self.started_at = time.time()
        self.in_flight = self.answered = 0
        self._busy_s, self._since = 0.0, 0.0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" else None
        if path == GENERATE:
            await self._count(scope, receive, send)
        elif path == BUSY:
            await _answer(send, 200, {**self.counted(), "tokens_in_flight": _tokens_in_flight(scope)})
        else:
            await self.app(scope, receive, send)

    def counted(self) -> dict[str, float]:
        """What GET /busy answers, but the tokens."""
        open_s = time.monotonic() - self._since if self.in_flight else 0.0
        return {
            "started_at": self.started_at,
            "busy_s": self._busy_s + open_s,
            "in_flight": self.in_flight,
            "answered": self.answered,
        }

    async def _count(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def noted(message: dict[str, Any]) -> None:
            self.answered += message.get("status") == 200
            await send(message)

        if self.in_flight == 0:
            self._since = time.monotonic()
        self.in_flight += 1
        try:
            await self.app(scope, receive, noted)
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._busy_s += time.monotonic() - self._since


def _tokens_in_flight(scope: dict[str, Any]) -> int:
    """By vLLM's own record of its requests: exact, and it costs nothing until it is asked for."""
    states = scope["app"].state.engine_client.output_processor.request_states.values()
    return sum(s.prompt_len + s.detokenizer.num_output_tokens() for s in states if not s.is_prefilling)


async def _refuse(scope: dict[str, Any], send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, 401, {"error": "this route needs the engine's API key"})


async def _answer(send: Any, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run the server with the arguments in sys.argv."""
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    if os.getppid() == 1:
        raise SystemExit("the parent ended while this process was starting")
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    if os.environ.get(FORK) == "1":
        _fork_engine_core()
    serve()


def _fork_engine_core() -> None:
    """vLLM's CPU platform insists on spawn; nothing that a fork could break (CUDA, OpenMP) has started yet."""
    import multiprocessing

    import vllm.v1.engine.utils as engine_utils

    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")


if __name__ == "__main__":
    main()
