"""What the controller makes of what its services register."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import provision
from tasks.errors import RunFailed
from tasks.keys import fingerprint, run_key
from tasks.services import Registration
from tasks.store import Store, layout


class Run:
    """A run on pools that has started one engine."""

    def __init__(self, folder: Path):
        self.store = Store(str(folder / "run"))
        services = {"engine-0": SimpleNamespace(started_at=time.time())}
        pools = SimpleNamespace(services=services)
        self.context: Any = SimpleNamespace(
            store=self.store, run=self.store.uri, services=pools, pools=pools, progress=SimpleNamespace()
        )

    def registers(self, **changes: Any) -> None:
        found = replace(Registration("engine-0", "engine", "gpu-bandwidth"), **changes)
        found = replace(found, heartbeat_at=changes.get("heartbeat_at", time.time()))
        self.store.write_json(layout.service("engine-0"), asdict(found))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("ROLLART_KEY", "the controller's")
    return Run(tmp_path)


def test_a_service_with_another_key_is_named_whenever_it_registers_it(run: Run) -> None:
    run.registers(status="starting", detail="has its place on pool gpu-bandwidth")  # its flow; no key yet
    assert provision._look_at_services(run.context).keys() == {"engine-0"}
    run.registers(status="ready", key=fingerprint(run_key(run.store)))
    assert provision._look_at_services(run.context).keys() == {"engine-0"}
    run.registers(status="ready", key="another")
    with pytest.raises(
        RunFailed, match="engine-0 on pool gpu-bandwidth was started with another ROLLART_KEY"
    ):
        provision._look_at_services(run.context)


@pytest.mark.parametrize("left", [{"heartbeat_at": 1.0e9}, {"status": "stopped"}])
def test_what_an_earlier_start_left_behind_is_nobodys_key(run: Run, left: dict[str, Any]) -> None:
    run.registers(**{"status": "ready", "key": "another", **left})
    assert provision._look_at_services(run.context).keys() == {"engine-0"}
