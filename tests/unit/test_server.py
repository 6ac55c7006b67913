"""How a run starts a Prefect server of its own."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from flows import server


def test_prefect_can_be_imported_while_its_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect fixes the address of its server when it is imported."""
    monkeypatch.setenv("PREFECT_API_URL", "")  # put back afterwards
    happened: list[str] = []
    supervisor = SimpleNamespace(add=lambda *_: SimpleNamespace(log=happened.append("started")))
    monkeypatch.setattr(server, "_wait_until_healthy", lambda *_: happened.append("answers"))
    url = server.start_server(supervisor, lambda: happened.append(os.environ["PREFECT_API_URL"]))  # type: ignore[arg-type]
    assert happened == ["started", url, "answers"]
