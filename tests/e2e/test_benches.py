"""The benchmarks that start services run to their end and measure every schedule."""

from __future__ import annotations

import json

import pytest

from tests.e2e.machine import Machine

pytestmark = pytest.mark.slow


def test_bench_async_measures_every_schedule_on_the_same_services(machine: Machine) -> None:
    done = machine.run(
        "bench", "async", "--preset", "mild", "--repeats", "1", "--iterations", "1", "--json", "async.json",
        "--set", "warm_start.enabled=false",
    )  # fmt: skip
    assert done.code == 0, done.err
    figures = json.loads((machine.home / "async.json").read_text())["mild"]
    assert set(figures["schedules"]) == {"monolithic", "synchronous", "one-off", "rollart"}
    assert all(found["trained_tokens"] > 0 for found in figures["schedules"].values())
    staleness = {name: found["staleness"] for name, found in figures["schedules"].items()}
    assert staleness["monolithic"] == staleness["synchronous"] == 0 < staleness["rollart"] <= 2
    assert list((machine.home / "runs").glob("bench-async-*/plots/async.png"))
    assert done.left == []


def test_bench_dispatch_measures_both_processes(machine: Machine) -> None:
    done = machine.run("bench", "dispatch", "--episodes", "20", "--episodes", "60", "--repeats", "1")
    assert done.code == 0, done.err
    (store,) = (machine.home / "runs").glob("bench-dispatch-*")
    bursts = json.loads((store / "bench/dispatch.json").read_text())["bursts"]
    assert [burst["episodes"] for burst in bursts] == [20, 60]
    assert all(burst["controller_ms"] > 0 and burst["scheduler_ms"] > 0 for burst in bursts)
    assert all(burst["failed"] == 0 for burst in bursts)
