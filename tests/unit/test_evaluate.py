"""An evaluation of which no episode ended well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flows.evaluate import _summary
from tasks.config import parse_config
from tasks.errors import RunFailed
from tasks.trajectory import EpisodeFailure


def test_episodes_that_all_failed_end_the_run_with_their_reason() -> None:
    context: Any = SimpleNamespace(config=parse_config({}))
    failures: Any = [
        EpisodeFailure("frozenlake", 1, 0, 0, i, "step", "401 from the engine", 1) for i in range(3)
    ]
    with pytest.raises(RunFailed, match="all 3 held-out episodes of task frozenlake failed; the first: 401"):
        _summary(context, "frozenlake", failures)
