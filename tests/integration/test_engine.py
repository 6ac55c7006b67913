"""One real vLLM server under its agent, against recomputation by transformers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from tasks.config import parse_config
from tasks.inference.client import EngineClient, Generation, served_version
from tasks.keys import API_KEY
from tasks.services import PARENT, Registration, identify, registered
from tasks.store import Store, layout
from tests.integration.tiny_model import VOCAB, probe_of, put_policy, put_weights, tiny_model

KEY = "a-test-key"
CONTEXT = 512
START_S = 180.0


class Run:
    """A store with a tiny policy, and an agent process on it."""

    def __init__(self, folder: Path, *, tied: bool, **inference: Any):
        self.folder, self.tied = folder, tied
        self.store = Store(str(folder / "run"))
        config = parse_config(
            {
                "policy": {"context_limit": CONTEXT},
                "inference": {
                    "parity_tolerance": 1e-4,
                    "kv_cache_gib": 0.25,
                    "max_concurrent": 16,
                    **inference,
                },
            }
        )
        self.store.write(layout.CONFIG, config.to_toml().encode())
        put_policy(self.store, tied=tied, context_limit=CONTEXT)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, parent: str | None = None) -> psutil.Process:
        environment = {**os.environ, "ROLLART_HOME": str(self.folder / "home"), API_KEY: KEY}
        if parent:
            environment[PARENT] = parent
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tasks.inference.agent",
                    "--store",
                    self.store.uri,
                    "--name",
                    "engine-0",
                ],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return psutil.Process(self.process.pid)

    def publish(self, version: int, seed: int, *, probe_seed: int | None = None, probe: bool = True) -> Any:
        model = tiny_model(seed, tied=self.tied)
        of = model if probe_seed is None else tiny_model(probe_seed, tied=self.tied)
        put_weights(self.store, version, model, probe_of(of) if probe else None)
        return model

    def registration(self) -> Registration:
        found = registered(self.store, "engine-0")
        assert found is not None
        return found

    def wait(self, what: Any, deadline_s: float = 20.0) -> Registration:
        """Wait until `what(registration)`."""
        started = time.monotonic()
        while True:
            found = registered(self.store, "engine-0")
            if found is not None and what(found):
                return found
            assert time.monotonic() - started < deadline_s, (
                f"{found}\n{(self.folder / 'agent.log').read_text()}"
            )
            time.sleep(0.05)

    def wait_for_version(self, version: int, deadline_s: float = 20.0) -> Registration:
        return self.wait(lambda found: found.status == "ready" and found.version == version, deadline_s)

    def busy(self) -> dict[str, Any]:
        address = f"{self.registration().address}/busy"
        return httpx.get(address, headers={"Authorization": f"Bearer {KEY}"}).json()

    def client(self, deadline_s: float = 60.0) -> EngineClient:
        return EngineClient([self.registration().address or ""], KEY, deadline_s)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=15)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("engine"), tied=True)
    run.start()
    try:
        run.publish(0, seed=0)
        run.wait_for_version(0, START_S)
        yield run
    finally:
        run.end()


def prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(
    client: EngineClient, tokens: list[int], count: int = 8, temperature: float = 1.0, **kw: Any
) -> Generation:
    kw = {"stop_token_ids": [], "seed": 1, "sticky": "x", **kw}
    return client.generate(tokens, max_tokens=count, temperature=temperature, **kw)


@torch.no_grad()
def recomputed(
    model: Any, tokens: list[int], generation: Generation, temperature: float = 1.0
) -> list[float]:
    """The oracle: log-probs of the generated tokens by transformers."""
    ids = torch.tensor([tokens + generation.tokens])
    logprobs = torch.log_softmax(model(ids).logits[0, len(tokens) - 1 : -1] / temperature, -1)
    return logprobs.gather(1, torch.tensor(generation.tokens)[:, None])[:, 0].tolist()


def difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def left_after(processes: list[psutil.Process], deadline_s: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=deadline_s)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_every_version_is_pulled_with_parity(run: Run) -> None:
    first = run.registration().version or 0
    for version in (first + 1, first + 2):
        run.publish(version, seed=version)
        found = run.wait_for_version(version)
    loads = found.facts["loads"]
    assert [load["version"] for load in loads][-3:] == [first, first + 1, first + 2]
    assert all(load["parity"] < 1e-4 and load["pause_s"] < 5 for load in loads)
    assert served_version(run.store, 1) == first + 2


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_sampling_distribution_also_after_an_update(
    run: Run, temperature: float
) -> None:
    client, tokens = run.client(), prompt(150)
    version = (run.registration().version or 0) + 1
    old = run.publish(version, seed=version)
    run.wait_for_version(version)
    for _ in range(2):  # the second one reads the prefix cache
        generation = ask(client, tokens, temperature=temperature)
        assert difference(generation.logprobs, recomputed(old, tokens, generation, temperature)) < 1e-3
        assert generation.versions == [version] * 8
    new = run.publish(version + 1, seed=version + 1)
    run.wait_for_version(version + 1)
    generation = ask(client, tokens, temperature=temperature)
    assert generation.versions == [version + 1] * 8
    assert difference(generation.logprobs, recomputed(new, tokens, generation, temperature)) < 1e-3
    assert difference(generation.logprobs, recomputed(old, tokens, generation, temperature)) > 0.1


def updated_in_flight(run: Run, requests: int) -> tuple[list[Generation], dict[str, Any]]:
    """Publish a version while `requests` requests are in flight, and check every token of every one of them.

    Returns the generations and what the agent recorded about the load.
    """
    client, version = run.client(), run.registration().version or 0
    old = run.publish(version + 1, seed=version + 1)
    run.wait_for_version(version + 1)
    prompts = [prompt(12, seed) for seed in range(requests)]
    new = tiny_model(version + 2, tied=run.tied)
    probe = probe_of(new)  # made before: the requests last no longer than a few seconds
    with ThreadPoolExecutor(requests) as threads:
        futures = [threads.submit(ask, client, tokens, CONTEXT - 20) for tokens in prompts]
        while (now := run.busy())["tokens_in_flight"] < 16 * min(requests, 16):  # all that can run do
            time.sleep(0.02)
        put_weights(run.store, version + 2, new, probe)
        generations = [future.result() for future in futures]
    for tokens, generation in zip(prompts, generations, strict=True):
        assert len(generation.tokens) == CONTEXT - 20 and generation.finish_reason == "length"
        assert set(generation.versions) <= {version + 1, version + 2}
        switch = [*generation.versions, version + 2].index(version + 2)
        assert set(generation.versions[switch:]) <= {version + 2}
        by_old, by_new = recomputed(old, tokens, generation), recomputed(new, tokens, generation)
        assert difference([0, *generation.logprobs[:switch]], [0, *by_old[:switch]]) < 1e-3
        assert difference([0, *generation.logprobs[switch:]], [0, *by_new[switch:]]) < 1e-3
    load = run.wait_for_version(version + 2).facts["loads"][-1]
    assert load["tokens_in_flight"] >= now["tokens_in_flight"]  # none had ended, so it only grew
    return generations, load


def check_load(load: dict[str, Any], generations: list[Generation]) -> None:
    """What was recorded about an update agrees with what it interrupted."""
    cut = [generation for generation in generations if len(set(generation.versions)) == 2]
    by_old = sum(generation.versions.index(generation.versions[-1]) for generation in cut)
    assert len(cut) <= load["requests_in_flight"] <= len(generations)
    # The count is from just before the pause: a few tokens were still made.
    assert load["tokens_in_flight"] <= by_old + len(generations) * (CONTEXT - 8)
    assert 0 < load["load_s"] < load["pause_s"] < load["serving_s"] < 20
    assert load["prefetch_s"] + load["pause_s"] < load["serving_s"]


def test_a_request_in_flight_survives_an_update_and_shows_both_versions(run: Run) -> None:
    generations, load = updated_in_flight(run, 8)
    assert all(len(set(generation.versions)) == 2 for generation in generations)
    assert load["requests_in_flight"] == 8
    check_load(load, generations)
    busy = run.wait(lambda found: found.facts["busy"]["in_flight"] == 0).facts["busy"]
    assert busy["busy_s"] > 0.3
    later = run.wait(lambda found: found.facts["busy"]["at"] > busy["at"]).facts["busy"]
    assert busy["busy_s"] == later["busy_s"] and later["in_flight"] == 0  # nothing was asked of it


def test_an_update_that_aborts_what_is_in_flight_loses_no_token_and_makes_none_again(tmp_path: Path) -> None:
    run = Run(tmp_path, tied=False, update="abort")
    run.start()
    try:
        run.publish(0, seed=0)
        run.wait_for_version(0, START_S)
        generations, load = updated_in_flight(run, 24)
        spans = [len(set(generation.versions)) for generation in generations]
        assert 1 <= spans.count(2) <= 16  # 16 run at once: the others were aborted without a token
        check_load(load, generations)
        run.publish(4, seed=4)  # with nothing in flight
        load = run.wait_for_version(4).facts["loads"][-1]
        assert (load["requests_in_flight"], load["tokens_in_flight"]) == (0, 0)
    finally:
        run.end()


def test_the_stop_token_is_in_the_answer(run: Run) -> None:
    generation = ask(run.client(), prompt(20), 200, stop_token_ids=list(range(2, 40)))
    assert generation.finish_reason == "stop"
    assert 2 <= generation.tokens[-1] < 40
    assert len(generation.tokens) == len(generation.logprobs) == len(generation.versions)


def test_a_version_that_does_not_match_its_probe_is_refused_and_the_old_one_serves_on(run: Run) -> None:
    version = (run.registration().version or 0) + 1
    good = run.publish(version, seed=version)
    run.wait_for_version(version)
    run.publish(version + 1, seed=version + 1, probe_seed=version + 50)
    found = run.wait(lambda found: found.status == "failed")
    assert found.version == version
    assert f"version {version + 1} is refused" in found.detail and "parity_tolerance = 1e-04" in found.detail
    generation = ask(run.client(), prompt(60))
    assert generation.versions == [version] * 8
    assert difference(generation.logprobs, recomputed(good, prompt(60), generation)) < 1e-3
    run.publish(version + 2, seed=version + 2)
    assert run.wait_for_version(version + 2).facts["loads"][-1]["parity"] < 1e-4


def test_a_corrupt_object_is_fetched_again_until_it_is_whole(run: Run) -> None:
    version = (run.registration().version or 0) + 1
    scratch = Store(str(run.folder / "scratch"))
    put_weights(scratch, version, model := tiny_model(version, tied=True), probe_of(model))
    key = f"{layout.weights(version)}/model.safetensors"
    run.store.write(key, scratch.read(key)[:-1000])
    for name in ("config.json", "manifest.json"):
        other = f"{layout.weights(version)}/{name}"
        run.store.write(other, scratch.read(other))
    found = run.wait(lambda found: "cannot be fetched" in found.detail)
    assert (found.status, found.version) == ("ready", version - 1)
    run.store.write(key, scratch.read(key))
    run.wait_for_version(version)


def test_a_manifest_without_a_probe_is_loaded_and_recorded_as_unchecked(run: Run) -> None:
    version = (run.registration().version or 0) + 1
    run.publish(version, seed=version, probe=False)
    assert run.wait_for_version(version).facts["loads"][-1]["parity"] is None


def test_only_two_versions_stay_on_the_local_disk(run: Run) -> None:
    folders = list((run.folder / "home").glob("work/*/engine-0/weights/*"))
    assert 1 <= len(folders) <= 2


def test_every_control_route_wants_the_key(run: Run) -> None:
    address = run.registration().address or ""
    with httpx.Client(base_url=address) as stranger:
        for route in (
            "/pause",
            "/resume",
            "/update_weights",
            "/collective_rpc",
            "/sleep",
            "/inference/v1/generate",
        ):
            assert stranger.post(route, json={}).status_code == 401
        for route in ("/busy", "/metrics", "/weight_info", "/server_info", "/v1/models"):
            assert stranger.get(route).status_code == 401
            assert stranger.get(route, headers={"Authorization": "Bearer x"}).status_code == 401
        assert stranger.get("/health").status_code == 200
    with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {KEY}"}) as friend:
        assert friend.get("/weight_info").status_code == 200


def test_the_engine_listens_on_loopback_only(run: Run) -> None:
    assert run.process is not None
    listening = [
        connection.laddr.ip
        for process in family(psutil.Process(run.process.pid))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}


def test_a_killed_server_is_survived_with_its_version_and_no_request_is_lost(run: Run) -> None:
    assert run.process is not None
    version = (run.registration().version or 0) + 1
    model = run.publish(version, seed=version)
    run.wait_for_version(version)
    client, tokens = run.client(START_S), prompt(30)
    servers = psutil.Process(run.process.pid).children(recursive=True)
    servers[0].kill()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, client, tokens)
        assert left_after(servers, 10) == []  # the engine core too
        assert run.wait(lambda found: found.status == "starting").version is None
        generation = waiting.result()
    assert generation.versions == [version] * 8
    assert difference(generation.logprobs, recomputed(model, tokens, generation)) < 1e-3
    run.wait_for_version(version)


@pytest.mark.slow
@pytest.mark.parametrize("published", [False, True])
def test_a_server_that_hangs_is_started_again_and_no_request_is_lost(tmp_path: Path, published: bool) -> None:
    run = Run(tmp_path, tied=False, request_deadline_s=20.0)
    run.publish(0, seed=1)
    run.start()
    assert run.process is not None
    try:
        run.wait_for_version(0, START_S)
        client, tokens = run.client(START_S), prompt(31)
        servers = psutil.Process(run.process.pid).children(recursive=True)
        servers[-1].suspend()  # the engine core: the API beside it answers on
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(ask, client, tokens)
            if published:
                run.publish(1, seed=2)
            found = run.wait(lambda found: found.status == "starting", 60)
            assert ("does not answer /pause" if published else "taken to hang") in found.detail
            assert left_after(servers, 10) == []
            assert len(waiting.result().tokens) == 8
        run.wait_for_version(int(published))
    finally:
        run.end()


def test_a_terminate_signal_leaves_no_process(run: Run) -> None:
    assert run.process is not None
    processes = family(psutil.Process(run.process.pid))
    assert len(processes) >= 3
    run.process.terminate()
    assert run.process.wait(timeout=10) == 0
    assert left_after(processes[1:], 0.5) == []
    assert run.registration().status == "stopped"


def test_an_agent_that_joins_late_loads_the_newest_version_and_dies_with_its_descendants(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, tied=False)
    run.publish(-1, seed=1)
    run.publish(0, seed=2)
    agent = run.start()
    try:
        found = run.wait_for_version(0, START_S)
        assert [load["version"] for load in found.facts["loads"]] == [0]
        assert found.facts["loads"][0]["parity"] < 1e-4
        processes = family(agent)
        agent.kill()
        assert run.process is not None
        run.process.wait()
        assert left_after(processes, 10) == []
    finally:
        run.end()


def test_an_agent_ends_with_its_parent_while_it_starts(tmp_path: Path) -> None:
    run = Run(tmp_path, tied=True)
    parent = subprocess.Popen(["sleep", "100"])
    agent = run.start(identify(parent.pid))
    try:
        run.wait(lambda found: "starting the vLLM server" in found.detail)
        time.sleep(1)
        processes = family(agent)
        assert len(processes) >= 2
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert run.process is not None
        run.process.wait(timeout=10)
        assert left_after(processes, 0.5) == []
    finally:
        run.end()
