"""The trainer's options, in this process: one gloo rank, real DeepSpeed, tiny shapes; oracles load the published
folders with transformers alone.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM

from tasks.config import RunConfig
from tasks.store import CorruptObject, Store, layout
from tasks.trajectory import Trajectory, encode
from tests.integration import trainer_service as t

ONE_STEP = {"minibatches": 1, "checkpoint_every": 100}  # an iteration is one optimiser step


@pytest.fixture(scope="module", autouse=True)
def rank() -> Iterator[None]:
    """This process as the only rank; what that changes in it is put back."""
    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in names.items():
            patch.setenv(name, str(value))
        if not torch.cuda.is_available() and "DS_ACCELERATOR" not in os.environ:
            patch.setenv("DS_ACCELERATOR", "cpu")
        threads = torch.get_num_threads()
        from tasks.training import model

        model.start_distributed(1)
        yield
        torch.distributed.destroy_process_group()
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def settings(**tables: dict[str, Any]) -> RunConfig:
    """The small run without a warm start, unless `tables` asks for one."""
    return t.settings(**{"warm_start": {"enabled": False}, **tables})


def started(store: Store, config: RunConfig, folder: Path):
    """A worker that holds the newest state of the run."""
    from tasks.training.worker import Worker

    worker = Worker(store, config, None, threading.Event())
    worker.start(folder)
    return worker


def trained(store: Store, config: RunConfig, folder: Path, version: int):
    """A worker that has trained to `version`, whose batches are in the store, and then been told to stop."""
    worker = started(store, config, folder)
    arrived = worker._enter_version

    def enter(entered: int) -> None:
        arrived(entered)
        if entered >= version:
            worker.stop.set()

    worker._enter_version = enter
    if worker.version < version:
        worker.run()
    return worker


def run(
    folder: Path, config: RunConfig, version: int, put: Callable[[Store, int], None] = t.put_policy_gradient
):
    """A new run trained to `version` on batches made by `put`."""
    store = t.new_run(folder, config)
    for k in range(version):
        put(store, k)
    return store, trained(store, config, folder / "work", version)


def weights(store: Store, version: int) -> dict[str, torch.Tensor]:
    return load_safetensors(store.get(layout.weights(version), "model.safetensors"))


def distance(store: Store, version: int, other: Store, other_version: int | None = None) -> float:
    """Largest difference between two versions' weights."""
    mine, theirs = (
        weights(store, version),
        weights(other, version if other_version is None else other_version),
    )
    assert mine.keys() == theirs.keys()
    return max(float((mine[name].float() - theirs[name].float()).abs().max()) for name in mine)


def metrics(store: Store, k: int) -> dict[str, float]:
    """The trainer's metrics of an iteration, all of them finite."""
    found = store.read_json(layout.trainer_metrics(k))
    assert all(np.isfinite(value) for value in found.values()), found
    return found


def behaviour(rows: list[Trajectory], spread: float) -> list[Trajectory]:
    """The same trajectories as a policy generated them that is far from the one in training."""
    random = np.random.default_rng(9)
    return [
        replace(row, logprobs=np.where(row.loss_mask, random.uniform(-4 - spread, -4 + spread, len(row.tokens)), 0))
        for row in rows
    ]  # fmt: skip


def put_off_policy(store: Store, k: int) -> None:
    rows = behaviour(t.trajectories(store, 8, 4, k, seed=100 + k), 2.0)
    facts = {
        "k": k,
        "objective": "policy_gradient",
        "groups": [f"0/{i}" for i in range(8)],
        "max_staleness": 2,
    }
    store.put(layout.batch(k), {"batch.parquet": encode(rows)}, **facts)


@torch.no_grad()
def oracle(store: Store, version: int, rows: list[Trajectory], folder: Path) -> list[np.ndarray]:
    """log p of each row's generated tokens under a version, by transformers, one row at a time."""
    store.fetch(layout.weights(version), folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        logp = torch.log_softmax(model(tokens[None]).logits[0, :-1].double(), -1)
        chosen = logp.gather(-1, tokens[1:, None])[:, 0].numpy()
        found.append(chosen[row.loss_mask[1:]])
    return found


def trained_rows(rows: list[Trajectory]) -> list[Trajectory]:
    """Those of groups with variance: in these batches the others have one reward throughout."""
    mixed = {row.group for row in rows if row.reward == 0.0}
    return [row for row in rows if row.group in mixed]


def advantages(rows: list[Trajectory]) -> np.ndarray:
    """Of each generated token: half of each group has reward 1, the rest 0, so +-1 up to GRPO's epsilon."""
    return np.concatenate([np.full(row.generated_tokens, 2 * float(row.reward or 0) - 1) for row in rows])


# the schedule


@pytest.mark.parametrize(("warmup", "total"), [(2, 12), (5, 30), (3, 4)])
def test_the_cosine_schedule_with_warm_up_is_that_of_torch(warmup, total):
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

    from tasks.training.trainer import learning_rate

    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    theirs = SequentialLR(
        optimiser,
        [LinearLR(optimiser, 1 / warmup, 1.0, warmup - 1), CosineAnnealingLR(optimiser, total - warmup)],
        [warmup],
    )
    for step in range(total):
        assert learning_rate(3e-4, step, warmup, "cosine", total) == pytest.approx(
            theirs.get_last_lr()[0], rel=1e-9
        )
        optimiser.step()
        theirs.step()
    assert (
        learning_rate(3e-4, total, warmup, "cosine", total)
        == learning_rate(3e-4, 99, warmup, "cosine", total)
        == 0
    )


def test_the_optimiser_steps_at_the_rate_of_the_cosine_schedule(tmp_path):
    config = settings(
        trainer={"schedule": "cosine", "warmup_steps": 2, "minibatches": 2}
    )  # 4 iterations: 8 steps
    store, worker = run(tmp_path, config, 3)
    rates = [metrics(store, k)["train/learning_rate"] for k in range(3)]
    cosine = [0.5 * (1 + np.cos(np.pi * progress)) for progress in (1 / 6, 3 / 6)]
    assert rates == pytest.approx([3e-4, 3e-4 * cosine[0], 3e-4 * cosine[1]], rel=1e-6)
    assert worker.trainer.policy.optimiser.param_groups[0]["lr"] == rates[-1]


# how it is computed


def test_gradient_checkpointing_recomputes_layers_and_changes_nothing(tmp_path):
    calls, stores = [], []
    for checkpointing in (False, True):
        config = settings(trainer={"gradient_checkpointing": checkpointing})
        store = t.new_run(tmp_path / str(checkpointing), config)
        worker = started(store, config, tmp_path / f"{checkpointing}-work")
        rows = t.trajectories(store, 8, 4, 0, seed=100)
        count: list[int] = []
        worker.trainer.policy.model.base_model.layers[0].self_attn.register_forward_hook(
            lambda *_, count=count: count.append(1)
        )
        found = worker.trainer.policy_gradient(rows, 0, lambda _: None)
        calls.append(len(count))
        worker._publish(1, found)
        stores.append(store)
    assert calls[1] == 2 * calls[0] > 0
    assert distance(stores[0], 1, stores[1]) < 1e-6
    for name in ("loss", "grad_norm", "kl", "entropy"):
        one, other = (metrics(store, 0)[f"train/{name}"] for store in stores)
        assert one == pytest.approx(other, abs=1e-6), name


def test_bf16_trains_like_fp32_on_fp32_masters_and_publishes_bf16(tmp_path):
    fine, _ = run(tmp_path / "fp32", settings(), 1)
    config = settings(trainer={"precision": "bf16", "checkpoint_every": 1})
    store, worker = run(tmp_path / "bf16", config, 1)
    assert {tensor.dtype for tensor in weights(store, 1).values()} == {torch.bfloat16}
    one, other = metrics(fine, 0), metrics(store, 0)
    assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=0.05)
    assert other["train/entropy"] == pytest.approx(one["train/entropy"], rel=0.01)
    assert distance(fine, 1, store) < 0.01
    masters = worker.trainer.policy.shard()
    master = masters["0.master"]
    assert master.dtype == torch.float32 and (master != master.bfloat16().float()).any()
    again = started(store, config, tmp_path / "again")
    restored = again.trainer.policy.shard()
    assert again.version == 1 and masters.keys() == restored.keys()
    assert all(torch.equal(masters[name], restored[name]) for name in masters)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_supervised_round_has_a_finite_gradient_norm_at_every_stage(tmp_path, stage):
    config = settings(trainer={"zero_stage": stage}, warm_start={"max_rounds": 1})
    store = t.new_run(tmp_path, config)
    t.put_supervised(store, -1, steps=2)
    trained(store, config, tmp_path / "work", 0)
    assert 0.1 < metrics(store, -1)["train/grad_norm"] < 100


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_that_is_not_finite_fails_the_iteration_and_publishes_nothing(tmp_path, stage):
    config = settings(trainer={"zero_stage": stage})
    store = t.new_run(tmp_path, config)
    worker = started(store, config, tmp_path / "work")
    rows = t.trajectories(store, 8, 4, 0, seed=100)
    impossible = [
        replace(row, logprobs=np.where(row.loss_mask, -200.0, 0.0)) for row in rows
    ]  # ratios overflow
    store.put(layout.batch(0), {"batch.parquet": encode(impossible)}, k=0, objective="policy_gradient")
    with pytest.raises(FloatingPointError, match="gradient"):
        worker._train(0)
    assert store.manifest(layout.weights(1)) is None and not store.exists(layout.trainer_metrics(0))


def test_a_metric_that_is_not_finite_is_left_out_and_named(capsys):
    from tasks.training.worker import finite

    assert finite({"train/kl": float("inf"), "train/loss": 1.0, "a": float("nan")}) == {"train/loss": 1.0}
    assert "a, train/kl" in capsys.readouterr().out


# the objective


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Two iterations of one optimiser step, with neither a KL term nor an entropy bonus."""
    return run(tmp_path_factory.mktemp("plain"), settings(trainer=ONE_STEP), 2)[0]


def test_the_kl_term_is_k3_to_version_0_and_enters_the_loss_by_its_coefficient(plain, tmp_path):
    store, _ = run(tmp_path / "run", settings(trainer=ONE_STEP, loss={"kl_coefficient": 0.5}), 2)
    assert "train/kl_reference" not in metrics(plain, 0)
    assert metrics(store, 0)["train/kl_reference"] == pytest.approx(0, abs=1e-9)
    assert distance(store, 1, plain) < 1e-6  # at version 0 k3 has no gradient either
    rows = trained_rows(t.trajectories(store, 8, 4, 1, seed=101))
    new, old = (np.concatenate(oracle(store, v, rows, tmp_path / str(v))) for v in (1, 0))
    k3 = np.exp(old - new) - (old - new) - 1
    assert metrics(store, 1)["train/kl_reference"] == pytest.approx(k3.mean(), rel=2e-3)
    change = metrics(store, 1)["train/loss"] - metrics(plain, 1)["train/loss"]
    assert change == pytest.approx(0.5 * k3.mean(), rel=2e-2, abs=1e-7)
    assert distance(store, 2, plain) > 1e-6


def test_the_entropy_bonus_is_taken_off_the_loss_and_raises_entropy(plain, tmp_path):
    store, _ = run(tmp_path, settings(trainer=ONE_STEP, loss={"entropy_coefficient": 1.0}), 2)
    one, other = metrics(plain, 0), metrics(store, 0)
    assert other["train/entropy"] == pytest.approx(one["train/entropy"], rel=1e-6)
    assert other["train/loss"] == pytest.approx(one["train/loss"] - other["train/entropy"], abs=1e-5)
    assert metrics(store, 1)["train/entropy"] > metrics(plain, 1)["train/entropy"]


def per_token_loss(correction, logp, generated, advantage, lengths):
    """Each correction's loss, and which tokens it bounds or drops, before any update: the policy is its own
    proximal policy."""
    ratio = np.exp(logp - generated)
    if correction == "truncated":
        return -np.minimum(ratio, 1.5) * advantage * logp, ratio > 1.5
    if correction == "decoupled":
        return -np.minimum(ratio, 1.5) * advantage, ratio > 1.5
    if correction == "icepop":
        out = (ratio < 0.8) | (ratio > 1.5)
        return -np.where(out, 0, ratio) * advantage, out
    if correction == "dppo":
        moved = np.exp(logp) - np.exp(generated)
        out = np.where(advantage > 0, moved > 0.005, moved < -0.005)
        return -np.where(out, 0, ratio) * advantage, out
    ends = np.cumsum(lengths)[:-1]  # gspo
    means = [np.exp(part.mean()) for part in np.split(logp - generated, ends)]
    whole = np.repeat(means, lengths)
    bounded = np.clip(whole, 1 - 0.01, 1 + 0.02) * advantage
    return -np.minimum(whole * advantage, bounded), bounded < whole * advantage


@pytest.mark.parametrize("correction", ["truncated", "decoupled", "icepop", "dppo", "gspo"])
def test_an_off_policy_correction_has_the_loss_of_its_formula(correction, tmp_path):
    bounds = {"icepop_low": 0.8, "icepop_high": 1.5, "dppo_bound": 0.005}
    clips = {"gspo_clip_low": 0.01, "gspo_clip_high": 0.02}
    config = settings(
        trainer=ONE_STEP, loss={"correction": correction, "truncation_cap": 1.5, **bounds, **clips}
    )
    store, _ = run(tmp_path / "run", config, 1, put_off_policy)
    rows = trained_rows(behaviour(t.trajectories(store, 8, 4, 0, seed=100), 2.0))
    logp = np.concatenate(oracle(store, 0, rows, tmp_path / "zero"))
    generated = np.concatenate([row.logprobs[row.loss_mask] for row in rows])
    lengths = [row.generated_tokens for row in rows]
    loss, masked = per_token_loss(correction, logp, generated, advantages(rows), lengths)
    found = metrics(store, 0)
    assert found["train/loss"] == pytest.approx(loss.mean(), rel=1e-3, abs=1e-4)
    assert found["train/masked_fraction"] == pytest.approx(masked.mean(), abs=1e-3)
    if correction != "gspo":  # whose weights are of whole sequences
        assert found["train/weight_mean"] == pytest.approx(np.exp(logp - generated).mean(), rel=1e-3)
        assert found["train/weight_std"] == pytest.approx(np.exp(logp - generated).std(), rel=1e-2)
    assert 0.05 < masked.mean() < 0.95  # else the bound was not put to the test


def test_decoupled_measures_the_mismatch_of_all_tokens_before_the_first_update(tmp_path):
    config = settings(loss={"correction": "decoupled"}, trainer={"minibatches": 3, "epochs": 2})
    store, _ = run(tmp_path / "run", config, 1, put_off_policy)
    rows = trained_rows(behaviour(t.trajectories(store, 8, 4, 0, seed=100), 2.0))
    logp = np.concatenate(oracle(store, 0, rows, tmp_path / "zero"))
    generated = np.concatenate([row.logprobs[row.loss_mask] for row in rows])
    found = metrics(store, 0)
    assert found["train/logprob_mismatch_max"] == pytest.approx(np.abs(logp - generated).max(), abs=1e-4)
    assert found["train/ratio_max"] > 1 and found["train/ratio_mean"] == pytest.approx(1, abs=0.05)


# where it starts


def test_a_round_with_a_restart_seed_equals_a_run_that_began_with_that_seed(tmp_path):
    first, second = (
        t.settings(warm_start={"max_rounds": 2}),
        t.settings(warm_start={"max_rounds": 2}).model_copy(update={"seed": 7}),
    )
    one, other = t.new_run(tmp_path / "one", first), t.new_run(tmp_path / "other", second)
    t.put_supervised(one, -2, steps=2)
    t.put_supervised(one, -1, steps=2, restart_seed=7)
    t.put_supervised(other, -2, steps=2)
    trained(one, first, tmp_path / "a", 0)
    trained(other, second, tmp_path / "b", -1)
    assert distance(one, -1, other) > 1e-3
    assert distance(one, 0, other, -1) == 0


def test_a_stop_while_it_waits_writes_a_checkpoint_that_a_restart_goes_on_from(tmp_path):
    config = settings(trainer={"checkpoint_every": 100})
    whole, _ = run(tmp_path / "whole", config, 2)
    store, _ = run(tmp_path / "run", config, 1)
    assert store.manifest(layout.checkpoint(1))["steps"] == 2
    t.put_policy_gradient(store, 1)
    worker = trained(store, config, tmp_path / "again", 2)
    assert worker.trainer.steps == 4
    assert distance(store, 2, whole) == 0


@pytest.fixture
def checkpointed(tmp_path):
    """A run at version 3 with the checkpoints of versions 2 and 3."""
    config = settings(trainer={"checkpoint_every": 1})
    store, _ = run(tmp_path / "run", config, 3)
    assert store.numbers("checkpoints") == [2, 3]
    return store, config


def spoil(store: Store, key: str) -> None:
    """Change one byte of an object; its manifest stays as it is."""
    data = bytearray(store.read(key))
    data[-1] ^= 1
    store.write(key, bytes(data))


def test_a_corrupt_checkpoint_is_skipped_for_the_next_older_one(checkpointed, tmp_path, capsys):
    store, config = checkpointed
    before = weights(store, 3)
    spoil(store, "checkpoints/3/rank-0/state.safetensors")
    capsys.readouterr()
    worker = started(store, config, tmp_path / "again")
    assert worker.version == 2 and worker.trainer.steps == 4
    said = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert len(said) == 1 and "checkpoints/3" in said[0] and "sha256" in said[0]
    worker._train(2)
    assert worker.version == 3 and store.manifest(layout.checkpoint(3))["steps"] == 6
    again = worker.trainer.policy.weights()
    assert all(torch.equal(again[name], before[name]) for name in before)
    assert started(store, config, tmp_path / "third").version == 3  # the checkpoint was written anew


def test_without_a_whole_checkpoint_it_starts_from_the_newest_whole_version(checkpointed, tmp_path, capsys):
    store, config = checkpointed
    spoil(store, "checkpoints/3/rank-0/state.safetensors")
    store.delete("checkpoints/2/rank-0")
    spoil(store, "weights/3/model.safetensors")
    worker = started(store, config, tmp_path / "again")
    assert worker.version == 2 and worker.trainer.steps == 4
    assert {name.split()[3] for name in capsys.readouterr().out.splitlines() if "skipped" in name} == {
        "checkpoints/3", "checkpoints/2", "weights/3",
    }  # fmt: skip
    mine, theirs = worker.trainer.policy.weights(), weights(store, 2)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_it_does_not_start_when_nothing_published_is_whole(tmp_path):
    config = settings()
    store, _ = run(tmp_path / "run", config, 0)
    spoil(store, "weights/0/model.safetensors")
    with pytest.raises(CorruptObject, match="no checkpoint and no version"):
        started(store, config, tmp_path / "again")
