"""The names of a run's objects. Deterministic, so that writing an object again changes nothing."""

from __future__ import annotations

CONFIG = "config.toml"


def group(wave: int, index: int) -> str:
    """A finished, scored group."""
    return f"groups/{wave}/{index}.parquet"


def batch(k: int) -> str:
    """Prefix of batch `k`: batch.parquet and the manifest that lists the group ids it consumed."""
    return f"batches/{k}"


def weights(version: int) -> str:
    """Prefix of a version's Hugging Face folder. Versions below 0 are candidates of the warm start."""
    return f"weights/{version}"


def checkpoint(version: int) -> str:
    """Prefix of the DeepSpeed state at a version."""
    return f"checkpoints/{version}"


def trainer_metrics(k: int) -> str:
    """What the trainer measured in iteration `k`."""
    return f"metrics/{k}.json"


def iteration(k: int) -> str:
    """Everything measured about iteration `k`: rollout, trainer and stage times."""
    return f"iterations/{k}.json"


def evaluation(version: int) -> str:
    """The evaluation of a version on held-out seeds."""
    return f"evaluations/{version}.json"


def service_log(name: str) -> str:
    """The end of a service's log, written when it dies on another machine than its run's controller."""
    return f"services/{name}.log"


def lease(name: str) -> str:
    """The lease of a service's place on its pool's accelerators."""
    return f"services/{name}.lease"


def access(name: str) -> str:
    """What a client needs to reach a service, sealed with the run's key."""
    return f"services/{name}.sealed"


def service(name: str) -> str:
    """A service's registration and heartbeat; with metrics of waits the only object that is rewritten."""
    return f"services/{name}.json"
