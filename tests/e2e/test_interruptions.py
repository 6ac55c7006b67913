"""A run that is stopped, resumed, killed and resumed again gives what an undisturbed one gives.

One run goes through all of it; the tests look at what was there after each blow. It starts from the finished
run's cached warm start, so it also shows that a second run reuses it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tasks.store import Store
from tasks.trajectory import decode
from tests.e2e.conftest import Finished
from tests.e2e.machine import Command, Done, Machine, batches, check_consumption, consumed, hashes, versions

NAME, ITERATIONS, GROUPS, STALENESS = "interrupted", 6, 4, 1


@dataclass
class Story:
    """What happened, in order, and what the store held after each blow."""

    store: Store
    stopped: Done | None = None
    stop_s: float = 0.0  # from the signal to the end of the command
    status: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, str]] = field(
        default_factory=list
    )  # sha256 of batches, groups and complete versions
    groups: list[set[str]] = field(default_factory=list)  # finished, not consumed
    consumed: list[list[str]] = field(default_factory=list)
    left_after_kill: list[int] = field(default_factory=list)
    kill_s: float = 0.0  # from kill -9 to the end of the last child
    done: Done | None = None

    def note(self) -> None:
        """Look at the store."""
        taken = consumed(self.store)
        self.status.append(self.store.read_json("status.json"))
        folders = [f"batches/{k}" for k in batches(self.store)]
        folders += [f"weights/{v}" for v in versions(self.store)]
        self.files.append(hashes(self.store, "groups", *folders))
        self.groups.append(_stored(self.store) - set(taken))
        self.consumed.append(taken)


def _stored(store: Store) -> set[str]:
    return {f"{wave}/{i}" for wave in store.numbers("groups") for i in store.numbers(f"groups/{wave}")}


def _in_the_middle(store: Store, version: int) -> bool:
    """Version `version` is there, and groups that no batch consumed yet."""
    return version in versions(store) and bool(_stored(store) - set(consumed(store)))


@pytest.fixture(scope="module")
def story(machine: Machine, finished: Finished) -> Iterator[Story]:
    store = machine.store(NAME)
    story = Story(store)
    # A little latency, so that groups are in flight whenever the blow comes.
    first = machine.train(
        NAME,
        iterations=ITERATIONS,
        rollout__max_staleness=STALENESS,
        environments__latency__step_mean_s=0.3,
        environments__latency__step_sigma=0.8,
    )
    _stop_with_ctrl_c(first, story)
    story.note()
    second = machine.start("resume", NAME)
    _kill(second, story, 1 + max(versions(store)))
    story.note()
    story.done = machine.run("resume", NAME)
    story.note()
    return story


def _stop_with_ctrl_c(command: Command, story: Story) -> None:
    command.until(lambda: _in_the_middle(story.store, 1), "version 1")
    started = time.monotonic()
    command.signal(signal.SIGINT)
    story.stopped = command.wait(60)
    story.stop_s = time.monotonic() - started


def _kill(command: Command, story: Story, version: int) -> None:
    command.until(lambda: _in_the_middle(story.store, version), f"version {version}")
    started = time.monotonic()
    command.process.kill()
    command.process.wait()
    while (left := command.left()) and time.monotonic() - started < 60:
        time.sleep(0.2)
    story.left_after_kill, story.kill_s = left, time.monotonic() - started


# Ctrl-C


def test_ctrl_c_ends_the_run_in_time_with_its_exit_code_and_no_process_left(story: Story) -> None:
    assert story.stopped is not None
    print(f"{story.stop_s:.1f} s\n{story.stopped.out}\n{story.stopped.err}")
    assert story.stopped.code == 130
    assert story.stop_s < 15
    assert story.stopped.left == []


def test_a_stopped_run_says_so_and_how_to_continue(story: Story) -> None:
    assert story.stopped is not None
    assert story.status[0]["status"] == "stopped"
    assert f"rollart resume {NAME}" in story.stopped.err
    assert "Traceback" not in story.stopped.err + story.stopped.out


# kill -9


def test_children_of_a_killed_run_end_by_themselves(story: Story) -> None:
    print(f"{story.kill_s:.1f} s")
    assert story.left_after_kill == []
    assert story.kill_s < 20


# Afterwards


def test_the_resumed_run_ends_well(story: Story) -> None:
    assert story.done is not None
    print(f"{story.done.seconds:.0f} s\n{story.done.out}\n{story.done.err}")
    assert story.done.code == 0, story.done.err
    assert story.done.left == []
    assert story.status[-1]["status"] == "finished"
    assert [v for v in versions(story.store) if v >= 0] == list(range(ITERATIONS + 1))
    assert story.store.numbers("iterations") == list(range(ITERATIONS))


def test_every_group_is_consumed_once_and_fresh_enough_across_all_starts(story: Story) -> None:
    check_consumption(story.store, ITERATIONS, GROUPS, STALENESS)


def test_each_resume_goes_on_where_the_blow_fell(story: Story) -> None:
    counts = [len(taken) // GROUPS for taken in story.consumed]
    assert 1 <= counts[0] < counts[1] < counts[2] == ITERATIONS, counts
    for before, after in zip(story.consumed, story.consumed[1:], strict=False):
        assert after[: len(before)] == before


def test_what_was_written_before_a_blow_is_never_changed(story: Story) -> None:
    final = story.files[-1]
    for before in story.files:
        assert {name: final.get(name) for name in before} == before
        assert any(name.endswith("batches/0/manifest.json") for name in before)


def test_no_finished_group_is_lost(story: Story) -> None:
    """A group that was finished at the blow and still fresh for the next batch is trained on."""
    assert any(story.groups[:2]), "no blow fell while a group was waiting"
    for waiting, taken in zip(story.groups[:2], story.consumed, strict=False):
        next_batch = len(taken) // GROUPS
        for group in waiting:
            wave, index = group.split("/")
            trajectories, _ = decode(story.store.read(f"groups/{wave}/{index}.parquet"))
            oldest = min(t.oldest_version for t in trajectories)
            if next_batch - oldest <= STALENESS:
                assert group in story.consumed[-1], group


# Prefect


def test_prefect_shows_how_each_start_and_the_flows_inside_it_ended(story: Story, prefect_api: str) -> None:
    def runs(**which: Any) -> list[dict[str, Any]]:
        body = {"flow_runs": which, "sort": "START_TIME_ASC", "limit": 200}
        return httpx.post(f"{prefect_api}/flow_runs/filter", json=body, timeout=60).json()

    starts = runs(name={"any_": [f"train-{NAME}"]})
    assert [start["state_type"] for start in starts] == ["CANCELLED", "CRASHED", "COMPLETED"]
    inside = [run for run in runs(tags={"all_": [f"run:{NAME}"]}) if run["name"] != f"train-{NAME}"]
    times = [start["start_time"] for start in starts[1:]]
    for number, how in enumerate(["CANCELLED", "CRASHED", "COMPLETED"]):
        mine = [run for run in inside if sum(run["start_time"] > time for time in times) == number]
        assert {run["state_type"] for run in mine} == {"COMPLETED", how}, (number, mine)


# The warm start's cache


def test_a_second_run_with_the_same_settings_reuses_the_warm_start(story: Story, finished: Finished) -> None:
    assert [k for k in story.store.numbers("batches") if k < 0] == []
    assert [k for k in finished.store.numbers("batches") if k < 0] == [-1]
    first, second = (store.manifest("weights/0") for store in (finished.store, story.store))
    assert first is not None and second is not None
    assert second["files"] == first["files"]  # sizes and sha256
    assert second["probe"] == first["probe"]
