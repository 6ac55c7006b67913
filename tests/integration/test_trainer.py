"""The trainer service on a local store: one process family, real DeepSpeed, tiny shapes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load as load_safetensors
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.services import free_port, registered
from tests.integration import trainer_service as t


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A warm start of two rounds, version 0 by copy, three iterations; then the service is stopped."""
    folder = tmp_path_factory.mktemp("trainer")
    log = folder / "log"
    store = t.new_run(folder / "run", t.settings())
    with t.service(store, log) as process:
        t.put_supervised(store, -2)
        t.wait(store, -1, log)
        store.copy("weights/-1", "weights/0", version=0)
        for k in (0, 1, 2):
            t.put_policy_gradient(store, k)
        t.wait(store, 3, log)
        t.eventually(lambda: registered(store, "trainer").version == 3, "version 3 in the registration")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        ready = registered(store, "trainer")
    return store, log, family, ready, process.returncode


def test_supervised_rounds_lower_the_loss(run):
    store, *_ = run
    metrics = store.read_json("metrics/-2.json")
    vocabulary = store.read_json("policy/config.json")["vocab_size"]
    assert metrics["train/loss"] < np.log(vocabulary)  # of the untrained policy, near enough
    assert metrics["train/token_accuracy"] > 0.1


def test_an_iteration_publishes_weights_and_every_metric(run):
    store, *_ = run
    assert set(store.numbers("weights")) == {-2, -1, 0, 1, 2, 3}
    metrics = store.read_json("metrics/0.json")
    names = (
        "loss grad_norm kl entropy clip_fraction logprob_mismatch_max padding_fraction ratio_mean ratio_max tokens"
        " masked_fraction weight_mean weight_std weight_max"
        " tokens_per_s learning_rate groups_without_variance sequences"
    )
    assert {f"train/{name}" for name in names.split()} | {"time/train", "time/publish"} <= set(metrics)
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["train/groups_without_variance"] == 2
    assert metrics["train/sequences"] == 24
    assert t.sha256(store, 1) != t.sha256(store, 0)


def test_the_probe_matches_a_fresh_load_of_the_published_folder(run, tmp_path):
    store, *_ = run
    manifest = store.fetch("weights/3", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    AutoTokenizer.from_pretrained(tmp_path)
    tokens = torch.tensor(manifest["probe"]["tokens"])
    with torch.no_grad():
        logp = torch.log_softmax(model(tokens).logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])[
            ..., 0
        ]
    assert (logp - torch.tensor(manifest["probe"]["logprobs"])).abs().max() < 1e-5


def test_a_policy_gradient_batch_begins_with_a_fresh_optimiser_and_schedule(run):
    store, *_ = run
    warmup, rate = t.SMALL["trainer"]["warmup_steps"], 3e-4
    assert store.read_json("metrics/0.json")["train/learning_rate"] == pytest.approx(rate * 2 / warmup)
    assert store.manifest("checkpoints/2")["steps"] == 4


def test_it_registers_as_ready_with_its_version_and_leaves_no_process_on_sigterm(run):
    store, _, family, ready, code = run
    assert (ready.status, ready.version, ready.kind) == ("ready", 3, "trainer")
    assert registered(store, "trainer").status == "stopped"
    assert code == 0
    assert store.manifest("checkpoints/3")["steps"] == 6  # not due, but written on the signal
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_killed_and_restarted_it_goes_on_bit_for_bit(run, tmp_path):
    whole, *_ = run
    log = tmp_path / "log"
    store = t.new_run(tmp_path / "run", t.settings())
    whole_zero = {name: whole.get("weights/0", name) for name in whole.manifest("weights/0")["files"]}
    facts = {name: whole.manifest("weights/0")[name] for name in ("version", "probe")}
    store.put("weights/0", whole_zero, **facts)
    process = t.start(store, log)
    family = [psutil.Process(process.pid)]
    try:
        for k in (0, 1, 2):
            t.put_policy_gradient(store, k)
            t.wait(store, k + 1, log)
        family += family[0].children(recursive=True)
    finally:
        for member in family:
            member.kill()
        process.wait()
    assert store.manifest("checkpoints/2") is not None  # version 3 has none: its batch is replayed
    published, metrics = store.manifest("weights/3"), store.read("metrics/2.json")
    store.delete("weights/3")
    with t.service(store, log):
        t.wait(store, 3, log)
    assert t.sha256(store, 3) == published["files"]["model.safetensors"]["sha256"] == t.sha256(whole, 3)
    assert store.read("metrics/2.json") == metrics


def test_it_fails_with_the_name_of_a_corrupt_batch(run, tmp_path):
    whole, *_ = run
    store = t.new_run(tmp_path / "run", t.settings())
    store.put(
        "weights/0", {n: whole.get("weights/0", n) for n in whole.manifest("weights/0")["files"]}, version=0
    )
    t.put_policy_gradient(store, 0)
    store.write("batches/0/batch.parquet", store.read("batches/0/batch.parquet")[:-10])
    process = t.start(store, tmp_path / "log")
    try:
        assert process.wait(t.WAIT_S) != 0
    finally:
        process.kill()
    said = registered(store, "trainer")
    assert said.status == "failed" and "batches/0/batch.parquet" in said.detail
    assert "CorruptObject" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_two_ranks_give_the_loss_and_weights_of_one(run, tmp_path, stage):
    whole, *_ = run
    store = t.new_run(tmp_path / "run", t.settings(trainer={"ranks": 2, "threads": 2, "zero_stage": stage}))
    store.put(
        "weights/0", {n: whole.get("weights/0", n) for n in whole.manifest("weights/0")["files"]}, version=0
    )
    with t.service(store, tmp_path / "log"):
        for k in (0, 1):
            t.put_policy_gradient(store, k)
        t.wait(store, 2, tmp_path / "log")
    assert_same(whole, store)


@pytest.mark.slow
def test_two_nodes_give_the_loss_and_weights_of_one(run, tmp_path):
    whole, *_ = run
    store = t.new_run(tmp_path / "run", t.settings(trainer={"ranks": 2, "threads": 2, "zero_stage": 2}))
    store.put(
        "weights/0", {n: whole.get("weights/0", n) for n in whole.manifest("weights/0")["files"]}, version=0
    )
    where = {"ROLLART_NNODES": "2", "ROLLART_RENDEZVOUS": f"127.0.0.1:{free_port()}"}
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    with (
        t.service(store, logs[1], ROLLART_NODE_RANK="1", **where),
        t.service(
            store, logs[0], ROLLART_NODE_RANK="0", **where
        ),  # told to end first: rank 0 tells the others
    ):
        for k in (0, 1):
            t.put_policy_gradient(store, k)
        t.wait(store, 2, logs[0])
    assert_same(whole, store)


def assert_same(whole, store):
    """Both runs have the same loss and weights after two batches, but for rounding."""
    for k in (0, 1):
        one, two = whole.read_json(f"metrics/{k}.json"), store.read_json(f"metrics/{k}.json")
        for name in ("loss", "grad_norm", "kl", "entropy"):
            assert two[f"train/{name}"] == pytest.approx(one[f"train/{name}"], abs=1e-4, rel=1e-4), name
    mine, theirs = (load_safetensors(s.get("weights/2", "model.safetensors")) for s in (store, whole))
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-4


def test_no_process_is_left_when_its_parent_is_killed(tmp_path):
    store = t.new_run(tmp_path / "run", t.settings())
    code = (
        "import sys, time; from pathlib import Path; from tasks.store import Store\n"
        "from tests.integration import trainer_service as t\n"
        f"print(t.start(Store({store.uri!r}), Path({str(tmp_path / 'log')!r})).pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ)
    assert parent.stdout is not None
    launcher = psutil.Process(int(parent.stdout.readline()))
    t.wait(store, -2, tmp_path / "log")
    family = [launcher, *launcher.children(recursive=True)]
    assert len(family) >= 3
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _gone, alive = psutil.wait_procs(family, timeout=20)
    for process in alive:
        process.kill()
    assert not alive, [json.dumps(p.as_dict(["pid", "cmdline"])) for p in alive]
