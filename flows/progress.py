"""What a run is doing now, for the terminal view: plain values, written by the flows, read by one other thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """The live values of one run in this process. Every field is replaced, never mutated, so reads need no lock."""

    run: str = ""
    phase: str = "starting"  # one line: what the run is doing, e.g. "starting services: engine-0"
    iterations: int = 0
    iteration: int | None = None  # the one in work; None before the first
    version: int | None = None
    stage: str = ""  # of the iteration in work: collect, train, publish, evaluate
    stage_started_at: float = field(default_factory=time.time)
    episodes_done: int = 0  # of the episodes now asked for (a wave or an evaluation)
    episodes_wanted: int = 0
    services: dict[str, str] = field(default_factory=dict)  # name -> "ready, version 3"
    history: list[dict[str, Any]] = field(default_factory=list)  # the iterations/<k>.json records so far
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # the evaluations/<v>.json records so far
    prefect_url: str = ""  # page of the flow run
    mlflow_url: str = ""  # page of the MLflow run, or the command that opens it
    messages: list[str] = field(default_factory=list)  # warnings a person should see, oldest first

    def say(self, message: str) -> None:
        """Add a message for the person who watches."""
        self.messages = [*self.messages, message]

    def enter(self, stage: str) -> None:
        """The iteration in work enters a stage."""
        self.stage, self.stage_started_at = stage, time.time()
