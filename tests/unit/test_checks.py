"""Preflight checks and the rules of resuming, on values; the command line has its own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import checks
from tasks.config import RunConfig, parse_config
from tasks.environments import environment_class
from tasks.errors import UserError
from tasks.store import Store
from tasks.training.policy import tiny_policy, vocabulary


def config(*overrides: str) -> RunConfig:
    return parse_config({"tasks": [{"name": "frozenlake"}]}, ["name=run-1", *overrides])


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["trainer.tokens_per_micro_batch=64"], "trainer.tokens_per_micro_batch"),
        (["trainer.minibatches=1000"], "trainer.minibatches"),
        (["trainer.ranks=3"], "trainer.ranks"),
    ],
)
def test_batches_that_do_not_fit_are_refused(overrides: list[str], setting: str) -> None:
    with pytest.raises(UserError) as caught:
        checks.check_batches(config(*overrides))
    assert caught.value.setting == setting


def test_a_reward_that_does_not_exist_is_named_with_its_place() -> None:
    with pytest.raises(UserError, match=r"tasks\.0\.reward.*sucess"):
        checks.check_tasks(config("tasks.0.reward=sucess"))


def test_a_task_option_that_no_environment_takes_is_named_with_its_place() -> None:
    with pytest.raises(UserError) as caught:
        checks.check_tasks(config("tasks.0.options.sise=5"))
    assert caught.value.setting == "tasks.0.options.sise"


@pytest.mark.parametrize("uri", ["foo://host/db", "htp://127.0.0.1:5000"])
def test_an_address_that_is_none_of_mlflow_is_refused(uri: str) -> None:
    with pytest.raises(UserError, match="sqlite://") as caught:
        checks.check_tracking(config(f'tracking.mlflow_uri="{uri}"'))
    assert caught.value.setting == "tracking.mlflow_uri"


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:5000", "sqlite:///x.db", "postgresql+psycopg2://h/db", "./mlruns", "databricks"]
)
def test_an_address_of_mlflow_passes(uri: str) -> None:
    checks.check_tracking(config(f'tracking.mlflow_uri="{uri}"'))


def test_a_kv_cache_without_room_for_one_trajectory_is_refused_with_a_size_that_passes() -> None:
    with pytest.raises(UserError) as caught:
        checks.check_cache(config("inference.kv_cache_gib=0.0001"))
    assert caught.value.setting == "inference.kv_cache_gib"
    size = caught.value.fix.split("set it to ")[1].split(",")[0]
    checks.check_cache(config(f"inference.kv_cache_gib={size}"))


def test_engines_whose_caches_exceed_the_memory_are_refused_here_and_not_for_pools() -> None:
    big = ["inference.engines=8", "inference.kv_cache_gib=100000.0"]
    with pytest.raises(UserError, match="GiB is more than this machine's"):
        checks.check_cache(config(*big))
    checks.check_cache(config("placement=pools", "inference.kv_cache_gib=100000.0"))


def test_an_environment_that_fails_at_its_first_reset_is_a_user_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment_class("frozenlake"), "reset", lambda self, seed: 1 / 0)
    renderer = checks._renderer(config())
    assert renderer is not None
    with pytest.raises(UserError, match="ZeroDivisionError"):
        checks.first_prompt_tokens(config(), config().tasks[0], renderer)


@pytest.mark.parametrize(
    ("model", "kind"),
    [("tiny", "tiny"), ("./x", "folder"), ("~/x", "folder"), ("/x", "folder"), ("Qwen/Qwen3-8B", "hub")],
)
def test_where_a_model_comes_from_is_read_from_its_name(model: str, kind: str) -> None:
    assert checks.policy_kind(config(f'policy.model="{model}"')) == kind


def test_a_word_that_is_no_model_is_refused() -> None:
    with pytest.raises(UserError, match="neither 'tiny'"):
        checks.policy_kind(config("policy.model=tinny"))


def test_the_prompt_must_be_shorter_than_the_context_and_the_message_gives_its_length() -> None:
    fits = config("policy.context_limit=64")
    renderer = checks._renderer(fits)
    assert renderer is not None
    tokens = checks.first_prompt_tokens(fits, fits.tasks[0], renderer)
    checks.check_prompt(config(f"policy.context_limit={tokens + 1}"))
    with pytest.raises(UserError, match=f"has {tokens} tokens"):
        checks.check_prompt(config(f"policy.context_limit={tokens}"))


def test_the_size_of_the_tiny_policy_is_that_of_its_architecture() -> None:
    """Against a count by hand: hidden 64, 2 heads of 32, 1 KV head, 16 in the MLP, 1 layer."""
    sizes = ["hidden_size=64", "heads=2", "kv_heads=1", "layers=1", "intermediate_size=16"]
    small = config(*(f"policy.{size}" for size in sizes))
    q, k, v, o = 64 * 64, 64 * 32, 64 * 32, 64 * 64
    mlp, norms = 3 * 64 * 16, 2 * 64 + 2 * 32
    embeddings = 2 * len(vocabulary(["frozenlake"])) * 64
    expected = q + k + v + o + mlp + norms + embeddings + 64
    assert checks.policy_size(small) == checks.Size(expected, 4 * expected, 12 * expected)


def test_the_disk_must_hold_the_next_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path))
    root = Store(str(tmp_path / "runs"))
    checks.check_disk(config(), checks.Size(1, 1000, 1000), root)
    with pytest.raises(UserError, match="free"):
        checks.check_disk(config(), checks.Size(1, 10**18, 10**18), root)


# resuming


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "run-1"))
    for version in range(4):
        store.put(f"weights/{version}", {"config.json": b"{}"}, version=version)
    return store


@pytest.mark.parametrize(
    "change",
    [
        "iterations=50",
        "trainer.step_deadline_s=60.0",
        "trainer.restarts=9",
        "trainer.threads=1",
        "trainer.checkpoint_every=2",
        "inference.engines=2",
        "inference.restarts=0",
        "environments.workers=2",
        "environments.scheduler=tcp://10.0.0.1:8786",
        "evaluation.every=1",
        "tracking.mlflow_uri=http://mlflow",
        "store.root=/elsewhere",
    ],
)
def test_resuming_may_change_how_and_where_a_run_works(store: Store, change: str) -> None:
    changed = checks.resumed_config(store, config(), [change])
    assert changed == config(change) != config()


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ("seed=7", "seed"),
        ("name=run-2", "name"),
        ("rollout.group_size=4", "rollout.group_size"),
        ("rollout.max_staleness=2", "rollout.max_staleness"),
        ("trainer.learning_rate=1e-5", "trainer.learning_rate"),
        ("trainer.zero_stage=2", "trainer.zero_stage"),
        ("trainer.ranks=2", "trainer.ranks"),
        ("trainer.minibatches=4", "trainer.minibatches"),
        ("loss.advantage=rloo", "loss.advantage"),
        ("policy.hidden_size=256", "policy.hidden_size"),
        ("tasks.0.name=arithmetic", "tasks.0.name"),
        ("tasks.0.options.size=5", "tasks.0.options.size"),
        ("evaluation.episodes=9", "evaluation.episodes"),
        ("warm_start.noise=0.5", "warm_start.noise"),
        ("iterations=2", "iterations"),
    ],
)
def test_resuming_may_not_change_what_a_run_computes(store: Store, change: str, setting: str) -> None:
    with pytest.raises(UserError) as caught:
        checks.resumed_config(store, config(), [change])
    assert caught.value.setting == setting


def test_a_begun_cosine_schedule_keeps_its_length(store: Store) -> None:
    with pytest.raises(UserError, match="cosine"):
        checks.resumed_config(store, config("trainer.schedule=cosine"), ["iterations=50"])


def test_a_finished_run_is_resumed_only_to_more_iterations(store: Store) -> None:
    store.write_json("evaluations/3.json", {})
    with pytest.raises(UserError, match="is finished: 3 iterations"):
        checks.resumed_config(store, config("iterations=3"), [])
    assert checks.resumed_config(store, config("iterations=3"), ["iterations=4"]).iterations == 4


def test_a_run_whose_last_evaluation_is_missing_is_not_finished(store: Store) -> None:
    assert checks.resumed_config(store, config("iterations=3"), []).iterations == 3


def test_versions_are_named_by_ranges(store: Store) -> None:
    store.put("weights/7", {"config.json": b"{}"}, version=7)
    assert checks.existing_version(store, None) == 7
    assert checks.existing_version(store, 2) == 2
    with pytest.raises(UserError, match=r"0 to 3, 7"):
        checks.existing_version(store, 5)


def test_weights_without_a_manifest_do_not_count(store: Store) -> None:
    store.write("weights/9/config.json", b"{}")
    assert checks.existing_version(store, None) == 3


def test_the_policy_folder_of_the_tiny_policy_passes_as_a_model_but_for_its_weights(tmp_path: Path) -> None:
    for name, data in tiny_policy(config().policy, vocabulary(["frozenlake"])).items():
        assert isinstance(data, bytes)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match="safetensors"):
        checks.check_model(config(f"policy.model={tmp_path}"))
