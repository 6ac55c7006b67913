"""The engines' client against a real HTTP server on loopback that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.config import parse_config
from tasks.errors import DeadlineExceeded, UserError
from tasks.inference.agent import BusyCount
from tasks.inference.client import EngineClient, served_version
from tasks.inference.engine import choose_port
from tasks.inference.server import BUSY, GENERATE, CountRequests, RequireKey
from tasks.keys import API_KEY
from tasks.services import Registration
from tasks.store import Store, layout

GOOD = {
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [11, 12, 1],
            "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}, {"logprob": -0.3}]},
            "weight_versions": [
                {"version": "-2", "start": 0, "end": 1},
                {"version": "3", "start": 1, "end": 3},
            ],
        }
    ]
}
Answer = tuple[int, dict[str, Any]]


def part(ended: str, tokens: list[int], version: str = "3") -> Answer:
    """An answer whose log-probs are -0.01 times the token."""
    spans = [{"version": version, "start": 0, "end": len(tokens)}] if tokens else []
    choice = {
        "finish_reason": ended,
        "token_ids": tokens,
        "logprobs": {"content": [{"logprob": -token / 100} for token in tokens]},
        "weight_versions": spans,
    }
    return 200, {"choices": [choice]}


def unready() -> dict[str, Any]:
    answer = json.loads(json.dumps(GOOD))
    answer["choices"][0]["weight_versions"] = [{"version": "default", "start": 0, "end": 3}]
    return answer


class Server:
    """Answers with `answers` in turn, then with GOOD; records the requests and their connections."""

    def __init__(self, answers: list[Answer], delay_s: float = 0.0, keep_s: float | None = None):
        self.requests: list[dict[str, Any]] = []
        self.answers = answers
        self.connections: set[Any] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = keep_s  # after which an idle connection is closed

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.requests.append({"key": self.headers["Authorization"], **json.loads(body)})
                server.connections.add(self.client_address)
                time.sleep(delay_s)
                status, answer = answers.pop(0) if answers else (200, GOOD)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*answers: Answer, delay_s: float = 0.0, keep_s: float | None = None) -> Server:
        servers.append(Server(list(answers), delay_s, keep_s))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def closed_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def ask(client: EngineClient, sticky: str = "a") -> Any:
    return client.generate([5, 6], max_tokens=3, temperature=0.7, stop_token_ids=[1], seed=9, sticky=sticky)


def test_every_token_has_its_log_prob_and_the_version_of_its_span(serve: Callable[..., Server]) -> None:
    server = serve()
    generation = ask(EngineClient([server.address], "secret", 5))
    assert generation.tokens == [11, 12, 1]  # the stop token included
    assert generation.logprobs == [-0.1, -0.2, -0.3]
    assert generation.versions == [-2, 3, 3]
    assert server.requests[0]["key"] == "Bearer secret"
    sampling = server.requests[0]["sampling_params"]
    assert (sampling["temperature"], sampling["seed"], sampling["stop_token_ids"]) == (0.7, 9, [1])


def test_an_aborted_request_is_continued_from_its_own_tokens(serve: Callable[..., Server]) -> None:
    server = serve(part("abort", [11, 12], "3"), part("abort", [], "4"), part("abort", [13], "4"))
    client = EngineClient([server.address], "k", 5)
    server.answers.append(part("length", [14, 15], "5"))
    generation = client.generate([5, 6], max_tokens=5, temperature=0.7, stop_token_ids=[1], seed=9)
    assert generation.tokens == [11, 12, 13, 14, 15]
    assert generation.logprobs == [-0.11, -0.12, -0.13, -0.14, -0.15]
    assert generation.versions == [3, 3, 4, 5, 5]
    assert generation.finish_reason == "length"
    asked = [(r["token_ids"], r["sampling_params"]["max_tokens"]) for r in server.requests]
    assert asked[0] == ([5, 6], 5)
    assert asked[1:3] == [([5, 6, 11, 12], 3)] * 2  # nothing had been made of it: the same again
    assert asked[3] == ([5, 6, 11, 12, 13], 2)
    seeds = [r["sampling_params"]["seed"] for r in server.requests]
    assert (
        seeds[0] == 9 and len({seeds[0], seeds[1], seeds[3]}) == 3
    )  # no part repeats another's random numbers
    others = [{**r["sampling_params"], "seed": 0, "max_tokens": 0} for r in server.requests]
    assert all(other == others[0] for other in others)


def test_tokens_of_an_aborted_request_survive_the_engine(serve: Callable[..., Server]) -> None:
    server = serve(part("abort", [11, 12]), (503, {}), (200, unready()), part("stop", [1], "7"))
    generation = ask(EngineClient([server.address], "k", 5))
    assert (generation.tokens, generation.versions) == ([11, 12, 1], [3, 3, 7])


def test_aborts_before_the_first_token_are_no_hot_loop(serve: Callable[..., Server]) -> None:
    server = serve(*[part("abort", [])] * 3)
    started = time.monotonic()
    assert ask(EngineClient([server.address], "k", 5)).tokens == [11, 12, 1]
    assert len(server.requests) == 4 and time.monotonic() - started > 0.6  # 0.1, 0.2 and 0.4 s


def test_all_parts_share_one_deadline(serve: Callable[..., Server]) -> None:
    server = serve(*[part("abort", [11])] * 20, delay_s=0.2)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=server.address):
        EngineClient([server.address], "k", 0.7).generate(
            [5], max_tokens=50, temperature=1.0, stop_token_ids=[]
        )
    assert time.monotonic() - started < 1.2


def test_requests_of_one_thread_share_one_connection(serve: Callable[..., Server]) -> None:
    server = serve()
    client = EngineClient([server.address], "k", 5)
    for _ in range(5):
        ask(client)
    assert len(server.connections) == 1


def test_connections_that_the_server_closed_meanwhile_cost_no_failed_request(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(delay_s=0.2, keep_s=0.3)
    client = EngineClient([server.address], "k", 20)
    with ThreadPoolExecutor(8) as threads:  # leaves 8 idle connections behind
        list(threads.map(lambda _: ask(client), range(8)))
    assert len(server.connections) == 8
    time.sleep(0.6)
    pauses: list[float] = []
    monkeypatch.setattr("tasks.inference.client.time.sleep", pauses.append)
    ask(client)
    assert pauses == [0.2]  # the server's own delay, in this process


def test_a_sticky_key_always_goes_to_the_same_engine_and_keys_spread(serve: Callable[..., Server]) -> None:
    servers = [serve(), serve()]
    client = EngineClient([server.address for server in servers], "k", 5)
    for _ in range(4):
        ask(client, "one")
    assert sorted(len(server.requests) for server in servers) == [0, 4]
    for index in range(40):
        ask(client, f"t{index}")
    assert min(len(server.requests) for server in servers) >= 8


@pytest.mark.parametrize(
    "answer", [(503, {}), (500, {}), (200, unready())], ids=["503", "500", "no version yet"]
)
def test_an_engine_that_recovers_is_survived(serve: Callable[..., Server], answer: Answer) -> None:
    assert ask(EngineClient([serve(answer, answer).address], "k", 5)).versions == [-2, 3, 3]


def test_a_dead_engine_is_left_for_another_at_once(serve: Callable[..., Server]) -> None:
    client = EngineClient([closed_address(), serve().address], "k", 5)
    started = time.monotonic()
    for index in range(10):
        ask(client, f"t{index}")
    assert time.monotonic() - started < 1


def test_the_deadline_names_the_engine() -> None:
    address = closed_address()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=address):
        ask(EngineClient([address], "k", 0.5))
    assert time.monotonic() - started < 1


def test_a_silent_engine_costs_no_more_than_the_deadline(serve: Callable[..., Server]) -> None:
    server = serve(delay_s=3)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=server.address):
        ask(EngineClient([server.address], "k", 0.5))
    assert time.monotonic() - started < 1


def test_a_refused_request_is_an_error_at_once(serve: Callable[..., Server]) -> None:
    server = serve((400, {"error": "too long"}))
    with pytest.raises(ValueError, match="too long"):
        ask(EngineClient([server.address], "k", 5))
    assert len(server.requests) == 1


def put_engine(store: Store, index: int, **fields: Any) -> None:
    registration = Registration(f"engine-{index}", "engine", "gpu-bandwidth", **fields)
    store.write_json(layout.service(registration.name), asdict(registration))


def test_the_served_version_is_the_lowest_of_ready_engines_with_a_fresh_heartbeat(tmp_path: Path) -> None:
    store, now = Store(str(tmp_path)), time.time()
    assert served_version(store, 4) is None
    put_engine(store, 0, status="ready", version=5, heartbeat_at=now)
    put_engine(store, 1, status="ready", version=4, heartbeat_at=now)
    put_engine(store, 2, status="ready", version=2, heartbeat_at=now - 3600)
    put_engine(store, 3, status="failed", version=3, heartbeat_at=now)
    assert served_version(store, 4) == 4
    assert served_version(store, 1) == 5


@pytest.mark.parametrize(
    ("method", "path", "key", "passes"),
    [
        ("GET", "/health", None, True),
        ("POST", "/health", None, False),
        ("POST", "/pause", None, False),
        ("POST", "/pause", "Bearer wrong", False),
        ("POST", "/pause", "Bearer right", True),
        ("OPTIONS", "/pause", None, False),
    ],
)
def test_every_route_but_health_wants_the_key(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, key: str | None, passes: bool
) -> None:
    monkeypatch.setenv(API_KEY, "right")
    reached, sent = [], []

    async def app(*_: Any) -> None:
        reached.append(True)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", key.encode())] if key else []
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(RequireKey(app)(scope, None, send))
    assert bool(reached) is passes
    assert passes or sent[0]["status"] == 401


class RunningRequest:
    """What vLLM keeps of a request, as far as GET /busy reads it."""

    def __init__(self, prompt_len: int, generated: int):
        self.prompt_len, self.is_prefilling, self.detokenizer = prompt_len, generated == 0, self
        self.num_output_tokens = lambda: generated


def scope_of(path: str, *requests: RunningRequest) -> dict[str, Any]:
    processor = SimpleNamespace(request_states=dict(enumerate(requests)))
    state = SimpleNamespace(engine_client=SimpleNamespace(output_processor=processor))
    app = SimpleNamespace(state=state)
    return {"type": "http", "method": "GET", "path": path, "headers": [], "app": app}


def test_busy_seconds_are_those_with_at_least_one_request_in_flight() -> None:
    async def app(scope: dict[str, Any], *_: Any) -> None:
        await asyncio.sleep(scope.get("for", 0.3))
        if scope.get("raise"):
            raise ValueError

    async def busy(count: CountRequests, *requests: RunningRequest) -> dict[str, Any]:
        sent: list[Any] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await count(scope_of(BUSY, *requests), None, send)
        assert sent[0]["status"] == 200
        return json.loads(sent[1]["body"])

    async def measured() -> None:
        count = CountRequests(app)
        assert (await busy(count))["busy_s"] == 0
        both = [asyncio.ensure_future(count(scope_of(GENERATE), None, None)) for _ in range(2)]
        await asyncio.sleep(0.15)
        now = await busy(count, RunningRequest(10, 5), RunningRequest(100, 0), RunningRequest(1, 2))
        assert (now["in_flight"], now["tokens_in_flight"]) == (2, 18)  # one is not past its prefill
        assert 0.1 < now["busy_s"] < 0.3  # counted while it goes on, and once for both
        await asyncio.gather(*both)
        await count(scope_of("/health"), None, None)
        with pytest.raises(ValueError):  # a request that fails has been one, too
            await count({**scope_of(GENERATE), "for": 0.2, "raise": True}, None, None)
        done = await busy(count)
        assert done["in_flight"] == 0 and 0.45 < done["busy_s"] < 0.75
        assert done["started_at"] == now["started_at"]

    asyncio.run(measured())


def test_busy_seconds_never_fall_when_the_server_is_restarted() -> None:
    count, seen = BusyCount(), []
    for started_at, busy_s in ((1.0, 4.0), (1.0, 6.0), (1.0, 5.9), (2.0, 0.5), (2.0, 9.0), (3.0, 0.0)):
        fact = count.add({"started_at": started_at, "busy_s": busy_s, "in_flight": 2, "tokens_in_flight": 7})
        assert fact["in_flight"] == 2 and time.time() - fact["at"] < 1
        seen.append(fact["busy_s"])
    assert seen == [4.0, 6.0, 6.0, 6.5, 15.0, 15.0]


def test_a_taken_port_is_an_error_that_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"inference.port: port {port}"):
            choose_port(parse_config({"inference": {"port": port}}), 0)
