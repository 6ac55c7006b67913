"""One rank of the trainer: takes batches from the store, trains, publishes versions, checkpoints.

Rank 0 looks at the store and tells the others what comes next, as JSON. The trainer's version is k while it
waits for batch k. State on start: the newest whole checkpoint, else fitting weights (see `_states`); the
batches after it are replayed, and what they publish is already there. Metrics are finite numbers.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from hardware.pools import pool_for
from tasks.config import RunConfig, stored_config
from tasks.keys import fingerprint, run_key
from tasks.services import Registrar, Registration, end_with_parent, stop_event, store_parser, work_folder
from tasks.store import CorruptObject, Store, layout
from tasks.trajectory import decode

LOOK_S = 2.0  # between two looks at the published version
IDLE_S = 20.0  # longest time the other ranks hear nothing; far below the collectives' own deadline


class Stopped(Exception):
    """A terminate signal came."""


class Worker:
    """The state of one rank. Methods named after a command are collective."""

    def __init__(self, store: Store, config: RunConfig, registrar: Registrar | None, stop: threading.Event):
        self.store, self.config, self.registrar, self.stop = store, config, registrar, stop
        self.version = first_version(config)
        self.checkpointed: int | None = None
        self.said_at = self.looked_at = 0.0

    def start(self, folder: Path) -> None:
        """Build the policy and restore the newest state of the run. `folder` is this rank's own."""
        import torch
        import torch.distributed as dist

        from tasks.training import model, publishing
        from tasks.training.trainer import Trainer

        trainer = self.config.trainer
        model.start_distributed(max(1, trainer.threads // trainer.ranks))
        self.rank = dist.get_rank()
        self.control = dist.new_group(backend="gloo")
        self.policy_folder = folder / "policy"
        self.store.fetch("policy", self.policy_folder)
        self.dtype = torch.bfloat16 if trainer.precision == "bf16" else torch.float32
        policy = model.ShardedPolicy(self._initial_model(self.config.seed), trainer)
        self.trainer = Trainer(policy, self.config)
        vocabulary = policy.model.config.get_text_config().vocab_size
        self.probe = publishing.probe_tokens(vocabulary, self.config.policy.context_limit)
        self._restore()

    def run(self) -> None:
        """Take commands until a terminate signal."""
        self._say(status="ready", version=self.version, detail=self._waiting())
        while True:
            command = self._next()
            if command["do"] == "stop":
                self._checkpoint()
                return
            if command["do"] == "adopt":
                self._load_version(0)
                self.trainer.restart_optimiser()
                self._enter_version(0)
            elif command["do"] == "train":
                self._train(command["k"])
            elif command["do"] == "publish":
                self._publish(self.version, None)

    # what comes next

    def _next(self) -> dict[str, Any]:
        command = self._look() if self.rank == 0 else None
        return self._broadcast(command)

    def _look(self) -> dict[str, Any]:
        """Rank 0: wait for something to do."""
        until = time.monotonic() + IDLE_S
        while time.monotonic() < until:
            if self.stop.is_set():
                return {"do": "stop"}
            if self.version < 0 and self.store.manifest(layout.weights(0)) is not None:
                return {"do": "adopt"}
            if self.store.manifest(layout.batch(self.version)) is not None:
                return {"do": "train", "k": self.version}
            if self._withdrawn():
                return {"do": "publish"}
            self.stop.wait(self.store.poll_s)
        return {"do": "wait"}

    def _withdrawn(self) -> bool:
        """Whether the manifest of the version that was published last is gone: its weights were found corrupt."""
        if time.monotonic() - self.looked_at < LOOK_S:
            return False
        self.looked_at = time.monotonic()
        return self.store.manifest(layout.weights(self.version)) is None

    def _broadcast(self, value: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's value, on all ranks."""
        import torch
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            return value or {}
        data = bytearray(json.dumps(value).encode())
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.control)
        content = (
            torch.frombuffer(data, dtype=torch.uint8)
            if self.rank == 0
            else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(content, 0, group=self.control)
        return json.loads(content.numpy().tobytes())

    # one batch

    def _train(self, k: int) -> None:
        """Batch k: version k becomes k + 1, with metrics, weights and, when due, a checkpoint."""
        self._say(detail=f"training iteration {k}: reading the batch")
        facts = self.store.manifest(layout.batch(k)) or {}
        trajectories, _ = decode(self.store.get(layout.batch(k), "batch.parquet"))
        if facts["objective"] == "supervised":
            if facts.get("restart_seed") is not None:
                self._restart(int(facts["restart_seed"]))
            metrics = self.trainer.supervised(
                trajectories, int(facts["batch_size"]), float(facts["learning_rate"]), self._progress
            )
        else:
            metrics = self.trainer.policy_gradient(trajectories, k, self._progress)
        print(f"iteration {k}: " + " ".join(f"{n}={v:.5g}" for n, v in sorted(metrics.items())), flush=True)
        self._publish(k + 1, metrics)
        if k + 1 == 0:
            self.trainer.restart_optimiser()  # the warm start ends here; RL has its own schedule
        self._enter_version(k + 1)
        if (k + 1) % self.config.trainer.checkpoint_every == 0:
            self._checkpoint()

    def _publish(self, version: int, metrics: dict[str, float] | None) -> None:
        """Metrics of the iteration that made `version`, then its weights. What is there already stays."""
        from tasks.training import publishing

        self._progress(f"publishing version {version}")
        started, trained_at = time.perf_counter(), time.time()
        weights = self.trainer.policy.weights()
        logprobs = self.trainer.probe_logprobs(self.probe)
        if self.rank != 0:
            return
        with publishing.temporary_folder() as name:
            publishing.write_weights(weights, Path(name))
            if metrics is not None and not self.store.exists(layout.trainer_metrics(version - 1)):
                metrics = {
                    **finite(metrics),
                    "time/publish": time.perf_counter() - started,
                    "at/trained": trained_at,
                }
                self.store.write_json(layout.trainer_metrics(version - 1), metrics)
            publishing.publish(self.store, version, Path(name), self.policy_folder, self.probe, logprobs)

    def _progress(self, what: str) -> None:
        if self.stop.is_set():
            raise Stopped
        if (
            time.monotonic() - self.said_at > 1.0
        ):  # a write to the store; short steps need not each pay for one
            self._say(detail=what)

    # versions

    def _initial_model(self, seed: int):
        from tasks.training import model
        from tasks.training.policy import model_folder

        if self.config.policy.model == "tiny":
            return model.new_model(self.policy_folder, seed, self.dtype)
        return model.load_model(model_folder(self.config.policy.model), self.dtype)

    def _restart(self, seed: int) -> None:
        """New random weights (those of the folder, for a policy that has some) and a fresh optimiser."""
        fresh = self._initial_model(seed)
        self.trainer.policy.load(iter(fresh.state_dict().items()))
        self.trainer.restart_optimiser()

    def _restore(self) -> None:
        """Take the first of `_states` that is whole on every rank; a new policy if there is none to take.

        Raises CorruptObject if there are some and none is whole: other weights than those published must not
        take their place.
        """
        states = self._broadcast({"states": self._states()} if self.rank == 0 else None)["states"]
        for state in states:
            if self._take(state["version"], state["checkpoint"], state["steps"]):
                self._enter_version(state["version"])
                return
        if states:
            raise CorruptObject(f"{self.store.uri}: no checkpoint and no version to start from is whole")
        self._publish(self.version, None)
        self._enter_version(self.version)

    def _states(self) -> list[dict[str, Any]]:
        """What a start can go on from, best first.

        Checkpoints, newest first; then, only for when those are corrupt, published versions, newest first, with
        a fresh Adam state and the schedule going on; then version 0 or the first version, from which all
        batches are replayed.
        """
        from tasks.training import checkpoints

        warm_started = self.store.manifest(layout.weights(0)) is not None
        first, trainer = first_version(self.config), self.config.trainer

        def fits(version: int) -> bool:
            return version > 0 or (version > first and not warm_started)

        found = [v for v in reversed(checkpoints.complete(self.store)) if fits(v)]
        states = [
            {"version": v, "checkpoint": True, "steps": checkpoints.steps(self.store, v)} for v in found
        ]
        published = [v for v in reversed(self.store.numbers("weights")) if fits(v)] if found else []
        for v in (*published, 0 if warm_started else first):
            if self.store.manifest(layout.weights(v)) is not None:
                steps = max(0, v) * trainer.epochs * trainer.minibatches
                states.append({"version": v, "checkpoint": False, "steps": steps})
        return states

    def _take(self, version: int, checkpoint: bool, steps: int) -> bool:
        """Restore a state if all ranks can read it; else log why not, and remove a checkpoint that is corrupt."""
        from tasks.training import checkpoints, model

        what = layout.checkpoint(version) if checkpoint else layout.weights(version)
        with tempfile.TemporaryDirectory(prefix="rollart-weights-") as name:
            shard, whole = None, True
            try:
                self.store.fetch(layout.weights(version), Path(name))
                shard = checkpoints.read(self.store, version) if checkpoint else None
            except (CorruptObject, FileNotFoundError) as error:
                print(f"rank {self.rank}: skipped {what} on start: {_reason(error)}", flush=True)
                whole = False
            if not self._everywhere(whole):
                if checkpoint and self.rank == 0:
                    self.store.delete(what)  # else the replay would find it there and leave it as it is
                return False
            self.trainer.policy.load(model.read_weights(Path(name)))
        self.trainer.restart_optimiser()
        if shard is not None:
            self.trainer.policy.load_shard(shard)
            self.checkpointed = version
        self.trainer.steps = steps
        return True

    def _everywhere(self, condition: bool) -> bool:
        """Whether `condition` holds on all ranks."""
        import torch
        import torch.distributed as dist

        held = torch.tensor([int(condition)])
        dist.all_reduce(held, op=dist.ReduceOp.MIN, group=self.control)
        return bool(held.item())

    def _load_version(self, version: int) -> None:
        from tasks.training import model

        with tempfile.TemporaryDirectory(prefix="rollart-weights-") as name:
            self.store.fetch(layout.weights(version), Path(name))
            self.trainer.policy.load(model.read_weights(Path(name)))

    def _enter_version(self, version: int) -> None:
        self.version = version
        if version >= 0 and self.config.loss.kl_coefficient > 0 and self.trainer.reference is None:
            self._load_reference()
        self._say(version=version, detail=self._waiting())

    def _load_reference(self) -> None:
        """Version 0, frozen, whole on every rank: what the KL term compares with."""
        from tasks.training import model

        with tempfile.TemporaryDirectory(prefix="rollart-weights-") as name:
            self.store.fetch(layout.weights(0), Path(name))
            reference = model.Policy(model.load_model(Path(name), self.dtype)).eval().requires_grad_(False)
        self.trainer.reference = reference.to(self.trainer.policy.device)

    def _checkpoint(self) -> None:
        from tasks.training import checkpoints

        if (
            self.checkpointed == self.version
            or self.version == first_version(self.config)
            or self.version == 0
        ):
            return  # those begin with a fresh optimiser: their weights are all there is
        kept = self.config.trainer.checkpoints_kept
        checkpoints.save(self.store, self.version, self.trainer.policy, kept, steps=self.trainer.steps)
        self.checkpointed = self.version

    def _waiting(self) -> str:
        return f"waiting for batch {self.version}"

    def _say(self, **changes: Any) -> None:
        self.said_at = time.monotonic()
        if self.registrar is not None:
            self.registrar.update(**changes)


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that are finite numbers, which is all that JSON can hold; what is left out is logged."""
    left_out = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if left_out:
        print(f"left out of the metrics, for not being finite: {', '.join(left_out)}", flush=True)
    return {name: value for name, value in metrics.items() if name not in left_out}


def first_version(config: RunConfig) -> int:
    """The version of the initial policy: below 0 by the rounds a warm start may take."""
    return -config.warm_start.max_rounds if config.warm_start.enabled else 0


def main(argv: list[str] | None = None) -> int:
    """One rank of the trainer of the run at --store; started by torchrun."""
    arguments = store_parser("tasks.training.worker", main.__doc__).parse_args(argv)
    stop = stop_event()
    end_with_parent()
    store = Store(arguments.store, arguments.endpoint_url)
    config = stored_config(store)
    registrar = None
    if os.environ["RANK"] == "0":
        pool = pool_for("train", config.pools).name
        log = str(work_folder(store) / "logs" / "trainer.log")
        registration = Registration("trainer", "trainer", pool, log=log, key=fingerprint(run_key(store)))
        registrar = Registrar(store, registration)
    worker = Worker(store, config, registrar, stop)
    try:
        with tempfile.TemporaryDirectory(prefix="rollart-trainer-") as folder:
            worker.start(Path(folder))
            worker.run()
    except BaseException as error:
        if not (stop.is_set() or isinstance(error, Stopped)):
            traceback.print_exc()
            if registrar is not None:
                registrar.close("failed", _reason(error))
            _exit(1)
    if registrar is not None:
        registrar.close("stopped")
    _exit(0)
    return 0


def _reason(error: BaseException) -> str:
    kind = "" if isinstance(error, CorruptObject) else f"{type(error).__name__}: "
    return f"{kind}{error}".strip()


def _exit(code: int) -> None:
    """End at once: collectives' threads of a rank whose peers are gone can hold up an ordinary exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
