"""A run that a deployment is asked to train again: it goes on, with the settings that may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.new_run import open_run
from tasks.config import RunConfig, stored_config
from tasks.errors import UserError
from tasks.store import Store, layout


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "runs" / "run-1"))
    store.write(layout.CONFIG, RunConfig(name="run-1", iterations=4).to_toml().encode())
    return store


def test_a_prepared_run_is_opened_as_it_is(store: Store) -> None:
    before = store.read(layout.CONFIG)
    assert open_run(store.uri, None, ["iterations=4"], None).uri == store.uri
    assert store.read(layout.CONFIG) == before


def test_a_setting_that_may_change_is_changed(store: Store) -> None:
    open_run(store.uri, None, ["iterations=9", "trainer.restarts=7"], None)
    config = stored_config(store)
    assert (config.iterations, config.trainer.restarts) == (9, 7)


def test_a_setting_that_would_make_it_another_run_is_refused_and_nothing_is_written(store: Store) -> None:
    before = store.read(layout.CONFIG)
    with pytest.raises(UserError, match=r"trainer\.learning_rate.*another experiment"):
        open_run(store.uri, None, ["iterations=9", "trainer.learning_rate=0.1"], None)
    assert store.read(layout.CONFIG) == before


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run at"):
        open_run(str(tmp_path / "nothing"), None, [], None)
