"""The configuration of a run: TOML into strict models, every key with a default, a meaning and a bound.

Credentials have no key here on purpose: the resolved configuration is written to the store and to MLflow.
S3 credentials come from the environment (AWS_ACCESS_KEY_ID, ...) or from ~/.aws.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hardware.pools import Pool, local_pools, pool_for, pool_set
from tasks.errors import UserError
from tasks.store import Store, layout

Restarts = Annotated[
    int,
    Field(
        ge=0,
        description="after a death, with back-off, before the run fails; an hour of life starts the count again",
    ),
]


class Section(BaseModel):
    """A table of the configuration: unknown keys and wrong types are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StoreConfig(Section):
    """Where everything a run makes is kept."""

    root: str = Field("runs", min_length=1, description="local folder or s3://bucket/prefix")
    endpoint_url: str | None = Field(None, description="S3 endpoint; default: AWS_ENDPOINT_URL or AWS itself")


class PolicyConfig(Section):
    """The model that is trained."""

    model: str = Field(
        "tiny", description="'tiny' (made by the project), a Hugging Face folder, or a hub name"
    )
    context_limit: int = Field(256, ge=8, description="longest trajectory, tokens")
    hidden_size: int = Field(128, ge=16, description="of the tiny policy")
    layers: int = Field(4, ge=1, description="of the tiny policy")
    heads: int = Field(4, ge=1, description="of the tiny policy; must divide hidden_size")
    kv_heads: int = Field(2, ge=1, description="of the tiny policy; must divide heads")
    intermediate_size: int = Field(384, ge=16, description="of the tiny policy")


class TaskConfig(Section):
    """One task domain; `options` go to its environment's constructor."""

    name: str
    weight: float = Field(
        1.0, gt=0, description="share of groups drawn from this task, relative to the others"
    )
    max_action_tokens: int | None = Field(None, ge=1, description="default: what the environment says")
    reward: str = Field(
        "env_return", description="a registered reward, or your own as 'package.module:function'"
    )
    options: dict[str, Any] = {}


class RolloutConfig(Section):
    """How trajectories are made."""

    groups: int = Field(32, ge=1, description="groups a batch consumes")
    group_size: int = Field(8, ge=1, description="trajectories a group")
    max_staleness: int = Field(0, ge=0, description="alpha; 0 is on-policy")
    redundancy: int = Field(
        0, ge=0, description="spare groups a wave; the slowest are cancelled, not waited for"
    )
    spare_episodes: int = Field(
        0, ge=0, description="spare episodes a group; the slowest are cancelled, not waited for"
    )
    barrier: Literal["none", "wave", "turn"] = Field(
        "none",
        description="what an episode waits for: nothing; the wave before its own; or, at every turn, all others of its"
        " wave. The last two are what `rollart bench async` compares with",
    )
    temperature: float = Field(1.0, gt=0, description="sampling temperature of training episodes")
    wave_deadline_s: float = Field(1800, ge=1, description="longest wait for a batch's groups")


class EnvironmentsConfig(Section):
    """Where environments run, and how long they may take."""

    scheduler: str | None = Field(
        None, description="Dask scheduler address; default: a local cluster is started"
    )
    workers: int = Field(1, ge=1, description="Dask worker processes of the local cluster")
    slots: int = Field(64, ge=1, description="environments a worker holds at once (Dask resource 'env')")
    reset_deadline_s: float = Field(10.0, gt=0)
    step_deadline_s: float = Field(10.0, gt=0)
    retries: int = Field(2, ge=0, description="times a failed episode is run again")
    latency: dict[str, float] = Field({}, description="seeded latency wrapper, for tests and benchmarks")
    faults: dict[str, float] = Field({}, description="seeded faults wrapper, for tests and benchmarks")


class InferenceConfig(Section):
    """The vLLM engines."""

    engines: int = Field(1, ge=1, le=64)
    port: int = Field(0, ge=0, le=65535, description="first engine's port; 0 takes a free one")
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_concurrent: int = Field(64, ge=1, description="sequences an engine runs at once (vLLM max_num_seqs)")
    kv_cache_gib: float = Field(0.5, gt=0, description="on CPU: memory for the KV cache, GiB")
    threads: int = Field(1, ge=1, description="on CPU: OpenMP threads of one engine")
    update: Literal["keep", "abort"] = Field(
        "keep",
        description="requests in flight at an update of the weights: keep waits and goes on in the engine; abort gives"
        " back what they have, and the client continues them",
    )
    parity_tolerance: float = Field(1e-3, gt=0, description="largest |log-prob| difference to the trainer")
    start_deadline_s: float = Field(300.0, gt=0)
    request_deadline_s: float = Field(
        120.0,
        ge=10,
        description="longest wait for the tokens of one turn; an engine that makes no token for half of it is started again",
    )
    restarts: Restarts = 3
    extra_args: list[str] = Field([], description="passed to the vLLM server as they are")


class TrainerConfig(Section):
    """The DeepSpeed trainer."""

    ranks: int = Field(1, ge=1, description="data-parallel ranks")
    threads: int = Field(2, ge=1, description="on CPU: threads of all ranks together")
    zero_stage: Literal[0, 1, 2, 3] = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    gradient_checkpointing: bool = False
    tokens_per_micro_batch: int = Field(16384, ge=1, description="padded tokens of one forward pass, a rank")
    minibatches: int = Field(2, ge=1, description="optimiser steps an epoch")
    epochs: int = Field(1, ge=1, description="passes over a batch")
    learning_rate: float = Field(3e-4, gt=0, lt=1)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(5, ge=0, description="optimiser steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    checkpoint_every: int = Field(5, ge=1, description="iterations")
    checkpoints_kept: int = Field(2, ge=1)
    start_deadline_s: float = Field(300.0, gt=0)
    step_deadline_s: float = Field(1800.0, gt=0, description="longest wait for one iteration's weights")
    restarts: Restarts = 3


Correction = Literal["none", "truncated", "decoupled", "icepop", "dppo", "gspo"]


class LossConfig(Section):
    """The policy-gradient objective."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    normalisation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    correction: Literal["auto", Correction] = Field(
        "auto", description="off-policy correction; auto: none at max_staleness 0, decoupled from 1 on"
    )
    truncation_cap: float = Field(2.0, gt=0, description="truncated, decoupled: cap of the importance weight")
    icepop_low: float = Field(0.5, gt=0, le=1, description="icepop: tokens below this weight are dropped")
    icepop_high: float = Field(5.0, ge=1, description="icepop: tokens above this weight are dropped")
    dppo_bound: float = Field(
        0.2, gt=0, le=1, description="dppo: probability a token may move before it is dropped"
    )
    gspo_clip_low: float = Field(3e-4, gt=0, lt=1, description="gspo: clip of the sequence ratio, below 1")
    gspo_clip_high: float = Field(4e-4, gt=0, description="gspo: clip of the sequence ratio, above 1")
    kl_coefficient: float = Field(0.0, ge=0, description="weight of the KL to the initial policy (version 0)")
    entropy_coefficient: float = Field(0.0, ge=0)


class EvaluationConfig(Section):
    """Evaluation on fixed held-out seeds."""

    every: int = Field(5, ge=1, description="iterations")
    episodes: int = Field(256, ge=1, description="per task")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")


class WarmStartConfig(Section):
    """Supervised fine-tuning on a noisy expert, so that RL starts from a mediocre but valid policy."""

    enabled: bool = True
    steps: int = Field(110, ge=1, description="optimiser steps of the first round")
    round_steps: int = Field(30, ge=1, description="optimiser steps of each further round below the gate")
    max_rounds: int = Field(6, ge=1, description="rounds before the warm start fails")
    restart_after: int = Field(
        3, ge=1, description="rounds below the gate after which it starts over, reseeded"
    )
    batch_size: int = Field(64, ge=1, description="demonstrations an optimiser step")
    learning_rate: float = Field(1e-3, gt=0, lt=1)
    noise: float = Field(0.3, ge=0, le=1, description="share of the expert's moves replaced by random ones")
    gate_success: float = Field(0.15, ge=0, le=1, description="least sampled success, per task, to pass")
    gate_greedy: float = Field(0.35, ge=0, le=1, description="least greedy success, per task, to pass")
    gate_episodes: int = Field(256, ge=1, description="episodes of each gate evaluation, per task")


class TrackingConfig(Section):
    """MLflow."""

    mlflow_uri: str | None = Field(
        None, description="default: MLFLOW_TRACKING_URI, else SQLite in ROLLART_HOME"
    )
    experiment: str = "rollart"
    flush_deadline_s: float = Field(60.0, ge=0, description="longest wait for MLflow at the end of a run")


class RunConfig(Section):
    """One training run."""

    name: str | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="default: made from the config's file name and the time",
    )
    seed: int = Field(0, ge=0, lt=2**32)
    iterations: int = Field(25, ge=1)
    placement: Literal["local", "pools"] = Field(
        "local",
        description="where services run: child processes of the run, or flows on the pools' work pools",
    )
    work_queue: str = Field(
        "default", description="on pools: the work queue, on each of them, of the run's services"
    )
    reward_url: str | None = Field(
        None,
        pattern=r"^https?://",
        description="on pools: a reward function that a serverless platform runs; default: one is started on its pool",
    )
    services_grace_s: float = Field(
        300.0, ge=10, description="on pools: how long services outlive a run that is paused, failed or gone"
    )
    store: StoreConfig = StoreConfig()
    policy: PolicyConfig = PolicyConfig()
    tasks: list[TaskConfig] = Field([TaskConfig(name="frozenlake")], min_length=1)
    rollout: RolloutConfig = RolloutConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    inference: InferenceConfig = InferenceConfig()
    trainer: TrainerConfig = TrainerConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    tracking: TrackingConfig = TrackingConfig()
    pools: list[Pool] = Field(
        default_factory=local_pools, description="[[pools]] tables, or the name of a set in hardware/sets"
    )

    @field_validator("pools", mode="before")
    @classmethod
    def _named_set(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return pool_set(value)
        except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
            raise ValueError(
                f"pools|{value!r} is no set of pools ({error})|use local or production"
            ) from None

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.rollout.group_size == 1:
            raise ValueError(
                f"rollout.group_size|is 1, but loss.advantage = {self.loss.advantage!r} compares the members of"
                " a group|set it to 2 or more"
            )
        if self.policy.hidden_size % self.policy.heads or self.policy.heads % self.policy.kv_heads:
            raise ValueError(
                "policy.heads|must divide policy.hidden_size, and policy.kv_heads must divide it|"
                "for example hidden_size = 128, heads = 4, kv_heads = 2"
            )
        if self.policy.model == "tiny" and (self.policy.hidden_size // self.policy.heads) % 32:
            raise ValueError(
                f"policy.hidden_size|divided by heads is {self.policy.hidden_size // self.policy.heads}, a head size"
                " that the engine's attention cannot run|choose hidden_size as heads times 32, 64 or 128"
            )
        if self.rollout.barrier == "turn":
            self._check_lock_step()
        if self.placement == "pools":
            self._check_slots()
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("tasks|names a task twice|give each task one [[tasks]] table and set its weight")
        missing = {"rollout", "train", "environment", "reward"} - {pool.role for pool in self.pools}
        if missing:
            raise ValueError(
                f"pools|no pool has the role {', '.join(sorted(missing))}|add a [[pools]] table for it, or leave"
                " pools out to take the local set"
            )
        return self

    def _check_slots(self) -> None:
        """The pool of the engines has room for all of them at once."""
        pool = pool_for("engine", self.pools)
        if self.inference.engines > pool.slots:
            raise ValueError(
                f"inference.engines|is {self.inference.engines}, but pool {pool.name} has {pool.slots} slots|lower it,"
                " or raise slots of the pool"
            )

    def _check_lock_step(self) -> None:
        """Episodes in lock step run in one worker process, the whole wave at once."""
        episodes, environments = self.rollout.groups * self.rollout.group_size, self.environments
        if environments.workers > 1 or environments.slots < episodes:
            raise ValueError(
                "rollout.barrier|is 'turn', for which one worker must hold a whole wave|set environments.workers = 1"
                f" and environments.slots = {episodes} or more"
            )
        if self.rollout.redundancy or self.rollout.spare_episodes:
            raise ValueError(
                "rollout.barrier|is 'turn', in which nothing is spare|set rollout.redundancy and"
                " rollout.spare_episodes to 0"
            )

    @property
    def correction(self) -> Correction:
        """The off-policy correction in force: `auto` resolved from `max_staleness`."""
        if self.loss.correction == "auto":
            return "none" if self.rollout.max_staleness == 0 else "decoupled"
        return self.loss.correction

    def task(self, name: str) -> TaskConfig:
        """The settings of a task of this run, by name. Raises KeyError."""
        return {task.name: task for task in self.tasks}[name]

    def to_toml(self) -> str:
        """The resolved configuration; `load_config` reads it back to an equal value."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML file, apply `section.key=value` overrides, validate.

    Raises UserError that names the key, what is wrong, and the fix.
    """
    try:
        data = tomllib.loads(Path(path).read_text())
    except UnicodeDecodeError:
        raise UserError(str(path), "is not UTF-8 text", "save it as UTF-8") from None
    except OSError as error:
        raise UserError(
            str(path), f"cannot be read ({error.strerror})", "give the path of a TOML file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(str(path), f"is not valid TOML: {error}", "correct the file") from None
    return parse_config(data, overrides)


def stored_config(store: Store) -> RunConfig:
    """The configuration of the run at `store`. Raises FileNotFoundError without one."""
    return parse_config(tomllib.loads(store.read(layout.CONFIG).decode()))


def parse_config(data: dict[str, Any], overrides: list[str] | None = None) -> RunConfig:
    """Validate a configuration that is already a dict; see `load_config`."""
    for override in overrides or []:
        _apply_override(data, override)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        found = error.errors()
        # A misspelt key also shows as a missing one; the misspelling is what to tell.
        raise _explain(next((e for e in found if e["type"] == "extra_forbidden"), found[0])) from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise UserError(
            "--set", f"{override!r} is not key=value", "for example --set trainer.learning_rate=1e-4"
        )
    node: Any = data
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        node = _list_item(node, parent, key) if isinstance(node, list) else node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise UserError(
                f"--set {key}", f"{parent!r} is a value, not a table", "name a key inside a table"
            )
    if isinstance(node, list):
        raise UserError(
            f"--set {key}", "names a list item", "name a key of the item, e.g. tasks.0.weight=2.0"
        )
    node[leaf] = _toml_value(value)


def _list_item(items: list[Any], index: str, key: str) -> Any:
    if not index.isdigit() or int(index) >= len(items):
        raise UserError(f"--set {key}", f"{index!r} is not an item", f"use 0 to {len(items) - 1}")
    return items[int(index)]


def _toml_value(text: str) -> Any:
    """A TOML value, or the bare text as a string, so that `name=demo` needs no inner quotes."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: Any) -> UserError:
    """One pydantic error as a message that names the setting and the fix."""
    setting = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        if message.count("|") == 2:
            return UserError(*message.split("|"))
        return UserError(setting, message, "correct it")
    if error["type"] == "extra_forbidden":
        known = _keys_at(error["loc"][:-1])
        nearest = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(sorted(known))}"
        return UserError(setting, "is not a setting", hint)
    if error["type"] == "literal_error":
        given = error["input"]
        nearest = difflib.get_close_matches(
            str(given), error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "), n=1
        )
        did = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        return UserError(setting, f"{given!r} is unknown", f"use {error['ctx']['expected']}{did}")
    shown = json.dumps(error["input"], default=str)[:60]
    if (wanted := _WANTED.get(error["type"])) is not None:
        return UserError(setting, f"is {shown}, which is not {wanted}", f"give {wanted}")
    if (bound := _BOUNDS.get(error["type"])) is not None:
        return UserError(
            setting, f"is {shown}, which is out of range", f"set it to {bound.format(**error['ctx'])}"
        )
    if error["type"] == "missing":
        return UserError(setting, "is missing", "add it")
    return UserError(
        setting, f"{error['msg'][0].lower()}{error['msg'][1:]}, but it is {shown}", "correct the value"
    )


# What pydantic's kinds of error mean in the words of a configuration file.
_WANTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "string_pattern_mismatch": "a name of lower-case letters, digits, '.', '_' and '-'",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "a list of {min_length} or more",
    "string_too_short": "a text that is not empty",
}


def _keys_at(location: tuple[Any, ...]) -> list[str]:
    """The keys of the table at `location` of RunConfig."""
    model: Any = RunConfig
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        model = get_args(annotation)[0] if get_origin(annotation) is list else annotation
    return list(model.model_fields)
