"""A machine keeps a pool's promise, or the check names exactly what it lacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flows import worker
from hardware.machine import Gpu, Machine, missing, this_machine
from hardware.pools import Pool
from tasks.errors import UserError

H20 = Pool(name="p", role="rollout", accelerator="h20", count=8, memory_gib=1000, cores=96)
GOOD = Machine((Gpu("NVIDIA H20", 97871 / 1024),) * 8, 1007.5, 192)


def changed(**parts: object) -> Machine:
    return Machine(**{**GOOD.__dict__, **parts})  # type: ignore[arg-type]


def test_a_machine_that_has_what_the_pool_promises_lacks_nothing() -> None:
    assert missing(H20, GOOD) == []


def test_more_than_promised_is_enough() -> None:
    assert missing(H20, changed(gpus=GOOD.gpus * 2, cores=1000)) == []


@pytest.mark.parametrize(
    ("parts", "lack"),
    [
        ({"gpus": ()}, "8 x H20 with 96 GiB, but it has no GPU that nvidia-smi shows"),
        ({"gpus": GOOD.gpus[:7]}, "8 x H20 with 96 GiB, but it has 7 x NVIDIA H20 (96 GiB)"),
        (
            {"gpus": (Gpu("NVIDIA H200", 140.4),) * 8},
            "8 x H20 with 96 GiB, but it has 8 x NVIDIA H200 (140 GiB)",
        ),
        (
            {"gpus": (Gpu("NVIDIA H20", 48.0),) * 8},
            "8 x H20 with 96 GiB, but it has 8 x NVIDIA H20 (48 GiB)",
        ),
        ({"memory_gib": 949.0}, "1000 GiB of memory, but it has 949.0"),
        ({"cores": 95}, "96 cores, but it has 95"),
    ],
)
def test_what_a_machine_lacks_is_named(parts: dict[str, object], lack: str) -> None:
    assert missing(H20, changed(**parts)) == [lack]


def test_a_machine_without_anything_is_told_all_of_it() -> None:
    assert len(missing(H20, Machine((), 4.0, 2))) == 3


def test_the_memory_that_firmware_keeps_is_not_missing() -> None:
    assert missing(H20, changed(memory_gib=985.0)) == []
    h800 = Pool(name="p", role="train", accelerator="h800", count=1)
    assert missing(h800, Machine((Gpu("NVIDIA H800", 81559 / 1024),), 1, 1)) == []


def test_a_pool_without_a_promise_takes_any_machine() -> None:
    assert missing(Pool(name="p", role="environment"), Machine((), 0.5, 1)) == []


def test_this_machine_has_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, "NVIDIA H800, 81559 MiB\nNVIDIA H800, 81559 MiB\nNVIDIA GB10, [N/A]\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    machine = this_machine()
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA H800", "NVIDIA H800", "NVIDIA GB10"]
    assert [round(gpu.memory_gib, 1) for gpu in machine.gpus] == [79.6, 79.6, 0.0]
    assert machine.cores == len(os.sched_getaffinity(0))
    assert 0 < machine.memory_gib < 10_000
    assert str(machine).startswith("2 x NVIDIA H800, 1 x NVIDIA GB10, ")


def test_a_driver_that_fails_shows_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, "NVIDIA-SMI has failed, no driver\n", code=9)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert this_machine().gpus == ()


def fake_driver(folder: Path, output: str, code: int = 0) -> None:
    """An `nvidia-smi` that answers `output`."""
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\nexit {code}\n")
    script.chmod(0o755)


POD = Machine((GOOD.gpus[0],), 64.0, 16)  # the share of one job


def test_in_a_pod_only_the_kind_of_accelerator_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "this_machine", lambda: POD)
    in_a_pod = H20.model_copy(update={"type": "kubernetes"}).model_dump(mode="json")
    assert Path(worker.enter(in_a_pod)["directory"], "flows").is_dir()
    with pytest.raises(UserError, match="8 x H20"):
        worker.enter(H20.model_dump(mode="json"))
    monkeypatch.setattr(worker, "this_machine", lambda: changed(gpus=()))
    with pytest.raises(UserError, match="no GPU"):
        worker.enter(in_a_pod)
