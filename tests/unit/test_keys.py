"""One secret for all pools gives each run its own key; what is sealed with a key opens with that key alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.errors import UserError
from tasks.keys import API_KEY, SECRET, fingerprint, run_key, seal, unseal
from tasks.services import work_folder
from tasks.store import Store


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path / "home"))


def test_a_run_on_one_machine_keeps_a_key_that_only_its_user_can_read(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "a"))
    assert run_key(store) == run_key(store) != run_key(Store(str(tmp_path / "b")))
    assert stat.S_IMODE((work_folder(store) / "engine.key").stat().st_mode) == 0o600


def test_processes_with_the_same_secret_derive_the_same_key_and_another_one_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Store(str(tmp_path / "a")), Store(str(tmp_path / "b"))
    monkeypatch.setenv(SECRET, "secret")
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path / "one"))
    key = run_key(a)
    monkeypatch.setenv("ROLLART_HOME", str(tmp_path / "other"))
    assert run_key(a) == key != run_key(b)
    assert "secret" not in key
    monkeypatch.setenv(SECRET, "another")
    assert run_key(a) != key


def test_a_key_that_the_parent_gave_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "secret")
    monkeypatch.setenv(API_KEY, "given")
    assert run_key(Store(str(tmp_path))) == "given"


@given(st.text(min_size=1), st.text(min_size=1), st.dictionaries(st.text(), st.integers()))
def test_what_is_sealed_opens_with_the_same_key_alone(key: str, other: str, value: dict[str, int]) -> None:
    sealed = seal(key, value)
    assert unseal(key, sealed) == value
    if other != key:
        assert fingerprint(other) != fingerprint(key)
        with pytest.raises(UserError, match="ROLLART_KEY"):
            unseal(other, sealed)


def test_a_fingerprint_does_not_hold_the_key() -> None:
    assert len(fingerprint("key")) == 8
    assert fingerprint("key") not in "key"
