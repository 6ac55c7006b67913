"""What an update of the weights costs a busy engine, and what the same bytes cost a plain process.

One real engine with its agent on a temporary store, a policy in the Qwen3 layout with random weights, new
versions published the way the trainer does it, and long requests in flight all the while. Beside each update a
plain process copies the same files and loads them into the same module: no store, no hashes, no engine.

`python -m tasks.inference.bench` is that plain process; `rollart bench weights` is the benchmark.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.config import RunConfig, parse_config
from tasks.errors import DeadlineExceeded, RunFailed
from tasks.inference.client import EngineClient
from tasks.keys import API_KEY
from tasks.services import Registration, Supervisor, registered, tail
from tasks.store import Store, layout
from tasks.training.policy import PREFIX, publish_policy

NAME = "engine-0"
CONTEXT, PROMPT = 1024, 32
SETTLE_S = 1.0  # requests run for so long before the next version is published
SERVED_DEADLINE_S = 300.0
WIDTHS = (64, 128, 256, 512, 1024, 2048)
OF_A_LOAD = (
    "prefetch_s",
    "pause_s",
    "load_s",
    "serving_s",
    "requests_in_flight",
    "tokens_in_flight",
    "parity_s",
    "parity",
)


def architecture(parameters: int) -> dict[str, int]:
    """Sizes of a tiny policy of at least `parameters` parameters, in layers of the Qwen3 proportions."""
    width = max((w for w in WIDTHS if 4 * _layer(w) <= parameters), default=WIDTHS[0])
    heads = max(1, width // 64)
    return {
        "hidden_size": width,
        "layers": -(-parameters // _layer(width)),
        "heads": heads,
        "kv_heads": max(1, heads // 2),
        "intermediate_size": 3 * width,
    }


def _layer(width: int) -> int:
    """Parameters of one layer's matrices: attention with half as many key-value heads, and the MLP."""
    return 12 * width * width


def measure(
    parameters: int, updates: int, requests: int = 4, update: str = "keep", say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Publish `updates` versions to one engine with `requests` requests in flight; seconds of each step.

    Returns `{"parameters", "bytes", "requests", "update", "updates": [...], "median": {...}}`; an update has
    `publish_s`, OF_A_LOAD as the agent recorded them, `copy_s` and `plain_load_s` of the plain process, and the
    shares `ratio` (prefetch and load by plain copy and load) and `pause_share` (pause by publish-to-serving, which
    is `publish_s + serving_s` without the check of the log-probs, `parity_s`: the engine generates meanwhile).
    Raises RunFailed, DeadlineExceeded.
    """
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as name:
        folder = Path(name)
        store = Store(str(folder / "run"))
        config = _prepare(store, parameters, requests, update)
        publisher = _Publisher(store, folder, config)
        say(
            f"a policy of {publisher.parameters / 1e6:.1f}M parameters, {publisher.bytes / 2**20:.0f} MiB a version"
        )
        key = secrets.token_hex(16)
        with _engine(store, folder, key) as supervisor, _plain(folder) as plain:
            publisher.publish(0)
            found = _served(store, supervisor, 0, config.inference.start_deadline_s)
            say(f"the engine is up; {requests} requests in flight while {updates} versions are published")
            with _traffic(str(found.address), key, requests):
                done = [_one(store, supervisor, publisher, plain, v, say) for v in range(1, updates + 1)]
    names = [name for name in done[0] if name not in ("version", "parity")]
    return {
        "parameters": publisher.parameters,
        "bytes": publisher.bytes,
        "requests": requests,
        "update": update,
        "updates": done,
        "median": {name: statistics.median(one[name] for one in done) for name in names},
    }


def _prepare(store: Store, parameters: int, requests: int, update: str) -> RunConfig:
    config = parse_config(
        {
            "policy": {"context_limit": CONTEXT, **architecture(parameters)},
            "inference": {"max_concurrent": requests + 2, "update": update},
        }
    )
    store.write(layout.CONFIG, config.to_toml().encode())
    publish_policy(store, config)
    return config


def _one(
    store: Store,
    supervisor: Supervisor,
    publisher: _Publisher,
    plain: _Plain,
    version: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Publish `version`, wait until it is served, and do the same bytes plainly."""
    time.sleep(SETTLE_S)
    publish_s = publisher.publish(version)
    load = _served(store, supervisor, version, SERVED_DEADLINE_S).facts["loads"][-1]
    plainly = plain.run(sorted(Path(store.uri, layout.weights(version)).glob("*.safetensors")))
    store.delete(layout.weights(version - 1))
    found = {
        "version": version,
        "publish_s": publish_s,
        **{name: load[name] for name in OF_A_LOAD},
        **plainly,
    }
    found["ratio"] = (load["prefetch_s"] + load["load_s"]) / (plainly["copy_s"] + plainly["plain_load_s"])
    found["pause_share"] = load["pause_s"] / (publish_s + load["serving_s"] - load["parity_s"])
    say(line(found))
    return found


def line(one: dict[str, Any]) -> str:
    """An update, or the medians, in one line for a person."""
    seconds = " ".join(
        f"{name} {one[f'{name}_s']:.2f}"
        for name in ("publish", "prefetch", "pause", "load", "parity", "serving")
    )
    return (
        f"{seconds} s | plain copy {one['copy_s']:.2f} load {one['plain_load_s']:.2f} s | prefetch + load"
        f" {one['ratio']:.2f} x plain | pause {one['pause_share']:.1%} of publish to serving |"
        f" {one['requests_in_flight']:.0f} requests, {one['tokens_in_flight']:.0f} tokens in flight"
    )


class _Publisher:
    """Stands in for the trainer: the same steps, without an optimiser between two versions."""

    def __init__(self, store: Store, folder: Path, config: RunConfig):
        import torch

        from tasks.training import publishing

        torch.set_num_threads(1)
        self.store, self.policy_folder = store, folder / "policy"
        store.fetch(PREFIX, self.policy_folder)
        self.model = _new_model(self.policy_folder)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.probe = publishing.probe_tokens(self.model.config.vocab_size, config.policy.context_limit)

    def publish(self, version: int) -> float:
        """New weights as `version`; seconds from the optimiser's last step to the manifest."""
        import torch

        from tasks.training import publishing

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.01 * version)
            started = time.monotonic()
            weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            logprobs = self._logprobs()
        with publishing.temporary_folder() as name:
            publishing.write_weights(weights, Path(name))
            publishing.publish(self.store, version, Path(name), self.policy_folder, self.probe, logprobs)
        return time.monotonic() - started

    def _logprobs(self) -> list[list[float]]:
        import torch

        tokens = torch.tensor(self.probe)
        logprobs = torch.log_softmax(self.model(tokens).logits[:, :-1].float(), -1)
        return logprobs.gather(2, tokens[:, 1:, None])[:, :, 0].tolist()


def _new_model(policy_folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(policy_folder), dtype=torch.float32
    ).eval()


@contextmanager
def _engine(store: Store, folder: Path, key: str) -> Iterator[Supervisor]:
    """The agent and its server as a child process."""
    supervisor = Supervisor(folder)
    environment = {API_KEY: key, "ROLLART_HOME": str(folder / "home")}
    argv = [sys.executable, "-m", "tasks.inference.agent", "--store", store.uri, "--name", NAME]
    supervisor.add(NAME, argv, environment, restarts=0)
    try:
        yield supervisor
    finally:
        supervisor.stop()


def _served(store: Store, supervisor: Supervisor, version: int, deadline_s: float) -> Registration:
    """Wait until the engine serves `version`."""
    started, log = time.monotonic(), supervisor.services[NAME].log
    while True:
        found = registered(store, NAME)
        if found is not None and found.status == "ready" and found.version == version:
            return found
        if supervisor.failed() is not None or (found is not None and found.status == "failed"):
            raise RunFailed(
                f"the engine ended: {found.detail if found else tail(log)}", look_at=tail(log, 15)
            )
        if time.monotonic() - started > deadline_s:
            raise DeadlineExceeded(f"the engine to serve version {version}", deadline_s, tail(log, 15))
        time.sleep(0.02)


@contextmanager
def _traffic(address: str, key: str, requests: int) -> Iterator[None]:
    """Keep `requests` long requests in flight."""
    client, stop = EngineClient([address], key, SERVED_DEADLINE_S), threading.Event()

    def ask(index: int) -> None:
        while not stop.is_set():
            prompt = [(index + i) % 16 for i in range(PROMPT)]
            client.generate(prompt, max_tokens=CONTEXT - PROMPT - 1, temperature=1.0, stop_token_ids=[])

    threads = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(requests)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()  # the threads end with their engine; nothing waits for their answers


class _Plain:
    """The plain process, waiting for files to copy and load."""

    def __init__(self, folder: Path):
        self.target = folder / "plain"
        self.target.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tasks.inference.bench", str(folder / "policy")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, sources: list[Path]) -> dict[str, float]:
        """Seconds of copying `sources` and of loading the copies."""
        assert self.process.stdin is not None and self.process.stdout is not None
        copies = [(str(source), str(self.target / source.name)) for source in sources]
        self.process.stdin.write(json.dumps(copies) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def _plain(folder: Path) -> Iterator[_Plain]:
    plain = _Plain(folder)
    try:
        yield plain
    finally:
        plain.process.kill()
        plain.process.wait()


def main() -> None:
    """Copy and load the files named in each line of stdin into a model of the policy folder in sys.argv."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    own = dict(_new_model(Path(sys.argv[1])).named_parameters())
    for asked in sys.stdin:
        copies = json.loads(asked)
        started = time.monotonic()
        for source, target in copies:
            shutil.copyfile(source, target)
        copied = time.monotonic()
        with torch.no_grad():
            for _, target in copies:
                for name, tensor in load_file(target).items():
                    own[name].copy_(tensor)
        loaded = time.monotonic()
        for _, target in copies:
            os.unlink(target)
        print(json.dumps({"copy_s": copied - started, "plain_load_s": loaded - copied}), flush=True)


if __name__ == "__main__":
    main()
